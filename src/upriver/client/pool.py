"""Several servers as one: which is healthy, which has room, and when a lost one is back.

Each server has a keeper, a thread that sleeps unless its server needs attention: it lets a new or returned
server in (after the caller's check), lets an overloaded one rest, and looks whether a silent one is still
alive.

```
joining ──admit──► up ──Overloaded, nothing in flight──► resting ──► up
   │                │
   └─NotExact─► out ├──ServerUnavailable, ProtocolError, …──► down ──ready and admit──► up
                    └──silent, and /livez does not answer───►
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from upriver.client.retry import Backoff, RetryBudget
from upriver.errors import (
    ConfigError,
    NotAuthorized,
    NotExact,
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    ServerUnavailable,
    UpriverError,
)
from upriver.types import MicroBatch, Timings

if TYPE_CHECKING:
    from upriver.protocol import RunRequest

QUIET_S = 5.0
"""A server that has owed an answer for so long is asked whether it lives: a micro-batch of the largest
network measured (vgg19) takes 11 s on one core, so silence alone means nothing, but asking costs little."""

PROBE_TIMEOUT_S = 5.0
"""For /livez and /readyz, which a healthy server answers at once, however busy its workers."""

MAX_REST_S = 5.0
"""A server may ask for a longer rest; asking it again after this long is cheap."""

RAISE_BY = 0.125
"""What a success adds to a server's limit after it had refused: one more request in flight for eight
answers."""

LOST = (ServerUnavailable, ProtocolError, ProgramNotFound, NotAuthorized)
"""Errors after which a server must be let in again: it died, restarted, lost the program or changed its
version."""


class Answer(Protocol):
    """Micro-batches as they arrive. ``close`` may be called from any thread and wakes a waiting reader."""

    def __iter__(self) -> Iterator[tuple[MicroBatch, Timings]]: ...
    def __next__(self) -> tuple[MicroBatch, Timings]: ...
    def close(self) -> None:
        """Break off."""


class Transport(Protocol):
    """What the pool and the loader need of a client; `ServerClient` is the one that talks HTTP."""

    @property
    def url(self) -> str:
        """Names the server in reports."""

    def run(self, request: RunRequest) -> Answer:
        """Start a request; nothing is sent before the answer is iterated."""

    def alive(self, *, timeout_s: float) -> bool:
        """Whether the server's front answers at all."""

    def ready(self, *, timeout_s: float) -> bool:
        """Whether it takes requests; raises ServerUnavailable when it cannot be reached."""

    def abort(self) -> None:
        """Break all connections off: whoever reads from one gets ServerUnavailable."""

    def close(self) -> None:
        """Abort, and refuse further use."""


class Health(StrEnum):
    """Where a server stands."""

    JOINING = "joining"
    UP = "up"
    RESTING = "resting"
    DOWN = "down"
    OUT = "out"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatus:
    """One server, for reports.

    Attributes:
        reason: Why it is not up, or was last not.
        served: Requests it has answered in full.
    """

    url: str
    health: Health
    reason: str
    in_flight: int
    served: int


class _Member:
    """One server's state; guarded by the pool's lock."""

    def __init__(self, client: Transport, limit: int) -> None:
        self.client = client
        self.health = Health.JOINING
        self.reason = ""
        self.in_flight = 0
        self.served = 0
        self.failures = 0
        self.limit = float(limit)
        self.rest_s = 0.0
        self.last_heard = 0.0
        self.lives = 0  # how often it was let in; a failure of an earlier life says nothing about this one


class Lease:
    """The right to one request on one server; how its ``with`` block ends decides about its health."""

    def __init__(self, pool: ServerPool, member: _Member) -> None:
        self._pool = pool
        self._member = member
        self._life = member.lives

    @property
    def client(self) -> Transport:
        """The server."""
        return self._member.client

    def heard(self) -> None:
        """Something has arrived from the server."""
        self._member.last_heard = time.monotonic()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool._settle(self._member, error, self._life)


