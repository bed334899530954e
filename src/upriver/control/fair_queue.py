"""Deal turns fairly between tenants, by the seconds that the turns take.

Deficit round robin: Shreedhar, Varghese, "Efficient Fair Queuing Using Deficit Round-Robin", IEEE/ACM
Transactions on Networking 4(3), 1996.

Symbols
    flow                         a tenant with waiting turns
    packet, its size             a turn (one forward pass), its estimated seconds
    DC_i, deficit counter        ``_Tenant.deficit_s``: seconds granted to a tenant and not used
    Q_i, quantum                 seconds granted to every tenant in a round, in proportion to its weight

Departures
    - The quantum is not fixed. Each round grants the least with which a tenant can go: with ``h`` the seconds
      of a tenant's next turn, the smallest ``(h - deficit) / weight``, times each tenant's weight. So a
      tenant has at most one turn in a round, and the turns of tenants interleave as finely as possible. A
      fixed quantum that suffices for the longest turn and the smallest weight would let other tenants have
      many turns in a row. Dealing one turn inspects every waiting tenant, of which there are few.
    - Among the tenants that can go, the one goes whose last turn is longest ago.
    - Estimates are corrected afterwards: `FairQueue.spent` moves the deficit by the error.
    - The requests of a tenant alternate. The turns of a request come in the order of the calls. With
      ``one_each`` a request has one turn at a time; until it ends, the request's further turns do not count
      as waiting.

Bound
    Let tenants i and j both have waiting turns throughout some interval. Let ``S`` be the estimated seconds
    of the turns that each was given in it, and ``M`` the longest turn each asked for. Every round grants both
    the same for their weight, ``C_i / w_i = C_j / w_j``, and ``S`` is ``C`` less the growth of the deficit. A
    deficit is never below 0, as no tenant goes on less than a turn takes. It is never above ``M``, as no
    round grants a tenant more than its next turn lacks. So it changes by ``M`` at most, and

        | S_i / w_i - S_j / w_j |  <=  M_i / w_i + M_j / w_j

    for an interval of any length: one turn of each. The bound holds for any number of slots. In seconds that
    turns took, rather than estimated ones, add the error of estimates that are not corrected yet.

    Let tenant i ask for a turn of ``h`` seconds while it has none. Besides the turns being computed, at most
    ``h w_j / w_i + M_j`` seconds of each other tenant j precede it: its share meanwhile, and one turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field

LEAST_S = 1e-3
"""Least seconds of a turn: sending a micro-batch to a worker and its answer back takes as long.

A turn that costs nothing could be had forever.
"""

ROUNDING_S = 1e-9
"""Seconds, for a weight of 1, by which sums of seconds may be off. Sums that differ by less are equal."""


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """A turn that a tenant asked for; `FairQueue` keeps its state."""

    tenant: _Tenant = field(repr=False)
    request: Hashable
    seconds: float


@dataclass(eq=False, kw_only=True, slots=True)
class _Tenant:
    """A tenant with turns, waiting or taken.

    Attributes:
        requests: Waiting turns by request; the request whose turn is next comes first.
        last: Number of its last turn; 0 before the first.
    """

    name: str
    weight: float
    deficit_s: float = 0.0
    requests: OrderedDict[Hashable, deque[Turn]] = field(default_factory=OrderedDict)
    taken: int = 0
    last: int = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self.requests.values()))

    @property
    def queued_s(self) -> float:
        return sum(turn.seconds for turns in self.requests.values() for turn in turns)

    def head(self, busy: Container[Hashable] = ()) -> Turn | None:
        """Return its next turn; requests in ``busy`` get none."""
        return next((turns[0] for request, turns in self.requests.items() if request not in busy), None)

    def take(self, turn: Turn) -> None:
        """Stop a request's next turn from waiting; other requests of its tenant come first then."""
        turns = self.requests.pop(turn.request)
        turns.popleft()
        if turns:
            self.requests[turn.request] = turns

    def drop(self, turn: Turn) -> None:
        """Remove a turn if it still waits."""
        turns = self.requests.get(turn.request)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self.requests[turn.request]


