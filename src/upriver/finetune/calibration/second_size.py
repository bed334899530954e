"""Measure model stages at a second micro-batch size on both tiers, to learn the cost of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from upriver.errors import ProtocolError
from upriver.finetune.calibration.example_batch import example_of
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset
from upriver.profile.stage_timing import Seconds, measure_stages, sizes
from upriver.program.graph.executor import Program
from upriver.program.split.resized import resized
from upriver.program.split.split import Split
from upriver.protocol import StageCosts
from upriver.rpc.client import ServerClient
from upriver.types import Cluster, Profile, Tier


class SecondSize:
    """Estimate the cost of measuring at a second size, and measure.

    Args:
        direct: The dataset, read by this process.
        parts: The split, at the job's own size.

    Attributes:
        size: The second size, in samples.
    """

    def __init__(
        self,
        model: nn.Module,
        direct: Dataset,
        parts: Split,
        program: Program,
        options: JobOptions,
    ) -> None:
        self._model, self._direct, self._parts = model, direct, parts
        self._options, self._program = options, program
        self._own, self.size = sizes(options.micro_batch)

    def once_s(self, cluster: Cluster) -> float:
        """Return the seconds to capture the model again and send its graph; the server has the weights."""
        num_bytes = len(self._program.graph_bytes)
        return self._parts.capture_s + num_bytes / cluster.link.bandwidth_bytes_per_s

    def turn_s(self, profile: Profile) -> float:
        """Return the estimated seconds to run each size once on each tier, from measurements at one size."""
        frozen = profile.stages[: profile.freeze]
        each = sum(stage.seconds[tier][1] for stage in frozen for tier in (Tier.STORAGE, Tier.COMPUTE))
        return each * (self._own + self.size)

    def measure(self, server: ServerClient, *, repeats: int) -> dict[Tier, Sequence[Seconds]]:
        """Return the line of each stage up to the freeze point, from medians of runs at each size.

        Raises:
            CaptureError: If the model cannot be captured at this size.
            UpriverError: If the server does not measure, or not now.
        """
        both = (self._options, replace(self._options, micro_batch=self.size))
        inputs = [example_of(self._model, self._direct, options) for options in both]
        other = resized(self._model, self._parts, inputs[1], autocast=self._options.autocast)
        if not server.has_program(other.digest):
            server.put_program(other)
        programs = (self._program, other)
        freeze = self._parts.freeze
        costs = server.profile([each.digest for each in programs], stop=freeze, repeats=repeats)
        here = measure_stages(programs, [(tensor,) for tensor in inputs], repeats=repeats)
        return {Tier.STORAGE: _of_stages(costs, freeze), Tier.COMPUTE: here}


def _of_stages(costs: StageCosts, freeze: int) -> tuple[Seconds, ...]:
    """Return a server's seconds of each stage, in order.

    Raises:
        ProtocolError: If the server left out a stage.
    """
    found = {stage.position: stage.seconds for stage in costs.stages}
    if sorted(found) != list(range(1, freeze + 1)):
        raise ProtocolError(f"a profile of stages 1..{freeze} was requested, got {sorted(found)}")
    return tuple(found[position] for position in range(1, freeze + 1))
