"""Check that a load requests the first bytes at once, each byte comes once, and no result depends on them."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from tests.coldstart.leaving import num_descriptors, threads
from tests.coldstart.scripted import WAIT_S, Memory, published
from tests.examples import some
from tests.server.running import wait_for
from tests.store.faulty_server import FaultyServer
from upriver._threads.executor import DaemonExecutor
from upriver.coldstart import load_program as cold_programs
from upriver.coldstart.fetch import strategy
from upriver.coldstart.fetch.range_planner import PADDING, RangeRequest, TensorPart, apart
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.fetch.weight_stream import WeightStream
from upriver.coldstart.format import manifest
from upriver.coldstart.format.checkpoint import WeightSource, find, object_at
from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.load_model import begin, loading
from upriver.errors import Cancelled, ModelError, StoreError
from upriver.program.capture.prefix import capture
from upriver.store import Store

PATH = "models/net.safetensors"
CHUNK_BYTES = 4096
LIMITS = StreamLimits(request_bytes=20_000, in_flight_bytes=50_000, concurrency=3, timeout_s=20)
LINK = StoreLink(latency_s=0.001, bandwidth_bytes_per_s=1e8)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as running:
        yield running
    wait_for(lambda: not threads(), seconds=WAIT_S)


@pytest.fixture
def store(server: FaultyServer) -> Store:
    return connected(server)


def connected(server: FaultyServer) -> Store:
    options = {
        "endpoint": server.url,
        "access_key_id": "KEY",
        "secret_access_key": "SECRET",
        "max_retries": "0",
        "read_timeout_s": "0.5",
    }
    return Store.open("s3://bucket/p", options=options)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    sizes = [3, 0, 1024, 1, 1025, 30_000, 7, 2048]
    return {f"of.{number}": torch.rand(size) for number, size in enumerate(sizes)}


def expected(source: WeightSource, store: Store) -> dict[int, bytes]:
    whole = store.get(PATH)
    return {index: whole[each.start : each.stop] for index, each in enumerate(source.tensors)}


def begun(store: Store, num_bytes: int) -> Readahead:
    """Start a readahead of the object."""
    ahead = Readahead(store, PATH, num_bytes, timeout_s=LIMITS.timeout_s)
    ahead.start()
    return ahead


def run(source: WeightSource, ahead: Readahead, groups: list[range] | None = None) -> Memory:
    sink = Memory(source)
    every = [range(len(source.tensors))]
    stream = WeightStream(source, groups or every, sink, limits=LIMITS, joins_s=0.1, ahead=ahead, link=LINK)
    stream.start()
    stream.join()
    return sink


def reads(server: FaultyServer) -> list[range]:
    """Return the requested ranges of the object."""
    with server.lock:
        asked = [which for method, path, which in server.requests if method == "GET" and path.endswith(PATH)]
    found = [re.fullmatch(r"bytes=(\d+)-(\d+)", which) for which in asked]
    assert all(found)
    return [range(int(each[1]), int(each[2]) + 1) for each in found if each]


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("num_bytes", some(3, [1, 5000, 10**6, 100, 700, 40_001]))
def test_every_byte_comes_once(num_bytes: int, server: FaultyServer, store: Store) -> None:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    server.requests.clear()
    ahead = begun(store, num_bytes)
    source = find(store, PATH, ahead=ahead)
    assert [method for method, *_ in server.requests].count("HEAD") == 0
    chance = random.Random(num_bytes)
    stops = sorted({*chance.sample(range(1, len(source.tensors)), 3), len(source.tensors)})
    groups = [range(*each) for each in zip([0, *stops], stops, strict=False)]
    sink = run(source, ahead, groups)
    asked = reads(server)
    assert sink.error is None
    assert sink.got == expected(source, store)
    assert asked[0] == range(num_bytes)
    wanted = Counter(at for tensor in source.tensors for at in range(tensor.start, tensor.stop))
    come = Counter(at for each in asked for at in each if at in wanted)
    assert come == wanted


def test_anybodys_header_is_among_them(server: FaultyServer, store: Store) -> None:
    store.put(PATH, save(weights()))
    server.requests.clear()
    ahead = begun(store, 50_000)
    source = find(store, PATH, ahead=ahead)
    assert reads(server) == [range(50_000)]
    assert not any(method == "HEAD" for method, *_ in server.requests)
    assert source == find(store, PATH)
    server.requests.clear()
    sink = run(source, ahead)
    assert min(each.start for each in reads(server)) == 50_000
    assert sink.got == expected(source, store)


def test_a_header_that_is_longer_is_asked_for(server: FaultyServer, store: Store) -> None:
    store.put(PATH, save(weights()))
    ahead = begun(store, 100)
    assert find(store, PATH, ahead=ahead) == find(store, PATH)
    ahead.close()


def test_what_is_known_of_another_object_is_asked_for(store: Store) -> None:
    store.put(PATH, b"0123456789")
    store.put("other", b"another")
    ahead = begun(store, 5)
    assert ahead.head("other") == store.head("other")
    assert ahead.get_range("other", 1, 4) == b"not"
    assert ahead.head(PATH) == store.head(PATH)
    assert ahead.get_range(PATH, 1, 4) == b"123"
    assert ahead.get_range(PATH, 1, 7) == b"123456"
    with pytest.raises(StoreError, match="no longer the one"):
        ahead.get_range(PATH, 1, 4, etag='"of another"')
    ahead.close()
    assert ahead.get_range(PATH, 1, 4) == b"123"


@pytest.mark.parametrize("limits", [LIMITS, StreamLimits()])
def test_how_long_they_took_to_begin_is_the_latency(
    limits: StreamLimits, server: FaultyServer, store: Store
) -> None:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    server.requests.clear()
    ahead = begun(store, 5000)
    source = find(store, PATH, ahead=ahead)
    with DaemonExecutor(1, name="test") as beside:
        link, _ = strategy.way_to(source, PATH, "upriver", limits, beside, ahead)
    assert link.latency_s == ahead.first_s - ahead.sent_s > 0
    assert reads(server) == [range(5000)]
    ahead.close()


@pytest.mark.parametrize("path", ["a/net", "a/net.safetensors", "a/net/"])
def test_what_is_looked_at_first(path: str) -> None:
    assert object_at(path) == "a/net.safetensors"
    assert object_at("a/net.safetensors.index.json") is object_at("a/net.bin") is None


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("fault", ["cut", "reset", "stalled", "silent", "flipped", "short", 403, 404, 503])
@pytest.mark.parametrize("num_bytes", some(1, [4000, 10**6]))
def test_where_it_fails_the_store_is_asked(
    fault: int | str, num_bytes: int, server: FaultyServer, store: Store
) -> None:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    server.requests.clear()
    server.faults = [fault]
    ahead = begun(store, num_bytes)
    wait_for(lambda: not server.faults, seconds=WAIT_S)
    source = find(store, PATH, ahead=ahead)
    sink = run(source, ahead)
    assert sink.error is None
    assert sink.got == expected(source, store)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_an_object_that_is_replaced_meanwhile_is_never_mixed_with_the_other(
    fault: str, ours: bool, server: FaultyServer, store: Store
) -> None:
    if ours:
        manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    else:
        store.put(PATH, save(weights()))
    server.faults = [fault]
    ahead = begun(store, 60_000)
    wait_for(lambda: not server.faults, seconds=WAIT_S)
    with pytest.raises(Exception, match=r"was replaced|is not the one|no object|header") as raised:
        run_whole(store, ahead)
    assert isinstance(raised.value, StoreError) or "header" in str(raised.value)
    ahead.close()


def run_whole(store: Store, ahead: Readahead) -> None:
    sink = run(find(store, PATH, ahead=ahead), ahead)
    if sink.error is not None:
        raise sink.error


def test_what_was_published_anew_since_is_what_is_loaded(server: FaultyServer, store: Store) -> None:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    ahead = begun(store, 60_000)
    wait_for(lambda: ahead.come >= 60_000, seconds=WAIT_S)
    manifest.publish(weights(seed=1), store, PATH, chunk_bytes=CHUNK_BYTES)
    source = find(store, PATH, ahead=ahead)
    sink = run(source, ahead)
    assert sink.got == expected(source, store)
    assert sink.got[0] == weights(seed=1)["of.0"].numpy().tobytes()


def test_no_thread_can_be_started(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.publish(weights(), store, PATH, chunk_bytes=CHUNK_BYTES)
    ahead = Readahead(store, PATH, 5000, timeout_s=60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refused)
        ahead.start()
    source = find(store, PATH, ahead=ahead)
    assert run(source, ahead).got == expected(source, store)


def _refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("fault", ["silent", "stalled"])
def test_nobody_waits_for_one_that_is_closed(fault: str, server: FaultyServer) -> None:
    store = Store.open(
        "s3://bucket/p",
        options={"endpoint": server.url, "anonymous": "true", "region": "none", "read_timeout_s": "100"},
    )
    store.put(PATH, b"0" * 100_000)
    server.faults = [fault]
    ahead = Readahead(store, PATH, 50_000, timeout_s=100)
    ahead.start()
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(ahead.get_range(PATH, 40_000, 40_001)))
    wait_for(lambda: not server.faults, seconds=WAIT_S)
    asking.start()
    ahead.close()
    asking.join(WAIT_S)
    assert found == [b"0"]
    assert not any(thread.name == "upriver-coldstart-ahead" for thread in threads())


# --------------------------------------------------------------------------------- loads


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 4)).eval()


X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture
def a_little(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the readahead to these bytes, fewer than the model has."""
    monkeypatch.setattr(strategy, "MOST_BYTES", 50_000)
    return 50_000


