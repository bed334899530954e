"""Check samples of any kind: made elsewhere with all visible properties, or made here, with the reason."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import os
import pathlib
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.examples import often
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import ConfigError
from upriver.rpc.local_server import EmbeddedServer

COUNT = 12


class Box(NamedTuple):
    at: Any
    size: Any


@dataclasses.dataclass
class Label:
    name: str
    box: Any


class Colour(enum.IntEnum):
    RED = 1


class Octets(bytes):
    """A subclass of bytes."""


class Image(torch.Tensor):
    """A subclass of tensors."""


@functools.cache
def stored() -> str:
    """Return the same file for every process, each of which writes the whole file."""
    path = pathlib.Path(tempfile.gettempdir()) / "upriver-kinds-of-samples.npy"
    mine = path.with_suffix(f".{os.getpid()}.npy")
    np.save(mine, np.arange(40.0).reshape(COUNT - 2, 4))
    return str(mine.replace(path))


def marked(index: int) -> torch.Tensor:
    found = torch.full((2,), float(index))
    found.label = index  # type: ignore[attr-defined]
    return found


def sharing(index: int) -> Any:
    base = torch.arange(12.0) + index
    return base[:6], base[3:9].view(2, 3), base[::2]


SENT: dict[str, Callable[[int], Any]] = {
    "no boxes": lambda index: np.zeros((0,), np.int64),
    "no boxes of four": lambda index: np.zeros((0, 4), np.float32),
    "none of some, turned": lambda index: np.zeros((3, 0, 2)).transpose(2, 0, 1),
    "none of one type and some of another": lambda index: (np.zeros(0, np.uint8), np.full(3, index)),
    "no tensor": lambda index: torch.zeros(0, 5, dtype=torch.bfloat16),
    "a slice of nothing": lambda index: torch.arange(4.0)[2:2],
    "nothing of anything": lambda index: ([], (), {}, "", b"", None),
    "boxes of some samples": lambda index: np.full((index % 3, 4), index, np.float32),
    "a number": lambda index: torch.tensor(float(index)),
    "numbers of numpy": lambda index: [
        np.float16(index),
        np.int8(index),
        np.bool_(index % 2),
        np.complex64(1j),
    ],
    "an array without dimensions": lambda index: np.array(index, np.int16),
    "complex": lambda index: torch.complex(torch.tensor([1.0, index]), torch.tensor([2.0, 3.0])),
    "truth": lambda index: (index % 2 == 0, torch.tensor([True, False]), np.array([[index > 3]])),
    "one row for all": lambda index: torch.tensor([[float(index)]]).expand(3, 4),
    "an unsigned type": lambda index: np.arange(3, dtype=np.uint16),
    "turned": lambda index: (torch.arange(6).view(2, 3).T + index, np.asfortranarray(np.eye(3) * index)),
    "views of one memory": sharing,
    "every second": lambda index: np.arange(20, dtype=np.int32)[index % 2 :: 2],
    "read only": lambda index: np.frombuffer(struct.pack("4d", *range(index, index + 4))),
    "from a file": lambda index: np.load(stored(), mmap_mode="r")[index % 10],
    "numbers without bound": lambda index: [
        2**64 + index,
        -(10**40),
        -0.0,
        float("nan"),
        float("-inf"),
        5e-324,
    ],
    "text": lambda index: {"née": "\x00 é 中", 1: None, 2.5: [], False: b"\xff\x00"},
}
HERE: dict[str, Callable[[int], Any]] = {
    "a leaf": lambda index: torch.full((2,), float(index), requires_grad=True),
    "in a graph": lambda index: torch.ones(2, requires_grad=True) * index,
    "a parameter": lambda index: torch.nn.Parameter(torch.full((2,), float(index))),
    "conjugate": lambda index: torch.complex(torch.ones(2), torch.full((2,), float(index))).conj(),
    "negative": lambda index: torch.complex(torch.ones(2), torch.ones(2) * index).conj().imag,
    "with an attribute": marked,
    "of a kind": lambda index: torch.full((2,), float(index)).as_subclass(Image),
    "sparse": lambda index: (torch.eye(3) * (index + 1)).to_sparse(),
    "by rows": lambda index: (torch.eye(3) * (index + 1)).to_sparse_csr(),
    "nested": lambda index: torch.nested.nested_tensor([torch.ones(2), torch.ones(index + 1)]),
    "quantized": lambda index: torch.quantize_per_tensor(torch.ones(3) * index, 0.1, 0, torch.qint8),
    "another order of bytes": lambda index: np.full(3, index, dtype=">f4"),
    "objects": lambda index: np.array([index, "a"], dtype=object),
    "of fields": lambda index: np.array([(index, 1.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "dates": lambda index: np.datetime64("2026-01-01") + index,
    "a day": lambda index: datetime.date(2026, 1, 1 + index),
    "masked": lambda index: np.ma.masked_less(np.arange(4.0), index),
    "a record": lambda index: np.rec.array([(index, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    "texts of numpy": lambda index: np.array(["a", "b"]),
    "a text of numpy": lambda index: np.str_(index),
    "a named tuple": lambda index: Box(torch.tensor(index), Box(1, 2)),
    "a dataclass": lambda index: Label("cat", Box(index, 1)),
    "a mapping of a kind": lambda index: collections.OrderedDict(a=index),
    "an enum": lambda index: Colour.RED,
    "bytes of a kind": lambda index: Octets(b"x"),
    "bytes that can be written": lambda index: bytearray(b"x"),
    "a complex number": lambda index: complex(index, 1),
    "a set": lambda index: {index},
    "a path": lambda index: pathlib.PurePosixPath("a") / str(index),
    "a type": lambda index: torch.float32,
    "a size": lambda index: torch.Size([index]),
    "half a pair": lambda index: f"\ud800{index}",
    "a key of many": lambda index: {(1, 2): index},
}
KINDS = {**SENT, **HERE}


class OfKind(torch.utils.data.Dataset[Any]):
    """Return samples of one kind, each with its number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, KINDS[self.kind](index)


