"""Have workers make samples: choose the worker for each task, and handle its result."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from upriver._threads.executor import DaemonExecutor
from upriver.dataloader.datasets.worker_spec import SampleSpec
from upriver.dataloader.remote.worker_choice import LATE_S, LoaderWorker, deal, faults_text, usual_s
from upriver.dataloader.tasks import Arrival, Arrivals, Task
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
from upriver.rpc.server_verification import fingerprint_difference
from upriver.text import error_text

log = logging.getLogger("upriver")

MOST_THREADS = 1024
"""Limit on tasks under way at all workers; a thread starts when there is a task for it."""

NEVER = (ConfigError, Forbidden, NotAuthorized, NotExact, ObjectNotFound, ProtocolError)
"""Errors for which asking again is useless."""

OF_TASK = (*NEVER, CodeFailed, BadSample, ObjectChanged, Damaged, DoesNotFit)
"""Errors caused by a task or its stages, not by a worker that has made the canary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """Sample made here that a worker must reproduce to the bit before it is given others.

    Attributes:
        value: List of the one sample.
        seconds: Seconds that it took here.
    """

    task: Task
    value: Any
    seconds: float


@dataclass(eq=False, slots=True)
class AssignedTask:
    """Task that a worker has.

    Attributes:
        begun_s: Time at which it was assigned, by the monotonic clock.
        tasks: Tasks that the worker then had, including this one.
        refused: Number of times the worker had then refused a task.
        answer: Stream of the response; None before the request.
        late: Whether the loader has stopped waiting for it.
    """

    worker: LoaderWorker
    task: Task
    begun_s: float
    tasks: int
    refused: int
    answer: RunAnswer | None = None
    late: bool = False


