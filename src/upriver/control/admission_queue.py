"""Queue requests before admission, and decide which one is admitted when memory is free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from upriver.control.batch_adaptation import Ask, Policy
from upriver.control.memory_budget import MemoryBudget, MemoryHold
from upriver.control.retry_times import RetryTimes
from upriver.errors import DoesNotFit, Overloaded, QuotaExceeded


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantShare:
    """A tenant's share of a server.

    Attributes:
        name: Name in metrics, logs and the audit log; it has the form of a store's name.
        weight: Share of the workers and of the memory relative to others'.
        max_requests: Run requests admitted and waiting at once; None: the server's limit.
        max_waiting_bytes: Bytes that its waiting requests may ask for together; None: the server's limit.
        memory_share: Most of the memory budget that its admitted requests may hold, in (0, 1].
    """

    name: str
    weight: float = 1.0
    max_requests: int | None = None
    max_waiting_bytes: int | None = None
    memory_share: float = 1.0


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

WAY_S = 0.1
"""Pause before another request is sent back for the same memory.

The memory of the one sent back comes free within milliseconds.
"""


class QueueFull(Exception):
    """Signal, as the cause of `Overloaded`, that the queue is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededProgram:
    """Name a program that a request needs, and the memory that it takes unless it is kept already."""

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

    tenant: TenantShare
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
        nbytes: Bytes at admission.
        size: Samples of one forward pass.
        program: Key of its program, which stays in the program cache; None without one.
        waited_s: Seconds that it waited for the requests of other tenants.
    """

    tenant: str
    hold: MemoryHold
    nbytes: int
    size: int
    program: str | None
    waited_s: float = 0.0


@dataclass(eq=False, kw_only=True, slots=True)
class Waiter:
    """A request in the queue.

    Attributes:
        nbytes: Least bytes that it asks for besides its program.
        others: Share of other tenants in the memory that was held or asked for when it came.
        outcome: Decision on it; None while it waits.
    """

    since: float
    wanted: AdmissionRequest
    ask: Ask
    nbytes: int
    others: float
    outcome: Admission | Overloaded | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of programs that it may need."""
        return frozenset(program.key for program in self.wanted.programs.values())


class Round(NamedTuple):
    """Result of one decision.

    Attributes:
        decided: Requests that were admitted, or sent back.
        again_s: Seconds after which to decide again; None if nothing changes by waiting.
    """

    decided: list[Waiter]
    again_s: float | None


