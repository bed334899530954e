"""Check that frames refuse every deviation, and only with a ProtocolError."""

import contextlib
import io
import json
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from upriver.errors import (
    AccessDenied,
    BadSample,
    ObjectChanged,
    Overloaded,
    ProtocolError,
    StoreError,
    UpriverError,
    WorkerCrashed,
)
from upriver.protocol import (
    PREFIX_NBYTES,
    VERSION,
    Caps,
    DatasetRef,
    End,
    FrameDecoder,
    FrameKind,
    Load,
    RunRequest,
    aligned_empty,
    decode_info,
    decode_versioned,
    encode,
    error_body,
    error_from,
    frame_head,
    parse_prefix,
    program_head,
    read_frame,
    split_program_head,
    valid_digest,
)
from upriver.types import MicroBatch, Timings

BATCH = MicroBatch(
    ids=(4, 5),
    position=1,
    tensors=(
        torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
        torch.tensor([True, False]),
        torch.arange(3),
    ),
)
REQUEST = RunRequest(
    micro_batches=((1, 2), (3,)),
    start=-2,
    stop=0,
    micro_batch=2,
    dataset=DatasetRef(store="default", digest="0" * 64),
)


def wire(message):
    return b"".join(bytes(part) for part in encode(message))


def read(body, caps=Caps()):  # noqa: B008
    return read_frame(io.BytesIO(body), caps)


def with_header(change, payload=None):
    """Return the frame of BATCH with its header changed by ``change``."""
    body = wire(BATCH)
    header_nbytes, payload_nbytes = struct.unpack(">8xIQ", body[:PREFIX_NBYTES])
    header = json.loads(body[PREFIX_NBYTES : PREFIX_NBYTES + header_nbytes])
    change(header)
    rest = body[PREFIX_NBYTES + header_nbytes :] if payload is None else payload
    return frame_head(FrameKind.DATA, json.dumps(header).encode(), payload_nbytes) + rest


def test_every_kind_comes_back():
    timings = Timings(phases={"read": 0.5, "forward": 0.25}, stages={-1: 0.1, 3: 0.2}, k=1.5)
    assert read(wire(timings)) == timings
    assert read(wire(REQUEST)) == REQUEST
    assert read(wire(End())) == End()
    error = read(wire(BadSample(sample=7, object_name="a.tar", reason="truncated")))
    assert isinstance(error, BadSample)
    assert (error.sample, error.object_name, error.reason) == (7, "a.tar", "truncated")


def test_a_stream_of_frames_in_any_chunks():
    stream = wire(BATCH) + wire(Timings()) + wire(End())
    for chunk in (1, 7, len(stream)):
        decoder = FrameDecoder()
        kinds = [
            type(message)
            for i in range(0, len(stream), chunk)
            for message in decoder.feed(stream[i : i + chunk])
        ]
        assert kinds == [MicroBatch, Timings, End]
        assert decoder.between_frames


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("ids",), [-1]),
        (("ids",), [1.5]),
        (("ids",), "x"),
        (("ids",), [2**63]),
        (("position",), 2**70),
        (("skipped",), [1, 2, 3]),
        (("skipped",), [9]),
        (("skipped",), [4, 9]),
        (("checksum",), "0" * 16),
        (("checksum",), None),
        (("extra",), 1),
        (("storages", 0, "nbytes"), -1),
        (("storages", 0, "nbytes"), 2**62),
        (("storages", 0, "nbytes"), 95),
        (("storages", 0, "nbytes"), float("nan")),
        (("storages", 0, "skew"), 64),
        (("storages", 0, "skew"), -1),
        (("tensors", 1, "dtype"), "complex128"),
        (("storages",), []),
        (("tensors", 0, "dtype"), "object"),
        (("tensors", 0, "dtype"), "x" * 10_000),
        (("tensors", 0, "shape"), [2, 4, -3]),
        (("tensors", 0, "shape"), [2, 4, 4]),
        (("tensors", 0, "shape"), [2**40, 2**40, 2**40]),
        (("tensors", 0, "shape"), [0, 2**40, 2**40]),
        (("tensors", 0, "shape"), [2, 4, float("inf")]),
        (("tensors", 0, "shape"), [1] * 17),
        (("tensors", 0, "strides"), [12, 1]),
        (("tensors", 0, "strides"), [13, 1, 4]),
        (("tensors", 0, "strides"), [-12, 1, 4]),
        (("tensors", 0, "strides"), [2**63, 1, 4]),
        (("tensors", 0, "storage"), 3),
        (("tensors", 0, "storage"), -1),
        (("tensors", 0, "offset"), 1),
        (("tensors", 0, "offset"), -1),
        (("tensors", 0, "offset"), 2**61),
        (("tensors", 1, "offset"), 1),
        (("tensors",), []),
    ],
)
def test_a_lie_in_the_header_is_found(path, value):
    def change(header):
        for step in path[:-1]:
            header = header[step]
        header[path[-1]] = value

    with pytest.raises(ProtocolError):
        read(with_header(change))


