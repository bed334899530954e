"""From a short measurement to a profile and a cluster.

Both tiers run the same few micro-batches through every stage before a job starts; what they report as
`Timings` becomes seconds per sample here. Medians, since a machine that does other work now and then makes
single micro-batches slow, never fast. These are of one size, so nothing is known of fixed costs: they are 0
and what a call costs is in the seconds per sample of that size, which is the size the job runs at. Where
model stages were measured at a second size, too (`upriver.profile.stage_timing`), `with_lines` puts that in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

import torch

from upriver.errors import ConfigError
from upriver.profile.resources import available_bytes
from upriver.profile.stage_timing import Seconds
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    TailProfile,
    Tier,
    Timings,
    require_finite,
)

_CPU = torch.device("cpu")


class InputStageLike(Protocol):
    """What is needed of an input stage."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def kind(self) -> str:
        """What sort of work it does."""


class StageLike(InputStageLike, Protocol):
    """What is needed of a captured model stage; sizes and work are per sample."""

    @property
    def out_bytes(self) -> float:
        """What crosses a cut right after it."""

    @property
    def param_bytes(self) -> float:
        """Weights it reads, in all."""

    @property
    def flops(self) -> float:
        """Floating-point operations."""

    @property
    def peak_bytes(self) -> float:
        """Activations alive at once."""


def build_profile(
    *,
    model: str,
    freeze: int,
    stages: Sequence[StageLike],
    chain: Sequence[InputStageLike],
    stored_bytes: float,
    tensor_bytes: float,
    storage: Sequence[Timings],
    compute: Sequence[Timings],
    samples_per_timing: int,
    input_bytes: Mapping[int, float] | None = None,
    cpus_apart: bool = False,
    tail: TailProfile | None = None,
) -> Profile:
    """Put measurements together.

    Args:
        model: A name for people.
        freeze: The freeze point; later stages, where ``stages`` has them, need no measurement.
        stages: The model stages, as captured.
        chain: The input stages of the dataset, in order.
        stored_bytes: Mean stored size of a sample.
        tensor_bytes: Size of one sample of the model's input.
        storage: What the storage tier reported, one a micro-batch, in the order they ran. The first is taken
            for warm-up when there is more than one.
        compute: What the compute tier reported, likewise.
        samples_per_timing: Samples in each of those micro-batches.
        input_bytes: Position to the mean size of a sample there, after each input stage; one that is not
            known counts as a finished sample.
        cpus_apart: Whether the compute tier has cores for input stages beside what runs the model.
        tail: Cost of the trainable rest; None counts it as free.

    Raises:
        ConfigError: If a frozen stage was not measured on a tier; names the stage and the tier.
    """
    require_finite("samples_per_timing", samples_per_timing, at_least=1)
    steady = {Tier.STORAGE: _without_warm_up(storage), Tier.COMPUTE: _without_warm_up(compute)}

    def seconds(name: str, position: int) -> dict[str, tuple[float, float]]:
        cpus = {Tier.COMPUTE} if cpus_apart and position <= 0 else ()
        return {
            f"{tier}.cpu" if tier in cpus else str(tier): (
                0.0,
                _stage_seconds(name, position, tier, timings) / samples_per_timing,
            )
            for tier, timings in steady.items()
        }

    measured = [
        StageProfile(
            name=stage.name,
            kind=stage.kind,
            out_bytes=stage.out_bytes,
            param_bytes=stage.param_bytes,
            flops=stage.flops,
            peak_bytes=stage.peak_bytes,
            seconds=seconds(stage.name, position) if position <= freeze else {},
        )
        for position, stage in enumerate(stages, start=1)
    ]
    sizes = {-len(chain): stored_bytes, 0: tensor_bytes, **(input_bytes or {})}
    inputs = [
        StageProfile(
            name=stage.name,
            kind=stage.kind,
            out_bytes=sizes.get(position, tensor_bytes),
            # What it is given, what it gives, and the finished sample.
            peak_bytes=sizes.get(position - 1, tensor_bytes)
            + sizes.get(position, tensor_bytes)
            + tensor_bytes,
            seconds=seconds(stage.name, position),
        )
        for position, stage in enumerate(chain, start=1 - len(chain))
    ]
    return Profile(
        model=model,
        freeze=freeze,
        input=InputProfile(stored_bytes=stored_bytes, tensor_bytes=tensor_bytes),
        stages=tuple(measured),
        tail=tail or TailProfile(),
        input_stages=tuple(inputs),
    )


