"""Admit requests by memory: choose which may begin, and how many samples each runs at once.

HAPI's batch adaptation: Guirguis, Petrescu, Dinu, Quoc, Picorel, Guerraoui, "Accelerating Transfer Learning
with Near-Data Computation on Cloud Object Stores", arXiv:2210.08650v1 (2022), section 4.5, problem (1):

    maximise   sum over r of  b_r M_r(data) + M_r(model)
    such that  b_min <= b_r <= b_max  for each request r
               sum over r of  b_r M_r(data) + M_r(model)  <=  M_total - M(occupied)

If the problem has no solution, the newest request is left out, and so on until it has one.

Symbols
    r                            an ``Ask``; they are given oldest first
    b_r                          ``Grant.batch``, samples of one forward pass
    b_min, b_max                 ``Ask.least``, ``Ask.most``
    M_r(data)                    ``Ask.bytes_per_sample``
    M_r(model)                   ``Ask.program_bytes``
    M_total - M(occupied)        ``free_bytes``: free bytes of the caller's budget, which may evict unused
                                 programs before it asks

Departures
    - A network runs only at the sizes that it was captured for, so a request may list them.
    - Requests of one program share its weights: they count once, and not at all if they are loaded.
    - Bytes that a request needs at any batch (buffers) count too. Neither they nor weights are a gain: the
      objective is the sum of b_r M_r(data).
    - No younger request overtakes one that does not fit in the same round, under either policy.

``static`` is the paper's alternative: one batch for all.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise, repeat
from operator import add, attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.errors import ConfigError

STATIC_BATCH = 16
"""Batch of ``static``: HAPI 2025, section 4.4, and the default micro-batch of a job."""

WITHIN = 0.01
"""Share by which ``adaptive`` may stay below the most usable memory.

Exactness would cost more time than a hundredth of the memory is worth.
"""

MOST_SAMPLES = 1 << 31
"""Most samples of one batch: more than any memory holds, and products with it stay far below 64 bits."""

MOST_BYTES = 1 << 50
"""Most bytes of a pool that larger batches may fill, a pebibyte: sums over thousands fit 64 bits."""

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Describe the memory of a waiting request.

    Attributes:
        fixed_bytes: Bytes that it needs at any batch.
        program: Key of its weights, shared by all requests with the same key; None without.
        least: Fewest samples of a forward pass.
        most: Most samples of a forward pass.
        sizes: The only usable batches, ascending; empty if every whole number is usable.
        smallest_bytes: Bytes at the smallest batch, without the program.
        span: Samples by which the largest usable batch exceeds the smallest.
        packed: ``smallest``, ``bytes_per_sample`` and ``span`` as 64-bit numbers in native byte order.
            Joined, a thousand of them form an array.
    """

    key: Hashable
    fixed_bytes: int
    bytes_per_sample: int
    program: Hashable | None = None
    program_bytes: int = 0
    least: int
    most: int
    sizes: tuple[int, ...] = ()
    smallest: int = field(init=False, repr=False, compare=False)
    smallest_bytes: int = field(init=False, repr=False, compare=False)
    span: int = field(init=False, repr=False, compare=False)
    packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.fixed_bytes < 0 or self.program_bytes < 0 or self.bytes_per_sample < 1:
            raise ConfigError(
                "a request takes 0 bytes or more in all and 1 or more for each sample, got fixed_bytes="
                f"{self.fixed_bytes}, program_bytes={self.program_bytes}, "
                f"bytes_per_sample={self.bytes_per_sample}"
            )
        if not 1 <= self.least <= self.most <= MOST_SAMPLES:
            raise ConfigError(
                f"a batch has 1 to {MOST_SAMPLES} samples, got least={self.least}, most={self.most}"
            )
        bounds = (self.least - 1, *self.sizes, self.most + 1)
        if any(after <= before for before, after in pairwise(bounds)):
            raise ConfigError(f"sizes must ascend within {self.least}..{self.most}, got {self.sizes}")
        object.__setattr__(self, "smallest", self.sizes[0] if self.sizes else self.least)
        smallest_bytes = self.fixed_bytes + self.smallest * self.bytes_per_sample
        object.__setattr__(self, "smallest_bytes", smallest_bytes)
        object.__setattr__(self, "span", (self.sizes[-1] if self.sizes else self.most) - self.smallest)
        per_sample = min(self.bytes_per_sample, MOST_BYTES + 1)  # more is never granted
        object.__setattr__(self, "packed", struct.pack("=3q", self.smallest, per_sample, self.span))

    def near(self, batch: int) -> int:
        """Return the largest usable batch that is at most ``batch``, or the smallest usable one."""
        if not self.sizes:
            return min(max(batch, self.least), self.most)
        return self.sizes[max(0, bisect_right(self.sizes, batch) - 1)]


