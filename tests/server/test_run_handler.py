"""Test run requests: in order, one micro-batch computed at a time, the next one read meanwhile."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.fair_queue import FairQueue
from upriver.control.memory_budget import MemoryBudget
from upriver.errors import DeadlineExceeded, Overloaded, QuotaExceeded, UpriverError
from upriver.protocol import PREFIX_NBYTES, End, RunRequest, encode
from upriver.server import ServerConfig
from upriver.server.execution.run_context import AdmittedRequest, ResolvedRequest, groups_of
from upriver.server.execution.worker_process import Result
from upriver.server.http.errors import ErrorWording
from upriver.server.observability.load import LoadMeter
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.run_handler import JOINED_BYTES, RunHandler
from upriver.server.scheduling.answer_memory import MemoryUse
from upriver.server.scheduling.footprint import TAIL_BYTES
from upriver.server.scheduling.turn_gate import TurnGate
from upriver.server.tenants import ANYONE, Tenant, hash_token
from upriver.types import Timings

PARTS = 5


class Workers:
    """Stand-in for the workers that records what they compute, and when."""

    def __init__(self, log, computing, nbytes, broken=None):
        self.log, self._computing, self._nbytes, self._broken = log, computing, nbytes, broken
        self.load = LoadMeter(1)
        self.busy = self.most_busy = 0

    async def run(self, job, clock, use):
        index = job.index
        self.log.append(f"compute {index}")
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            await turns(self._computing[index])
        finally:
            self.busy -= 1
        if index == self._broken:
            raise UpriverError("broken")
        frames = [(b"<%d>" % index, memoryview(bytes([index]) * self._nbytes))]
        return Result(frames=frames, timings=Timings(phases={}, stages={}))


async def turns(count):
    """Yield to other tasks ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def runner_of(log, reading, computing, nbytes, broken=None, workers=1, **settings):
    runner = RunHandler(
        ServerConfig(stores={"default": "memory://"}, **settings),
        pool=cast(Any, Workers(log, computing, nbytes, broken)),
        programs=cast(Any, None),
        datasets=cast(Any, None),
        features=cast(Any, None),
        budget=MemoryBudget(1 << 30),
        line=cast(Any, None),
        turns=TurnGate(FairQueue(workers, one_each=True)),
        metrics=ServerMetrics(),
        wording=ErrorWording({}),
    )

    async def job(order, index, clock):
        log.append(f"read {index}")
        await turns(reading[index])
        run = SimpleNamespace(program=None, micro_batch=1, ids=(index,))
        return cast(Any, SimpleNamespace(index=index, run=run))

    runner.job = job
    return runner


def order_of(deadline=float("inf"), *, ahead=False):
    request = cast(
        RunRequest,
        SimpleNamespace(
            micro_batches=[(index,) for index in range(PARTS)], micro_batch=1, start=-1, stop=0, program=None
        ),
    )
    asked = ResolvedRequest(
        request=request, tenant=ANYONE, dataset=None, batches=[], known={}, deadline=deadline
    )
    return AdmittedRequest(
        asked=asked,
        admitted=cast(Any, SimpleNamespace(waited_s=0.0)),
        program=None,
        use=MemoryUse(lambda: None),
        groups=tuple(range(index, index + 1) for index in range(PARTS)),
        ahead=ahead,
    )


async def sent(runner, log, order, *, slow=0):
    """Collect every buffer, as a socket takes it."""
    buffers = []
    async for buffer in runner.answer(order):
        log.append(f"send {len(buffer)}")
        await turns(slow)
        buffers.append(bytes(buffer))
    return buffers


@given(
    reading=st.lists(st.integers(0, 9), min_size=PARTS, max_size=PARTS),
    computing=st.lists(st.integers(0, 9), min_size=PARTS, max_size=PARTS),
    nbytes=st.sampled_from([0, 5, TAIL_BYTES + 7]),
    slow=st.integers(0, 3),
)
def test_answers_come_in_order_and_nothing_is_computed_before_the_last_one_is_all_but_out(
    reading, computing, nbytes, slow
):
    log = []

    async def go():
        runner = runner_of(log, reading, computing, nbytes)
        return await sent(runner, log, order_of(), slow=slow)

    buffers = b"".join(asyncio.run(go()))
    heads = [buffers.index(b"<%d>" % index) for index in range(PARTS)]
    assert heads == sorted(heads)
    assert [at for at in log if at.startswith("compute")] == [f"compute {index}" for index in range(PARTS)]
    if nbytes > TAIL_BYTES:
        for index in range(1, PARTS):
            before = log[: log.index(f"compute {index}")]
            assert before.count(f"send {nbytes - TAIL_BYTES}") == index, log
    for index in range(1, PARTS):  # while one is computed, the next one is read, and no more
        assert log.index(f"read {index}") <= log.index(f"compute {index}")
        if index > 1:
            assert log.index(f"read {index}") > log.index(f"compute {index - 2}")