def put(store: Store) -> None:
    model = build()
    manifest.publish(model.state_dict(), store, PATH, chunk_bytes=CHUNK_BYTES)


@pytest.mark.parametrize("form", ["ours", "anybody's"])
def test_a_load_answers_with_them(form: str, a_little: int, server: FaultyServer, store: Store) -> None:
    put(store) if form == "ours" else store.put(PATH, save(build().state_dict()))
    server.requests.clear()
    model, handle = begin(build, PATH, store=store)
    assert torch.equal(model(X), build()(X))
    assert handle.wait(WAIT_S)
    wait_for(lambda: not threads(), seconds=WAIT_S)
    assert reads(server)[0] == range(a_little) or range(a_little) in reads(server)
    assert sum(map(len, reads(server))) <= store.head(PATH).size
    history = handle.history()
    asked = next(moment for moment in history if moment.kind == "request")
    found = next(moment for moment in history if moment.kind == "found")
    assert 0 <= asked.at_s <= found.at_s


def test_a_program_answers_with_them(a_little: int, server: FaultyServer, store: Store) -> None:
    program = capture(build(), (X,))
    cold_programs.publish(program, store)
    server.requests.clear()
    cold = cold_programs.open(store=store, digest=program.digest)
    assert torch.equal(cold.run((X,), 0, cold.num_stages)[0], build()(X))
    coming = cold_programs.arriving(cold)
    assert coming is None or coming.wait(WAIT_S)
    asked = [which for method, path, which in server.requests if path.endswith(".safetensors")]
    assert f"bytes=0-{a_little - 1}" in asked
    assert not any(method == "HEAD" for method, *_ in server.requests)