class Grant(NamedTuple):
    """Admit a request. A tuple, since a thousand grants are made within a millisecond.

    Attributes:
        batch: Samples of one forward pass.
        nbytes: Bytes that it needs; the first grant of a program includes the program.
    """

    key: Hashable
    batch: int
    nbytes: int


Policy: TypeAlias = Callable[..., list[Grant]]
"""Signature ``policy(asks, free_bytes, loaded=…, most=…)``; returns grants in the order of the asks."""


def static(
    asks: Sequence[Ask],
    free_bytes: int,
    *,
    loaded: AbstractSet[Hashable] = frozenset(),
    most: int | None = None,
    batch: int = STATIC_BATCH,
) -> list[Grant]:
    """Admit requests in order at one batch, or at the nearest usable one, while they fit.

    Args:
        asks: Oldest first. The first one that does not fit ends the round, so no request overtakes a large
            one forever.
        loaded: Programs that need no further memory.
        most: Most grants; no limit if None.
    """
    asks = asks if most is None else asks[: max(0, most)]
    batches = [ask.near(batch) for ask in asks]
    nbytes = (
        ask.fixed_bytes + batch * ask.bytes_per_sample for ask, batch in zip(asks, batches, strict=True)
    )
    taken = _fitting(asks, nbytes, free_bytes, loaded)
    return [Grant(ask.key, size, nbytes) for ask, size, nbytes in zip(asks, batches, taken, strict=False)]


def adaptive(
    asks: Sequence[Ask],
    free_bytes: int,
    *,
    loaded: AbstractSet[Hashable] = frozenset(),
    most: int | None = None,
) -> list[Grant]:
    """Admit as many requests, oldest first, as fit at their smallest; then grow batches into the free rest.

    The sum of batch x ``bytes_per_sample`` is at least ``1 - WITHIN`` of the most that these requests can
    reach; see `_fill` for the reason.

    ``loaded`` and ``most`` are as for `static`.
    """
    asks = asks if most is None else asks[: max(0, most)]
    taken = _fitting(asks, map(_SMALLEST_BYTES, asks), free_bytes, loaded)
    if not taken:
        return []
    asks = asks[: len(taken)]
    packed = np.frombuffer(b"".join(map(_PACKED, asks)), np.int64)
    smallest, per_sample, span = np.ascontiguousarray(packed.reshape(-1, 3).T)
    room = min(free_bytes - sum(taken), MOST_BYTES)
    more = _fill(asks, per_sample, span, room, sure=_bytes(smallest, per_sample))
    nbytes = map(add, taken, (more * per_sample).tolist())
    granted = zip(map(_KEY, asks), (smallest + more).tolist(), nbytes, strict=True)
    return list(map(tuple.__new__, repeat(Grant), granted))  # half the time of Grant's own constructor


POLICIES: Mapping[str, Policy] = {"static": static, "adaptive": adaptive}
"""Policies by the names that an operator uses."""


_KEY = attrgetter("key")
_PROGRAM = attrgetter("program")
_SMALLEST_BYTES = attrgetter("smallest_bytes")
_PACKED = attrgetter("packed")
_SIZES = attrgetter("sizes")


