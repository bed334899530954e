"""Limit concurrent requests or connections, so that no tenant takes the last places from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

KEPT_SHARE = 0.5
"""Largest share of the places that is kept for tenants without one.

Many tenants that never come must not leave almost nothing to the others.
"""


class ConcurrencyLimit:
    """Limit the places in use at once. All methods belong to the event loop's thread.

    A tenant with a place leaves one for each other tenant that has none; see `KEPT_SHARE`.

    Args:
        tenants: Names of the tenants that may come.
    """

    def __init__(self, most: int, tenants: Iterable[str]) -> None:
        self._most, self._tenants = most, frozenset(tenants)
        self._of: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Places that all tenants use."""
        return self._of.total()

    def taken_by(self, tenant: str) -> int:
        """Return the places that one tenant uses."""
        return self._of[tenant]

    def take(self, tenant: str) -> bool:
        """Take a place until it is given back; return whether one was free."""
        if self.taken + self._kept_from(tenant) >= self._most:
            return False
        self._of[tenant] += 1
        return True

    def give_back(self, tenant: str) -> None:
        """Free a place that was taken."""
        self._of[tenant] -= 1
        if not self._of[tenant]:
            del self._of[tenant]

    def _kept_from(self, tenant: str) -> int:
        if tenant not in self._of:
            return 0
        return min(len(self._tenants - self._of.keys()), int(KEPT_SHARE * self._most))
