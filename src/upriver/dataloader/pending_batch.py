"""Track a batch that is being made, and the tasks that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.tasks import HERE, Arrival, Task


@dataclass(eq=False, slots=True)
class Batch:
    """Batch that is being made.

    Attributes:
        rows: Samples by their position in the batch.
        begun: Whether all its tasks have been started.
        here: Whether this machine makes at least a part of the batch.
        held: This machine's tasks that have not been started.
        missing: Number of tasks that are not done.
        away: Number of these that others are doing.
        value: The batch, if one task has made it whole.
        whole: Whether one task has made the whole batch.
        error: Error that takes the batch's place.
        made: Number of samples by maker.
        given: Number of samples meant to be made elsewhere.
        returned: Number of these that no machine accepted or made.
    """

    number: int
    indices: tuple[Any, ...]
    rows: list[Any] = field(init=False, repr=False)
    begun: bool = False
    here: bool = False
    held: list[Task] = field(default_factory=list, repr=False)
    missing: int = 0
    away: int = 0
    value: Any = None
    whole: bool = False
    pinned: bool = False
    error: Exception | None = None
    made: Counter[str] = field(default_factory=Counter, repr=False)
    given: int = 0
    returned: int = 0

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.indices)

    @property
    def done(self) -> bool:
        """Return whether the batch, or an error in its place, can be handed out."""
        return self.begun and not self.missing

    def take(self, work: PendingTask, arrival: Arrival) -> None:
        """Store the result of a task."""
        if work.task.whole:
            self.value, self.whole, self.pinned = arrival.value, True, arrival.pinned
            return
        for at, sample in zip(work.at, arrival.value, strict=True):
            self.rows[at] = sample


@dataclass(eq=False, slots=True)
class PendingTask:
    """Task under way.

    Attributes:
        task: The whole task, as it is done here.
        at: Positions of the task's samples in the batch.
        stretch: Stages still to be done elsewhere; None if there are none.
        away: Whether others are doing the task.
        held: Whether the task waits for its turn on this machine.
        place: Machine that did the offloaded stages.
        failed: Error of the machine that failed to do the task, if a retry would not help.
    """

    task: Task
    batch: Batch
    at: Sequence[int] = field(repr=False)
    stretch: OffloadStretch | None = None
    away: bool = False
    held: bool = False
    place: str = HERE
    failed: Arrival | None = None
