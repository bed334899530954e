"""Measure the tail, combine the measurements of both tiers, and make a plan from them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from upriver.cost import route_between
from upriver.errors import ModelError
from upriver.finetune.prefetch.step_assembly import Values
from upriver.pipeline import Dataset
from upriver.policies import choose
from upriver.profile import build_profile, cluster_from
from upriver.profile.memory.tail import tail_memory, tail_weights
from upriver.profile.profile_cache import CachedProfile
from upriver.program.eval_mode import mode
from upriver.program.example_inputs import tensors_in
from upriver.program.freeze import keep_in_eval
from upriver.program.graph.executor import Program
from upriver.program.module_state.restoration import state_kept, unattended
from upriver.program.split.split import Split
from upriver.program.tensor_layouts import dense_parts, storages_of
from upriver.types import (
    Cluster,
    Link,
    MicroBatch,
    Plan,
    Profile,
    TailProfile,
    Timings,
    Workload,
)

MEASURED_MICRO_BATCHES = 2
"""One warms up, one counts; the running job's responses refine the result anyway."""

STATES_PER_WEIGHT = 4
"""Weights, gradients and the two moments of Adam: usually the most that a trained parameter needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMeasurement:
    """The result of the local canary.

    Attributes:
        features: Features at the freeze point.
        input_bytes: Bytes of a sample after each input stage, by position.
    """

    features: MicroBatch
    timings: tuple[Timings, ...]
    input_bytes: Mapping[int, float]


def measure_tail(
    model: nn.Module, split: Split, features: Values, *, samples: int, batch_size: int | None = None
) -> TailProfile:
    """Measure forward and backward of the tail on one micro-batch; the model stays unchanged.

    Seconds are measured. Memory is computed without data, for training on any number of samples.

    Args:
        features: All values that cross the freeze point.
        samples: Number of samples in ``features``.
        batch_size: Samples of a training batch; ``samples`` by default.
    """
    with state_kept(model, idle=split.prefix_units):
        seconds, saved = time_tail(model, split, features)
        fixed, growing = _tail_bytes(model, split, features, samples, batch_size or samples, saved)
    return TailProfile(seconds=(0.0, seconds / samples), param_bytes=fixed, peak_bytes=growing)


def time_tail(model: nn.Module, split: Split, features: Values) -> tuple[float, int]:
    """Return the seconds of the warmed-up tail's forward and backward, and the bytes saved for backward.

    The model runs in training mode, with its frozen units in eval mode, whatever its present mode.
    """
    values = split.tail.values
    # One sample is too few for a BatchNorm that trains.
    times = 2 if values.samples_of(features) == 1 else 1
    given = features if times == 1 else values.concatenate([features] * times)
    with state_kept(model, idle=split.prefix_units), mode(model, training=True):
        keep_in_eval(model, list(split.in_eval))
        for _ in range(2):
            seconds, saved = _train_once(model, split, given)
    return seconds / times, saved // times


def _train_once(model: nn.Module, split: Split, features: Values) -> tuple[float, int]:
    """Return the seconds of forward and backward, and the bytes saved in between, without parameters."""
    kept = {storage.data_ptr() for p in model.parameters() for storage in storages_of(p)}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):  # an operator that traces its branches keeps no memory
            for storage in storages_of(tensor):
                if storage.data_ptr() not in kept:
                    saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    device, given = features[0].device, split.tail.values.one_or_all(features)
    with state_kept(model, idle=split.prefix_units), unattended(model), torch.enable_grad():
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            found = [t for each in tensors_in(split.tail(given)) for t in dense_parts(each)]
            answers = [t for t in found if t.requires_grad]
        loss: Any = torch.stack([t.float().square().mean() for t in answers]).sum()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return seconds, sum(saved.values())


def _tail_bytes(
    model: nn.Module, split: Split, features: Values, samples: int, batch_size: int, saved: int
) -> tuple[float, float]:
    """Return the bytes of training the tail: fixed ones, weights included, and those of each sample."""
    try:
        peak = tail_memory(model, split, features, samples=samples, batch_size=batch_size)
    except ModelError:  # it depends on its data: count the bytes saved for backward twice, for gradients
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        return float(STATES_PER_WEIGHT * weights), 2.0 * saved / samples
    return float(tail_weights(model, split) + peak.fixed_bytes), peak.growing_bytes


def profile_and_cluster(
    *,
    name: str,
    dataset: Dataset,
    stored_bytes: float,
    program: Program,
    here: LocalMeasurement,
    there: Sequence[Timings],
    link: Link,
    tail: TailProfile,
    at_once: int,
    num_workers: int,
    load: float,
    kept: CachedProfile | None = None,
) -> tuple[Profile, Cluster]:
    """Build a profile and a cluster from measurements at one micro-batch size.

    Args:
        stored_bytes: Mean stored size of the job's samples.
        at_once: Micro-batches that the servers compute at once.
        num_workers: Local threads that run input stages.
        load: Factor on the servers' seconds.
        kept: Cached profile of an earlier job; used instead of values derived from ``here`` and ``there``.
    """
    micro_batch = program.micro_batch
    apart, cores = cores_for_inputs(program.device)
    profile = (
        kept.profile
        if kept is not None
        else build_profile(
            model=name,
            freeze=program.num_stages,
            stages=program.stages,
            chain=dataset.chain.stages,
            stored_bytes=stored_bytes,
            tensor_bytes=program.graph.input_bytes,
            input_bytes=here.input_bytes,
            storage=there,
            compute=here.timings,
            samples_per_timing=micro_batch,
            cpus_apart=apart,
        )
    )
    cluster = cluster_from(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        rtt_s=link.rtt_s,
        micro_batch=micro_batch,
        stored_bytes=stored_bytes,
        sent_bytes=program.stages[-1].out_bytes,
        samples_per_timing=micro_batch,
        storage=there,
        compute=here.timings,
        concurrency=at_once,
        inputs_at_once=min(num_workers, cores),
        load=load,
        device=program.device,
    )
    if kept is not None:
        cluster = _with_rates_of(cluster, kept.cluster)
    return replace(profile, model=name, tail=tail), cluster


def cores_for_inputs(device: torch.device) -> tuple[bool, int]:
    """Return whether input stages have cores of their own, and on how many cores they run at once.

    If the model's threads use every core, model and input stages take turns on all of them.
    """
    cores = len(os.sched_getaffinity(0))
    if device.type != "cpu":
        return True, cores
    spare = cores - torch.get_num_threads()
    return (True, spare) if spare > 0 else (False, cores)


def make_plan(
    policy: str, *, profile: Profile, cluster: Cluster, workload: Workload, notes: Sequence[str] = ()
) -> Plan:
    """Ask a policy for a plan from the measurements; the plan's ``why`` ends with the notes.

    Raises:
        NoFeasibleCut: If no cut fits the memory of both tiers.
    """
    return with_notes(choose(policy, profile, cluster, workload), *notes)


def with_notes(plan: Plan, *notes: str) -> Plan:
    """Return the plan with notes at the end of its ``why``."""
    return replace(plan, why="; ".join((plan.why.rstrip("."), *notes))) if notes else plan


def _with_rates_of(cluster: Cluster, earlier: Cluster) -> Cluster:
    """Return the cluster with an earlier one's seconds per byte for reading, encoding and decoding."""
    storage, compute = earlier.storage.seconds_per_byte, earlier.compute.seconds_per_byte
    return replace(
        cluster,
        storage=replace(cluster.storage, seconds_per_byte=storage),
        compute=replace(cluster.compute, seconds_per_byte=compute),
    )


def unsplit_plan(policy: str, dataset: Dataset, *, stop: int, why: str) -> Plan:
    """Return the plan that runs everything on the compute tier, for when there is nothing to decide."""
    start = dataset.chain.start
    return Plan(
        policy=policy,
        feasible=True,
        routes=(route_between(start, start, stop),),
        predicted=None,
        table=(),
        why=why,
    )
