"""Check weight streams: every byte in its place and verified, or one typed error, and nothing left behind."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.coldstart.leaving import num_descriptors, threads
from tests.coldstart.scripted import WAIT_S, Memory, ScriptedStore, feed, lying, published
from tests.examples import some
from tests.store.faulty_server import FaultyServer
from upriver.coldstart.fetch import weight_stream as stream_module
from upriver.coldstart.fetch.concurrency import ConcurrencySearch
from upriver.coldstart.fetch.range_planner import PADDING, RangeRequest, TensorPart, requests_for
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.fetch.weight_stream import (
    FIRST_PIECE_BYTES,
    MOST_PIECE_BYTES,
    PIECE_S,
    StreamEvent,
    WeightStream,
)
from upriver.coldstart.format import manifest
from upriver.coldstart.format.checkpoint import WeightSource
from upriver.coldstart.link_cache import StoreLink
from upriver.errors import (
    Cancelled,
    ConfigError,
    Damaged,
    ObjectChanged,
    ObjectNotFound,
    ProgramError,
    StoreError,
    UpriverError,
)
from upriver.store import Store

PATH = "models/net.safetensors"
CHUNK_BYTES = 4096
SMALL = StreamLimits(request_bytes=10_000, in_flight_bytes=50_000, concurrency=3)
LINK = StoreLink(latency_s=0.001, bandwidth_bytes_per_s=1e8)
FAST = StoreLink(latency_s=0.01, bandwidth_bytes_per_s=1e12)


def weights() -> dict[str, torch.Tensor]:
    """Return tensors of many sizes: none, a few bytes, exactly one chunk, several requests."""
    torch.manual_seed(0)
    sizes = [3, 0, 1024, 1, 1025, 60_000, 7, 2048, 2047, 30_001, 0, 16]
    tensors = {f"of.{number}": torch.rand(size) for number, size in enumerate(sizes)}
    return {**tensors, "half": torch.rand(33, 9).to(torch.bfloat16), "scalar": torch.tensor(3)}


def publish(store: Store) -> WeightSource:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    return published(store, PATH)


def expected(source: WeightSource) -> dict[int, bytes]:
    whole = {path: source.store.get(path) for path in {tensor.path for tensor in source.tensors}}
    return {i: whole[each.path][each.start : each.stop] for i, each in enumerate(source.tensors)}


def grouped(num: int, *sizes: int) -> list[range]:
    """Return ``num`` tensors in groups of these sizes; the last size repeats."""
    groups, start = [], 0
    while start < num:
        size = sizes[min(len(groups), len(sizes) - 1)]
        groups.append(range(start, min(num, start + size)))
        start += size
    return groups


def run(
    source: WeightSource,
    *,
    groups: Sequence[range] | None = None,
    sink: Memory | None = None,
    limits: StreamLimits = SMALL,
) -> tuple[Memory, WeightStream]:
    """Run a stream from start to end."""
    sink = sink or Memory(source)
    stream = WeightStream(source, groups or grouped(len(source.tensors), 4), sink, limits=limits, link=LINK)
    stream.start()
    stream.join()
    return sink, stream


def kinds(stream: WeightStream, kind: str) -> list[StreamEvent]:
    return [event for event in stream.events if event.kind == kind]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


# ------------------------------------------------------------------------------------- arrivals


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "s3":
        with FaultyServer() as server:
            yield connect(server)
    else:
        uri = tmp_path.as_uri() if request.param == "file" else f"memory://{tmp_path.name}"
        yield Store.open(uri, name="here")


@pytest.mark.parametrize("sizes", [(1,), (100,), (3, 1, 5), (2,)])
def test_every_weight_arrives_as_it_was_written(store: Store, sizes: tuple[int, ...]) -> None:
    source = publish(store)
    sink, stream = run(source, groups=grouped(len(source.tensors), *sizes))
    assert sink.error is None
    assert sink.got == expected(source)
    assert sink.threads == {"upriver-coldstart-stream"}
    assert sorted(sink.asked) == [i for i, each in enumerate(source.tensors) if each.start < each.stop]
    filled = kinds(stream, "filled")
    assert sorted(event.tensors.start for event in filled) == list(range(len(source.tensors)))
    assert sum(event.nbytes for event in filled) == sum(map(len, sink.got.values()))
    assert len(kinds(stream, "first_byte")) == len(kinds(stream, "request"))
    assert kinds(stream, "refetch") == []
    assert [event.at_s for event in stream.events] == sorted(event.at_s for event in stream.events)


def test_weights_of_several_objects_in_any_order_and_without_checksums(store: Store) -> None:
    chance = random.Random(1)
    for path in ("a", "b"):
        store.put(path, chance.randbytes(100_000))
    bounds = sorted(chance.sample(range(100_001), 40))
    places = [(path, *bounds[i : i + 2]) for path in ("a", "b") for i in range(0, 38, chance.choice((1, 2)))]
    chance.shuffle(places)
    source = lying(store, places)
    for sizes in ((1,), (7,), (1000,)):
        sink, _ = run(source, groups=grouped(len(places), *sizes))
        assert sink.error is None
        assert sink.got == expected(source)


def test_nothing_to_load_is_done_at_once(store: Store) -> None:
    sink, _ = run(lying(store, []), groups=[])
    assert (sink.got, sink.error) == ({}, None)
    sink, _ = run(lying(store, [("not there", 5, 5)] * 3))
    assert (sink.got, sink.error, sink.asked) == ({0: b"", 1: b"", 2: b""}, None, [])


def test_a_stream_can_be_run_again_over_the_same_store(store: Store) -> None:
    source = publish(store)
    assert run(source)[0].got == run(source)[0].got == expected(source)


def test_default_limits_bring_it_too(store: Store) -> None:
    source = publish(store)
    sink, stream = run(source, groups=[range(len(source.tensors))], limits=StreamLimits())
    assert sink.got == expected(source)
    assert len(kinds(stream, "request")) == 1


# ------------------------------------------------------------------------------------------ requests


@st.composite
def layouts(draw: st.DrawFn) -> tuple[WeightSource, list[range], int, int]:
    """Draw tensors anywhere in up to three objects, with or without checksums; groups, and two limits."""
    chunk_bytes = draw(st.sampled_from([64, 128, 1024]))
    places: list[tuple[str, int, int]] = []
    for path in draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
        at = 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 700)), max_size=8)):
            places.append((path, at + gap, at + gap + size))
            at += gap + size
    source = lying(None, draw(st.permutations(places)), chunk_bytes=chunk_bytes)
    checked = draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    tensors = tuple(
        replace(each, crc32c=(0,) * -(-(each.stop - each.start) // chunk_bytes)) if check else each
        for each, check in zip(source.tensors, checked, strict=True)
    )
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    groups = grouped(len(places), *sizes)
    return replace(source, tensors=tensors), groups, draw(st.integers(64, 2000)), draw(st.integers(0, 64))


@given(layouts())
def test_requests_have_every_byte_once_and_keep_to_the_limits(
    asked: tuple[WeightSource, list[range], int, int],
) -> None:
    source, groups, request_bytes, along_bytes = asked
    requests = requests_for(source, groups, request_bytes=request_bytes, along_bytes=along_bytes)
    covered: dict[int, list[TensorPart]] = {}
    for request in requests:
        at = request.start
        assert sum(request.tensors <= set(group) for group in groups) == 1
        for part in request.parts:
            assert part.nbytes > 0
            if part.tensor == PADDING:
                assert part.nbytes <= along_bytes
            else:
                tensor = source.tensors[part.tensor]
                assert (tensor.path, tensor.start + part.start) == (request.path, at)
                if tensor.crc32c:
                    assert part.start // source.chunk_bytes == (part.stop - 1) // source.chunk_bytes
                covered.setdefault(part.tensor, []).append(part)
            at += part.nbytes
        assert at - request.start == request.nbytes <= request_bytes
        assert PADDING not in (request.parts[0].tensor, request.parts[-1].tensor)
        assert sum(segment.nbytes for segment in request.segments()) == request.nbytes
    for index, tensor in enumerate(source.tensors):
        parts = sorted(covered.get(index, []))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])][: len(parts)]
        assert (parts[-1].stop if parts else 0) == tensor.stop - tensor.start
    firsts = [min(request.tensors) for request in requests]
    for group in groups:
        assert (inside := [first for first in firsts if first in group]) == sorted(inside)


@given(layouts(), st.integers(0, 2000))
def test_joined_requests_ask_for_the_same_in_the_same_order_and_fewer_times(
    asked: tuple[WeightSource, list[range], int, int], join_bytes: int
) -> None:
    source, groups, request_bytes, along_bytes = asked
    limits = {"request_bytes": request_bytes, "along_bytes": along_bytes}
    apart = requests_for(source, groups, **limits)
    joined = requests_for(source, groups, **limits, join_bytes=min(join_bytes, request_bytes))
    assert [part for each in joined for part in each.parts if part.tensor != PADDING] == [
        part for each in apart for part in each.parts if part.tensor != PADDING
    ]
    assert len(joined) <= len(apart)
    for request in joined:
        at = request.start
        for part in request.parts:
            if part.tensor == PADDING:
                assert 0 < part.nbytes <= along_bytes
            else:
                assert source.tensors[part.tensor].start + part.start == at
                assert source.tensors[part.tensor].path == request.path
            at += part.nbytes
        assert at - request.start == request.nbytes <= request_bytes
        assert PADDING not in (request.parts[0].tensor, request.parts[-1].tensor)
    for before, after in pairwise(joined):
        if (
            before.path == after.path
            and 0 <= (gap := after.start - before.start - before.nbytes) <= along_bytes
        ):
            assert before.nbytes + gap + after.parts[0].nbytes > min(join_bytes, request_bytes)


def test_groups_that_follow_each_other_are_joined_up_to_a_size() -> None:
    places = [("a", 0, 300), ("a", 320, 620), ("a", 640, 940), ("a", 2000, 2300), ("b", 2300, 2600)]
    groups = [range(n, n + 1) for n in range(5)]
    joined = asked_for(places, groups, join_bytes=700)
    assert [(each.path, each.start, each.nbytes) for each in joined] == [
        ("a", 0, 620),
        ("a", 640, 300),
        ("a", 2000, 300),
        ("b", 2300, 300),
    ]
    assert [each.tensors for each in joined] == [{0, 1}, {2}, {3}, {4}]


def test_a_stream_joins_what_comes_in_so_many_seconds(store: Store) -> None:
    source = publish(store)
    counts = []
    for joins_s in (0.0, 1e-9, 1.0):
        sink = Memory(source)
        groups = [range(n, n + 1) for n in range(len(source.tensors))]
        stream = WeightStream(source, groups, sink, joins_s=joins_s, link=LINK)
        stream.start()
        stream.join()
        assert sink.got == expected(source)
        counts.append(len(kinds(stream, "request")))
    assert counts[0] == counts[1] > counts[2] == 1


def test_memory_is_given_back_before_the_last_weight_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    class Heap:
        def came(self, num_bytes: int) -> None:
            happened.append(num_bytes)

        def ended(self) -> None:
            happened.append("ended")

    class Told(Memory):
        def filled(self, index: int) -> None:
            happened.append(f"filled {index}")
            super().filled(index)

    monkeypatch.setattr("upriver.coldstart.fetch.weight_stream.HeapTrimmer", Heap)
    store = Store.open("memory://")
    source = publish(store)
    sink, _ = run(source, sink=Told(source))
    assert sink.got == expected(source)
    assert happened[-2] == "ended"
    assert str(happened[-1]).startswith("filled ")
    assert happened.count("ended") == 1
    assert sum(each for each in happened if isinstance(each, int)) >= source.nbytes


def test_openmps_threads_sleep_soon_as_long_as_a_stream_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, int]] = []

    class Told(Memory):
        def filled(self, index: int) -> None:
            happened.append(("filled", threading.get_native_id()))
            super().filled(index)

    monkeypatch.setattr(
        stream_module, "sleep_sooner", lambda: happened.append(("asked", threading.get_native_id()))
    )
    source = publish(Store.open("memory://"))
    run(source, sink=Told(source))
    assert [what for what, _ in happened] == ["asked"] + ["filled"] * len(source.tensors)
    assert len({thread for _, thread in happened}) == 1


def asked_for(places: list[tuple[str, int, int]], groups: list[range], **limits: int) -> list[RangeRequest]:
    limits = {"request_bytes": 1000, "along_bytes": 64} | limits
    return requests_for(lying(None, places), groups, **limits)


def test_a_group_that_lies_side_by_side_is_one_request() -> None:
    places = [("a", 0, 100), ("a", 300, 400), ("a", 128, 250)]
    (request,) = asked_for(places, [range(3)])
    assert request.parts == (
        TensorPart(0, 0, 100),
        TensorPart(PADDING, 0, 28),
        TensorPart(2, 0, 122),
        TensorPart(PADDING, 0, 50),
        TensorPart(1, 0, 100),
    )
    assert [each.start for each in asked_for(places, [range(3)], along_bytes=40)] == [0, 300]
    assert [each.start for each in asked_for(places, [range(1), range(1, 3)])] == [0, 128]
    other = [*places[:2], ("b", 128, 250)]
    assert [(each.path, each.start) for each in asked_for(other, [range(3)])] == [
        ("a", 0),
        ("a", 300),
        ("b", 128),
    ]


# ------------------------------------------------------------------------------------ times of requests


NUM, SIZE = 10, 1000
"""Number of tensors in the scripted source, and bytes per tensor."""


class Scripted:
    """A stream from a store that delivers bytes on command; each tensor needs one request."""

    def __init__(self, *, hidden: float = 100, **limits: Any) -> None:
        self.content = random.Random(3).randbytes(NUM * SIZE)
        self.store = ScriptedStore(self.content)
        source = lying(self.store, [("a", i * SIZE, (i + 1) * SIZE) for i in range(NUM)])
        self.sink = Memory(source)
        chosen = {"request_bytes": SIZE, "in_flight_bytes": 10**6, "concurrency": 100} | limits
        self.stream = WeightStream(
            source,
            grouped(NUM, 1),
            self.sink,
            limits=StreamLimits(**chosen),
            link=StoreLink(latency_s=1.0, bandwidth_bytes_per_s=hidden),
        )

    def __enter__(self) -> Scripted:
        self.stream.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.cancel()
        self.stream.join()

    @property
    def tensors(self) -> list[int]:
        """Requested tensors, in order."""
        return [start // SIZE for start in self.store.starts()]


@pytest.fixture
def known_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the link estimate, and make arriving bytes visible one by one."""
    for name in ("PIECE_S", "FEWEST_PIECE_BYTES"):
        monkeypatch.setattr(stream_module, name, 0)
    monkeypatch.setattr(ConcurrencySearch, "link", property(lambda search: search._said))
    monkeypatch.setattr(ConcurrencySearch, "known", False)


