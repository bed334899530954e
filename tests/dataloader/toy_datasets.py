"""Datasets as users write them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset


class Noisy(Dataset[Any]):
    """Draw from all three generators for each sample, each a different number of times."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.rand(3),
            "numpy": np.random.rand(2).astype(np.float32),
            "python": random.random(),
            "label": (index % 3, "abc"[index % 3]),
        }


class Divided(Dataset[Any]):
    """Read here and compute there, both with random draws."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        return bytes([index % 256, random.randrange(256)])

    def transform(self, raw: bytes) -> tuple[torch.Tensor, float]:
        return torch.tensor(list(raw)) + torch.randint(100, (2,)), float(np.random.rand())

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return self.transform(self.read(index))


class Chancy(Divided):
    """Continue in the transform with the numbers after those of the read."""

    def read(self, index: int) -> tuple[int, float, float]:
        return index, random.gauss(0, 1), float(torch.rand(1)) if index % 2 else float(np.random.randn())

    def transform(self, raw: Any) -> Any:
        return raw, random.gauss(0, 1), random.random(), float(np.random.randn()), torch.rand(2)


class Plain(Dataset[Any]):
    """Draw nothing: PyTorch's own loader gives the same samples."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, dict[str, Any]]:
        return torch.arange(3) * index, index, {"name": f"n{index}", "square": np.float64(index**2)}


class Broken(Plain):
    """Fail at some samples."""

    def __init__(self, count: int, bad: Container[int]) -> None:
        super().__init__(count)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise LookupError(f"sample {index} is gone")
        return super().__getitem__(index)


class Mute(Plain):
    """Raise an error that names no sample at some samples, some of them on workers only."""

    def __init__(self, count: int, bad: Container[int] = (), bad_there: Container[int] = ()) -> None:
        super().__init__(count)
        self.bad, self.bad_there = bad, bad_there

    def __getitem__(self, index: int) -> Any:
        there = os.environ.get("MUTE_API_KEY")
        if index in self.bad or (there and index in self.bad_there):
            raise ValueError(f"bad {there}")
        return super().__getitem__(index)


def mute_rows(rows: list[Any]) -> Any:
    """Fail to collate, with an error that names no sample."""
    raise ValueError("bad")


def same(one: Any, other: Any) -> bool:
    """Return whether two batches have the same bits, types, and memory order."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other) and order(one) == order(other)
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other) and order(one) == order(other)
        case dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def order(value: torch.Tensor | np.ndarray[Any, Any]) -> list[int]:
    """Return the strides without gaps between elements, where they matter."""
    if isinstance(value, torch.Tensor):
        strides = torch.empty_like(value, device="meta").stride()
    else:
        strides = tuple(each // value.itemsize for each in np.empty_like(value).strides)
    shape = value.shape if 0 not in value.shape else ()
    return [stride for size, stride in zip(shape, strides, strict=False) if size > 1]


class OwnGenerator(Plain):
    """Draw from a generator of its own, which only the dataset itself seeds."""

    def __init__(self, count: int, seed: int | None = None) -> None:
        super().__init__(count)
        self._generator = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> Any:
        return float(self._generator.random())


class OfProcess(Plain):
    """Return the same samples within a process, and others in the next process."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


class Pictures(Plain):
    """Return samples that cannot be sent."""

    def __getitem__(self, index: int) -> Any:
        return Image.new("RGB", (2, 2))


class Slow(Divided):
    """Take long enough that offloading pays."""

    def transform(self, raw: bytes) -> tuple[torch.Tensor, float]:
        time.sleep(0.01)
        return super().transform(raw)


VICTIM = "UPRIVER_TEST_VICTIM"
"""Environment variable of a worker whose processes stop at their first sample."""


class Held(Divided):
    """Once a file ``armed`` exists, record which process makes which sample; a victim never finishes."""

    def __init__(self, count: int, folder: str) -> None:
        super().__init__(count)
        self.folder = Path(folder)

    def transform(self, raw: bytes) -> tuple[torch.Tensor, float]:
        if (self.folder / "armed").exists():
            victim, parent = VICTIM in os.environ, os.getppid()
            (self.folder / f"{'victim' if victim else 'other'}-{raw[0]}-{uuid4()}").touch()
            while victim and os.getppid() == parent:
                time.sleep(0.01)
        return super().transform(raw)


class Chained(Divided):
    """A pipeline by the names of its steps, each of which draws from another generator or from none."""

    def __init__(self, count: int, reads: Sequence[str], computes: Sequence[str]) -> None:
        super().__init__(count)
        self.reads, self.computes = reads, computes

    def read(self, index: int) -> Any:
        return _through(self.reads, torch.arange(6) + index)

    def transform(self, raw: Any) -> Any:
        return _through(self.computes, raw)


STEPS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda value: value + torch.rand(value.shape),
    "numpy": lambda value: value * float(np.random.rand()),
    "python": lambda value: value.roll(random.randrange(9)),
    "double": lambda value: value * 2,
    "round": lambda value: value.to(torch.int16),
    "float": lambda value: value.to(torch.float64),
}


def _through(names: Sequence[str], value: Any) -> Any:
    for name in names:
        value = STEPS[name](value)
    return value


class Images(Plain):
    """Return small pictures, cropped and flipped at random."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.arange(3 * 10 * 10, dtype=torch.float32).reshape(3, 10, 10) * (index % 7 + 1) % 11
        top, left = torch.randint(3, (2,)).tolist()
        picture = pixels[:, top : top + 8, left : left + 8]
        return (picture.flip(2) if random.random() < 0.5 else picture) / 11 + torch.rand(1) / 10, index % 4


class Stream(IterableDataset[Any]):
    """Have no samples by index."""

    def __iter__(self) -> Any:
        return iter(())


class Buckets:
    """Make batches of several sizes, drawn when iteration starts, not at the first request."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist()
        return iter([order[:5], *([each] for each in order[5:9]), order[9:]])
