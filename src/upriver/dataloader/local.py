"""Samples made on the training node, by PyTorch's own loader processes or in the training process itself."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset

from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.pipeline.mapstyle import DONE

READERS = 4
"""Threads that read at once, each the samples of one task."""

MAKES_WAY = 10
"""By so much loader processes are nicer than the training process, which has work of its own for a moment in
each step; behind their turns an accelerator would wait for it."""

MOST_HANDED = 2
"""Batches that are kept for another thread to let go of."""

SHARED_MEMORY, ROOM_BYTES = "/dev/shm", 2**28
"""Where loader processes put what they make. A batch more is kept there only where there is so much room."""

IDLE = Task(number=-1, epoch=0, batch=0, indices=(), samples=(), whole=False)
"""Nothing to do: a loader process that got no task at all would be ended."""


class Source(Protocol):
    """A dataset, as a chain of stages from a sample's index to what a batch is made of."""

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

    source: Source
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
        joins = task.whole and task.stop == DONE
        return self.join(rows, epoch=task.epoch, batch=task.batch) if joins else rows

    def join(self, samples: list[Any], *, epoch: int, batch: int) -> Any:
        """A batch of its samples; sets this process's generators and leaves them so."""
        return self.source.join(samples, self.collate, epoch=epoch, batch=batch)


class Made(NamedTuple):
    """What a loader process made of a task, by its number."""

    number: int
    value: Any


class Tasks(TorchDataset[Made]):
    """Tasks as a dataset, so that PyTorch's loader processes do them: its indices are the tasks."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    def __getitem__(self, task: Task) -> Made:
        """Do one."""
        return Made(task.number, self._maker.make(task))


class Waiting:
    """A sampler of the tasks that wait; where none does, of one with nothing to do.

    PyTorch's loader takes the next one when it has handed a result out, and ends where there is none.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.taken: deque[int] = deque()

    def add(self, task: Task) -> None:
        """One more. One that only reads comes first: others wait for it, and have work of their own to do."""
        if task.stop < DONE:
            self.tasks.appendleft(task)
        else:
            self.tasks.append(task)

    def __iter__(self) -> Iterator[Task]:
        while True:
            try:
                task = self.tasks.popleft()
            except IndexError:
                task = IDLE
            self.taken.append(task.number)
            yield task


class Processes:
    """PyTorch's loader processes, which do tasks in the order in which they are given.

    Args:
        maker: What they do them with.
        arguments: Of PyTorch's loader: ``num_workers``, and whatever else concerns processes.
    """

    def __init__(self, maker: Maker, **arguments: Any) -> None:
        self._waiting = Waiting()
        arguments["worker_init_fn"] = partial(_begin, arguments.get("worker_init_fn"))
        with warnings.catch_warnings():  # of arguments the user's own loader has warned already
            warnings.simplefilter("ignore")
            self._loader = TorchLoader(
                Tasks(maker), batch_size=None, sampler=self._waiting, collate_fn=_as_it_is, **arguments
            )
        self._forward: _Forward | None = None

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> None:
        """Start them with their first tasks; those that persist begin anew.

        In the thread that trains, from which processes are forked.
        """
        self.stop()
        tasks = list(tasks)
        self._waiting.taken.clear()
        for task in tasks:
            self._waiting.add(task)
        self._forward = _Forward(iter(self._loader), self._waiting.taken, arrivals)
        for _ in tasks:
            self._forward.expect()

    def pids(self) -> list[int]:
        """Of those that were started last."""
        return [] if self._forward is None else self._forward.pids()

    def give(self, task: Task) -> None:
        """Have a task done, for the arrivals.

        Raises:
            RuntimeError: If they were not started.
        """
        if self._forward is None:
            raise RuntimeError("loader processes were not started, or were stopped")
        self._waiting.add(task)
        self._forward.expect()

    def let_go(self, made: object) -> None:
        """Of what was handed out, once there is something newer, and in another thread.

        What processes have made is shared memory, which takes milliseconds to give back: a third of what a
        small model's step takes, in the thread for which an accelerator waits.
        """
        if self._forward is not None and _has_room():
            self._forward.let_go(made)

    def halt(self) -> None:
        """Let go of what nobody has begun; processes that do not persist end. May be called again."""
        if self._forward is not None:
            self._waiting.tasks.clear()
            self._forward.halt()

    def stop(self) -> None:
        """The same, and wait for what somebody has begun."""
        self.halt()
        if self._forward is not None:
            self._forward.join()
            self._forward = None


