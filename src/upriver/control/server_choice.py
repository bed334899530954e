"""Decide which server gets the next request, and what an answer or an error says about its server.

```
joining ──admit──► up ──Overloaded, nothing in flight──► resting ──► up
   │                │
   └─NotExact─► out ├──ServerUnavailable, ProtocolError, …──► down ──ready and admit──► up
                    └──silent, and /livez does not answer───►
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from upriver.errors import (
    DoesNotFit,
    Forbidden,
    NotAuthorized,
    NotExact,
    Overloaded,
    ProgramError,
    ProgramNotFound,
    ProtocolError,
    ServerUnavailable,
    StorageFull,
    TooLarge,
    UpriverError,
)
from upriver.retry import Backoff, CircuitBreaker

RAISE_BY = 0.125
"""Amount by which a success raises a server's limit after a refusal: one more request in flight per eight
answers."""

LOST = (ServerUnavailable, ProtocolError, ProgramNotFound, NotAuthorized, Forbidden)
"""Errors after which a server must be admitted again: it died, restarted, lost the program, changed its
version, or does not accept this job. `TooLarge`, which concerns one request, is excluded."""

DECIDED = (DoesNotFit, TooLarge, StorageFull, Forbidden, NotAuthorized, ProgramError)
"""Errors with the same outcome at every admission, until an operator changes something on the server."""

DECIDED_REST_S = 30.0
"""Least seconds between two attempts at such a server: each attempt makes it check a request or a newly sent
program, and log that."""

MAX_REST_S = 5.0
"""Longest rest that a server can ask for; asking it again after this time is cheap."""

WINDOW_S = 20.0
"""Seconds to look back: several of the longest rests (`MAX_REST_S`), yet short enough that a recovered server
is soon planned for again."""

LEAST = 0.01
"""Least availability of a server that has refused all the time: unlike a dead one, it may accept the next
request."""


class Health(StrEnum):
    """The state of a server in the pool."""

    JOINING = "joining"
    UP = "up"
    RESTING = "resting"
    DOWN = "down"
    OUT = "out"


class Refusals:
    """The time spans in which one server refused requests.

    If a server refuses now and then, a request waits a moment. If it mostly refuses, no plan should rely on
    it, although it answers every request at once.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()  # in order, without overlaps

    def refused(self, began: float, until: float) -> None:
        """Record that a request sent at ``began`` was refused, and that none follows before ``until``."""
        while self._spans and self._spans[-1][1] >= began:
            first, last = self._spans.pop()
            began, until = min(began, first), max(until, last)
        if until > began:
            self._spans.append((began, until))

    def available(self, now: float) -> float:
        """Return the share of the last seconds without refusals; 1 for a server that has refused nothing."""
        first = now - WINDOW_S
        while self._spans and self._spans[0][1] <= first:
            self._spans.popleft()
        lost_s = sum(min(until, now) - max(began, first) for began, until in self._spans if began < now)
        return max(LEAST, 1.0 - lost_s / WINDOW_S)


class ServerState:
    """The state of one server, as its answers and errors show it.

    Args:
        most_in_flight: Most requests at once; a server that refuses lowers its own limit.

    Attributes:
        reason: Why it is not up; empty if it is.
        served: Requests that it has answered in full.
        last_heard: Time of the last bytes, or of the request that ended its idleness.
        lives: Number of admissions; a failure from before the last one says nothing about it now.
    """

    def __init__(self, most_in_flight: int, backoff: Backoff) -> None:
        self.health, self.reason = Health.JOINING, ""
        self.in_flight = self.served = self.lives = 0
        self.last_heard = 0.0
        self.breaker, self.refusals = CircuitBreaker(backoff), Refusals()
        self._most_in_flight, self._backoff = most_in_flight, backoff
        self._limit, self._answered_at = float(most_in_flight), 0.0

    @property
    def has_room(self) -> bool:
        """Return whether it is up and takes one more request."""
        return self.health is Health.UP and self.in_flight < int(self._limit)

    def begin(self, now: float) -> None:
        """Record that a request is sent."""
        if self.in_flight == 0:
            self.last_heard = now
        self.in_flight += 1

    def heard(self, now: float) -> None:
        """Record that bytes have arrived."""
        self.last_heard = self._answered_at = now

    def end(self, error: BaseException | None, *, life: int, began: float, now: float) -> None:
        """Record the outcome of a request that was sent at ``began``, in the server's ``life``."""
        self.in_flight -= 1
        if error is None:
            self.served += 1
            self.breaker.succeed(now)
            self._limit = min(float(self._most_in_flight), self._limit + RAISE_BY)
        elif isinstance(error, Overloaded):
            self._refuse(error, began, now)
        elif is_lost(error) and life == self.lives and self.health is not Health.DOWN:
            self.lose(str(error), now)

    def lose(self, reason: str, now: float) -> None:
        """Record that it must be admitted again, after a pause."""
        self.breaker.fail(now)
        self.health, self.reason = Health.DOWN, reason

    def admitted(self) -> None:
        """Record that it may be used."""
        self.lives += 1
        self.health, self.reason = Health.UP, ""

    def not_admitted(self, error: Exception, now: float) -> None:
        """Record that it may not be used: for a while, or never if it is not exact or the check is faulty."""
        keep_out = isinstance(error, NotExact) or not isinstance(error, UpriverError)
        self.breaker.fail(now, least_s=self._told_s(error))
        self.health = Health.OUT if keep_out else Health.DOWN
        self.reason = str(error) if isinstance(error, UpriverError) else repr(error)

    def rested(self) -> None:
        """Record that its rest is over."""
        if self.health is Health.RESTING:
            self.health, self.reason = Health.UP, ""

    def _refuse(self, error: Overloaded, began: float, now: float) -> None:
        """Lower the limit of a server without room; let it rest if it refused its only request."""
        until_s = now
        self._limit = max(1.0, float(self.in_flight))
        if self.in_flight == 0 and self.health is Health.UP:
            self.breaker.fail(now, least_s=self._told_s(error))
            until_s = self.breaker.until_s
            self.health, self.reason = Health.RESTING, str(error)
        # Some servers let a request wait before they refuse it. Answers to other requests show that they do
        # not only wait.
        self.refusals.refused(max(began, self._answered_at), until_s)

    def _told_s(self, error: Exception) -> float:
        """Draw the least seconds to leave a server alone after an error, whatever the backoff."""
        if isinstance(error, Overloaded):
            return self._backoff.spread_s(min(MAX_REST_S, error.retry_after_s))
        return self._backoff.spread_s(DECIDED_REST_S) if isinstance(error, DECIDED) else 0.0


AnyServer = TypeVar("AnyServer", bound=ServerState)


def least_loaded(servers: Iterable[AnyServer]) -> AnyServer | None:
    """Return the server with room that has the fewest requests in flight, then the fewest served."""
    free = (server for server in servers if server.has_room)
    return min(free, key=lambda server: (server.in_flight, server.served), default=None)


def is_lost(error: BaseException) -> bool:
    """Return whether a server that gave this error must be admitted again before further requests."""
    return isinstance(error, LOST) and not isinstance(error, TooLarge)