def test_a_tensor_across_its_alignment_is_refused():
    """Kernels would crash on it: aligned instructions on an unaligned address."""
    odd = torch.empty(0, dtype=torch.uint8).set_(
        aligned_empty(65).zero_().untyped_storage()[1:65], 0, (64,), (1,)
    )
    body = wire(MicroBatch(ids=(1,), position=0, tensors=(odd,)))
    body = body.replace(b'"uint8"', b'"int16"').replace(b"[64]", b"[32]")
    with pytest.raises(ProtocolError, match="multiple of 2 bytes"):
        read(body)


def test_an_expanded_tensor_cannot_stand_for_more_than_the_cap():
    def change(header):
        header["tensors"][0] |= {"shape": [2**20, 2**20], "strides": [0, 0]}

    with pytest.raises(ProtocolError, match="tensor bytes"):
        read(with_header(change))


def test_bools_that_overlap_are_not_looked_at_a_million_times_each():
    """A thousand of them, in a few kB, would occupy a reader for minutes."""
    overlapping = torch.zeros(4096, dtype=torch.bool).as_strided((2048, 2048), (1, 1))
    with pytest.raises(ProtocolError, match="elements of bool tensors"):
        read(wire(MicroBatch(ids=(1,), position=0, tensors=(overlapping,))))
    repeated = torch.ones(1, 4, dtype=torch.bool).expand(200_000_000, 4)
    (got,) = read(wire(MicroBatch(ids=(1,), position=0, tensors=(repeated,)))).tensors
    assert (got.shape, got.stride()) == (repeated.shape, repeated.stride())


def test_a_name_ends_where_it_ends():
    """A pattern that ends in ``$`` would accept a trailing newline."""
    header = json.loads(wire(REQUEST)[PREFIX_NBYTES:])
    for change in (
        {"program": "1" * 64 + "\n"},
        {"dataset": {"store": "default\n", "digest": "0" * 64}},
        {"dataset": {"store": "default", "digest": "0" * 64 + "\n"}},
    ):
        body = frame_head(FrameKind.REQUEST, json.dumps({**header, **change}).encode())
        with pytest.raises(ProtocolError, match="regex"):
            read(body)


def test_a_wrong_byte_in_the_payload_is_found():
    body = bytearray(wire(BATCH))
    body[-1] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        read(bytes(body))


def test_a_bool_that_is_neither_is_found():
    tensor = torch.tensor([0, 2], dtype=torch.uint8)
    body = wire(MicroBatch(ids=(1,), position=0, tensors=(tensor,))).replace(b'"uint8"', b'"bool" ')
    with pytest.raises(ProtocolError, match="0 and 1"):
        read(body)


def test_another_version_is_refused_and_both_are_named():
    body = bytearray(wire(End()))
    body[4:6] = (VERSION + 6).to_bytes(2, "big")
    with pytest.raises(ProtocolError, match=f"version {VERSION}, the other side {VERSION + 6}"):
        read(bytes(body))


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"X"), (6, b"\x09"), (7, b"\x01"), (8, b"\xff" * 4), (12, b"\x00" * 7 + b"\x01")]
)
def test_a_bad_prefix_is_refused(at, value):
    body = bytearray(wire(End()))
    body[at : at + len(value)] = value
    with pytest.raises(ProtocolError):
        parse_prefix(bytes(body[:PREFIX_NBYTES]))


@pytest.mark.parametrize("cut", [1, PREFIX_NBYTES - 1, PREFIX_NBYTES, PREFIX_NBYTES + 5, -1])
def test_a_stream_that_breaks_off_is_an_error(cut):
    with pytest.raises(ProtocolError):
        read(wire(BATCH)[:cut])


@settings(max_examples=examples(400))
@given(
    message=st.sampled_from([BATCH, REQUEST, Timings(phases={"a": 1.0}), WorkerCrashed("x")]),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.floats(0.2, 1),
)
def test_mutations_only_ever_raise_protocol_errors(message, edits, cut):
    body = bytearray(wire(message))
    for where, value in edits:
        body[int(where * len(body))] = value
    body = body[: max(1, int(cut * len(body)))]
    for attempt in (lambda: read(bytes(body)), lambda: list(FrameDecoder().feed(bytes(body)))):
        with contextlib.suppress(ProtocolError):
            attempt()


_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-3, 100), st.floats(), st.none(), st.text(max_size=3)
)


@settings(max_examples=examples(400))
@given(
    tensor=st.integers(0, 2),
    field=st.sampled_from(["shape", "strides", "storage", "offset", "nbytes", "skew"]),
    numbers=st.lists(_NUMBERS, min_size=1, max_size=5),
)
def test_numbers_of_any_size_only_ever_raise_protocol_errors(tensor, field, numbers):
    def change(header):
        if field in ("shape", "strides"):
            header["tensors"][tensor][field] = numbers
        elif field in ("storage", "offset"):
            header["tensors"][tensor][field] = numbers[0]
        else:
            header["storages"][tensor][field] = numbers[0]

    try:
        batch = read(with_header(change))
    except ProtocolError:
        return
    for each in batch.tensors:
        each.clone()  # every accepted tensor lies inside the payload


