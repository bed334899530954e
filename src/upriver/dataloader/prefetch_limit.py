"""Limit the number of batches under way by this machine's free memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from upriver.dataloader.local_fleet import ranks_here
from upriver.resources import host_bytes

PART = 4
"""Divisor of the free bytes that may hold batches; one that arrives or is pinned needs its bytes twice."""

LOOK_BATCHES = 16
"""Interval in batches between size measurements, as counting the bytes of many small parts takes time."""

UNKNOWN_BYTES = 10**6
"""Assumed bytes of a sample that does not show its size, as for `offload="auto"`."""


class PrefetchLimit:
    """Memory limit for batches that workers make; two for each of their processes may be hundreds.

    Until a batch has been measured, the limit is the number that this machine alone would have.

    Args:
        nbytes: Bytes for all batches; by default a part of the memory that is free at the first batch.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self._nbytes, self._batch_bytes = nbytes, 0

    def most(self, least: int, wanted: int) -> int:
        """Return how many batches may be under way or made.

        Args:
            least: Number that this machine alone would have.
            wanted: Number that keeps all workers busy.
        """
        if wanted <= least or not self._batch_bytes or self._nbytes is None:
            return least
        return max(least, min(wanted, self._nbytes // self._batch_bytes))

    def look(self, number: int, batch: Any, samples: Sequence[Any]) -> None:
        """Measure a batch.

        Args:
            batch: Batch, as it is handed out.
            samples: Samples of the batch, where they arrived one by one.
        """
        if self._batch_bytes and number % LOOK_BATCHES:
            return
        if self._nbytes is None:
            self._nbytes = host_bytes() // ranks_here() // PART
        self._batch_bytes = num_bytes(batch) or num_bytes(samples) or UNKNOWN_BYTES * len(samples)


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors and arrays in a batch; sparse tensors count as 0."""
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
