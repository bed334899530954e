"""Check epochs of samples made here and elsewhere: batches, order, multiset, for all shares and failures."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from tests.dataloader.toy_datasets import Divided, Noisy, same
from tests.examples import examples, some
from upriver.dataloader import epoch as epoch_module
from upriver.dataloader import pending_batch as batch_module
from upriver.dataloader import prefetch_limit as ahead
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local.pinned_memory import PinningQueue, one_thread
from upriver.dataloader.local.workers import LoaderProcesses, SampleMaker
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.prefetch_limit import PrefetchLimit
from upriver.dataloader.share import OffloadShare
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.pipeline.mapstyle import MapStyle
from upriver.pipeline.seeding import apart
from upriver.types import DONE, RAW, START


class There:
    """Do the given tasks, and deliver them from another thread, later and in any order."""

    def __init__(
        self, maker: SampleMaker, arrivals: Arrivals, *, failing: float = 0.0, slots: int = 0
    ) -> None:
        self._maker, self._arrivals, self.slots = maker, arrivals, slots
        self._failing, self._random = failing, random.Random(1)
        self._pool = ThreadPoolExecutor(3)
        self.made: list[Task] = []

    def late(self) -> list[int]:
        return []

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        chance = self._random.random()
        if chance < self._failing / 2:
            return False
        if chance < self._failing:
            arrival = Arrival(task.number, error=ConnectionError("gone"))
        else:
            with apart():
                arrival = Arrival(task.number, self._done(task, raw))
            self.made.append(task)
        self._pool.submit(self._arrive, arrival, self._random.random() * 1e-3)
        return True

    def _done(self, task: Task, raw: Sequence[Any] | None) -> Any:
        return self._maker.make(task._replace(given=raw))

    def _arrive(self, arrival: Arrival, pause: float) -> None:
        time.sleep(pause)
        self._arrivals.put(arrival)


def batches_of(sizes: list[int], order: list[int]) -> list[tuple[int, ...]]:
    taken = iter(order)
    return [tuple(next(taken) for _ in range(size)) for size in sizes]


def run(
    batches: list[tuple[int, ...]],
    *,
    share: float,
    whole: bool,
    reads_here: bool = False,
    failing: float = 0.0,
    num_workers: int = 0,
    ahead: int = 4,
    slots: int = 0,
    turns: Sequence[float] = (),
) -> tuple[list[Any], list[Task]]:
    dataset = Divided(200) if reads_here else Noisy(200)
    maker = SampleMaker(MapStyle(dataset, seed=3), default_collate)
    arrivals: Arrivals = SimpleQueue()
    there = There(maker, arrivals, failing=failing, slots=slots)
    split = OffloadShare(share, OffloadStretch(start=RAW if reads_here else START, stop=DONE, whole=whole))
    epoch = Epoch(
        2,
        iter(batches),
        maker=maker,
        split=split,
        elsewhere=there,
        arrivals=arrivals,
        ahead=ahead,
    )
    processes = LoaderProcesses(maker, num_workers=num_workers) if num_workers else None
    if processes is not None:
        epoch.use(processes)
    found = []
    for number, batch in enumerate(epoch):
        found.append(batch)
        split.turn(turns[number % len(turns)] if turns else share)
    if processes is not None:
        processes.stop()
    assert epoch.waits.samples == sum(map(len, batches))
    assert len(there.made) == 0 or epoch.waits.given > 0
    return found, there.made


def reference(batches: list[tuple[int, ...]], *, reads_here: bool) -> list[Any]:
    return run(batches, share=0.0, whole=True, reads_here=reads_here)[0]


def check(batches: list[tuple[int, ...]], **arguments: Any) -> list[Task]:
    found, made = run(batches, **arguments)
    divided = arguments.get("reads_here", False)
    assert same(found, reference(batches, reads_here=divided))
    if not divided:
        order = [int(index) for batch in found for index in batch["index"]]
        assert order == [index for batch in batches for index in batch]
    return made


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), max_size=12),
    order=st.permutations(range(90)),
    share=st.floats(0, 1),
    whole=st.booleans(),
    reads_here=st.booleans(),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
    ahead=st.integers(0, 6),
    slots=st.sampled_from([0, 5, 30]),
)
def test_the_same_batches_whatever_the_share_and_who_fails(
    sizes, order, share, whole, reads_here, failing, ahead, slots
):
    check(
        batches_of(sizes, order),
        share=share,
        whole=whole,
        reads_here=reads_here,
        failing=failing,
        ahead=ahead,
        slots=slots,
    )


@pytest.mark.parametrize("reads_here", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.full
def test_what_comes_back_at_any_time_is_made_where_nothing_is_made_ahead(
    reads_here: bool, whole: bool, share: float
) -> None:
    batches = batches_of([2, 1, 3] * 4, list(range(24)))
    for _ in range(5):
        for failing in (0.3, 0.7, 1.0):
            check(
                batches,
                share=share,
                whole=whole,
                reads_here=reads_here,
                failing=failing,
                ahead=0,
                slots=5,
            )


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), max_size=12),
    order=st.permutations(range(90)),
    turns=st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=1, max_size=6),
    whole=st.booleans(),
    reads_here=st.booleans(),
    failing=st.sampled_from([0.0, 0.3]),
)
def test_the_same_batches_where_the_share_changes_with_every_batch(
    sizes, order, turns, whole, reads_here, failing
):
    check(
        batches_of(sizes, order),
        share=turns[0],
        turns=turns,
        whole=whole,
        reads_here=reads_here,
        failing=failing,
    )


@pytest.mark.parametrize("whole", some(1, [False, True]))
def test_the_same_with_loader_processes_where_the_share_changes(whole: bool) -> None:
    made = check(
        batches_of([4] * 30, list(range(120))),
        share=0.2,
        turns=[0.9, 0.1, 0.5, 0.0, 1.0],
        whole=whole,
        num_workers=2,
        ahead=6,
    )
    assert 30 < sum(len(task.indices) for task in made) < 90


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.0, marks=pytest.mark.full),
        pytest.param(0.3, marks=pytest.mark.full),
        0.9,
        pytest.param(1.0, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("failing", some(1, [0.4, 0.0]))
def test_the_same_with_loader_processes(share: float, failing: float) -> None:
    batches = batches_of([4] * 20, list(range(80)))
    for whole in (False, True):
        for reads_here in (False, True):
            made = check(
                batches,
                share=share,
                whole=whole,
                reads_here=reads_here,
                failing=failing,
                num_workers=2,
                ahead=1,
                slots=9,
            )
            assert bool(made) == (share > 0)


def test_all_of_it_can_be_made_elsewhere_and_the_processes_here_stay() -> None:
    batches = batches_of([4] * 30, list(range(120)))
    made = check(batches, share=1.0, whole=True, num_workers=2, ahead=3)
    assert Counter(index for task in made for index in task.indices) == Counter(range(120))


def test_a_share_holds_in_samples_and_in_batches() -> None:
    batches = batches_of([10] * 10, list(range(100)))
    for whole in (False, True):
        made = check(batches, share=0.3, whole=whole)
        assert abs(sum(len(task.indices) for task in made) - 30) <= (10 if whole else 1)


def test_nothing_is_planned_far_beyond_what_is_handed_out() -> None:
    batches = batches_of([2] * 50, list(range(100)))
    asked: list[int] = []

    def indices() -> Any:
        for number, batch in enumerate(batches):
            asked.append(number)
            yield batch

    maker = SampleMaker(MapStyle(Noisy(200), seed=3), default_collate)
    arrivals: Arrivals = SimpleQueue()
    epoch = Epoch(
        0,
        indices(),
        maker=maker,
        split=OffloadShare(1.0, OffloadStretch(start=START, stop=DONE, whole=True)),
        elsewhere=There(maker, arrivals),
        arrivals=arrivals,
        ahead=5,
    )
    for handed_out, _ in enumerate(epoch):
        assert asked[-1] <= handed_out + 6


class Interrupting:
    """Interrupt this thread once, before the nth line that it reaches in some modules."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (epoch_module.__file__, batch_module.__file__):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


