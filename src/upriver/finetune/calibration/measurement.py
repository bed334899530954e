"""Measure before a job begins: usable servers, costs of stages on both tiers, and the link.

Each server first computes the canary, which admits it and gives the first timings. Then model stages are
measured at a second micro-batch size on both tiers, as the time budget allows. This separates the cost of a
call from the cost of a sample. A profile that an earlier job cached replaces these measurements; it is scaled
to the present slowdown of both tiers, which the canary shows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

from torch import nn

from upriver.engine.engine import Engine
from upriver.errors import BadSample, DatasetError, NotAuthorized, NotExact, Overloaded, UpriverError
from upriver.finetune.calibration.batched_capture import LargerCaptures, captured
from upriver.finetune.calibration.local_canary import LocalCanary
from upriver.finetune.calibration.second_size import SecondSize
from upriver.finetune.calibration.server_gate import JobRequirements, ServerGate
from upriver.finetune.calibration.time_budget import Stopwatch, affordable_repeats, allowed_s
from upriver.finetune.options import JobOptions
from upriver.finetune.planning.micro_batch_size import Judge
from upriver.finetune.planning.plan_builder import (
    MEASURED_MICRO_BATCHES,
    LocalMeasurement,
    measure_tail,
    profile_and_cluster,
)
from upriver.pipeline import Dataset
from upriver.profile.builder import has_lines, with_lines, with_peaks
from upriver.profile.live_profile import worker_s
from upriver.profile.memory.estimator import known_peaks
from upriver.profile.profile_cache import (
    CachedProfile,
    ProfileKey,
    as_of_today,
    load_profile,
    save_profile,
    slowdown,
)
from upriver.program.graph.executor import Program
from upriver.program.split.split import Split
from upriver.protocol import Caps, Info
from upriver.retry import Backoff
from upriver.rpc.client import ServerClient
from upriver.rpc.link_probe import measure_link
from upriver.rpc.load_report import UNCHANGED, busy_s, expected_waits, notes, profile_key, waiting
from upriver.rpc.tolerance import Agreement
from upriver.types import Cluster, Link, MicroBatch, Profile, Tier, Timings

log = logging.getLogger("upriver")

CANARY = "canary"
"""The part that is not measuring: every server must pass, which includes loading the program there."""

FULL_S = 30.0
"""Seconds that a new job waits for servers without room, if there are no others: as long as a server lets
requests wait before it rejects them."""

LEAST_WAIT_S = 0.1
"""Least seconds between two requests to a full server, even if the server asks for less: a smaller value is
an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The measurements that a plan rests on.

    Attributes:
        profile: Profile with present seconds.
        cluster: Cluster with present seconds.
        servers: Servers that passed the canary.
        at_once: Number of micro-batches that each server computes at once, by address.
        caps: Limits of the first server.
        kept: Whether an earlier job measured the stages.
        seconds: Duration of each part: ``canary``, ``stages``, ``link``, ``tail``, ``memory``, ``second
            size``.
        slowed: How many times as long micro-batches take on the servers because of other jobs; included in
            the cluster's load.
        micro_batch_s: Seconds for which one of this job's micro-batches occupies a server's worker.
    """

    profile: Profile
    cluster: Cluster
    servers: tuple[ServerClient, ...]
    at_once: Mapping[str, int]
    caps: Caps
    kept: bool
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    slowed: float = 1.0
    micro_batch_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds spent on measuring: all parts but the canary."""
        return sum(seconds for part, seconds in self.seconds.items() if part != CANARY)

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in self.seconds.items())
        how = "two sizes" if has_lines(self.profile) else "one size"
        return f"measured at {how}{' by an earlier job' if self.kept else ''}: {parts}"


@dataclass(kw_only=True, slots=True)
class _Passed:
    """A server that has computed the canary.

    Attributes:
        waits: Seconds that one more micro-batch would have waited for a worker, while this job asked for
            none.
    """

    client: ServerClient
    info: Info
    timings: list[Timings] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def at_once(self) -> int:
        """Micro-batches that it computes at once: workers share a device, but not a core."""
        return self.info.workers if self.info.device == "cpu" else self.info.devices