class ServerPool:
    """Lends the least-loaded healthy server, and brings lost ones back. Thread-safe; owns its clients.

    Args:
        clients: One for each server address.
        admit: Called before a server is used for the first time and after each loss (version, fingerprint,
            program there, canary). `NotExact` keeps the server out for good; any other error is tried again
            later.
        max_in_flight: Requests at once on one server; a server that refuses lowers its own limit.
        backoff: Between attempts to bring a server back.
        budget: Shared by all retries of the jobs that use this pool.
        quiet_s: Silence after which a server that owes an answer is asked whether it lives.
        probe_timeout_s: How long that question, or /readyz, may take.
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
        self._admit = admit
        self._max_in_flight = max_in_flight
        self._backoff = backoff or Backoff()
        self._quiet_s = quiet_s
        self._probe_timeout_s = probe_timeout_s
        self._changed = threading.Condition()
        self._closed = False
        self._listeners: list[Callable[[], None]] = []
        self._members = [_Member(client, max_in_flight) for client in clients]
        self._keepers = [
            threading.Thread(target=self._keep, args=(member,), name=f"upriver-keeper-{i}", daemon=True)
            for i, member in enumerate(self._members)
        ]
        for keeper in self._keepers:
            keeper.start()

    # ------------------------------------------------------------------------------- for borrowers

    def borrow(self, url: str | None = None) -> Lease | None:
        """The least-loaded healthy server that has room (the one at ``url``, if that is given), or None."""
        with self._changed:
            asked = [m for m in self._members if url is None or m.client.url == url]
            free = [m for m in asked if m.health is Health.UP and m.in_flight < int(m.limit)]
            if not free or self._closed:
                return None
            member = min(free, key=lambda m: (m.in_flight, m.served))
            if member.in_flight == 0:
                member.last_heard = time.monotonic()
            member.in_flight += 1
            self._changed.notify_all()  # its keeper now watches for silence
            return Lease(self, member)

    @property
    def usable(self) -> bool:
        """Whether any server is up, be it at its limit."""
        with self._changed:
            return any(member.health is Health.UP for member in self._members)

    def lost(self, url: str) -> str | None:
        """Why this server cannot be used, if that is more than a matter of waiting; None if it is not."""
        for status in self.status():
            if status.url == url:
                return (
                    (status.reason or status.health) if status.health in (Health.DOWN, Health.OUT) else None
                )
        return "it is none of this job's servers"

    def wait_joined(self, timeout_s: float, urls: Collection[str] | None = None) -> bool:
        """Wait until each server (of ``urls``) was let in or failed to be, once; whether any is up."""
        awaited = [m for m in self._members if urls is None or m.client.url in urls]
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(m.health is not Health.JOINING for m in awaited), timeout_s
            )
        return self.usable

    def status(self) -> tuple[ServerStatus, ...]:
        """Every server as it stands, in the order given."""
        with self._changed:
            return tuple(
                ServerStatus(
                    url=m.client.url, health=m.health, reason=m.reason, in_flight=m.in_flight, served=m.served
                )
                for m in self._members
            )

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, with no lock held, whenever `borrow` may answer differently."""
        with self._changed:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling it; unknown ones are ignored."""
        with self._changed:
            self._listeners = [known for known in self._listeners if known != listener]

    def close(self) -> None:
        """Break everything off and stop the keepers. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for member in self._members:
            member.client.close()
        for keeper in self._keepers:
            if keeper is not threading.current_thread():
                keeper.join()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------- changes

    def _settle(self, member: _Member, error: BaseException | None, life: int) -> None:
        """A lease came back: draw the conclusions."""
        with self._changed:
            member.in_flight -= 1
            if error is None:
                member.served += 1
                member.failures = 0
                member.limit = min(float(self._max_in_flight), member.limit + RAISE_BY)
                self.budget.succeeded()
            elif isinstance(error, Overloaded):
                member.limit = max(1.0, float(member.in_flight))
                if member.in_flight == 0 and member.health is Health.UP:
                    member.rest_s = min(MAX_REST_S, error.retry_after_s)
                    self._set(member, Health.RESTING, str(error))
            elif isinstance(error, LOST) and life == member.lives and member.health is not Health.DOWN:
                member.failures += 1
                self._set(member, Health.DOWN, str(error))
            self._changed.notify_all()
        self._tell()

    def _set(self, member: _Member, health: Health, reason: str) -> None:
        member.health, member.reason = health, reason
        self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # ----------------------------------------------------------------------------------- keepers

    def _keep(self, member: _Member) -> None:
        """One server's keeper: sleeps until its server needs it."""
        steps = {
            Health.JOINING: self._join,
            Health.DOWN: self._bring_back,
            Health.RESTING: self._rest,
            Health.UP: self._watch,
        }
        while not self._closed and (step := steps.get(member.health)) is not None:
            before = member.health
            step(member)
            if member.health is not before:
                self._tell()

    def _bring_back(self, member: _Member) -> None:
        if self._sleep(self._backoff.wait_s(member.failures)):
            self._join(member)

    def _join(self, member: _Member) -> None:
        """Ask the server whether it is ready, and the caller whether it may be used."""
        try:
            if not member.client.ready(timeout_s=self._probe_timeout_s):
                raise ServerUnavailable(f"{member.client.url} is not ready")
            if self._admit is not None:
                self._admit(member.client)
        except Exception as error:
            # Errors that are not ours are a fault in `admit`: trying again would not help.
            keep_out = isinstance(error, NotExact) or not isinstance(error, UpriverError)
            with self._changed:
                member.failures += 1
                reason = str(error) if isinstance(error, UpriverError) else repr(error)
                self._set(member, Health.OUT if keep_out else Health.DOWN, reason)
        else:
            with self._changed:
                member.lives += 1
                self._set(member, Health.UP, member.reason)

    def _rest(self, member: _Member) -> None:
        # At least what the server asked for, at most twice that: clients sent away together come back apart.
        if self._sleep(self._backoff.rng.uniform(member.rest_s, 2 * member.rest_s)):
            with self._changed:
                if member.health is Health.RESTING:
                    self._set(member, Health.UP, member.reason)

    def _watch(self, member: _Member) -> None:
        """Sleep while all is well; return when the server's health changed or it turned out to be dead."""
        with self._changed:
            while member.health is Health.UP and not self._closed:
                quiet_s = time.monotonic() - member.last_heard
                if member.in_flight and quiet_s >= self._quiet_s:
                    break
                self._changed.wait(self._quiet_s - quiet_s if member.in_flight else None)
            else:
                return
        if self._is_alive(member):
            member.last_heard = time.monotonic()
            return
        with self._changed:
            if member.health is Health.UP and not self._closed:
                member.failures += 1
                self._set(
                    member, Health.DOWN, f"{member.client.url} owes an answer and does not answer /livez"
                )
        member.client.abort()

    def _is_alive(self, member: _Member) -> bool:
        try:
            return member.client.alive(timeout_s=self._probe_timeout_s)
        except UpriverError:
            return False

    def _sleep(self, seconds: float) -> bool:
        """Sleep, unless the pool is closed; whether it is still open."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, seconds)
