"""Samples made on the training node, by PyTorch's own loader processes or in the training process itself."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset

from upriver.dataloader.local.shared_memory import Packed, as_sent, packed
from upriver.dataloader.local.torch_processes import (
    begin,
    ended_by,
    gone,
    raised,
    told_by_waiting,
    why_ended,
    wrapped,
)
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.dataloader.thread_pool import Threads
from upriver.pipeline.mapstyle import DONE

READERS = 4
"""Threads that read at once, each the samples of one task."""

MOST_HANDED = 2
"""Batches that are kept for another thread to let go of."""

SHARED_MEMORY, ROOM_BYTES = "/dev/shm", 2**28
"""Where loader processes put what they make. A batch more is kept there only where there is so much room."""

IDLE = Task(number=-1, epoch=0, batch=0, indices=(), samples=(), whole=False)
"""Nothing to do: a loader process that got no task at all would be ended."""


class SampleSource(Protocol):
    """A dataset, as a chain of stages from a sample's index to what a batch is made of."""

    @property
    def dataset(self) -> Any:
        """The user's."""

    @property
    def seed(self) -> int:
        """Of what is drawn."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Where a sample can stand, from nothing but its index to the end."""

    @property
    def stages(self) -> tuple[str, ...]:
        """What leads from each position to the next."""

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
        """Some samples, or a stretch of their way; sets this process's generators and leaves them so."""

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """A batch of its samples; sets this process's generators and leaves them so."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes samples and batches; the same code here, in loader processes and in workers elsewhere.

    Attributes:
        source: The dataset.
        collate: From a list of samples to a batch.
    """

    source: SampleSource
    collate: Callable[[list[Any]], Any]

    def make(self, task: Task) -> Any:
        """A batch, its samples or what they are on the way; sets this process's generators."""
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
        """A batch of its samples; sets this process's generators and leaves them so."""
        return self.source.join(samples, self.collate, epoch=epoch, batch=batch)


class Made(NamedTuple):
    """What a loader process made of a task, by its number; or what the dataset raised there.

    Attributes:
        left: That the process was to end, and how; else empty.
    """

    number: int
    value: Any = None
    failed: ExceptionWrapper | None = None
    left: str = ""


class Tasks(TorchDataset[Made]):
    """Tasks as a dataset, so that PyTorch's loader processes do them: its indices are the tasks."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self.begun_with: ExceptionWrapper | None = None
        """What this process failed with when it began, and so with each task."""

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._maker.source.dataset

    def __getitem__(self, task: Task) -> Made:
        """Do one. What is raised goes with the task's number: any other error is the process's.

        Where the process is to end it says so instead: what it has sent before is lost if it is gone too
        soon.
        """
        if self.begun_with is not None:
            return Made(task.number, failed=self.begun_with)
        try:
            made = as_sent(self._maker.make(task))
            return Made(task.number, made if task.joins else packed(made))
        except Exception as error:
            return Made(task.number, failed=wrapped(error))
        except BaseException as left:  # such as an exit or an interruption
            return Made(task.number, left=_told_of(left))


class ProcessesEnded(RuntimeError):
    """Loader processes do no more for an epoch: what is said is no sample's fault.

    Args:
        why: They do not.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"loader processes work for this epoch no more: {why}")


class Waiting:
    """A sampler of the tasks that wait; where none does, of one with nothing to do.

    PyTorch's loader takes the next one when it has handed a result out, and ends where there is none.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def add(self, task: Task) -> None:
        """One more. One that only reads comes first: others wait for it, and have work of their own to do."""
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


class Running(Protocol):
    """Loader processes at work for one epoch."""

    def give(self, task: Task) -> None:
        """Have a task done, for the epoch's arrivals; an error comes for it where they work no more."""

    def let_go(self, made: object) -> None:
        """Of what was handed out, once there is something newer, and in another thread.

        What processes have made is shared memory, which takes milliseconds to give back: a third of what a
        small model's step takes, in the thread for which an accelerator waits.
        """

    def halt(self) -> None:
        """Let go of what nobody has begun; processes that do not persist end. May be called again."""