def test_the_next_request_is_sent_when_latency_times_bandwidth_is_left(known_link: None) -> None:
    with Scripted(hidden=100) as run:
        assert run.tensors == [0]
        run.store.bring(0, SIZE - 101)
        assert run.tensors == [0]
        run.store.bring(0, 1)
        assert run.tensors == [0, 1]
        assert run.sink.asked == [0, 1]
        assert run.sink.got == {}
        run.store.bring(1, SIZE - 50)
        assert run.tensors == [0, 1]
        run.store.bring(0, 50)
        assert run.tensors == [0, 1, 2]
        run.store.release()
        run.stream.join()
        assert run.sink.got == {i: run.content[i * SIZE : (i + 1) * SIZE] for i in range(NUM)}
        assert [asked.start // SIZE for asked in run.store.asked] == list(range(NUM))


def test_a_piece_that_is_not_complete_may_be_there(known_link: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "FEWEST_PIECE_BYTES", 200)
    with Scripted(hidden=100) as run:
        run.store.bring(0, SIZE - 301)
        assert run.tensors == [0]
        run.store.bring(0, 1)
        assert run.tensors == [0, 1]


def test_as_many_are_under_way_as_fill_the_link_and_no_more_than_allowed(known_link: None) -> None:
    with Scripted(hidden=10**6, concurrency=3) as run:
        assert run.tensors == [0, 1, 2]
        run.store.bring(1, SIZE)
        assert run.tensors == [0, 1, 2, 3]
    with Scripted(hidden=2.5 * SIZE) as run:
        assert run.tensors == [0, 1, 2]


def test_bytes_in_flight_are_capped(known_link: None) -> None:
    with Scripted(hidden=10**6, in_flight_bytes=4 * SIZE + 10) as run:
        assert run.tensors == [0, 1, 2, 3]
        run.store.bring(0, SIZE - 11)
        assert run.tensors == [0, 1, 2, 3]
        run.store.bring(2, 1)
        assert run.tensors == [0, 1, 2, 3, 4]
        assert run.sink.asked == [0, 1, 2, 3, 4]


def test_what_somebody_waits_for_goes_first(known_link: None) -> None:
    with Scripted(concurrency=2) as run:
        assert run.tensors == [0]
        run.stream.hurry(7)
        assert run.tensors == [0, 7]
        run.stream.hurry(5)
        run.stream.hurry(9)
        run.stream.hurry(0)
        run.stream.hurry(NUM)
        assert run.tensors == [0, 7]
        run.store.bring(0, SIZE)
        assert run.tensors == [0, 7]
        run.store.bring(1, SIZE)
        assert run.tensors == [0, 7, 9]
        run.store.bring(2, SIZE)
        assert run.tensors == [0, 7, 9, 5]
        run.store.bring(3, SIZE - 10)
        assert run.tensors == [0, 7, 9, 5, 1]


def test_all_that_is_waited_for_is_not_asked_for_at_once(known_link: None) -> None:
    with Scripted(hidden=100) as run:
        assert run.tensors == [0]
        run.stream.hurry(7)
        assert run.tensors == [0, 7]
        run.stream.hurry(9)
        assert run.tensors == [0, 7]
        run.store.bring(0, SIZE)
        assert run.tensors == [0, 7]
        run.store.bring(1, SIZE - 100)
        assert run.tensors == [0, 7, 9]
        run.store.bring(2, SIZE - 101)
        assert run.tensors == [0, 7, 9]
        run.store.bring(1, 100)
        run.store.bring(2, 1)
        assert run.tensors == [0, 7, 9, 1]


def test_hurrying_before_the_start_counts(known_link: None) -> None:
    run = Scripted()
    run.stream.hurry(4)
    with run:
        assert run.tensors == [4]


def test_several_are_under_way_where_one_does_not_fill_the_link(
    known_link: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scripted(hidden=100) as run:
        assert run.tensors == [0]
        monkeypatch.setattr(run.stream._flow, "wanted", 3)
        run.store.bring(0, 1)
        assert run.tensors == [0, 1, 2]
        run.store.bring(1, SIZE - 40)
        assert run.tensors == [0, 1, 2]
        run.store.bring(1, 7)  # the rest is a third of the bytes that the link carries meanwhile
        assert run.tensors == [0, 1, 2, 3]


def test_a_capped_stream_is_the_same(tmp_path: Path) -> None:
    source = publish(Store.open(f"memory://{tmp_path.name}"))
    sink, _ = run(source, limits=replace(SMALL, bandwidth_bytes_per_s=5e6))
    assert sink.error is None
    assert sink.got == expected(source)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"request_bytes": 0}, "request_bytes must be a finite number >= 64"),
        ({"request_bytes": 2.0**20}, "request_bytes must be a whole number"),
        ({"request_bytes": 2**40}, "request_bytes must be a finite number >= 64 and <= 1.07374e+09"),
        ({"request_bytes": True}, "request_bytes"),
        ({"concurrency": 0}, "concurrency must be a finite number >= 1"),
        (
            {"in_flight_bytes": 2**20},
            r"in_flight_bytes must be at least request_bytes \(16777216\), got 1048576",
        ),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s must be a finite number > 0"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s"),
        ({"timeout_s": 0}, "timeout_s must be a finite number > 0"),
        ({"timeout_s": math.inf}, "timeout_s"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("+", r"\+")):
        StreamLimits(**limits)


