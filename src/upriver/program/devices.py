"""Where a program can run: asked once, before anything is put there; and the random numbers of devices."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache

import torch

from upriver.errors import ConfigError

PIECE_BYTES = 16 << 20
"""Of page-locked memory: one is filled while the one before is copied to an accelerator."""


def check_device(device: str | torch.device) -> torch.device:
    """A device that PyTorch can compute on here.

    Raises:
        ConfigError: If it cannot; the message names the devices that are there.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # an index alone names whatever accelerator torch was built for
        raise ConfigError(
            f"device {device!r} is none that torch knows; it sees here: {', '.join(_devices())}"
        ) from None
    if found.type == "cpu":
        return found  # without a look at accelerators: it would bind a process to one
    wanted = found.type if found.index is None else f"{found.type}:{found.index}"
    seen = _devices()
    if wanted not in seen:
        raise ConfigError(f"device {str(device)!r} is not available here; torch sees: {', '.join(seen)}")
    return found


def random_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Leave the random state of the processor, and of these devices, as it was."""
    return torch.random.fork_rng(devices=list({device for device in devices if device.type == "cuda"}))


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous tensor on a device.

    To an accelerator it goes by way of page-locked memory on a stream of its own, beside whatever computes
    there, and has arrived when this returns: any stream may read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    try:
        pieces = [
            torch.empty(min(tensor.nbytes, PIECE_BYTES), dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
    except RuntimeError:  # no more memory may be locked
        return tensor.to(device)
    stream = copying(device)
    copied = [stream.record_event() for _ in pieces]
    with torch.cuda.stream(stream):
        there = torch.empty_like(tensor, device=stream.device)
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, there))
        for number, start in enumerate(range(0, source.nbytes, PIECE_BYTES)):
            part = source[start : start + PIECE_BYTES]
            copied[number % 2].synchronize()
            piece = pieces[number % 2][: part.nbytes].copy_(part)
            target[start : start + PIECE_BYTES].copy_(piece, non_blocking=True)
            copied[number % 2].record(stream)
    stream.synchronize()
    there.record_stream(torch.cuda.current_stream(stream.device))
    return there


def copying(device: torch.device) -> torch.cuda.Stream:
    """An accelerator's stream for copies to it.

    There is one: memory that is given back serves the stream that it was taken on.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _copying(index)


@cache
def _copying(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _devices() -> list[str]:
    """The processor, and each accelerator by its type and by its number."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    numbered = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return ["cpu", accelerator.type, *numbered]
