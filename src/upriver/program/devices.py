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

    To an accelerator it goes from page-locked memory on a stream of its own, beside whatever computes there,
    and has arrived when this returns: any stream may read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    stream = _copying(device)
    with torch.cuda.stream(stream):
        there = torch.empty_like(tensor, device=device)
        source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, there))
        for start in range(0, source.nbytes, PIECE_BYTES):
            piece = source[start : start + PIECE_BYTES].pin_memory()
            target[start : start + PIECE_BYTES].copy_(piece, non_blocking=True)
    stream.synchronize()
    there.record_stream(torch.cuda.current_stream(device))
    return there


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """One for each accelerator: memory that is given back serves the stream that it was taken on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _devices() -> list[str]:
    """The processor, and each accelerator by its type and by its number."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    numbered = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return ["cpu", accelerator.type, *numbered]
