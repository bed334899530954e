"""Check the dealing of tasks among workers of any speed, and their time limits, by a simulated clock."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest

from tests.examples import some
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local.workers import SampleMaker
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.remote.dispatcher import Canary, WorkerDispatcher, _tell
from upriver.dataloader.remote.worker_choice import (
    HANGS,
    LATE_S,
    LATE_TIMES,
    MOST_FAULTS,
    SLOTS,
    SLOTS_EACH,
    LoaderWorker,
)
from upriver.dataloader.share import OffloadShare
from upriver.dataloader.tasks import Arrival, Task
from upriver.engine.fingerprint import fingerprint
from upriver.errors import (
    BadSample,
    CodeFailed,
    ConfigError,
    DoesNotFit,
    Forbidden,
    NotAuthorized,
    ObjectNotFound,
    Overloaded,
    ServerUnavailable,
    TooLarge,
)
from upriver.pipeline.mapstyle import MapStyle
from upriver.protocol import DEFAULT_CAPS, Info
from upriver.rpc.client import AnswerClosed
from upriver.types import DONE, START

PATIENCE_S = 60.0
"""Longest wait of a test for a thread, in real seconds; no result depends on it."""

TICK_S = 0.001

CANARY = -1


class Asked:
    """A dataset that sends nothing: each answer is the task itself."""

    name, joins, collates, key = "scripted", True, None, "scripted"

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[Any, list[Any]]:
        return task, []

    def value(self, task: Task, answers: Sequence[Any]) -> Any:
        return answers[0]


class Answer:
    """The outcome of a task once the clock has reached its time."""

    def __init__(self, server: Server, task: Task) -> None:
        self.server, self.task, self.until_s = server, task, math.inf
        self.over, self.closed, self.failed = threading.Event(), False, False

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        self.server.begin(self)
        assert self.over.wait(PATIENCE_S)
        if self.closed:
            raise AnswerClosed("closed")
        if self.failed:
            raise ServerUnavailable("gone")
        yield [("made", sample) for sample in self.task.samples], None

    def close(self) -> None:
        self.closed = True
        self.server.end(self)


class Server:
    """Replace a client: a worker whose processes take a set time for each sample."""

    def __init__(
        self,
        bed: Bed,
        url: str,
        seconds: float,
        *,
        processes: int = 1,
        admits: int = 99,
        most: int = 999,
        raises: Callable[[Task], Exception | None] = lambda task: None,
    ) -> None:
        self.bed, self.url, self.seconds = bed, url, seconds
        self.processes, self.admits, self.most, self.raises = processes, admits, most, raises
        self.canary_s, self.proofs = 0.0, 0
        self.free_at = [0.0] * processes
        self.made = 0

    def info(self) -> Info:
        return Info(
            version="1",
            fingerprint=fingerprint(),
            stores=(),
            micro_batch=1,
            caps=DEFAULT_CAPS,
            device="cpu",
            workers=self.processes,
            threads=1,
            admits=self.admits,
        )

    def run(self, task: Task, sent: Sequence[Any]) -> Answer:
        return Answer(self, task)

    def begin(self, answer: Answer) -> None:
        with self.bed.changed:
            error = self.raises(answer.task)
            if error is not None:
                raise error
            if sum(each.server is self for each in self.bed.open) >= self.most:
                raise Overloaded("no place", retry_after_s=5.0)
            took_s = (
                self.canary_s if answer.task.number == CANARY else self.seconds * len(answer.task.samples)
            )
            if answer.task.number == CANARY:
                self.proofs += 1
                answer.until_s = self.bed.now + took_s
            else:
                process = min(range(self.processes), key=self.free_at.__getitem__)
                answer.until_s = self.free_at[process] = max(self.bed.now, self.free_at[process]) + took_s
            if answer.until_s > self.bed.now:
                self.bed.open.append(answer)
                self.bed.changed.notify_all()
            else:
                answer.over.set()

    def end(self, answer: Answer) -> None:
        with self.bed.changed:
            if answer in self.bed.open:
                self.bed.open.remove(answer)
            self.bed.changed.notify_all()
        answer.over.set()


class Told(WorkerDispatcher):
    """Count the tasks given and called back."""

    taken = called_back = 0

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        given = super().give(task, raw)
        self.taken += given
        return given

    def late(self) -> list[int]:
        found = super().late()
        self.called_back += len(found)
        return found


class Queue(SimpleQueue[Arrival]):
    """Count the arrivals."""

    come = 0

    def put(self, *arguments: Any) -> None:
        super().put(*arguments)
        self.come += 1


class Bed:
    """Some servers, and the training node that gives them tasks."""

    def __init__(self) -> None:
        self.now, self.here_s = 0.0, 0.0
        self.can_here: Callable[[int], bool] = lambda number: True
        self.changed = threading.Condition()
        self.open: list[Answer] = []
        self.servers: list[Server] = []
        self.canaries: list[Task] = []
        self.arrivals = Queue()
        self.made = Counter[str]()
        self.lock = threading.Lock()
        self.loaders = list[Told]()

    def server(self, seconds: float, **facts: Any) -> Server:
        self.servers.append(Server(self, f"w{len(self.servers)}", seconds, **facts))
        return self.servers[-1]

    def workers(self) -> WorkerDispatcher:
        self.known = [LoaderWorker(server.url, server) for server in self.servers]  # type: ignore[arg-type]
        self.elsewhere = Told(
            self.known,
            Asked(),  # type: ignore[arg-type]
            self.arrivals,
            canary=self.canary,
            lock=self.lock,
            now=lambda: self.now,
        )
        self.loaders.append(self.elsewhere)
        return self.elsewhere

    def canary(self, task: Task) -> Canary:
        one = task._replace(number=CANARY, indices=task.indices[:1], samples=task.samples[:1])
        self.canaries.append(one)
        return Canary(task=one, value=[("made", one.samples[0])], seconds=self.here_s)

    def settled(self) -> bool:
        """Return whether all threads wait for the clock."""
        with self.lock:
            all_held = [each for told in self.loaders for each in told._held.values()]
            if any(each.late for each in all_held):  # each keeps its place until its answer ends
                return False
            held = len(all_held)
            begun = held + sum(len(told._proving) for told in self.loaders) == len(self.open)
            waiting = sum(len(told._waiting) for told in self.loaders)
            given = sum(told.taken - told.called_back for told in self.loaders)
            return begun and given == held + waiting + self.arrivals.come

    def tasks_of(self, server: Server) -> list[Task]:
        return [each.task for each in self.open if each.server is server and each.task.number != CANARY]

    def settle(self) -> None:
        with self.changed:
            for _ in range(round(PATIENCE_S / TICK_S)):
                if self.settled():
                    return
                self.changed.wait(TICK_S)
        raise AssertionError("threads do not come to rest")

    def pass_to(self, now: float) -> None:
        """Advance the clock, and end all tasks due by then."""
        while True:
            self.settle()
            answer = min(self.open, key=lambda each: each.until_s, default=None)
            if answer is None or answer.until_s > now:
                break
            self.now = max(self.now, answer.until_s)
            answer.server.end(answer)
        self.now = now

    def step(self) -> int:
        """Advance to the next task that is done or returned; return its number."""
        while True:
            self.settle()
            if not self.arrivals.empty():
                break
            answer = min(self.open, key=lambda each: each.until_s)
            assert answer.until_s < math.inf, "everybody hangs"
            self.now = max(self.now, answer.until_s)
            answer.server.end(answer)
        arrival = self.arrivals.get()
        self.made[arrival.place if arrival.error is None else "back"] += 1
        if arrival.blame is not None and self.can_here(arrival.number):
            arrival.blame()
        return arrival.number

    def train(self, count: int, *, first: int = 0, ahead: int | None = None) -> None:
        """Consume ``count`` tasks in order, each as soon as it is done; returned tasks take no time."""
        given = self.next = first
        there = set[int]()
        while self.next < first + count:
            most = self.elsewhere.slots if ahead is None else ahead
            while given < min(first + count, self.next + most + 1):
                if not self.elsewhere.give(task(given), None):
                    self.made["back"] += 1
                    there.add(given)
                given += 1
            if self.next not in there:
                there.add(self.step())
            while self.next in there:
                self.next += 1


def task(number: int, samples: int = 1) -> Task:
    indices = tuple(range(number * samples, (number + 1) * samples))
    return Task(number=number, epoch=0, batch=number, indices=indices, samples=indices, whole=False)


@pytest.fixture
def bed() -> Iterator[Bed]:
    found = Bed()
    yield found
    for loader in found.loaders:
        loader.close()


# ------------------------------------------------------------------------------------- unequal workers


def test_a_slow_worker_makes_no_batch_wait(bed: Bed) -> None:
    fast, slow = bed.server(0.1), bed.server(2.0)
    bed.workers()
    bed.train(400)
    assert bed.now < 1.1 * 400 * 0.1, "the fast one alone takes 40 s"
    assert bed.made[slow.url] > 0 and bed.made[fast.url] > 380


@pytest.mark.parametrize("seconds", [(0.1, 0.1), (0.1, 0.2), (0.1, 0.2, 0.4)])
def test_each_makes_as_much_as_its_speed_allows(bed: Bed, seconds: tuple[float, ...]) -> None:
    servers = [bed.server(each) for each in seconds]
    bed.workers()
    bed.train(600)
    rates = [1 / each for each in seconds]
    assert bed.now < 1.15 * 600 / sum(rates)
    for server, rate in zip(servers, rates, strict=True):
        assert bed.made[server.url] / 600 == pytest.approx(rate / sum(rates), abs=0.1)


def test_processes_count(bed: Bed) -> None:
    """Eight slow processes make more than one process that is three times as fast."""
    many, one = bed.server(0.3, processes=8), bed.server(0.1)
    bed.workers()
    bed.train(800)
    assert bed.now < 1.15 * 800 / (8 / 0.3 + 10)
    assert bed.made[many.url] > 2 * bed.made[one.url]


def test_who_was_slow_for_a_while_is_tried_again(bed: Bed) -> None:
    _, slow = bed.server(0.1), bed.server(2.0)
    bed.workers()
    bed.train(400)
    slow.seconds, before = 0.1, bed.made[slow.url]
    bed.train(1600, first=400)
    assert bed.made[slow.url] - before > 300


def test_none_of_many_is_left_out_where_all_are_alike(bed: Bed) -> None:
    servers = [bed.server(0.5, processes=2) for _ in range(5)]
    bed.workers()
    bed.train(500)
    assert all(bed.made[server.url] == pytest.approx(100, abs=10) for server in servers)


# ------------------------------------------------------------------------------------- tasks per process


@pytest.mark.parametrize(
    ("processes", "admits", "slots"), [(8, 99, 16), (1, 99, SLOTS), (8, 10, 10), (8, 2, 2)]
)
def test_a_worker_is_given_what_keeps_all_its_processes_busy(
    bed: Bed, processes: int, admits: int, slots: int
) -> None:
    server = bed.server(1.0, processes=processes, admits=admits)
    workers = bed.workers()
    for number in range(40):
        assert workers.give(task(number), None)
    bed.settle()
    assert len(bed.tasks_of(server)) == min(processes, slots), "what it does is not known yet"
    bed.step()
    bed.settle()
    assert len(bed.tasks_of(server)) == slots == workers.slots
    assert slots in (SLOTS, SLOTS_EACH * processes, admits)


def test_as_many_batches_are_planned(bed: Bed) -> None:
    server = bed.server(1.0, processes=8)
    epoch = Epoch(
        0,
        ((number,) for number in range(100)),
        maker=SampleMaker(MapStyle(range(100)), list),
        split=OffloadShare(1.0, OffloadStretch(start=START, stop=DONE)),
        arrivals=bed.arrivals,
        elsewhere=bed.workers(),
        ahead=4,
        here=2,
    )
    epoch.plan()
    bed.pass_to(1.0)
    assert next(epoch) == [("made", 0)]
    bed.settle()
    assert epoch.planned == 1 + 2 + SLOTS_EACH * server.processes


def test_nothing_is_planned_for_workers_that_get_nothing(bed: Bed) -> None:
    bed.server(1.0, processes=8)
    workers = bed.workers()
    bed.known[0].processes = 8
    epoch = Epoch(
        0,
        ((number,) for number in range(100)),
        maker=SampleMaker(MapStyle(range(100)), list),
        split=OffloadShare.none(),
        arrivals=bed.arrivals,
        elsewhere=workers,
        ahead=4,
        here=2,
    )
    assert next(epoch) == [0]
    assert epoch.planned == 5 and workers.slots == 16


# -------------------------------------------------------------------------------------------- time limits


def test_a_task_that_takes_long_here_is_waited_for(bed: Bed) -> None:
    """32 samples of 0.4 s, as on this machine."""
    bed.here_s = 0.4
    bed.server(0.4)
    workers = bed.workers()
    assert workers.give(task(0, samples=32), None)
    bed.pass_to(12.7)
    assert workers.late() == []
    assert (bed.step(), bed.made["w0"]) == (0, 1)


def test_what_waits_for_a_place_is_not_late(bed: Bed) -> None:
    bed.server(9.0)
    workers = bed.workers()
    for number in range(12):
        assert workers.give(task(number), None)
    for number in range(12):
        bed.pass_to(9.0 * (number + 1))
        assert workers.late() == []
    assert sorted(bed.step() for _ in range(12)) == list(range(12)) and bed.made["back"] == 0


def test_limits_are_those_of_all_workers(bed: Bed) -> None:
    """A hanging worker gets the limit of all workers, not one from its own last response times."""
    _, slow = bed.server(1.0), bed.server(3.0)
    workers = bed.workers()
    bed.train(40)
    slow.seconds, began = math.inf, bed.now
    for number in range(40, 48):
        assert workers.give(task(number), None)
    bed.settle()
    has = {each.number for each in bed.tasks_of(slow)}
    late = set[int]()
    while late != has:
        bed.pass_to(bed.now + 1)
        late.update(workers.late())
    assert has and LATE_S <= bed.now - began <= LATE_TIMES * 2 * len(has) + 1, "2 s is the mean of both"


def test_who_hangs_rests_longer_each_time_and_no_batch_depends_on_it_meanwhile(bed: Bed) -> None:
    server = bed.server(1.0)
    workers = bed.workers()
    bed.train(5)
    number, rests = 5, []
    for _ in range(6):
        server.seconds = math.inf
        assert workers.give(task(number), None)
        bed.settle()
        bed.pass_to(bed.now + 200)
        assert workers.late() == [number] and bed.known[0].failed
        server.seconds = server.free_at[0] = 0.0
        rested_from, number = bed.now, number + 1
        while not workers.give(task(number), None):
            bed.pass_to(bed.now + 1)  # made here at once, without a wait
        rests.append(bed.now - rested_from)
        bed.step()
        number += 1
    assert rests[0] >= HANGS.base_s
    assert all(after > 1.9 * before for before, after in pairwise(rests)), "but for what it did meanwhile"
    bed.pass_to(bed.now + 10_000)
    server.seconds = math.inf
    assert workers.give(task(number), None)
    bed.settle()
    bed.pass_to(bed.now + 200)
    assert workers.late() == [number]
    assert bed.known[0].hangs.left_s(bed.now) == HANGS.base_s, "it had worked well for long"


def test_one_that_still_hangs_costs_nothing_once_it_has_rested(bed: Bed) -> None:
    server = bed.server(1.0)
    workers = bed.workers()
    bed.train(3)
    server.seconds = server.canary_s = math.inf
    assert workers.give(task(3), None)
    bed.settle()
    bed.pass_to(bed.now + 200)
    assert workers.late() == [3]
    for number in range(4, 60):
        bed.pass_to(bed.now + 10)
        assert not workers.give(task(number), None)
    assert [each.task.number for each in bed.open] == [CANARY], "asked, beside what is done here"
    server.seconds, server.canary_s = 1.0, 0.0
    server.free_at[0] = bed.now
    server.end(bed.open[0])
    bed.settle()
    assert workers.give(task(60), None)


def test_a_worker_that_begins_slowly_is_waited_for_once(bed: Bed) -> None:
    """Its copy of the dataset takes minutes to build: batches are made here, and no batch waits again."""
    server = bed.server(1.0)
    server.canary_s = 100.0
    workers = bed.workers()
    assert all(workers.give(task(number), None) for number in range(5))
    bed.pass_to(LATE_S - 1)
    assert workers.late() == [] and bed.arrivals.empty()
    bed.pass_to(LATE_S + 1)
    assert workers.late() == []
    assert sorted(bed.step() for _ in range(5)) == list(range(5)) and bed.made["back"] == 5
    for number in range(5, 50):
        bed.pass_to(bed.now + 1)
        assert not workers.give(task(number), None)
    bed.pass_to(100.0)
    assert workers.give(task(50), None)
    assert bed.step() == 50 and bed.made == {"back": 5, server.url: 1}
    assert len(bed.canaries) == 1


def test_where_nothing_is_given_who_could_not_be_asked_is_looked_at_again(bed: Bed) -> None:
    gone = [True]
    bed.server(0.1, raises=lambda task: ServerUnavailable("gone") if gone[0] else None)
    workers = bed.workers()
    assert not workers.ready and not workers.look(task(0)._replace(number=CANARY))
    bed.settle()
    assert bed.known[0].failed == "gone" and not workers.coming
    gone[0] = False
    assert not workers.look(task(1)), "it rests"
    bed.settle()
    bed.now = bed.known[0].breaker.until_s
    workers.look(task(1))
    bed.settle()
    assert workers.ready and workers.look(task(2)) and not workers.coming
    assert len(bed.canaries) == bed.servers[0].proofs == 1
    letters = task(3)._replace(indices=("c",))
    assert not workers.look(letters), "what cannot be sent shows nothing"
    workers.close()
    assert not workers.look(task(2))


def test_who_was_lost_sight_of_is_proved_again(bed: Bed) -> None:
    """Another worker may respond at its address later."""
    server, other = bed.server(1.0), bed.server(1.0)
    workers = bed.workers()
    bed.train(6)
    assert workers.give(task(6), None) and workers.give(task(7), None)
    bed.settle()
    before = bed.made[other.url]
    [broken] = [each for each in bed.open if each.server is server]
    broken.failed = True
    server.end(broken)
    assert {bed.step(), bed.step()} == {6, 7} and bed.made[other.url] == before + 2
    assert bed.known[0].breaker.failures == 1
    bed.pass_to(bed.now + 5)
    bed.train(6, first=8)
    assert (server.proofs, other.proofs) == (2, 1)
    assert bed.known[0].proved and not bed.known[0].failed and bed.made["back"] == 0


def test_a_sample_that_cannot_be_made_here_proves_nobody(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.server(1.0)
    make = bed.canary

    def canary(task: Task) -> Canary:
        if task.number < 3:
            raise LookupError(f"sample {task.samples[0]} is gone")
        return make(task)

    monkeypatch.setattr(bed, "canary", canary)
    workers = bed.workers()
    for number in range(3):
        assert not workers.give(task(number), None)
        assert f"compare with: LookupError: sample {number} is gone" in bed.known[0].failed
    assert workers.give(task(3), None)
    assert bed.step() == 3 and not bed.known[0].failed


def test_a_worker_that_began_slowly_is_not_waited_for_as_slowly_ever_after(bed: Bed) -> None:
    server = bed.server(1.0, processes=2)
    server.canary_s = 100.0
    workers = bed.workers()
    bed.train(1)
    bed.pass_to(100.0)
    bed.train(2, first=1)
    server.seconds = 90.0
    assert workers.give(task(3), None)
    bed.pass_to(bed.now + 89)
    assert workers.late() == [], "a process of it may be at its first task"
    assert bed.step() == 3
    server.seconds = 1.0
    bed.train(40, first=4)
    bed.pass_to(bed.now + 100)
    server.seconds = math.inf
    assert workers.give(task(44), None)
    bed.settle()
    usual_s = bed.known[0].sample_s
    bed.pass_to(bed.now + max(LATE_S, LATE_TIMES * usual_s) + 1)
    assert workers.late() == [44]


# ------------------------------------------------------------------------ failures of tasks, not of workers


@pytest.mark.parametrize(
    "error",
    [
        CodeFailed("raised"),
        BadSample(sample=1, object_name="a.jpg", reason="broken"),
        ObjectNotFound("gone"),
        Forbidden("not allowed"),
        ConfigError("cannot be sent"),
        TooLarge("too many tensors"),
        DoesNotFit("too large"),
        ValueError("a slip"),
    ],
)
@pytest.mark.parametrize("can_here", [True, False])
def test_what_is_wrong_with_some_tasks_is_not_held_against_a_worker(
    bed: Bed, error: Exception, can_here: bool
) -> None:
    """Neither with tasks that fail here as well, nor with those of other stages."""
    bad = range(4, 12)
    servers = [
        bed.server(1.0, raises=lambda task: error if task.number in bad and task.whole else None)
        for _ in range(2)
    ]
    bed.can_here = lambda number: can_here
    workers = bed.workers()
    bed.train(4)
    came = set[int]()
    for number in bad:
        if workers.give(task(number)._replace(whole=True), None):
            came.add(bed.step())
    refused = 2 * MOST_FAULTS if can_here else len(bad)
    assert (len(came), bed.made["back"]) == (refused, refused)
    for number in range(12, 32):
        assert workers.give(task(number), None)
    for _ in range(20):
        bed.step()
    assert bed.made["back"] == refused and not any(each.breaker.failures for each in bed.known)
    assert all(bed.made[server.url] > 5 for server in servers)
    assert all((str(error) in each.reason) == can_here and not each.why_not for each in bed.known)
    assert workers.give(task(32)._replace(whole=True), None) != can_here


def test_what_only_one_cannot_do_the_other_does(bed: Bed) -> None:
    narrow = bed.server(0.1, raises=lambda task: Forbidden("not allowed") if task.whole else None)
    wide = bed.server(0.1)
    workers = bed.workers()
    bed.train(4)
    for number in range(4, 5 + MOST_FAULTS):
        assert workers.give(task(number)._replace(whole=True), None)
        bed.settle()  # the wide one has one of these at most: the narrow one is free again at once
    for _ in range(1 + MOST_FAULTS):
        bed.step()
    assert bed.made["back"] >= MOST_FAULTS
    before = Counter(bed.made)
    for number in range(24, 44):
        assert workers.give(task(number)._replace(whole=number % 2 == 0), None)
    for _ in range(20):
        bed.step()
    made = Counter(bed.made) - before
    assert made["back"] == 0 and made[narrow.url] > 0 and made[wide.url] >= 10


def test_what_waits_for_somebody_who_turns_out_not_to_do_it_comes_back(bed: Bed) -> None:
    bed.server(1.0, raises=lambda task: Forbidden("not allowed") if task.whole else None)
    workers = bed.workers()
    bed.train(1)
    for number in range(1, 21):
        assert workers.give(task(number)._replace(whole=number > SLOTS), None)
    assert sorted(bed.step() for _ in range(20)) == list(range(1, 21))
    assert bed.made == {"w0": 1 + SLOTS, "back": 16}


# ------------------------------------------------------------------------------- several loaders at once


@pytest.mark.parametrize("most", some(1, [20, 12, 8, 5]))
def test_two_loaders_that_ask_for_more_than_there_are_places_keep_it_busy(bed: Bed, most: int) -> None:
    """Each loader is told that it may have 16 tasks there at once."""
    server = bed.server(0.5, processes=8, most=most)
    loaders = [bed.workers() for _ in range(2)]
    given, made = Counter[int](), Counter[int]()
    for _ in range(1000):
        for which, loader in enumerate(loaders):
            while given[which] - made[which] < 16 and loader.give(task(2 * given[which] + which), None):
                given[which] += 1
        done = bed.step()
        made[done % 2] += 1
    assert bed.made["back"] < 100, "where there was no place at all"
    assert bed.now < 1.2 * bed.made[server.url] * 0.5 / min(most, server.processes)
    assert min(made.values()) > 300


def test_tell_warns_once_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    worker = LoaderWorker("http://w", None)  # type: ignore[arg-type]
    for error in (
        ServerUnavailable("http://w: gone"),
        ServerUnavailable("http://w: still gone"),
        NotAuthorized("the token is not valid here"),
        NotAuthorized("the token is not valid here"),
    ):
        worker.failed_with(error, 0.0, for_good=isinstance(error, NotAuthorized))
        _tell(worker, type(error).__name__)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a worker is not used for now: http://w: gone",
        "a worker is not used: http://w: the token is not valid here",
    ]
