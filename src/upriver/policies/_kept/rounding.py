"""Round shares of lives to whole samples, within budgets and no more than is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from upriver.policies._kept.costs import OPEN, Life, SourceCosts
from upriver.policies._kept.decision import KeepTier

Key = TypeVar("Key")


def whole_lives(shares: Mapping[Life, float], costs: SourceCosts, spare: tuple[int, int]) -> dict[Life, int]:
    """Return whole samples by life, all samples in both halves.

    Args:
        spare: Cuts for samples that rounding leaves, in first and in later epochs, where no other is used.
    """
    samples, fresh = costs.num_samples, len(costs.cuts)
    room = _Room(costs)
    wanted = {life: share for life, share in shares.items() if max(life) >= fresh}
    counts = {life: room.take(life, int(share * samples + 1e-6)) for life, share in wanted.items()}
    for life in sorted(wanted, key=lambda life: counts[life] - wanted[life] * samples):
        cut_off = OPEN not in life and counts[life] < wanted[life] * samples - 1e-6
        if cut_off and sum(counts.values()) < samples:
            counts[life] += room.take(life, 1)
    for half in (0, 1):
        left = samples - sum(count for life, count in counts.items() if life[half] != OPEN)
        cuts = {
            life: share
            for life, share in shares.items()
            if 0 <= life[half] < fresh and life[1 - half] == OPEN
        }
        alone = (spare[0], OPEN) if half == 0 else (OPEN, spare[1])
        counts.update(whole_counts(cuts or {alone: 1.0}, left))
    return {life: count for life, count in counts.items() if count > 0}


def whole_counts(shares: Mapping[Key, float], total: int) -> dict[Key, int]:
    """Return whole numbers in proportion to shares that sum to ``total``, by largest remainders."""
    per_share = total / sum(shares.values())
    counts = {key: int(share * per_share + 1e-6) for key, share in shares.items()}
    left = total - sum(counts.values())
    for key in sorted(shares, key=lambda key: counts[key] - shares[key] * per_share)[:left]:
        counts[key] += 1
    return counts


class _Room:
    """Bytes that are left in each tier, and samples whose rows are left where they are."""

    def __init__(self, costs: SourceCosts) -> None:
        self._costs = costs
        self._bytes = {tier: costs.budgets[at] for at, (_, tier) in enumerate(costs.places)}
        self._there = [int(share * costs.num_samples + 1e-6) for share in costs.there]

    def take(self, life: Life, count: int) -> int:
        """Take the room of up to ``count`` samples, and return for how many there was some."""
        fresh = len(self._costs.cuts)
        places = [source - fresh for source in dict.fromkeys(life) if source >= fresh]
        known = places[0] if life[0] >= fresh or life[0] == OPEN else None
        if known is not None:
            count = min(count, self._there[known])
        needs = dict[KeepTier, float]()
        for place in places:
            tier = self._costs.places[place][1]
            needs[tier] = needs.get(tier, 0.0) + float(self._costs.sample_bytes[place])
        for tier, size in needs.items():
            if size > 0 and self._bytes[tier] < count * size:
                count = max(0, int(self._bytes[tier] // size))
        for tier, size in needs.items():
            self._bytes[tier] -= count * size
        if known is not None:
            self._there[known] -= count
        return count