class Fed:
    """Loader processes that are given what they work on, which threads of the training process read.

    A client of object stores has threads of its own, and in a forked process they are gone: it would wait for
    them for ever.

    Args:
        source: Reads in its first stage.
        processes: For what comes after.
    """

    def __init__(self, source: Source, processes: Processes) -> None:
        self._source, self._processes = source, processes
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._arrivals: Arrivals = SimpleQueue()

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> None:
        """See `Processes`."""
        self._processes.start(arrivals, ())
        self._arrivals = arrivals
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="upriver-read")
        for task in tasks:
            self.give(task)

    def pids(self) -> list[int]:
        """See `Processes`."""
        return self._processes.pids()

    def give(self, task: Task) -> None:
        """See `Processes`."""
        if task.given is not None:
            self._work(task)
        elif self._threads is None:
            raise RuntimeError("loader processes were not started, or were stopped")
        else:
            self._threads.submit(self._read, task)

    def let_go(self, made: object) -> None:
        """See `Processes`."""
        self._processes.let_go(made)

    def halt(self) -> None:
        """See `Processes`."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._processes.halt()

    def stop(self) -> None:
        """See `Processes`."""
        self.halt()
        self._processes.stop()

    def _read(self, task: Task) -> None:
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
            with suppress(RuntimeError):  # the epoch is over
                self._work(task._replace(start=read, given=values))

    def _work(self, task: Task) -> None:
        given = [each.numpy() if isinstance(each, torch.Tensor) else each for each in task.given]
        with self._lock:
            self._processes.give(task._replace(given=given))


class _Forward(threading.Thread):
    """Hands on a result, or what the dataset raised, for each task that was given, as soon as it is there."""

    def __init__(self, source: Iterator[Made], taken: deque[int], arrivals: Arrivals) -> None:
        super().__init__(name="upriver-here", daemon=True)
        self._source, self._taken, self._arrivals = source, taken, arrivals
        self._expected: SimpleQueue[None] = SimpleQueue()
        self._handed: deque[object] = deque(maxlen=MOST_HANDED)
        self._over = False
        self.start()

    def pids(self) -> list[int]:
        """Of the processes whose results these are."""
        return [process.pid for process in getattr(self._source, "_workers", ()) if process.pid is not None]

    def expect(self) -> None:
        """One more."""
        self._expected.put(None)

    def let_go(self, made: object) -> None:
        """Of what was handed out, unless it is the newest, when the next result is there."""
        self._handed.append(made)

    def halt(self) -> None:
        """No more; it ends by itself."""
        self._over = True
        self._expected.put(None)

    def run(self) -> None:
        """Until it is over."""
        while True:
            self._expected.get()
            while not self._over and (arrival := self._next()).number == IDLE.number:
                pass
            if self._over:
                self._handed.clear()
                return
            self._arrivals.put(arrival)
            del arrival
            while len(self._handed) > 1:
                self._handed.popleft()

    def _next(self) -> Arrival:
        """What came of the task that was taken longest ago: results come in that order."""
        try:
            made = next(self._source)
        except Exception as error:
            return Arrival(self._taken.popleft(), error=error, final=True)
        self._taken.popleft()
        return Arrival(made.number, made.value)


def _has_room() -> bool:
    """Whether shared memory is far from full."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):  # another system
        return False
    return room.f_bavail * room.f_frsize >= ROOM_BYTES


def _begin(worker_init_fn: Callable[[int], object] | None, number: int) -> None:
    """What a loader process does first."""
    if hasattr(os, "nice"):
        os.nice(MAKES_WAY)
    if worker_init_fn is not None:
        worker_init_fn(number)


def _as_it_is(value: Any) -> Any:
    return value
