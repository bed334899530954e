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
    """A program as the front holds it: two files, sealed but for weights that are still to come.

    Attributes:
        key: What workers know it by; a tenant's own.
        numbers: By the numbers of the graph's weights, their places in a file that is still to come.
    """

    key: str
    digest: str
    graph: SealedFile
    weights: SealedFile | ColdFile
    numbers: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.graph.nbytes + self.weights.nbytes

    @property
    def cold(self) -> ColdFile | None:
        """Its weights, where some may still have to come."""
        return self.weights if isinstance(self.weights, ColdFile) and not self.weights.whole else None

    @property
    def broken(self) -> bool:
        """Whether its weights will not come."""
        return self.cold is not None and self.cold.error is not None

    def places(self, runs: Runs) -> list[int]:
        """Of some of the graph's weights in a file that is still to come."""
        return [number for start, stop in runs for number in self.numbers[start:stop]]