class WorkerDispatcher:
    """Deal tasks to workers, to each as fast as it makes them.

    A task is kept here until the worker that would finish it first has a place. If a worker fails, others
    make its task, or the training node if there are no others.

    A worker gets no task before it has reproduced a canary sample. It does so while other work goes on. Tasks
    wait for it the first time, and only briefly.

    A task that asking again would not help is done here, without blaming a worker that has made the canary.
    Only if this machine can do several such tasks in a row does the worker get no more tasks of the same
    stages.

    Args:
        workers: Workers, at least one.
        canary: Make the first sample of a task here.
        lock: Lock of the workers, which may serve several epochs at once.
        here_s: Seconds that this machine needs for a sample, if known.
        owner: Object that is kept alive as long as this one.
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
        self._threads = DaemonExecutor(MOST_THREADS, name="worker")

    @property
    def slots(self) -> int:
        """Return the number of tasks that can be under way at once."""
        return sum(worker.slots for worker in self._workers if not worker.why_not)

    @property
    def ready(self) -> bool:
        """Return whether a worker has made the canary and may be asked."""
        with self._lock:
            return self._is_ready()

    @property
    def coming(self) -> bool:
        """Return whether a worker is making the canary."""
        with self._lock:
            return bool(self._proving)

    def look(self, task: Task) -> bool:
        """Return whether a worker is ready; start the canary on unproved workers that may be asked.

        Call it in the iterating thread, which also makes the canary.
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
        """Return whether a worker is ready. The lock is held."""
        now = self._now()
        return any(worker.proved and worker.may(now) for worker in self._workers)

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        """Have a task done; return False if no worker can, or an index is no number that can be sent.

        Call it in the iterating thread, which makes the task's first sample as a canary if a worker needs
        one.
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
        """Add workers."""
        with self._lock:
            self._workers.extend(workers)

    def late(self) -> list[int]:
        """Return the numbers of tasks without an answer, to be done elsewhere; cut their workers off."""
        with self._lock:
            now, usual = self._now(), usual_s(self._workers) or self._here_s
            late = {number: held for number, held in self._held.items() if self._is_late(held, now, usual)}
            for held in late.values():
                held.late = True
                held.worker.hung(now, since=held.begun_s)
                _tell(held.worker, "hung")
            back = [] if self._closed else self._deal()
        for held in late.values():
            if held.answer is not None:
                held.answer.close()
        self._send_back(back)
        return list(late)

    def close(self) -> None:
        """Abort everything under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            answers = list(self._answers)
            for worker in self._proving:
                worker.proving_s = None
        for answer in answers:
            answer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --------------------------------------------------------------------------------------- proving

    def _have_canary(self, task: Task) -> None:
        """Make a canary if a worker needs one; if that fails, the next task's sample is tried."""
        now = self._now()
        unproved = [worker for worker in self._workers if worker.may(now) and not worker.proved]
        if not unproved:
            return
        try:
            self._canary = self._make_canary(task)
        except NotExact as error:
            for worker in unproved:
                self._note(worker, error)
        except Exception as error:  # the dataset's own error, which the batch will raise, too
            for worker in unproved:
                worker.failed = f"no sample could be made here to compare with: {error_text(error)}"
                _tell(worker, "canary")
        else:
            self._here_s = self._canary.seconds

    def _begin_proofs(self) -> None:
        """Start the proofs of workers that need one. The lock is held."""
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
                self._threads.begin(partial(self._prove, worker, self._canary))

    def _prove(self, worker: LoaderWorker, canary: Canary) -> None:
        """Check that a worker makes the same bits."""
        error: Exception | None = None
        try:
            info = worker.client.info()
            differences = fingerprint_difference(info.fingerprint)
            if differences:
                raise NotExact(f"it computes with other low bits: {differences}")
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
        """Return whether tasks may wait for a worker."""
        now = self._now()
        if not worker.may(now) or worker.proved:
            return worker.may(now)
        fresh = worker.proving_s is not None and now - worker.proving_s < LATE_S
        return fresh and not (worker.breaker.failures or worker.hangs.failures)

    def _deal(self) -> list[Task]:
        """Give waiting tasks to workers with a place; return those that no worker can be asked for any more.

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
                self._threads.begin(partial(self._ask, held, raw))
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
        """Register a response, so that closing this object closes it."""
        with self._lock:
            self._answers.add(answer)
            if held is not None:
                held.answer = answer
            closed = self._closed or (held is not None and held.late)
        try:
            if closed:
                raise AnswerClosed("the answer was closed by its reader")
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
        """Pass a failed task to another worker, or to the training node if that would not help.

        The training node's result shows which side is at fault. A worker that refuses a task still gets
        others while it works on one for this loader.
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
        """Record that this machine has done a task that the worker could not."""
        with self._lock:
            worker.cannot(task, error)

    def _let_go(self, held: AssignedTask) -> None:
        self._under_way[held.worker.url] -= 1
        self._held.pop(held.task.number, None)

    def _send_back(self, tasks: Sequence[Task]) -> None:
        """Send tasks back to be made on the training node."""
        for task in tasks:
            self._arrivals.put(Arrival(task.number, error=ServerUnavailable("no worker makes it")))

    def _note(self, worker: LoaderWorker, error: Exception) -> None:
        worker.failed_with(error, self._now(), for_good=isinstance(error, NEVER))
        _tell(worker, type(error).__name__)


def _tell(worker: LoaderWorker, cause: str) -> None:
    """Warn that a worker is not used, once for each cause: an absent one fails again and again."""
    when = "" if worker.why_not else " for now"
    level = logging.INFO if (cause, when) in worker.told_of else logging.WARNING
    worker.told_of.add((cause, when))
    log.log(level, "a worker is not used%s: %s", when, faults_text({worker.url: worker.reason}))


def _can_be_sent(task: Task) -> bool:
    """Return whether the task's indices are numbers that a request can hold."""
    numbers = tuple(map(whole_number, task.indices))
    return numbers == task.samples and all(0 <= sample <= MAX_INTEGER for sample in task.samples)
