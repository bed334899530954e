"""Make samples on the training node, in PyTorch's loader processes or in the training process itself."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from upriver._threads.executor import DaemonExecutor
from upriver.dataloader.local.shared_memory import PackedSamples, as_sent, has_room, packed
from upriver.dataloader.local.torch_processes import (
    begin,
    ended_by,
    gone,
    raised,
    told_by_waiting,
    why_ended,
    wrapped,
)
from upriver.dataloader.tasks import Arrival, Arrivals, KeptStart, Task
from upriver.types import DONE

READERS = 4
"""Number of threads that read at once, each the samples of one task."""

MOST_HANDED = 2
"""Number of batches kept for another thread to free."""

IDLE = Task(number=-1, epoch=0, batch=0, indices=(), samples=(), whole=False)
"""Empty task: a loader process that never got a task would be ended."""


class SampleSource(Protocol):
    """A dataset as a chain of stages, from a sample's index to an element of a batch."""

    @property
    def dataset(self) -> Any:
        """The user's dataset."""

    @property
    def seed(self) -> int:
        """Seed of the random numbers."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions that a sample can have, from its index alone to the end."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages from each position to the next."""

    def make_all(
        self,
        indices: Sequence[Any],
        *,
        epoch: int,
        samples: Sequence[int],
        start: int,
        stop: int,
        given: Sequence[Any] | None,
    ) -> list[Any]:
        """Make samples, or run a part of their stages; leave the process's generators changed."""

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; leave the process's generators changed."""


class PassingSource(SampleSource, Protocol):
    """Source whose samples can be sent back as they are at a position on their way."""

    def pass_by(
        self,
        values: Sequence[Any],
        *,
        samples: Sequence[int],
        epoch: int,
        at: int,
        stop: int,
        there: Sequence[bool],
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], float]:
        """Bring samples past a position; see `upriver.dataloader.datasets.declared.Declared.pass_by`."""

    def finished(self, indices: Sequence[Any], values: Sequence[torch.Tensor]) -> list[Any]:
        """Return finished samples with their targets."""


