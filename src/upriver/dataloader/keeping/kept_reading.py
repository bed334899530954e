"""Answer the tasks of loader processes from kept samples, and keep what the processes make."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from upriver.dataloader.keeping.keeping_source import KeepingSource
from upriver.dataloader.local.shared_memory import has_room, packed
from upriver.dataloader.local.workers import MadeRows, StoreReading
from upriver.dataloader.tasks import Arrival, KeptStart, Task
from upriver.pipeline.mapstyle import collated_by_default
from upriver.types import DONE


class KeptReading(StoreReading):
    """Read only those samples of a task that are not kept.

    Args:
        collate: Collate function of whole batches.
    """

    def __init__(self, source: KeepingSource, collate: Callable[[list[Any]], Any]) -> None:
        super().__init__(source.plain)
        self._samples, self._kept, self._collate = source.plain, source.kept, collate

    def read(self, task: Task) -> Arrival | Task:
        """Return a task's result, or the task with its samples for a loader process; see `StoreReading`."""
        at = self._kept.position
        if task.stop < at:
            return super().read(task)
        rows = self._samples.rows(task.indices)
        found = self._kept.find(list(dict.fromkeys(rows)), task.epoch)
        missing = [row for row in dict.fromkeys(rows) if row not in found]
        if not missing:
            return self._of_kept(task, [found[row] for row in rows])
        began_s = time.perf_counter()
        stored = dict(zip(missing, self._samples.read(missing), strict=True))
        there = tuple(row in found for row in rows)
        return task._replace(
            start=self._samples.positions[1],
            given=for_process([found[row] if row in found else stored[row] for row in rows]),
            kept=KeptStart(position=at, there=there, seconds=time.perf_counter() - began_s),
        )

    def keep(self, made: MadeRows) -> None:
        """Keep samples that a loader process made."""
        self._kept.keep(made.rows, made.epoch, seconds=made.seconds)

    def _of_kept(self, task: Task, values: list[torch.Tensor]) -> Arrival | Task:
        """Return the result of a task whose samples are all kept, or the task for a loader process."""
        at = self._kept.position
        if task.stop == at < DONE:
            return Arrival(task.number, values)
        if at < DONE:
            return task._replace(start=at, given=for_process(values))
        samples = self._samples.finished(task.indices, values)
        if not task.joins:
            return Arrival(task.number, samples)
        if self._collate is default_collate:
            return Arrival(task.number, collated_by_default(samples))
        return task._replace(start=at, given=for_process(values))


def for_process(values: Sequence[torch.Tensor]) -> Any:
    """Return samples as they are sent to a loader process, with their order of dimensions.

    They go through shared memory if that is far from full: writing to full one would end this process.
    """
    return packed(list(values), shared=has_room(sum(value.nbytes for value in values)))
