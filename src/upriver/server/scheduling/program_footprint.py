"""Compute the footprint of a stage range of an untrusted program from its graph alone, in a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from upriver.errors import ProtocolError, UpriverError
from upriver.profile.memory.estimator import StretchPeaks
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.constants import keys_read
from upriver.program.graph.executor import live_values
from upriver.program.graph.parser import decode
from upriver.program.graph.schedule import schedule
from upriver.program.graph.schema import Graph, Value
from upriver.program.graph.validator import check
from upriver.server.ipc.messages import Runs, Weighed
from upriver.server.scheduling.footprint import END

log = logging.getLogger(__name__)

MOST_RUNS = 64
"""Most runs of numbers of a range's weights; there is one run if no weight is read twice."""


class FootprintEstimator:
    """Estimate the footprints of stage ranges of one graph.

    Args:
        caps: Bounds on its declarations.

    Attributes:
        nbytes: Bytes of the graph as JSON.

    Raises:
        ProgramError: If the graph is invalid.
    """

    def __init__(
        self, graph: bytes | memoryview, device: torch.device, caps: GraphCaps = DEFAULT_CAPS
    ) -> None:
        self.nbytes = len(graph)
        self._graph = decode(graph, caps)
        check(self._graph, device=device, caps=caps)
        self._live = live_values(self._graph)
        self._peaks = _peaks(self._graph, device)
        self._constant_bytes = sum(
            output.spec.nbytes
            for _, node in schedule(self._graph).constants
            for output in node.outputs
            if output is not None
        )

    def weigh(self, start: int, stop: int) -> Weighed:
        """Return the footprint of stages [start, stop) for one micro-batch.

        Raises:
            ProtocolError: If there are no such stages.
        """
        last = len(self._live) - 1
        stop = last if stop == END else stop
        if not 0 <= start <= stop <= last:
            raise ProtocolError(f"stages must lie in 0..{last}, got [{start}, {stop})")
        return Weighed(
            peak_bytes=self._peak(start, stop),
            out_bytes=sum(value.spec.nbytes for value in self._live[stop]),
            constant_bytes=self._constant_bytes,
            rows=all(value.spec.shape[:1] == [self._graph.micro_batch] for value in self._live[stop]),
            weights=self._weights_of(start, stop),
            first=self._weights_of(start, min(start + 1, stop)),
            to_end=stop == last,
        )

    def _weights_of(self, start: int, stop: int) -> Runs:
        """Return the weights that some stages read, by their numbers in the graph."""
        keys = keys_read(self._graph, stop, start=start)
        return runs_of(number for number, weight in enumerate(self._graph.weights) if weight.key in keys)

    def _peak(self, start: int, stop: int) -> int:
        if self._peaks is not None:
            try:
                return self._peaks.of(start, stop).high_bytes
            except UpriverError as error:
                log.info("a stretch is weighed by all its tensors: %s", error)
        return self._all_tensors(start, stop)

    def _all_tensors(self, start: int, stop: int) -> int:
        """Return a bound as if no tensor were freed before the end; twice, for operators' workspaces."""
        before = self._graph.stages[start - 1].stop if start else 0
        made = [
            output for node in self._graph.nodes[before:] for output in node.outputs if output is not None
        ]
        given: list[Value] = self._live[start]
        return 2 * sum(value.spec.nbytes for value in [*given, *made])


def runs_of(numbers: Iterable[int]) -> Runs:
    """Return ascending numbers as runs: the first of each, and one past its last.

    If there would be too many runs, the last one also holds numbers that are not among these.
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        start, stop = runs[-1] if runs else (number, number)
        if stop == number or len(runs) == MOST_RUNS:
            runs[-1:] = [(start, number + 1)]
        else:
            runs.append((number, number + 1))
    return tuple(runs)


def _peaks(graph: Graph, device: torch.device) -> StretchPeaks | None:
    """Return None if the stages cannot run without data."""
    try:
        return StretchPeaks(graph, device)
    except UpriverError as error:
        log.info("a program is weighed by all its tensors: %s", error)
        return None
