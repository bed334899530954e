"""How long a cold start takes: download, load and execute as a pipeline of groups of layers.

The model of Jafari, Su, Wang, Zhang, Zhang, "PISeL: Pipelining DNN Inference for Serverless Computing",
CIKM 2024, section 3.1 ("Model Partitioning Solver", "Partition Downloader", "Parallelize Model Loading And
Execution"). The paper puts it in words and numbers no equations; the recurrence is our reading of them.

Symbols
    D[i], L[i], E[i]   seconds to download, load and execute layer i; D[i] is its bytes / BW
    RL, BW             ``latency_s``, ``bandwidth_bytes_per_s``
    E[i] -> L[i] -> D[i]   a layer is executed when it is loaded, and loaded when its group has come

Recurrence, for one group after the other, of layers a to b - 1
    sent = max(due, room)      due: when RL x BW of the group before is left to come, at the earliest with its
                               first byte, and 0 for the first group; room: as under Departures
    begin = max(end of the group before, sent + RL)
    end = begin + D[a] + ... + D[b - 1]
    loaded[i] = max(loaded[i - 1], end) + L[i]             for i from a to b - 1
    executed[i] = max(executed[i - 1], loaded[i]) + E[i]

So the link never idles after a group of at least RL x BW, and the makespan is the last ``executed``. Where
loading and executing share a core ("only one L or E task"), a layer is loaded and executed before the next
one is loaded. As groups change nothing of what L and E take from a layer on, the last ``executed`` is also

    makespan = max over the groups of end + tail[a]

where ``tail[a]`` is what loading and executing take from layer a on if nothing has to be waited for.

Departures
    - A cap on bytes in flight: those of groups that were asked for, less those of layers that are loaded. A
      request waits (``room``) until its group fits beside what is there. The paper's solver only prunes
      groupings that break a memory constraint; a downloader that waits keeps any cap.
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
    """What a model's layers take, and the link and the memory that they come through.

    Attributes:
        num_layers: How many there are.
        sizes_bytes: Of each.
        seconds: Of the link for all bytes before each layer, and for all: one number more than layers.
        busy_s: The same for the loader: what it takes, and where it shares a core, what executing takes.
        loaded_s: When each layer is loaded if the loader begins at 0 and never waits.
        tail_s: What loading and executing take from each layer on, as above.
        rest_s: The least that can pass from a free link at each layer to the answer, whatever the grouping;
            after the last layer, where no link is needed, minus infinity.
        room: How many layers must be loaded before a group that ends there may be asked for.
        latency_s: From a request to its first byte.
        bandwidth_bytes_per_s: Of the link.
        memory_cap_bytes: The most that may be in flight.
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
        """Take what is known of each layer, in execution order.

        Args:
            sizes_bytes: Of each layer's weights.
            load_s: To load each: checksum, conversion, copy to a device.
            execute_s: To run each on the first input.
            latency_s: From a request to its first byte.
            bandwidth_bytes_per_s: Of the link.
            memory_cap_bytes: The most that may be in flight.
            one_core: Whether loading and executing share a core.

        Raises:
            ConfigError: If a number is none, negative or infinite, or not all three are given for each layer.
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
        self.room[alone + 1] = np.minimum(self.room[alone + 1], alone)  # whatever rounding says

    def size_bytes(self, group: range) -> float:
        """What a group has."""
        return float(self.sizes_bytes[group.start : group.stop].sum())

    def makespan(self, groups: Sequence[range]) -> float:
        """Seconds from the first request to the answer.

        Args:
            groups: Layers that are downloaded by one request each; together all of them, in order.

        Returns:
            The recurrence's last ``executed``; infinite if a group is larger than the memory cap; 0 for a
            model without layers.

        Raises:
            ConfigError: If a layer is missing, there twice, or out of order.
        """
        self._check(groups)
        loaded = np.zeros(self.num_layers)
        free = self.latency_s  # when the next group can begin, if its request is sent in time
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

    def _check(self, groups: Sequence[range]) -> None:
        expected = 0
        for group in groups:
            if group.step != 1 or group.start != expected or group.stop <= expected:
                raise ConfigError(f"groups must follow each other from layer 0 on, got {group} at {expected}")
            expected = group.stop
        if expected != self.num_layers:
            raise ConfigError(f"groups must have all {self.num_layers} layers, got {expected}")


def check_link(latency_s: float, bandwidth_bytes_per_s: float) -> None:
    """Hold a link to what one can be.

    Raises:
        ConfigError: If the latency is negative, the bandwidth not above 0, or either not finite.
    """
    _SECONDS.check("latency_s", latency_s)
    BANDWIDTH.check("bandwidth_bytes_per_s", bandwidth_bytes_per_s)


def checked_sizes(sizes_bytes: Sequence[float] | Array) -> Array:
    """Sizes of the layers as an array.

    Raises:
        ConfigError: If one is negative or not finite; the message names it.
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
    """The longest way from the start of each layer's load to the answer."""
    if one_core:
        return np.cumsum((load + execute)[::-1])[::-1]
    tails, executing, tail = np.zeros(len(load)), 0.0, 0.0
    for layer in range(len(load) - 1, -1, -1):
        executing += execute[layer]
        tail = load[layer] + max(executing, tail)
        tails[layer] = tail
    return tails


def _rests(download: Array, tails: Array) -> Array:
    """Layer by layer with no request to wait for: no grouping is faster from there on."""
    rests, rest = np.full(len(tails) + 1, -np.inf), -math.inf
    for layer in range(len(tails) - 1, -1, -1):
        rest = download[layer] + max(rest, tails[layer])
        rests[layer] = rest
    return rests
