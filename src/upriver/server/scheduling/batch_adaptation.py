"""Admission by memory: which of the waiting requests may begin, and how many samples each takes at once.

HAPI's batch adaptation: Guirguis, Petrescu, Dinu, Quoc, Picorel, Guerraoui, "Accelerating Transfer Learning
with Near-Data Computation on Cloud Object Stores", arXiv:2210.08650v1 (2022), section 4.5, problem (1):

    maximise   sum over r of  b_r M_r(data) + M_r(model)
    such that  b_min <= b_r <= b_max  for each request r
               sum over r of  b_r M_r(data) + M_r(model)  <=  M_total - M(occupied)

and where that cannot be, the newest request is left out, and so on until it can.

Symbols
    r                            an ``Ask``; those that are given come oldest first
    b_r                          ``Grant.batch``, samples of one forward pass
    b_min, b_max                 ``Ask.least``, ``Ask.most``
    M_r(data)                    ``Ask.bytes_per_sample``
    M_r(model)                   ``Ask.program_bytes``
    M_total - M(occupied)        ``free_bytes``: what the caller's budget has left; before it asks, it may let
                                 go of programs that nobody uses

Departures
    - A network runs only at the sizes that it was captured for, so a request may have a list of them.
    - Requests of one program share its weights: they count once, and not at all where they are loaded.
    - What a request takes at any batch (buffers) is counted too. Neither it nor weights are a gain: what is
      maximised is the sum of b_r M_r(data).
    - A request that does not fit is never overtaken by a younger one in the same round, under either policy.

``static`` is the paper's other way: one batch for all.
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
"""HAPI 2025, section 4.4, and the micro-batch of a job unless its user chooses another."""

WITHIN = 0.01
"""How far from the most memory that can be used ``adaptive`` may stay: what exactness would cost in time is
not worth a hundredth of the memory."""

MOST_SAMPLES = 1 << 31
"""Of one batch: more than any memory holds, and products with it stay far from the end of 64 bits."""

MOST_BYTES = 1 << 50
"""Of one memory pool that larger batches may fill, a pebibyte: sums over thousands of requests then fit 64
bits."""

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request that waits, as far as memory goes.

    Attributes:
        key: Names the request.
        fixed_bytes: What it takes at any batch.
        bytes_per_sample: What each sample of a forward pass takes.
        program: Its weights, which all that name the same share; None without.
        program_bytes: What they take.
        least: Fewest samples of a forward pass.
        most: Most samples of a forward pass.
        sizes: The only batches that can be used, ascending; empty for every whole number.
        smallest: The least batch that can be used.
        smallest_bytes: What the request takes at it, without its program.
        span: Samples by which the largest batch that can be used is larger.
        packed: ``smallest``, ``bytes_per_sample`` and ``span`` as 64-bit numbers in the machine's order:
            joined, a thousand of them are an array.
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
        """The largest batch that can be used and is not above ``batch``, or the smallest one."""
        if not self.sizes:
            return min(max(batch, self.least), self.most)
        return self.sizes[max(0, bisect_right(self.sizes, batch) - 1)]


class Grant(NamedTuple):
    """A request that may begin. A tuple, since a thousand of them are made within a millisecond.

    Attributes:
        key: Of its ask.
        batch: Samples of one forward pass.
        nbytes: What it takes, its program included where this is the first grant that brings it.
    """

    key: Hashable
    batch: int
    nbytes: int


Policy: TypeAlias = Callable[..., list[Grant]]
"""``policy(asks, free_bytes, loaded=…, most=…)``: the grants, in the order of the asks, oldest first."""


def static(
    asks: Sequence[Ask],
    free_bytes: int,
    *,
    loaded: AbstractSet[Hashable] = frozenset(),
    most: int | None = None,
    batch: int = STATIC_BATCH,
) -> list[Grant]:
    """Admit requests in order at one batch, or what is nearest to it for each, while they fit.

    Args:
        asks: Oldest first. The first that does not fit ends the round: nobody overtakes a large one for ever.
        free_bytes: What they may take together.
        loaded: Programs that take nothing any more.
        most: Grants at most; no limit if None.
        batch: Samples of one forward pass.
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
    """Admit as many requests, oldest first, as fit at their least; then fill what is left by larger batches.

    The sum of batch x ``bytes_per_sample`` is at least ``1 - WITHIN`` of the most that these requests can
    reach; see `_fill` for the reason.

    Args:
        asks: Oldest first.
        free_bytes: What they may take together.
        loaded: Programs that take nothing any more.
        most: Grants at most; no limit if None.
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
"""By the names that an operator uses."""


_KEY = attrgetter("key")
_PROGRAM = attrgetter("program")
_SMALLEST_BYTES = attrgetter("smallest_bytes")
_PACKED = attrgetter("packed")
_SIZES = attrgetter("sizes")


def _fitting(
    asks: Sequence[Ask], nbytes: Iterable[int], free_bytes: int, loaded: AbstractSet[Hashable]
) -> list[int]:
    """What each takes, of the first ones that fit together; a program counts where it is first named."""
    taken = list(nbytes)
    named = list(map(_PROGRAM, asks))
    first = dict(zip(reversed(named), reversed(range(len(named))), strict=True))
    for program in first.keys() - loaded - {None}:
        taken[first[program]] += asks[first[program]].program_bytes
    del taken[bisect_right(list(accumulate(taken)), free_bytes) :]
    return taken


# ------------------------------------------------------------------------------ filling what is left


class _Choices(NamedTuple):
    """What asks may take beyond their smallest batch; a number for each in every array, in samples.

    Attributes:
        asked: Which ask it is.
        per_sample: Bytes of a sample.
        span: The most that fits the room if nobody else takes any; above 0.
        first: The fewest that can be taken at all.
        gap: The longest way from one batch to the next, up to ``span``.
        unit: All that can be taken are multiples of it.
        kind: The same number for all that have the same list of sizes.
    """

    asked: Numbers
    per_sample: Numbers
    span: Numbers
    first: Numbers
    gap: Numbers
    unit: Numbers
    kind: Numbers

    def of(self, chosen: npt.NDArray[Any]) -> _Choices:
        """Of some of them: indices, or a mask."""
        return _Choices(*(array[chosen] for array in self))


def _fill(asks: Sequence[Ask], per_sample: Numbers, span: Numbers, room: int, *, sure: int) -> Numbers:
    """Samples beyond its smallest batch for each ask, such that their bytes come close to ``room``.

    That is a subset-sum problem with a choice of sizes: NP-hard, and easy to within a hundredth. Let ``opt``
    be the most bytes that can be had, ``sure`` those of the smallest batches, and ``slack`` what may be
    missed: ``WITHIN`` of ``sure`` and what is had, so no more than ``WITHIN`` of ``sure + opt``.

    `_greedy` goes from the coarsest ask to the finest. It ends with all that could be had, or with less
    room left than the next step of every ask that could take more; then it has more than half of the room,
    since the first ask it filled is no finer than that step. It is right within ``slack`` unless
    few coarse asks decide, which `_search` then looks at. Two bounds tell: the room, rounded down to a
    multiple of what divides everything, beyond which requests all alike never get; and what the largest asks
    take, as many as can have anything at once, beyond which requests nearly alike never get.

    Args:
        asks: At least one.
        per_sample: Bytes of a sample of each.
        span: Samples that each may take beyond its smallest batch.
        room: Bytes.
        sure: Bytes of the samples that are granted in any case.
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
    """The coarsest first, the oldest first among equals; without those that cannot take more."""
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
    """Which asks have which list of sizes; those that may use every whole number are left out."""
    numbered: defaultdict[tuple[int, ...], int] = defaultdict(count().__next__)
    number = np.fromiter(map(numbered.__getitem__, map(_SIZES, asks)), np.int64, len(asks))
    together = np.argsort(number, kind="stable")
    ends = np.cumsum(np.bincount(number))
    for sizes, members in zip(numbered, np.split(together, ends[:-1]), strict=True):
        if sizes:
            yield sizes, members


