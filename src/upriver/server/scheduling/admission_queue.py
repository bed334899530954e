"""Queue requests before admission, and decide which one is admitted when memory is free."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from upriver.control.batch_adaptation import Ask, Grant
from upriver.control.memory_budget import MemoryBudget, MemoryHold
from upriver.errors import DoesNotFit, Overloaded, QuotaExceeded
from upriver.server.tenants import Tenant


class EvictablePrograms(Protocol):
    """Programs that the queue may evict for memory; `upriver.server.programs.cache.ProgramCache` is one."""

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of the programs that are kept or expected."""

    def __contains__(self, key: object) -> bool: ...

    def idle_bytes(self, *, but: Collection[str] = (), owner: str | None = None) -> int:
        """Return the bytes that evicting unused programs would free."""

    def make_room(self, nbytes: int, *, but: Collection[str] = ()) -> bool:
        """Evict unused programs until ``nbytes`` are free, or evict none and return False."""

    def take(self, key: str, nbytes: int, *, owner: str) -> None:
        """Hold a program, and its memory unless the program is kept already."""

    def give_back(self, key: str) -> None:
        """Release a program that `take` held."""


PATIENCE_S = 5.0
"""Wait after which a request's own bytes no longer count against it.

It is the time of some requests. Small requests must not overtake a large one for longer. Its tenant's other
bytes still count: among many requests that waited long, none precedes the first one of another tenant.
"""

MAX_WAIT_S = 30.0
"""Longest wait of a request, which must then retry: well below a client's timeout (120 s of silence)."""

DRAIN_WINDOW_S = 30.0
"""Window over which the rate is computed at which memory comes free."""

MAX_FREED = 1024
"""Most requests that enter the rate at which memory comes free."""

WAY_S = 0.1
"""Pause before another request is sent back for the same memory.

The memory of the one sent back comes free within milliseconds.
"""

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Bounds of ``Retry-After``."""

SPREAD = 4.0
"""Multiple of the time that the waiting requests need, over which retries are spread.

