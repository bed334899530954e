"""Pool several servers: track which are healthy and have room, and bring lost ones back.

Each server has a keeper, a thread that sleeps unless its server needs attention. The keeper admits a new or
returned server, after the caller's check. It lets an overloaded server rest, and checks whether a silent one
is still alive. `upriver.control.server_choice` decides which server is next, and what an outcome says.

Servers may be added and dropped at any time. A dropped server gets no further request; its requests in flight
may finish, and then its client is closed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from upriver._threads.background import BackgroundThread
from upriver.control.server_choice import Health, ServerState, least_loaded
from upriver.errors import ConfigError, Overloaded, ServerUnavailable, UpriverError
from upriver.retry import Backoff, RetryBudget
from upriver.rpc.refusal_log import RefusalLog
from upriver.text import said
from upriver.types import MicroBatch, Timings

if TYPE_CHECKING:
    from upriver.protocol import RunRequest

log = logging.getLogger("upriver")

QUIET_S = 5.0
"""Seconds of silence after which a server that owes an answer is probed. A micro-batch of the largest network
measured (vgg19) takes 11 s on one core, so silence alone means nothing, but a probe costs little."""

PROBE_TIMEOUT_S = 5.0
"""Timeout of /livez and /readyz, which a healthy server answers at once, however busy its workers."""


class AnswerStream(Protocol):
    """Micro-batches as they arrive. Any thread may call ``close``, which wakes a waiting reader."""

    def __iter__(self) -> Iterator[tuple[MicroBatch, Timings]]: ...
    def __next__(self) -> tuple[MicroBatch, Timings]: ...
    def close(self) -> None:
        """Break off."""


class Transport(Protocol):
    """The client interface of the pool and the loader; `ServerClient` implements it over HTTP."""

    @property
    def url(self) -> str:
        """Address of the server, as in reports."""

    def run(self, request: RunRequest) -> AnswerStream:
        """Start a request; nothing is sent before the answer is iterated."""

    def alive(self, *, timeout_s: float) -> bool:
        """Return whether the server's front answers at all."""

    def ready(self, *, timeout_s: float) -> bool:
        """Return whether the server accepts requests; raise ServerUnavailable if it cannot be reached."""

    def abort(self) -> None:
        """Break off all connections: their readers get ServerUnavailable."""

    def close(self) -> None:
        """Abort, and refuse further use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatus:
    """The status of one server, for reports.

    Attributes:
        reason: Why it is not up; empty if it is.
        served: Requests that it has answered in full.
        available: Share of the last seconds in which it did not refuse requests.
    """

    url: str
    health: Health
    reason: str
    in_flight: int
    served: int
    available: float = 1.0


class _Member(ServerState):
    """The state of one server, and its client; guarded by the pool's lock."""

    def __init__(self, client: Transport, most_in_flight: int, backoff: Backoff) -> None:
        super().__init__(most_in_flight, backoff)
        self.client = client
        self.left = False  # dropped: no further request


class Lease:
    """The right to one request on one server; the outcome of its block updates the server's health."""

    def __init__(self, pool: ServerPool, member: _Member) -> None:
        self._pool = pool
        self._member = member
        self._life = member.lives
        self._began = time.monotonic()

    @property
    def client(self) -> Transport:
        """The server's client."""
        return self._member.client

    def heard(self) -> None:
        """Note that bytes have arrived from the server."""
        with self._pool._changed:
            self._member.heard(time.monotonic())

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool._settle(self._member, error, life=self._life, began=self._began)


