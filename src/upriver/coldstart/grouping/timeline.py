"""Predict the time of a cold start: download, load and execute as a pipeline of groups of layers.

The model of Jafari, Su, Wang, Zhang, Zhang, "PISeL: Pipelining DNN Inference for Serverless Computing", CIKM
2024, section 3.1 ("Model Partitioning Solver", "Partition Downloader", "Parallelize Model Loading And
Execution"). The paper describes it in words and numbers no equations; the recurrence is our reading.

Symbols
    D[i], L[i], E[i]   seconds to download, load and execute layer i; D[i] is its bytes / BW
    RL, BW             ``latency_s``, ``bandwidth_bytes_per_s``
    E[i] -> L[i] -> D[i]   a layer is executed after it is loaded, and loaded after its group has come

Recurrence, for one group after the other, of layers a to b - 1
    sent = max(due, room)      due: when RL x BW of the group before is left to come, at the earliest with its
                               first byte, and 0 for the first group; room: as under Departures
    begin = max(end of the group before, sent + RL)
    end = begin + D[a] + ... + D[b - 1]
    loaded[i] = max(loaded[i - 1], end) + L[i]             for i from a to b - 1
    executed[i] = max(executed[i - 1], loaded[i]) + E[i]

So the link never idles after a group of at least RL x BW, and the makespan is the last ``executed``. If
loading and executing share a core ("only one L or E task"), a layer is loaded and executed before the next
one is loaded. Groups do not change L and E from a layer on, so the last ``executed`` is also

    makespan = max over the groups of end + tail[a]

where ``tail[a]`` is the time of loading and executing from layer a on without waits.

Departures
    - A cap on bytes in flight: the bytes of requested groups, less those of loaded layers. A request waits
      (``room``) until its group fits under the cap. The paper's solver only prunes groupings that break a
      memory constraint; a downloader that waits keeps any cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.errors import ConfigError
from upriver.types import BANDWIDTH, MOST_BYTES, Limits

Array: TypeAlias = npt.NDArray[np.float64]

_SIZE = Limits(most=MOST_BYTES)
_MEMORY = Limits(most=MOST_BYTES, positive=True, or_infinite=True)
_SECONDS = Limits(most=10**9)


class Timeline:
    """Costs of a model's layers, and the link and the memory through which they come.

    Attributes:
        num_layers: Number of layers.
        sizes_bytes: Bytes of each layer.
        seconds: Seconds of the link for all bytes before each layer, and for all bytes: one number more than
            layers.
        busy_s: The same for the loader. On a shared core it includes execution.
        loaded_s: Time at which each layer is loaded if the loader begins at 0 and never waits.
        tail_s: Seconds of loading and executing from each layer on, as in the module's docstring.
        rest_s: Least seconds from a free link at each layer to the result, for any grouping; minus infinity
            after the last layer, where no link is needed.
        room: Number of layers that must be loaded before a group that ends there may be requested.
        latency_s: Seconds from a request to its first byte.
        bandwidth_bytes_per_s: Bandwidth of the link.
        memory_cap_bytes: Most bytes in flight.
    """

    def __init__(
        self,
        sizes_bytes: Sequence[float],
        load_s: Sequence[float],
        execute_s: Sequence[float],
        *,
        latency_s: float,
        bandwidth_bytes_per_s: float,
        memory_cap_bytes: float = math.inf,
        one_core: bool = False,
    ) -> None:
        """Compute the totals from the costs of each layer, in execution order.

        Raises:
            ConfigError: If a value is no number, negative or infinite, or a layer lacks one of the three.
        """
        sizes = checked_sizes(sizes_bytes)
        load, execute = (
            _checked(name, values, _SECONDS)
            for name, values in (("load_s", load_s), ("execute_s", execute_s))
        )
        if not len(sizes) == len(load) == len(execute):
            raise ConfigError(
                f"sizes_bytes, load_s and execute_s must have a number for each layer, got {len(sizes)}, "
                f"{len(load)} and {len(execute)}"
            )
        check_link(latency_s, bandwidth_bytes_per_s)
        _MEMORY.check("memory_cap_bytes", memory_cap_bytes)
        self.num_layers = len(sizes)
        self.sizes_bytes = sizes
        self.latency_s = float(latency_s)
        self.bandwidth_bytes_per_s = float(bandwidth_bytes_per_s)
        self.memory_cap_bytes = float(memory_cap_bytes)
        bytes_before = _before(sizes)
        self.seconds = bytes_before / bandwidth_bytes_per_s
        self.busy_s = _before(load + execute if one_core else load)
        self.loaded_s = self.busy_s[:-1] + load
        self.tail_s = _tails(load, execute, one_core=one_core)
        self.rest_s = _rests(np.diff(self.seconds), self.tail_s)
        self.room = np.searchsorted(bytes_before, bytes_before - memory_cap_bytes, side="left")
        alone = np.flatnonzero(sizes <= memory_cap_bytes)
        self.room[alone + 1] = np.minimum(self.room[alone + 1], alone)  # despite rounding

    def makespan(self, groups: Sequence[range]) -> float:
        """Return the seconds from the first request to the result.

        Args:
            groups: Layers that one request downloads; together all layers, in order.

        Returns:
            The recurrence's last ``executed``; infinite if a group exceeds the memory cap; 0 for a model
            without layers.
        """
        loaded = np.zeros(self.num_layers)
        free = self.latency_s  # time at which the next group can begin, if its request is sent in time
        busy, makespan = 0.0, 0.0
        for group in groups:
            start, stop = group.start, group.stop
            needed = int(self.room[stop])
            if needed > start:
                return math.inf
            begin = max(free, loaded[needed - 1] + self.latency_s) if needed else free
            end = begin + (self.seconds[stop] - self.seconds[start])
            free = max(end, begin + self.latency_s)
            begun = max(busy, end) - self.busy_s[start]
            loaded[start:stop] = begun + self.loaded_s[start:stop]
            busy = begun + self.busy_s[stop]
            makespan = max(makespan, end + self.tail_s[start])
        return float(makespan)


def check_link(latency_s: float, bandwidth_bytes_per_s: float) -> None:
    """Check the numbers of a link.

    Raises:
        ConfigError: If the latency is negative, the bandwidth not above 0, or either not finite.
    """
    _SECONDS.check("latency_s", latency_s)
    BANDWIDTH.check("bandwidth_bytes_per_s", bandwidth_bytes_per_s)


def checked_sizes(sizes_bytes: Sequence[float] | Array) -> Array:
    """Return the sizes of the layers as an array.

    Raises:
        ConfigError: If a size is negative or not finite; the message names it.
    """
    return _checked("sizes_bytes", sizes_bytes, _SIZE)


def _checked(name: str, values: Sequence[float] | Array, limits: Limits) -> Array:
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of different lengths
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ConfigError(f"{name} must be a list of numbers, one for each layer")
    for index in np.flatnonzero(~((numbers >= limits.least) & (numbers <= limits.most))):
        limits.check(f"{name}[{index}]", float(numbers[index]))
    return numbers.astype(np.float64)


def _before(values: Array) -> Array:
    return np.append(0.0, np.cumsum(values))


def _tails(load: Array, execute: Array, *, one_core: bool) -> Array:
    """Return the longest time from the start of each layer's load to the result."""
    if one_core:
        return np.cumsum((load + execute)[::-1])[::-1]
    tails, executing, tail = np.zeros(len(load)), 0.0, 0.0
    for layer in range(len(load) - 1, -1, -1):
        executing += execute[layer]
        tail = load[layer] + max(executing, tail)
        tails[layer] = tail
    return tails


def _rests(download: Array, tails: Array) -> Array:
    """Return the time from each layer on if no request waits, the lower bound for any grouping."""
    rests, rest = np.full(len(tails) + 1, -np.inf), -math.inf
    for layer in range(len(tails) - 1, -1, -1):
        rest = download[layer] + max(rest, tails[layer])
        rests[layer] = rest
    return rests
