"""Measure a model's profile on this machine, and assume a cluster of two such machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from upriver.cli.common import working
from upriver.cli.options import check_module
from upriver.errors import CaptureError, ConfigError
from upriver.finetune.planning.plan_builder import measure_tail, time_tail
from upriver.profile.memory.estimator import known_peaks
from upriver.profile.stage_timing import fit, measure_stages, sizes
from upriver.program.example_inputs import Example
from upriver.program.freeze import freeze_to
from upriver.program.graph.executor import Program
from upriver.program.models.registry import load_model
from upriver.program.split.resized import resized
from upriver.program.split.split import Split, split
from upriver.resources import available_bytes
from upriver.types import (
    MOST_BYTES,
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    TailProfile,
    require_finite,
)

SAME_MACHINE = (
    "Measured on this machine alone: the storage tier is taken to be equal to it in speed and memory, and "
    "reading, encoding and decoding to be free. Save the files and put in what the real machines are."
)
"""Note on plans without a cluster file."""

TAIL_REPEATS = 3
"""Measurements of forward and backward, each warmed up; their median counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """Options of a measurement.

    Attributes:
        model: Name of the model, as for ``upriver cuts``.
        freeze_to: Last frozen module; None if the model freezes parameters itself.
        stored_bytes: Bytes of one stored sample; None takes the size of the model's input.
    """

    model: str
    freeze_to: str | None
    micro_batch: int
    input_shape: tuple[int, ...] | None
    autocast: torch.dtype | None
    stored_bytes: float | None

    def __post_init__(self) -> None:
        if self.stored_bytes is not None:
            require_finite("stored_bytes", self.stored_bytes, at_most=MOST_BYTES, positive=True)


def same_machine(bandwidth_bytes_per_s: float, micro_batch: int) -> Cluster:
    """Return a cluster of two machines like this one, with a link without latency between them."""
    memory = float(available_bytes(torch.device("cpu")))  # of the device on which a model is loaded
    return Cluster(
        link=Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s),
        storage=StorageTier(memory_bytes=memory, micro_batch=micro_batch),
        compute=ComputeTier(memory_bytes=memory, micro_batch=micro_batch),
    )


def measured_profile(wanted: MeasureOptions) -> Profile:
    """Capture the frozen part, prove its cuts, and measure stages and tail at two micro-batch sizes.

    Raises:
        ConfigError: If no option says which modules are frozen.
        CaptureError: If the model cannot be split, so that there is no cut to choose.
    """
    network, inputs = load_model(wanted.model, input_shape=wanted.input_shape)
    _freeze(network, wanted)
    examples = [Example.of(inputs.example(size)) for size in sizes(wanted.micro_batch)]
    with working("capturing the model and proving its cuts"):
        parts = split(network, examples[0], autocast=wanted.autocast)
        if parts.program is None:
            raise CaptureError(f"the model runs unsplit, so there is no cut to plan: {parts.why_not}")
        programs = [
            parts.program,
            *(resized(network, parts, each, autocast=wanted.autocast) for each in examples[1:]),
        ]
    with working("measuring its stages"):
        return _measured(wanted, network, parts, programs, examples)


def _freeze(network: nn.Module, wanted: MeasureOptions) -> None:
    check_module(network, wanted.freeze_to)
    if wanted.freeze_to is not None:
        freeze_to(network, wanted.freeze_to)
    elif all(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(
            f"nothing of {wanted.model} is frozen; name the last frozen module with --freeze-to MODULE"
        )


def _measured(
    wanted: MeasureOptions,
    network: nn.Module,
    parts: Split,
    programs: Sequence[Program],
    examples: Sequence[Example],
) -> Profile:
    tensors = [example.tensors for example in examples]
    seconds = measure_stages(programs, tensors)
    main = programs[0]
    tensor_bytes = float(main.graph.input_bytes)
    return Profile(
        model=wanted.model,
        freeze=main.num_stages,
        input=InputProfile(
            stored_bytes=tensor_bytes if wanted.stored_bytes is None else wanted.stored_bytes,
            tensor_bytes=tensor_bytes,
        ),
        stages=tuple(
            StageProfile(
                name=stage.name,
                kind=stage.kind,
                out_bytes=stage.out_bytes,
                param_bytes=stage.param_bytes,
                flops=stage.flops,
                peak_bytes=peak,
                seconds={"storage": spent, "compute": spent},
            )
            for stage, spent, peak in zip(main.stages, seconds, known_peaks(main), strict=True)
        ),
        tail=_tail(network, parts, programs, tensors),
    )


def _tail(
    network: nn.Module,
    parts: Split,
    programs: Sequence[Program],
    tensors: Sequence[Sequence[torch.Tensor]],
) -> TailProfile:
    """Measure forward and backward of the tail at the same sizes, and its memory."""
    points, given = [], []
    for program, inputs in zip(programs, tensors, strict=True):
        given.append(program.run(inputs, 0, program.num_stages))
        spent = median(time_tail(network, parts, given[-1])[0] for _ in range(TAIL_REPEATS))
        points.append((program.micro_batch, spent))
    tail = measure_tail(network, parts, given[0], samples=programs[0].micro_batch)
    return replace(tail, seconds=fit(points))