class ServerPool:
    """Lend the least-loaded healthy server, and bring lost ones back. Thread-safe; owns its clients.

    Args:
        clients: One client for each server address.
        admit: Checks a server before its first use and after each loss (version, fingerprint, program,
            canary). `NotExact` excludes the server for good; any other error is retried later.
        max_in_flight: Most requests at once on one server; a server that refuses lowers its own limit.
        backoff: Delays between attempts to bring a server back.
        budget: Retry budget shared by the jobs that use this pool.
        quiet_s: Seconds of silence after which a server that owes an answer is probed.
        probe_timeout_s: Timeout of that probe, and of /readyz.

    Attributes:
        refusal_log: Requests that servers have refused, including servers dropped since.
    """

    def __init__(
        self,
        clients: Sequence[Transport],
        *,
        admit: Callable[[Transport], None] | None = None,
        max_in_flight: int = 16,
        backoff: Backoff | None = None,
        budget: RetryBudget | None = None,
        quiet_s: float = QUIET_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        if not clients:
            raise ConfigError("a pool needs at least one server")
        if max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, got {max_in_flight}")
        self.budget = budget or RetryBudget()
        self.refusal_log = RefusalLog()
        self._admit = admit
        self._max_in_flight = max_in_flight
        self._backoff = backoff or Backoff()
        self._quiet_s = quiet_s
        self._probe_timeout_s = probe_timeout_s
        self._changed = threading.Condition()
        self._closed = False
        self._listeners: list[Callable[[], None]] = []
        self._members: list[_Member] = []
        self._leaving: list[_Member] = []
        self._keepers: list[BackgroundThread] = []
        self._numbers = itertools.count()
        with self._changed:
            for client in clients:
                self._take_in(client)

    # ------------------------------------------------------------------------------- for borrowers

    def borrow(self, url: str | None = None) -> Lease | None:
        """Lease the least-loaded healthy server with room, or the one at ``url``; return None if none has."""
        with self._changed:
            member = least_loaded(m for m in self._members if url is None or m.client.url == url)
            if member is None or self._closed:
                return None
            member.begin(time.monotonic())
            self._changed.notify_all()  # its keeper now watches for silence
            return Lease(self, member)

    @property
    def usable(self) -> bool:
        """Return whether any server is up, even one at its limit."""
        with self._changed:
            return any(member.health is Health.UP for member in self._members)

    @property
    def up(self) -> tuple[Transport, ...]:
        """Clients of all servers that are up, in the order in which they joined."""
        with self._changed:
            return tuple(member.client for member in self._members if member.health is Health.UP)

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of all servers, whatever their state, in the order in which they joined."""
        with self._changed:
            return tuple(member.client.url for member in self._members)

    def lost(self, url: str) -> str | None:
        """Return why this server cannot be used; None if it can be, or will be after a short wait."""
        for status in self.status():
            if status.url == url:
                return (
                    (status.reason or status.health) if status.health in (Health.DOWN, Health.OUT) else None
                )
        return "it is none of this job's servers"

    def wait_joined(self, timeout_s: float, urls: Collection[str] | None = None) -> bool:
        """Wait until each server (of ``urls``) was admitted or failed once; return whether any is up."""
        with self._changed:
            awaited = [m for m in self._members if urls is None or m.client.url in urls]
            self._changed.wait_for(
                lambda: self._closed or all(m.left or m.health is not Health.JOINING for m in awaited),
                timeout_s,
            )
        return self.usable

    def status(self) -> tuple[ServerStatus, ...]:
        """Return the status of every server, in the order given."""
        now = time.monotonic()
        with self._changed:
            return tuple(
                ServerStatus(
                    url=m.client.url,
                    health=m.health,
                    reason=m.reason,
                    in_flight=m.in_flight,
                    served=m.served,
                    available=m.refusals.available(now),
                )
                for m in self._members
            )

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, with no lock held, whenever the result of `borrow` may change."""
        with self._changed:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling a listener; unknown ones are ignored."""
        with self._changed:
            self._listeners = [known for known in self._listeners if known != listener]

    def close(self) -> None:
        """Interrupt all requests and stop the keepers. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            members, keepers = [*self._members, *self._leaving], self._keepers
        for member in members:
            member.client.close()
        for keeper in keepers:
            keeper.join()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --------------------------------------------------------------------------- come and go

    def add(self, client: Transport) -> None:
        """Add one more server; it is used once it is admitted. Any thread may call this.

        The pool owns the client from here on. A client for a known address is closed at once.
        """
        with self._changed:
            known = [member.client for member in self._members if member.client.url == client.url]
            if not known and not self._closed:
                self._take_in(client)
                return
        if client not in known:
            client.close()

    def drop(self, url: str) -> None:
        """Send a server no more requests; any thread may call this. Unknown addresses are ignored.

        Its requests in flight may finish; then its client is closed.
        """
        with self._changed:
            gone = [member for member in self._members if member.client.url == url]
            self._members = [member for member in self._members if member not in gone]
            self._leaving += [member for member in gone if member.in_flight]
            for member in gone:
                member.left = True
            self._changed.notify_all()
        for member in gone:
            if member not in self._leaving:
                member.client.close()
        if gone:
            self._tell()

    def _take_in(self, client: Transport) -> None:
        """Add a new member, and start its keeper."""
        member = _Member(client, self._max_in_flight, self._backoff)
        keeper = BackgroundThread(self._keep, member, name=f"keeper-{next(self._numbers)}")
        self._members.append(member)
        self._keepers = [*(each for each in self._keepers if each.is_alive()), keeper]
        keeper.start()

    # ---------------------------------------------------------------------------------- changes

    def _settle(self, member: _Member, error: BaseException | None, *, life: int, began: float) -> None:
        """Update a server's state after a lease has ended."""
        with self._changed:
            member.end(error, life=life, began=began, now=time.monotonic())
            if error is None:
                self.budget.succeeded()
            is_through = member in self._leaving and not member.in_flight
            if is_through:
                self._leaving.remove(member)
            self._changed.notify_all()
        if is_through:
            member.client.close()
        self._tell()
        if isinstance(error, Overloaded):
            self.refusal_log.add(member.client.url, error)  # not under the lock, since it logs

    def _tell(self) -> None:
        with self._changed:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # ----------------------------------------------------------------------------------- keepers

    def _keep(self, member: _Member) -> None:
        """Run one server's keeper: sleep until the server needs attention."""
        steps = {
            Health.JOINING: self._join,
            Health.DOWN: self._bring_back,
            Health.RESTING: self._rest,
            Health.UP: self._watch,
        }
        while self._needs_keeper(member) and (step := steps.get(member.health)) is not None:
            before = member.health
            step(member)
            if member.health is not before:
                self._tell()
        if member.left and member.in_flight:  # lost and dropped: no keeper watches its requests from here on
            member.client.abort()

    def _needs_keeper(self, member: _Member) -> bool:
        """Return whether a server needs its keeper.

        Every server does while the pool is open; a dropped one does while it owes an answer.
        """
        owes = member.in_flight > 0 and member.health is Health.UP
        return not self._closed and (owes or not member.left)

    def _bring_back(self, member: _Member) -> None:
        if self._sleep(member, member.breaker.pause_s):
            self._join(member)

    def _join(self, member: _Member) -> None:
        """Check that the server is ready, and that the caller's check admits it."""
        try:
            if not member.client.ready(timeout_s=self._probe_timeout_s):
                raise ServerUnavailable(f"{member.client.url} is not ready")
            if self._admit is not None:
                self._admit(member.client)
        except Exception as error:
            if isinstance(error, Overloaded):
                self.refusal_log.add(member.client.url, error)
            with self._changed:
                member.not_admitted(error, time.monotonic())  # other errors are a fault in `admit`
                self._changed.notify_all()
        else:
            with self._changed:
                before = member.reason
                member.admitted()
                self._changed.notify_all()
            if before:  # not under the lock, since it logs
                log.info("%s is used again; it was not, since: %s", member.client.url, said(before))

    def _rest(self, member: _Member) -> None:
        if self._sleep(member, member.breaker.pause_s):
            with self._changed:
                member.rested()
                self._changed.notify_all()

    def _watch(self, member: _Member) -> None:
        """Sleep while the server is well; return when its health changed or it turned out to be dead."""
        with self._changed:
            while member.health is Health.UP and self._needs_keeper(member):
                quiet_s = time.monotonic() - member.last_heard
                if member.in_flight and quiet_s >= self._quiet_s:
                    break
                self._changed.wait(self._quiet_s - quiet_s if member.in_flight else None)
            else:
                return
        if self._is_alive(member):
            with self._changed:
                member.last_heard = time.monotonic()
            return
        with self._changed:
            if member.health is Health.UP and not self._closed:
                reason = f"{member.client.url} owes an answer and does not answer /livez"
                member.lose(reason, time.monotonic())
                self._changed.notify_all()
        member.client.abort()

    def _is_alive(self, member: _Member) -> bool:
        try:
            return member.client.alive(timeout_s=self._probe_timeout_s)
        except UpriverError:
            return False

    def _sleep(self, member: _Member, seconds: float) -> bool:
        """Sleep, unless the pool is closed or the server dropped; return False in these cases."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed or member.left, seconds)
