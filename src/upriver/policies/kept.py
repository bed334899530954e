"""Kept rows: which share of the samples is computed, where rows are kept, and what later epochs read.

A frozen prefix gives the same rows in every epoch. A first epoch computes and writes some of them, later ones
read them. Memory, disk and store have budgets; disk, link and tiers have speeds. So it may be best to read
some samples' rows and to compute the others again. The shares solve a linear program over a horizon of epochs
(`upriver.policies._kept.program`), with the busy seconds of the one cost model.

The cost model compares the answers of several such programs, with fill and drain and whole samples:

- Nothing is kept where the whole horizon is not shorter by more than ``SLACK`` than with the given routes.
- An epoch whose samples take several cuts, or some a cut while others are read, counts as longer by
  ``MARGIN``, as a mix does in the policy ``upriver``.
- Among the answers within ``SLACK`` of the best, the one that costs the storage tier least is taken.

Rows of ``K`` views are written by ``K`` epochs, one view each, and take ``K`` times the bytes. Where some
positions have one view and others have ``K``, each group is planned alone and the better plan taken: rows of
both are never written in one job. With no more epochs than views nothing is written, and what is there is
read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from upriver.cost import Array, CostModel
from upriver.errors import ConfigError
from upriver.policies._common import MARGIN, SLACK
from upriver.policies._kept.costs import OPEN, Life, SourceCosts, source_costs
from upriver.policies._kept.decision import (
    KeepingTiers,
    KeepPlan,
    KeepRoom,
    KeepRoute,
    KeepTier,
    RowPlace,
)
from upriver.policies._kept.rounding import whole_counts
from upriver.policies._kept.search import LEAST_SHARE, WORST, KeptAnswer, KeptSearch, fitting_cuts
from upriver.policies._simplex import NOTHING, MixProgram
from upriver.text import bytes_text, seconds_text
from upriver.types import Route, require_finite, require_type

__all__ = [
    "KeepPlan",
    "KeepRoom",
    "KeepRoute",
    "KeepTier",
    "KeepingTiers",
    "RowPlace",
    "fresh_shares",
    "plan",
]


def plan(
    model: CostModel,
    keeping: KeepingTiers,
    *,
    routes: Sequence[Route],
    epochs: int,
    cuts: Collection[int] | None = None,
) -> KeepPlan:
    """Decide which rows to keep.

    Args:
        routes: Routes of an epoch without keeping, as the job's policy chose them.
        epochs: The horizon: epochs from now on.
        cuts: Cuts that computed samples may take; None for all that fit the memory.

    Raises:
        ConfigError: If ``epochs`` is no count, a position lies outside the candidate cuts, or shares of
            ``routes`` do not sum to 1.
    """
    require_type("epochs", epochs, int, "a number of epochs")
    require_finite("epochs", epochs, at_least=1)
    without_s = model.evaluate(routes).epoch_s
    search = KeptSearch(model, keeping, routes, epochs, cuts)
    enough_s = (1 - SLACK) * epochs * without_s
    found = [each for each in search.answers() if each.total_s <= enough_s and _keeps(each, search.costs)]
    if not found:
        return _nothing_kept(routes, epochs, without_s, _why_nothing(search, keeping, epochs))
    most = (1 + SLACK) * min(answer.judged_s for answer in found)
    allowed = (answer for answer in found if answer.judged_s <= most)
    best = min(allowed, key=lambda answer: answer.order(epochs * without_s))
    return _plan_of(best, search.costs, without_s)


def fresh_shares(
    model: CostModel,
    keeping: KeepingTiers,
    kept: Mapping[RowPlace, float],
    *,
    cuts: Collection[int] | None = None,
) -> dict[int, float]:
    """Choose the cuts of the other samples for an epoch in which rows of some are read.

    Args:
        kept: Share of the samples by the place from which their rows are read.
        cuts: Cuts that may be taken; None for all that fit the memory.

    Returns:
        Cut to its share of all samples, in whole samples. These shares and those of ``kept`` sum to 1.

    Raises:
        ConfigError: If ``kept`` names a place that ``keeping`` lacks, or no cut fits.
    """
    keeping.check_shares("kept", kept)
    costs, fitting = source_costs(model, keeping), fitting_cuts(model, cuts)
    fresh = costs.num_samples - round(sum(kept.values()) * costs.num_samples)
    if fresh == 0:
        return {}
    if not fitting:
        raise ConfigError(f"no cut among {sorted(model.cuts if cuts is None else cuts)} fits both memories")
    read = np.zeros(costs.busy.shape[1])
    for place, share in kept.items():
        read[len(costs.cuts) + costs.places.index(place)] = share
    busy = (costs.busy @ read)[:, np.newaxis] + fresh / costs.num_samples * costs.busy[:, fitting]
    found = list[tuple[float, float, dict[int, int]]]()
    for mix in _mixes(busy):
        counts = whole_counts({fitting[column]: share for column, share in mix.items()}, fresh)
        counts = {source: count for source, count in counts.items() if count}
        shares = read.copy()
        shares[[*counts]] = np.array([*counts.values()]) / costs.num_samples
        epoch_s = float((costs.busy @ shares).max() + costs.around_s[shares > 0].max())
        judged_s = epoch_s * (1 + MARGIN) if len(counts) > 1 else epoch_s
        found.append((judged_s, float(costs.storage_s @ shares), counts))
    most = (1 + SLACK) * min(judged_s for judged_s, _, _ in found)
    _, _, counts = min((each for each in found if each[0] <= most), key=lambda each: each[1])
    return {costs.cuts[source]: count / costs.num_samples for source, count in counts.items()}


def _mixes(busy: Array) -> Iterator[dict[int, float]]:
    """Yield every single column, and the shares with the least busiest row."""
    yield from ({column: 1.0} for column in range(busy.shape[1]))
    scale = float(busy.max(axis=0).min())
    if scale > 0:
        program = MixProgram(np.minimum(busy, WORST * scale) / scale)
        program.shortest()
        yield {column: float(share) for column, share in enumerate(program.shares) if share > NOTHING}


def _keeps(answer: KeptAnswer, costs: SourceCosts) -> bool:
    """Return whether rows are read or written, and not only computed over better cuts."""
    sources = {source for life in answer.lives for source in life if source != OPEN}
    return any(costs.place(source) is not None for source in sources)


def _plan_of(answer: KeptAnswer, costs: SourceCosts, without_s: float) -> KeepPlan:
    first = _routes_of(answer.lives, costs, 0)
    later = _routes_of(answer.lives, costs, 1) if answer.periods[1] else ()
    found = KeepPlan(
        epochs=sum(answer.periods),
        views=answer.views,
        first=first,
        later=later,
        first_s=answer.first.epoch_s,
        later_s=answer.later.epoch_s if later else answer.first.epoch_s,
        without_s=without_s,
        pays_from=_pays_from(answer, without_s),
        why="",
    )
    return replace(found, why=_why(found, _sizes(answer, costs)))


def _routes_of(lives: Mapping[Life, int], costs: SourceCosts, half: int) -> tuple[KeepRoute, ...]:
    """Return the routes of a first or a later epoch, computed samples first."""
    counts = dict[tuple[int, int], int]()
    for life, count in lives.items():
        if life[half] != OPEN:
            key = life[half], life[1] if half == 0 and costs.writes(life) else OPEN
            counts[key] = counts.get(key, 0) + count
    return tuple(
        KeepRoute(
            share=count / costs.num_samples,
            cut=costs.cut(source),
            read=costs.place(source),
            written=costs.place(written),
        )
        for (source, written), count in sorted(counts.items())
    )


def _pays_from(answer: KeptAnswer, without_s: float) -> int | None:
    """Return the first number of epochs whose sum is shorter with the answer."""
    first_s, later_s = answer.first.epoch_s, answer.later.epoch_s
    if first_s < without_s * (1 - NOTHING):
        return 1
    if later_s >= without_s:
        return None
    behind = max(0.0, answer.periods[0] * (first_s - without_s))
    epochs = answer.periods[0] + math.floor(behind / (without_s - later_s)) + 1
    return epochs if epochs <= sum(answer.periods) else None


# ------------------------------------------------------------------------------------------ reasons

IN = {KeepTier.MEMORY: "in memory", KeepTier.DISK: "on disk", KeepTier.STORE: "in the store"}
FROM = {KeepTier.MEMORY: "from memory", KeepTier.DISK: "from disk", KeepTier.STORE: "from the store"}


def _nothing_kept(routes: Sequence[Route], epochs: int, without_s: float, why: str) -> KeepPlan:
    """Return the plan that keeps the given routes in all epochs."""
    fresh = tuple(KeepRoute(share=route.share, cut=route.cut) for route in routes)
    return KeepPlan(
        epochs=epochs,
        views=1,
        first=fresh,
        later=fresh if epochs > 1 else (),
        first_s=without_s,
        later_s=without_s,
        without_s=without_s,
        pays_from=None,
        why=f"Nothing is kept: {why}.",
    )


def _why_nothing(search: KeptSearch, keeping: KeepingTiers, epochs: int) -> str:
    if not keeping.tiers or not keeping.positions:
        return "there is no tier to keep rows in, or no position whose rows may be kept"
    if not search.fitting:
        return "no cut fits the memory"
    if search.groups or not search.best_s:
        return f"that would shorten {_epochs_text(epochs)} by less than {SLACK:.0%}"
    if search.readable:
        return f"in {_epochs_text(epochs)} no row would be read again"
    return f"no tier has room for the rows of {LEAST_SHARE:.1%} of the samples"


def _why(found: KeepPlan, sizes: Mapping[KeepTier, float]) -> str:
    firsts = min(found.views, found.epochs)
    which = "the first epoch" if firsts == 1 else f"each of the first {firsts} epochs"
    text = f"In {which} ({seconds_text(found.first_s)} s): {_routes_text(found.first)}. "
    if found.later:
        text += f"In each later one ({seconds_text(found.later_s)} s): {_routes_text(found.later)}. "
    text += "".join(f"Rows {IN[tier]} take {bytes_text(sizes[tier])}. " for tier in KeepTier if tier in sizes)
    times = f" ({found.total_without_s / found.total_s:.2f} x)" if found.total_s > 0 else ""
    text += f"{_epochs_text(found.epochs)} take {seconds_text(found.total_s)} s, and without keeping "
    text += f"{seconds_text(found.total_without_s)} s{times}."
    return f"{text} Keeping pays from epoch {found.pays_from} on." if found.pays_from else text


def _sizes(answer: KeptAnswer, costs: SourceCosts) -> dict[KeepTier, float]:
    """Return the bytes of all rows that later epochs read, by tier."""
    sizes = dict[KeepTier, float]()
    for life, count in answer.lives.items():
        place = costs.place(life[1])
        if place is not None:
            size = count * float(costs.sample_bytes[life[1] - len(costs.cuts)])
            sizes[place[1]] = sizes.get(place[1], 0.0) + size
    return sizes


def _epochs_text(epochs: int) -> str:
    return "1 epoch" if epochs == 1 else f"{epochs} epochs"


def _routes_text(routes: Sequence[KeepRoute]) -> str:
    """Say where each share comes from: ``60.0% computed over cut 0 and kept at 8 in memory``."""
    parts = []
    for route in routes:
        source = f"computed over cut {route.cut}"
        if route.read is not None:
            source = f"read at {route.read[0]} {FROM[route.read[1]]}"
        kept = "" if route.written is None else f" and kept at {route.written[0]} {IN[route.written[1]]}"
        parts.append(f"{route.share:.1%} {source}{kept}")
    return ", ".join(parts)