class AdmissionQueue:
    """Decide on all waiting requests.

    The caller calls `decide` soon after a request came or left, and after the budget's listeners were called.

    Args:
        most: Requests that may be admitted at once. Each tenant with none admitted may exceed it by one: it
            must not wait for the long work of others.
        most_waiting_bytes: Bytes that waiting requests may ask for together.
        min_batch: Fewest samples of a forward pass if there is a choice.
        spare: Frees other memory that is only kept for later, and returns whether there was any. Called if no
            request could be admitted otherwise.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        program_cache: EvictablePrograms,
        policy: Policy,
        *,
        most: int,
        most_waiting: int,
        most_waiting_bytes: int,
        min_batch: int = 1,
        spare: Callable[[], bool] = lambda: False,
    ) -> None:
        self._budget, self._program_cache, self._policy = budget, program_cache, policy
        self._most, self._most_waiting, self._most_waiting_bytes = most, most_waiting, most_waiting_bytes
        self._min_batch, self._spare = min_batch, spare
        self._waiting: list[Waiter] = []  # in order of arrival
        self._admitted: Counter[str] = Counter()
        self._holding: Counter[str] = Counter()  # bytes of the admitted requests, by tenant
        self._retries = RetryTimes()
        self._sent_back = -math.inf  # time at which a request was last sent back for others

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

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until the waiting requests are done, at the recent rate."""
        return self._retries.soonest_s(self.waiting_bytes, self._longest_wait_s(now), now)

    # ------------------------------------------------------------------------------ coming and going

    def enter(self, wanted: AdmissionRequest, now: float) -> tuple[Waiter, list[Waiter]]:
        """Let a request wait; return it, and the requests that were sent back to make a place for it.

        Raises:
            DoesNotFit: If the request can never be admitted.
            QuotaExceeded: If its tenant has reached its quota.
            Overloaded: If the queue is full.
        """
        waiter = self._waiter(wanted, now)
        self._check_quota(wanted.tenant, waiter.nbytes, now)
        sent_back = self._make_place(wanted.tenant, waiter.nbytes, now)
        self._waiting.append(waiter)
        return waiter, sent_back

    def time_out(self, waiter: Waiter, now: float) -> Overloaded:
        """Return the error of a request that has waited for `MAX_WAIT_S`, and stop it from waiting."""
        error = self._overloaded(waiter.nbytes, f"no memory came free within {MAX_WAIT_S:g} s", now)
        self.give_up(waiter)
        return error

    def give_up(self, waiter: Waiter) -> None:
        """Stop a request from waiting; may be called again."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def leave(self, admitted: Admission, now: float) -> None:
        """Release the memory of a request that is done, and for which no work runs."""
        admitted.hold.release()
        self._admitted[admitted.tenant] -= 1
        self._holding[admitted.tenant] -= admitted.nbytes
        if admitted.program is not None:
            self._program_cache.give_back(admitted.program)
        self._retries.freed(admitted.nbytes, now)

    def _waiter(self, wanted: AdmissionRequest, now: float) -> Waiter:
        """Return a waiter with the sizes from the fewest sensible samples on, or smaller if only they fit."""
        most = self._budget.most_bytes - wanted.body_nbytes
        fitting = [size for size in sorted(wanted.nbytes) if wanted.takes(size) <= most]
        if not fitting:
            least = min(map(wanted.takes, wanted.nbytes))
            raise DoesNotFit(
                f"this request takes {least} bytes of memory, and the server has {most}: ask for smaller "
                "micro-batches or another cut"
            )
        sizes = [size for size in fitting if size >= wanted.least(self._min_batch)] or fitting[-1:]
        ask = ask_for(object(), wanted, sizes)
        if ask.fixed_bytes + ask.least * ask.bytes_per_sample + ask.program_bytes > most:
            ask = ask_for(ask.key, wanted, sizes[:1])  # it would wait for more than the server has
        others = self._others_share(wanted.tenant.name)
        return Waiter(since=now, wanted=wanted, ask=ask, nbytes=wanted.nbytes[sizes[0]], others=others)

    def _others_share(self, tenant: str) -> float:
        """Return the share of other tenants in the memory that requests hold and wait for."""
        asked = Counter(self._holding)
        for waiter in self._waiting:
            asked[waiter.wanted.tenant.name] += waiter.nbytes
        total = asked.total()
        return 1 - asked[tenant] / total if total else 0.0

    def _check_quota(self, tenant: TenantShare, nbytes: int, now: float) -> None:
        held = self._admitted[tenant.name] + self.waiting_of(tenant.name)
        if tenant.max_requests is not None and held >= tenant.max_requests:
            raise QuotaExceeded(
                f"{held} requests of {tenant.name} are here, and at most {tenant.max_requests} may be",
                retry_after_s=self.retry_after_s(now),
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
                retry_after_s=self.retry_after_s(now),
            )

    def _make_place(self, tenant: TenantShare, nbytes: int, now: float) -> list[Waiter]:
        """Make a place in the queue; if it is full, send back the last request of the largest tenant.

        The largest tenant has the largest part of the queue, divided by its weight. If the new request's
        tenant would then have as large a part, the new request must retry instead.
        """
        staying = list(self._waiting)
        while (why := self._full(staying, nbytes)) is not None:
            last = self._last_of_most(staying, tenant, nbytes)
            if last is None:
                raise self._overloaded(nbytes, why, now) from QueueFull()
            staying.remove(last)
        sent_back = [each for each in self._waiting if each not in staying]
        for waiter in sent_back:
            why = "others have a right to the places of so many requests"
            error = self._overloaded(waiter.nbytes, why, now)
            error.__cause__ = QueueFull()
            self._send_back(waiter, error)
        return sent_back

    def _full(self, waiting: Sequence[Waiter], nbytes: int) -> str | None:
        """Return why a request of this many bytes may not wait with these; None if it may."""
        if len(waiting) >= self._most_waiting:
            return f"{len(waiting)} requests wait for memory, and no more may"
        there = sum(waiter.nbytes for waiter in waiting)
        if waiting and there + nbytes > self._most_waiting_bytes:
            return f"waiting requests ask for {there} bytes, and no more may be"
        return None

    def _last_of_most(self, waiting: Sequence[Waiter], tenant: TenantShare, nbytes: int) -> Waiter | None:
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
        return next(each for each in reversed(waiting) if each.wanted.tenant.name == most)

    def _part(self, nbytes: int) -> float:
        """Return the part of the queue that a request fills: of its places or bytes, the larger one."""
        return max(1 / self._most_waiting, nbytes / self._most_waiting_bytes)

    def _overloaded(self, nbytes: int, why: str, now: float) -> Overloaded:
        """Return the error for a request that must retry, after those that were told so before are done."""
        seconds = self._retries.next_s(nbytes, self.waiting_bytes, self._longest_wait_s(now), now)
        return Overloaded(why, retry_after_s=math.ceil(seconds))

    def _longest_wait_s(self, now: float) -> float:
        return now - self._waiting[0].since if self._waiting else 0.0

    # --------------------------------------------------------------------------------------- rounds

    def decide(self, now: float) -> Round:
        """Admit requests for which there is memory; if there is none to come, send one back."""
        waiters = self._in_order(now)
        most = self._most - sum(self._admitted.values())
        if most <= 0:
            waiters = self._first_ones(waiters)
            most = len(waiters)
        if not waiters:
            return Round([], None)
        wanted = frozenset[str]().union(*(waiter.keys for waiter in waiters))
        # Idle programs that other requests wait for must not block the first in the queue forever.
        went = self._deal(waiters, most, now, but=wanted) or self._deal(
            waiters[:1], most, now, but=waiters[0].keys
        )
        if not went and not sum(self._admitted.values()) and not self._spare():
            return self._make_way(now)  # no admitted request frees memory
        return Round(went, None)

    def _deal(
        self, waiters: Sequence[Waiter], most: int, now: float, *, but: Collection[str]
    ) -> list[Waiter]:
        """Admit the requests that the policy grants, and return them.

        Idle programs are evicted for them, except those in ``but``.
        """
        free = self._budget.free_bytes + self._program_cache.idle_bytes(but=but)
        asks = [waiter.ask for waiter in waiters]
        by_key = {waiter.ask.key: waiter for waiter in waiters}
        grants = self._policy(asks, free, loaded=self._program_cache.keys, most=most)
        granted = [(by_key[grant.key], grant.batch) for grant in grants]
        return [waiter for waiter, size in granted if self._admit(waiter, size, now, but)]

    def _make_way(self, now: float) -> Round:
        """Send back the youngest of requests that wait for the memory of each other's bodies."""
        if now - self._sent_back < WAY_S:
            return Round([], WAY_S)
        for older, waiter in enumerate(self._waiting, start=1):
            younger = [each for each in self._waiting[older:] if each.wanted.body_nbytes]
            if younger and self._missing(waiter) <= sum(each.wanted.body_nbytes for each in younger):
                self._sent_back = now
                why = "requests that came first wait for the memory of this one's body"
                self._send_back(younger[-1], self._overloaded(younger[-1].nbytes, why, now))
                return Round(younger[-1:], None)
        return Round([], None)

    def _missing(self, waiter: Waiter) -> int:
        """Return the bytes, besides idle programs, that must come free before a request is admitted."""
        size, wanted = waiter.ask.smallest, waiter.wanted
        needed = wanted.nbytes[size] + self._new_bytes(wanted.programs.get(size))
        return needed - self._budget.free_bytes - self._program_cache.idle_bytes(but=waiter.keys)

    def _send_back(self, waiter: Waiter, error: Overloaded) -> None:
        """Refuse a waiting request, which holds nothing yet."""
        self._waiting.remove(waiter)
        waiter.outcome = error

    def _first_ones(self, waiters: Sequence[Waiter]) -> list[Waiter]:
        """Return the next request of each tenant that has none admitted."""
        first: dict[str, Waiter] = {}
        for waiter in waiters:
            first.setdefault(waiter.wanted.tenant.name, waiter)
        return [waiter for tenant, waiter in first.items() if not self._admitted[tenant]]

    def _in_order(self, now: float) -> list[Waiter]:
        """Return the waiters, ordered by the bytes that their tenants would then hold, over their weights.

        See `PATIENCE_S`. Programs do not count: a tenant with large networks would always come last, and idle
        programs are evicted.
        """
        promised = Counter[str]()
        ranked: list[tuple[float, float, Waiter]] = []
        for waiter in self._waiting:
            tenant, size = waiter.wanted.tenant, waiter.ask.smallest
            if not self._may_hold(waiter, size, promised[tenant.name]):
                continue
            before = self._holding[tenant.name] + promised[tenant.name]
            promised[tenant.name] += waiter.nbytes
            own = 0 if now - waiter.since >= PATIENCE_S else waiter.nbytes
            ranked.append(((before + own) / tenant.weight, before / tenant.weight, waiter))
        return [waiter for _, _, waiter in sorted(ranked, key=lambda each: each[:2])]

    def _may_hold(self, waiter: Waiter, size: int, promised: int = 0) -> bool:
        """Return whether the tenant's memory share allows it. A tenant with nothing gets the smallest size.

        Idle programs do not count, except the one that the request would use.
        """
        tenant, program = waiter.wanted.tenant, waiter.wanted.programs.get(size)
        if size == waiter.ask.smallest and not promised and not self._admitted[tenant.name]:
            return True
        own = frozenset[str]() if program is None else frozenset((program.key,))
        held = self._budget.held_by(tenant.name) - self._program_cache.idle_bytes(but=own, owner=tenant.name)
        more = waiter.wanted.nbytes[size] + self._new_bytes(program)
        return held + promised + more <= tenant.memory_share * self._budget.total_bytes

    def _new_bytes(self, program: NeededProgram | None) -> int:
        """Return the bytes of a program that is not in the cache yet; else 0."""
        return program.nbytes if program is not None and program.key not in self._program_cache else 0

    def _admit(self, waiter: Waiter, granted: int, now: float, but: Collection[str]) -> bool:
        """Take memory for the granted size, or for the next smaller one; return whether any was free.

        The granted size may fail: at another size it is another program, which has to be loaded.
        """
        for size in reversed([size for size in waiter.ask.sizes if size <= granted]):
            program, nbytes = waiter.wanted.programs.get(size), waiter.wanted.nbytes[size]
            room = nbytes + self._new_bytes(program)
            if self._may_hold(waiter, size) and self._program_cache.make_room(room, but=but):
                self._begin(waiter, size, program, now)
                return True
        return False

    def _begin(self, waiter: Waiter, size: int, program: NeededProgram | None, now: float) -> None:
        tenant, nbytes = waiter.wanted.tenant.name, waiter.wanted.nbytes[size]
        if program is not None:
            self._program_cache.take(program.key, program.nbytes, owner=tenant)
        self._admitted[tenant] += 1
        self._holding[tenant] += nbytes
        self._waiting.remove(waiter)
        waiter.outcome = Admission(
            tenant=tenant,
            hold=self._budget.hold(nbytes, owner=tenant),
            nbytes=nbytes,
            size=size,
            program=None if program is None else program.key,
            waited_s=(now - waiter.since) * waiter.others,
        )


def ask_for(key: Hashable, wanted: AdmissionRequest, sizes: Sequence[int]) -> Ask:
    """Return a request in the policy's form: a line in the samples that never lies below the sizes' bytes.

    The sizes that it may get ascend.
    """
    first, *larger = sizes
    nbytes = wanted.nbytes
    steps = [-((nbytes[first] - nbytes[size]) // (size - first)) for size in larger]  # rounded up
    per_sample = max(1, *(steps or [nbytes[first] // first]))
    programs = [wanted.programs[size] for size in sizes if size in wanted.programs]
    return Ask(
        key=key,
        fixed_bytes=max(0, nbytes[first] - first * per_sample),
        bytes_per_sample=per_sample,
        program=programs[0].key if programs else None,
        program_bytes=max((program.nbytes for program in programs), default=0),
        least=first,
        most=sizes[-1],
        sizes=tuple(sizes),
    )
