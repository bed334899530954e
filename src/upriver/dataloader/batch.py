"""A batch that is being made, and the tasks that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from upriver.dataloader.plan import Stretch
from upriver.dataloader.tasks import HERE, Arrival, Task


@dataclass(eq=False, slots=True)
class Batch:
    """A batch that is being made.

    Attributes:
        rows: Samples by their place in the batch.
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
    rows: list[Any] = field(repr=False)
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


@dataclass(eq=False, slots=True)
class Work:
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
