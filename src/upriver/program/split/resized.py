"""Capture the program of a split again for another number of samples, as measurements at two sizes need."""

from __future__ import annotations

import torch
from torch import nn

from upriver.errors import CaptureError
from upriver.program.capture.lowering import record
from upriver.program.capture.prefix import bound, checked, graph_of, name_of
from upriver.program.example_inputs import Example, Inputs
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import GRANULARITIES
from upriver.program.graph.weights_file import WeightsFile
from upriver.program.rewrite.faster import rewritten
from upriver.program.split.split import Split


def resized(
    model: nn.Module, parts: Split, example: Inputs, *, autocast: torch.dtype | None = None
) -> Program:
    """Capture the frozen part for the samples of ``example``, cut at the same places, without a proof.

    It is as fast as that of ``parts``.

    Raises:
        CaptureError: If the model runs unsplit, cannot be captured at this size, or has other stages there.
    """
    if parts.program is None:
        raise CaptureError(f"the model runs unsplit: {parts.why_not}")
    given = Example.of(example)
    outputs = [ship.source for ship in parts.tail.values.ships]
    recording = checked(record(model, given, outputs=outputs, autocast=autocast))
    weights, device = WeightsFile(recording.tensors), given.tensors[0].device
    wanted = [stage.name for stage in parts.program.stages]
    for level in GRANULARITIES:  # only the names of the stages tell which it was
        graph = graph_of(
            recording, model, weights.digest, device=device, granularity=level, name=name_of(outputs)
        )
        if [stage.name for stage in graph.stages] == wanted:
            program = bound(graph, weights, device)
            return program if parts.faster is None else rewritten(program, parts.faster.kind)
    raise CaptureError(f"the model has other stages for {given.samples} samples")
