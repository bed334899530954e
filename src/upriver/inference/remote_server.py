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
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from upriver._threads.background import BackgroundThread
from upriver.control.partition import ServerConditions
from upriver.control.server_choice import is_lost
from upriver.engine.fingerprint import flags
from upriver.errors import Forbidden, NotExact, Overloaded, ProgramNotFound, UpriverError
from upriver.inference.costs import CutCosts, crossing_bytes
from upriver.inference.exchange import Exchange, ExchangeResult
from upriver.inference.server_check import BUSY, admit, canary, probe, verifier_of
from upriver.inference.uplink import Uplink
from upriver.link import CHANGED_TRANSFERS, ROUND_TRIPS, TRANSFERS, LinkEstimator
from upriver.program.capture.whole_model import CapturedModel
from upriver.retry import Backoff, CircuitBreaker
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.tolerance import Exact
from upriver.text import error_text, said
from upriver.types import MOST_FACTOR, require_finite

log = logging.getLogger("upriver")

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause after a server failed or refused a network."""

SOONER = 0.1
"""Fraction of ``load_s`` between load queries while the load keeps requests away: no answer tells then that
the server is free again."""

SLOWED, LATE = 2.0, 0.1
"""Factor and share that make an answer news of a load. Its stages took more than ``SLOWED`` times the time
that k predicts, and the excess is more than ``LATE`` of the request."""

OF_ONE = (ProgramNotFound, Forbidden)
"""Errors about one program during the check of a server. The server may have other programs, or receive this
one from another client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTuning:
    """Options for following the servers and for preparing cuts; the defaults are LoADPart's.

    Attributes:
        probe_s: Interval between probes of the link to a server, where no request has shown its rate (5 s:
            LoADPart, section V-A).
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
        exact: Whether the server's bits must equal the device's.

    Attributes:
        link: Estimate of the link up to the server.
    """

    def __init__(
        self,
        client: ServerClient,
        tuning: OffloadTuning,
        uplink: Uplink | None = None,
        *,
        push: bool = True,
        exact: Exact = "bitwise",
    ) -> None:
        self.link = LinkEstimator.of_requests(tuning.window)
        self._client, self._tuning, self._uplink = client, tuning, uplink or Uplink()
        self._push, self._exact = push, exact
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted: dict[str, _Form] = {}
        self._tried: set[str] = set()
        self._costs: dict[str, CutCosts] = {}
        self._looked_up: set[tuple[str, int]] = set()
        self._provisional: set[str] = set()
        self._load, self._wait_s = 1.0, 0.0
        self._slowed, self._slowed_until = 1.0, -math.inf
        self._probed_at = self._shown_at = self._heard_at = self._doubted_at = -math.inf
        self._sought = False
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
        return ServerConditions(
            upload_bytes_per_s=upload,
            download_bytes_per_s=download,
            rtt_s=(self.link.latency_s or 0.0) + costs.handling.fixed_s(download),
            load=self._load,
            slowed=self._slowed if time.monotonic() < self._slowed_until else 1.0,
            wait_s=self._wait_s,
        )

    def ask(
        self, captured: CapturedModel, cut: int, tensors: Sequence[torch.Tensor], *, process: str
    ) -> Exchange:
        """Make a request for the stages from a cut on, to the server process that passed the check."""
        return Exchange(self._client, captured, cut, tensors, process=process)

    def seek(self) -> None:
        """Have the load queried soon, as the load kept a request away."""
        if not self._sought:
            self._sought = True
            self._wake.set()

    def under_way(self) -> AbstractContextManager[None]:
        """Mark a request as under way. Probes wait, since both would see only a part of the link."""
        return self._uplink.in_use()

    def answered(self, captured: CapturedModel, cut: int, finished: ExchangeResult) -> None:
        """Update the link and the load from an answer.

        The first answer from a cut says nothing of the link: the server has looked up what crosses there. k
        is a median over some seconds. An answer that took much longer than k predicts is news of the load.
        That news counts until the next news, until the machine is not busy, or for ``load_s``.
        """
        program, costs = captured.program, self._costs.get(captured.program.digest)
        shown = False
        spent_s = sum(finished.timings.stages.values())
        alone_s = 0.0 if costs is None else float(costs.sums.server_s[cut])
        if costs is not None and (program.digest, cut) in self._looked_up:
            crossing, handling = crossing_bytes(program, cut), costs.handling
            packing_s = (handling.encode_s_per_byte + handling.decode_s_per_byte) * crossing
            up_s = finished.up_s - handling.front_s - packing_s
            shown = self.link.add_transfer(crossing, up_s, request=True)
        with self._lock:
            self._load, self._wait_s = finished.timings.k, finished.timings.expected_wait_s
            now = time.monotonic()
            self._slowed_until = -math.inf
            if alone_s > 0 and spent_s - SLOWED * self._load * alone_s > LATE * finished.took_s:
                self._slowed = min(spent_s / alone_s, MOST_FACTOR)
                self._slowed_until = now + self._tuning.load_s
            # Only /v1/load tells whether the machine is free again.
            self._heard_at = self._heard_at if self._provisional else now
            self._sought = False
            if shown:
                self._shown_at = now
                # A probe confirms at once a new rate that only this answer shows. Where links jump, it does
                # not do so again and again.
                if self.link.unsettled and now >= self._doubted_at + self._tuning.probe_s:
                    self._shown_at, self._doubted_at = now - self._tuning.probe_s, now
            self._breaker.succeed(now)
            self._wanted[program.digest].breaker.succeed(now)
            self._looked_up.add((program.digest, cut))

    def prepare(self, captured: CapturedModel, cut: int) -> bool:
        """Run the example from a cut on once, so the server has all it needs; return whether it succeeded."""
        costs = self.costs(captured)
        if costs is None:
            return False
        verifier = verifier_of(self._exact, captured)
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
        level = logging.DEBUG if self._closed or known == str(error) else logging.WARNING
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
        return min(self._probed_at, self._shown_at) + self._tuning.probe_s

    @property
    def _hear_at(self) -> float:
        load_s = self._tuning.load_s
        return self._heard_at + (SOONER * load_s if self._sought else load_s)

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
        admitted = admit(
            self._client,
            captured,
            device_s,
            push=self._push,
            exact=self._exact,
            link=self.link,
            uplink=self._uplink,
        )
        load = admitted.load
        with self._lock:
            if self._flags is not began_with:  # nor when they changed back
                return
            self._costs = {**self._costs, captured.program.digest: admitted.costs}
            self._looked_up |= {(captured.program.digest, cut) for cut in admitted.cuts}
            self._provisional -= {captured.program.digest}
            self._provisional |= {captured.program.digest} if admitted.provisional else set()
            self._load, self._wait_s = load.k, load.expected_wait_s
            self._probed_at = self._shown_at = self._heard_at = time.monotonic()
            self._wanted[captured.program.digest].breaker.error = None
        log.info("%s may run stages of %s", self.url, captured.program.digest[:12])

    def _probe(self) -> None:
        """Probe the round trip, and the rate where no request has shown it.

        A large probe is sent once. It repeats at once where the link seems changed and is free.
        """
        every_s = self._tuning.probe_s
        with self._uplink.probing(self._probe_at):
            large = int(time.monotonic() >= self._shown_at + every_s)
            probe(self._client, self.link, small=ROUND_TRIPS, large=large, every_s=every_s)
            for _ in range(CHANGED_TRANSFERS * large):
                if not self.link.unsettled or self._uplink.busy_since_s < math.inf:
                    break
                probe(self._client, self.link, small=0, large=1, every_s=every_s)
        self._probed_at = time.monotonic()
        self._shown_at = self._probed_at if large else self._shown_at

    def _ask_load(self) -> None:
        """Query the load. Repeat measurements that were made on a busy server, once it is free."""
        load = self._client.load()
        with self._lock:
            self._load, self._wait_s = load.k, load.expected_wait_s
            self._heard_at, self._sought = time.monotonic(), False
            if load.machine < BUSY:
                self._slowed_until = -math.inf
            again = sorted(self._provisional & self._costs.keys()) if load.machine < BUSY else []
        for digest in again:
            self._try(self._wanted[digest])
