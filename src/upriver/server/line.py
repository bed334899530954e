"""The line before admission: who waits for memory, and whose turn it is when some is there."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from upriver.errors import DoesNotFit, Overloaded, QuotaExceeded
from upriver.server.admission import Ask, Grant
from upriver.server.budget import Budget, Hold
from upriver.server.shelf import Shelf
from upriver.server.tenants import Tenant

PATIENCE_S = 5.0
"""Whoever has waited so long goes before all that came later, however little those take and whoever they are:
some requests' time, after which a large one must not be overtaken any more."""

MAX_WAIT_S = 30.0
"""Then a request is told to come back: well before a client takes a silent server for a dead one (120 s)."""

DRAIN_WINDOW_S = 30.0
"""How far back the rate looks at which memory comes free."""

MAX_FREED = 1024
"""Requests that the rate at which memory comes free looks back on, at most."""

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Bounds of what ``Retry-After`` says."""


class Full(Exception):
    """Why a request is told to come back: so many are here that no more may wait."""


class Policy(Protocol):
    """Which requests may go, and how many samples they may take at once."""

    def __call__(self, asks: list[Ask], free_bytes: int, *, loaded: frozenset[str], most: int) -> list[Grant]:
        """Grants in the order of ``asks``, oldest first; a program in ``loaded`` takes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that a request needs.

    Attributes:
        key: Names it on the shelf.
        nbytes: What it takes where it is not kept yet.
    """

    key: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a request asks for.

    Attributes:
        nbytes: By the samples of one forward pass, what it takes beside its program.
        programs: The same, to the program; empty where none is needed.
    """

    tenant: Tenant
    nbytes: Mapping[int, int]
    programs: Mapping[int, Program]

    def takes(self, size: int) -> int:
        """All that it takes at a size, its program included."""
        program = self.programs.get(size)
        return self.nbytes[size] + (program.nbytes if program is not None else 0)

    def least(self, min_batch: int) -> int:
        """The fewest samples at once that make sense: the first size from ``min_batch`` on, or the last."""
        return next((size for size in sorted(self.nbytes) if size >= min_batch), max(self.nbytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A request that may go.

    Attributes:
        hold: Its memory.
        size: Samples of one forward pass.
        program: Key of its program, held on to on the shelf; None without.
    """

    hold: Hold
    size: int
    program: str | None


@dataclass(eq=False, slots=True)
class _Waiter:
    """One who waits.

    Attributes:
        ask: As the policy sees it; its key is ``number``.
        nbytes: What it asks for at least, beside its program.
    """

    number: int
    since: float
    wanted: Wanted
    ask: Ask
    nbytes: int
    future: asyncio.Future[Admitted] = field(repr=False)

    @property
    def keys(self) -> frozenset[str]:
        """Programs that it may need."""
        return frozenset(program.key for program in self.wanted.programs.values())


class Line:
    """Everyone who waits. All of it belongs to the event loop's thread.

    Args:
        budget: Memory.
        shelf: Programs, which hold some of it.
        policy: Says who may go.
        most: Requests that may have been admitted at once.
        most_waiting: Requests that may wait.
        most_waiting_bytes: What they may ask for together.
        min_batch: The fewest samples of a forward pass where there is a choice.
        collect_s: How long a round waits for others to come.
        on_change: Told whenever the line is longer or shorter.
    """

    def __init__(
        self,
        budget: Budget,
        shelf: Shelf,
        policy: Policy,
        *,
        most: int,
        most_waiting: int,
        most_waiting_bytes: int,
        min_batch: int = 1,
        collect_s: float = 0.0,
        on_change: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget, self._shelf, self._policy = budget, shelf, policy
        self._most, self._most_waiting, self._most_waiting_bytes = most, most_waiting, most_waiting_bytes
        self._min_batch, self._collect_s = min_batch, collect_s
        self._on_change, self._now = on_change, now
        self._numbers = itertools.count()
        self._waiting: list[_Waiter] = []
        self._admitted: Counter[str] = Counter()
        self._freed: deque[tuple[float, int]] = deque(maxlen=MAX_FREED)
        self._round: asyncio.TimerHandle | None = None
        budget.add_listener(self._soon)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """What they ask for."""
        return sum(waiter.nbytes for waiter in self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return sum(waiter.wanted.tenant.name == tenant for waiter in self._waiting)

    def admitted_of(self, tenant: str) -> int:
        """Requests of a tenant that were admitted and are not through."""
        return self._admitted[tenant]

    async def wait(self, wanted: Wanted) -> Admitted:
        """Wait for memory; whoever is admitted calls `leave`.

        Raises:
            DoesNotFit: If it never can be.
            QuotaExceeded: If its tenant has as many as it may.
            Overloaded: If the line is too long, or it took too long.
        """
        waiter = self._waiter(wanted)
        self._check_quota(wanted.tenant, waiter.nbytes)
        self._check_room(waiter.nbytes)
        self._waiting.append(waiter)
        self._on_change()
        self._soon(self._collect_s)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await self._turn(waiter)
        except TimeoutError:
            raise self._overloaded(f"no memory came free within {MAX_WAIT_S:g} s") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._on_change()
                self._soon()

    def leave(self, admitted: Admitted, tenant: Tenant) -> None:
        """A request is through, and nobody works for it any more; its memory is given back apart."""
        self._admitted[tenant.name] -= 1
        if admitted.program is not None:
            self._shelf.give_back(admitted.program)
        self._soon()

    def freed(self, nbytes: int) -> None:
        """So much came back: how fast that goes is what others are told to wait by."""
        self._freed.append((self._now(), nbytes))

    def retry_after_s(self) -> float:
        """In how long what waits now will be through, at the rate of late."""
        now = self._now()
        while self._freed and self._freed[0][0] < now - DRAIN_WINDOW_S:
            self._freed.popleft()
        freed = sum(nbytes for _, nbytes in self._freed)
        if not freed:
            return LEAST_RETRY_S
        rate = freed / max(now - self._freed[0][0], 1.0)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, self.waiting_bytes / rate))

    # ------------------------------------------------------------------------------------ coming in

    def _waiter(self, wanted: Wanted) -> _Waiter:
        """Of the sizes, those from the fewest that make sense on; fewer where only those can ever fit.

        Raises:
            DoesNotFit: If none can.
        """
        most = self._budget.most_bytes
        fitting = [size for size in sorted(wanted.nbytes) if wanted.takes(size) <= most]
        if not fitting:
            least = min(map(wanted.takes, wanted.nbytes))
            raise DoesNotFit(
                f"this request takes {least} bytes of memory, and the server has {most}: ask for smaller "
                "micro-batches or another cut"
            )
        sizes = [size for size in fitting if size >= wanted.least(self._min_batch)] or fitting[-1:]
        number, nbytes = next(self._numbers), wanted.nbytes[sizes[0]]
        ask = ask_for(number, wanted, sizes)
        if ask.fixed_bytes + ask.least * ask.bytes_per_sample + ask.program_bytes > most:
            ask = ask_for(number, wanted, sizes[:1])  # it would wait for more than there can be
        future: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        return _Waiter(number, self._now(), wanted, ask, nbytes, future)

    def _check_quota(self, tenant: Tenant, nbytes: int) -> None:
        held = self._admitted[tenant.name] + self.waiting_of(tenant.name)
        if tenant.max_requests is not None and held >= tenant.max_requests:
            raise QuotaExceeded(
                f"{held} requests of {tenant.name} are here, and at most {tenant.max_requests} may be",
                retry_after_s=self.retry_after_s(),
            )
        waiting = sum(each.nbytes for each in self._waiting if each.wanted.tenant.name == tenant.name)
        if tenant.max_waiting_bytes is not None and waiting + nbytes > tenant.max_waiting_bytes:
            raise QuotaExceeded(
                f"waiting requests of {tenant.name} ask for {waiting} bytes; with this one's {nbytes} it "
                f"would be more than {tenant.max_waiting_bytes}",
                retry_after_s=self.retry_after_s(),
            )

    def _check_room(self, nbytes: int) -> None:
        if len(self._waiting) >= self._most_waiting:
            why = f"{len(self._waiting)} requests wait for memory, and no more may"
            raise self._overloaded(why) from Full()
        if self._waiting and self.waiting_bytes + nbytes > self._most_waiting_bytes:
            why = f"waiting requests ask for {self.waiting_bytes} bytes, and no more may be"
            raise self._overloaded(why) from Full()

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(why, retry_after_s=math.ceil(self.retry_after_s()))

    async def _turn(self, waiter: _Waiter) -> Admitted:
        """Wait to be admitted; whoever gives up in that very moment gives everything back."""
        try:
            return await waiter.future
        except BaseException:
            if waiter.future.done() and not waiter.future.cancelled():
                admitted = waiter.future.result()
                admitted.hold.release()
                self.leave(admitted, waiter.wanted.tenant)
            raise

    # --------------------------------------------------------------------------------------- rounds

    def _soon(self, seconds: float = 0.0) -> None:
        """Look who may go, once for all that happens until then."""
        if self._waiting and self._round is None:
            self._round = asyncio.get_running_loop().call_later(seconds, self._go)

    def _go(self) -> None:
        self._round = None
        waiters = self._in_order()
        most = self._most - sum(self._admitted.values())
        if not waiters or most <= 0:
            return
        wanted = frozenset[str]().union(*(waiter.keys for waiter in waiters))
        if not self._deal(waiters, most, but=wanted):
            # Idle programs that others wait for must not keep the first in line from going for ever.
            self._deal(waiters[:1], most, but=waiters[0].keys)

    def _deal(self, waiters: Sequence[_Waiter], most: int, *, but: Collection[str]) -> bool:
        """Ask the policy who may go; whether anybody did. Idle programs make room, ``but`` for these."""
        free = self._budget.free_bytes + self._shelf.idle_bytes(but=but)
        asks = [waiter.ask for waiter in waiters]
        by_number = {waiter.number: waiter for waiter in waiters}
        grants = self._policy(asks, free, loaded=self._shelf.keys, most=most)
        went = [self._admit(by_number[int(str(grant.key))], grant.batch, but) for grant in grants]
        return any(went)

    def _in_order(self) -> list[_Waiter]:
        """Those who have waited long, then by what their tenants would hold with them, over their weights."""
        now, promised = self._now(), Counter[str]()
        ranked: list[tuple[tuple[int, float, int], _Waiter]] = []
        for waiter in self._waiting:
            tenant = waiter.wanted.tenant
            if waiter.future.done() or not self._may_hold(waiter, waiter.nbytes, promised[tenant.name]):
                continue
            promised[tenant.name] += waiter.nbytes
            share = (self._budget.held_by(tenant.name) + promised[tenant.name]) / tenant.weight
            old = now - waiter.since >= PATIENCE_S
            ranked.append(((0, 0.0, waiter.number) if old else (1, share, waiter.number), waiter))
        return [waiter for _, waiter in sorted(ranked, key=lambda each: each[0])]

    def _may_hold(self, waiter: _Waiter, nbytes: int, promised: int = 0) -> bool:
        """Whether that is within its tenant's share of the memory; a tenant that has nothing gets one."""
        tenant = waiter.wanted.tenant
        most = tenant.memory_share * self._budget.total_bytes
        first = not promised and not self._admitted[tenant.name] and nbytes == waiter.nbytes
        return first or self._budget.held_by(tenant.name) + promised + nbytes <= most

    def _admit(self, waiter: _Waiter, granted: int, but: Collection[str]) -> bool:
        """Take the memory for the size that was granted, or for the next smaller one; whether any can be had.

        What was granted may not do after all: at another size it is another program, which has to be loaded.
        """
        for size in reversed([size for size in waiter.ask.sizes if size <= granted]):
            program, nbytes = waiter.wanted.programs.get(size), waiter.wanted.nbytes[size]
            new = program.nbytes if program is not None and program.key not in self._shelf else 0
            if self._may_hold(waiter, nbytes) and self._shelf.make_room(nbytes + new, but=but):
                self._begin(waiter, size, nbytes, program)
                return True
        return False

    def _begin(self, waiter: _Waiter, size: int, nbytes: int, program: Program | None) -> None:
        tenant = waiter.wanted.tenant
        if program is not None:
            self._shelf.take(program.key, program.nbytes, owner=tenant.name)
        hold = self._budget.hold(nbytes, owner=tenant.name)
        self._admitted[tenant.name] += 1
        self._waiting.remove(waiter)
        self._on_change()
        key = None if program is None else program.key
        waiter.future.set_result(Admitted(hold=hold, size=size, program=key))


def ask_for(number: int, wanted: Wanted, sizes: Sequence[int]) -> Ask:
    """A request as the policy sees it: a line in the samples that is nowhere under what the sizes take.

    Args:
        number: Its key.
        sizes: Those that it may have, ascending.
    """
    first, *larger = sizes
    nbytes = wanted.nbytes
    steps = [-((nbytes[first] - nbytes[size]) // (size - first)) for size in larger]  # rounded up
    per_sample = max(1, *(steps or [nbytes[first] // first]))
    programs = [wanted.programs[size] for size in sizes if size in wanted.programs]
    return Ask(
        key=number,
        fixed_bytes=max(0, nbytes[first] - first * per_sample),
        bytes_per_sample=per_sample,
        program=programs[0].key if programs else None,
        program_bytes=max((program.nbytes for program in programs), default=0),
        least=first,
        most=sizes[-1],
        sizes=tuple(sizes),
    )
