"""Define the loader's tasks, each for some samples of a batch, and their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from upriver.pipeline.mapstyle import whole_number
from upriver.types import DONE, START

MOST_SEED = 2**63 - 1

HERE = "here"
"""Place name of the training node."""

Kind: TypeAlias = tuple[int, int, bool]
"""Stages of a task: start position, stop position, and whether it collates a batch."""


class KeptStart(NamedTuple):
    """Samples of a task that are beyond its start, as they were kept.

    Attributes:
        position: Position of these samples.
        there: For each of the task's samples whether it is there.
        seconds: Seconds in which the other samples were read.
    """

    position: int
    there: tuple[bool, ...]
    seconds: float


class Task(NamedTuple):
    """Some samples of a batch to be made.

    Attributes:
        batch: Number of the batch in its epoch.
        indices: Indices, from the sampler.
        samples: Number of each sample, for its random numbers.
        whole: Whether these are all samples of the batch, so that the task collates them.
        start: Position at which the samples are.
        stop: Position to which the samples are brought.
        given: The samples; None if they are still to be read.
        kept: Samples that are not at the start; the others are sent back, as they are at its position.
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
    kept: KeptStart | None = None

    @property
    def kind(self) -> Kind:
        """Return the stages of the task."""
        return self.start, self.stop, self.whole

    @property
    def joins(self) -> bool:
        """Return whether the result is a batch."""
        return self.whole and self.stop == DONE


class Arrival(NamedTuple):
    """Result of a task, or the reason why no other machine does it.

    Attributes:
        number: Number of the task.
        value: Samples or batch that the task made.
        error: Reason why there is no value.
        final: Whether the error takes the place of the batch; otherwise this machine does the task.
        place: Machine that did the task.
        blame: Called if this machine could do the task, so that the error is the other machine's fault. None
            if no one needs to know.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    final: bool = False
    place: str = HERE
    pinned: bool = False
    blame: Callable[[], None] | None = None


Arrivals: TypeAlias = "SimpleQueue[Arrival]"


def sample_number(index: Any) -> int:
    """Return a number for a sampler's index: a whole number itself, or a hash of its JSON or `repr`."""
    number = whole_number(index)
    if number is not None and -MOST_SEED <= number <= MOST_SEED:
        return number
    try:
        text = json.dumps(index)
    except (TypeError, ValueError):
        text = repr(index)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & MOST_SEED