@pytest.mark.parametrize(
    "change",
    [
        {"stop": -3},
        {"dataset": None},
        {"stop": 3},
        {"micro_batches": ()},
        {"micro_batches": ((1, 2, 3),)},
        {"micro_batches": ((),)},
        {"micro_batches": ((-1,),)},
        {"micro_batch": 0},
        {"program": "../../etc/passwd"},
        {"program": "A" * 64},
        {"dataset": {"store": "file:///etc", "digest": "0" * 64}},
        {"dataset": {"store": "..", "digest": "0" * 64}},
        {"dataset": {"store": "a", "digest": "0" * 64, "prefix": "x"}},
        {"on_bad_sample": "maybe"},
        {"seed": -1},
        {"protocol": 2},
        {"unknown": 1},
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(change):
    fields = {
        "micro_batches": REQUEST.micro_batches,
        "start": -2,
        "stop": 0,
        "micro_batch": 2,
        "dataset": {"store": "default", "digest": "0" * 64},
    }
    body = json.dumps(fields | change).encode()
    with pytest.raises(ProtocolError):
        read(frame_head(FrameKind.REQUEST, body))
    assert isinstance(read(frame_head(FrameKind.REQUEST, json.dumps(fields).encode())), RunRequest)


def test_request_caps():
    with pytest.raises(ProtocolError, match="at most 2 samples, got 3"):
        read(wire(REQUEST), Caps(samples=2))
    with pytest.raises(ProtocolError, match="1 to 1 micro-batches, got 2"):
        read(wire(REQUEST), Caps(micro_batches=1))
    with pytest.raises(ProtocolError, match="2 tensors, got 3"):
        read(wire(BATCH), Caps(tensors=2))


@pytest.mark.parametrize("value", ["1e999", "-1", "null", "NaN", '"x"'])
def test_timings_are_finite(value):
    header = b'{"phases":{"read":' + value.encode() + b'},"stages":{}}'
    with pytest.raises(ProtocolError):
        read(frame_head(FrameKind.STATS, header))


@pytest.mark.parametrize("value", ["0.99", "-1", "1e999", "null", "NaN", '"x"'])
def test_a_load_factor_is_finite_and_at_least_1(value):
    header = b'{"phases":{},"stages":{},"k":' + value.encode() + b"}"
    with pytest.raises(ProtocolError):
        read(frame_head(FrameKind.STATS, header))


def test_what_an_older_server_does_not_say_is_as_if_nothing_were_known():
    stats = read(frame_head(FrameKind.STATS, b'{"phases":{"read":0.5},"stages":{}}'))
    assert stats == Timings(phases={"read": 0.5})
    assert stats.k == 1
    said = {"protocol": VERSION, "window_s": 60, "utilisation": 0.5, "running": 1, "queue": 0}
    load = {**said, "expected_wait_s": 0, "k": 2, "workers": [2]}
    found = decode_versioned(json.dumps(load).encode(), Load, "load")
    assert (found.k, found.machine) == (2, 0)
    for machine in (-0.1, 1.1):
        with pytest.raises(ProtocolError, match="machine"):
            decode_versioned(json.dumps({**load, "machine": machine}).encode(), Load, "load")


def test_errors_keep_their_class():
    assert isinstance(error_from(error_body(ObjectChanged("x"))), ObjectChanged)
    assert type(error_from(error_body(AccessDenied("x")))) is StoreError
    overloaded = error_from(error_body(Overloaded("full", retry_after_s=7.0)))
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after_s == 7.0
    unknown = error_from({"error": {"code": "newer_than_we", "message": "m"}})
    assert type(unknown) is UpriverError
    assert (unknown.code, str(unknown)) == ("newer_than_we", "m")
    assert isinstance(error_from({"detail": 1}), ProtocolError)


def test_info_of_another_version_is_refused_whatever_else_it_says():
    with pytest.raises(ProtocolError, match="version 1, the other side 2"):
        decode_info(b'{"protocol": 2, "all": "different"}')


def test_program_head():
    assert split_program_head(program_head(10), 8 + 10 + 5) == (10, 5)
    for graph, body in ((0, 100), (93, 100), (2**63, 100), (65 << 20, 1 << 40)):
        with pytest.raises(ProtocolError):
            split_program_head(program_head(graph), body)
    with pytest.raises(ProtocolError):
        split_program_head(b"123", 3)


@pytest.mark.parametrize(
    ("text", "valid"), [("0" * 64, True), ("g" * 64, False), ("0" * 63, False), ("0" * 64 + "\n", False)]
)
def test_digests(text, valid):
    assert valid_digest(text) is valid