def test_small_answers_are_computed_ahead_by_one_and_no_more_for_a_reader_that_stalls():
    async def go():
        log = []
        runner = runner_of(log, [0] * PARTS, [3] * PARTS, JOINED_BYTES + 1)
        answer = runner.answer(order_of(ahead=True))
        await anext(answer)  # the first head, and nothing after it
        await turns(200)
        assert [at for at in log if at.startswith("compute")] == ["compute 0", "compute 1"]
        rest = [bytes(buffer) async for buffer in answer]
        assert [at for at in log if at.startswith("compute")] == [f"compute {at}" for at in range(PARTS)]
        assert rest[-1].startswith(b"UPRV")

    asyncio.run(go())


def test_a_small_answer_goes_in_one_buffer_a_micro_batch_and_the_last_one_takes_its_end_along():
    async def go():
        return await sent(runner_of([], [0] * PARTS, [0] * PARTS, 5), [], order_of())

    buffers = asyncio.run(go())
    assert len(buffers) == PARTS
    for index, buffer in enumerate(buffers):
        assert buffer.startswith(b"<%d>" % index + bytes([index]) * 5 + b"UPRV")
        assert buffer.endswith(b"".join(encode(End()))) == (index == PARTS - 1)


@pytest.mark.parametrize("to_end", [True, False])
def test_an_answer_that_waits_for_the_rest_of_its_weights_ends_when_they_are_checked(to_end):
    log = []

    class Cold:
        async def checked(self):
            log.append("checked")

    async def go():
        runner = runner_of(log, [0] * PARTS, [0] * PARTS, 5)
        program = cast(Any, SimpleNamespace(cold=Cold(), nbytes=0))
        return await sent(runner, log, replace(order_of(), program=program, to_end=to_end))

    buffers = asyncio.run(go())
    assert len(buffers) == PARTS + to_end
    assert log[-2:].count("checked") == to_end


def test_every_answer_tells_the_load_factor():
    async def go():
        runner = runner_of([], [0] * PARTS, [0] * PARTS, JOINED_BYTES + 1)
        load = runner._pool.load
        load.came(7)
        for seconds in (0.1, 0.3, 0.3):
            load.saw(7, "a", {1: seconds})
        return await sent(runner, [], order_of())

    buffers = asyncio.run(go())
    stats = [msgspec.json.decode(buffer[PREFIX_NBYTES:]) for buffer in buffers if b"phases" in buffer]
    assert [header["k"] for header in stats] == [pytest.approx(3.0)] * PARTS


def test_the_first_group_alone_has_the_seconds_in_which_what_was_sent_came():
    async def phases_of(order):
        runner = runner_of([], [0] * PARTS, [0] * PARTS, JOINED_BYTES + 1)
        buffers = await sent(runner, [], order)
        stats = [msgspec.json.decode(buffer[PREFIX_NBYTES:]) for buffer in buffers if b"phases" in buffer]
        return [header["phases"] for header in stats]

    async def go():
        order = order_of()
        along = replace(order, asked=replace(order.asked, batches=[cast(Any, None)], received_s=2.5))
        found = await phases_of(along)
        assert [phases.get("receive") for phases in found] == [2.5, *[None] * (PARTS - 1)]
        assert not any("receive" in phases for phases in await phases_of(order_of()))

    asyncio.run(go())


def test_with_several_workers_a_request_still_computes_one_micro_batch_at_a_time():
    """Memory is reserved for one."""

    async def go():
        log = []
        runner = runner_of(log, [0] * PARTS, [5] * PARTS, 3, workers=3)
        await sent(runner, log, order_of(ahead=True))
        assert [at for at in log if at.startswith("compute")] == [f"compute {at}" for at in range(PARTS)]
        assert runner._pool.most_busy == 1
        first, second = order_of(ahead=True), order_of(ahead=True)
        await asyncio.gather(sent(runner, log, first), sent(runner, log, second))
        assert runner._pool.most_busy == 2

    asyncio.run(go())