def with_lines(profile: Profile, lines: Mapping[Tier, Sequence[Seconds]]) -> Profile:
    """The same profile, with model stages as they were measured at two sizes of micro-batch.

    Args:
        lines: For a tier (fixed per call, per sample) of each stage up to the freeze point, in order.

    Raises:
        ConfigError: If there are more or fewer of them.
    """
    for tier, of_tier in lines.items():
        if len(of_tier) != profile.freeze:
            raise ConfigError(f"{profile.freeze} stages were to be measured on {tier}, got {len(of_tier)}")
    stages = [
        replace(stage, seconds={**stage.seconds, **{str(tier): lines[tier][index] for tier in lines}})
        if index < profile.freeze
        else stage
        for index, stage in enumerate(profile.stages)
    ]
    return replace(profile, stages=tuple(stages))


def with_peaks(profile: Profile, peaks: Sequence[float]) -> Profile:
    """The same profile, with each model stage's bytes alive at once, per sample.

    Raises:
        ConfigError: If there are more or fewer of them than stages.
    """
    if len(peaks) != len(profile.stages):
        raise ConfigError(f"{len(profile.stages)} stages need as many peaks, got {len(peaks)}")
    stages = [replace(stage, peak_bytes=peak) for stage, peak in zip(profile.stages, peaks, strict=True)]
    return replace(profile, stages=tuple(stages))


def has_lines(profile: Profile) -> bool:
    """Whether model stages were measured at two sizes: on one tier at least some then cost something a call.

    On the other one a line through what was measured may have no fixed part at any stage.
    """
    frozen = profile.stages[: profile.freeze]
    return any(stage.seconds[tier][0] > 0 for stage in frozen for tier in (Tier.STORAGE, Tier.COMPUTE))


def cluster_from(
    *,
    bandwidth_bytes_per_s: float,
    rtt_s: float,
    micro_batch: int,
    stored_bytes: float,
    sent_bytes: float,
    samples_per_timing: int,
    storage: Sequence[Timings],
    compute: Sequence[Timings] = (),
    storage_memory_bytes: float | None = None,
    compute_memory_bytes: float | None = None,
    concurrency: int = 1,
    inputs_at_once: int = 1,
    load: float = 1.0,
    device: torch.device = _CPU,
) -> Cluster:
    """Put together what is known of the machines and the link.

    Args:
        bandwidth_bytes_per_s: Of the link, storage to compute.
        rtt_s: Of the link.
        micro_batch: The job's size, the same on both tiers.
        stored_bytes: Mean stored size of a sample.
        sent_bytes: What crossed the link for one sample while ``storage`` and ``compute`` were measured.
        samples_per_timing: Samples in each of those micro-batches.
        storage: What the storage tier reported; its ``read`` and ``encode`` phases give seconds per byte.
        compute: What the compute tier reported; its ``decode`` phase, where there is one, gives seconds per
            byte.
        storage_memory_bytes: As the server says; None where it does not, which rules no cut out.
        compute_memory_bytes: None asks what is available now where ``device`` computes.
        concurrency: Requests that the servers run at once.
        inputs_at_once: Micro-batches whose input stages run at once on the compute tier.
        load: Factor on the storage tier's compute seconds.
        device: On which the compute tier, this process, runs the model.
    """
    require_finite("samples_per_timing", samples_per_timing, at_least=1)
    unlimited = float("inf")
    here = available_bytes(device) if compute_memory_bytes is None else compute_memory_bytes
    read = _seconds_per_byte(storage, "read", stored_bytes * samples_per_timing)
    encode = _seconds_per_byte(storage, "encode", sent_bytes * samples_per_timing)
    decode = _seconds_per_byte(compute, "decode", sent_bytes * samples_per_timing)
    return Cluster(
        link=Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, rtt_s=rtt_s),
        storage=StorageTier(
            memory_bytes=unlimited if storage_memory_bytes is None else storage_memory_bytes,
            concurrency=concurrency,
            micro_batch=micro_batch,
            load=load,
            seconds_per_byte={"read": read, "encode": encode},
        ),
        compute=ComputeTier(
            memory_bytes=float(here),
            micro_batch=micro_batch,
            concurrency=inputs_at_once,
            seconds_per_byte={"decode": decode},
        ),
    )


def _without_warm_up(timings: Sequence[Timings]) -> Sequence[Timings]:
    """The first micro-batch pays for lazy set-up and cold caches; alone it is better than nothing."""
    return timings[1:] if len(timings) > 1 else timings


def _stage_seconds(name: str, position: int, tier: Tier, timings: Sequence[Timings]) -> float:
    spent = [timing.stages[position] for timing in timings if position in timing.stages]
    if not spent:
        raise ConfigError(f"stage {name!r} (position {position}) was not measured on the {tier} tier")
    return median(spent)


def _seconds_per_byte(timings: Sequence[Timings], phase: str, num_bytes: float) -> float:
    spent = list(_phase_seconds(_without_warm_up(timings), phase))
    return median(spent) / num_bytes if spent and num_bytes > 0 else 0.0


def _phase_seconds(timings: Sequence[Timings], phase: str) -> Iterator[float]:
    return (timing.phases[phase] for timing in timings if phase in timing.phases)
