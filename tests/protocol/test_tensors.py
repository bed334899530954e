"""Check that tensors cross bit for bit: values, strides, alignment, shared storage."""

import io

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from upriver.errors import ProtocolError
from upriver.protocol import Caps, FrameDecoder, aligned_empty, encode, lay_out, read_frame
from upriver.tensor_memory import ITEM_NBYTES
from upriver.types import MicroBatch


def batch_of(*tensors):
    return MicroBatch(ids=(3, 1), position=2, tensors=tensors, skipped=(1,))


def wire(batch):
    return b"".join(bytes(part) for part in encode(batch))


def storage_bytes(count, seed, skew):
    """Return a storage whose start is ``skew`` bytes past a 64-byte boundary, with valid bools in it."""
    whole = aligned_empty(count + skew)
    generator = torch.Generator().manual_seed(seed)
    whole.copy_(torch.randint(0, 2, (count + skew,), dtype=torch.uint8, generator=generator))
    return whole.untyped_storage()[skew : skew + count]


@st.composite
def views(draw, storage):
    """Draw any strided view of ``storage``: gaps, stride 0, overlaps, empty, any dtype that may cross."""
    fitting = [name for name, nbytes in ITEM_NBYTES.items() if storage.data_ptr() % nbytes == 0]
    dtype = getattr(torch, draw(st.sampled_from(fitting)))
    room = storage.nbytes() // dtype.itemsize
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    if 0 in shape:
        last = 0
    offset = draw(st.integers(0, max(0, room - last - 1)))
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


@st.composite
def batches(draw):
    storages = [
        storage_bytes(draw(st.integers(2048, 4096)), draw(st.integers(0, 99)), draw(st.integers(0, 70)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    tensors = draw(st.lists(st.sampled_from(storages).flatmap(views), max_size=5))
    return batch_of(*tensors)


def bits(tensor):
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return fresh.copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_same(got, sent):
    assert (got.ids, got.position, got.skipped) == (sent.ids, sent.position, sent.skipped)
    assert len(got.tensors) == len(sent.tensors)
    for one, other in zip(got.tensors, sent.tensors, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert torch.equal(bits(one), bits(other))
        if other.numel():
            assert one.data_ptr() % 64 == other.data_ptr() % 64


def distances(tensors):
    """Return which tensors share storage, and how far apart they start."""
    full = [tensor for tensor in tensors if tensor.numel()]
    return [
        (
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(),
            a.data_ptr() - b.data_ptr()
            if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            else 0,
        )
        for a in full
        for b in full
    ]


@settings(max_examples=examples(150))
@given(batches(), st.integers(1, 5000))
def test_round_trip(batch, chunk):
    body = wire(batch)
    got = read_frame(io.BytesIO(body))
    assert_same(got, batch)
    assert distances(got.tensors) == distances(batch.tensors)
    decoder = FrameDecoder()
    fed = [message for i in range(0, len(body), chunk) for message in decoder.feed(body[i : i + chunk])]
    assert decoder.between_frames
    assert len(fed) == 1
    assert_same(fed[0], batch)


def test_shared_storage_is_sent_once_and_stays_shared():
    base = torch.arange(1024, dtype=torch.float32)
    got = read_frame(io.BytesIO(wire(batch_of(base, base[512:], base.view(32, 32).t()))))
    assert lay_out([base, base[512:], base.view(32, 32).t()]).nbytes == base.nbytes
    got.tensors[0][512] = -1
    assert got.tensors[1][0] == -1


def test_only_the_used_range_is_sent():
    base = torch.arange(100_000, dtype=torch.float32)
    assert lay_out([base[50_000:50_010]]).nbytes <= 64 + 40


def test_a_stride_of_zero_costs_one_element():
    assert lay_out([torch.full((), 2.0).expand(1000, 1000)]).nbytes == 4


def test_nothing_is_copied_to_send():
    tensor = torch.zeros(1000)
    parts = encode(batch_of(tensor))[1:]
    tensor[5] = 7.0
    assert b"".join(parts) == tensor.numpy().tobytes()


def test_layout_into_a_buffer_is_the_payload():
    tensors = [torch.arange(10), torch.arange(3, dtype=torch.uint8)]
    layout = lay_out(tensors)
    buffer = bytearray(layout.nbytes)
    assert layout.write_into(memoryview(buffer)) == layout.checksum()
    assert bytes(buffer) == b"".join(layout.parts)
    with pytest.raises(ProtocolError, match="does not fit"):
        layout.write_into(memoryview(bytearray(layout.nbytes - 1)))


def test_lazy_conjugation_is_made_real():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    got = read_frame(io.BytesIO(wire(batch_of(tensor))))
    assert torch.equal(got.tensors[0], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.frombuffer(bytearray(17), dtype=torch.float64, offset=1),
    ],
)
def test_what_cannot_cross_is_named(tensor):
    with pytest.raises(ProtocolError, match=r"can(not)? be sent|must lie at a multiple of 8"):
        encode(batch_of(tensor))


def test_pieces_are_counted():
    body = wire(batch_of(torch.zeros(1_000_000)))
    seen = []
    read_frame(io.BytesIO(body), on_bytes=seen.append)
    assert sum(seen) == len(body)
    assert max(seen) <= 256 * 1024


def test_allocation_waits_for_the_caps():
    body = wire(batch_of(torch.zeros(1000)))
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return aligned_empty(nbytes)

    with pytest.raises(ProtocolError, match="at most 3999 bytes"):
        read_frame(io.BytesIO(body), Caps(payload_bytes=3999), allocate=allocate)
    assert asked == []
    read_frame(io.BytesIO(body), Caps(payload_bytes=4000), allocate=allocate)
    assert asked == [4000]
