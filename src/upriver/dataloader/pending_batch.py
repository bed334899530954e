"""A batch that is being made, and the tasks that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from upriver.dataloader.offload_stretch import Stretch
from upriver.dataloader.tasks import HERE, Arrival, Task


@dataclass(eq=False, slots=True)
class Batch:
    """A batch that is being made.

    Attributes:
        rows: Samples by their place in the batch.
        begun: Whether its tasks have been given to somebody, all of them.
        here: Whether this machine makes it, or some of it.
        held: Tasks of that which nobody has begun.
        missing: Tasks that are not done.
        away: Of these, those that others are at.
        value: The batch, where one task has made all of it.
        whole: Whether one has.
        pinned: Whether that is in pinned memory.
        error: What stands in its place.
        made: How many samples were made where.
        given: Samples that were to be made elsewhere.
        returned: Of these, such as nobody took or made there.
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
        """Whether it, or an error in its place, can be handed out."""
        return self.begun and not self.missing

    def take(self, work: PendingTask, arrival: Arrival) -> None:
        """What came of a task."""
        if work.task.whole:
            self.value, self.whole, self.pinned = arrival.value, True, arrival.pinned
            return
        for at, sample in zip(work.at, arrival.value, strict=True):
            self.rows[at] = sample


@dataclass(eq=False, slots=True)
class PendingTask:
    """A task under way.

    Attributes:
        task: All of it, as it is done here.
        batch: What it is for.
        at: Places in the batch of the task's samples.
        stretch: What of it is to be done elsewhere; None where nothing is, or all that is is done.
        away: Whether others are at it.
        held: Whether nobody is, as it is for this machine, and not its turn.
        place: Who was.
        failed: Why it could not be done elsewhere, and where that was, where trying again would not help.
    """

    task: Task
    batch: Batch
    at: Sequence[int] = field(repr=False)
    stretch: Stretch | None = None
    away: bool = False
    held: bool = False
    place: str = HERE
    failed: Arrival | None = None
