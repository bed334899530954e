"""Places that tenants share, of requests or of connections: none of them takes the last ones from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

KEPT_SHARE = 0.5
"""Of the places, what is kept at most for tenants that have none: many who never come must not leave next to
nothing to those who do."""


class ConcurrencyLimit:
    """So many at once. Belongs to the event loop's thread.

    Who has a place already leaves one for each other tenant that has none, see `KEPT_SHARE`.

    Args:
        most: How many there are.
        tenants: Names of those who may come.
    """

    def __init__(self, most: int, tenants: Iterable[str]) -> None:
        self._most, self._tenants = most, frozenset(tenants)
        self._of: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Those of all tenants."""
        return self._of.total()

    def taken_by(self, tenant: str) -> int:
        """Those of one."""
        return self._of[tenant]

    def take(self, tenant: str) -> bool:
        """Take a place until it is given back; whether there is one."""
        if self.taken + self._kept_from(tenant) >= self._most:
            return False
        self._of[tenant] += 1
        return True

    def give_back(self, tenant: str) -> None:
        """A place that was taken is free again."""
        self._of[tenant] -= 1
        if not self._of[tenant]:
            del self._of[tenant]

    def _kept_from(self, tenant: str) -> int:
        if tenant not in self._of:
            return 0
        return min(len(self._tenants - self._of.keys()), int(KEPT_SHARE * self._most))
