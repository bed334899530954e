"""Samples made by workers elsewhere: who is asked for which, and what comes of it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from upriver.dataloader.datasets.worker_spec import SampleSpec
from upriver.dataloader.remote.worker import LATE_S, LoaderWorker, deal, usual_s
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.dataloader.thread_pool import Threads
from upriver.engine.fingerprint import fingerprint
from upriver.errors import (
    BadSample,
    CodeFailed,
    ConfigError,
    Damaged,
    DoesNotFit,
    Forbidden,
    NotAuthorized,
    NotExact,
    ObjectChanged,
    ObjectNotFound,
    Overloaded,
    ProtocolError,
    ServerUnavailable,
    UpriverError,
)
from upriver.pipeline.mapstyle import whole_number
from upriver.protocol.caps import MAX_INTEGER
from upriver.protocol.tree import identical
from upriver.rpc.client import AnswerClosed, RunAnswer
from upriver.text import error_text

log = logging.getLogger("upriver")

MOST_THREADS = 1024
"""Tasks under way, whoever is at them; a thread begins when there is one for it."""

NEVER = (ConfigError, Forbidden, NotAuthorized, NotExact, ObjectNotFound, ProtocolError)
"""What asking again would not change."""

OF_TASK = (*NEVER, CodeFailed, BadSample, ObjectChanged, Damaged, DoesNotFit)
"""What says nothing of who has made the canary, but of a task, or of the stages that it is to run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A sample that was made here, which a worker must make to the bit before it is given others.

    Attributes:
        task: For this one sample.
        value: A list of it.
        seconds: That it took here.
    """

    task: Task
    value: Any
    seconds: float


@dataclass(eq=False, slots=True)
class AssignedTask:
    """A task that a worker has.

    Attributes:
        begun_s: When it was given it, by the monotonic clock.
        tasks: That it had then, with this one.
        refused: How often it had refused one then.
        answer: What comes of it; None where nothing was asked yet.
        late: Whether nobody waits for it any more.
    """

    worker: LoaderWorker
    task: Task
    begun_s: float
    tasks: int
    refused: int
    answer: RunAnswer | None = None
    late: bool = False


class Workers:
    """Deals tasks to workers, each as fast as it makes them.

    A task is kept here until a worker has a place for it that would be done with it first. What a worker that
    fails was given others make, and the training node where there is no other.

    None gets a task before it has made a sample as this machine does. It is at that beside whatever else is
    done; tasks wait for it the first time, and not for long.

    Whoever has made one is not judged by a task with which asking again would not help: that is done here.
    Only where it can be, a few times in a row, is that worker given no more tasks of the same stages.

    Args:
        workers: At least one.
        source: What they are asked for.
        arrivals: Where what they make comes.
        canary: The first sample of a task, made here.
        lock: Of the workers, who may be asked for several epochs at once.
        here_s: Seconds that this machine takes for a sample, as far as is known.
        owner: Lives as long as this does.
    """

    def __init__(
        self,
        workers: Sequence[LoaderWorker],
        source: SampleSpec,
        arrivals: Arrivals,
        *,
        canary: Callable[[Task], Canary],
        lock: threading.Lock,
        here_s: float = 0.0,
        owner: object = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._source, self._arrivals, self._now = list(workers), source, arrivals, now
        self._make_canary, self._owner, self._here_s = canary, owner, here_s
        self._canary: Canary | None = None
        self._waiting: list[tuple[Task, Sequence[Any] | None]] = []
        self._lock, self._closed = lock, False
        self._answers: set[RunAnswer] = set()
        self._held: dict[int, AssignedTask] = {}
        self._proving: set[LoaderWorker] = set()
        self._under_way: Counter[str] = Counter()
        self._threads = Threads(MOST_THREADS, "upriver-worker")

    @property
    def slots(self) -> int:
        """Tasks that can be under way at once."""
        return sum(worker.slots for worker in self._workers if not worker.why_not)

    @property
    def ready(self) -> bool:
        """Whether somebody has made the first sample, and may be asked."""
        with self._lock:
            return self._is_ready()

    @property
    def coming(self) -> bool:
        """Whether somebody is at the first sample."""
        with self._lock:
            return bool(self._proving)

    def look(self, task: Task) -> bool:
        """Whether somebody is ready; whoever may be asked and has not made the first sample is to make it.

        In the thread that iterates, which makes it, too.
        """
        if not _can_be_sent(task):
            return False
        if self._canary is None:
            self._have_canary(task)
        with self._lock:
            if self._closed:
                return False
            self._begin_proofs()
            return self._is_ready()

    def _is_ready(self) -> bool:
        """The lock is held."""
        now = self._now()
        return any(worker.proved and worker.may(now) for worker in self._workers)

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        """Have a task done; False where no worker is there, or indices are no numbers that can be sent.

        In the thread that iterates, which makes the first sample of a task where there is a worker to prove.
        """
        if not _can_be_sent(task):
            return False
        if self._canary is None:
            self._have_canary(task)
        with self._lock:
            if self._closed:
                return False
            self._begin_proofs()
            if not any(self._there(worker) and worker.takes(task) for worker in self._workers):
                return False
            self._waiting.append((task, raw))
            back = self._deal()
        self._send_back(back)
        return True

    def add(self, workers: Sequence[LoaderWorker]) -> None:
        """Have more of them from now on."""
        with self._lock:
            self._workers.extend(workers)

    def late(self) -> list[int]:
        """Tasks that nobody answers, by number: somebody else is to do them; who has them is cut off."""
        with self._lock:
            now, usual = self._now(), usual_s(self._workers) or self._here_s
            late = {number: held for number, held in self._held.items() if self._is_late(held, now, usual)}
            for held in late.values():
                held.late = True
                held.worker.hung(now, since=held.begun_s)
            back = [] if self._closed else self._deal()
        for held in late.values():
            if held.answer is not None:
                held.answer.close()
        self._send_back(back)
        return list(late)

    def close(self) -> None:
        """Break off whatever is under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            answers = list(self._answers)
            for worker in self._proving:
                worker.proving_s = None
        for answer in answers:
            answer.close()
        self._threads.shutdown()

    # --------------------------------------------------------------------------------------- proving

    def _have_canary(self, task: Task) -> None:
        """Make one, where somebody is to be proved; where that fails the next task's sample may do."""
        now = self._now()
        unproved = [worker for worker in self._workers if worker.may(now) and not worker.proved]
        if not unproved:
            return
        try:
            self._canary = self._make_canary(task)
        except NotExact as error:
            for worker in unproved:
                self._note(worker, error)
        except Exception as error:  # the dataset's own, which the batch will have as well
            for worker in unproved:
                worker.failed = f"no sample could be made here to compare with: {error_text(error)}"
        else:
            self._here_s = self._canary.seconds

    def _begin_proofs(self) -> None:
        """The lock is held."""
        now = self._now()
        for worker in self._workers:
            if (
                self._canary is not None
                and worker.may(now)
                and not worker.proved
                and worker.proving_s is None
            ):
                worker.proving_s = now
                self._proving.add(worker)
                self._threads.submit(partial(self._prove, worker, self._canary))

    def _prove(self, worker: LoaderWorker, canary: Canary) -> None:
        """Whether it makes the same bits."""
        error: Exception | None = None
        try:
            info = worker.client.info()
            differences = _differences(info.fingerprint)
            if differences:
                raise NotExact(f"it computes otherwise: {differences}")
            if not identical(self._made(worker, canary.task, None), canary.value):
                sample = canary.task.indices[0]
                raise NotExact(f"it makes another sample {sample} of {self._source.name} than this machine")
        except Exception as found:
            error = found
        with self._lock:
            self._proving.discard(worker)
            if self._closed:
                return
            began_s, worker.proving_s = worker.proving_s, None
            if error is not None:
                self._note(worker, error)
            else:
                worker.told(info)
                worker.proves(0.0 if began_s is None else self._now() - began_s)
            back = self._deal()
        self._send_back(back)

    # --------------------------------------------------------------------------------------- dealing

    def _there(self, worker: LoaderWorker) -> bool:
        """Whether tasks may wait for it."""
        now = self._now()
        if not worker.may(now) or worker.proved:
            return worker.may(now)
        fresh = worker.proving_s is not None and now - worker.proving_s < LATE_S
        return fresh and not worker.fails

    def _deal(self) -> list[Task]:
        """Give what waits to whoever has a place; what nobody will make, where none is asked any more.

        The lock is held.
        """
        self._begin_proofs()
        if not self._waiting:
            return []
        there = [worker for worker in self._workers if self._there(worker)]
        waiting, back = list[tuple[Task, Sequence[Any] | None]](), list[Task]()
        for task, raw in self._waiting:
            if any(worker.takes(task) for worker in there):
                waiting.append((task, raw))
            else:
                back.append(task)
        ready, now = [worker for worker in there if worker.proved], self._now()
        dealt = deal([task for task, _ in waiting], ready, self._under_way, now)
        self._waiting = [each for each, worker in zip(waiting, dealt, strict=True) if worker is None]
        for (task, raw), worker in zip(waiting, dealt, strict=True):
            if worker is not None:
                self._under_way[worker.url] += 1
                tasks = self._under_way[worker.url]
                worker.given(now, samples=len(task.samples), tasks=tasks)
                held = self._held[task.number] = AssignedTask(worker, task, now, tasks, worker.refused)
                self._threads.submit(partial(self._ask, held, raw))
        return back

    def _is_late(self, held: AssignedTask, now: float, usual_s: float) -> bool:
        limit_s = held.worker.limit_s(
            usual_s, samples=len(held.task.samples), tasks=held.tasks, begun_s=held.begun_s
        )
        return not held.late and now - held.begun_s > limit_s

    def _ask(self, held: AssignedTask, raw: Sequence[Any] | None) -> None:
        try:
            value = self._made(held.worker, held.task, raw, held)
        except Exception as error:
            self._failed(held, raw, error)
        else:
            self._arrived(held, value)

    def _made(
        self, worker: LoaderWorker, task: Task, raw: Sequence[Any] | None, held: AssignedTask | None = None
    ) -> Any:
        request, sent = self._source.request(task, raw)
        with worker.client.run(request, sent) as answer, self._open(answer, held):
            answers = [batch for batch, _timings in answer]
        return self._source.value(task, answers)

    @contextmanager
    def _open(self, answer: RunAnswer, held: AssignedTask | None) -> Iterator[None]:
        """Whoever closes this closes the answer."""
        with self._lock:
            self._answers.add(answer)
            if held is not None:
                held.answer = answer
            closed = self._closed or (held is not None and held.late)
        try:
            if closed:
                raise AnswerClosed("nobody waits for it any more")
            yield
        finally:
            with self._lock:
                self._answers.discard(answer)

    def _arrived(self, held: AssignedTask, value: Any) -> None:
        task, worker = held.task, held.worker
        with self._lock:
            self._let_go(held)
            if self._closed or held.late:
                return
            worker.took(task, now=self._now(), begun_s=held.begun_s, tasks=held.tasks)
            back = self._deal()
        self._arrivals.put(Arrival(task.number, value, place=worker.url))
        self._send_back(back)

    def _failed(self, held: AssignedTask, raw: Sequence[Any] | None, error: Exception) -> None:
        """Somebody else makes it; where that would not help the training node, which shows whose fault it is.

        A worker that refuses is not left alone as long as it is at something for this loader.
        """
        task, worker = held.task, held.worker
        of_task = isinstance(error, OF_TASK) or not isinstance(error, UpriverError)
        with self._lock:
            self._let_go(held)
            if self._closed:
                return
            if not held.late and not of_task:
                left = self._under_way[worker.url]
                if isinstance(error, Overloaded):
                    worker.full(refused=held.refused, tasks=left)
                if not isinstance(error, Overloaded) or not left:
                    self._note(worker, error)
                self._waiting.insert(0, (task, raw))
            back = self._deal()
        if of_task and not held.late:
            blame = partial(self._blame, worker, task, error)
            self._arrivals.put(Arrival(task.number, error=error, place=worker.url, blame=blame))
        self._send_back(back)

    def _blame(self, worker: LoaderWorker, task: Task, error: Exception) -> None:
        """This machine has done what that worker could not."""
        with self._lock:
            worker.cannot(task, error)

    def _let_go(self, held: AssignedTask) -> None:
        self._under_way[held.worker.url] -= 1
        self._held.pop(held.task.number, None)

    def _send_back(self, tasks: Sequence[Task]) -> None:
        """They are made on the training node."""
        for task in tasks:
            self._arrivals.put(Arrival(task.number, error=ServerUnavailable("no worker makes it")))

    def _note(self, worker: LoaderWorker, error: Exception) -> None:
        """What a failure says of a worker."""
        log.info("worker %s: %s", worker.url, error)
        worker.failed_with(error, self._now(), for_good=isinstance(error, NEVER))


def _can_be_sent(task: Task) -> bool:
    """Whether its indices are numbers that a request can say."""
    numbers = tuple(map(whole_number, task.indices))
    return numbers == task.samples and all(0 <= sample <= MAX_INTEGER for sample in task.samples)


def _differences(theirs: Mapping[str, str]) -> str:
    """In what a worker's fingerprint differs from this process's, in words; empty if in nothing."""
    ours = fingerprint()
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return ", ".join(
        f"{name} is {theirs.get(name) or 'unknown'}, here {ours.get(name) or 'unknown'}" for name in names
    )