class FairQueue:
    """Decide whose turn is next. The caller calls `grant` after every other method until it returns None.

    Args:
        slots: Turns that run at once: the number of workers.
        one_each: Whether a request has one turn at a time, even if it asks for more: for example if memory
            was admitted for one.
    """

    def __init__(self, slots: int, *, one_each: bool = False) -> None:
        self._slots, self._one_each = slots, one_each
        self._busy: set[Hashable] = set()  # requests that have a turn, with `one_each`
        self._tenants: dict[str, _Tenant] = {}  # tenants with turns, in order of arrival
        self._taken: set[Turn] = set()
        self._number = 0

    @property
    def waiting(self) -> int:
        """Number of waiting turns."""
        return sum(tenant.waiting for tenant in self._tenants.values())

    @property
    def taken(self) -> int:
        """Number of running turns."""
        return len(self._taken)

    def waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's waiting turns."""
        return self._tenants[tenant].waiting if tenant in self._tenants else 0

    def ask(self, *, tenant: str, weight: float, request: Hashable, seconds: float) -> Turn:
        """Add a turn that waits until `grant` returns it.

        A tenant's next turn can follow its last one at once only if it waits by then.

        Args:
            weight: Its share relative to others; the latest value counts for all its turns.
            request: Key of the request within the tenant; its turns come in the order of the calls.
            seconds: Estimated duration.
        """
        known = self._tenants.setdefault(tenant, _Tenant(name=tenant, weight=weight))
        known.weight = weight
        turn = Turn(tenant=known, request=request, seconds=max(seconds, LEAST_S))
        known.requests.setdefault(request, deque()).append(turn)
        return turn

    def grant(self) -> Turn | None:
        """Give a free slot to the turn that is due, and return it; None if no turn can run now."""
        turn = self._due() if len(self._taken) < self._slots else None
        if turn is None:
            return None
        self._number += 1
        tenant = turn.tenant
        tenant.take(turn)
        tenant.last = self._number
        tenant.deficit_s -= turn.seconds
        tenant.taken += 1
        self._taken.add(turn)
        if self._one_each:
            self._busy.add(turn.request)
        self._settle(tenant)
        return turn

    def end(self, turn: Turn) -> None:
        """End a turn that was granted."""
        self._taken.remove(turn)
        self._busy.discard(turn.request)
        turn.tenant.taken -= 1
        self._settle(turn.tenant)

    def give_up(self, turn: Turn) -> None:
        """Remove a turn that nobody used: one that waits, or was granted just now. May be called again."""
        if turn in self._taken:
            turn.tenant.deficit_s += turn.seconds
            self.end(turn)
        else:
            turn.tenant.drop(turn)
            self._settle(turn.tenant)

    def spent(self, tenant: str, estimated_s: float, took_s: float) -> None:
        """Correct an estimate, preferably before the turn ends.

        A tenant without turns is not remembered, and one that does not wait keeps no credit.
        """
        known = self._tenants.get(tenant)
        if known is not None:
            known.deficit_s += max(estimated_s, LEAST_S) - max(took_s, LEAST_S)
            self._settle(known)

    def expected_wait_s(self, tenant: str, weight: float) -> float:
        """Estimate the seconds until a further request of a tenant would get a turn.

        The sum is half of the running turns, one turn of each request of the tenant, and the turns of others
        meanwhile. Others get turns by weight, at least their next one each, at most all that wait.
        """
        queues = {name: known for name, known in self._tenants.items() if known.waiting}
        if not queues and len(self._taken) < self._slots:
            return 0.0
        own = queues.pop(tenant, None)
        own_s = sum(turns[0].seconds for turns in own.requests.values()) if own is not None else 0.0
        ahead = own_s + sum(turn.seconds for turn in self._taken) / 2
        for other in queues.values():
            head = other.head()
            next_s = head.seconds if head is not None else 0.0
            ahead += min(other.queued_s, max(next_s, own_s * other.weight / weight))
        return ahead / self._slots

    def _settle(self, tenant: _Tenant) -> None:
        """Clear the credit of a tenant that does not wait; remove one that has no turn either."""
        if not tenant.requests:
            tenant.deficit_s = min(tenant.deficit_s, 0.0)
            if not tenant.taken and self._tenants.get(tenant.name) is tenant:
                del self._tenants[tenant.name]

    def _due(self) -> Turn | None:
        """Grant all tenants the least quantum that lets one go; return its turn, or None if none waits."""
        heads = (tenant.head(self._busy) for tenant in self._tenants.values())
        needs = [
            ((head.seconds - head.tenant.deficit_s) / head.tenant.weight, head)
            for head in heads
            if head is not None
        ]
        if not needs:
            return None
        quantum = max(0.0, min(need for need, _ in needs))
        for _, turn in needs:
            turn.tenant.deficit_s += quantum * turn.tenant.weight
        able = (turn for need, turn in needs if need <= quantum + ROUNDING_S)
        return min(able, key=lambda turn: turn.tenant.last)