def test_of_a_program_up_to_a_cut_nothing_else_is_asked_for(server: FaultyServer, store: Store) -> None:
    program = capture(build(), (X,))
    cold_programs.publish(program, store)
    server.requests.clear()
    cold = cold_programs.open(store=store, digest=program.digest, stop=1)
    cold.run((X,), 0, 1)
    coming = cold_programs.arriving(cold)
    assert coming is None or coming.wait(WAIT_S)
    ranges = [which for _, path, which in server.requests if path.endswith(".safetensors") and which]
    assert ranges and not any(which.startswith("bytes=0-") for which in ranges)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"grouping": "pisel"},
        {"grouping": "layer_by_layer"},
        {"limits": StreamLimits(bandwidth_bytes_per_s=1e8)},
    ],
)
def test_who_asks_otherwise_asks_for_nothing_before(
    otherwise: dict[str, object], server: FaultyServer, store: Store
) -> None:
    put(store)
    server.requests.clear()
    model, handle = begin(build, PATH, store=store, **otherwise)  # type: ignore[arg-type]
    assert torch.equal(model(X), build()(X))
    assert handle.wait(WAIT_S)
    assert not any(each.start == 0 and len(each) > 1 for each in reads(server))


def test_no_file_is_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Readahead, "start")
    store = Store.open(tmp_path.as_uri())
    put(store)
    model, handle = begin(build, PATH, store=store)
    assert torch.equal(model(X), build()(X)) and handle.wait(WAIT_S)


