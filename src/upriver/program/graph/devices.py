"""Check devices, copy tensors to accelerators, and keep or seed the random generators."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy import random as numpy_random

from upriver.errors import ConfigError

PIECE_BYTES = 4 << 20
"""Size of a piece of page-locked memory. One piece is filled while the previous one is copied to an
accelerator. On an H100, locking 16 MiB took 11 ms. Copying them from there took 0.4 ms, and from other memory
2.3 ms."""


def check_device(device: str | torch.device) -> torch.device:
    """Return a device that PyTorch can compute on here.

    Raises:
        ConfigError: If it cannot. The message names the available devices.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # an index alone names the accelerator that torch was built for
        raise ConfigError(
            f"device {device!r} is none that torch knows; it sees here: {', '.join(_devices())}"
        ) from None
    if found.type == "cpu":
        return found  # does not query accelerators, which would bind a process to one
    wanted = found.type if found.index is None else f"{found.type}:{found.index}"
    seen = _devices()
    if wanted not in seen:
        raise ConfigError(f"device {str(device)!r} is not available here; torch sees: {', '.join(seen)}")
    return found


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the shared generators of Python, NumPy and torch's CPU on exit."""
    states = random.getstate(), numpy_random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy_random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Restore all shared generators on exit, including those of accelerators."""
    accelerators = torch_states()[1:]
    try:
        with generators_kept():
            yield
    finally:
        for number, state in enumerate(accelerators):
            torch.cuda.set_rng_state(state, number)


def seed(number: int) -> None:
    """Seed all shared generators."""
    random.seed(number)
    numpy_random.seed(number)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # else it would be seeded later
        torch.cuda.manual_seed_all(number)


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's shared generators: the CPU's, then one for each accelerator in use."""
    accelerators = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.default_generator.get_state(), *accelerators]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor on a device.

    A copy to an accelerator runs in parallel with its computation. It is complete on return, so any stream
    may read the tensor.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    stream = copying(device)
    with torch.cuda.stream(stream):
        there = torch.empty_like(tensor, device=stream.device)
    copy_beside(tensor, there)
    there.record_stream(torch.cuda.current_stream(stream.device))
    return there


def copy_beside(tensor: torch.Tensor, there: torch.Tensor, *, after: torch.cuda.Event | None = None) -> None:
    """Copy a tensor from CPU memory to an accelerator, in parallel with computation there.

    The copy goes through page-locked memory on a stream of its own, and is complete on return. All copies
    reuse the same two pieces of page-locked memory, because locking a page takes several times longer than
    copying it.

    Args:
        there: Memory on the accelerator, of the same shape.
        after: Event on the accelerator that must complete before the write.
    """
    stream = copying(there.device)
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        tensor = tensor.to(there.dtype)
        if not (
            tensor.is_contiguous() and there.is_contiguous() and _copied_by_pieces(tensor, there, stream)
        ):
            there.copy_(tensor)
    stream.synchronize()


def _copied_by_pieces(tensor: torch.Tensor, there: torch.Tensor, stream: torch.cuda.Stream) -> bool:
    """Fill one page-locked piece while the previous one is copied. Return False if none can be locked."""
    try:
        pieces = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)
        ]
    except RuntimeError:
        return False
    copied = [stream.record_event() for _ in pieces]
    source, target = (each.reshape(-1).view(torch.uint8) for each in (tensor, there))
    for number, start in enumerate(range(0, source.nbytes, PIECE_BYTES)):
        part = source[start : start + PIECE_BYTES]
        copied[number % 2].synchronize()
        piece = pieces[number % 2][: part.nbytes]
        np.copyto(piece.numpy(), part.numpy())  # by this thread alone, without blocking others
        target[start : start + PIECE_BYTES].copy_(piece, non_blocking=True)
        copied[number % 2].record(stream)
    return True


def make_ready(device: torch.device) -> None:
    """Initialize an accelerator for its first weight. This takes a third of a second in a fresh process.

    Do nothing if CUDA is initialized already, or the device is not a CUDA device. Any thread may call this in
    parallel with other work.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if device.type == "cuda" and not started:  # so no other accelerator is chosen yet
        copy_beside(*(torch.empty(1, dtype=torch.uint8, device=each) for each in ("cpu", device)))


def moment(device: torch.device) -> Any:
    """Return the present place in a device's queue of work, for :func:`seconds_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device).record_event(event)


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two moments of one device. Wait until it has reached the second one."""
    if isinstance(ended, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def copying(device: torch.device) -> torch.cuda.Stream:
    """Return an accelerator's stream for copies to it.

    There is one stream: freed memory is reused only on the stream that allocated it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _copying(index)


@cache
def _copying(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _devices() -> list[str]:
    """Return the CPU, and each accelerator by its type and by its number."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    numbered = [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return ["cpu", accelerator.type, *numbered]
