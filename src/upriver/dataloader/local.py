"""Samples made on the training node, by PyTorch's own loader processes or in the training process itself."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset as TorchDataset

from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.pipeline.mapstyle import DONE, MapStyle

IDLE = Task(number=-1, epoch=0, batch=0, indices=(), samples=(), whole=False)
"""Nothing to do: a loader process that got no task at all would be ended."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes samples and batches; the same code here, in loader processes and in workers elsewhere.

    Attributes:
        source: The dataset.
        collate: From a list of samples to a batch.
    """

    source: MapStyle
    collate: Callable[[list[Any]], Any]

    def make(self, task: Task) -> Any:
        """A batch, its samples or what is read of them; sets this process's generators and leaves them so."""
        rows = [
            self.source.make(index, epoch=task.epoch, sample=sample, stop=task.stop)
            for index, sample in zip(task.indices, task.samples, strict=True)
        ]
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

    def __iter__(self) -> Iterator[Task]:
        while True:
            try:
                yield self.tasks.popleft()
            except IndexError:
                yield IDLE


class Processes:
    """PyTorch's loader processes, which do tasks in the order in which they are given.

    Args:
        maker: What they do them with.
        arguments: Of PyTorch's loader: ``num_workers``, and whatever else concerns processes.
    """

    def __init__(self, maker: Maker, **arguments: Any) -> None:
        self._waiting = Waiting()
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
        self._waiting.tasks.extend(tasks)
        self._forward = _Forward(iter(self._loader), arrivals)
        for task in tasks:
            self._forward.expect(task)

    def give(self, task: Task) -> None:
        """Have a task done, for the arrivals.

        Raises:
            RuntimeError: If they were not started.
        """
        if self._forward is None:
            raise RuntimeError("loader processes were not started, or were stopped")
        self._waiting.tasks.append(task)
        self._forward.expect(task)

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


class _Forward(threading.Thread):
    """Hands on a result, or what the dataset raised, for each task that was given, as soon as it is there."""

    def __init__(self, source: Iterator[Made], arrivals: Arrivals) -> None:
        super().__init__(name="upriver-here", daemon=True)
        self._source, self._arrivals = source, arrivals
        self._expected: SimpleQueue[int] = SimpleQueue()
        self._over = False
        self.start()

    def expect(self, task: Task) -> None:
        """One more."""
        self._expected.put(task.number)

    def halt(self) -> None:
        """No more; it ends by itself."""
        self._over = True
        self._expected.put(IDLE.number)

    def run(self) -> None:
        """Until it is over."""
        while True:
            number = self._expected.get()
            if self._over:
                return
            try:
                made = next(self._source)
                while made.number == IDLE.number and not self._over:
                    made = next(self._source)
            except Exception as error:
                self._arrivals.put(Arrival(number, error=error, final=True))
            else:
                self._arrivals.put(Arrival(made.number, made.value))


def _as_it_is(value: Any) -> Any:
    return value
