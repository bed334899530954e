"""Track one server as a device sees it: its readiness, its costs, its link and its load.

A thread checks the server, probes the link and asks for the load, like LoADPart's runtime profiler (ICDCS
2022, section IV). Recent requests that showed the same values replace a probe or a query. A failed server is
left alone for growing pauses and then checked again like a new one. A server that refused a network is left
alone for that network only.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from upriver._threads.background import BackgroundThread
from upriver.control.partition import OwnLoad, ServerConditions, device_is_better, link_has_changed
from upriver.control.server_choice import is_lost
from upriver.engine.fingerprint import flags
from upriver.errors import Forbidden, NotExact, Overloaded, ProgramNotFound, UpriverError
from upriver.inference.costs import CutCosts, crossing_bytes
from upriver.inference.exchange import Exchange, ExchangeResult
from upriver.inference.server_check import BUSY, AdmittedNetwork, admit, canary, probe
from upriver.inference.uplink import Uplink
from upriver.link import LEAST_PROBE, MOST_PROBE_SHARE, ROUND_TRIPS, TRANSFERS, LinkEstimator
from upriver.program.capture.whole_model import CapturedModel
from upriver.retry import Backoff, CircuitBreaker
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.server_verification import ServerVerifier
from upriver.rpc.tolerance import Agreement
from upriver.text import error_text, said
from upriver.types import MOST_FACTOR, require_finite

log = logging.getLogger("upriver")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause after a server failed or refused a network."""

SOONER = 0.1
"""Fraction of ``load_s`` between load queries while the load keeps requests away, and of ``probe_s`` between
probes while the link does: no answer tells then that the server is free, or the link wide, again."""

