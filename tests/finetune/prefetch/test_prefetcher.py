import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.rpc.scripted_transport import BATCH_BYTES, ScriptedServer, Step, make_batch, request_for
from upriver.control.delivery_table import MAX_REMOTE_ATTEMPTS, DealtRoute, PrefetchWindow, Way
from upriver.control.server_choice import Health
from upriver.errors import (
    BadSample,
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    ObjectChanged,
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    QuotaExceeded,
    ServerUnavailable,
    StoreError,
    TooLarge,
    WorkerCrashed,
)
from upriver.finetune.prefetch.fetch_threads import LOCAL, LoaderClosed, MakeLocally, RemoteFetch
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.retry import Backoff, RetryBudget
from upriver.rpc.client import AnswerClosed
from upriver.rpc.server_pool import ServerPool
from upriver.types import MicroBatch, Timings

EXPECTED = dict.fromkeys(Way, BATCH_BYTES)


def epoch(num: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Return micro-batches of one or two samples, in an order that is not the natural one."""
    starts = list(range(0, 2 * num, 2))
    random.Random(seed).shuffle(starts)
    return [(start, start + 1) if start % 4 else (start,) for start in starts]


def locally(ids: tuple[int, ...]) -> tuple[MicroBatch, Timings]:
    return make_batch(ids), Timings(phases={"read": 1.0})


def pool_of(*servers: ScriptedServer, **options: object) -> ServerPool:
    options = {"backoff": Backoff(base_s=0.001, cap_s=0.01), "quiet_s": 0.05} | options
    pool = ServerPool(servers, **options)
    pool.wait_joined(60)
    return pool


def remote(pool: ServerPool, micro_batches: list[tuple[int, ...]], **options: int) -> RemoteFetch:
    return RemoteFetch(
        pool=pool, make_request=request_for(micro_batches), **{"connections": 4, "per_request": 4, **options}
    )


def check(got: list[MicroBatch], wanted: list[tuple[int, ...]]) -> None:
    """Check that exactly those samples come, in exactly this order, each with its own tensor."""
    assert [batch.ids for batch in got] == wanted
    for batch in got:
        assert torch.equal(batch.tensors[0], make_batch(batch.ids).tensors[0])


CLOSING = "upriver-closing"
"""Name of the one thread of a process that closes what is no longer used."""


@pytest.fixture(autouse=True)
def no_thread_left():
    gc.collect()
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while left := {thread for thread in threading.enumerate() if thread.name != CLOSING} - before:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.005)


# -------------------------------------------------------------------------------------- any schedule

ERRORS = st.sampled_from(
    [
        ServerUnavailable("reset"),
        Overloaded("full", retry_after_s=0.001),
        QuotaExceeded("two at once", retry_after_s=0.001),
        DoesNotFit("9 GB of memory"),
        DeadlineExceeded("too slow"),
        TooLarge("an image of 10000 x 10000 pixels"),
        Forbidden("not yours"),
        WorkerCrashed("killed"),
        ProgramNotFound("forgotten"),
        ProtocolError("nonsense"),
        StoreError("503"),
    ]
)
STEPS = st.builds(
    Step,
    good=st.integers(0, 3),
    error=st.none() | ERRORS,
    delay_s=st.sampled_from([0.0, 0.0, 0.001]),
    lie=st.sampled_from(["", "", "", "swap", "repeat", "short"]),
)
SCRIPTS = st.lists(STEPS, max_size=8)


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num=st.integers(0, 24),
    scripts=st.lists(SCRIPTS, max_size=3),
    probes=st.lists(st.booleans(), max_size=3),
    window=st.integers(1, 12),
    window_batches_of_bytes=st.integers(1, 12),
    connections=st.integers(1, 4),
    per_request=st.integers(1, 5),
    num_workers=st.integers(1, 3),
    budget=st.integers(0, 10),
    consumer_s=st.sampled_from([0.0, 0.001]),
    finish_s=st.sampled_from([None, 0.0, 0.001]),
    data=st.data(),
)
def test_exactly_once_in_order_whatever_happens(
    num,
    scripts,
    probes,
    window,
    window_batches_of_bytes,
    connections,
    per_request,
    num_workers,
    budget,
    consumer_s,
    finish_s,
    data,
):
    first = data.draw(st.integers(0, num), label="first")
    micro_batches = epoch(num)
    index_of = {ids: index for index, ids in enumerate(micro_batches)}
    most_bytes = window_batches_of_bytes * BATCH_BYTES
    servers = [ScriptedServer(f"s{i}", script, probes=probes) for i, script in enumerate(scripts)]
    pool = pool_of(*servers, budget=RetryBudget(budget)) if servers else None
    seen_timings, too_far = [], []

    def ahead(index: int) -> None:
        if index >= loader.position + window:
            too_far.append(index)

    def make_request(indices, cut=None):
        started.wait()
        ahead(indices[-1])
        assert list(indices) == list(range(indices[0], indices[-1] + 1, connections))
        return request_for(micro_batches)(indices)

    def local(ids):
        started.wait()
        ahead(index_of[ids])
        return locally(ids)

    finished: list[tuple[int, ...]] = []

    def finish(batch: MicroBatch) -> MicroBatch:
        assert threading.current_thread() is threading.main_thread()
        assert batch.position == 0
        finished.append(batch.ids)
        time.sleep(finish_s)
        return replace(batch, position=9, tensors=tuple(-tensor for tensor in batch.tensors))

    def unfinished(batch: MicroBatch) -> MicroBatch:
        assert batch.position == 9
        return replace(batch, position=0, tensors=tuple(-tensor for tensor in batch.tensors))

    started = threading.Event()  # the callables use the loader, which starts before the name is bound
    asking = None
    if pool:
        asking = RemoteFetch(
            pool=pool, make_request=make_request, connections=connections, per_request=per_request
        )
    loader = Prefetcher(
        micro_batches,
        local=local,
        first=first,
        remote=asking,
        window=PrefetchWindow(micro_batches=window, num_bytes=most_bytes),
        num_workers=num_workers,
        expected_bytes=EXPECTED,
        on_timings=lambda index, source, came, timings: seen_timings.append((index, source, came.position)),
        finish=None if finish_s is None else finish,
    )
    started.set()
    got = []
    with loader:
        for batch in loader:
            got.append(batch)
            assert loader._crew.table.held_bytes <= most_bytes + BATCH_BYTES
            if consumer_s:
                time.sleep(consumer_s)
    if pool:
        pool.close()
    if finish_s is not None:
        got = [unfinished(batch) for batch in got]
        assert sorted(finished) == sorted(micro_batches[first:]), "each once, ahead of its turn or not"
    check(got, micro_batches[first:])
    assert too_far == []
    assert [index for index, _, _ in seen_timings] == list(range(first, num))
    assert {position for _, _, position in seen_timings} <= {0}, "as they came"
    report = loader.report
    assert sum(report.samples.values()) == sum(len(ids) for ids in micro_batches[first:])
    for source, samples in report.samples.items():
        assert samples == sum(len(micro_batches[i]) for i, by, _ in seen_timings if by == source)
    assert all(len(request) <= per_request for server in servers for request in server.requests)


# -------------------------------------------------------------------------------------- single cases


def test_requests_are_the_shorter_the_more_routes_there_are():
    micro_batches, asked = epoch(24), []
    dealt = [DealtRoute(way=Way.REMOTE, cut=1 + index % 2) for index in range(16)]
    dealt += [DealtRoute(way=Way.REMOTE, cut=2)] * 8

    def make_request(indices, cut):
        asked.append((cut, indices))
        return request_for(micro_batches)(indices)

    with (
        pool_of(ScriptedServer("a")) as pool,
        Prefetcher(
            micro_batches,
            local=locally,
            remote=RemoteFetch(pool=pool, make_request=make_request, connections=2, per_request=4),
            window=PrefetchWindow(micro_batches=16),
            dealt=dealt,
        ) as loader,
    ):
        check(list(loader), micro_batches)
    assert all(dealt[index].cut == cut for cut, indices in asked for index in indices)
    assert max(len(indices) for cut, indices in asked if cut == 1) == 2
    assert max(len(indices) for cut, indices in asked if cut == 2) > 2, "alone again, at the end"


def first_waits_for(event: threading.Event, micro_batches: list[tuple[int, ...]]) -> MakeLocally:
    """Return a plain path that delivers the first micro-batch only after an event."""

    def local(ids: tuple[int, ...]) -> tuple[MicroBatch, Timings]:
        if ids == micro_batches[0]:
            assert event.wait(60)
        return locally(ids)

    return local


def test_what_has_come_is_finished_while_the_one_that_is_due_is_on_its_way():
    """The first micro-batch completes only after all others were processed, while the job waits for it."""
    micro_batches = epoch(6)
    others_done, finished = threading.Event(), []

    def finish(batch: MicroBatch) -> MicroBatch:
        finished.append(batch.ids)
        if len(finished) == 5:
            others_done.set()
        return batch

    local = first_waits_for(others_done, micro_batches)
    with Prefetcher(micro_batches, local=local, num_workers=3, finish=finish) as loader:
        check(list(loader), micro_batches)
    assert finished[-1] == micro_batches[0] and sorted(finished) == sorted(micro_batches)


def test_what_cannot_be_finished_is_an_error_in_its_turn():
    micro_batches = epoch(4)
    tried, got = threading.Event(), []

    def finish(batch: MicroBatch) -> MicroBatch:
        if batch.ids == micro_batches[2]:
            tried.set()
            raise BadSample(sample=batch.ids[0], object_name="x", reason="torn")
        return batch

    local = first_waits_for(tried, micro_batches)
    with (
        Prefetcher(micro_batches, local=local, num_workers=2, finish=finish) as loader,
        pytest.raises(BadSample, match="torn"),
    ):
        for batch in loader:
            got.append(batch)
    check(got, micro_batches[:2])


def test_the_plain_way():
    micro_batches = epoch(30)
    with Prefetcher(micro_batches, local=locally, num_workers=3) as loader:
        check(list(loader), micro_batches)
        assert list(loader) == []
    assert set(loader.report.samples) == {LOCAL}
    assert loader.report.retried == 0


def test_servers_do_it_all_while_they_are_well():
    micro_batches = epoch(40)
    servers = [ScriptedServer("a"), ScriptedServer("b")]
    with (
        pool_of(*servers) as pool,
        Prefetcher(micro_batches, local=locally, remote=remote(pool, micro_batches)) as loader,
    ):
        check(list(loader), micro_batches)
    assert LOCAL not in loader.report.samples
    assert sum(loader.report.samples.values()) == sum(map(len, micro_batches))
    assert sum(len(request) for server in servers for request in server.requests) == len(micro_batches)


def test_micro_batches_go_several_to_a_request():
    micro_batches = epoch(64)
    server = ScriptedServer("a")
    with pool_of(server) as pool:
        asking = remote(pool, micro_batches, connections=2, per_request=4)
        with Prefetcher(
            micro_batches, local=locally, remote=asking, window=PrefetchWindow(micro_batches=16)
        ) as loader:
            check(list(loader), micro_batches)
    assert [len(request) for request in server.requests] == [4] * 16


def test_only_what_is_missing_is_asked_for_again():
    micro_batches = epoch(8)
    server = ScriptedServer("a", [Step(good=3, error=ServerUnavailable("reset"))])
    with pool_of(server, backoff=Backoff(base_s=1e-6, cap_s=1e-6)) as pool:
        asking = remote(pool, micro_batches, connections=1, per_request=8)
        slow = lambda ids: (time.sleep(0.05), locally(ids))[1]  # noqa: E731
        with Prefetcher(
            micro_batches, local=slow, remote=asking, window=PrefetchWindow(micro_batches=16)
        ) as loader:
            check(list(loader), micro_batches)
    asked = [ids for request in server.requests for ids in request]
    assert asked[:8] == micro_batches
    assert not set(asked[8:]) & set(micro_batches[:3]), "they had arrived"
    assert loader.report.retried == 5


def test_the_epoch_goes_on_here_while_all_servers_are_down_and_there_once_one_is_back():
    micro_batches = epoch(60)
    server = ScriptedServer("a", [Step(), Step(good=1, error=ServerUnavailable("killed"))])
    with pool_of(server) as pool:
        asking = remote(pool, micro_batches, connections=1, per_request=2)
        window = PrefetchWindow(micro_batches=8)
        sources = []
        loader = Prefetcher(
            micro_batches,
            local=locally,
            remote=asking,
            window=window,
            on_timings=lambda index, source, batch, timings: sources.append(source),
        )
        got = []
        with loader:
            for batch in loader:
                got.append(batch)
                if len(got) == 3:
                    server.dead = True
                if LOCAL in sources and sources.count(LOCAL) == 10:
                    server.dead = False
                    while not pool.usable:
                        time.sleep(0.001)
        check(got, micro_batches)
    back = len(sources) - sources[::-1].index(LOCAL)
    assert sources[:2] == ["a", "a"] and sources.count(LOCAL) >= 10
    assert set(sources[back:]) == {"a"} and len(sources[back:]) > 0


def test_a_stuck_server_is_left_for_another():
    micro_batches = epoch(12)
    stuck, well = ScriptedServer("stuck"), ScriptedServer("well")

    class Hangs:
        """Send nothing until the request is cancelled."""

        def __init__(self):
            self.closed = threading.Event()

        def __iter__(self):
            return self

        def __next__(self):
            if not (stuck.aborted.wait(60) or self.closed.is_set()):
                raise AssertionError("nobody noticed")
            raise ServerUnavailable("broken off")

        def close(self):
            self.closed.set()

    with pool_of(stuck, well) as pool:
        stuck.run = lambda request: Hangs()  # type: ignore[method-assign]
        stuck.dead = True
        with Prefetcher(micro_batches, local=locally, remote=remote(pool, micro_batches)) as loader:
            check(list(loader), micro_batches)
    assert set(loader.report.samples) == {"well"}
    assert loader.report.retried > 0


def test_what_kills_servers_is_done_here():
    micro_batches = epoch(10)

    class Fragile(ScriptedServer):
        def run(self, request):
            if micro_batches[4] in request.micro_batches:
                at = request.micro_batches.index(micro_batches[4])
                self.script.appendleft(Step(good=at, error=WorkerCrashed("killed")))
            return super().run(request)

    server = Fragile("a")
    with (
        pool_of(server) as pool,
        Prefetcher(micro_batches, local=locally, remote=remote(pool, micro_batches)) as loader,
    ):
        check(list(loader), micro_batches)
    assert loader.report.samples[LOCAL] == len(micro_batches[4])
    assert sum(micro_batches[4] in request for request in server.requests) == MAX_REMOTE_ATTEMPTS


def test_a_server_that_always_fails_is_not_asked_for_ever():
    micro_batches = epoch(200)
    server = ScriptedServer("a", [Step(good=0, error=WorkerCrashed("again"))] * 10_000)
    with pool_of(server, budget=RetryBudget(5)) as pool:
        asking = remote(pool, micro_batches, connections=2, per_request=2)
        with Prefetcher(
            micro_batches, local=locally, remote=asking, window=PrefetchWindow(micro_batches=8)
        ) as loader:
            check(list(loader), micro_batches)
    # Each micro-batch is requested once in its first place; repeats are charged to the budget.
    assert len(server.requests) <= len(micro_batches) + 5


@pytest.mark.parametrize("kind", [Overloaded, QuotaExceeded])
def test_overload_is_waited_out_not_hammered(kind):
    micro_batches = epoch(20)
    server = ScriptedServer("a", [Step(error=kind("full", retry_after_s=0.01))] * 3)
    with pool_of(server, budget=RetryBudget(1, per_success=0.0)) as pool:
        asking = remote(pool, micro_batches, connections=1)
        with Prefetcher(micro_batches, local=locally, remote=asking) as loader:
            check(list(loader), micro_batches)
        assert pool.budget.withdraw(), "being refused costs no retry"
    assert loader.report.retried == 0, "being refused is no failure"


@pytest.mark.parametrize(
    "error", [DoesNotFit("needs 9 GB"), DeadlineExceeded("10 s are over"), TooLarge("an image of 100 Mpx")]
)
def test_what_does_not_fit_a_server_or_its_time_is_made_here_and_the_server_stays(error):
    micro_batches = epoch(8)
    server = ScriptedServer("a", [Step(good=1, error=error)])
    with pool_of(server, budget=RetryBudget(1, per_success=0.0)) as pool:
        asking = remote(pool, micro_batches, connections=1, per_request=4)
        with Prefetcher(micro_batches, local=locally, remote=asking) as loader:
            check(list(loader), micro_batches)
        [status] = pool.status()
        assert (status.health, status.reason, status.available) == (Health.UP, "", 1.0)
        assert pool.budget.withdraw(), "nothing is tried again"
    asked = [ids for request in server.requests for ids in request]
    assert sorted(asked) == sorted(micro_batches), "and each was asked for once"
    assert loader.report.samples[LOCAL] == sum(map(len, micro_batches[1:4]))


def test_a_server_that_is_not_for_this_job_is_told_of_and_the_epoch_goes_on_here():
    micro_batches, admitted = epoch(8), []

    def admit(client):
        admitted.append(client.url)
        if len(admitted) > 1:
            raise Forbidden("not yours")

    server = ScriptedServer("a", [Step(good=1, error=Forbidden("not yours"))])
    with pool_of(server, admit=admit, backoff=Backoff(base_s=100, cap_s=100)) as pool:
        asking = remote(pool, micro_batches, connections=1, per_request=2)
        with Prefetcher(micro_batches, local=locally, remote=asking) as loader:
            check(list(loader), micro_batches)
        [status] = pool.status()
        assert (status.health, status.reason) == (Health.DOWN, "not yours")
    assert loader.report.samples["a"] == len(micro_batches[0])


def test_resume_at_any_index():
    micro_batches = epoch(6)
    with pool_of(ScriptedServer("a")) as pool:
        for first in range(7):
            with Prefetcher(
                micro_batches, local=locally, first=first, remote=remote(pool, micro_batches)
            ) as loader:
                check(list(loader), micro_batches[first:])
                assert loader.position == 6


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "error", [BadSample(sample=8, object_name="o", reason="truncated"), ObjectChanged("o changed")]
)
@pytest.mark.parametrize("where", ["here", "there"])
def test_errors_surface_in_their_place(error, where):
    micro_batches = epoch(12)

    def local(ids):
        if where == "here" and ids == micro_batches[5]:
            raise error
        return locally(ids)

    class Honest(ScriptedServer):
        def run(self, request):
            if micro_batches[5] in request.micro_batches:
                self.script.appendleft(Step(good=request.micro_batches.index(micro_batches[5]), error=error))
            return super().run(request)

    pool = pool_of(Honest("a")) if where == "there" else None
    got = []
    asking = remote(pool, micro_batches) if pool else None
    loader = Prefetcher(micro_batches, local=local, remote=asking, num_workers=3)
    with pytest.raises(type(error)) as caught:
        for batch in loader:
            got.append(batch)
    assert caught.value is error
    check(got, micro_batches[:5])
    with pytest.raises(type(error)):
        next(loader)
    if pool:
        assert pool.usable, "the server is not to blame"
        pool.close()


def test_a_store_that_fails_there_is_read_here():
    micro_batches = epoch(4)
    server = ScriptedServer("a", [Step(good=1, error=StoreError("the server's store timed out"))])
    with pool_of(server) as pool:
        asking = remote(pool, micro_batches, connections=1, per_request=4)
        with Prefetcher(micro_batches, local=locally, remote=asking) as loader:
            check(list(loader), micro_batches)
    assert loader.report.samples[LOCAL] == sum(map(len, micro_batches[1:]))


def test_a_fault_in_a_callable_reaches_the_consumer():
    micro_batches = epoch(3)
    with pool_of(ScriptedServer("a")) as pool:
        asking = RemoteFetch(pool=pool, make_request=lambda indices, cut: 1 / 0, connections=4, per_request=4)
        with (
            Prefetcher(micro_batches, local=locally, remote=asking) as loader,
            pytest.raises(ZeroDivisionError),
        ):
            next(loader)


def test_a_fault_of_our_own_reaches_the_consumer():
    micro_batches = epoch(3)
    loader = Prefetcher(micro_batches, local=lambda ids: ("no micro-batch", Timings()))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        next(loader)


def test_skipped_samples_are_reported():
    micro_batches = [(0, 1), (2, 3)]

    def local(ids):
        batch = make_batch(ids)
        return MicroBatch(ids=ids, position=0, tensors=batch.tensors, skipped=(ids[1],)), Timings()

    with Prefetcher(micro_batches, local=local) as loader:
        list(loader)
    assert loader.report.skipped == (1, 3)
    assert loader.report.samples == {LOCAL: 4}


# --------------------------------------------------------------------------------------------- ending


def test_closing_in_the_middle():
    micro_batches = epoch(100)
    with pool_of(ScriptedServer("a", [Step(delay_s=0.002)] * 100)) as pool:
        loader = Prefetcher(micro_batches, local=locally, remote=remote(pool, micro_batches))
        for _ in range(3):
            next(loader)
        loader.close()
        loader.close()
        with pytest.raises(LoaderClosed, match="micro-batch 3"):
            next(loader)
        assert pool.usable, "breaking off is not the server's fault"
        assert pool.status()[0].in_flight == 0


def test_closing_breaks_off_what_a_server_is_still_at():
    micro_batches = epoch(4)
    reading = threading.Event()

    class Slow:
        """Compute until a test stops it."""

        def __init__(self):
            self.closed = threading.Event()

        def __iter__(self):
            return self

        def __next__(self):
            reading.set()
            told = self.closed.wait(60)
            raise AnswerClosed("closed") if told else AssertionError("nobody closed the answer")

        def close(self):
            self.closed.set()

    server = ScriptedServer("a")
    server.run = lambda request: Slow()  # type: ignore[method-assign]
    with pool_of(server) as pool:
        loader = Prefetcher(micro_batches, local=locally, remote=remote(pool, micro_batches, connections=1))
        assert reading.wait(60)
        loader.close()
        delivered = loader._crew.table._slots[0].delivery
        assert delivered is not None and isinstance(delivered.error, AnswerClosed), "not by its own timeout"
        assert pool.usable


def test_a_forgotten_loader_is_closed():
    micro_batches = epoch(100)
    loader = Prefetcher(micro_batches, local=locally, window=PrefetchWindow(micro_batches=4), num_workers=2)
    next(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None  # and the fixture checks that the threads have ended


def test_an_exception_in_the_consumer_leaves_nothing_running():
    micro_batches = epoch(100)
    with pytest.raises(KeyError), Prefetcher(micro_batches, local=locally) as loader:
        for _ in loader:
            raise KeyError("the user's own")


def test_empty_epoch():
    with Prefetcher([], local=locally) as loader:
        assert list(loader) == []


# ------------------------------------------------------------------------------- servers come and go


def slowly(ids):
    """Make the local path slower than any server, so that waiting for servers pays."""
    time.sleep(0.02)
    return locally(ids)


def test_a_server_that_is_added_in_mid_epoch_gets_work():
    micro_batches, sources, got = epoch(60), [], []
    with pool_of(ScriptedServer("a", [Step(delay_s=0.002)] * 60)) as pool:
        asking = remote(pool, micro_batches, connections=4, per_request=1)
        loader = Prefetcher(
            micro_batches,
            local=slowly,
            remote=asking,
            window=PrefetchWindow(micro_batches=8),
            on_timings=lambda index, source, batch, timings: sources.append(source),
        )
        with loader:
            for batch in loader:
                got.append(batch)
                if len(got) == 20:
                    pool.add(ScriptedServer("b", [Step(delay_s=0.002)] * 60))
                    assert pool.wait_joined(10, {"b"})
        assert pool.urls == ("a", "b")
    check(got, micro_batches)
    assert set(sources[:20]) == {"a"} and set(sources[28:]) == {"a", "b"}
    assert loader.report.retried == 0


@pytest.mark.parametrize("both", [True, False])
def test_a_server_that_is_dropped_in_mid_epoch_ends_what_it_is_at(both):
    """No micro-batch is lost or repeated, and the order holds, with or without another server."""
    micro_batches, sources, got = epoch(60), [], []
    leaving = ScriptedServer("a", [Step(delay_s=0.002)] * 60)
    others = [ScriptedServer("b", [Step(delay_s=0.002)] * 60)] if both else []
    with pool_of(leaving, *others) as pool:
        asking = remote(pool, micro_batches, connections=4, per_request=2)
        loader = Prefetcher(
            micro_batches,
            local=slowly if both else locally,
            remote=asking,
            window=PrefetchWindow(micro_batches=12),
            on_timings=lambda index, source, batch, timings: sources.append(source),
        )
        with loader:
            for batch in loader:
                got.append(batch)
                if len(got) == 20:
                    pool.drop("a")
                    asked = len(leaving.requests)
                    assert pool.urls == (("b",) if both else ())
                    assert pool.usable is both
        assert leaving.closed
    check(got, micro_batches)
    assert "a" in sources[:20] and "a" not in sources[33:]
    assert len(leaving.requests) <= asked + 4, "but for those that had it lent already"
    assert loader.report.retried == 0, "what it was at came to its end"


def test_two_loaders_share_a_pool():
    micro_batches = epoch(30)
    with pool_of(ScriptedServer("a"), max_in_flight=2) as pool:
        asking = remote(pool, micro_batches)
        with (
            Prefetcher(micro_batches, local=locally, remote=asking) as one,
            Prefetcher(micro_batches, local=locally, remote=asking) as two,
        ):
            pairs = list(zip(one, two, strict=True))
    check([batch for batch, _ in pairs], micro_batches)
    check([batch for _, batch in pairs], micro_batches)


LEFT_OPEN = """
import threading, time
from tests.rpc.scripted_transport import make_batch
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.types import Timings

begun = threading.Event()

def local(ids):
    begun.set()
    time.sleep(0.3)
    print("made", flush=True)
    return make_batch(ids), Timings()

prefetcher = Prefetcher([(number,) for number in range(50)], local=local)
begun.wait()
"""


@pytest.mark.full  # imports torch anew
def test_the_end_of_the_process_waits_for_what_is_being_made_and_begins_no_more():
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")