@settings(max_examples=examples(200), deadline=None)
@given(
    at=st.integers(0, 3500),
    whole=st.booleans(),
    reads_here=st.booleans(),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    failing=st.sampled_from([0.0, 0.3]),
)
def test_whoever_goes_on_after_an_interruption_between_any_two_lines_gets_each_batch_once(
    at, whole, reads_here, share, failing
):
    batches = batches_of([3, 1, 4, 2] * 4, list(range(40)))
    expected = reference(batches, reads_here=reads_here)
    maker = SampleMaker(MapStyle(Divided(200) if reads_here else Noisy(200), seed=3), default_collate)
    arrivals: Arrivals = SimpleQueue()
    epoch = Epoch(
        2,
        iter(batches),
        maker=maker,
        split=OffloadShare(share, OffloadStretch(start=RAW if reads_here else START, stop=DONE, whole=whole)),
        elsewhere=There(maker, arrivals, failing=failing, slots=5),
        arrivals=arrivals,
        ahead=2,
    )
    found: list[Any] = []
    interrupting = Interrupting(at)
    while True:
        try:
            with interrupting:
                batch = next(epoch)
            found.append(batch)
        except KeyboardInterrupt:
            interrupting = Interrupting(10**9)
        except RuntimeError as error:
            assert "the sampler was interrupted" in str(error)
            assert epoch.handed_out == len(found) and same(found, expected[: len(found)])
            return
        except StopIteration:
            break
        assert epoch.handed_out == len(found)
    assert same(found, expected)