def _fitting(
    asks: Sequence[Ask], nbytes: Iterable[int], free_bytes: int, loaded: AbstractSet[Hashable]
) -> list[int]:
    """Return the bytes of the first asks that fit together; a program counts where it is first named."""
    taken = list(nbytes)
    named = list(map(_PROGRAM, asks))
    first = dict(zip(reversed(named), reversed(range(len(named))), strict=True))
    for program in first.keys() - loaded - {None}:
        taken[first[program]] += asks[first[program]].program_bytes
    del taken[bisect_right(list(accumulate(taken)), free_bytes) :]
    return taken


# ------------------------------------------------------------------------------ filling what is left


class _Choices(NamedTuple):
    """Describe the samples that asks may take beyond their smallest batch; every array has an entry for each.

    Attributes:
        asked: Index of the ask.
        per_sample: Bytes of a sample.
        span: Most samples that fit the room if no other ask takes any; above 0.
        first: Fewest samples that can be taken.
        gap: Largest step from one batch to the next, up to ``span``.
        unit: Common divisor of all numbers of samples that can be taken.
        kind: Number of the list of sizes; equal lists have equal numbers.
    """

    asked: Numbers
    per_sample: Numbers
    span: Numbers
    first: Numbers
    gap: Numbers
    unit: Numbers
    kind: Numbers

    def of(self, chosen: npt.NDArray[Any]) -> _Choices:
        """Return some of them, by indices or a mask."""
        return _Choices(*(array[chosen] for array in self))