def _greedy(asks: Sequence[Ask], choices: _Choices, room: int) -> Numbers:
    """In order, each as much as still fits; in samples.

    Asks that get all they can are taken in one go, and those that cannot take anything any more are jumped
    over, so a thousand of them take some dozen steps.
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
    """What comes within ``2 (width - 1)`` bytes of the most, or reaches ``enough``; in samples.

    Only asks with a step of more than ``width`` are searched; the others then take what is left, and either
    get all they can, or leave less than ``width``. Of those that are searched `_telling` keeps enough to come
    within ``width - 1`` bytes of the best, and thinning loses as much once more, however many they are:

        Sums that can be reached are put into buckets of ``width`` bytes, and the least and the greatest of
        each bucket are kept (Kellerer, Mansini, Pferschy, Speranza 2003, "relaxed dynamic programming").
        Then every sum ``z`` that could be reached without thinning lies between two that are kept and are
        less than ``width`` apart, or between one and the end of the room. That holds for 0; and if it holds
        for ``z`` with the neighbours ``u`` and ``v``, then after one more choice ``c`` was added to all,
        ``z + c`` lies between ``u + c`` and ``v + c``. Where both fall into the bucket of ``z + c``, its
        least and its greatest are such neighbours. Where one falls into the bucket beside it, either a kept
        sum of its own bucket lies on that side, or the nearest of the other bucket does, no further off than
        ``u + c`` or ``v + c``.

    Greedy had more than half of the room, so there are some 400 buckets at most; and an ask that may use
    every whole number has ``b_min`` steps among its sure bytes, so no more than ``200 / b_min`` of them are
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
    """One step of the search.

    Attributes:
        place: Which of the choices.
        part: Bytes of which it may take one number, or none.
        before: Sums that were kept until then.
    """

    place: int
    part: Numbers
    before: Numbers


