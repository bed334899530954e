"""Hold the files of a program in the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upriver.server.ipc.messages import (
    Runs,
)
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.programs.streaming_weights import ColdFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramFiles:
    """Hold the two files of a program in the front, sealed except for weights that still arrive.

    Attributes:
        key: Its key in workers; separate for each tenant.
        numbers: Numbers of the graph's weights in a file that still arrives, in the graph's order.
    """

    key: str
    digest: str
    graph: SealedFile
    weights: SealedFile | ColdFile
    numbers: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it needs."""
        return self.graph.nbytes + self.weights.nbytes

    @property
    def cold(self) -> ColdFile | None:
        """Return its weights if some may still have to arrive; else None."""
        return self.weights if isinstance(self.weights, ColdFile) and not self.weights.whole else None

    @property
    def broken(self) -> bool:
        """Return whether its weights will not arrive."""
        return self.cold is not None and self.cold.error is not None

    def places(self, runs: Runs) -> list[int]:
        """Return the numbers of some of the graph's weights in a file that still arrives."""
        return [number for start, stop in runs for number in self.numbers[start:stop]]