def test_who_was_interrupted_in_the_sampler_is_told_that_a_batch_may_be_lost() -> None:
    def indices() -> Iterator[tuple[int, ...]]:
        yield (0, 1)
        raise KeyboardInterrupt

    maker = SampleMaker(MapStyle(Noisy(9)), list)
    split = OffloadShare(0.0, OffloadStretch(start=START, stop=DONE))
    epoch = Epoch(4, indices(), maker=maker, split=split, arrivals=SimpleQueue(), ahead=0)
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted at batch 1 of epoch 4, which may be lost"):
            next(epoch)
    assert epoch.handed_out == 0


class Silent(SimpleQueue[Arrival]):
    """A queue on which nothing arrives during any wait, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Arrival:
        if self.empty():
            self.now += timeout or 0.0
            raise Empty
        return super().get(False)


class Later:
    """Loader processes that do a task on command."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.tasks: list[Task] = []
        self._arrivals = arrivals

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> Later:
        self.tasks.extend(tasks)
        return self

    def give(self, task: Task) -> None:
        self.tasks.append(task)

    def do(self) -> None:
        task = self.tasks.pop(0)
        self._arrivals.put(Arrival(task.number, list(task.indices)))

    def let_go(self, made: object) -> None: ...

    def halt(self) -> None: ...


def test_processes_may_take_as_long_as_they_may_while_somebody_waits() -> None:
    arrivals = Silent()
    processes = Later(arrivals)
    epoch = Epoch(
        0,
        iter([(0, 1), (2, 3), (4, 5)]),
        maker=SampleMaker(MapStyle(Noisy(9)), list),
        split=OffloadShare(0.0, OffloadStretch(start=START, stop=DONE, whole=True)),
        arrivals=arrivals,
        timeout_s=5.0,
        clock=lambda: arrivals.now,
    )
    epoch.use(processes)  # type: ignore[arg-type]
    for _ in range(2):
        before = arrivals.now
        with pytest.raises(RuntimeError, match=r"timed out after 5\.0 seconds"):
            next(epoch)
        assert arrivals.now - before == 5 and epoch.handed_out == 0
    processes.do()
    assert next(epoch) == [0, 1]
    arrivals.now += 100  # in which the model trains
    processes.do()
    assert next(epoch) == [2, 3] and epoch.handed_out == 2
    epoch.prepare(1)  # where nothing notices the arrival
    with pytest.raises(RuntimeError, match="timed out"):
        next(epoch)
    processes.do()
    assert next(epoch) == [4, 5] and next(epoch, None) is None and epoch.handed_out == 3


class Many:
    """Workers that hold every task until a test makes them do or return it."""

    slots = 64

    def __init__(self, arrivals: Arrivals) -> None:
        self.tasks: list[Task] = []
        self._arrivals = arrivals

    def late(self) -> list[int]:
        return []

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        self.tasks.append(task)
        return True

    def do(self) -> None:
        for task in self.tasks:
            self._arrivals.put(Arrival(task.number, list(task.indices)))
        self.tasks.clear()

    def fail(self) -> None:
        for task in self.tasks:
            self._arrivals.put(Arrival(task.number, error=ConnectionError("gone")))
        self.tasks.clear()