def test_a_model_that_does_not_match_asks_for_no_more(
    a_little: int, server: FaultyServer, store: Store
) -> None:
    put(store)
    server.requests.clear()
    with pytest.raises(ModelError, match="missing"):
        begin(lambda: nn.Sequential(build(), nn.Linear(2, 2)), PATH, store=store)
    wait_for(lambda: not threads(), seconds=WAIT_S)
    assert reads(server) in ([], [range(a_little)])


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_nothing_is_left_of_a_load_whose_constructor_fails(
    error: type[BaseException], a_little: int, server: FaultyServer, store: Store
) -> None:
    put(store)
    before = num_descriptors()

    def fails() -> nn.Module:
        wait_for(lambda: len(server.requests) >= 2, seconds=WAIT_S)
        raise error("mine")

    for faults in ([], ["silent", "silent"]):
        server.requests.clear()
        server.faults = list(faults)
        with pytest.raises(error, match="mine"):
            begin(fails, PATH, store=store)
        server.faults.clear()
        wait_for(lambda: not threads(), seconds=WAIT_S)
    del store
    wait_for(lambda: num_descriptors() <= before + 4, seconds=WAIT_S)  # connections that the pool keeps


def test_a_load_that_is_cancelled_ends_it(server: FaultyServer, store: Store) -> None:
    put(store)
    server.faults = ["stalled", "stalled"]
    held = Store.open(
        "s3://bucket/p",
        options={"endpoint": server.url, "anonymous": "true", "region": "none", "read_timeout_s": "100"},
    )
    ahead = Readahead(held, PATH, 50_000, timeout_s=100)
    ahead.start()
    wait_for(lambda: len(server.faults) < 2, seconds=WAIT_S)
    server.faults.clear()
    source = published(held, PATH)
    sink = Memory(source)
    stream = WeightStream(source, [range(len(source.tensors))], sink, ahead=ahead, link=LINK)
    stream.start()
    stream.cancel()
    stream.join(WAIT_S)
    assert isinstance(sink.error, Cancelled)
    wait_for(lambda: not threads(), seconds=WAIT_S)


def test_weights_that_fill_nothing_end_it(store: Store) -> None:
    manifest.publish({"nothing": torch.ones(0)}, store, PATH)
    model, handle = begin(lambda: Nothing(), PATH, store=store, strict=False)
    assert handle.wait(WAIT_S) and loading(model) is None
    wait_for(lambda: not threads(), seconds=WAIT_S)


class Nothing(nn.Module):
    """A model without weights."""


# --------------------------------------------------------------------------------- dividing requests


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8), st.integers(0, 90))
def test_requests_that_reach_further_are_divided(sizes: list[tuple[int, bool]], stop: int) -> None:
    parts, starts = [], Counter[int]()
    for number, (size, padded) in enumerate(sizes):
        if padded and number not in (0, len(sizes) - 1):
            parts.append(TensorPart(PADDING, 0, size))
        else:
            tensor = number // 2 if not (number % 2 and padded) else number
            parts.append(TensorPart(tensor, starts[tensor], starts[tensor] + size))
            starts[tensor] += size
    requests = [RangeRequest.of("a", 7, parts), RangeRequest.of("b", 0, [TensorPart(0, 0, 5)])]
    among, others = apart(requests, "a", stop)
    assert all(each.path == "a" and each.stop <= stop for each in among)
    assert all(each.path == "b" or each.start >= stop for each in others)

    def placed(several: list[RangeRequest]) -> list[tuple[str, int, int, int]]:
        found = []
        for each in several:
            at = each.start
            for part in each.parts:
                if part.tensor != PADDING:
                    found += [
                        (each.path, at + byte, part.tensor, part.start + byte) for byte in range(part.nbytes)
                    ]
                at += part.nbytes
            assert at == each.stop
            assert PADDING not in (each.parts[0].tensor, each.parts[-1].tensor)
        return found

    assert sorted(placed(among) + placed(others)) == sorted(placed(requests))