# ------------------------------------------------------------------------------------------ early ends


def test_a_cancel_ends_it_at_once() -> None:
    with Scripted(hidden=10**6, concurrency=2) as run:
        run.store.bring(0, SIZE)
        run.stream.cancel()
        run.stream.join()
        assert isinstance(run.sink.error, Cancelled)
        assert "the load of 'net' was cancelled" in str(run.sink.error)
        assert run.sink.got == {0: run.content[:SIZE]}
        assert all(asked.ended for asked in run.store.asked)
        run.stream.hurry(3)


def test_what_a_store_answers_after_the_end_is_taken_by_nobody() -> None:
    with Scripted() as run:
        run.store.starts()
        run.stream.cancel()
        run.stream.join()
        run.store.release()
        assert run.sink.got == {}


def test_a_cancel_may_say_why() -> None:
    with Scripted() as run:
        why = ProgramError("it is not the model it was said to be")
        run.stream.cancel(why)
        run.stream.cancel()
        run.stream.join()
        assert run.sink.error is why


def test_a_cancel_before_the_start_asks_for_nothing() -> None:
    run = Scripted()
    run.stream.cancel()
    with run:
        run.stream.join()
        assert isinstance(run.sink.error, Cancelled)
        assert (run.store.asked, run.sink.asked, run.sink.got) == ([], [], {})