class Processes:
    """PyTorch's loader processes, which do tasks in the order in which they are given.

    Args:
        maker: What they do them with.
        base_seed: Each is seeded by it and its own number when it begins, as by PyTorch's loader.
        arguments: Of PyTorch's loader: ``num_workers``, and whatever else concerns processes.
    """

    def __init__(self, maker: Maker, *, base_seed: int = 0, **arguments: Any) -> None:
        self._waiting = Waiting()
        arguments["worker_init_fn"] = partial(begin, arguments.get("worker_init_fn"), base_seed)
        arguments["generator"] = torch.Generator()  # of which nothing is used, or the shared one would go on
        with warnings.catch_warnings():  # of arguments the user's own loader has warned already
            warnings.simplefilter("ignore")
            self._loader = TorchLoader(
                Tasks(maker), batch_size=None, sampler=self._waiting, collate_fn=_as_it_is, **arguments
            )
        self._forward: _Forward | None = None

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> Running:
        """Start them with their first tasks; those that persist begin anew, and leave what they were at.

        In the thread that trains, from which processes are forked.
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
        self._forward = _Forward(processes, self._waiting, arrivals, tasks)
        return self._forward

    def pids(self) -> list[int]:
        """Of those that were started last."""
        return [] if self._forward is None else self._forward.pids()

    def halt(self) -> None:
        """See `Running`."""
        if self._forward is not None:
            self._forward.halt()

    def stop(self) -> None:
        """The same, and wait for what somebody has begun."""
        self.halt()
        if self._forward is not None:
            self._forward.join()
            if self._forward.failed:
                self._forget()
            self._forward = None

    def begin_anew(self) -> None:
        """End those that persist: others begin in their place with the next epoch, with the same seeds."""
        self.stop()
        self._forget()

    def _forget(self) -> None:
        """Processes that persist, one of which has ended: there will be others."""
        self._waiting.tasks.clear()
        self._loader._iterator = None


class Fed:
    """Loader processes that are given what they work on, which threads of the training process read.

    A client of object stores has threads of its own, and in a forked process they are gone: it would wait for
    them for ever.

    Args:
        source: Reads in its first stage.
        processes: For what comes after.
    """

    def __init__(self, source: SampleSource, processes: Processes) -> None:
        self._source, self._processes = source, processes
        self._readers: _Readers | None = None

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> Running:
        """See `Processes`."""
        self.halt()
        self._readers = _Readers(self._source, self._processes.start(arrivals, ()), arrivals)
        for task in tasks:
            self._readers.give(task)
        return self._readers

    def pids(self) -> list[int]:
        """See `Processes`."""
        return self._processes.pids()

    def halt(self) -> None:
        """See `Running`."""
        if self._readers is not None:
            self._readers.halt()

    def stop(self) -> None:
        """See `Processes`."""
        self.halt()
        self._processes.stop()


class _Readers:
    """Threads that read for the loader processes of one epoch."""

    def __init__(self, source: SampleSource, processes: Running, arrivals: Arrivals) -> None:
        self._source, self._processes, self._arrivals = source, processes, arrivals
        self._threads = Threads(READERS, "upriver-read")
        self._lock, self._unread = threading.Lock(), dict[int, Task]()
        self._over = False

    def give(self, task: Task) -> None:
        """See `Running`."""
        if task.given is not None:
            self._work(task)
        elif self._over:
            self._processes.give(task)  # which have an answer to that
        else:
            with self._lock:
                self._unread[task.number] = task
            self._threads.submit(partial(self._read, task))

    def let_go(self, made: object) -> None:
        """See `Running`."""
        self._processes.let_go(made)

    def halt(self) -> None:
        """See `Running`. Whatever a thread still reads comes to nobody's processes but this epoch's."""
        self._over = True
        self._processes.halt()
        self._threads.shutdown()
        with self._lock:
            unread, self._unread = self._unread, {}
        for task in unread.values():
            self._processes.give(task)

    def _read(self, task: Task) -> None:
        with self._lock:
            if self._unread.pop(task.number, None) is None:
                return
        read = self._source.positions[1]
        try:
            values = self._source.make_all(
                task.indices,
                epoch=task.epoch,
                samples=task.samples,
                start=task.start,
                stop=read,
                given=None,
            )
        except Exception as error:
            self._arrivals.put(Arrival(task.number, error=error, final=True))
            return
        if task.stop == read:
            self._arrivals.put(Arrival(task.number, values))
        else:
            self._work(task._replace(start=read, given=values))

    def _work(self, task: Task) -> None:
        given = [each.numpy() if isinstance(each, torch.Tensor) else each for each in task.given]
        self._processes.give(task._replace(given=given))


class _Left(Exception):
    """The dataset has had a loader process end."""


class _Forward(threading.Thread):
    """Hands on a result, or what the dataset raised, for each task that was given, as soon as it is there.

    One epoch's: whatever it still gets when it is over, and whatever it is given then, is an error. So it is
    where a process has ended: PyTorch's loader leaves out what that was to do.

    Attributes:
        failed: Whether processes have ended that were to go on.
    """

    def __init__(
        self, source: Iterator[Made], waiting: Waiting, arrivals: Arrivals, begun: Iterable[Task]
    ) -> None:
        super().__init__(name="upriver-here", daemon=True)
        self._source, self._waiting, self._arrivals = source, waiting, arrivals
        self._expected: SimpleQueue[None] = SimpleQueue()
        self._handed: deque[object] = deque(maxlen=MOST_HANDED)
        self._outstanding = {task.number for task in begun}
        self._lock = threading.Lock()
        self._ended, self.failed = "", False
        for _ in self._outstanding:
            self._expected.put(None)
        self.start()

    def pids(self) -> list[int]:
        """Of the processes whose results these are."""
        return [process.pid for process in getattr(self._source, "_workers", ()) if process.pid is not None]

    def give(self, task: Task) -> None:
        """See `Running`."""
        with self._lock:
            if not self._ended:
                self._outstanding.add(task.number)
                self._waiting.add(task)
                self._expected.put(None)
                return
        self._arrivals.put(self._none_of(task.number))

    def let_go(self, made: object) -> None:
        """See `Running`; unless it is the newest, when the next result is there."""
        if _has_room():
            self._handed.append(made)

    def halt(self) -> None:
        """See `Running`. It ends by itself."""
        self._end("they were halted, or have begun another epoch")

    def run(self) -> None:
        """Until it is over."""
        while not self._ended:
            self._expected.get()
            try:
                arrival = self._next()
            except Exception as error:
                self.failed = True
                self._end(str(error) if isinstance(error, _Left) else why_ended(self._source, error))
            else:
                self._hand_on(arrival)
                del arrival
        self._handed.clear()
        self._source = iter(())  # or processes would live as long as whoever gives them tasks

    def _next(self) -> Arrival | None:
        """What came of the next task that there is; None where it is over.

        Raises:
            RuntimeError: If a process has ended.
            _Left: If one was to, by the dataset.
        """
        made = Made(IDLE.number)
        while made.number == IDLE.number:
            if self._ended:
                return None
            made = next(self._source)
        if made.left:
            raise _Left(made.left)
        if made.failed is None:
            value = made.value.unpacked() if isinstance(made.value, Packed) else made.value
            return Arrival(made.number, value)
        return Arrival(made.number, error=raised(made.failed), final=True)

    def _hand_on(self, arrival: Arrival | None) -> None:
        if arrival is None:
            return
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


def _told_of(left: BaseException) -> str:
    """Say that this process was to end, and how."""
    if isinstance(left, SystemExit):
        why = "" if left.code is None or isinstance(left.code, int) else f": {left.code}"
        return ended_by(os.getpid(), _exit_code(left)) + why
    return f"{gone(os.getpid())}, by {type(left).__name__}{f': {left}' if str(left) else ''}"


def _exit_code(left: SystemExit) -> int:
    """With which a process ends."""
    if left.code is None:
        return 0
    return left.code & 0xFF if isinstance(left.code, int) else 1


def _has_room() -> bool:
    """Whether shared memory is far from full."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):  # another system
        return False
    return room.f_bavail * room.f_frsize >= ROOM_BYTES


def _as_it_is(value: Any) -> Any:
    return value
