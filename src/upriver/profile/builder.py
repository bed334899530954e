"""Build a profile and a cluster from a short measurement.

Both tiers run the same few micro-batches through every stage before a job starts. This module turns their
`Timings` into seconds per sample. Medians count, since other work on a machine makes single micro-batches
slow, never fast. All micro-batches have one size, so fixed costs are unknown and set to 0. The seconds per
sample include the cost of a call at that size, which is the size of the job. `with_lines` adds measurements
of model stages at a second size (`upriver.profile.stage_timing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

import torch

from upriver.errors import ConfigError
from upriver.profile.stage_timing import Seconds
from upriver.resources import available_bytes
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
    """Required interface of an input stage."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def kind(self) -> str:
        """Kind of work."""


class StageLike(InputStageLike, Protocol):
    """Required interface of a captured model stage; sizes and work are per sample."""

    @property
    def out_bytes(self) -> float:
        """Bytes that cross a cut right after the stage."""

    @property
    def param_bytes(self) -> float:
        """Bytes of all weights that the stage reads."""

    @property
    def flops(self) -> float:
        """Number of floating-point operations."""

    @property
    def peak_bytes(self) -> float:
        """Bytes of activations alive at once."""


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
    """Build a profile from measurements.

    Args:
        model: Name to display.
        freeze: The freeze point; later stages in ``stages`` need no measurement.
        chain: The input stages of the dataset, in order.
        stored_bytes: Mean stored size of a sample.
        tensor_bytes: Size of one sample of the model's input.
        storage: Reports of the storage tier, one for each micro-batch, in running order. If there are
            several, the first counts as warm-up.
        compute: Reports of the compute tier, likewise.
        samples_per_timing: Samples in each of those micro-batches.
        input_bytes: Mean size of a sample after each input stage, by position; an unknown one counts as a
            finished sample.
        cpus_apart: Whether the compute tier has other cores for input stages than for the model.
        tail: Cost of the trainable rest; None counts it as free.

    Raises:
        ConfigError: If a frozen stage was not measured on a tier; the message names the stage and the tier.
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
            # Input, output and finished sample.
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
    """Return the profile with model stages as measured at two sizes of micro-batch.

    Args:
        lines: For a tier, (fixed per call, per sample) of each stage up to the freeze point, in order.

    Raises:
        ConfigError: If the number of lines differs from the freeze point.
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
    """Return the profile with the given peak bytes per sample of each model stage.

    Raises:
        ConfigError: If the number of peaks differs from the number of stages.
    """
    if len(peaks) != len(profile.stages):
        raise ConfigError(f"{len(profile.stages)} stages need as many peaks, got {len(peaks)}")
    stages = [replace(stage, peak_bytes=peak) for stage, peak in zip(profile.stages, peaks, strict=True)]
    return replace(profile, stages=tuple(stages))


def has_lines(profile: Profile) -> bool:
    """Return whether model stages were measured at two sizes.

    If so, some stage has a fixed cost on at least one tier. On the other tier a line through the measurements
    may have no fixed part at any stage.
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
    """Build a cluster from the known facts about the machines and the link.

    Args:
        bandwidth_bytes_per_s: Bandwidth of the link, storage to compute.
        micro_batch: The job's micro-batch size, the same on both tiers.
        stored_bytes: Mean stored size of a sample.
        sent_bytes: Bytes that crossed the link for one sample during the measurement of ``storage`` and
            ``compute``.
        samples_per_timing: Samples in each of those micro-batches.
        storage: Reports of the storage tier; its ``read`` and ``encode`` phases give seconds per byte.
        compute: Reports of the compute tier; its ``decode`` phase, if present, gives seconds per byte.
        storage_memory_bytes: Memory that the server reports; None where it does not, which rules no cut out.
        compute_memory_bytes: Memory of the compute tier; None uses the memory available now on ``device``.
        concurrency: Requests that the servers run at once.
        inputs_at_once: Micro-batches whose input stages run at once on the compute tier.
        load: Factor on the storage tier's compute seconds.
        device: Device of the compute tier (this process) that runs the model.
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
    """Drop the first micro-batch, which pays for lazy set-up and cold caches, unless it is the only one."""
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