def test_a_cancel_after_the_end_changes_nothing(tmp_path: Path) -> None:
    sink, stream = run(publish(Store.open(f"memory://{tmp_path.name}")))
    stream.cancel()
    stream.hurry(0)
    stream.join()
    assert sink.error is None


def test_a_stream_that_never_began_has_no_thread() -> None:
    run = Scripted()
    run.stream.join()
    assert (run.sink.error, run.sink.got) == (None, {})


def test_a_store_that_says_nothing_is_given_up() -> None:
    with Scripted(timeout_s=0.05) as run:
        run.stream.join()
        assert type(run.sink.error) is StoreError
        assert "object 'a' in store 'scripted': not a byte came for 0.05 s" in str(run.sink.error)


@pytest.mark.parametrize("call", ["room", "filled"])
@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), TimeoutError("mine"), ProgramError("no")])
def test_a_sink_that_fails_ends_it(tmp_path: Path, call: str, error: Exception) -> None:
    source = publish(Store.open(f"memory://{tmp_path.name}"))

    class Failing(Memory):
        def _fails(self, index: int) -> Any:
            if index == 5:
                raise error
            return getattr(super(), call)(index)

    sink = Failing(source)
    setattr(sink, call, sink._fails)
    run(source, sink=sink)
    assert 5 not in sink.got
    if isinstance(error, UpriverError):
        assert sink.error is error
    else:
        assert type(sink.error) is UpriverError
        assert f"the load of {PATH!r} broke off: {type(error).__name__}" in str(sink.error)


