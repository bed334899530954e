"""Who computes next: turns that are dealt fairly between tenants, by the seconds they take.

Deficit round robin: Shreedhar, Varghese, "Efficient Fair Queuing Using Deficit Round-Robin", IEEE/ACM
Transactions on Networking 4(3), 1996.

Symbols
    flow                         a tenant with turns waiting
    packet, its size             a turn (one forward pass), its estimated seconds
    DC_i, deficit counter        ``_Tenant.deficit_s``: seconds a tenant has been granted and not used
    Q_i, quantum                 what every tenant is granted in a round, in proportion to its weight

Departures
    - The quantum is not fixed. Each round grants the least with which somebody can go: with ``h`` the seconds
      of a tenant's next turn, the smallest ``(h - deficit) / weight``, times each one's weight. So a tenant
      has at most one turn in a round, and the turns of tenants interleave as finely as can be. A fixed
      quantum that does for the longest turn and the smallest weight would let the others have many turns in
      a row. Dealing one turn costs a look at every tenant that waits, of which there are few.
    - Among those who can go, the one goes that has gone without for longest.
    - Estimates are put right afterwards: `Turns.spent` moves the deficit by what they were wrong.
    - Within a tenant its requests take turns, and within a request turns come in the order in which they
      were asked for; if that is said, a request has one turn at a time, and until it is over what it asks for
      beside it does not count as waiting.

Bound
    Let tenants i and j both have turns waiting throughout some interval, let ``S`` be the seconds (as
    estimated) of the turns they were given in it, and ``M`` the longest turn each asked for. Every round
    grants both the same for their weight, ``C_i / w_i = C_j / w_j``, and ``S`` is ``C`` less what the deficit
    grew by. A deficit is never below 0, as nobody goes on less than a turn takes, nor above ``M``, as no
    round grants anybody more than its next turn lacks; so it changes by ``M`` at most, and

        | S_i / w_i - S_j / w_j |  <=  M_i / w_i + M_j / w_j

    however long the interval: one turn of each. It holds for any number of slots. In seconds that turns took,
    rather than were estimated to take, add what estimates that are not put right yet are wrong by.

    Likewise, beside what is being computed, a turn of ``h`` seconds that tenant i asks for while it has none
    is preceded by at most ``h w_j / w_i + M_j`` seconds of each other tenant j: its share meanwhile, and one
    turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Container, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from upriver.types import require_finite

LEAST_S = 1e-3
"""No turn counts for less: handing a micro-batch to a worker and its answer back takes as long, and what
costs nothing could be had for ever."""

ROUNDING_S = 1e-9
"""Seconds, for a weight of 1, by which sums of seconds may be off; those that differ by less are equal."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Turn:
    tenant: _Tenant
    request: Hashable
    seconds: float
    granted: asyncio.Future[None]


@dataclass(eq=False, kw_only=True, slots=True)
class _Tenant:
    """A tenant that has turns, waiting or taken.

    Attributes:
        requests: Turns that wait, by request; the request whose turn is next comes first.
        taken: Turns it has now.
        last: The number of its last turn; 0 before it had one.
    """

    name: str
    weight: float
    deficit_s: float = 0.0
    requests: OrderedDict[Hashable, deque[_Turn]] = field(default_factory=OrderedDict)
    taken: int = 0
    last: int = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self.requests.values()))

    @property
    def queued_s(self) -> float:
        return sum(turn.seconds for turns in self.requests.values() for turn in turns)

    def head(self, busy: Container[Hashable] = ()) -> _Turn | None:
        """Its next turn; those that were given up and are still here are dropped.

        Args:
            busy: Requests that get none now.
        """
        for request, turns in tuple(self.requests.items()):
            while turns and turns[0].granted.done():
                turns.popleft()
            if not turns:
                del self.requests[request]
            elif request not in busy:
                return turns[0]
        return None

    def take(self, turn: _Turn) -> None:
        """The next turn of a request waits no more; other requests of this tenant come first then."""
        turns = self.requests.pop(turn.request)
        turns.popleft()
        if turns:
            self.requests[turn.request] = turns

    def drop(self, turn: _Turn) -> None:
        """A turn that is given up, if it still waits."""
        turns = self.requests.get(turn.request)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self.requests[turn.request]