class MadeRows(NamedTuple):
    """Samples to keep, as a loader process made them.

    Attributes:
        rows: Samples at the kept position, by their number.
        seconds: Seconds in which they were read and made.
    """

    epoch: int
    rows: Mapping[int, torch.Tensor]
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """Make samples and batches, with the same code here, in loader processes and on workers."""

    source: SampleSource
    collate: Callable[[list[Any]], Any]

    def make(self, task: Task) -> Any:
        """Make a task's batch, samples or intermediate values; leave the process's generators changed."""
        rows = self.source.make_all(
            task.indices,
            epoch=task.epoch,
            samples=task.samples,
            start=task.start,
            stop=task.stop,
            given=task.given,
        )
        return self.join(rows, epoch=task.epoch, batch=task.batch) if task.joins else rows

    def join(self, samples: list[Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; leave the process's generators changed."""
        return self.source.join(samples, self.collate, epoch=epoch, batch=batch)


class TaskResult(NamedTuple):
    """Result of a task in a loader process, or the dataset's error there.

    Attributes:
        left: How the process was to end; empty if it was not.
        rows: Samples to keep by their number, packed into a list of one. Those that the batch holds as they
            are come as their places there.
        rows_of: Epoch of these samples, and the seconds in which they were made; None if there are none.
    """

    number: int
    value: Any = None
    failed: ExceptionWrapper | None = None
    left: str = ""
    rows: Any = None
    rows_of: tuple[int, float] | None = None

    @property
    def made_rows(self) -> MadeRows | None:
        """Return the samples to keep; they share memory with the result or the process that made them."""
        if self.rows_of is None:
            return None
        (rows,) = self.rows.unpacked() if isinstance(self.rows, PackedSamples) else self.rows
        batch = {sample: self.value[0][at] for sample, at in rows.items() if isinstance(at, int)}
        return MadeRows(self.rows_of[0], {**rows, **batch}, self.rows_of[1])


class TaskDataset(TorchDataset[TaskResult]):
    """Dataset whose indices are tasks, so that PyTorch's loader processes do them."""

    def __init__(self, maker: SampleMaker) -> None:
        self._maker = maker
        self.begun_with: ExceptionWrapper | None = None
        """Error with which this process began, which is the result of each of its tasks."""

    @property
    def dataset(self) -> Any:
        """Return the user's dataset."""
        return self._maker.source.dataset

    def __getitem__(self, task: Task) -> TaskResult:
        """Do a task; an error is returned with the task's number, as any raised error is the process's own.

        A process that is to end returns that, too: results that it has sent are lost if it ends too soon.
        """
        if self.begun_with is not None:
            return TaskResult(task.number, failed=self.begun_with)
        try:
            if isinstance(task.given, PackedSamples):
                task = task._replace(given=task.given.unpacked())
            if task.kept is not None:
                return self._passed_by(task, task.kept)
            made = as_sent(self._maker.make(task))
            return TaskResult(task.number, made if task.joins else packed(made))
        except Exception as error:
            return TaskResult(task.number, failed=wrapped(error))
        except BaseException as left:  # such as an exit or an interruption
            return TaskResult(task.number, left=_told_of(left))

    def _passed_by(self, task: Task, kept: KeptStart) -> TaskResult:
        """Do a task, and return the samples to keep besides; they are left out where memory is scarce."""
        source = cast(PassingSource, self._maker.source)
        values, rows, seconds = source.pass_by(
            task.given,
            samples=task.samples,
            epoch=task.epoch,
            at=kept.position,
            stop=task.stop,
            there=kept.there,
        )
        made: Any = values if task.stop < DONE else source.finished(task.indices, values)
        if task.joins:
            made = as_sent(self._maker.join(made, epoch=task.epoch, batch=task.batch))
        else:
            made = packed(made)
        rows_of = task.epoch, kept.seconds + seconds
        if self._holds(rows.values(), task, kept):
            places = {sample: at for at, sample in enumerate(task.samples) if sample in rows}
            return TaskResult(task.number, made, rows=[places], rows_of=rows_of)
        if not rows or not has_room(sum(row.nbytes for row in rows.values())):
            return TaskResult(task.number, made)
        return TaskResult(task.number, made, rows=packed([rows]), rows_of=rows_of)

    def _holds(self, rows: Collection[torch.Tensor], task: Task, kept: KeptStart) -> bool:
        """Return whether a task's batch holds rows as they are: finished, and in their memory order."""
        joined = task.joins and kept.position == DONE and self._maker.collate is default_collate
        plain = (
            row.stride() == torch.empty(row.shape, dtype=row.dtype, device="meta").stride() for row in rows
        )
        return joined and bool(rows) and all(plain)


class ProcessesEnded(RuntimeError):
    """Raised when loader processes have ended for an epoch; no sample caused it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"loader processes work for this epoch no more: {why}")


class TaskSampler:
    """Sampler of waiting tasks, and of empty ones where none wait.

    PyTorch's loader draws the next task after handing out a result, and ends if there is none.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def add(self, task: Task) -> None:
        """Add a task; one that only reads goes first, as workers wait for it."""
        if task.stop < DONE:
            self.tasks.appendleft(task)
        else:
            self.tasks.append(task)

    def __iter__(self) -> Iterator[Task]:
        while True:
            try:
                yield self.tasks.popleft()
            except IndexError:
                yield IDLE


class RunningProcesses(Protocol):
    """Loader processes at work for one epoch."""

    def give(self, task: Task) -> None:
        """Have a task done; its result, or an error if the processes have ended, goes to the arrivals."""

    def let_go(self, made: object) -> None:
        """Free a batch that was handed out, in another thread, once there is a newer one.

        Loader processes return shared memory, which takes milliseconds to free. That is a third of a small
        model's step, in the thread for which an accelerator waits.
        """

    def halt(self) -> None:
        """Drop tasks that have not begun; processes that do not persist end. It may be called again."""


class LoaderProcesses:
    """PyTorch's loader processes, which do tasks in the order given.

    Args:
        base_seed: Each process is seeded by it and its own number, as in PyTorch's loader.
        arguments: Arguments of PyTorch's loader that concern processes, such as ``num_workers``.
    """

    def __init__(self, maker: SampleMaker, *, base_seed: int = 0, **arguments: Any) -> None:
        self._waiting = TaskSampler()
        arguments["worker_init_fn"] = partial(begin, arguments.get("worker_init_fn"), base_seed)
        arguments["generator"] = torch.Generator()  # unused; else the shared one would advance
        with warnings.catch_warnings():  # the user's loader has already warned about its arguments
            warnings.simplefilter("ignore")
            self._loader = TorchLoader(
                TaskDataset(maker), batch_size=None, sampler=self._waiting, collate_fn=_as_it_is, **arguments
            )
        self._forward: _Forward | None = None

    def start(
        self, arrivals: Arrivals, tasks: Iterable[Task], keep: Callable[[MadeRows], object] | None = None
    ) -> RunningProcesses:
        """Start the processes with their first tasks; persistent ones drop their current tasks and restart.

        Call it in the training thread, from which processes are forked.

        Args:
            keep: Called in another thread with the samples to keep; they share the processes' memory.
        """
        self.stop()
        tasks = list(tasks)
        for task in tasks:
            self._waiting.add(task)
        try:
            processes = iter(self._loader)
            told_by_waiting(processes)
        except Exception:
            self._forget()
            raise
        self._forward = _Forward(processes, self._waiting, arrivals, tasks, keep or (lambda made: None))
        return self._forward

    def pids(self) -> list[int]:
        """Return the process ids of those started last."""
        return [] if self._forward is None else self._forward.pids()

    def halt(self) -> None:
        """Drop tasks that have not begun; see `RunningProcesses`."""
        if self._forward is not None:
            self._forward.halt()

    def stop(self) -> None:
        """Drop tasks that have not begun, and wait for those that have."""
        self.halt()
        if self._forward is not None:
            self._forward.join()
            if self._forward.failed:
                self._forget()
            self._forward = None

    def begin_anew(self) -> None:
        """End persistent processes; the next epoch starts others with the same seeds."""
        self.stop()
        self._forget()

    def _forget(self) -> None:
        """Forget persistent processes after one has ended, so that others are started."""
        self._waiting.tasks.clear()
        self._loader._iterator = None


class StoreReading:
    """Read the samples of tasks from the store. Any number of threads may use it."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source

    def read(self, task: Task) -> Arrival | Task:
        """Return a task's result, or the task with its samples for a loader process.

        Raises:
            Exception: If a sample cannot be read.
        """
        read = self._source.positions[1]
        values = self._source.make_all(
            task.indices, epoch=task.epoch, samples=task.samples, start=task.start, stop=read, given=None
        )
        return Arrival(task.number, values) if task.stop == read else task._replace(start=read, given=values)

    def keep(self, made: MadeRows) -> None:
        """Keep samples that a loader process made; without room for any, none are sent."""


class FedProcesses:
    """Loader processes whose input is read by threads of the training process.

    A client of an object store has its own threads. They do not exist in a forked process, which would wait
    for them forever.

    Args:
        reading: Reads in the first stage.
        processes: Do the later stages.
    """

    def __init__(self, reading: StoreReading, processes: LoaderProcesses) -> None:
        self._reading, self._processes = reading, processes
        self._readers: _Readers | None = None

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> RunningProcesses:
        """Start the processes and the reading threads; see `LoaderProcesses`."""
        self.halt()
        started = self._processes.start(arrivals, (), self._reading.keep)
        self._readers = _Readers(self._reading, started, arrivals)
        for task in tasks:
            self._readers.give(task)
        return self._readers

    def pids(self) -> list[int]:
        """Return the process ids; see `LoaderProcesses`."""
        return self._processes.pids()

    def halt(self) -> None:
        """Stop the reading threads and the processes; see `RunningProcesses`."""
        if self._readers is not None:
            self._readers.halt()

    def stop(self) -> None:
        """Stop, and wait for tasks that have begun; see `LoaderProcesses`."""
        self.halt()
        self._processes.stop()


class _Readers:
    """Threads that read for the loader processes of one epoch."""

    def __init__(self, reading: StoreReading, processes: RunningProcesses, arrivals: Arrivals) -> None:
        self._reading, self._processes, self._arrivals = reading, processes, arrivals
        self._threads = DaemonExecutor(READERS, name="read")
        self._lock, self._unread = threading.Lock(), dict[int, Task]()
        self._over = False

    def give(self, task: Task) -> None:
        """Have a task read, then done; see `RunningProcesses`."""
        if task.given is not None:
            self._work(task)
        elif self._over:
            self._processes.give(task)  # the processes have an answer to that
        else:
            with self._lock:
                self._unread[task.number] = task
            self._threads.begin(partial(self._read, task))

    def let_go(self, made: object) -> None:
        self._processes.let_go(made)

    def halt(self) -> None:
        """Stop reading; see `RunningProcesses`.

        Tasks that are still being read go to no later epoch's processes.
        """
        self._over = True
        self._processes.halt()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            unread, self._unread = self._unread, {}
        for task in unread.values():
            self._processes.give(task)

    def _read(self, task: Task) -> None:
        with self._lock:
            if self._unread.pop(task.number, None) is None:
                return
        try:
            found = self._reading.read(task)
        except Exception as error:
            found = Arrival(task.number, error=error, final=True)
        if isinstance(found, Arrival):
            self._arrivals.put(found)
        else:
            self._work(found)

    def _work(self, task: Task) -> None:
        given = task.given
        if not isinstance(given, PackedSamples):
            given = [each.numpy() if isinstance(each, torch.Tensor) else each for each in given]
        self._processes.give(task._replace(given=given))


class _Left(Exception):
    """Raised when the dataset's code has ended a loader process."""


class _Forward(threading.Thread):
    """Thread that forwards the result, or the dataset's error, of each task as soon as it arrives.

    It serves one epoch. Tasks that are unfinished or given after its end get an error. The same applies once
    a process has ended, as PyTorch's loader drops that process's tasks.

    Attributes:
        failed: Whether processes ended that should have continued.
    """

    def __init__(
        self,
        source: Iterator[TaskResult],
        waiting: TaskSampler,
        arrivals: Arrivals,
        begun: Iterable[Task],
        keep: Callable[[MadeRows], object],
    ) -> None:
        super().__init__(name="upriver-here", daemon=True)
        self._source, self._waiting, self._arrivals, self._keep = source, waiting, arrivals, keep
        self._expected: SimpleQueue[None] = SimpleQueue()
        self._handed: deque[object] = deque(maxlen=MOST_HANDED)
        self._outstanding = {task.number for task in begun}
        self._lock = threading.Lock()
        self._ended, self.failed = "", False
        for _ in self._outstanding:
            self._expected.put(None)
        self.start()

    def pids(self) -> list[int]:
        return [process.pid for process in getattr(self._source, "_workers", ()) if process.pid is not None]

    def give(self, task: Task) -> None:
        with self._lock:
            if not self._ended:
                self._outstanding.add(task.number)
                self._waiting.add(task)
                self._expected.put(None)
                return
        self._arrivals.put(self._none_of(task.number))

    def let_go(self, made: object) -> None:
        """Keep a batch, which the next result frees unless it is the newest; see `RunningProcesses`."""
        if has_room():
            self._handed.append(made)

    def halt(self) -> None:
        """End the epoch; see `RunningProcesses`. The thread ends by itself."""
        self._end("they were halted, or have begun another epoch")

    def run(self) -> None:
        while not self._ended:
            self._expected.get()
            try:
                made = self._next()
            except Exception as error:
                self.failed = True
                self._end(str(error) if isinstance(error, _Left) else why_ended(self._source, error))
            else:
                if made is not None:
                    self._keep_rows(made)  # first, so that a whole epoch is kept when its last batch comes
                    self._hand_on(_arrival(made))
                del made
        self._handed.clear()
        self._source = iter(())  # else the processes would live as long as their user

    def _next(self) -> TaskResult | None:
        """Return the result of the next finished task; None at the end.

        Raises:
            RuntimeError: If a process has ended.
            _Left: If the dataset's code has ended one.
        """
        made = TaskResult(IDLE.number)
        while made.number == IDLE.number:
            if self._ended:
                return None
            made = next(self._source)
        if made.left:
            raise _Left(made.left)
        return made

    def _keep_rows(self, made: TaskResult) -> None:
        rows = made.made_rows
        if rows is not None:
            self._keep(rows)

    def _hand_on(self, arrival: Arrival) -> None:
        with self._lock:
            self._outstanding.discard(arrival.number)
        self._arrivals.put(arrival)
        while len(self._handed) > 1:
            self._handed.popleft()

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = why
            self._waiting.tasks.clear()
            left, self._outstanding = sorted(self._outstanding), set()
        for number in left:
            self._arrivals.put(self._none_of(number))
        self._expected.put(None)

    def _none_of(self, task: int) -> Arrival:
        return Arrival(task, error=ProcessesEnded(self._ended), final=True)


def _arrival(made: TaskResult) -> Arrival:
    if made.failed is not None:
        return Arrival(made.number, error=raised(made.failed), final=True)
    value = made.value.unpacked() if isinstance(made.value, PackedSamples) else made.value
    return Arrival(made.number, value)


def _told_of(left: BaseException) -> str:
    """Return how this process was to end, in words."""
    if isinstance(left, SystemExit):
        why = "" if left.code is None or isinstance(left.code, int) else f": {left.code}"
        return ended_by(os.getpid(), _exit_code(left)) + why
    return f"{gone(os.getpid())}, by {type(left).__name__}{f': {left}' if str(left) else ''}"


def _exit_code(left: SystemExit) -> int:
    if left.code is None:
        return 0
    return left.code & 0xFF if isinstance(left.code, int) else 1


def _as_it_is(value: Any) -> Any:
    return value
