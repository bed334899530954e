"""Capture one model for several input shapes, with one weights file.

A program is made for one shape. Inference passes one sample at a time and training sixteen; texts and sounds
vary in length. Only the graph differs between shapes, and it is small. The weights are the same, so they are
named, stored, sent and held in memory once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from upriver.errors import CaptureError, ConfigError
from upriver.program.capture.lowering import record
from upriver.program.capture.prefix import bound, checked, graph_of, name_of
from upriver.program.example_inputs import Example, Inputs, TensorSource
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import Granularity
from upriver.program.graph.weights_file import WeightsFile


def capture_buckets(
    model: nn.Module,
    examples: Sequence[Inputs],
    *,
    outputs: Sequence[TensorSource] | None = None,
    autocast: torch.dtype | None = None,
    granularity: Granularity = "module",
) -> tuple[Program, ...]:
    """Capture a model for several shapes of input.

    :func:`~upriver.program.capture.prefix.capture` does so for one shape.

    Args:
        model: The user's model.
        examples: One call for each bucket.
        outputs: Outputs of each program. None for the model's result.
        autocast: Type that autocast computes in.
        granularity: Where stages end.

    Returns:
        One program for each example. All name the same weights file, and share its tensors in memory.

    Raises:
        CaptureError: If the model cannot be captured, or its weights differ between shapes.
        ConfigError: If there is no example, or two have the same shapes.
    """
    given = [Example.of(example) for example in examples]
    _check_distinct(given)
    recordings = [checked(record(model, each, outputs=outputs, autocast=autocast)) for each in given]
    tensors: dict[str, torch.Tensor] = {}
    for recording in recordings:
        for key, tensor in recording.tensors.items():
            _check_same(key, tensors.setdefault(key, tensor), tensor)
    weights = WeightsFile(tensors)
    name = name_of(outputs)
    programs = []
    for recording, each in zip(recordings, given, strict=True):
        device = each.tensors[0].device
        graph = graph_of(recording, model, weights.digest, device=device, granularity=granularity, name=name)
        programs.append(bound(graph, weights, device))
    return tuple(programs)


def _check_distinct(examples: Sequence[Example]) -> None:
    if not examples:
        raise ConfigError("shape buckets need at least one example, got none")
    seen: set[str] = set()
    for example in examples:
        form = example.describe()
        if form in seen:
            raise ConfigError(f"two shape buckets take {form}; each shape is captured once")
        seen.add(form)


def _check_same(key: str, known: torch.Tensor, tensor: torch.Tensor) -> None:
    if known is tensor:
        return
    alike = known.dtype == tensor.dtype and known.shape == tensor.shape and known.stride() == tensor.stride()
    if not alike or not torch.equal(known, tensor):
        raise CaptureError(f"{key!r} is not the same for all shapes, so they cannot share a weights file")