def many(
    count: int, ratio: float, *, whole: bool = True, room: PrefetchLimit | None = None, timeout_s: float = 0.0
) -> tuple[Epoch, Later, Many, Silent]:
    arrivals = Silent()
    processes, workers = Later(arrivals), Many(arrivals)
    epoch = Epoch(
        0,
        iter([(at, at) for at in range(count)]),
        maker=SampleMaker(MapStyle(Noisy(count)), list),
        split=OffloadShare(ratio, OffloadStretch(start=START, stop=DONE, whole=whole)),
        arrivals=arrivals,
        elsewhere=workers,
        ahead=4,
        here=8,
        room=room,
        timeout_s=timeout_s,
        clock=lambda: arrivals.now,
    )
    epoch.use(processes)  # type: ignore[arg-type]
    return epoch, processes, workers, arrivals


def batches_at(tasks: Iterable[Task]) -> set[int]:
    return {task.batch for task in tasks}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_this_machine_makes_few_batches_ahead_however_many_others_have(ratio: float, whole: bool) -> None:
    epoch, processes, workers, _ = many(300, ratio, whole=whole)
    made_here, given_there = set[int](), set[int]()
    for number in range(300):
        made_here |= batches_at(processes.tasks)
        given_there |= batches_at(workers.tasks)
        assert len(made_here) <= 13
        if number < 200:
            assert epoch.planned == 73 and len(given_there) >= ratio * (number + 73) - 1
        while processes.tasks:
            processes.do()
        workers.do()
        assert next(epoch) == [number, number]
        made_here.discard(number)
    assert next(epoch, None) is None


def test_what_workers_give_back_is_made_here_in_order_and_is_not_waited_for_in_vain() -> None:
    epoch, processes, workers, arrivals = many(100, 0.9)
    made = batches_at(processes.tasks)
    while processes.tasks:
        processes.do()
    workers.fail()
    workers.give = lambda task, raw: False  # type: ignore[method-assign]
    for number in range(100):
        while not arrivals.empty():
            epoch._wait()
        made |= batches_at(processes.tasks)
        assert made.issuperset(range(number, min(number + 13, 100))) and len(made) < 2 * 13
        while processes.tasks:
            processes.do()
        assert next(epoch) == [number, number]
        made.discard(number)
    assert next(epoch, None) is None


def test_what_is_held_is_no_backlog_and_takes_no_time() -> None:
    epoch, processes, workers, arrivals = many(100, 0.5, timeout_s=5.0)
    assert epoch.backlog == (2 * 13, 2 * 36)
    while processes.tasks:
        processes.do()
    while not arrivals.empty():
        epoch._wait()
    assert epoch.backlog == (0, 2 * 36)
    before = arrivals.now
    for _ in range(20):
        epoch._wait()
    assert arrivals.now == before + 20 and not epoch._overdue, "nobody here is at anything"
    workers.do()
    assert next(epoch) == [0, 0]


def test_as_many_batches_are_prepared_as_are_asked_for() -> None:
    epoch, processes, workers, _ = many(100, 0.1)
    assert len(processes.tasks) == 13
    give = processes.give
    processes.give = lambda task: (give(task), processes.do())  # type: ignore[method-assign]
    while processes.tasks:
        processes.do()
    workers.do()
    assert epoch.prepare(30) == 30
    assert [next(epoch) for _ in range(30)] == [[at, at] for at in range(30)]


class Refusing(SimpleQueue[Arrival]):
    """Workers that accept every task and return it at once; nothing else ever arrives."""

    slots, ready, coming = 64, False, False

    def look(self, task: Task) -> bool:
        return False

    def late(self) -> list[int]:
        return []

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        self.put(Arrival(task.number, error=ConnectionError("gone")))
        return True

    def get(self, *args: Any) -> Arrival:
        return super().get(False)


@pytest.mark.parametrize("count", [1, 5, 30])
def test_what_is_prepared_and_comes_back_is_prepared_here(count: int) -> None:
    arrivals = Refusing()
    epoch = Epoch(
        0,
        iter([(at,) for at in range(60)]),
        maker=SampleMaker(MapStyle(range(60)), list),
        split=OffloadShare(1.0, OffloadStretch(start=START, stop=DONE, whole=True)),
        arrivals=arrivals,
        elsewhere=arrivals,
        ahead=4,
        hold=True,
    )
    assert epoch.prepare(count) == count and epoch.returned() == 1
    assert list(epoch) == [[at] for at in range(60)]


