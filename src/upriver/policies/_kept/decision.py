"""Define what a decision about kept rows is made from, and the decision itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias, TypeVar

from upriver.errors import ConfigError
from upriver.types import require_finite, require_type

Key = TypeVar("Key")


class KeepTier(StrEnum):
    """Place that holds kept rows: the compute tier's memory or disk, or the store near the data."""

    MEMORY = "memory"
    DISK = "disk"
    STORE = "store"


RowPlace: TypeAlias = tuple[int, KeepTier]
"""Position of a kept row in the chain, and the tier that holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRoom:
    """Budget of a tier of keeping, and its speed.

    Attributes:
        budget_bytes: Bytes for all rows that the plan reads, those included that are there already; other
            rows give way to them. May be infinite.
        read_s_per_byte: Seconds to read a byte. They keep the compute tier busy (memory), the disk, or the
            storage tier (store).
        write_s_per_byte: The same for a write.

    Raises:
        ConfigError: If a number is negative or not finite; names it.
    """

    budget_bytes: float
    read_s_per_byte: float = 0.0
    write_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.budget_bytes != math.inf:
            require_finite("budget_bytes", self.budget_bytes)
        require_finite("read_s_per_byte", self.read_s_per_byte)
        require_finite("write_s_per_byte", self.write_s_per_byte)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepingTiers:
    """Tiers that may hold rows, and the rows that may be held.

    Attributes:
        tiers: Tiers by name. Rows in memory and on disk are written by the compute tier. Rows in the store
            are written by servers, and cross the link when they are read.
        positions: Positions whose rows may be kept, each with the number of views of a sample's rows there: 1
            if nothing before it draws random numbers. An epoch finds only rows of its own view.
        there: Share of the samples whose rows are there already, in all views. A sample counts in one place
            only, and the shares sum to at most 1.
        row_bytes: Bytes of one view's row by position; without an entry, those that cross a cut there.

    Raises:
        ConfigError: If a tier has no such name, a share or a size is out of range, or rows are there at a
            position or in a tier that is not given.
    """

    tiers: Mapping[KeepTier, KeepRoom]
    positions: Mapping[int, int]
    there: Mapping[RowPlace, float] = field(default_factory=dict)
    row_bytes: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.tiers:
            if name not in tuple(KeepTier):
                raise ConfigError(f"tiers must be among {', '.join(KeepTier)}, got {name!r}")
        for position, views in self.positions.items():
            require_type(f"positions[{position}]", views, int, "a number of views")
            require_finite(f"positions[{position}]", views, at_least=1)
        for position, size in self.row_bytes.items():
            require_finite(f"row_bytes[{position}]", size)
        self.check_shares("there", self.there)

    def check_shares(self, name: str, shares: Mapping[RowPlace, float]) -> None:
        """Check shares of the samples by the place of their rows.

        Raises:
            ConfigError: If a place is not among these, or a share or their sum lies outside 0 to 1.
        """
        for (position, tier), share in shares.items():
            if position not in self.positions or tier not in self.tiers:
                raise ConfigError(
                    f"{name} must name positions among {sorted(self.positions)} and tiers among "
                    f"{', '.join(self.tiers) or 'none'}, got {position} in {tier}"
                )
            require_finite(f"{name}[{position}, {tier}]", share, at_most=1.0)
        if sum(shares.values()) > 1.0 + 1e-9:
            raise ConfigError(f"shares of {name} must sum to at most 1, got {sum(shares.values())}")

    def without(self, tier: str) -> KeepingTiers:
        """Return the same without a tier that became slow, full or unreachable, and without its rows."""
        return replace(
            self,
            tiers={name: room for name, room in self.tiers.items() if name != tier},
            there={place: share for place, share in self.there.items() if place[1] != tier},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRoute:
    """Way of a share of the samples through an epoch.

    Attributes:
        cut: Cut over which the samples are computed from stored bytes; None if kept rows are read.
        read: Place of the rows that are read; None if the samples are computed.
        written: Place in which their rows are then kept; None if nowhere.
    """

    share: float
    cut: int | None = None
    read: RowPlace | None = None
    written: RowPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepPlan:
    """A decision about kept rows over a horizon of epochs, as data.

    Attributes:
        epochs: The horizon.
        views: Number of first epochs: the views of the rows that are written, one in each of these epochs.
            The whole horizon if rows are only read.
        first: Routes of each of these first epochs.
        later: Routes of each epoch after them; empty if there is none.
        first_s: Predicted seconds of a first epoch.
        later_s: Predicted seconds of a later epoch.
        without_s: Predicted seconds of an epoch without keeping.
        pays_from: Number of epochs from which on the sum with keeping is shorter; None if it never is.
        why: Sentences that say where each share comes from.
    """

    epochs: int
    views: int
    first: tuple[KeepRoute, ...]
    later: tuple[KeepRoute, ...]
    first_s: float
    later_s: float
    without_s: float
    pays_from: int | None
    why: str

    @property
    def total_s(self) -> float:
        """Predicted seconds of the whole horizon."""
        firsts = min(self.views, self.epochs)
        return self.epochs * self.later_s + firsts * (self.first_s - self.later_s)

    @property
    def total_without_s(self) -> float:
        """Predicted seconds of the whole horizon without keeping."""
        return self.epochs * self.without_s

    @property
    def written(self) -> dict[RowPlace, float]:
        """Share of the samples whose rows the first epochs write, by place."""
        return _summed((route.written, route.share) for route in self.first)

    @property
    def kept(self) -> dict[RowPlace, float]:
        """Share of the samples whose rows later epochs read, by place."""
        return _summed((route.read, route.share) for route in self.later)

    @property
    def fresh_first(self) -> dict[int, float]:
        """Share of the samples that a first epoch computes, by cut."""
        return _summed((route.cut, route.share) for route in self.first)

    @property
    def fresh_later(self) -> dict[int, float]:
        """Share of the samples that a later epoch computes, by cut."""
        return _summed((route.cut, route.share) for route in self.later)

    def __str__(self) -> str:
        return self.why


def _summed(pairs: Iterable[tuple[Key | None, float]]) -> dict[Key, float]:
    """Sum the shares of each key; None is no key."""
    sums = dict[Key, float]()
    for key, share in pairs:
        if key is not None:
            sums[key] = sums.get(key, 0.0) + share
    return sums