class Turns:
    """Deals turns. Belongs to the event loop's thread.

    A free slot is never kept while anybody waits.

    Args:
        slots: Turns that are taken at once: as many as there are workers.
        one_each: Whether a request has one turn at a time, however many it asks for: as where memory was
            admitted for one.
    """

    def __init__(self, slots: int, *, one_each: bool = False) -> None:
        self._slots = _checked(slots)
        self._one_each = one_each
        self._busy: set[Hashable] = set()  # requests that have a turn, where they may have one
        self._tenants: dict[str, _Tenant] = {}  # those with turns, in the order in which they came
        self._taken: set[_Turn] = set()
        self._number = 0

    def set_slots(self, slots: int) -> None:
        """There are more workers now, or fewer; whoever has a turn keeps it."""
        self._slots = _checked(slots)
        self._deal()

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return sum(tenant.waiting for tenant in self._tenants.values())

    @property
    def taken(self) -> int:
        """Turns that are taken now."""
        return len(self._taken)

    def waiting_of(self, tenant: str) -> int:
        """Turns of a tenant that wait."""
        return self._tenants[tenant].waiting if tenant in self._tenants else 0

    @asynccontextmanager
    async def turn(
        self, *, tenant: str, weight: float, request: Hashable, seconds: float
    ) -> AsyncIterator[None]:
        """Wait for a turn, and have it while the block runs.

        A tenant's next turn can follow its last one at once only if it waits by then.

        Args:
            tenant: Whose turn.
            weight: Its share relative to others; the latest counts for all its turns.
            request: Whose turn within the tenant; turns of one request come in the order they were asked for.
            seconds: What it will take, as far as known.
        """
        require_finite("weight", weight, positive=True)
        require_finite("seconds", seconds)
        turn = self._ask(tenant, weight, request, max(seconds, LEAST_S))
        try:
            await turn.granted
        except BaseException:
            self._give_up(turn)
            raise
        try:
            yield
        finally:
            self._end(turn)

    def spent(self, tenant: str, estimated_s: float, took_s: float) -> None:
        """Put an estimate right, at best before the turn ends.

        A tenant without turns is not remembered, and one that does not wait keeps no credit.
        """
        known = self._tenants.get(tenant)
        if known is not None:
            known.deficit_s += max(estimated_s, LEAST_S) - max(took_s, LEAST_S)
            self._settle(known)

    def expected_wait_s(self, tenant: str, weight: float) -> float:
        """Seconds until a turn would come that a further request of a tenant asked for now, roughly.

        Half of what is being computed, one turn of each request of the tenant, and what others get meanwhile:
        as their weights are, at least their next turn each, at most all that waits.
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
        return ahead / max(1, self._slots)

    # ------------------------------------------------------------------------------ coming and going

    def _ask(self, name: str, weight: float, request: Hashable, seconds: float) -> _Turn:
        tenant = self._tenants.setdefault(name, _Tenant(name=name, weight=weight))
        tenant.weight = weight
        granted = asyncio.get_running_loop().create_future()
        turn = _Turn(tenant=tenant, request=request, seconds=seconds, granted=granted)
        tenant.requests.setdefault(request, deque()).append(turn)
        self._deal()
        return turn

    def _give_up(self, turn: _Turn) -> None:
        """Whoever waited does not any more; the turn may have come in that very moment."""
        if turn in self._taken:
            turn.tenant.deficit_s += turn.seconds
            self._end(turn)
        else:
            turn.tenant.drop(turn)
            self._settle(turn.tenant)

    def _end(self, turn: _Turn) -> None:
        self._taken.remove(turn)
        self._busy.discard(turn.request)
        turn.tenant.taken -= 1
        self._settle(turn.tenant)
        self._deal()

    def _settle(self, tenant: _Tenant) -> None:
        """Who does not wait keeps no credit; who has no turn either is forgotten."""
        if not tenant.requests:
            tenant.deficit_s = min(tenant.deficit_s, 0.0)
            if not tenant.taken and self._tenants.get(tenant.name) is tenant:
                del self._tenants[tenant.name]

    # -------------------------------------------------------------------------------------- dealing

    def _deal(self) -> None:
        """Give turns away while there are slots."""
        while len(self._taken) < self._slots:
            turn = self._due()
            if turn is None:
                return
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
            turn.granted.set_result(None)

    def _due(self) -> _Turn | None:
        """Grant everybody what makes somebody able to go, and say who goes; None where nobody waits."""
        needs: list[tuple[float, _Turn]] = []
        for tenant in tuple(self._tenants.values()):
            head = tenant.head(self._busy)
            if head is None:
                self._settle(tenant)
            else:
                needs.append(((head.seconds - tenant.deficit_s) / tenant.weight, head))
        if not needs:
            return None
        quantum = max(0.0, min(need for need, _ in needs))
        for _, turn in needs:
            turn.tenant.deficit_s += quantum * turn.tenant.weight
        able = (turn for need, turn in needs if need <= quantum + ROUNDING_S)
        return min(able, key=lambda turn: turn.tenant.last)


def _checked(slots: int) -> int:
    if slots < 0:
        raise ValueError(f"slots are 0 or more, got {slots}")
    return slots