Sooner, most retries would be refused again. Later, an idle server would wait for them.
"""


class QueueFull(Exception):
    """Signal, as the cause of `Overloaded`, that the queue is full."""


class Policy(Protocol):
    """Decide which requests are admitted, and how many samples each may run at once."""

    def __call__(self, asks: list[Ask], free_bytes: int, *, loaded: frozenset[str], most: int) -> list[Grant]:
        """Return grants in the order of ``asks``, oldest first; a program in ``loaded`` needs no memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededProgram:
    """Name a program that a request needs.

    Attributes:
        key: Its key in the program cache.
        nbytes: Memory that it needs unless it is kept already.
    """

    key: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionRequest:
    """Describe the memory that a request asks for.

    Attributes:
        nbytes: Bytes besides its program, by samples of one forward pass.
        programs: Needed program, by samples of one forward pass; empty if it needs none.
        body_nbytes: Bytes sent along. They are held already, until the request ends.
    """

    tenant: Tenant
    nbytes: Mapping[int, int]
    programs: Mapping[int, NeededProgram]
    body_nbytes: int = 0

    def takes(self, size: int) -> int:
        """Return the bytes that it needs at a size, its program included."""
        program = self.programs.get(size)
        return self.nbytes[size] + (program.nbytes if program is not None else 0)

    def least(self, min_batch: int) -> int:
        """Return the fewest sensible samples at once: the first size from ``min_batch`` on, or the last."""
        return next((size for size in sorted(self.nbytes) if size >= min_batch), max(self.nbytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Hold the memory of an admitted request.

    Attributes:
        hold: Its memory.
        nbytes: Bytes at admission.
        size: Samples of one forward pass.
        program: Key of its program, which stays in the program cache; None without one.
        waited_s: Seconds that it waited for the requests of other tenants.
    """

    hold: MemoryHold
    nbytes: int
    size: int
    program: str | None
    waited_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Waiter:
    """Hold a waiting request.

    Attributes:
        ask: The request in the policy's form; its key is ``number``.
        nbytes: Least bytes that it asks for besides its program.
        others: Share of other tenants in the memory that was held or asked for when it came.
    """

    number: int
    since: float
    wanted: AdmissionRequest
    ask: Ask
    nbytes: int
    others: float
    future: asyncio.Future[Admission] = field(repr=False)

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of programs that it may need."""
        return frozenset(program.key for program in self.wanted.programs.values())


class AdmissionQueue:
    """Hold all waiting requests. All methods belong to the event loop's thread.

    Args:
        budget: The memory.
        shelf: Cache of programs, which hold some of the memory.
        policy: Decides which requests are admitted.
        most: Requests that may be admitted at once. Each tenant with none admitted may exceed it by one: it
            must not wait for the long work of others.
        most_waiting: Requests that may wait.
        most_waiting_bytes: Bytes that waiting requests may ask for together.
        min_batch: Fewest samples of a forward pass if there is a choice.
        collect_s: Seconds that a round waits for further requests.
        spare: Frees other memory that is only kept for later, and returns whether there was any. Called if no
            request could be admitted otherwise.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        shelf: EvictablePrograms,
        policy: Policy,
        *,
        most: int,
        most_waiting: int,
        most_waiting_bytes: int,
        min_batch: int = 1,
        collect_s: float = 0.0,
        spare: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget, self._shelf, self._policy = budget, shelf, policy
        self._most, self._most_waiting, self._most_waiting_bytes = most, most_waiting, most_waiting_bytes
        self._min_batch, self._collect_s = min_batch, collect_s
        self._spare, self._now = spare, now
        self._numbers = itertools.count()
        self._waiting: list[_Waiter] = []
        self._admitted: Counter[str] = Counter()
        self._holding: Counter[str] = Counter()  # bytes of the admitted requests, by tenant
        self._freed: deque[tuple[float, int]] = deque(maxlen=MAX_FREED)
        self._round: asyncio.TimerHandle | None = None
        self._sent_back = -math.inf  # time at which a request was last sent back for others
        self._next_place = -math.inf  # time at which all requests that were told to retry would be done
        budget.add_listener(self._soon)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that waiting requests ask for."""
        return sum(waiter.nbytes for waiter in self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's waiting requests."""
        return sum(waiter.wanted.tenant.name == tenant for waiter in self._waiting)

    def admitted_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests that are admitted and not done."""
        return self._admitted[tenant]

    async def wait(self, wanted: AdmissionRequest) -> Admission:
        """Wait for memory. The caller calls `leave` after admission.

        Raises:
            DoesNotFit: If the request can never be admitted.
            QuotaExceeded: If its tenant has reached its quota.
            Overloaded: If the queue is full, or the wait took too long.
        """
        waiter = self._waiter(wanted)
        self._check_quota(wanted.tenant, waiter.nbytes)
        self._make_place(wanted.tenant, waiter.nbytes)
        self._waiting.append(waiter)
        self._soon(self._collect_s)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await self._turn(waiter)
        except TimeoutError:
            raise self._overloaded(waiter.nbytes, f"no memory came free within {MAX_WAIT_S:g} s") from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._soon()

    def leave(self, admitted: Admission, tenant: Tenant) -> None:
        """Record that a request is done and no work runs for it. Its memory is released separately."""
        self._admitted[tenant.name] -= 1
        self._holding[tenant.name] -= admitted.nbytes
        if admitted.program is not None:
            self._shelf.give_back(admitted.program)
        self._soon()

    def freed(self, nbytes: int) -> None:
        """Record bytes that came free; their rate determines how long others are told to wait."""
        self._freed.append((self._now(), nbytes))

    def retry_after_s(self) -> float:
        """Return the seconds until the waiting requests are done, at the recent rate.

        If nothing came free of late, return the longest wait so far.
        """
        seconds_per_byte = self._seconds_per_byte()
        if seconds_per_byte is not None:
            seconds = self.waiting_bytes * seconds_per_byte
        else:
            now = self._now()
            seconds = max((now - waiter.since for waiter in self._waiting), default=0.0)
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))

    def _seconds_per_byte(self) -> float | None:
        """Return the seconds in which a byte comes free of late; None if no memory came free."""
        now = self._now()
        while self._freed and self._freed[0][0] < now - DRAIN_WINDOW_S:
            self._freed.popleft()
        freed = sum(nbytes for _, nbytes in self._freed)
        return max(now - self._freed[0][0], 1.0) / freed if freed else None

    # ------------------------------------------------------------------------------------ coming in

    def _waiter(self, wanted: AdmissionRequest) -> _Waiter:
        """Return a waiter with the sizes from the fewest sensible samples on, or smaller if only they fit.

        Raises:
            DoesNotFit: If no size can ever fit.
        """
        most = self._budget.most_bytes - wanted.body_nbytes
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
            ask = ask_for(number, wanted, sizes[:1])  # it would wait for more than the server has
        future: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        others = self._others_share(wanted.tenant.name)
        return _Waiter(number, self._now(), wanted, ask, nbytes, others, future)

    def _others_share(self, tenant: str) -> float:
        """Return the share of other tenants in the memory that requests hold and wait for."""
        asked = Counter(self._holding)
        for waiter in self._waiting:
            asked[waiter.wanted.tenant.name] += waiter.nbytes
        total = asked.total()
        return 1 - asked[tenant] / total if total else 0.0

    def _check_quota(self, tenant: Tenant, nbytes: int) -> None:
        held = self._admitted[tenant.name] + self.waiting_of(tenant.name)
        if tenant.max_requests is not None and held >= tenant.max_requests:
            raise QuotaExceeded(
                f"{held} requests of {tenant.name} are here, and at most {tenant.max_requests} may be",
                retry_after_s=self.retry_after_s(),
            )
        waiting = sum(each.nbytes for each in self._waiting if each.wanted.tenant.name == tenant.name)
        if tenant.max_waiting_bytes is not None and waiting + nbytes > tenant.max_waiting_bytes:
            if nbytes > tenant.max_waiting_bytes:
                raise DoesNotFit(
                    f"this request asks for {nbytes} bytes of memory, and {tenant.name} may have "
                    f"{tenant.max_waiting_bytes} waiting: ask for smaller micro-batches or another cut"
                )
            raise QuotaExceeded(
                f"waiting requests of {tenant.name} ask for {waiting} bytes; with this one's {nbytes} it "
                f"would be more than {tenant.max_waiting_bytes}",
                retry_after_s=self.retry_after_s(),
            )

    def _make_place(self, tenant: Tenant, nbytes: int) -> None:
        """Make a place in the queue; if it is full, send back the last request of the largest tenant.

        The largest tenant has the largest part of the queue, divided by its weight. If the new request's
        tenant would then have as large a part, the new request must retry instead.

        Raises:
            Overloaded: If there is no place.
        """
        staying = list(self._waiting)
        while (why := self._full(staying, nbytes)) is not None:
            last = self._last_of_most(staying, tenant, nbytes)
            if last is None:
                raise self._overloaded(nbytes, why) from QueueFull()
            staying.remove(last)
        for waiter in [each for each in self._waiting if each not in staying]:
            why = "others have a right to the places of so many requests"
            error = self._overloaded(waiter.nbytes, why)
            error.__cause__ = QueueFull()
            self._send_back(waiter, error)

    def _full(self, waiting: Sequence[_Waiter], nbytes: int) -> str | None:
        """Return why a request of this many bytes may not wait with these; None if it may."""
        if len(waiting) >= self._most_waiting:
            return f"{len(waiting)} requests wait for memory, and no more may"
        there = sum(waiter.nbytes for waiter in waiting)
        if waiting and there + nbytes > self._most_waiting_bytes:
            return f"waiting requests ask for {there} bytes, and no more may be"
        return None

    def _last_of_most(self, waiting: Sequence[_Waiter], tenant: Tenant, nbytes: int) -> _Waiter | None:
        """Return the last request of the tenant with the largest part of the queue, divided by weight.

        Return None if no part is larger than the one that ``tenant`` would have.
        """
        parts: dict[str, float] = {}
        for waiter in waiting:
            whose = waiter.wanted.tenant
            parts[whose.name] = parts.get(whose.name, 0.0) + self._part(waiter.nbytes) / whose.weight
        own = parts.pop(tenant.name, 0.0) + self._part(nbytes) / tenant.weight
        most = max(parts, key=parts.__getitem__, default=None)
        if most is None or parts[most] <= own:
            return None
        theirs = (each for each in reversed(waiting) if each.wanted.tenant.name == most)
        return next((each for each in theirs if not each.future.done()), None)

    def _part(self, nbytes: int) -> float:
        """Return the part of the queue that a request fills: of its places or bytes, the larger one."""
        return max(1 / self._most_waiting, nbytes / self._most_waiting_bytes)

    def _overloaded(self, nbytes: int, why: str) -> Overloaded:
        """Return the error for a request that must retry, after those that were told so before are done."""
        now, soonest_s = self._now(), self.retry_after_s()
        latest_s = min(MOST_RETRY_S, SPREAD * soonest_s)
        seconds = min(latest_s, max(soonest_s, self._next_place - now))
        self._next_place = now + seconds + nbytes * (self._seconds_per_byte() or 0.0)
        return Overloaded(why, retry_after_s=math.ceil(seconds))

    async def _turn(self, waiter: _Waiter) -> Admission:
        """Wait for admission. If the caller is cancelled at that very moment, release everything."""
        try:
            return await waiter.future
        except BaseException:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                admitted = future.result()
                admitted.hold.release()
                self.leave(admitted, waiter.wanted.tenant)
            raise

    # --------------------------------------------------------------------------------------- rounds

    def _soon(self, seconds: float = 0.0) -> None:
        """Schedule a round, one for all events until then."""
        if self._waiting and self._round is None:
            self._round = asyncio.get_running_loop().call_later(seconds, self._go)

    def _go(self) -> None:
        self._round = None
        waiters = self._in_order()
        most = self._most - sum(self._admitted.values())
        if most <= 0:
            waiters = self._first_ones(waiters)
            most = len(waiters)
        if not waiters:
            return
        wanted = frozenset[str]().union(*(waiter.keys for waiter in waiters))
        # Idle programs that other requests wait for must not block the first in the queue forever.
        went = self._deal(waiters, most, but=wanted) or self._deal(waiters[:1], most, but=waiters[0].keys)
        if not went and not sum(self._admitted.values()) and not self._spare():
            self._make_way()  # no admitted request frees memory; any that comes free starts a round

    def _deal(self, waiters: Sequence[_Waiter], most: int, *, but: Collection[str]) -> bool:
        """Admit the requests that the policy grants; return whether any was admitted.

        Idle programs are evicted for them, except those in ``but``.
        """
        free = self._budget.free_bytes + self._shelf.idle_bytes(but=but)
        asks = [waiter.ask for waiter in waiters]
        by_number = {waiter.number: waiter for waiter in waiters}
        grants = self._policy(asks, free, loaded=self._shelf.keys, most=most)
        went = [self._admit(by_number[int(str(grant.key))], grant.batch, but) for grant in grants]
        return any(went)

    def _make_way(self) -> None:
        """Send back the youngest of requests that wait for the memory of each other's bodies."""
        if self._now() - self._sent_back < WAY_S:
            return self._soon(WAY_S)
        for older, waiter in enumerate(self._waiting, start=1):
            younger = [each for each in self._waiting[older:] if each.wanted.body_nbytes]
            if younger and self._missing(waiter) <= sum(each.wanted.body_nbytes for each in younger):
                self._sent_back = self._now()
                why = "requests that came first wait for the memory of this one's body"
                return self._send_back(younger[-1], self._overloaded(younger[-1].nbytes, why))

    def _missing(self, waiter: _Waiter) -> int:
        """Return the bytes, besides idle programs, that must come free before a request is admitted."""
        size, wanted = waiter.ask.smallest, waiter.wanted
        needed = wanted.nbytes[size] + self._new_bytes(wanted.programs.get(size))
        return needed - self._budget.free_bytes - self._shelf.idle_bytes(but=waiter.keys)

    def _send_back(self, waiter: _Waiter, error: Overloaded) -> None:
        """Refuse a waiting request, which holds nothing yet."""
        self._waiting.remove(waiter)
        waiter.future.set_exception(error)

    def _first_ones(self, waiters: Sequence[_Waiter]) -> list[_Waiter]:
        """Return the next request of each tenant that has none admitted."""
        first: dict[str, _Waiter] = {}
        for waiter in waiters:
            first.setdefault(waiter.wanted.tenant.name, waiter)
        return [waiter for tenant, waiter in first.items() if not self._admitted[tenant]]

    def _in_order(self) -> list[_Waiter]:
        """Return the waiters, ordered by the bytes that their tenants would then hold, over their weights.

        See `PATIENCE_S`. Programs do not count: a tenant with large networks would always come last, and idle
        programs are evicted.
        """
        now, promised = self._now(), Counter[str]()
        ranked: list[tuple[tuple[float, float, int], _Waiter]] = []
        for waiter in self._waiting:
            tenant, size = waiter.wanted.tenant, waiter.ask.smallest
            if waiter.future.done() or not self._may_hold(waiter, size, promised[tenant.name]):
                continue
            before = self._holding[tenant.name] + promised[tenant.name]
            promised[tenant.name] += waiter.nbytes
            own = 0 if now - waiter.since >= PATIENCE_S else waiter.nbytes
            share, without = (before + own) / tenant.weight, before / tenant.weight
            ranked.append(((share, without, waiter.number), waiter))
        return [waiter for _, waiter in sorted(ranked, key=lambda each: each[0])]

    def _may_hold(self, waiter: _Waiter, size: int, promised: int = 0) -> bool:
        """Return whether the tenant's memory share allows it. A tenant with nothing gets the smallest size.

        Idle programs do not count, except the one that the request would use.
        """
        tenant, program = waiter.wanted.tenant, waiter.wanted.programs.get(size)
        if size == waiter.ask.smallest and not promised and not self._admitted[tenant.name]:
            return True
        own = frozenset[str]() if program is None else frozenset((program.key,))
        held = self._budget.held_by(tenant.name) - self._shelf.idle_bytes(but=own, owner=tenant.name)
        more = waiter.wanted.nbytes[size] + self._new_bytes(program)
        return held + promised + more <= tenant.memory_share * self._budget.total_bytes

    def _new_bytes(self, program: NeededProgram | None) -> int:
        """Return the bytes of a program that is not in the cache yet; else 0."""
        return program.nbytes if program is not None and program.key not in self._shelf else 0

    def _admit(self, waiter: _Waiter, granted: int, but: Collection[str]) -> bool:
        """Take memory for the granted size, or for the next smaller one; return whether any was free.

        The granted size may fail: at another size it is another program, which has to be loaded.
        """
        for size in reversed([size for size in waiter.ask.sizes if size <= granted]):
            program, nbytes = waiter.wanted.programs.get(size), waiter.wanted.nbytes[size]
            room = nbytes + self._new_bytes(program)
            if self._may_hold(waiter, size) and self._shelf.make_room(room, but=but):
                self._begin(waiter, size, nbytes, program)
                return True
        return False

    def _begin(self, waiter: _Waiter, size: int, nbytes: int, program: NeededProgram | None) -> None:
        tenant = waiter.wanted.tenant
        if program is not None:
            self._shelf.take(program.key, program.nbytes, owner=tenant.name)
        hold = self._budget.hold(nbytes, owner=tenant.name)
        self._admitted[tenant.name] += 1
        self._holding[tenant.name] += nbytes
        self._waiting.remove(waiter)
        key = None if program is None else program.key
        waited_s = (self._now() - waiter.since) * waiter.others
        waiter.future.set_result(
            Admission(hold=hold, nbytes=nbytes, size=size, program=key, waited_s=waited_s)
        )


def ask_for(number: int, wanted: AdmissionRequest, sizes: Sequence[int]) -> Ask:
    """Return a request in the policy's form: a line in the samples that never lies below the sizes' bytes.

    Args:
        number: Its key.
        sizes: Sizes that it may get, ascending.
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