class Calibration:
    """Measure the servers, the link and the local machine for one job.

    Args:
        model: Model that ``parts`` is the split of; needed for its tail and for a second size.
        dataset: The dataset as the user gave it.
        direct: The same dataset, read over the metered link.
        program: The frozen part.
        agreement: Whether features must be equal to the bit.
        pace: Returns the seconds that the frozen part of a micro-batch takes where the job trains; None if
            this process measures it well enough.

    Attributes:
        not_used: Why other servers are not used.
        may_return: Whether one of them may be used later although nobody changes anything.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        direct: Dataset,
        parts: Split,
        program: Program,
        options: JobOptions,
        *,
        agreement: Agreement,
        tell: Callable[[str], None],
        pace: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._pace = pace
        self._model, self._dataset, self._direct = model, dataset, direct
        self._parts, self._program, self._options = parts, program, options
        self._tell = tell
        self._canary = LocalCanary(
            engine=Engine(chain=dataset.chain, program=program, micro_batch=options.micro_batch),
            dataset=direct,
            ids=options.order(0).micro_batches[0],
            freeze=parts.freeze,
            seed=options.seed,
            on_bad_sample=options.sampling.on_bad_sample,
        )
        self._here: LocalMeasurement | None = None
        self._keys: dict[str, ProfileKey] = {}
        self._kept: dict[str, CachedProfile] = {}
        self._clock = Stopwatch()
        self.not_used: list[str] = []
        self.may_return = False
        self._inexact: dict[ServerClient, NotExact] = {}
        question = JobRequirements(
            dataset=dataset, program=program, seed=options.seed, on_bad_sample=options.sampling.on_bad_sample
        )
        self.gate = ServerGate(
            question,
            self._canary,
            reference=lambda: self._measured_here().features,
            agreement=agreement,
            values=parts.tail.values,
        )

    @property
    def reference(self) -> MicroBatch | None:
        """The canary at the freeze point, as computed locally; None if it has not run."""
        return self._here.features if self._here is not None else None

    def take_over(
        self,
        reference: MicroBatch | None,
        *,
        cuts: tuple[int, ...],
        distances: Mapping[str, float],
        passed: Sequence[str],
    ) -> None:
        """Go on with what another process measured for the same job.

        Args:
            reference: The canary at the freeze point; None lets this process run it when it is needed.
            cuts: Cuts at which servers passed.
            distances: Largest difference of features seen, by address.
            passed: Addresses of the servers that passed.
        """
        if reference is not None:
            self._here = LocalMeasurement(features=reference, timings=(), input_bytes={})
        self.gate.cuts, self.gate.distances = cuts, dict(distances)
        for url in passed:
            self.gate.vouch(url)

    def run(self, servers: Sequence[ServerClient], judge: Judge) -> Measurement | None:
        """Measure; return None if no server can be used.

        Args:
            judge: Predicts the epoch time that sets the budget.
        """
        passed = self._let_in(servers)
        link = self._link(passed)
        if link is None:
            return None
        first = passed[0]
        kept = self._kept.get(first.client.url)
        if kept is None and self._kept:
            self._here, self._kept = None, {}  # the cached profile's server is gone: measure after all
        profile, cluster = self._put_together(passed, link, kept)
        factors = self._factors(kept, first)
        profile = as_of_today(profile, factors)
        lined = None if has_lines(profile) else self._with_lines(first, profile, cluster, judge)
        profile = self._at_pace(lined or profile)
        if kept is None or lined is not None:
            save_profile(self._keys[first.client.url], profile, cluster)
        slowed = self._waiting(passed)
        measured = Measurement(
            profile=profile,
            cluster=cluster,
            servers=tuple(each.client for each in passed),
            at_once={each.client.url: each.at_once for each in passed},
            caps=first.info.caps,
            kept=kept is not None and lined is None,
            seconds=dict(self._clock.seconds),
            notes=tuple(notes(factors, slowed)),
            slowed=slowed,
            micro_batch_s=mean(worker_s(each.timings[-1]) for each in passed),
        )
        log.info("%s", measured)
        return measured

    def _at_pace(self, profile: Profile) -> Profile:
        """Return the profile with the compute tier's seconds as where the job trains."""
        there_s = self._pace()
        here_s = min(
            sum(seconds for position, seconds in timings.stages.items() if position > 0)
            for timings in self._measured_here().timings
        )
        if there_s is None or here_s <= 0:
            return profile
        ratio, tail = there_s / here_s, profile.tail
        scaled = as_of_today(profile, {Tier.COMPUTE: ratio})
        return replace(scaled, tail=replace(tail, seconds=(tail.seconds[0] * ratio, tail.seconds[1] * ratio)))

    def larger(self, caps: Caps) -> LargerCaptures:
        """Capture the program at larger sizes, where servers accept them and the capture succeeds."""
        return captured(
            self._model,
            self._direct,
            self._parts,
            self._options,
            caps=caps,
            tell=self._tell,
        )

    def _let_in(self, servers: Sequence[ServerClient]) -> list[_Passed]:
        """Return servers that pass the canary at the freeze point, with its timings.

        If none passes but some only lack room now, ask those again for a while. If none gives equal bits,
        and nothing asks for them, ask again within the tolerance.

        Raises:
            NotExact: If equal bits were asked for, and all servers answer and none gives them.
        """
        agreement, passed = self.gate.agreement, self._round(servers)
        inexact = dict(self._inexact)
        if inexact and not passed:
            first = str(next(iter(inexact.values())))
            if agreement.exact == "auto" and agreement.try_tolerance(first):
                self._inexact.clear()
                passed = self._round(list(inexact))
                agreement.withdraw()
            elif agreement.mode == "bitwise" and len(inexact) == len(servers):
                raise NotExact(f"{first}; exact='auto' accepts a tolerance")
        for server, error in self._inexact.items():
            self.leave_out(server, error)
        return passed

    def _round(self, servers: Sequence[ServerClient]) -> list[_Passed]:
        """Return the servers that pass now, or within a while if all lack room."""
        until = time.monotonic() + FULL_S
        passed, full = self._ask(servers)
        while full and not passed:
            wait_s = max(LEAST_WAIT_S, min(error.retry_after_s for error in full.values()))
            if time.monotonic() + wait_s > until:
                break
            self._tell(f"waiting for room at {', '.join(server.url for server in full)}")
            time.sleep(Backoff().spread_s(wait_s))
            passed, full = self._ask(list(full))
        for server, error in full.items():
            self.leave_out(server, error)
        return passed

    def _ask(self, servers: Sequence[ServerClient]) -> tuple[list[_Passed], dict[ServerClient, Overloaded]]:
        """Return the servers that pass the canary, and those that have no room now."""
        passed: list[_Passed] = []
        full: dict[ServerClient, Overloaded] = {}
        for server in servers:
            try:
                self._tell(f"asking {server.url}")
                info = server.info()
                if not passed:
                    self._dataset.publish()
                kept = self._look_up(server, info)
                self._tell("using the profile of an earlier job" if kept else f"measuring {server.url}")
                passed.append(self._canaries(_Passed(client=server, info=info), kept))
            except (BadSample, DatasetError):
                raise  # the same wherever it is computed
            except Overloaded as error:
                full[server] = error
            except NotExact as error:
                self._inexact[server] = error
            except UpriverError as error:
                self.leave_out(server, error)
        return passed, full

    def _canaries(self, server: _Passed, kept: CachedProfile | None) -> _Passed:
        """Run the canary, and repeat it to measure, or if it shows a changed speed.

        The canary must pass even if a cached profile exists.
        """
        with self._clock.part(CANARY):
            self._run_canary(server)
        with self._clock.part("stages"):
            for _ in range(1, MEASURED_MICRO_BATCHES):
                if kept is None or self._slowdown(kept, Tier.STORAGE, server.timings) > UNCHANGED:
                    self._run_canary(server)
        return server

    def _run_canary(self, server: _Passed) -> None:
        waits = expected_waits(server.client)
        server.timings.append(self.gate.measure(server.client, stop=self._parts.freeze))
        server.waits += waits

    def _look_up(self, server: ServerClient, info: Info) -> CachedProfile | None:
        """Return the cached profile that an earlier job measured with this server, if any."""
        self._keys[server.url] = key = profile_key(self._dataset.digest, self._program, server, info)
        kept = load_profile(
            key,
            stages=[stage.name for stage in self._program.stages],
            input_stages=[stage.name for stage in self._dataset.chain.stages],
        )
        if kept is not None:
            self._kept[server.url] = kept
        return kept

    def leave_out(self, server: ServerClient, error: UpriverError) -> None:
        """Note that a server cannot be used now."""
        reason = str(error)
        self.not_used.append(reason if server.url in reason else f"{server.url}: {reason}")
        for_good = isinstance(error, NotAuthorized)
        self.may_return = self.may_return or not for_good
        log.warning("a server is not used%s: %s", "" if for_good else " for now", self.not_used[-1])

    def _link(self, passed: list[_Passed]) -> Link | None:
        """Measure the link to the first server; remove servers that fail the probe."""
        while passed:
            self._tell("measuring the link")
            try:
                with self._clock.part("link"):
                    return measure_link(passed[0].client)
            except UpriverError as error:
                self.leave_out(passed.pop(0).client, error)
        return None

    def _measured_here(self) -> LocalMeasurement:
        if self._here is None:
            kept = next(iter(self._kept.values()), None)
            if kept is None:
                self._tell("measuring this side")
            self._here = self._run_here(kept)
            self._canary.release()
        return self._here

    def _run_here(self, kept: CachedProfile | None) -> LocalMeasurement:
        """Run the canary locally, as often as on a server; the first run counts as the canary's."""
        with self._clock.part(CANARY):
            features, first = self._canary.run()
        with self._clock.part("stages"):
            if kept is None:
                again, input_bytes = self._canary.run_in_steps()
                return LocalMeasurement(features=features, timings=(first, again), input_bytes=input_bytes)
            timings = [first]
            if self._slowdown(kept, Tier.COMPUTE, timings) > UNCHANGED:
                timings.append(self._canary.run()[1])
        known = input_sizes(kept.profile)
        return LocalMeasurement(features=features, timings=tuple(timings), input_bytes=known)

    def _put_together(
        self, passed: Sequence[_Passed], link: Link, kept: CachedProfile | None
    ) -> tuple[Profile, Cluster]:
        here, options = self._measured_here(), self._options
        with self._clock.part("tail"):
            tail = measure_tail(
                self._model,
                self._parts,
                self._parts.tail.values.as_read(here.features.tensors),
                samples=options.micro_batch,
                batch_size=options.step_samples,
            )
        profile, cluster = profile_and_cluster(
            name=type(self._model).__name__,
            dataset=self._dataset,
            stored_bytes=float(self._dataset.sizes(options.rows).mean()),
            program=self._program,
            here=here,
            there=passed[0].timings,
            link=link,
            tail=tail,
            at_once=sum(each.at_once for each in passed),
            num_workers=options.prefetch.worker_threads,
            # Every rank sends as much work to the same servers, and all wait for other jobs' work.
            load=options.num_ranks / sum(each.at_once for each in passed) * self._waiting(passed),
            kept=kept,
        )
        if kept is None:
            with self._clock.part("memory"):
                profile = with_peaks(profile, known_peaks(self._program))
        return profile, cluster

    def _slowdown(self, kept: CachedProfile, tier: Tier, timings: Sequence[Timings]) -> float:
        return slowdown(kept.profile, tier, timings, samples=self._options.micro_batch)

    def _factors(self, kept: CachedProfile | None, first: _Passed) -> dict[Tier, float]:
        """Return how much slower each tier's stages are than the cached ones; leave out small changes."""
        if kept is None:
            return {}
        seen = {Tier.STORAGE: first.timings, Tier.COMPUTE: self._measured_here().timings}
        found = {tier: self._slowdown(kept, tier, timings) for tier, timings in seen.items()}
        return {tier: by for tier, by in found.items() if not 1 / UNCHANGED <= by <= UNCHANGED}

    def _waiting(self, passed: Sequence[_Passed]) -> float:
        """Return how many times as long micro-batches take on the servers because of other jobs' work.

        A server runs micro-batches in the order of arrival. This job's share is therefore its micro-batches
        in flight over those and the waiting ones. Seconds of stages include no waiting, so nothing counts
        twice. Other ranks of this job are counted separately.
        """
        if self._options.num_ranks > 1:
            return 1.0
        return mean(
            waiting(
                each.waits,
                busy_s(each.timings[-1]) / each.at_once,
                in_flight=self._options.prefetch.connections,
            )
            for each in passed
        )

    def _with_lines(
        self, server: _Passed, profile: Profile, cluster: Cluster, judge: Judge
    ) -> Profile | None:
        """Return the profile with model stages measured at two sizes; None if that is too slow or fails."""
        epoch_s = judge(profile, cluster)
        if epoch_s is None or self._options.prefix == "compiled":  # another size would have to be compiled
            return None
        second = SecondSize(self._model, self._direct, self._parts, self._program, self._options)
        spent = sum(seconds for part, seconds in self._clock.seconds.items() if part != CANARY)
        repeats = affordable_repeats(
            allowed_s(epoch_s) - spent,
            once_s=second.once_s(cluster),
            turn_s=second.turn_s(profile) + 2 * median(server.waits or [0.0]),
        )
        if repeats is None:
            log.debug("a second size of micro-batch takes too long for epochs of %.3f s", epoch_s)
            return None
        self._tell(f"measuring micro-batches of {second.size}, too")
        try:
            with self._clock.part("second size"):
                return with_lines(profile, second.measure(server.client, repeats=repeats))
        except UpriverError as error:
            log.info("stages are known at one size of micro-batch alone: %s", error)
            return None


def input_sizes(profile: Profile) -> dict[int, float]:
    """Return the bytes of a sample after each input stage, by position."""
    stages = profile.input_stages
    return {position: stage.out_bytes for position, stage in enumerate(stages, start=1 - len(stages))}
