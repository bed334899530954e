"""Make stretches, rows and processes for tests of kept features."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from upriver.features import DiskFeatures, Row, Stretch, StretchFolder

STRETCH = Stretch(
    program="a" * 64,
    cut=3,
    chain=({"stage": "decode", "max_pixels": 100, "orient": True},),
    view=None,
    micro_batch=16,
    fingerprint={"torch": "2.13", "threads": "2"},
)
PLENTY = 1 << 30


def stretch(number: int) -> Stretch:
    """Return a stretch that differs by its cut."""
    return replace(STRETCH, cut=number)


def key(number: int) -> bytes:
    """Return a key."""
    return number.to_bytes(16, "big")


def row(number: int, nbytes: int = 256) -> Row:
    """Return a row of two tensors whose values depend on a number; a pixel count and float features."""
    generator = torch.Generator().manual_seed(number)
    features = torch.rand((1, nbytes // 16, 2, 2), generator=generator)
    return features.contiguous(memory_format=torch.channels_last), torch.tensor([number])


def rows(numbers: range, nbytes: int = 256) -> dict[bytes, Row]:
    """Return rows by key."""
    return {key(number): row(number, nbytes) for number in numbers}


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor as bytes, in the order of its indices."""
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return fresh.copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()


def assert_same(found: Row | None, wanted: Row) -> None:
    """Compare types, shapes, strides and bits."""
    assert found is not None and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert bits(one) == bits(other)


def assert_kept(folder: StretchFolder, wanted: Mapping[bytes, Row]) -> None:
    """Check that a folder has exactly these rows."""
    assert folder.keys == wanted.keys()
    for found, each in zip(folder.read(list(wanted)), wanted.values(), strict=True):
        assert_same(found, each)


def opened(root: Path, number: int = 3, *, budget: int = PLENTY, saved_s: float = 1.0) -> StretchFolder:
    """Open a stretch as a job of its own does."""
    return DiskFeatures(root, budget_bytes=budget).open(stretch(number), saved_s=saved_s)


def shards(root: Path) -> list[Path]:
    """Return all shards under a root."""
    return sorted(root.rglob("rows-*.safetensors"))


def disk_usage(root: Path) -> int:
    """Return the bytes of blocks of all files and folders below a root, as ``du`` counts them."""
    found = 0
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.lstat().st_blocks * 512
    return found


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """Run a function in a process of its own, which is killed at the end of the block at the latest."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forks beside threads, of which work uses none
        pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def result_of(pid: int) -> int:
    """Wait for a child: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