def test_a_sink_that_fails_when_it_is_told_so_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Memory):
        def failed(self, error: UpriverError) -> None:
            raise ValueError("no more")

    run = Scripted()
    run.stream._sink = Failing(run.sink.source)
    with run:
        run.stream.cancel()
        run.stream.join()
    assert "a cold start's sink failed while it received the error Cancelled" in caplog.text


def test_a_sink_may_cancel_and_join(tmp_path: Path) -> None:
    source = publish(Store.open(f"memory://{tmp_path.name}"))

    class Enough(Memory):
        stream: WeightStream

        def filled(self, index: int) -> None:
            super().filled(index)
            self.stream.cancel()
            self.stream.join()

        def failed(self, error: UpriverError) -> None:
            super().failed(error)
            self.stream.join()

    sink = Enough(source)
    sink.stream = WeightStream(source, grouped(len(source.tensors), 1), sink, limits=SMALL, link=LINK)
    sink.stream.start()
    sink.stream.join()
    assert isinstance(sink.error, Cancelled)
    assert 0 < len(sink.got) < len(source.tensors)


def test_a_failure_holds_on_to_no_memory() -> None:
    run = Scripted(hidden=10**6)
    rooms = []

    def room(index: int) -> memoryview:
        array = np.zeros(SIZE, dtype=np.uint8)
        rooms.append(weakref.ref(array))
        return array.data

    run.sink.room = room
    with run:
        run.store.bring(0, 10)
        run.stream.cancel(StoreError("enough"))
        run.stream.join()
    error, stream = run.sink.error, run.stream
    del run
    gc.collect()
    assert error is not None
    assert stream.events
    assert len(rooms) == NUM
    assert [ref() for ref in rooms] == [None] * NUM


