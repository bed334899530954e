"""Plan a job: find servers, verify them, measure both tiers, and ask a policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from upriver.control.plan_switching import PlanSwitcher
from upriver.control.server_choice import Health
from upriver.cost import CostModel, route_between
from upriver.errors import ConfigError, DoesNotFit, UpriverError
from upriver.finetune.calibration import batched_capture
from upriver.finetune.calibration.measurement import Calibration, Measurement
from upriver.finetune.calibration.server_gate import ServerGate
from upriver.finetune.options import AUTO, JobOptions
from upriver.finetune.planning.keep_planning import keep_plan
from upriver.finetune.planning.micro_batch_size import (
    Judge,
    advice,
    best_size,
    by_policy,
    by_routes,
    predicted,
)
from upriver.finetune.planning.plan_builder import make_plan, unsplit_plan, with_notes
from upriver.finetune.prefetch.replay import Routes
from upriver.finetune.replanner import Replanner
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.profile.builder import has_lines
from upriver.profile.live_profile import AtServers, LiveProfile
from upriver.program.split.split import Split
from upriver.protocol import Larger
from upriver.rpc.client import ServerClient
from upriver.rpc.server_pool import ServerPool, ServerStatus
from upriver.rpc.tolerance import Agreement, Mode, Tolerance, tolerance, tolerance_of
from upriver.types import CutRow, MicroBatch, Plan, Route, Workload

log = logging.getLogger("upriver")

ADAPTIVE = frozenset(POLICIES) - {"nosplit", "freeze", "min"}
"""Policies whose plan depends on measurements."""

JOIN_S = 60.0
"""Seconds that a job waits until the pool has admitted the servers that were just measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A job's first plan, and what carries it out.

    Attributes:
        pool: The servers; None if none is needed.
        agreement: Whether features must be equal to the bit.
        replay: Routes of an earlier run, on this job's servers.
        replanner: Asks the policy again; None keeps the plan.
        notes: Notes at the end of every plan's reason, whatever the policy and the plan.
        offers: Returns the current sizes at which servers may run several micro-batches at once.
        model: Costs of an epoch, as they were measured; None if nothing was.
    """

    plan: Plan
    pool: ServerPool | None
    agreement: Agreement
    replay: Routes
    replanner: Replanner | None
    notes: Sequence[str]
    offers: Callable[[], Sequence[Larger]]
    model: CostModel | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDecision:
    """A job's first plan as data: another process may make it for the one that carries it out.

    Attributes:
        admitted: Addresses of the servers that passed every canary; None if the plan needs no server.
        cuts: Cuts at which servers passed.
        distances: Largest difference of features seen, by address.
        notes: Notes at the end of every plan's reason.
        mode: Whether features must be equal to the bit; None if no server took part.
        inexact: Why a tolerance was accepted; empty if it was not.
        allowed: By how much features may differ; None asks for equal bits.
        measured: What the plan rests on, without its clients; None if nothing was measured.
        reference: The canary at the freeze point, as computed locally; None if no canary ran.
    """

    plan: Plan
    admitted: tuple[str, ...] | None
    cuts: tuple[int, ...]
    distances: Mapping[str, float]
    notes: tuple[str, ...]
    mode: Mode | None
    inexact: str
    allowed: Tolerance | None
    measured: Measurement | None
    reference: MicroBatch | None


class Planner:
    """Turn a split model into a plan and the servers that carry it out.

    Args:
        servers: Returns a client for each server; may start one.
        dataset: The dataset as the user gave it.
        direct: The same dataset, read over the metered link.
        options: Routes of an earlier run, or shares, decide the cut instead of the policy.
        tell: Receives progress messages.
        bandwidth: Returns the link's recent bandwidth.
        pace: Returns the seconds that the frozen part of a micro-batch takes where the job trains; None if
            this process measures it well enough.
        remarks: Notes for the plan.

    Attributes:
        measured: The measurement that the plan rests on; None if nothing was measured.
    """

    def __init__(
        self,
        servers: Callable[[Dataset], list[ServerClient]],
        model: nn.Module,
        dataset: Dataset,
        direct: Dataset,
        parts: Split,
        options: JobOptions,
        *,
        tell: Callable[[str], None],
        bandwidth: Callable[[], float | None] = lambda: None,
        pace: Callable[[], float | None] = lambda: None,
        remarks: Sequence[str] = (),
    ) -> None:
        self.bandwidth = bandwidth
        self.replanner: Replanner | None = None
        self.find_servers, self.dataset = servers, dataset
        self.parts, self.options = parts, options
        self.policy, self.asked, self.replay = options.policy, options.shares, options.replay
        self.agreement = agreement_for(options, parts)
        self.tell = tell
        self.workload = Workload(batch_size=options.step_samples, num_samples=len(options.order(0).ids))
        self.measured: Measurement | None = None
        self.notes: list[str] = []
        self._measuring: Calibration | None = None
        if parts.program is not None:
            self._measuring = Calibration(
                model,
                dataset,
                direct,
                parts,
                parts.program,
                options,
                agreement=self.agreement,
                tell=tell,
                pace=pace,
            )
        self._servers: Sequence[ServerClient] | None = None
        self._gate: ServerGate | None = None
        self._no_server = ""
        self._remarks = tuple(remarks)
        self._model: CostModel | None = None

    def plan(self) -> PlannedJob:
        """Return the plan and what carries it out.

        Raises:
            ConfigError: If training does not allow a requested cut.
            NoFeasibleCut: If no cut fits the memory.
        """
        try:
            return self._carried_out(self.decide())
        except BaseException:
            self.close()
            raise

    def decide(self) -> PlanDecision:
        """Return the plan as data; as :meth:`plan`."""
        plan, admitted = self._planned()
        if self.parts.program is not None and self.parts.note:
            plan = self._noted(plan, f"the frozen part ends where it does since {self.parts.note}")
        if self.options.prefix is not None:
            none = f"prefix={self.options.prefix!r} changes nothing, as the model runs unsplit"
            plan = self._noted(
                plan, none if self.parts.faster is None else f"features lie {self.parts.faster}"
            )
        measuring = self._measuring
        return PlanDecision(
            plan=plan,
            admitted=admitted,
            cuts=measuring.gate.cuts if measuring is not None else (),
            distances=dict(measuring.gate.distances) if measuring is not None else {},
            notes=tuple(self.notes),
            mode=self.agreement.mode,
            inexact=self.agreement.why,
            allowed=self.agreement.allowed,
            measured=replace(self.measured, servers=()) if self.measured is not None else None,
            reference=measuring.reference if measuring is not None else None,
        )

    def carry_out(self, decision: PlanDecision) -> PlannedJob:
        """Return the decision of another planner for the same job, and what carries it out.

        Raises:
            UpriverError: If its servers cannot be reached.
        """
        self.measured, self.notes = decision.measured, list(decision.notes)
        self.agreement.decided(decision.mode, decision.inexact, decision.allowed)
        if decision.admitted is not None and self._measuring is not None:
            self._servers = self.find_servers(self.dataset)
            self._measuring.take_over(
                decision.reference, cuts=decision.cuts, distances=decision.distances, passed=decision.admitted
            )
            if decision.measured is not None:
                profile, cluster = decision.measured.profile, decision.measured.cluster
                self._model = CostModel(profile, cluster, self.workload)
        return self._carried_out(decision)

    def _carried_out(self, decision: PlanDecision) -> PlannedJob:
        pool: ServerPool | None = None
        if decision.admitted is not None and self._measuring is not None and self._servers is not None:
            gate = self._measuring.gate
            pool = ServerPool(self._servers, admit=gate.admit)
            pool.wait_joined(JOIN_S, decision.admitted)
            if self._adapts(self._shares()) and self.measured is not None:
                self.replanner = self._make_replanner(decision.plan, gate, pool, self.measured)
        return PlannedJob(
            plan=decision.plan,
            pool=pool,
            agreement=self.agreement,
            replay=self.replay,
            replanner=self.replanner,
            notes=self.notes,
            offers=self.offers,
            model=self._model,
        )

    def _planned(self) -> tuple[Plan, tuple[str, ...] | None]:
        """Return the plan, and the addresses of admitted servers; None if it needs no server."""
        shares = self._shares()
        if self._measuring is None:
            log.warning("the model runs unsplit: %s", self.parts.why_not)
            return self._unsplit(self.policy, f"the model runs unsplit: {self.parts.why_not}"), None
        if not self._asks_servers(shares):
            return self._unsplit("nosplit", "asked for: everything runs on the compute tier"), None
        return self._with_servers(self._measuring, shares)

    def best_size(self) -> int:
        """Return the micro-batch size with the shortest predicted epoch.

        See `upriver.finetune.planning.micro_batch_size`. A plan that this planner makes afterwards rests on
        the same measurement.

        Returns:
            The present size if no server can be used, the model runs unsplit, or the cost of a call is
            unknown. In the last case the plan says so.
        """
        shares = self._shares()
        if self._measuring is None or not self._asks_servers(shares):
            return self.options.micro_batch
        try:
            measured = self._measure(self._measuring, shares)
        except BaseException:
            self.close()
            raise
        if measured is None:
            return self.options.micro_batch
        epochs = self._epochs(measured, shares)
        if not has_lines(measured.profile) and self.options.micro_batch in epochs:
            stays = f'micro_batch="{AUTO}" stays at {self.options.micro_batch}'
            self._remarks += (f"{stays}: stages were measured at one size only",)
            return self.options.micro_batch
        return best_size(epochs)

    def offers(self) -> tuple[Larger, ...]:
        """Return the current sizes at which servers may run several micro-batches at once."""
        return self._gate.offers if self._gate is not None else ()

    def close(self) -> None:
        """Close the server clients; used if no plan follows."""
        for server in self._servers or ():
            server.close()

    def _shares(self) -> Mapping[int, float] | None:
        """Return the requested cuts and their shares; None if the policy is to choose."""
        if self.replay:
            return {self._replayed_cut(): 1.0}
        first, last = self.dataset.chain.start, self.parts.freeze
        for cut in self.asked or ():
            if not first <= cut <= last:
                raise ConfigError(f"cut must lie in {first}..{last} ({first} is unsplit), got {cut!r}")
        return self.asked

    def _asks_servers(self, shares: Mapping[int, float] | None) -> bool:
        """Return whether the plan may be another one than running everything on the compute tier."""
        return self.policy != "nosplit" if shares is None else shares != {self.dataset.chain.start: 1.0}

    def _replayed_cut(self) -> int:
        """Return the cut of the run to replay: the most frequent one, if it had several."""
        for replayed in self.replay.cuts:
            first = self.dataset.chain.start + 1
            if not first <= replayed <= self.parts.freeze:
                reason = f": {self.parts.why_not}" if self.parts.why_not else ""
                has = f"{first}..{self.parts.freeze}{reason}"
                raise ConfigError(f"the run to replay used cut {replayed}, this model has {has}")
        return self.replay.cuts[0] if self.replay.cuts else self.dataset.chain.start

    def _unsplit(self, policy: str, why: str) -> Plan:
        return unsplit_plan(policy, self.dataset, stop=self.parts.freeze, why=why)

    def _with_servers(
        self, measuring: Calibration, shares: Mapping[int, float] | None
    ) -> tuple[Plan, tuple[str, ...] | None]:
        measured = self._measure(measuring, shares)
        servers, gate = self._servers, measuring.gate
        if servers is None:
            return self._unsplit(self.policy, f"no near-data server: {self._no_server}"), None
        self.replay = self.replay.on([server.url for server in servers])
        if measured is None:
            why = f"no server could be used when the job started: {'; '.join(measuring.not_used)}"
            if shares is None and self.policy in ADAPTIVE:
                self.close()
                return self._unsplit(self.policy, f"{why}; nothing was measured, so nothing is pushed"), None
            plan = self._fixed(self._unsplit(self.policy, why), shares or {self.parts.freeze: 1.0}, why=why)
            gate.cuts = self._remote_cuts(plan)
            return self._with_tolerance(plan, gate), ()
        plan = self._choose(measured, shares)
        if shares is not None:
            asked = "is that of the run that is replayed" if self.replay else "was asked for"
            cuts = " and ".join(map(str, shares))
            plan = self._fixed(plan, shares, why=f"cut {cuts} {asked}")
            plan = with_notes(plan, *measured.notes, *self._remarks)
        if not self._needs_servers(plan, shares):
            self.close()
            return plan, None
        if self._adapts(shares) or any(cut > 0 for cut in self._remote_cuts(plan)):
            self._add_larger(measuring, measured)
        plan, admitted = self._fitting(measuring, measured.servers, plan, fixed=shares is not None)
        if not self._needs_servers(plan, shares):
            self.close()
            return plan, None
        gate.cuts = self._remote_cuts(plan)
        for note in batched_capture.notes(gate.larger, gate.left_out):
            plan = self._noted(plan, note)
        if measuring.not_used:
            when = " for now" if measuring.may_return else ""
            plan = self._noted(plan, f"not used{when}: {'; '.join(measuring.not_used)}")
        return self._with_tolerance(plan, gate), tuple(admitted)

    def _measure(self, measuring: Calibration, shares: Mapping[int, float] | None) -> Measurement | None:
        """Find servers and measure, once; return None if no server can be used."""
        if self._servers is not None or self._no_server:
            return self.measured
        try:
            self._servers = self.find_servers(self.dataset)
        except ConfigError:
            raise
        except UpriverError as error:
            if self.replay:
                raise  # the plain way might give other bits than the server of the earlier run
            log.warning("no near-data server, training straight from the store: %s", error)
            self._no_server = str(error)
            return None
        self.measured = measuring.run(self._servers, self._judge(shares))
        return self.measured

    def _judge(self, shares: Mapping[int, float] | None) -> Judge:
        """Return a function that predicts epochs by the policy's own plan, or by the requested cuts."""
        if shares is None:
            return by_policy(self.policy, self.workload)
        return by_routes(self._routes(shares), self.workload)

    def _epochs(self, measured: Measurement, shares: Mapping[int, float] | None) -> dict[int, float]:
        """Return the predicted seconds of an epoch by micro-batch size."""
        return predicted(
            measured.profile,
            measured.cluster,
            self.workload,
            self._judge(shares),
            caps=measured.caps,
            per_request=self.options.prefetch.per_request,
        )

    def _with_tolerance(self, plan: Plan, gate: ServerGate) -> Plan:
        """Note in the plan how exact the job is, and the measured differences of features."""
        if self.agreement.allowed is None:
            return plan if self.agreement.exact == "bitwise" else self._noted(plan, str(self.agreement))
        of = " from those made here" if self.parts.faster is not None else ""
        seen = ", ".join(f"{apart:.2g} at {url}" for url, apart in gate.distances.items())
        return self._noted(
            plan,
            f"features may differ{of}: {self.agreement}; those of the canary differed by (of the largest) "
            f"{seen or 'nothing yet'}",
        )

    def _noted(self, plan: Plan, note: str) -> Plan:
        """Add a note to the plan; the note stays when the job switches to another plan."""
        self.notes.append(note)
        return with_notes(plan, note)

    def _adapts(self, shares: Mapping[int, float] | None) -> bool:
        """Return whether the policy is asked again while the job runs."""
        return shares is None and self.options.replanning.enabled and self.policy in ADAPTIVE

    def _needs_servers(self, plan: Plan, shares: Mapping[int, float] | None) -> bool:
        """Return whether any server is asked, now or later."""
        return bool(self._remote_cuts(plan)) or self._adapts(shares)

    def _add_larger(self, measuring: Calibration, measured: Measurement) -> None:
        """Add the program at larger sizes, at which servers must then pass the canary too."""
        if self.options.prefetch.adapt_batch:
            gate, found = measuring.gate, measuring.larger(measured.caps)
            gate.larger, gate.left_out = found.programs, list(found.left_out)
            self._gate = gate

    def _make_replanner(
        self, plan: Plan, gate: ServerGate, pool: ServerPool, measured: Measurement
    ) -> Replanner | None:
        model, program = self._model, self.parts.program
        if model is None or program is None:
            return None

        def up() -> list[ServerClient]:
            return [cast(ServerClient, client) for client in pool.up]

        def prove(cuts: Sequence[int]) -> None:
            further = sorted(set(cuts) - {self.dataset.chain.start})
            gate.open_cuts(further, up, refused=pool.refusal_log.add)

        live = LiveProfile(
            model.profile,
            model.cluster,
            samples=program.micro_batch,
            at_servers=self._at_servers(measured, gate),
        )

        rule = self.options.replanning
        return Replanner(
            PlanSwitcher(self.policy, plan, live, model.workload, gain=rule.gain, patience=rule.patience),
            live,
            prove=prove,
            bandwidth=self.bandwidth,
            capacity=lambda: self._capacity(pool.status()),
        )

    def _at_servers(self, measured: Measurement, gate: ServerGate) -> AtServers:
        """Return the job's load on each server while the servers are its bottleneck."""
        options, servers = self.options, len(measured.at_once)
        together = max((each.micro_batch for each in gate.larger), default=options.micro_batch)
        in_flight = options.prefetch.connections * options.num_ranks * (together // options.micro_batch)
        return AtServers(
            in_flight=in_flight / servers,
            at_once=sum(measured.at_once.values()) / servers,
            slowed=measured.slowed,
            micro_batch_s=measured.micro_batch_s,
        )

    def _capacity(self, servers: Sequence[ServerStatus]) -> float:
        """Return the present compute capacity of servers, relative to that of the measured ones.

        A new server counts 1. A server that refuses requests counts for the share of the time in which it
        accepts them: a job can ask it for no more.
        """
        known = self.measured.at_once if self.measured is not None else {}
        here = [server for server in servers if server.health in (Health.UP, Health.RESTING)]
        can = sum(known.get(server.url, 1) * server.available for server in here)
        return can / max(1, sum(known.values()))

    def _remote_cuts(self, plan: Plan) -> tuple[int, ...]:
        cuts = {*(route.cut for route in plan.routes), *self.replay.cuts}
        return tuple(sorted(cuts - {self.dataset.chain.start}))

    def _fitting(
        self, measuring: Calibration, servers: Sequence[ServerClient], plan: Plan, *, fixed: bool
    ) -> tuple[Plan, list[str]]:
        """Return the plan, and the addresses of servers that pass the canary at its cuts.

        All servers have passed at the freeze point, but an earlier stage's output may be larger. If no server
        has the memory for a cut, return the best plan without that cut, unless cuts are ``fixed``.
        """
        too_large: dict[int, DoesNotFit] = {}
        while True:
            tried = len(too_large)
            passed, failed = self._recheck(measuring, servers, plan, too_large)
            others = [row for row in plan.table if row.feasible and row.cut not in too_large]
            if passed or fixed or len(too_large) == tried or not others:
                break
            plan = self._at(plan, min(others, key=lambda row: row.cost.epoch_s), too_large)
        for server, error in failed.items():
            measuring.leave_out(server, error)
        return plan, passed

    def _recheck(
        self,
        measuring: Calibration,
        servers: Sequence[ServerClient],
        plan: Plan,
        too_large: dict[int, DoesNotFit],
    ) -> tuple[list[str], dict[ServerClient, UpriverError]]:
        """Run the canary at the chosen cuts, except at the freeze point, which was measured already.

        Args:
            too_large: Filled with the cuts for which a server lacks the memory, and its error.

        Returns:
            Addresses of the servers that pass, and the errors of the others.
        """
        gate = measuring.gate
        gate.cuts = self._remote_cuts(plan)
        passed, failed = list[str](), dict[ServerClient, UpriverError]()
        for server in servers:
            try:
                for cut in gate.cuts:
                    if cut != self.parts.freeze:
                        self.tell(f"checking cut {cut} on {server.url}")
                        try:
                            gate.measure(server, stop=cut)
                        except DoesNotFit as error:
                            too_large[cut] = error
                            raise
                for program in gate.larger:
                    self.tell(f"checking {program.micro_batch} samples at once on {server.url}")
                gate.prove_larger(server)
                gate.vouch(server.url)
                passed.append(server.url)
            except UpriverError as error:
                failed[server] = error
        return passed, failed

    def _at(self, plan: Plan, row: CutRow, too_large: Mapping[int, DoesNotFit]) -> Plan:
        """Return the same policy's plan at another cut, with a note about the last cut that did not fit."""
        *_, (cut, error) = too_large.items()
        note = f"no server has the memory for cut {cut} ({error}), so it is cut {row.cut}"
        log.warning("%s", note)
        return self._noted(replace(plan, routes=self._routes({row.cut: 1.0}), predicted=row.cost), note)

    def _choose(self, measured: Measurement, shares: Mapping[int, float] | None) -> Plan:
        self.notes = [*measured.notes, *self._remarks]
        if shares is None and has_lines(measured.profile) and not self.options.chosen:
            self.notes += advice(self._epochs(measured, shares), self.options.micro_batch)
        profile, cluster = measured.profile, measured.cluster
        self._model = CostModel(profile, cluster, self.workload)
        plan = make_plan(
            self.policy, profile=profile, cluster=cluster, workload=self.workload, notes=self.notes
        )
        return plan if shares is not None else self._with_keeping(plan, self._model)

    def _with_keeping(self, plan: Plan, model: CostModel) -> Plan:
        """Say in the plan what keeping features saves, if the job keeps them at the freeze point."""
        options = self.options
        if options.keep is None or self.parts.faster is not None or options.exact == "numeric":
            return plan
        found = keep_plan(
            model,
            options.keep,
            plan.routes,
            chain=self.dataset.chain,
            views=options.sampling.views,
            epochs=options.epochs,
        )
        return plan if found is None else with_notes(plan, found.why.rstrip("."))

    def _routes(self, shares: Mapping[int, float]) -> tuple[Route, ...]:
        start, stop = self.dataset.chain.start, self.parts.freeze
        return tuple(route_between(start, cut, stop, share=share) for cut, share in shares.items())

    def _fixed(self, plan: Plan, shares: Mapping[int, float], *, why: str) -> Plan:
        """Return the plan with other routes, and their predicted cost if a cost model exists."""
        routes = self._routes(shares)
        return replace(
            plan,
            policy="fixed",
            routes=routes,
            predicted=self._model.evaluate(routes) if self._model is not None else None,
            why=why,
        )


def agreement_for(options: JobOptions, parts: Split) -> Agreement:
    """Return how exact a job's features must be; the tolerance is larger where they have half precision."""
    return Agreement(options.exact, tolerance([]) if parts.program is None else tolerance_of(parts.program))
