"""How a job gets its plan: find servers, let them prove themselves, measure, ask a policy."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from upriver.client.compare import Tolerance, tolerance
from upriver.client.options import Choices, JobOptions
from upriver.client.planning import (
    MEASURED_MICRO_BATCHES,
    LinkEstimate,
    LocalMeasurement,
    make_plan,
    measure_here,
    measure_link,
    measure_tail,
    unsplit_plan,
)
from upriver.client.pool import Health, ServerPool
from upriver.client.replan import Patience, Replanner
from upriver.client.servers import Gate, Question
from upriver.client.transport import ServerClient
from upriver.cost import CostModel, route_between
from upriver.engine.engine import Engine
from upriver.engine.fingerprint import fingerprint
from upriver.engine.read import read_samples
from upriver.errors import BadSample, ConfigError, DatasetError, UpriverError
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.profile.keep import Kept, Place, ProfileKey, load_profile, save_profile
from upriver.profile.live import LiveProfile
from upriver.program import Program
from upriver.program.split import Split
from upriver.protocol import Info
from upriver.types import Plan, Profile, Timings, Workload, require_finite

log = logging.getLogger("upriver")

ADAPTIVE = frozenset(POLICIES) - {"nosplit", "freeze", "min"}
"""Policies whose answer depends on what is measured."""

JOIN_S = 60.0
"""How long a job waits for servers that were just measured to be let in."""


class Planner:
    """From a split model to a plan, and the servers that carry it out.

    Args:
        servers: Gives a client for each server; may start one.
        dataset: As the user gave it.
        direct: The same, read over the metered link.
        choices: Routes of an earlier run decide the cut; ``exact="numeric"`` takes servers whose features
            differ by no more than a tolerance.
        tell: Told what is being done.
        patience: When a running job leaves its plan; None keeps it.
        bandwidth: What the link has lately carried.
    """

    def __init__(
        self,
        servers: Callable[[Dataset], list[ServerClient]],
        model: nn.Module,
        dataset: Dataset,
        direct: Dataset,
        parts: Split,
        options: JobOptions,
        choices: Choices,
        *,
        tell: Callable[[str], None],
        patience: Patience | None = None,
        bandwidth: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.patience, self.bandwidth = patience, bandwidth
        self.replanner: Replanner | None = None
        self.find_servers, self.model, self.dataset, self.direct = servers, model, dataset, direct
        self.parts, self.options, self.tell = parts, options, tell
        self.policy, self.replay = choices.policy, choices.replay
        self.allowed = _allowed(parts) if choices.exact == "numeric" else None
        self.engine = Engine(chain=dataset.chain, program=parts.program, micro_batch=options.micro_batch)
        self._here: LocalMeasurement | None = None
        self._model: CostModel | None = None
        self._not_used: list[str] = []
        self._keys: dict[str, ProfileKey] = {}
        self._kept: dict[str, Kept] = {}

    def plan(self, cut: int | Mapping[int, float] | None) -> tuple[Plan, ServerPool | None]:
        """Decide; the pool is None when no server is needed.

        Args:
            cut: A cut, or cuts with their shares of the samples, to take instead of the policy's.

        Raises:
            ConfigError: If ``cut`` is none that training allows.
            NoFeasibleCut: If no cut fits the memory.
        """
        start = self.dataset.chain.start
        if self.replay:
            cut = self._replayed_cut(cut)
        shares = None if cut is None else shares_of(cut, start, self.parts.freeze)
        if self.parts.program is None:
            log.warning("the model runs unsplit: %s", self.parts.why_not)
            return self._unsplit(self.policy, f"the model runs unsplit: {self.parts.why_not}"), None
        if (self.policy == "nosplit" and shares is None) or shares == {start: 1.0}:
            return self._unsplit("nosplit", "asked for: everything runs on the compute tier"), None
        return self._with_servers(shares)

    def _replayed_cut(self, cut: object) -> int:
        """The cut of the run to replay: that of the largest part, where it had several."""
        if cut is not None:
            raise ConfigError(f"the routes to replay decide the cut; cut must be None, got {cut!r}")
        for replayed in self.replay.cuts:
            first = self.dataset.chain.start + 1
            if not first <= replayed <= self.parts.freeze:
                reason = f": {self.parts.why_not}" if self.parts.why_not else ""
                has = f"{first}..{self.parts.freeze}{reason}"
                raise ConfigError(f"the run to replay used cut {replayed}, this model has {has}")
        return self.replay.cuts[0] if self.replay.cuts else self.dataset.chain.start

    def _unsplit(self, policy: str, why: str) -> Plan:
        return unsplit_plan(policy, self.dataset, stop=self.parts.freeze, why=why)

    def _with_servers(self, shares: Mapping[int, float] | None) -> tuple[Plan, ServerPool | None]:
        try:
            servers = self.find_servers(self.dataset)
        except ConfigError:
            raise
        except UpriverError as error:
            if self.replay:
                raise  # the plain way might give other bits than the server that is replayed
            log.warning("no near-data server, training straight from the store: %s", error)
            return self._unsplit(self.policy, f"no near-data server: {error}"), None
        self.replay = self.replay.on([server.url for server in servers])
        gate = self._gate()
        measured = self._measure(servers, gate)
        link = self._link(measured)
        if link is None:
            why = f"no server could be used when the job started: {'; '.join(self._not_used)}"
            plan = self._fixed(self._unsplit(self.policy, why), shares or {self.parts.freeze: 1.0}, why=why)
            return self._with_tolerance(plan, gate), self._pool(servers, gate, plan)
        plan = self._choose(measured, link)
        if shares is not None:
            asked = "is that of the run that is replayed" if self.replay else "was asked for"
            cuts = " and ".join(map(str, shares))
            plan = self._fixed(plan, shares, why=f"cut {cuts} {asked}")
        if not self._remote_cuts(plan) and not self._adapts(shares):
            for server in servers:
                server.close()
            return plan, None
        admitted = self._recheck([server for server, _ in measured], gate, plan)
        pool = self._pool(servers, gate, plan)
        pool.wait_joined(JOIN_S, admitted)
        if self._adapts(shares):
            self.replanner = self._make_replanner(plan, gate, pool, servers)
        if self._not_used:
            plan = replace(plan, why=f"{plan.why}; not used for now: {'; '.join(self._not_used)}")
        return self._with_tolerance(plan, gate), pool

    def _with_tolerance(self, plan: Plan, gate: Gate) -> Plan:
        """A numeric job says by how much features may differ, and by how much they did."""
        if self.allowed is None:
            return plan
        seen = ", ".join(f"{apart:.2g} at {url}" for url, apart in gate.distances.items())
        return replace(
            plan,
            why=f"{plan.why}; exact='numeric': features may differ by {self.allowed}; those of the canary "
            f"differed by (of the largest) {seen or 'nothing yet'}",
        )

    def _measure(
        self, servers: Sequence[ServerClient], gate: Gate
    ) -> list[tuple[ServerClient, list[Timings]]]:
        """Timings of the servers that pass the canary at the freeze point."""
        measured: list[tuple[ServerClient, list[Timings]]] = []
        for server in servers:
            try:
                self.tell(f"asking {server.url}")
                info = server.info()
                if not measured:
                    self.dataset.publish()
                kept = self._look_up(server, info)
                self.tell("using the profile of an earlier job" if kept else f"measuring {server.url}")
                times = 1 if kept else MEASURED_MICRO_BATCHES  # the canary must pass, whatever is known
                timings = [gate.measure(server, stop=self.parts.freeze) for _ in range(times)]
                measured.append((server, timings))
            except (BadSample, DatasetError):
                raise  # the same wherever it is computed
            except UpriverError as error:
                self._leave_out(server, error)
        return measured

    def _look_up(self, server: ServerClient, info: Info) -> Kept | None:
        """What an earlier job measured with this server, if it is kept."""
        program = self.parts.program
        if program is None:
            return None
        self._keys[server.url] = key = profile_key(self.dataset, program, server, info)
        kept = load_profile(
            key,
            stages=[stage.name for stage in program.stages],
            input_stages=[stage.name for stage in self.dataset.chain.stages],
        )
        if kept is not None:
            self._kept[server.url] = kept
        return kept

    def _leave_out(self, server: ServerClient, error: UpriverError) -> None:
        self._not_used.append(str(error))
        log.warning("server %s is not used for now: %s", server.url, error)

    def _link(self, measured: list[tuple[ServerClient, list[Timings]]]) -> LinkEstimate | None:
        """The link to the first server; those that fail the probe are taken off the list."""
        while measured:
            self.tell("measuring the link")
            try:
                return measure_link(measured[0][0])
            except UpriverError as error:
                self._leave_out(measured.pop(0)[0], error)
        return None

    def _adapts(self, shares: Mapping[int, float] | None) -> bool:
        """Whether the policy is asked again while the job runs."""
        return shares is None and self.patience is not None and self.policy in ADAPTIVE

    def _make_replanner(
        self, plan: Plan, gate: Gate, pool: ServerPool, servers: Sequence[ServerClient]
    ) -> Replanner | None:
        model, program, patience = self._model, self.parts.program, self.patience
        if model is None or program is None or patience is None:
            return None

        def prove(cuts: Sequence[int]) -> None:
            up = [s.url for s in pool.status() if s.health is Health.UP]
            asked = sorted(set(cuts) - {self.dataset.chain.start})
            gate.open_cuts(asked, [server for server in servers if server.url in up])

        return Replanner(
            self.policy,
            plan,
            LiveProfile(model.profile, model.cluster, samples=program.micro_batch),
            model.workload,
            patience=patience,
            prove=prove,
            bandwidth=self.bandwidth,
        )

    def _remote_cuts(self, plan: Plan) -> tuple[int, ...]:
        """The cuts at which servers are asked."""
        cuts = {*(route.cut for route in plan.routes), *self.replay.cuts}
        return tuple(sorted(cuts - {self.dataset.chain.start}))

    def _recheck(self, servers: Sequence[ServerClient], gate: Gate, plan: Plan) -> list[str]:
        """The canary at the chosen cuts, but for the one measured; addresses of those that pass."""
        gate.cuts = self._remote_cuts(plan)
        passed: list[str] = []
        for server in servers:
            try:
                for cut in gate.cuts:
                    if cut != self.parts.freeze:
                        self.tell(f"checking cut {cut} on {server.url}")
                        gate.measure(server, stop=cut)
                gate.vouch(server)
                passed.append(server.url)
            except UpriverError as error:
                self._leave_out(server, error)
        return passed

    def _choose(self, measured: Sequence[tuple[ServerClient, list[Timings]]], link: LinkEstimate) -> Plan:
        first, options = measured[0][0].url, self.options
        kept = self._kept.get(first)
        if kept is None and self._kept:
            self._here, self._kept = None, {}  # the server that is known has gone: measure after all
        here = self._measured_here()
        tail = measure_tail(self.model, self.parts, here.features.tensors, samples=options.micro_batch)
        workload = Workload(
            batch_size=options.batch_size, num_samples=len(options.order(len(self.dataset), 0).ids)
        )
        plan, profile, cluster = make_plan(
            self.policy,
            name=type(self.model).__name__,
            dataset=self.dataset,
            split=self.parts,
            here=here,
            there=measured[0][1],
            link=link,
            tail=tail,
            workload=workload,
            num_servers=len(measured),
            num_ranks=options.num_ranks,
            kept=kept,
        )
        if kept is None:
            save_profile(self._keys[first], profile, cluster)
        self._model = CostModel(profile, cluster, workload)
        return plan

    def _fixed(self, plan: Plan, shares: Mapping[int, float], *, why: str) -> Plan:
        """The same plan with other routes; what is known of their cost is kept."""
        start, stop = self.dataset.chain.start, self.parts.freeze
        routes = tuple(route_between(start, cut, stop, share=share) for cut, share in shares.items())
        return replace(
            plan,
            policy="fixed",
            routes=routes,
            predicted=self._model.evaluate(routes) if self._model is not None else None,
            why=why,
        )

    def _pool(self, servers: Sequence[ServerClient], gate: Gate, plan: Plan) -> ServerPool:
        gate.cuts = self._remote_cuts(plan)
        return ServerPool(servers, admit=gate.admit)

    def _gate(self) -> Gate:
        program = self.parts.program
        if program is None:
            raise UpriverError("a model that runs unsplit needs no servers")
        question = Question(
            dataset=self.dataset,
            program=program,
            seed=self.options.seed,
            on_bad_sample=self.options.on_bad_sample,
        )
        return Gate(
            question,
            self.engine,
            canary=self._canary(),
            reference=lambda: self._measured_here().features,
            allowed=self.allowed,
        )

    def _canary(self) -> tuple[int, ...]:
        """The first micro-batch of the first epoch."""
        return self.options.order(len(self.dataset), 0).micro_batches[0]

    def _measured_here(self) -> LocalMeasurement:
        if self._here is None:
            kept = next(iter(self._kept.values()), None)
            if kept is None:
                self.tell("measuring this side")
            self._here = measure_here(
                self.engine,
                self.direct,
                self._canary(),
                freeze=self.parts.freeze,
                seed=self.options.seed,
                on_bad_sample=self.options.on_bad_sample,
                times=MEASURED_MICRO_BATCHES if kept is None else 1,
                input_bytes=input_sizes(kept.profile) if kept is not None else None,
            )
        return self._here


def profile_key(dataset: Dataset, program: Program, server: ServerClient, info: Info) -> ProfileKey:
    """What names the profile of a program on this machine and a server."""
    return ProfileKey(
        program=program.digest,
        dataset=dataset.digest,
        micro_batch=program.micro_batch,
        storage=Place(
            host=urlsplit(server.url).hostname or "",
            device=info.device,
            threads=info.threads,
            workers=info.workers,
            versions={**info.fingerprint, "upriver": info.version},
        ),
        compute=Place(
            host=platform.node(),
            device=str(program.device),
            threads=torch.get_num_threads(),
            versions=fingerprint(program.device),
        ),
    )


def input_sizes(profile: Profile) -> dict[int, float]:
    """Position to the bytes of a sample there, after each input stage."""
    stages = profile.input_stages
    return {position: stage.out_bytes for position, stage in enumerate(stages, start=1 - len(stages))}


def shares_of(cut: object, first: int, last: int) -> dict[int, float]:
    """What a caller gave as cut, as cuts and their shares, the earliest first.

    Raises:
        ConfigError: If a cut does not lie in ``first..last``, or shares are not positive numbers of sum 1.
    """
    given: dict[Any, Any] = dict(cut) if isinstance(cut, Mapping) else {cut: 1.0}
    for each, share in given.items():
        if type(each) is not int or not first <= each <= last:
            raise ConfigError(f"cut must lie in {first}..{last} ({first} is unsplit), got {each!r}")
        require_finite(f"cut[{each}]", share, positive=True)
    if not math.isclose(sum(given.values()), 1.0, abs_tol=1e-6):
        raise ConfigError(f"shares of cuts must sum to 1, got {given!r}")
    return dict(sorted(given.items()))


def _allowed(parts: Split) -> Tolerance:
    """By how much features may differ: more where a program computes in half precision."""
    program = parts.program
    if program is None:
        return tolerance([])
    crossing = {value.spec.dtype for cut in range(program.num_stages + 1) for value in program.live(cut)}
    names = crossing | {getattr(program.graph, "autocast", None) or "float32"}
    return tolerance([getattr(torch, name) for name in names])


def example_of(model: nn.Module, dataset: Dataset, options: JobOptions) -> torch.Tensor:
    """A micro-batch of the right form, on the model's device.

    Of whole numbers it holds real samples: any others could be out of an embedding's range.
    """
    device = next(model.parameters(), torch.empty(0)).device
    spec = dataset.chain.output_spec()
    if spec is None:
        example = _real_example(dataset, options)
        spec = (example.dtype, tuple(example.shape[1:]))
        if not example.is_floating_point():
            return example.to(device)
    dtype, shape = spec
    generator = torch.Generator().manual_seed(0)
    return torch.randn((options.micro_batch, *shape), generator=generator).to(dtype).to(device)


def _real_example(dataset: Dataset, options: JobOptions) -> torch.Tensor:
    """The first samples of the dataset, repeated where it has fewer."""
    ids = list(range(min(len(dataset), options.micro_batch)))
    engine = Engine(chain=dataset.chain, program=None, micro_batch=len(ids))
    names = [ref.object for ref in dataset.locate(ids)]
    batch = engine.begin(
        read_samples(dataset, ids),
        ids,
        object_names=names,
        stop=0,
        seed=options.seed,
        epoch=0,
        on_bad_sample=options.on_bad_sample,
    )
    rows = batch.tensors[0]
    return torch.cat([rows] * -(-options.micro_batch // len(ids)))[: options.micro_batch]