def _telling(choices: _Choices, room: int, width: int) -> npt.NDArray[np.intp]:
    """Of choices that can hardly be told apart the largest and the smallest, as many as fit; in order.

    Those that offer the same batches, and whose largest differ by less than ``width`` bytes, are alike. Put
    the smallest of them in place of those that the best choice takes, then one after the other the largest:
    that begins no higher than the best, ends no lower, and no step is ``width`` bytes or more.
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
    """What asks may take, in bytes, by their places: sets of which each gives one of its numbers or none."""
    for place in places:
        ask, span = asks[int(choices.asked[place])], int(choices.span[place])
        if ask.sizes:
            beyond = np.array(ask.sizes[1:], np.int64) - ask.smallest
            yield place, beyond[beyond <= span] * ask.bytes_per_sample
            continue
        power = 1
        while span:  # 1, 2, 4, … and what remains: some of them sum to every whole number
            samples = min(power, span)
            yield place, np.array([samples * ask.bytes_per_sample], np.int64)
            span, power = span - samples, 2 * power


def _thinned(sums: Numbers, room: int, width: int) -> Numbers:
    """The least and the greatest sum of each bucket, ascending."""
    sums = np.sort(sums[sums <= room])
    bucket = sums // width
    edge = np.ones(len(sums) + 1, np.bool_)
    edge[1:-1] = bucket[1:] != bucket[:-1]
    return sums[edge[1:] | edge[:-1]]


def _traced(steps: Sequence[_Step], total: int, choices: _Choices) -> Numbers:
    """By which steps a sum was reached; in samples."""
    taken = np.zeros(len(choices.asked), np.int64)
    for step in reversed(steps):
        left = total - np.append(0, step.part)
        at = np.minimum(np.searchsorted(step.before, left), len(step.before) - 1)
        came = int(left[int(np.argmax(step.before[at] == left))])
        taken[step.place] += (total - came) // int(choices.per_sample[step.place])
        total = came
    return taken


def _largest(choices: _Choices, room: int) -> int:
    """Bytes of the largest of them, as many as can have anything at once."""
    fitting = room // int((choices.first * choices.per_sample).min())
    largest = choices.span * choices.per_sample
    return int(np.sort(largest)[-fitting:].sum())


def _total(choices: _Choices) -> int:
    """Bytes of all that could be taken."""
    return _bytes(choices.span, choices.per_sample)


def _bytes(samples: Numbers, per_sample: Numbers) -> int:
    return int(np.dot(samples, per_sample))
