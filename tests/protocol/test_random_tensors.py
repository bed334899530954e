"""Send tensors as networks make them, views of views of shared storage, from tier to tier to tier."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from upriver.errors import ProtocolError
from upriver.program.graph.alignment import as_shipped
from upriver.protocol import Caps, aligned_empty, encode, lay_out, read_frame
from upriver.tensor_memory import ITEM_NBYTES
from upriver.types import MicroBatch

View = Callable[[torch.Tensor, int], torch.Tensor]


def _some_dim(tensor: torch.Tensor, number: int) -> int:
    return number % tensor.dim() if tensor.dim() else 0


def _narrow(tensor: torch.Tensor, number: int) -> torch.Tensor:
    dim = _some_dim(tensor, number)
    start = min(number % 3, tensor.shape[dim])
    return tensor.narrow(dim, start, tensor.shape[dim] - start)


def _expand(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.unsqueeze(number % (tensor.dim() + 1)).expand(
        *(
            size if size != 1 else 2 + number % 2
            for size in tensor.unsqueeze(number % (tensor.dim() + 1)).shape
        )
    )


# Operations by which networks change a tensor without a copy. Each takes a number that selects the place.
VIEWS: dict[str, View] = {
    "transposed": lambda t, n: t.transpose(_some_dim(t, n), _some_dim(t, n + 1)),
    "sliced": _narrow,
    "stepped": lambda t, n: t[:: 2 + n % 2],
    "expanded": _expand,
    "halved": lambda t, n: t.chunk(2, _some_dim(t, n))[-1],
    "selected": lambda t, n: t.select(_some_dim(t, n), -1),
    "diagonal": lambda t, n: t.diagonal(n % 2, 0, 1),
    "windowed": lambda t, n: t.unfold(_some_dim(t, n), 2, 1),
    "flat": lambda t, n: t.reshape(-1),
    "emptied": lambda t, n: t.narrow(_some_dim(t, n), 0, 0),
    "copied": lambda t, n: t.clone(),
    "copied_channels_last": lambda t, n: (
        t.reshape(1, 1, 1, -1).expand(2, 3, 1, -1).contiguous(memory_format=torch.channels_last)
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A recipe of a tensor: the storage it starts from, and the views applied to it."""

    base: int
    views: tuple[tuple[str, int], ...]

    def make(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor; skip a view that does not fit the tensor."""
        made = bases[self.base % len(bases)]
        for name, number in self.views:
            try:
                made = VIEWS[name](made, number)
            except (RuntimeError, IndexError):
                continue
        return made


@dataclass(frozen=True)
class Base:
    """A storage that starts ``skew`` elements past a 64-byte boundary: random bytes, or numbers."""

    dtype: str
    shape: tuple[int, ...]
    skew: int
    numbers: bool

    def make(self, seed: int) -> torch.Tensor:
        """Return a dense tensor on the storage."""
        dtype = getattr(torch, self.dtype)
        count = torch.Size(self.shape).numel()
        whole = aligned_empty((count + self.skew) * dtype.itemsize)
        most = 2 if dtype is torch.bool else 256
        generator = torch.Generator().manual_seed(seed)
        whole.copy_(torch.randint(0, most, whole.shape, dtype=torch.uint8, generator=generator))
        # A separate storage, as memory of another library would be.
        storage = whole.untyped_storage()[self.skew * dtype.itemsize :]
        made = torch.empty(0, dtype=dtype).set_(storage, 0, self.shape)
        if self.numbers and dtype.is_floating_point:
            made.copy_(torch.randn(self.shape, generator=generator))
        return made


bases = st.builds(
    Base,
    dtype=st.sampled_from(sorted(ITEM_NBYTES)),
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    skew=st.sampled_from([0, 0, 0, 1, 3, 8, 17]),
    numbers=st.just(False),
)
numbers = st.builds(
    Base,
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    skew=st.sampled_from([0, 1, 3, 8, 17]),
    numbers=st.just(True),
)
recipes = st.builds(
    Recipe,
    base=st.integers(0, 2),
    views=st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 5)), max_size=4).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, of: st.SearchStrategy[Base] = bases) -> list[torch.Tensor]:
    made = [base.make(seed) for seed, base in enumerate(draw(st.lists(of, min_size=1, max_size=3)))]
    return [recipe.make(made) for recipe in draw(st.lists(recipes, max_size=6))]


def hop(sent: Sequence[torch.Tensor], caps: Caps | None = None) -> tuple[torch.Tensor, ...]:
    """Return these tensors as another tier receives them."""
    batch = MicroBatch(ids=(7,), position=1, tensors=tuple(sent))
    body = b"".join(bytes(part) for part in encode(batch))
    got = read_frame(io.BytesIO(body), caps or Caps())
    assert isinstance(got, MicroBatch)
    return got.tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def distances(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how far apart any two tensors start, where they share storage."""
    full = [tensor for tensor in tensors if tensor.numel()]
    return [
        a.data_ptr() - b.data_ptr()
        if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        else None
        for a in full
        for b in full
    ]


def assert_same(got: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(bits(one), bits(other))
        if other.numel():
            assert one.data_ptr() % 64 == other.data_ptr() % 64


def dense_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes between each storage's first and last used element, its start rounded down to 64."""
    used: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage().data_ptr()
        low = tensor.data_ptr() - storage
        span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        low, high = low - low % 64, low + span * tensor.itemsize
        before = used.get(storage, (low, high))
        used[storage] = (min(before[0], low), max(before[1], high))
    return sum(high - low + 63 + 64 for low, high in used.values())  # and a skew and padding for each


@settings(max_examples=examples(200))
@given(tensors())
def test_tensors_cross_any_number_of_tiers_unchanged(sent: list[torch.Tensor]) -> None:
    once = hop(sent)
    twice = hop(once)
    for got in (once, twice):
        assert_same(got, sent)
        assert distances(got) == distances(sent)
    assert lay_out(once).checksum() == lay_out(twice).checksum()


@settings(max_examples=examples(100))
@given(tensors())
def test_no_more_than_the_used_range_crosses_and_the_caps_say_exactly_how_much(
    sent: list[torch.Tensor],
) -> None:
    nbytes = lay_out(sent).nbytes
    assert nbytes <= dense_bytes(sent)
    largest = max((tensor.numel() * tensor.itemsize for tensor in sent), default=0)
    # A size of zero hides the other sizes from numel(); the reader checks them all the same.
    enough = max(nbytes, largest, *(_unhidden(tensor) for tensor in sent), 0, 0)
    assert_same(hop(sent, Caps(payload_bytes=enough)), sent)
    if nbytes:
        with pytest.raises(ProtocolError, match="at most"):
            hop(sent, Caps(payload_bytes=nbytes - 1))


def _unhidden(tensor: torch.Tensor) -> int:
    return torch.Size(max(size, 1) for size in tensor.shape).numel() * tensor.itemsize


@settings(max_examples=examples(100))
@given(tensors(), st.integers(0, 5))
def test_writing_into_one_tensor_shows_in_those_that_share_it(sent: list[torch.Tensor], number: int) -> None:
    got = hop(sent)
    full = [i for i, tensor in enumerate(sent) if tensor.numel()]
    if not full:
        return
    chosen = full[number % len(full)]
    for side in (sent, got):
        side[chosen][(0,) * side[chosen].dim()] = 1
    for one, other in zip(got, sent, strict=True):
        assert torch.equal(bits(one), bits(other))


@settings(max_examples=examples(100))
@given(tensors(numbers))
def test_kernels_give_the_same_bits_on_both_sides(sent: list[torch.Tensor]) -> None:
    for one, other in zip(hop(sent), sent, strict=True):
        if not other.dim():
            continue
        assert torch.equal(bits(one.sum(0)), bits(other.sum(0)))
        assert torch.equal(bits(one.softmax(-1)), bits(other.softmax(-1)))
        if other.dim() > 1:
            assert torch.equal(bits(one @ one.mT), bits(other @ other.mT))


@settings(max_examples=examples(100))
@given(tensors(), tensors(numbers))
def test_what_a_proof_takes_for_sent_is_what_a_frame_gives(
    some: list[torch.Tensor], others: list[torch.Tensor]
) -> None:
    sent = [*some, *others]
    before = [bits(tensor) for tensor in sent]
    taken, got = as_shipped(sent), hop(sent)
    assert_same(taken, got)
    assert distances(taken) == distances(got)
    for tensor in taken:
        if tensor.numel():
            tensor[(0,) * tensor.dim()] = 1
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, sent, strict=True)), "copies share memory"