def _fill(asks: Sequence[Ask], per_sample: Numbers, span: Numbers, room: int, *, sure: int) -> Numbers:
    """Return samples beyond its smallest batch for each ask, such that their bytes come close to ``room``.

    This is a subset-sum problem with a choice of sizes: NP-hard, and easy to within a hundredth. Let ``opt``
    be the most bytes that can be reached, ``sure`` those of the smallest batches, and ``slack`` the allowed
    miss: ``WITHIN`` of ``sure`` plus the bytes reached, hence at most ``WITHIN`` of ``sure + opt``.

    `_greedy` goes from the coarsest ask to the finest. It ends in one of two ways. Either it took all that
    exists, or less room is left than the next step of every ask that could take more. In the second case it
    filled more than half of the room, since the first ask it filled is no finer than that step. Its result is
    right within ``slack`` unless few coarse asks decide, which `_search` then examines. Two bounds tell the
    cases apart. The first is the room, rounded down to a multiple of the common divisor of everything;
    identical requests never exceed it. The second is the bytes of the largest asks, as many as can take
    anything at once; nearly identical requests never exceed it.

    Args:
        asks: At least one.
    """
    choices = _choices(asks, per_sample, span, room)
    taken = _greedy(asks, choices, room)
    had = _bytes(taken, choices.per_sample)
    slack = int(WITHIN * (sure + had))
    bound = min(room, _total(choices))
    if had + slack < bound:
        unit = int(np.gcd.reduce(choices.unit * choices.per_sample))
        bound = min(bound, room // unit * unit, _largest(choices, room))
    if had + slack < bound:
        searched = _search(asks, choices, room, width=max(1, slack // 2), enough=bound - slack)
        taken = max(taken, searched, key=lambda each: _bytes(each, choices.per_sample))
    more = np.zeros(len(asks), np.int64)
    more[choices.asked] = taken
    return more


def _choices(asks: Sequence[Ask], per_sample: Numbers, span: Numbers, room: int) -> _Choices:
    """Return the choices of asks that can take more, coarsest first, among equals oldest first."""
    alone = room // per_sample
    span = np.minimum(span, alone)
    first = np.minimum(span, 1)
    gap, unit, kind = first.copy(), first.copy(), np.zeros(len(asks), np.int64)
    for number, (sizes, members) in enumerate(_by_sizes(asks), start=1):
        offsets = np.array(sizes, np.int64) - sizes[0]
        steps = np.diff(offsets, prepend=0)
        last = np.searchsorted(offsets, alone[members], side="right") - 1
        span[members] = offsets[last]
        first[members] = np.minimum(offsets[last], steps[min(1, len(steps) - 1)])
        gap[members] = np.maximum.accumulate(steps)[last]
        unit[members] = math.gcd(*offsets.tolist())
        kind[members] = number
    order = np.argsort(-gap * per_sample, kind="stable")
    order = order[span[order] > 0]
    return _Choices(np.arange(len(asks)), per_sample, span, first, gap, unit, kind).of(order)


def _by_sizes(asks: Sequence[Ask]) -> Iterator[tuple[tuple[int, ...], Numbers]]:
    """Yield each list of sizes with the indices of its asks, except asks that may use any number."""
    numbered: defaultdict[tuple[int, ...], int] = defaultdict(count().__next__)
    number = np.fromiter(map(numbered.__getitem__, map(_SIZES, asks)), np.int64, len(asks))
    together = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number))
    for sizes, members in zip(numbered, np.split(together, ends[:-1]), strict=True):
        if sizes:
            yield sizes, members


def _greedy(asks: Sequence[Ask], choices: _Choices, room: int) -> Numbers:
    """Return the samples of each choice if each in order takes as much as still fits.

    Asks that get all they can are taken in one step, and asks that cannot take any more are skipped. So a
    thousand asks need some dozen steps.
    """
    ends = np.cumsum(choices.span * choices.per_sample)
    smallest = choices.first * choices.per_sample
    taken = np.zeros(len(ends), np.int64)
    start = before = 0  # bytes in `ends` of those before `start`
    while start < len(ends):
        end = int(np.searchsorted(ends, before + room, side="right"))
        taken[start:end] = choices.span[start:end]
        if end == len(ends):
            break
        room -= (int(ends[end - 1]) if end else 0) - before
        ask = asks[int(choices.asked[end])]
        samples = ask.near(ask.smallest + room // ask.bytes_per_sample) - ask.smallest
        taken[end] = samples
        room -= samples * ask.bytes_per_sample
        later = np.flatnonzero(smallest[end + 1 :] <= room)
        if not len(later):
            break
        start = end + 1 + int(later[0])
        before = int(ends[start - 1])
    return taken


def _search(asks: Sequence[Ask], choices: _Choices, room: int, *, width: int, enough: int) -> Numbers:
    """Return samples whose bytes come within ``2 (width - 1)`` of the most, or reach ``enough``.

    The search covers only asks with a step of more than ``width``. The others then take the rest: they either
    get all they can, or leave less than ``width``. Among the searched asks `_telling` keeps enough to come
    within ``width - 1`` bytes of the best. Thinning loses as much once more, for any number of asks:

        Reachable sums are put into buckets of ``width`` bytes, and the least and the greatest of each bucket
        are kept (Kellerer, Mansini, Pferschy, Speranza 2003, "relaxed dynamic programming"). Then every sum
        ``z`` that is reachable without thinning lies between two kept sums that are less than ``width``
        apart, or between one and the end of the room. This holds for 0. If it holds for ``z`` with the
        neighbours ``u`` and ``v``, then after one more choice ``c`` was added to all, ``z + c`` lies between
        ``u + c`` and ``v + c``. If both fall into the bucket of ``z + c``, its least and its greatest are
        such neighbours. If one falls into the adjacent bucket, either a kept sum of the own bucket lies on
        that side, or the nearest of the adjacent bucket does, no further off than ``u + c`` or ``v + c``.

    `_greedy` filled more than half of the room, so there are at most some 400 buckets. An ask that may use
    every whole number has ``b_min`` steps among its sure bytes, so at most ``200 / b_min`` of them are
    searched.

    Args:
        width: Bytes of a bucket, at least 1.
        enough: Bytes that end the search.
    """
    coarse = choices.gap * choices.per_sample > width
    enough -= _total(choices.of(~coarse))
    searched = np.flatnonzero(coarse)[_telling(choices.of(coarse), room, width)]
    sums = np.zeros(1, np.int64)
    steps: list[_Step] = []
    for place, part in _parts(asks, choices, searched.tolist()):
        steps.append(_Step(place, part, sums))
        sums = _thinned(np.append(sums, sums + part[:, None]), room, width)
        if sums[-1] >= enough:
            break
    taken = _traced(steps, int(sums[-1]), choices)
    rest = taken == 0
    taken[rest] = _greedy(asks, choices.of(rest), room - int(sums[-1]))
    return taken


class _Step(NamedTuple):
    """Record one step of the search.

    Attributes:
        place: Index of the choice.
        part: Bytes, of which the choice may take one entry or none.
        before: Sums that were kept before the step.
    """

    place: int
    part: Numbers
    before: Numbers


def _telling(choices: _Choices, room: int, width: int) -> npt.NDArray[np.intp]:
    """Return indices, ascending, of the largest and smallest of nearly equal choices, as many as fit.

    Choices with the same batches, whose largest differ by less than ``width`` bytes, are nearly equal.
    Replace those that the best solution takes by the smallest, then one after the other by the largest. The
    sum starts no higher than the best, ends no lower, and no step is ``width`` bytes or more.
    """
    largest = choices.span * choices.per_sample
    order = np.lexsort((choices.kind, choices.span, largest // width))  # stable: the coarsest first in each
    kinds = np.stack((choices.kind, choices.span, largest // width))[:, order]
    starts = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(axis=0)))[: len(order)]
    lengths = np.diff(starts, append=len(order))
    smallest = order[starts + lengths - 1]
    fitting = room // (choices.first * choices.per_sample)[smallest]
    rank = np.arange(len(order)) - np.repeat(starts, lengths)
    kept = (rank < np.repeat(fitting, lengths)) | (rank >= np.repeat(lengths - fitting, lengths))
    return np.sort(order[kept])


def _parts(asks: Sequence[Ask], choices: _Choices, places: Sequence[int]) -> Iterator[tuple[int, Numbers]]:
    """Yield the bytes that asks may take, with their places: each array gives one of its entries or none."""
    for place in places:
        ask, span = asks[int(choices.asked[place])], int(choices.span[place])
        if ask.sizes:
            beyond = np.array(ask.sizes[1:], np.int64) - ask.smallest
            yield place, beyond[beyond <= span] * ask.bytes_per_sample
            continue
        power = 1
        while span:  # 1, 2, 4, … and the rest: subsets of them sum to every whole number
            samples = min(power, span)
            yield place, np.array([samples * ask.bytes_per_sample], np.int64)
            span, power = span - samples, 2 * power


def _thinned(sums: Numbers, room: int, width: int) -> Numbers:
    """Return the least and the greatest sum of each bucket, ascending."""
    sums = np.sort(sums[sums <= room])
    bucket = sums // width
    edge = np.ones(len(sums) + 1, np.bool_)
    edge[1:-1] = bucket[1:] != bucket[:-1]
    return sums[edge[1:] | edge[:-1]]


def _traced(steps: Sequence[_Step], total: int, choices: _Choices) -> Numbers:
    """Return the samples of the steps by which a sum was reached."""
    taken = np.zeros(len(choices.asked), np.int64)
    for step in reversed(steps):
        left = total - np.append(0, step.part)
        at = np.minimum(np.searchsorted(step.before, left), len(step.before) - 1)
        came = int(left[int(np.argmax(step.before[at] == left))])
        taken[step.place] += (total - came) // int(choices.per_sample[step.place])
        total = came
    return taken


def _largest(choices: _Choices, room: int) -> int:
    """Return the bytes of the largest choices, as many as can take anything at once."""
    fitting = room // int((choices.first * choices.per_sample).min())
    largest = choices.span * choices.per_sample
    return int(np.sort(largest)[-fitting:].sum())


def _total(choices: _Choices) -> int:
    """Return the bytes of all samples that could be taken."""
    return _bytes(choices.span, choices.per_sample)


def _bytes(samples: Numbers, per_sample: Numbers) -> int:
    return int(np.dot(samples, per_sample))
