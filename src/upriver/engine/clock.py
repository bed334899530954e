"""Measure the seconds of a micro-batch by phase and stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from upriver.types import Timings


class Clock:
    """Collect seconds by phase and by stage during the work on a micro-batch."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.stages: dict[int, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to a phase (``queue``, ``read``, ``input``, ``forward``, ``encode``)."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def stage(self, position: int, seconds: float) -> None:
        """Add seconds to the stage that ends at ``position``."""
        self.stages[position] = self.stages.get(position, 0.0) + seconds

    def timings(self) -> Timings:
        """Return the seconds collected so far."""
        return Timings(phases=dict(self.phases), stages=dict(self.stages))
