"""What a plan would cost: pure, and the only place that adds times up.

An epoch is a pipeline of three resources: the storage tier, the link, the compute tier. Each is busy for the
sum of its own phases, all work at once, so with ``stream="micro_batch"`` the epoch takes as long as the
busiest of them, plus the time until its first micro-batch has reached it (fill) and from its last one to the
end (drain). With ``stream="request"`` it is HAPI's own pipeline of two, ``max(compute, storage + network)``
an iteration.

The phases of one sample, in order (HAPI 2025, Table 1), and where their seconds come from:

=========  ========================================  ==================================================
tier       phase                                     seconds per sample
=========  ========================================  ==================================================
storage    read from the store                       ``read`` x stored bytes
storage    load the model (when it is not kept)      ``model_load_s`` / samples of a request
storage    move to the processor and back            ``move`` x (input tensor + what crosses the cut)
storage    input stages, forward up to the cut       measured, x ``load``
storage    encode for the wire                       ``encode`` x what crosses the cut
network    send                                      what crosses the cut / bandwidth
compute    decode                                    ``decode`` x what crosses the cut
compute    move to the processor                     ``move`` x what enters the model
compute    input stages, forward up to the freeze    measured
compute    the tail: forward, backward, step         measured, per training batch
=========  ========================================  ==================================================

Forward passes on one processor take turns; every other storage phase runs ``concurrency`` at a time (the same
section). A fixed cost per call is spread over the micro-batch of that call. The smallest cut pushes nothing
down: the object store is read, the stored bytes cross, nothing is moved or encoded for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from upriver.errors import ConfigError
from upriver.text import bytes_text
from upriver.types import (
    Cluster,
    ComputeTier,
    Cost,
    CutRow,
    Profile,
    Route,
    Segment,
    StageProfile,
    StorageTier,
    Tier,
    Workload,
)

NOT_SPLIT = "(not split)"
"""What stands in a table for the stage that the smallest cut lies after: there is none."""


def candidates(profile: Profile) -> tuple[int, ...]:
    """The cuts a plan may choose among: not splitting, and after each frozen model stage."""
    return (profile.unsplit, *range(1, profile.freeze + 1))


def route_at(profile: Profile, cut: int, *, share: float = 1.0) -> Route:
    """Storage runs the chain up to ``cut``, compute the rest; at the smallest cut compute runs it all."""
    rest = Segment(tier=Tier.COMPUTE, start=cut, stop=len(profile.stages))
    if cut == profile.unsplit:
        return Route(segments=(rest,), share=share)
    pushed = Segment(tier=Tier.STORAGE, start=profile.unsplit, stop=cut)
    return Route(segments=(pushed, rest), share=share)


def evaluate(routes: int | Sequence[Route], profile: Profile, cluster: Cluster, workload: Workload) -> Cost:
    """Predict one epoch.

    Args:
        routes: A cut for all samples, or routes whose shares sum to 1.
        profile: What each stage costs.
        cluster: The machines and the link; its ``stream`` decides which pipeline is meant.
        workload: Samples and training batch.

    Raises:
        ConfigError: If a cut is not one the chain has, shares do not sum to 1, or a stage has no seconds for
            the tier that runs it.
    """
    return CostModel(profile, cluster, workload).evaluate(routes)


def two_resource_epoch_s(cut: int, profile: Profile, cluster: Cluster, workload: Workload) -> float:
    """HAPI 2025's objective, whatever ``stream`` says: iterations x max(compute, storage + network)."""
    return CostModel(profile, cluster, workload).two_resource(cut).epoch_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Seconds for which one sample keeps each phase busy at one cut.

    Attributes:
        storage_parallel: read, move, encode and the storage tier's own CPUs: run ``concurrency`` at a time.
        storage_forward: The storage tier's main processor: one micro-batch after the other.
        model_load: Of one request; 0 when the model is kept.
        network: The link.
        compute_receive: decode, move.
        compute_forward: The compute tier's main processor, up to the freeze point.
        compute_cpu: The compute tier's CPUs, where an accelerator runs the model.
    """

    storage_parallel: float
    storage_forward: float
    model_load: float
    network: float
    compute_receive: float
    compute_forward: float
    compute_cpu: float


class CostModel:
    """Every cut of one (profile, cluster, workload): what is common is summed once, so a cut costs O(1)."""

    def __init__(self, profile: Profile, cluster: Cluster, workload: Workload) -> None:
        self.profile, self.cluster, self.workload = profile, cluster, workload
        self._frozen = (*profile.input_stages, *profile.stages[: profile.freeze])
        self._compute_at_once = cluster.compute.micro_batch or workload.batch_size
        self._storage_s = _running_sums(self._spent(Tier.STORAGE, cluster.storage.micro_batch))
        self._compute_s = _running_sums(reversed(self._spent(Tier.COMPUTE, self._compute_at_once)))
        self._storage_need = _running_need(self._frozen)
        self._compute_need = _running_need(self._frozen[::-1])

    # ---------------------------------------------------------------------------------------- times

    def evaluate(self, routes: int | Sequence[Route]) -> Cost:
        """Predict one epoch; see the function of the same name."""
        cuts = [(routes, 1.0)] if isinstance(routes, int) else [(r.cut, r.share) for r in routes]
        if not math.isclose(sum(share for _, share in cuts), 1.0, abs_tol=1e-9):
            raise ConfigError(f"shares must sum to 1, got {[share for _, share in cuts]}")
        one = self._micro_batch_cost if self.cluster.stream == "micro_batch" else self.two_resource
        costs = [(one(cut), share) for cut, share in cuts if share > 0]
        if len(costs) == 1:
            return costs[0][0]
        mixed = Cost(
            **{f.name: sum(share * getattr(cost, f.name) for cost, share in costs) for f in fields(Cost)}
        )
        around = max(cost.epoch_s - self._busiest_s(cost) for cost, _ in costs)
        return replace(mixed, epoch_s=self._busiest_s(mixed) + around)

    def _busiest_s(self, cost: Cost) -> float:
        """The time below which no epoch of this pipeline can come."""
        if self.cluster.stream == "request":
            return max(cost.compute_s, cost.storage_s + cost.network_s)
        return max(cost.storage_s, cost.network_s, cost.compute_s)

    def _micro_batch_cost(self, cut: int) -> Cost:
        phases, samples = self.phases(cut), self.workload.num_samples
        cpus = samples * phases.compute_cpu
        storage = samples * self._storage_busy(phases)
        network = samples * phases.network
        compute = samples * (phases.compute_receive + phases.compute_forward) + self._tails()
        first, hop, head, last = self._fill_and_drain(phases)
        epoch = max(storage + hop + last, first + network + self.cluster.link.rtt_s + last, head + compute)
        return Cost(
            epoch_s=max(epoch, first + hop + cpus + last),
            storage_s=storage,
            network_s=network,
            compute_s=max(compute, cpus),
            bytes=samples * self.profile.cut_bytes(cut),
        )

    def _fill_and_drain(self, phases: Phases) -> tuple[float, float, float, float]:
        """Seconds of the first micro-batch on storage, its hop, compute's idle start, compute after the last.

        The trainable tail takes whole training batches, so compute also waits, less what it can do meanwhile,
        for the first of them to be complete.
        """
        samples, link = self.workload.num_samples, self.cluster.link
        batch = min(self.workload.batch_size, samples)
        sent = min(self.cluster.storage.micro_batch, samples)
        taken = min(self._compute_at_once, batch)
        alone = phases.storage_parallel + phases.storage_forward
        first, hop = sent * alone + phases.model_load, sent * phases.network + link.rtt_s
        gap = max(self._storage_busy(phases), phases.network, phases.compute_cpu)
        suffix = phases.compute_receive + phases.compute_forward

        def arrived(count: int) -> float:
            return first + hop + max(0, count - sent) * gap

        head = max(arrived(taken), arrived(batch) - (batch - taken) * suffix)
        return first, hop, head, taken * (suffix + phases.compute_cpu) + self._tail(batch)

    def two_resource(self, cut: int) -> Cost:
        """HAPI 2025, section 4.3: an iteration costs max(client, server + network), and they do not stream.

        Requests of an iteration run ``concurrency`` at a time; a wave waits for the one before it.
        """
        phases, storage = self.phases(cut), self.cluster.storage
        batch = min(self.workload.batch_size, self.workload.num_samples)
        iterations = math.ceil(self.workload.num_samples / batch)
        asked = min(storage.request_samples, batch)
        waves = math.ceil(math.ceil(batch / asked) / storage.concurrency)
        server = batch * phases.storage_forward + waves * (
            asked * phases.storage_parallel + phases.model_load
        )
        network = batch * phases.network + self.cluster.link.rtt_s
        on_client = phases.compute_receive + phases.compute_forward + phases.compute_cpu
        client = batch * on_client + self._tail(batch)
        return Cost(
            epoch_s=iterations * max(client, server + network),
            storage_s=iterations * server,
            network_s=iterations * network,
            compute_s=iterations * client,
            bytes=self.workload.num_samples * self.profile.cut_bytes(cut),
        )

    def phases(self, cut: int) -> Phases:
        """Seconds per sample of each phase at ``cut``.

        Raises:
            ConfigError: If the chain has no such cut, or it lies past the freeze point.
        """
        profile, storage, compute = self.profile, self.cluster.storage, self.cluster.compute
        pushed, kept = self._stretches(cut)
        sent, splits = profile.cut_bytes(cut), cut != profile.unsplit
        onto_storage = profile.input.tensor_bytes + sent if cut > 0 else 0.0
        onto_compute = sent if cut > 0 else profile.input.tensor_bytes
        storage_main, storage_cpu = self._storage_s[pushed]
        compute_main, compute_cpu = self._compute_s[kept]
        loads_model = cut > 0 and not storage.reuse_model
        return Phases(
            storage_parallel=_rate(storage, "read") * profile.input.stored_bytes
            + _rate(storage, "move") * onto_storage
            + (_rate(storage, "encode") * sent if splits else 0.0)
            + storage.load * storage_cpu,
            storage_forward=storage.load * storage_main,
            model_load=profile.model_load_s.get(Tier.STORAGE, 0.0) if loads_model else 0.0,
            network=sent / self.cluster.link.bandwidth_bytes_per_s,
            compute_receive=_rate(compute, "decode") * sent + _rate(compute, "move") * onto_compute,
            compute_forward=compute_main,
            compute_cpu=compute_cpu,
        )

    def _spent(self, tier: Tier, micro_batch: int) -> list[tuple[float, float]]:
        inputs = [_input_seconds(stage, tier, micro_batch) for stage in self.profile.input_stages]
        frozen = self.profile.stages[: self.profile.freeze]
        return inputs + [_model_seconds(stage, tier, micro_batch) for stage in frozen]

    def _storage_busy(self, phases: Phases) -> float:
        loading = phases.model_load / self.cluster.storage.request_samples
        return phases.storage_forward + (phases.storage_parallel + loading) / self.cluster.storage.concurrency

    def _tail(self, batch: int) -> float:
        fixed, per_sample = self.profile.tail.seconds
        return fixed + per_sample * batch

    def _tails(self) -> float:
        fixed, per_sample = self.profile.tail.seconds
        iterations = math.ceil(self.workload.num_samples / self.workload.batch_size)
        return fixed * iterations + per_sample * self.workload.num_samples

    def _stretches(self, cut: int) -> tuple[int, int]:
        """How many frozen stages (input stages among them) run before and after ``cut``."""
        pushed = cut - self.profile.unsplit
        if not 0 <= pushed <= len(self._frozen):
            allowed = f"{self.profile.unsplit}..{self.profile.freeze}"
            raise ConfigError(f"cut must lie in {allowed} (the freeze point), got {cut}")
        return pushed, len(self._frozen) - pushed

    # --------------------------------------------------------------------------------------- memory

    def shortfalls(self, cut: int) -> dict[Tier, float]:
        """Bytes that each tier lacks at ``cut``; tiers that have enough are left out.

        Storage holds the parameters of its stages and the largest stage's activations for one micro-batch.
        Compute holds the same for what it runs, at its micro-batch (at the training batch where none is set,
        as in the papers), *and* the tail at the training batch, since the next batch is prepared while one
        trains.
        """
        needs = {Tier.STORAGE: self._storage_bytes(cut), Tier.COMPUTE: self._compute_bytes(cut)}
        return {tier: need - self._has(tier) for tier, need in needs.items() if need > self._has(tier)}

    def fits(self, cut: int) -> bool:
        """Whether both tiers have the memory that ``cut`` needs."""
        return not self.shortfalls(cut)

    def why_not(self, cut: int) -> str:
        """Which memory is too small at ``cut`` and by how many bytes; empty when all fits."""
        micro_batch, batch = self.cluster.compute.micro_batch, self.workload.batch_size
        prepared = f"micro-batches of {micro_batch} and " if micro_batch else ""
        batches = {
            Tier.STORAGE: f"micro-batches of {self.cluster.storage.micro_batch}",
            Tier.COMPUTE: f"{prepared}a training batch of {batch}",
        }
        return "; ".join(
            f"{tier} memory is short by {math.ceil(short)} bytes "
            f"(needs {bytes_text(self._has(tier) + short)} at {batches[tier]}, "
            f"has {bytes_text(self._has(tier))})"
            for tier, short in self.shortfalls(cut).items()
        )

    def _storage_bytes(self, cut: int) -> float:
        params, peak = self._storage_need[self._stretches(cut)[0]]
        return params + peak * self.cluster.storage.micro_batch

    def _compute_bytes(self, cut: int) -> float:
        params, peak = self._compute_need[self._stretches(cut)[1]]
        tail, batch = self.profile.tail, self.workload.batch_size
        prefix = params + peak * self._compute_at_once
        return prefix + tail.param_bytes + tail.peak_bytes * batch

    def _has(self, tier: Tier) -> float:
        return (self.cluster.storage if tier is Tier.STORAGE else self.cluster.compute).memory_bytes

    # ---------------------------------------------------------------------------------------- table

    def table(self) -> tuple[CutRow, ...]:
        """One row a candidate cut, in the order of the chain."""
        return tuple(self.row(cut) for cut in candidates(self.profile))

    def row(self, cut: int) -> CutRow:
        """What an epoch at ``cut`` would cost, and whether it fits."""
        why_not = self.why_not(cut)
        splits = cut != self.profile.unsplit
        return CutRow(
            cut=cut,
            name=self.profile.stage(cut).name if splits else NOT_SPLIT,
            feasible=not why_not,
            why_not=why_not,
            bytes_per_sample=self.profile.cut_bytes(cut),
            cost=self.evaluate(cut),
        )


def _rate(tier: StorageTier | ComputeTier, phase: str) -> float:
    """Seconds per byte of a phase; one that was not measured is free."""
    return tier.seconds_per_byte.get(phase, 0.0)


def _input_seconds(stage: StageProfile, tier: Tier, micro_batch: int) -> tuple[float, float]:
    """An input stage runs on the tier's CPUs where it has a processor apart from them."""
    if f"{tier}.cpu" not in stage.seconds:
        return _model_seconds(stage, tier, micro_batch)
    fixed, per_sample = stage.seconds[f"{tier}.cpu"]
    return 0.0, fixed / micro_batch + per_sample


def _model_seconds(stage: StageProfile, tier: Tier, micro_batch: int) -> tuple[float, float]:
    if tier not in stage.seconds:
        known = ", ".join(stage.seconds) or "nothing"
        raise ConfigError(f"stages[{stage.name}].seconds.{tier} is missing (known: {known})")
    fixed, per_sample = stage.seconds[tier]
    return fixed / micro_batch + per_sample, 0.0


def _running_sums(spent: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Seconds per sample of the first 0, 1, 2, ... stages, on a tier's main processor and on its CPUs."""
    return list(accumulate(spent, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0.0, 0.0)))


def _running_need(stages: Iterable[StageProfile]) -> list[tuple[float, float]]:
    """Parameter bytes and largest peak per sample of the first 0, 1, 2, ... of ``stages``."""
    each = ((stage.param_bytes, stage.peak_bytes) for stage in stages)
    return list(accumulate(each, lambda a, b: (a[0] + b[0], max(a[1], b[1])), initial=(0.0, 0.0)))
