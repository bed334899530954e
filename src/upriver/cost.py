"""Predict the cost of a plan. With `upriver.latency` this is the only place that adds times up; it is pure.

An epoch is a pipeline of three resources: storage tier, link and compute tier. Each is busy for the sum of
its own phases. With ``stream="micro_batch"`` all work at once. The epoch then takes the busiest resource's
time, plus fill and drain. Fill is the time until the first micro-batch has arrived there. Drain is the time
from the last one to the end. With ``stream="request"`` it is HAPI's own pipeline of two, ``max(compute,
storage + network)`` for an iteration. With ``stream="synchronous"`` nothing overlaps: the three add up.

The phases of one sample, in order (HAPI 2025, Table 1), and the source of their seconds:

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
compute    input stages                              measured, ``concurrency`` at a time
compute    forward up to the freeze                  measured
compute    the tail: forward, backward, step         measured, per training batch
=========  ========================================  ==================================================

Forward passes on one processor take turns. Every other storage phase runs ``concurrency`` at a time (the same
section). A fixed cost for each call is spread over the micro-batch of that call. The smallest cut pushes
nothing down: the client reads the object store, the stored bytes cross, and nothing is moved or encoded.

Every quantity is computed for all cuts at once, as an array over the candidates. So a chain of a thousand
stages is planned in milliseconds. A policy may have other ways for a sample, with phases of its own, such as
rows that were kept (`upriver.policies.kept`). `CostModel.epochs_of` adds them up alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

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

Array: TypeAlias = npt.NDArray[np.float64]
"""Array with one number for each candidate cut, in the order of the chain."""

NOT_SPLIT = "(not split)"
"""Table entry instead of a stage for the smallest cut, which lies after no stage."""


def candidates(profile: Profile) -> range:
    """Return every cut up to the freeze point, from the unsplit one on.

    Some lie between input stages, the others after model stages.
    """
    return range(profile.unsplit, profile.freeze + 1)


def route_at(profile: Profile, cut: int, *, share: float = 1.0) -> Route:
    """Return the route that runs the chain on storage up to ``cut``, and the rest on compute.

    At the smallest cut compute runs the whole chain.
    """
    return route_between(profile.unsplit, cut, len(profile.stages), share=share)


def route_between(start: int, cut: int, stop: int, *, share: float = 1.0) -> Route:
    """Return the same route for a chain from ``start``, the position of the stored bytes, to ``stop``."""
    rest = Segment(tier=Tier.COMPUTE, start=cut, stop=stop)
    pushed = Segment(tier=Tier.STORAGE, start=start, stop=cut)
    return Route(segments=(rest,) if cut == start else (pushed, rest), share=share)


def evaluate(routes: int | Sequence[Route], profile: Profile, cluster: Cluster, workload: Workload) -> Cost:
    """Predict one epoch.

    Args:
        routes: A cut for all samples, or routes whose shares sum to 1.
        cluster: The machines and the link. Its ``stream`` selects the pipeline.

    Raises:
        ConfigError: If the chain has no such cut, shares do not sum to 1, or a stage has no seconds for the
            tier that runs it.
    """
    return CostModel(profile, cluster, workload).evaluate(routes)


def two_resource_epoch_s(cut: int, profile: Profile, cluster: Cluster, workload: Workload) -> float:
    """Return HAPI 2025's objective for any ``stream``: iterations x max(compute, storage + network)."""
    model = CostModel(profile, cluster, workload)
    return float(model.two_resource.epoch_s[model.index(cut)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Seconds for which one sample keeps each phase busy, at one cut or at every candidate.

    Attributes:
        storage_parallel: read, move, encode and the storage tier's own CPUs, which run ``concurrency`` at a
            time.
        storage_forward: The storage tier's main processor, one micro-batch after the other.
        model_load: Loading the model, for one request; 0 if the model is kept.
        compute_receive: decode and move.
        compute_forward: The compute tier's main processor, up to the freeze point.
        compute_cpu: The compute tier's CPUs, if an accelerator runs the model.
        disk: The compute tier's disk, a resource of its own.
        round_trip: Round trip before the first micro-batch arrives, once an epoch or an iteration.
    """

    storage_parallel: Array
    storage_forward: Array
    model_load: Array
    network: Array
    compute_receive: Array
    compute_forward: Array
    compute_cpu: Array
    disk: Array
    round_trip: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Epochs:
    """Cost of an epoch at each candidate cut, if all samples take it.

    Attributes:
        busy: Seconds for which each cut keeps each independent resource busy, one row a resource. No epoch is
            shorter than the largest of its column. A mix is busy for the shares of its routes.
        compute: One row for each of the compute tier's resources; the busiest counts.
    """

    epoch_s: Array
    storage_s: Array
    network_s: Array
    compute: Array
    bytes: Array
    busy: Array

    @property
    def compute_s(self) -> Array:
        """Seconds for which the compute tier is busy."""
        return np.asarray(self.compute.max(axis=0))

    @property
    def around_s(self) -> Array:
        """Seconds before the busiest resource begins and after it ends."""
        return np.asarray(self.epoch_s - self.busy.max(axis=0))


class CostModel:
    """Cost model of all cuts of one (profile, cluster, workload)."""

    def __init__(self, profile: Profile, cluster: Cluster, workload: Workload) -> None:
        self.profile, self.cluster, self.workload = profile, cluster, workload
        self.cuts = candidates(profile)
        self._frozen = (*profile.input_stages, *profile.stages[: profile.freeze])
        self._compute_at_once = cluster.compute.micro_batch or workload.batch_size

    # ---------------------------------------------------------------------------------------- times

    def evaluate(self, routes: int | Sequence[Route]) -> Cost:
        """Predict one epoch, see the function of the same name."""
        epochs = self.epochs
        if isinstance(routes, int):
            return self._cost(epochs, self.index(routes))
        if not math.isclose(sum(route.share for route in routes), 1.0, abs_tol=1e-9):
            raise ConfigError(f"shares must sum to 1, got {[route.share for route in routes]}")
        used = [(self.index(route.cut), route.share) for route in routes if route.share > 0]
        if len(used) == 1:
            return self._cost(epochs, used[0][0])
        costs = [(self._cost(epochs, index), share) for index, share in used]
        mixed = Cost(
            **{f.name: sum(share * getattr(cost, f.name) for cost, share in costs) for f in fields(Cost)}
        )
        indices, shares = [index for index, _ in used], np.array([share for _, share in used])
        busiest = float((epochs.busy[:, indices] @ shares).max())
        return replace(
            mixed,
            epoch_s=busiest + float(epochs.around_s[indices].max()),
            compute_s=float((epochs.compute[:, indices] @ shares).max()),
        )

    def _cost(self, epochs: Epochs, index: int) -> Cost:
        return Cost(**{f.name: float(getattr(epochs, f.name)[index]) for f in fields(Cost)})

    @cached_property
    def epochs(self) -> Epochs:
        """Cost of an epoch at each candidate cut, by the pipeline of ``cluster.stream``."""
        return self.epochs_of(self.all_phases, self._sent)

    def epochs_of(self, phases: Phases, sent: Array) -> Epochs:
        """Return the cost of an epoch in which all samples take one way, for each way of ``phases``.

        Args:
            sent: Bytes per sample that cross the link on each way.
        """
        match self.cluster.stream:
            case "micro_batch":
                return self._pipelined(phases, sent)
            case "request":
                return self._two_resource(phases, sent)
            case _:
                return self._synchronous(phases, sent)

    def _pipelined(self, phases: Phases, sent: Array) -> Epochs:
        samples = self.workload.num_samples
        cpus, disk = samples * phases.compute_cpu, samples * phases.disk
        storage = samples * self._storage_busy(phases)
        network = samples * phases.network
        compute = samples * (phases.compute_receive + phases.compute_forward) + self._tails()
        first, hop, head, last = self._fill_and_drain(phases)
        paths = (
            storage + hop + last,
            first + network + phases.round_trip + last,
            head + compute,
            first + hop + cpus + last,
            disk + hop + last,
        )
        return Epochs(
            epoch_s=np.max(paths, axis=0),
            storage_s=storage,
            network_s=network,
            compute=np.stack((compute, cpus)),
            bytes=samples * sent,
            busy=np.stack((storage, network, compute, cpus, disk)),
        )

    def _fill_and_drain(self, phases: Phases) -> tuple[Array, Array, Array, Array]:
        """Return seconds: first micro-batch on storage, its hop, compute's idle start, compute at the end.

        The trainable tail needs whole training batches. So compute also waits for the first of them to be
        complete, less the work that it can do meanwhile.
        """
        samples = self.workload.num_samples
        batch = min(self.workload.batch_size, samples)
        sent = min(self.cluster.storage.micro_batch, samples)
        taken = min(self._compute_at_once, batch)
        first = sent * (phases.storage_parallel + phases.storage_forward + phases.disk) + phases.model_load
        hop = sent * phases.network + phases.round_trip
        gap = np.max((self._storage_busy(phases), phases.network, phases.compute_cpu, phases.disk), axis=0)
        suffix = phases.compute_receive + phases.compute_forward

        def arrived(count: int) -> Array:
            return np.asarray(first + hop + max(0, count - sent) * gap)

        head = np.maximum(arrived(taken), arrived(batch) - (batch - taken) * suffix)
        return first, hop, head, taken * (suffix + phases.compute_cpu) + self._tail(batch)

    @cached_property
    def two_resource(self) -> Epochs:
        """Cost by HAPI 2025, section 4.3: an iteration costs max(client, server + network).

        Server and network do not overlap. Requests of an iteration run ``concurrency`` at a time; each wave
        waits for the one before.
        """
        return self._two_resource(self.all_phases, self._sent)

    def _two_resource(self, phases: Phases, sent: Array) -> Epochs:
        iterations, server, network, client = self._iteration(phases)
        busy = iterations * np.stack((server + network, client))
        return self._iterated(iterations, server, network, client, busy, sent)

    def _synchronous(self, phases: Phases, sent: Array) -> Epochs:
        """Return the cost if each iteration is read, run, sent and trained before the next one begins."""
        iterations, server, network, client = self._iteration(phases)
        busy = iterations * (server + network + client)[np.newaxis]
        return self._iterated(iterations, server, network, client, busy, sent)

    def _iterated(
        self, iterations: int, server: Array, network: Array, client: Array, busy: Array, sent: Array
    ) -> Epochs:
        return Epochs(
            epoch_s=busy.max(axis=0),
            storage_s=iterations * server,
            network_s=iterations * network,
            compute=iterations * client[np.newaxis],
            bytes=self.workload.num_samples * sent,
            busy=busy,
        )

    def _iteration(self, phases: Phases) -> tuple[int, Array, Array, Array]:
        """Return the iterations of an epoch, and one's seconds on the server, the link and the client."""
        storage = self.cluster.storage
        batch = min(self.workload.batch_size, self.workload.num_samples)
        asked = min(storage.request_samples, batch)
        waves = math.ceil(math.ceil(batch / asked) / storage.concurrency)
        server = batch * phases.storage_forward + waves * (
            asked * phases.storage_parallel + phases.model_load
        )
        network = batch * phases.network + phases.round_trip
        on_client = phases.compute_receive + phases.compute_forward + phases.compute_cpu + phases.disk
        client = batch * on_client + self._tail(batch)
        return math.ceil(self.workload.num_samples / batch), server, network, client

    def phases(self, cut: int) -> Phases:
        """Return the seconds per sample of each phase at ``cut``."""
        index, phases = self.index(cut), self.all_phases
        return Phases(**{f.name: getattr(phases, f.name)[index] for f in fields(Phases)})

    @cached_property
    def all_phases(self) -> Phases:
        """Seconds per sample of each phase at every candidate cut."""
        profile, storage, compute = self.profile, self.cluster.storage, self.cluster.compute
        sent, cuts = self._sent, np.arange(self.cuts.start, self.cuts.stop)
        into_model, splits = cuts > 0, cuts > profile.unsplit
        tensor = profile.input.tensor_bytes
        storage_main, storage_cpu = self._spent(Tier.STORAGE, self.cluster.storage.micro_batch)
        compute_main, compute_cpu = self._spent(Tier.COMPUTE, self._compute_at_once, compute.concurrency)
        loading = 0.0 if storage.reuse_model else profile.model_load_s.get(Tier.STORAGE, 0.0)
        return Phases(
            storage_parallel=_rate(storage, "read") * profile.input.stored_bytes
            + _rate(storage, "move") * np.where(into_model, tensor + sent, 0.0)
            + _rate(storage, "encode") * np.where(splits, sent, 0.0)
            + storage.load * before(storage_cpu),
            storage_forward=storage.load * before(storage_main),
            model_load=np.where(into_model, loading, 0.0),
            network=sent / self.cluster.link.bandwidth_bytes_per_s,
            compute_receive=_rate(compute, "decode") * sent
            + _rate(compute, "move") * np.where(into_model, sent, tensor),
            compute_forward=after(compute_main),
            compute_cpu=after(compute_cpu),
            disk=np.zeros(len(cuts)),
            round_trip=np.full(len(cuts), self.cluster.link.rtt_s),
        )

    @cached_property
    def _sent(self) -> Array:
        """Bytes per sample that cross each candidate cut."""
        return np.array([self.profile.input.stored_bytes, *(stage.out_bytes for stage in self._frozen)])

    def _spent(self, tier: Tier, micro_batch: int, inputs_at_once: int = 1) -> tuple[Array, Array]:
        """Return the seconds per sample of each stage on a tier's main processor and on its CPUs.

        An input stage runs on the CPUs if a tier has CPUs apart from its main processor.
        """
        inputs, cpu = len(self.profile.input_stages), f"{tier}.cpu"
        on_cpu = [index for index in range(inputs) if cpu in self._frozen[index].seconds]
        apart = set(on_cpu)
        pairs = np.array(
            [
                stage.seconds[cpu] if index in apart else _main_seconds(stage, tier)
                for index, stage in enumerate(self._frozen)
            ]
        ).reshape(-1, 2)
        main = pairs[:, 0] / micro_batch + pairs[:, 1]
        main[:inputs] /= inputs_at_once
        cpus = np.zeros_like(main)
        cpus[on_cpu], main[on_cpu] = main[on_cpu], 0.0
        return main, cpus

    def _storage_busy(self, phases: Phases) -> Array:
        """Return the seconds per sample for which the storage tier is busy."""
        storage = self.cluster.storage
        loading = phases.model_load / storage.request_samples
        return np.asarray(phases.storage_forward + (phases.storage_parallel + loading) / storage.concurrency)

    def _tail(self, batch: int) -> float:
        fixed, per_sample = self.profile.tail.seconds
        return fixed + per_sample * batch

    def _tails(self) -> float:
        fixed, per_sample = self.profile.tail.seconds
        iterations = math.ceil(self.workload.num_samples / self.workload.batch_size)
        return fixed * iterations + per_sample * self.workload.num_samples

    def index(self, cut: int) -> int:
        """Return the index of a cut among the candidates.

        Raises:
            ConfigError: If the cut is no candidate.
        """
        if cut not in self.cuts:
            allowed = f"{self.profile.unsplit}..{self.profile.freeze}"
            raise ConfigError(f"cut must lie in {allowed} (the freeze point), got {cut}")
        return cut - self.cuts.start

    # --------------------------------------------------------------------------------------- memory

    @cached_property
    def needs(self) -> dict[Tier, Array]:
        """Bytes that each tier needs at every candidate cut.

        Storage holds the parameters of its stages and the largest stage's activations for one micro-batch.
        Compute holds the same for its own stages, at its micro-batch. Without one the training batch counts,
        as in the papers. It *also* holds the tail at the training batch, since the next batch is prepared
        during training. With mixed routes each tier needs the most of any route: cuts that fit alone fit in a
        mix.
        """
        params = np.array([stage.param_bytes for stage in self._frozen])
        peaks = np.array([stage.peak_bytes for stage in self._frozen])
        tail, most = self.profile.tail, np.maximum.accumulate
        trained = tail.param_bytes + tail.peak_bytes * self.workload.batch_size
        pushed, kept = np.append(0.0, most(peaks)), np.append(most(peaks[::-1])[::-1], 0.0)
        return {
            Tier.STORAGE: before(params) + pushed * self.cluster.storage.micro_batch,
            Tier.COMPUTE: after(params) + kept * self._compute_at_once + trained,
        }

    @cached_property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Mask of the candidate cuts that fit both tiers' memory."""
        return np.asarray(np.all([need <= self._has(tier) for tier, need in self.needs.items()], axis=0))

    def shortfalls(self, cut: int) -> dict[Tier, float]:
        """Return the bytes that each tier lacks at ``cut``, without the tiers that have enough."""
        index = self.index(cut)
        needs = {tier: float(need[index]) for tier, need in self.needs.items()}
        return {tier: need - self._has(tier) for tier, need in needs.items() if need > self._has(tier)}

    def fits(self, cut: int) -> bool:
        """Return True if both tiers have the memory that ``cut`` needs."""
        return bool(self.feasible[self.index(cut)])

    def why_not(self, cut: int) -> str:
        """Return which memory is too small at ``cut`` and by how many bytes; empty if all fits."""
        if self.fits(cut):
            return ""
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

    def _has(self, tier: Tier) -> float:
        return (self.cluster.storage if tier is Tier.STORAGE else self.cluster.compute).memory_bytes

    # ---------------------------------------------------------------------------------------- table

    def table(self) -> CutTable:
        """Return one row for each candidate cut, in the order of the chain."""
        return CutTable(self)

    def row(self, cut: int) -> CutRow:
        """Return the cost of an epoch at ``cut``, and whether it fits."""
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


class CutTable(Sequence[CutRow]):
    """Rows of a plan's table, computed on access."""

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(self.model.cuts)

    @overload
    def __getitem__(self, index: int) -> CutRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[CutRow, ...]: ...

    def __getitem__(self, index: int | slice) -> CutRow | tuple[CutRow, ...]:
        if isinstance(index, slice):
            return tuple(self.model.row(cut) for cut in self.model.cuts[index])
        return self.model.row(self.model.cuts[index])

    def __iter__(self) -> Iterator[CutRow]:
        return (self.model.row(cut) for cut in self.model.cuts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))


def _rate(tier: StorageTier | ComputeTier, phase: str) -> float:
    """Return the seconds per byte of a phase; 0 if it was not measured."""
    return tier.seconds_per_byte.get(phase, 0.0)


def _main_seconds(stage: StageProfile, tier: Tier) -> tuple[float, float]:
    try:
        return stage.seconds[tier]
    except KeyError:
        known = ", ".join(stage.seconds) or "nothing"
        raise ConfigError(f"stages[{stage.name}].seconds.{tier} is missing (known: {known})") from None


def before(spent: Array) -> Array:
    """Return the sum over the stages before each cut."""
    return np.append(0.0, np.cumsum(spent))


def after(spent: Array) -> Array:
    """Return the sum over the stages after each cut."""
    return np.append(np.cumsum(spent[::-1])[::-1], 0.0)
