"""How many batches may be under way, by the memory that this machine has for those that are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from upriver.dataloader.local_fleet import ranks_here
from upriver.profile.resources import host_bytes

PART = 4
"""One in so many bytes that are free holds batches: one that comes, or is pinned, takes its bytes twice."""

LOOK_BATCHES = 16
"""One in so many batches is looked at: to count the bytes of many small parts takes a moment."""

UNKNOWN_BYTES = 10**6
"""Of a sample that does not show its bytes, as for `offload="auto"`."""


class PrefetchLimit:
    """Memory for batches that workers make: two for each of their processes may be hundreds.

    Until a batch has been seen there are as many as this machine alone would have.

    Args:
        nbytes: For all of them; a part of what is free when the first batch is there if None.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self._nbytes, self._batch_bytes = nbytes, 0

    def most(self, least: int, wanted: int) -> int:
        """How many batches may be under way or made.

        Args:
            least: As this machine alone would have.
            wanted: As keep all workers busy.
        """
        if wanted <= least or not self._batch_bytes or self._nbytes is None:
            return least
        return max(least, min(wanted, self._nbytes // self._batch_bytes))

    def look(self, number: int, batch: Any, samples: Sequence[Any]) -> None:
        """At a batch that was made.

        Args:
            number: Of the batch.
            batch: As it is handed out.
            samples: Of it, where they came one by one.
        """
        if self._batch_bytes and number % LOOK_BATCHES:
            return
        if self._nbytes is None:
            self._nbytes = host_bytes() // ranks_here() // PART
        self._batch_bytes = num_bytes(batch) or num_bytes(samples) or UNKNOWN_BYTES * len(samples)


def num_bytes(value: Any) -> int:
    """Bytes of all tensors and arrays in a batch; sparse tensors do not tell."""
    match value:
        case torch.Tensor() if value.layout is not torch.strided:
            return 0
        case torch.Tensor() | np.ndarray():
            return int(value.nbytes)
        case bytes() | str():
            return len(value)
        case Mapping():
            return sum(map(num_bytes, value.values()))
        case Sequence():
            return sum(map(num_bytes, value))
    return 0