def test_what_comes_back_is_not_prepared_where_that_is_no_use() -> None:
    """Preparing it early would happen while nothing trains; every batch is handed out all the same."""
    arrivals, made = Refusing(), list[int]()

    class Counting:
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> int:
            made.append(index)
            return index

    epoch = Epoch(
        0,
        iter([(at,) for at in range(60)]),
        maker=SampleMaker(MapStyle(Counting()), list),
        split=OffloadShare(1.0, OffloadStretch(start=START, stop=DONE, whole=True)),
        arrivals=arrivals,
        elsewhere=arrivals,
        ahead=4,
        hold=True,
    )
    assert epoch.prepare(30, most_returned=0.1) == 30 and epoch.returned() > 0.1
    assert len(made) <= 4
    assert list(epoch) == [[at] for at in range(60)] and sorted(made) == list(range(60))


def test_workers_have_as_many_batches_as_memory_has_room_for() -> None:
    sample = torch.zeros(500)
    for nbytes, planned in ((10 * 4000, 11), (40 * 4000, 41), (10**9, 73)):
        room = PrefetchLimit(nbytes)
        epoch, _, workers, arrivals = many(300, 1.0, room=room)
        assert epoch.planned == 9, "what a batch takes is not known yet"
        for _ in range(30):
            for task in workers.tasks:
                arrivals.put(Arrival(task.number, [sample] * 2))
            workers.tasks.clear()
            next(epoch)
        assert epoch.planned == planned and room.most(8, 72) == planned - 1
        assert room.most(4, 3) == 4


def test_room_is_a_part_of_what_is_free_and_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "host_bytes", lambda: 80_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    room = PrefetchLimit()
    assert room.most(4, 100) == 4
    room.look(3, torch.zeros(100), [None, None])
    assert room.most(4, 100) == 80_000 // 2 // ahead.PART // 400
    room.look(4, torch.zeros(1), [None])
    assert room.most(4, 100) == 25, "not every batch is looked at"
    room.look(16, object(), [torch.zeros(50), torch.zeros(50)])
    assert room.most(4, 100) == 25
    room.look(32, object(), [None, None])
    assert room.most(4, 100) == 4


class Pinnable(list[Any]):
    """A batch that records which thread pinned it."""

    by: tuple[str, ...] = ()

    def pin_memory(self) -> Pinnable:
        found = Pinnable(self)
        found.by = (*self.by, threading.current_thread().name)
        return found


def test_a_thread_that_computes_alone_leaves_others_as_many_threads_as_they_had() -> None:
    before = torch.get_num_threads()

    def alone() -> int:
        one_thread()
        return torch.get_num_threads()

    def fresh() -> int:
        return torch.get_num_threads()

    found = []
    for asked in (fresh, alone, fresh):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(asked).result())
    assert found == [before, 1, before] and torch.get_num_threads() == before


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("share", some(1, [0.5, 0.0, 1.0]))
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("reads_here", some(1, [False, True]))
def test_a_batch_is_pinned_once_and_by_the_thread_that_got_it_where_one_did(
    num_workers: int, share: float, whole: bool, reads_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    batches = batches_of([4] * 12, list(range(48)))
    dataset = Divided(200) if reads_here else Noisy(200)
    maker = SampleMaker(MapStyle(dataset, seed=3), Pinnable)
    arrivals = PinningQueue()
    epoch = Epoch(
        2,
        iter(batches),
        maker=maker,
        split=OffloadShare(share, OffloadStretch(start=RAW if reads_here else START, stop=DONE, whole=whole)),
        elsewhere=There(maker, arrivals),
        arrivals=arrivals,
    )
    processes = LoaderProcesses(maker, num_workers=num_workers) if num_workers else None
    if processes is not None:
        epoch.use(processes)
    found = list(epoch)
    if processes is not None:
        processes.stop()
    assert [len(batch.by) for batch in found] == [1] * 12
    here = sum(batch.by == (threading.current_thread().name,) for batch in found)
    if (share == 1 and whole) or (share == 0 and num_workers):
        assert here == 0 and set(devices) == {3}
    elif share != 0.5:
        assert here == 12 and not devices  # this thread made it, or collated its samples
