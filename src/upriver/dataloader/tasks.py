"""What the loader has done, by whomever: some samples of a batch, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from upriver.pipeline.mapstyle import DONE, START

HERE = "here"
"""The training node, as a place."""

Kind: TypeAlias = tuple[int, int, bool]
"""What is done of a task: from where, up to where, and whether a batch is made of it."""


class Task(NamedTuple):
    """Some samples of a batch.

    Attributes:
        number: Of the task.
        batch: Number of the batch in its epoch.
        indices: What the sampler gave.
        samples: A number for each of them, for what is drawn.
        whole: Whether these are all of the batch, so that it is collated, too.
        start: Where its samples stand.
        stop: Where they are to stand.
        given: They themselves; None where they are still to be read.
    """

    number: int
    epoch: int
    batch: int
    indices: tuple[Any, ...]
    samples: tuple[int, ...]
    whole: bool
    start: int = START
    stop: int = DONE
    given: Any = None

    @property
    def kind(self) -> Kind:
        """Which stages of it."""
        return self.start, self.stop, self.whole

    @property
    def joins(self) -> bool:
        """Whether what comes of it is a batch."""
        return self.whole and self.stop == DONE


class Arrival(NamedTuple):
    """What came of a task, or why nobody elsewhere does it.

    Attributes:
        number: Of the task.
        value: What its maker made of it.
        error: Why there is nothing.
        final: Whether the error takes the place of the batch; otherwise the task is done here.
        place: Where it was done.
        pinned: Whether it is in pinned memory.
        blame: Called where it could be done here: then the error says something of the place. None where
            nobody needs to know.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    final: bool = False
    place: str = HERE
    pinned: bool = False
    blame: Callable[[], None] | None = None


Arrivals: TypeAlias = "SimpleQueue[Arrival]"