OF_ONE = (ProgramNotFound, Forbidden)
"""Errors about one program during the check of a server. The server may have other programs, or receive this
one from another client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTuning:
    """Options for following the servers and for preparing cuts; the defaults are LoADPart's.

    Attributes:
        probe_s: Interval between probes of the link to a server, where no request has shown its rate (5 s:
            LoADPart, section V-A); down to a tenth of that where only the link keeps requests away.
        load_s: Interval between queries of a server's load, likewise (10 s); a tenth of that where only the
            load keeps requests away.
        window: Transfers from which a link is estimated.
        cached_cuts: Largest number of cuts that `Offload.warm` prepares. LoADPart's evaluation uses at most
            four cuts of a network.
    """

    probe_s: float = 5.0
    load_s: float = 10.0
    window: int = TRANSFERS
    cached_cuts: int = 8

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        require_finite("probe_s", self.probe_s, positive=True)
        require_finite("load_s", self.load_s, positive=True)
        validation.whole("window", self.window)
        validation.whole("cached_cuts", self.cached_cuts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """A network to request from the server, and the pauses after refusals of that network."""

    captured: CapturedModel
    device_s: Sequence[float]
    breaker: CircuitBreaker


class RemoteServer:
    """Connect a device to one server.

    Args:
        client: Client of the server; closed with this object.
        uplink: Shared with the device's other servers.
        push: Whether to send the program to a server that lacks it.
        agreement: Whether the server's bits must equal the device's; shared with the device's other servers.

    Attributes:
        link: Estimate of the link up to the server.
        may_decide: Whether this server alone may be the reason for which the agreement becomes a tolerance:
            once all servers have been asked for equal bits.
    """

    def __init__(
        self,
        client: ServerClient,
        tuning: OffloadTuning,
        uplink: Uplink | None = None,
        *,
        push: bool = True,
        agreement: Agreement,
    ) -> None:
        self.link = LinkEstimator.of_requests(tuning.window)
        self._client, self._tuning, self._uplink = client, tuning, uplink or Uplink()
        self.may_decide = False
        self._push, self._agreement = push, agreement
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted: dict[str, _Form] = {}
        self._tried: set[str] = set()
        self._costs: dict[str, CutCosts] = {}
        self._looked_up: set[tuple[str, int]] = set()
        self._provisional: set[str] = set()
        self._load, self._wait_s, self._machine = 1.0, 0.0, 0.0
        self._own: OwnLoad | None = None
        self._misses: Counter[str] = Counter()
        self._probed_at = self._shown_at = self._heard_at = self._doubted_at = -math.inf
        self._asked_at: dict[str, float] = {}
        self._load_sought = self._probe_sought = False
        self._flags = flags()
        self._backoff = Backoff(base_s=PAUSE_S, cap_s=LONGEST_PAUSE_S)
        self._breaker = CircuitBreaker(self._backoff)
        self._closed, self._ended, self._wake = False, False, threading.Event()
        self._thread = BackgroundThread(self._keep_up, name="offload")
        self._uplink.add_listener(self._request_ended)

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    @property
    def lacks_program(self) -> ProgramNotFound | None:
        """The error of a server that lacks a program and must not be sent it; None where there is none."""
        if self._push:
            return None
        errors = [form.breaker.error for form in list(self._wanted.values())]
        return next((error for error in errors if isinstance(error, ProgramNotFound)), None)

    @property
    def inexact(self) -> NotExact | None:
        """The error of a server whose results differ by more than is allowed; None where there is none."""
        errors = [form.breaker.error for form in list(self._wanted.values())]
        return next((error for error in errors if isinstance(error, NotExact)), None)

    def why_not(self, captured: CapturedModel) -> str:
        """Return the reason that the server is not asked for a network; empty where it is asked."""
        if self.costs(captured) is not None:
            return ""
        error = self._breaker.error or self._wanted[captured.program.digest].breaker.error
        if error is None:
            return f"{self.url} is not let in yet"
        text = said(str(error))
        return text if self.url in text else f"{self.url}: {text}"

    # ------------------------------------------------------------------------------------- requests

    def serve(self, captured: CapturedModel, device_s: Sequence[float]) -> None:
        """Have the thread prepare a network on the server."""
        with self._lock:
            self._wanted[captured.program.digest] = _Form(
                captured=captured, device_s=device_s, breaker=CircuitBreaker(self._backoff)
            )
        if self._thread.ident is None:
            self._thread.start()
        self._wake.set()

    def ask_again(self) -> None:
        """Check the server again at once for the networks for which it was not exact enough."""
        with self._lock:
            for digest, form in self._wanted.items():
                if isinstance(form.breaker.error, NotExact):
                    self._wanted[digest] = replace(form, breaker=CircuitBreaker(self._backoff))
                    self._tried.discard(digest)
        self._wake.set()

    def wait(self, seconds: float | None, captured: CapturedModel | None = None) -> bool:
        """Wait until the server has passed or failed the check of a network; return whether it has.

        Without a network, wait for all requested ones, including those added during the wait.
        """

        def done() -> bool:
            wanted = self._wanted.keys() if captured is None else {captured.program.digest}
            return self._ended or wanted <= self._tried

        with self._lock:
            return self._changed.wait_for(done, seconds)

    def costs(self, captured: CapturedModel) -> CutCosts | None:
        """Return the costs of a network on this server; None where the network may not be requested now."""
        self._heed_flags()
        digest = captured.program.digest
        now = time.monotonic()
        if self._breaker.left_s(now) or self._wanted[digest].breaker.left_s(now):
            return None
        return self._costs.get(digest)

    def _heed_flags(self) -> None:
        """Check the server again at once, if this process's flags changed since the last check."""
        now = flags()
        if now == self._flags:
            return
        with self._lock:
            if now == self._flags:  # another thread was first
                return
            self._flags, self._costs, self._looked_up = now, {}, set()
            self._wanted = {
                digest: replace(form, breaker=CircuitBreaker(self._backoff))
                for digest, form in self._wanted.items()
            }
        self._wake.set()

    def now(self, costs: CutCosts) -> ServerConditions | None:
        """Return the present link and server state for a network; None where the link is unknown."""
        download, upload = self._client.meter.observed_bandwidth(), self.link.bandwidth()
        if upload is None:
            return None
        now_s, tuning = time.monotonic(), self._tuning
        return ServerConditions(
            upload_bytes_per_s=upload,
            download_bytes_per_s=download,
            rtt_s=(self.link.latency_s or 0.0) + costs.handling.fixed_s(download),
            load=self._load,
            own=self._own,
            wait_s=self._wait_s,
            misses=self._misses[costs.program.digest],
            silent_s=now_s - self._asked_at.get(costs.program.digest, now_s),
            old=now_s - self._shown_at > 2 * tuning.probe_s or now_s - self._heard_at > 2 * tuning.load_s,
        )

    def ask(
        self, captured: CapturedModel, cut: int, tensors: Sequence[torch.Tensor], *, process: str
    ) -> Exchange:
        """Make a request for the stages from a cut on, to the server process that passed the check."""
        return Exchange(self._client, captured, cut, tensors, process=process)

    def ask_load_soon(self) -> None:
        """Have the load queried soon, as it kept a request away."""
        if not self._load_sought:
            self._load_sought = True
            self._wake.set()

    def probe_soon(self) -> None:
        """Have the link probed soon, as it kept a request away."""
        if not self._probe_sought:
            self._probe_sought = True
            self._wake.set()

    def under_way(self) -> AbstractContextManager[None]:
        """Mark a request as under way. Probes wait, since both would see only a part of the link."""
        return self._uplink.in_use()

    def answered(self, captured: CapturedModel, cut: int, finished: ExchangeResult) -> None:
        """Update the link and the load from an answer.

        The first answer from a cut says nothing of the link: the server has looked up what crosses there. k
        is a median over some seconds. The answer's own factor counts along with it until k is another one.
        """
        program, costs = captured.program, self._costs.get(captured.program.digest)
        shown = False
        alone_s = 0.0 if costs is None else float(costs.sums.server_s[cut])
        if costs is not None and (program.digest, cut) in self._looked_up:
            crossing, handling = crossing_bytes(program, cut), costs.handling
            packing_s = (handling.encode_s_per_byte + handling.decode_s_per_byte) * crossing
            up_s = finished.up_s - handling.front_s - packing_s
            shown = self.link.add_transfer(crossing, up_s, request=True)
        with self._lock:
            self._load, self._wait_s = finished.timings.k, finished.timings.expected_wait_s
            now = time.monotonic()
            self._own = None
            if alone_s > 0:
                factor = sum(finished.timings.stages.values()) / alone_s
                load = min(max(1.0, factor), MOST_FACTOR)
                self._own = OwnLoad(load=load, server_s=alone_s, told=self._load)
            self._asked_at[program.digest] = now
            # Only /v1/load tells whether the machine is free again.
            self._heard_at = self._heard_at if self._provisional else now
            self._load_sought = False
            if shown:
                self._shown_at = now
            self._breaker.succeed(now)
            self._wanted[program.digest].breaker.succeed(now)
            self._looked_up.add((program.digest, cut))
            if costs is not None:
                self._judge(costs, now, shown=shown)

    def _judge(self, costs: CutCosts, now: float, *, shown: bool) -> None:
        """Believe the last answer where the next choice would be behind otherwise; the lock is held."""
        if shown and self._link_has_changed([(costs, self.now(costs))]):
            self.link.restart()
            # A probe confirms at once what a single answer shows. Where links jump, it does not do so again
            # and again.
            if now >= self._doubted_at + self._tuning.probe_s:
                self._shown_at, self._doubted_at = now - self._tuning.probe_s, now
        state = self.now(costs)
        missed = state is not None and device_is_better(costs.sums, state)
        digest = costs.program.digest
        self._misses[digest] = self._misses[digest] + 1 if missed else 0

    def _link_has_changed(self, states: Sequence[tuple[CutCosts, ServerConditions | None]]) -> bool:
        """Return whether the last transfer alone leads to a choice that these states do not lead to."""
        upload = self.link.newest
        return upload is not None and any(
            now is not None and link_has_changed(costs.sums, now, upload) for costs, now in states
        )

    def overtaken(self, captured: CapturedModel) -> None:
        """Note that the device has answered before the server, whose answer tells nothing; a probe may."""
        digest = captured.program.digest
        with self._lock:
            now = time.monotonic()
            self._asked_at[digest], self._own = now, None
            self._misses[digest] += 1
            self._shown_at = min(self._shown_at, now - self._tuning.probe_s)
        self._wake.set()

    def prepare(self, captured: CapturedModel, cut: int) -> bool:
        """Run the example from a cut on once, so the server has all it needs; return whether it succeeded."""
        costs = self.costs(captured)
        if costs is None:
            return False
        verifier = ServerVerifier(device=captured.program.device, agreement=self._agreement)
        try:
            with self.under_way():
                canary(self._client, captured, cut, verifier, process=costs.process)
        except UpriverError as error:
            self.failed(captured, error)
            return False
        with self._lock:
            self._looked_up.add((captured.program.digest, cut))
        return True

    def failed(self, captured: CapturedModel | None, error: UpriverError) -> None:
        """Pause the server, or pause only a network that it refused.

        If the error says that another process, or none, may be there now, the server is checked again.
        """
        lost = (captured is None or is_lost(error)) and not isinstance(error, Overloaded)
        with self._lock:
            if lost:
                self._costs, self._looked_up = {}, set()
            elif captured is not None and isinstance(error, NotExact):
                self._drop(captured)
        self._leave(None if lost or isinstance(error, Overloaded) else captured, error)
        self._wake.set()

    def _drop(self, captured: CapturedModel) -> None:
        """Have the server checked again with one network; the caller holds the lock."""
        self._costs = {at: costs for at, costs in self._costs.items() if at != captured.program.digest}

    def _leave(self, captured: CapturedModel | None, error: UpriverError) -> None:
        """Begin a pause of the server, or of one network on it, unless a pause is running."""
        least_s = min(error.retry_after_s, LONGEST_PAUSE_S) if isinstance(error, Overloaded) else 0.0
        with self._lock:
            breaker = self._breaker if captured is None else self._wanted[captured.program.digest].breaker
            now = time.monotonic()
            if breaker.left_s(now):  # another request was first
                return
            known = str(breaker.error)
            breaker.fail(now, error, least_s=least_s)
        what = "" if captured is None else f" for stages of {captured.program.digest[:12]}"
        undecided = isinstance(error, NotExact) and self._agreement.mode is None
        quiet = self._closed or undecided or known == str(error)
        level = logging.DEBUG if quiet else logging.WARNING
        log.log(level, "%s is not used%s for now: %s", self.url, what, error)

    def close(self) -> None:
        """End the thread and cancel all that is under way."""
        self._closed = True
        self._client.close()
        self._uplink.close()
        self._wake.set()
        self._thread.join()

    # --------------------------------------------------------------------------------------- thread

    def _keep_up(self) -> None:
        while not self._closed:
            wait_s = 0.0
            with self._lock:
                wanted = set(self._wanted)
            try:
                wait_s = self._turn()
            except UpriverError as error:
                if not self._closed:
                    self.failed(None, error)
            except Exception as error:  # any other error too: the server must not stay half checked
                if not self._closed:  # closing breaks off the thread's work
                    log.exception("%s cannot be looked after", self.url)
                    self.failed(None, UpriverError(error_text(error)))
            with self._lock:
                self._tried |= wanted
                self._changed.notify_all()
            self._wake.wait(wait_s)
            self._wake.clear()
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def _request_ended(self) -> None:
        if time.monotonic() >= self._probe_at:
            self._wake.set()

    @property
    def _probe_at(self) -> float:
        return min(self._probed_at, self._shown_at) + self._probe_s

    @property
    def _probe_s(self) -> float:
        """Interval between probes; one is no shorter than the link can take: see `MOST_PROBE_SHARE`."""
        probe_s, rate = self._tuning.probe_s, self.link.bandwidth()
        if not self._probe_sought or rate is None:
            return probe_s
        return min(probe_s, max(SOONER * probe_s, 2 * LEAST_PROBE / rate / MOST_PROBE_SHARE))

    @property
    def _hear_at(self) -> float:
        load_s = self._tuning.load_s
        return self._heard_at + (SOONER * load_s if self._load_sought else load_s)

    @property
    def _may_probe(self) -> bool:
        """Return whether every request has ended that was under way when the probe became due.

        Later requests do not count. Where they follow each other without a gap, the probe would never be
        sent.
        """
        return self._uplink.busy_since_s > self._probe_at

    def _turn(self) -> float:
        """Do the work that is due and return the seconds until the next is due."""
        now = time.monotonic()
        if left_s := self._breaker.left_s(now):
            return left_s
        self._heed_flags()
        known = self._breaker.error
        # Networks that failed come last: they must not keep the others out.
        for form in sorted(self._wanted.values(), key=lambda form: form.breaker.failures):
            if form.captured.program.digest not in self._costs and not form.breaker.left_s(now):
                self._try(form)
        if self._costs and time.monotonic() >= self._probe_at and self._may_probe:
            self._probe()
        if self._costs and time.monotonic() >= self._hear_at:
            self._ask_load()
        with self._lock:
            if self._breaker.error is known:  # no failure during this turn
                self._breaker.error = None
            return self._due_s()

    def _due_s(self) -> float:
        """Return the seconds until the next work is due."""
        now = time.monotonic()
        lacking = [form for digest, form in self._wanted.items() if digest not in self._costs]
        due_s = [form.breaker.left_s(now) for form in lacking]
        if self._costs:
            hear_at = self._hear_at
            waits = now >= self._probe_at and not self._may_probe  # until a request has ended
            due_s.append(max(0.0, (hear_at if waits else min(self._probe_at, hear_at)) - now))
        return min(due_s)

    def _try(self, form: _Form) -> None:
        """Check the server with one network; a refusal says nothing of the other networks.

        Raises:
            UpriverError: If the server cannot be used at all now.
        """
        try:
            self._let_in(form.captured, form.device_s)
        except Overloaded:
            raise
        except UpriverError as error:
            lost = is_lost(error) and not isinstance(error, OF_ONE)
            with self._lock:
                self._drop(form.captured)
                if lost and not self._costs:
                    form.breaker.fail(time.monotonic(), error)
                    raise
            self._leave(form.captured, error)
            if lost:
                self._probed_at = -math.inf  # a probe shows whether the server is alive

    def _let_in(self, captured: CapturedModel, device_s: Sequence[float]) -> None:
        began_with = self._flags
        if not self._costs:  # the link may have changed, and so caused the failure
            self.link = LinkEstimator.of_requests(self._tuning.window)
            self._own, self._misses = None, Counter()
        admitted = self._admit(captured, device_s)
        load = admitted.load
        with self._lock:
            if self._flags is not began_with:  # nor when they changed back
                return
            self._costs = {**self._costs, captured.program.digest: admitted.costs}
            self._looked_up |= {(captured.program.digest, cut) for cut in admitted.cuts}
            self._provisional -= {captured.program.digest}
            self._provisional |= {captured.program.digest} if admitted.provisional else set()
            self._load, self._wait_s, self._machine = load.k, load.expected_wait_s, load.machine
            self._probed_at = self._shown_at = self._heard_at = time.monotonic()
            self._asked_at[captured.program.digest] = self._heard_at
            self._wanted[captured.program.digest].breaker.error = None
        log.info("%s may run stages of %s", self.url, captured.program.digest[:12])

    def _admit(self, captured: CapturedModel, device_s: Sequence[float]) -> AdmittedNetwork:
        """Check the server; again within the tolerance if nothing is decided yet."""
        check = partial(
            admit,
            self._client,
            captured,
            device_s,
            push=self._push,
            agreement=self._agreement,
            link=self.link,
            uplink=self._uplink,
        )
        undecided = self._agreement.mode is None and self._agreement.allowed is None
        try:
            return check()
        except NotExact as error:
            if not undecided:
                raise
            tried = self.may_decide and self._agreement.try_tolerance(str(error))
            if self._agreement.allowed is None:
                raise
        try:
            return check()
        finally:
            if tried:
                self._agreement.withdraw()

    def _probe(self) -> None:
        """Probe the round trip, and the rate where no request has shown it.

        A second probe of the rate must confirm one that would change a choice. Earlier transfers are then
        forgotten, and a server that lost is tried again.
        """
        every_s = self._probe_s
        states = [(costs, self.now(costs)) for costs in self._costs.values()]

        def changed() -> bool:
            return self._uplink.busy_since_s == math.inf and self._link_has_changed(states)

        with self._uplink.probing(self._probe_at):
            large = int(time.monotonic() >= self._shown_at + every_s)
            probe(self._client, self.link, small=ROUND_TRIPS, large=large, every_s=every_s)
            if large and changed():
                probe(self._client, self.link, small=0, large=1, every_s=every_s)
                if changed():
                    self.link.restart()
                    self._try_again(set(self._costs))
        self._probed_at = time.monotonic()
        self._shown_at = self._probed_at if large else self._shown_at
        self._probe_sought = False

    def _try_again(self, digests: Set[str]) -> None:
        """Have a server that lost networks tried at once: what made it lose them is over."""
        with self._lock:
            for digest in digests:
                self._misses[digest] = min(self._misses[digest], 1)

    def _kept_here(self) -> set[str]:
        """Return the networks of which the device would compute all by the estimates."""
        states = [(digest, costs, self.now(costs)) for digest, costs in self._costs.items()]
        return {
            digest
            for digest, costs, state in states
            if state is not None and device_is_better(costs.sums, state)
        }

    def _ask_load(self) -> None:
        """Query the load. Repeat measurements that were made on a busy server, once it is free."""
        load = self._client.load()
        free = load.machine < BUSY
        with self._lock:
            freed, before = free and self._machine >= BUSY, self._kept_here()
            self._load, self._wait_s, self._machine = load.k, load.expected_wait_s, load.machine
            self._heard_at, self._load_sought = time.monotonic(), False
            if freed:  # a busy server is also slow to read what is sent, so probes meant little
                self._shown_at = min(self._shown_at, self._heard_at - self._tuning.probe_s)
            again = sorted(self._provisional & self._costs.keys()) if free else []
            better = set(self._costs) if freed else before - self._kept_here()
        self._try_again(better)
        for digest in again:
            self._try(self._wanted[digest])