# --------------------------------------------------------------------------------------- a faulty store


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as running:
        yield running


def connect(server: FaultyServer, **options: str) -> Store:
    settings = {
        "access_key_id": "KEY",
        "secret_access_key": "SECRET",
        "max_retries": "2",
        "read_timeout_s": "0.3",
    }
    return Store.open("s3://bucket/p", name="here", options={"endpoint": server.url, **settings, **options})


class Holding(Memory):
    """A sink that holds its stream, as loads' sinks do; a test can look for its memory."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self.rooms: list[weakref.ref[Any]] = []
        self.stream: WeightStream | None = None

    def room(self, index: int) -> memoryview:
        array = np.frombuffer(super().room(index), dtype=np.uint8)
        self.rooms.append(weakref.ref(array))
        return array.data


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("end", ["all is there", "cancelled", "damaged", "timed out", "gone"])
def test_a_stream_that_is_over_holds_no_sink_and_nobody_holds_it(
    end: str, server: FaultyServer, without_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, typed = [], Store._typed

    def hold_on_to(self: Store, error: Exception, *told: str) -> StoreError:
        raised.append(error)  # as obstore does at times, until it gets another request
        return typed(self, error, *told)

    store = connect(server, read_timeout_s="1000", timeout_s="1000", max_retries="0")
    source = publish(store)
    monkeypatch.setattr(Store, "_typed", hold_on_to)
    if end == "damaged":
        source = replace(
            source, tensors=tuple(replace(t, crc32c=tuple(1 for _ in t.crc32c)) for t in source.tensors)
        )
    if end == "gone":
        server.faults = ["", 404]
    if end in ("cancelled", "timed out"):
        server.faults = ["stalled"] * 100
    limits = replace(SMALL, timeout_s=0.2) if end == "timed out" else SMALL
    sink = Holding(source)
    sink.stream = stream = WeightStream(
        source, grouped(len(source.tensors), 4), sink, limits=limits, link=LINK
    )
    stream.hurry(2)
    stream.start()
    if end == "cancelled":
        until(lambda asked=sink.asked: bool(asked))
        stream.cancel()
    stream.join()
    told = {
        "all is there": type(None),
        "cancelled": Cancelled,
        "damaged": Damaged,
        "timed out": StoreError,
        "gone": ObjectNotFound,
    }
    assert type(sink.error) is told[end]
    assert bool(raised) == (end == "gone")
    rooms, found = sink.rooms, weakref.ref(sink)
    assert rooms
    del sink
    assert found() is None
    assert all(room() is None for room in rooms)
    gone = weakref.ref(stream)
    del stream
    assert gone() is None


@pytest.mark.parametrize("fault", some(3, ["cut", "reset", "stalled", "silent", 503, 500]))
def test_what_a_store_mends_is_not_noticed(server: FaultyServer, fault: int | str) -> None:
    source = publish(connect(server))
    for before in (0, 3):
        server.faults = [*[""] * before, fault]
        sink, _ = run(source)
        assert sink.error is None
        assert sink.got == expected(source)


@pytest.mark.parametrize("fault", ["reset", "silent", 503])
def test_a_store_that_does_not_get_well_is_a_store_error(server: FaultyServer, fault: int | str) -> None:
    source = publish(connect(server))
    server.faults = ["", "", *[fault] * 1000]
    sink, _ = run(source)
    assert type(sink.error) is StoreError
    assert f"{PATH!r} in store 'here'" in str(sink.error)
    right = expected(replace(source, store=calm(server)))
    assert all(right[index] == found for index, found in sink.got.items())


def calm(server: FaultyServer) -> Store:
    server.faults = []
    return connect(server)


def test_bytes_come_straight_from_connections_of_the_streams_own(server: FaultyServer) -> None:
    source = publish(connect(server))
    server.faults = ["slow"] * 3  # so that the connections are open by then
    sink, stream = run(source)
    assert sink.error is None
    assert server.num_signed > len(kinds(stream, "request")) / 2
    assert sink.got == expected(source)


def test_what_is_one_request_opens_no_connection(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a connection is opened")

    monkeypatch.setattr("upriver.store.direct.Direct.open", never)
    source = publish(connect(server))
    whole = [range(len(source.tensors))]
    sink, stream = run(source, groups=whole, limits=StreamLimits(concurrency=1))
    assert sink.got == expected(source)
    assert len(kinds(stream, "request")) == 1


def test_a_wrong_bit_is_fetched_again(server: FaultyServer) -> None:
    source = publish(connect(server))
    num_requests = len(kinds(run(source)[1], "request"))
    for before in (0, num_requests // 2, num_requests - 1):
        server.faults = [*[""] * before, "flipped"]
        sink, stream = run(source)
        assert sink.error is None
        assert sink.got == expected(source)
        wrong = kinds(stream, "refetch")
        assert len(wrong) <= 1  # the middle may be padding
        assert len(kinds(stream, "request")) == num_requests + len(wrong)
        assert all(event.nbytes <= CHUNK_BYTES for event in wrong)


def test_a_bit_that_is_wrong_in_the_store_is_damage(server: FaultyServer) -> None:
    store = connect(server)
    source = publish(store)
    tensor = source.tensors[5]
    data = bytearray(store.get(PATH))
    data[tensor.start + 2 * CHUNK_BYTES + 7] ^= 1
    store.put(PATH, bytes(data))
    sink, stream = run(replace(source, etags={PATH: store.head(PATH).etag}))
    assert type(sink.error) is Damaged
    first = tensor.start + 2 * CHUNK_BYTES
    assert f"weight 'of.5': bytes {first} to {first + CHUNK_BYTES} of object {PATH!r} in store 'here'" in str(
        sink.error
    )
    assert [event.tensors for event in kinds(stream, "refetch")] == [range(5, 6)]
    assert 5 not in sink.got


@pytest.mark.full
def test_a_checksum_over_more_than_a_request_is_held_too(tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    source = publish(store)
    limits = replace(SMALL, request_bytes=1000)
    sink, stream = run(source, limits=limits)
    assert sink.got == expected(source)
    assert max(event.nbytes for event in kinds(stream, "request")) <= 1000
    data = bytearray(store.get(PATH))
    data[source.tensors[5].start] ^= 1
    store.put(PATH, bytes(data))
    sink, stream = run(replace(source, etags={}), limits=limits)
    assert type(sink.error) is Damaged
    assert 5 not in sink.got


def test_an_object_that_is_replaced_while_it_is_read_is_said_to_be(server: FaultyServer) -> None:
    for before in range(4):
        source = publish(connect(server))
        server.faults = [*[""] * before, "changed"]
        sink, _ = run(source)
        assert type(sink.error) is ObjectChanged
        assert f"object {PATH!r} in store 'here' was replaced since its weights were looked up" in str(
            sink.error
        )


def test_an_object_that_is_replaced_between_two_requests_is_said_to_be(server: FaultyServer) -> None:
    store = connect(server)
    source = publish(store)
    before = expected(source)

    class Replacing(Memory):
        def filled(self, index: int) -> None:
            super().filled(index)
            store.put(PATH, bytes(300_000))

    sink, _ = run(source, sink=Replacing(source), groups=grouped(len(source.tensors), 3))
    assert type(sink.error) is ObjectChanged
    assert all(before[index] == found for index, found in sink.got.items())


def test_an_object_that_is_gone_is_named(server: FaultyServer) -> None:
    source = publish(connect(server))
    server.objects.pop(f"bucket/p/{PATH}")
    sink, _ = run(source)
    assert type(sink.error) is ObjectNotFound
    assert sink.got.keys() <= {1, 10}


def test_an_object_that_ends_early_is_a_store_error(server: FaultyServer) -> None:
    source = publish(connect(server))
    server.faults = ["", "short"]
    sink, _ = run(source)
    assert type(sink.error) is StoreError
    assert f"object {PATH!r} in store 'here' ended early" in str(sink.error)


@pytest.mark.parametrize("fault", ["stalled", "silent"])
def test_a_stall_does_not_hold_up_a_cancel(server: FaultyServer, fault: str) -> None:
    publish(connect(server))
    source = published(connect(server, read_timeout_s="1000", timeout_s="1000"), PATH)
    server.requests.clear()
    server.faults = [fault] * 100
    sink = Memory(source)
    stream = WeightStream(source, grouped(len(source.tensors), 4), sink, limits=SMALL, link=LINK)
    stream.start()
    until(lambda: bool(server.reads))
    stream.cancel()
    stream.join()
    assert isinstance(sink.error, Cancelled)


@pytest.mark.parametrize("fault", ["stalled", "silent"])
def test_a_stall_ends_at_the_streams_own_timeout(server: FaultyServer, fault: str) -> None:
    publish(connect(server))
    source = published(connect(server, read_timeout_s="1000", timeout_s="1000"), PATH)
    server.faults = [fault] * 100
    sink, _ = run(source, limits=replace(SMALL, timeout_s=0.2))
    assert type(sink.error) is StoreError
    assert "not a byte came for 0.2 s" in str(sink.error)


def test_a_slow_link_is_no_stall(server: FaultyServer) -> None:
    store = connect(server, read_timeout_s="1000", timeout_s="1000", max_retries="0")
    store.put("a", random.Random(5).randbytes(700_000))
    source = lying(store, [("a", 0, 1000), ("a", 1000, 700_000)])
    server.faults = ["slow"]
    sink, stream = run(source, groups=[range(2)], limits=StreamLimits(timeout_s=0.7))
    assert sink.error is None
    assert sink.got == expected(source)
    assert len(kinds(stream, "request")) == 1


def test_pieces_are_small_until_the_link_has_shown_itself() -> None:
    source = lying(None, [("a", 0, 1)])
    stream = WeightStream(source, [range(1)], Memory(source), link=FAST)
    assert stream._piece_bytes() == FIRST_PIECE_BYTES
    feed(stream._flow, lambda _: 2e7, seconds=1)
    assert stream._piece_bytes() == pytest.approx(2e7 * PIECE_S, rel=0.01)
    feed(stream._flow, lambda _: 1e12, seconds=3, now_s=20)
    assert stream._piece_bytes() == MOST_PIECE_BYTES


def test_several_requests_at_once_share_what_one_has_in_pieces() -> None:
    source = lying(None, [("a", 0, 1)])
    stream = WeightStream(source, [range(1)], Memory(source), link=FAST)
    feed(stream._flow, lambda _: 1e12, seconds=3)
    found = []
    for stream._flow.wanted in (1, 2, 8):
        found.append(stream._piece_bytes())
    assert found == [MOST_PIECE_BYTES, MOST_PIECE_BYTES // 2, FIRST_PIECE_BYTES]


FAULTS = ("cut", "reset", "stalled", "silent", "flipped", "short", "changed", 503, 404, "cancel")


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_runs", "least"),
    [
        (50, 2),  # which stream a fault meets depends on timing, so a few runs may miss one kind of error
        pytest.param(1000, 4, marks=pytest.mark.full),
    ],
)
def test_whatever_happens_the_bytes_are_right_or_there_is_one_error(
    server: FaultyServer, num_runs: int, least: int
) -> None:
    store = connect(server, read_timeout_s="0.2", max_retries="1")
    source = publish(store)
    right, content = expected(source), server.objects[f"bucket/p/{PATH}"]

    def one(number: int) -> str:
        chance, key = random.Random(number), f"run-{number}"
        server.objects[f"bucket/p/{key}"] = content
        mine = replace(
            source,
            tensors=tuple(replace(each, path=key) for each in source.tensors),
            etags={key: source.etags[PATH]},
        )
        sink = Memory(mine)
        groups = grouped(len(mine.tensors), *chance.choices(range(1, 8), k=3))
        limits = replace(SMALL, request_bytes=40_000, in_flight_bytes=100_000)
        stream = WeightStream(mine, groups, sink, limits=limits, link=LINK)
        faults = chance.choices(FAULTS, k=chance.randint(0, 3))
        with server.lock:
            server.faults += [fault for fault in faults if fault != "cancel"]
        stream.start()
        for _ in range(3):
            stream.hurry(chance.randrange(len(mine.tensors)))
        if "cancel" in faults:
            time.sleep(chance.random() * 0.02)
            stream.cancel()
        stream.join()
        assert all(right[index] == found for index, found in sink.got.items())
        if sink.error is None:
            assert len(sink.got) == len(right)
            return "right"
        assert isinstance(sink.error, StoreError | Cancelled)
        return sink.error.code

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(one, range(num_runs)))
    found = set(ends)
    assert "right" in found
    assert len(found) >= least


@pytest.mark.full
def test_no_descriptor_is_left() -> None:
    def loads() -> None:
        with FaultyServer() as server:
            store = connect(server)
            source = publish(store)
            for fault in ("", "reset", "stalled", "flipped", "short", "changed"):
                server.faults = ["", fault]
                run(source)
            source = publish(store)
            for _ in range(2):
                server.faults = ["stalled"] * 3
                sink = Memory(source)
                stream = WeightStream(source, grouped(len(source.tensors), 4), sink, limits=SMALL, link=LINK)
                stream.start()
                stream.cancel()
                stream.join()

    loads()  # set up once per process
    gc.collect()
    before = num_descriptors()
    loads()
    gc.collect()
    until(lambda: num_descriptors() <= before)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