class Seldom(OfKind):
    """Return a sample of the kind now and then."""

    def __getitem__(self, index: int) -> Any:
        return index, KINDS[self.kind](index) if index % 5 == 4 else 0


def as_they_are(rows: list[Any]) -> list[Any]:
    return rows


def alike(one: Any, other: Any) -> bool:
    """Return whether both are the same in every property that code may use."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor() if one.is_nested or one.layout is not torch.strided or one.is_quantized:
            return torch.equal(one.to_dense(), other.to_dense()) if one.is_sparse else str(one) == str(other)
        case torch.Tensor():
            seen = [
                (
                    each.dtype,
                    each.shape,
                    each.requires_grad,
                    each.is_conj(),
                    each.is_neg(),
                    vars(each),
                    _order(each),
                )
                for each in (one, other)
            ]
            return seen[0] == seen[1] and torch.equal(one, other)
        case np.ndarray():
            orders = [_order(each) for each in (one, other)]
            return one.dtype == other.dtype and orders[0] == orders[1] and one.tolist() == other.tolist()
        case np.generic():
            return one.dtype == other.dtype and one.tobytes() == other.tobytes()
        case float():
            return struct.pack("d", one) == struct.pack("d", other)
        case dict():
            return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
        case Label():
            return alike(vars(one), vars(other))
    return bool(one == other)


def _order(value: Any) -> Any:
    if 0 in value.shape:
        return value.shape
    if isinstance(value, np.ndarray):
        return value.shape, [
            each for size, each in zip(value.shape, np.empty_like(value).strides, strict=True) if size > 1
        ]
    return value.shape, [
        each for size, each in zip(value.shape, torch.empty_like(value).stride(), strict=True) if size > 1
    ]


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start_worker(["tests.dataloader"], workers=1)
    yield started
    started.close()


def loader(worker: EmbeddedServer | None, kind: str, *, name: str = "OfKind", **more: Any) -> DataLoader:
    if worker is not None:
        more = {"workers": [worker.url], "offload": Offloading(candidate="p2", ratio=0.5), **more}
    data = dataset(f"tests.dataloader.test_kinds_of_samples:{name}", kind=kind)
    return DataLoader(data, batch_size=4, seed=3, **{"collate_fn": as_they_are, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_sample_made_elsewhere_is_as_one_made_here_or_none_is(worker: EmbeddedServer, kind: str) -> None:
    here = loader(worker, kind)
    assert alike(list(here), list(loader(None, kind)))
    why = here.report.why_not.get(worker.url, "")
    if kind in SENT:
        assert here.report.made[worker.url] == COUNT / 2 and not why
    else:
        assert here.report.made == {"here": COUNT}
        assert "cannot be sent" in why


@pytest.mark.parametrize("kind", ["a leaf", "conjugate", "with an attribute", "a named tuple", "half a pair"])
def test_sample_that_cannot_be_sent_now_and_then_is_made_here(worker: EmbeddedServer, kind: str) -> None:
    here = loader(worker, kind, name="Seldom")
    assert alike(list(here), list(loader(None, kind, name="Seldom")))
    assert 0 < here.report.made[worker.url] < COUNT / 2


@pytest.mark.parametrize(
    "kind",
    often(["no boxes", "no tensor", "boxes of some samples", "from a file", "turned"], "no boxes", "turned"),
)
def test_sample_made_by_a_loader_process_is_as_one_made_elsewhere(worker: EmbeddedServer, kind: str) -> None:
    assert alike(list(loader(worker, kind, num_workers=1)), list(loader(None, kind)))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", often(["conjugate", "negative"], "conjugate"))
def test_view_made_by_a_loader_process_has_the_numbers_of_one_here(
    worker: EmbeddedServer, kind: str, elsewhere: bool
) -> None:
    """PyTorch's own loader returns the numbers under the view."""
    there = loader(worker if elsewhere else None, kind, num_workers=1)
    for one, other in zip(there, loader(None, kind), strict=True):
        assert all(torch.equal(mine[1], theirs[1]) for mine, theirs in zip(one, other, strict=True))


def test_tensor_in_a_graph_made_by_a_loader_process_is_an_error() -> None:
    """PyTorch's own loader waits for ever at this point."""
    with pytest.raises(ConfigError, match="cannot send a tensor with the graph"):
        list(loader(None, "in a graph", num_workers=1))


@pytest.mark.parametrize("kind", ["no boxes", "a leaf", "in a graph", "one row for all"])
def test_batch_collated_elsewhere_requires_a_gradient_as_one_here(worker: EmbeddedServer, kind: str) -> None:
    more = {"collate_fn": default_collate}
    there = loader(worker, kind, offload=Offloading(candidate="p3", ratio=0.5), **more)
    for one, other in zip(there, loader(None, kind, **more), strict=True):
        assert one[1].requires_grad == other[1].requires_grad and torch.equal(one[1], other[1])