def test_who_sends_slowly_takes_no_more_places_than_twice_its_own():
    """Requests that are still being read stand in no queue that knows a quota."""

    async def go():
        runner = runner_of([], [0] * PARTS, [0] * PARTS, 3)
        runner._line = cast(Any, SimpleNamespace(retry_after_s=lambda: 2.0))
        slow, other = Tenant(name="slow", max_requests=3), Tenant(name="other")
        async with AsyncExitStack() as stack:
            for _ in range(2 * 3):
                runner.enter(stack, slow)
            with pytest.raises(QuotaExceeded, match="at most 3"):
                runner.enter(stack, slow)
            runner.enter(stack, other)
            assert runner.running == 7
        assert runner.running == 0
        async with AsyncExitStack() as stack:
            runner.enter(stack, slow)

    asyncio.run(go())


def test_who_has_no_quota_leaves_a_place_for_another_tenant():
    async def go():
        slow, other = (Tenant(name=name, token_hashes=(hash_token(name),)) for name in ("slow", "other"))
        runner = runner_of([], [], [], 0, max_requests=4, tenants=(slow, other))
        runner._line = cast(Any, SimpleNamespace(retry_after_s=lambda: 2.0))
        async with AsyncExitStack() as stack:
            for _ in range(3):
                runner.enter(stack, slow)
            with pytest.raises(Overloaded, match="3 requests are active, 3 of them by slow"):
                runner.enter(stack, slow)
            runner.enter(stack, other)
            assert (runner.running, runner.running_of("slow")) == (4, 3)
        assert runner.running == 0

    asyncio.run(go())


def test_an_error_ends_an_answer_and_leaves_nothing_under_way():
    async def go():
        runner, told = runner_of([], [0] * PARTS, [1] * PARTS, 3, broken=2), []
        answer = runner.answer(order_of(), on_error=lambda error: told.append(str(error)))
        buffers = b"".join([bytes(buffer) async for buffer in answer])
        assert b"broken" in buffers
        assert told == ["broken"]
        assert buffers.count(bytes([1]) * 3) >= 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())


def test_work_that_fails_is_charged_and_work_that_is_given_up_is_not_refunded():
    async def go():
        runner, charged = runner_of([], [0] * PARTS, [9, 9, 10**6, 0, 0], 3, broken=1), []
        spent = runner._turns.queue.spent

        def note(tenant, expected_s, took_s):
            charged.append(took_s)
            spent(tenant, expected_s, took_s)

        runner._turns.queue.spent = note
        await sent(runner, [], order_of())
        assert len(charged) == 2 and min(charged) > 0

        runner._pool._broken = None
        answer = asyncio.create_task(sent(runner, [], order_of()))
        await turns(500)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        assert len(charged) == 4  # for the first two; the third is still being computed

    asyncio.run(go())


def test_a_reader_that_goes_leaves_nothing_under_way():
    async def go():
        runner = runner_of([], [0] * PARTS, [5] * PARTS, 3)
        answer = runner.answer(order_of())
        await anext(answer)
        await answer.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())


def test_a_deadline_is_told_as_an_error_and_ends_what_is_under_way():
    async def go():
        runner = runner_of([], [0] * PARTS, [10**6] * PARTS, 3)
        deadline = asyncio.get_running_loop().time() + 0.01
        buffers = b"".join(await sent(runner, [], order_of(deadline)))
        assert DeadlineExceeded.code.encode() in buffers
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 4))
def test_whole_micro_batches_are_joined_and_a_short_one_ends_a_group(sizes, joined):
    request = cast(
        RunRequest, SimpleNamespace(micro_batch=4, micro_batches=[tuple(range(size)) for size in sizes])
    )
    groups = list(groups_of(request, joined))
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    for group in groups:
        assert 1 <= len(group) <= joined
        assert all(sizes[index] == 4 for index in group[:-1])


def test_memory_is_given_back_when_the_last_user_has_left():
    released = []
    use = MemoryUse(lambda: released.append(True))
    use.enter()
    use.enter()
    use.leave()
    assert not released
    use.leave()
    assert released == [True]
