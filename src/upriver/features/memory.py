"""Keep rows in memory, within a budget in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count

from upriver._threads.forks import ForkSafeLock
from upriver.errors import ConfigError
from upriver.features.eviction import gives_way
from upriver.features.row_form import Row, layout_of, packed, unpacked

OBJECT_NBYTES = 1024
"""Memory of a tensor besides its elements, with its place in the tables: 0.8 kB measured, PyTorch 2.13."""


class _Rows:
    """Rows of one stretch, the least recently used first.

    Attributes:
        num_bytes: Memory of all rows.
        saved_s: Seconds that a row saves, as the last caller said.
        last_used: Count at the last use.
    """

    def __init__(self) -> None:
        self.rows: OrderedDict[bytes, tuple[Row, int]] = OrderedDict()
        self.num_bytes, self.saved_s, self.last_used = 0, 0.0, 0

    @property
    def saved_s_per_byte(self) -> float:
        return self.saved_s * len(self.rows) / max(1, self.num_bytes)

    def pop(self) -> int:
        """Remove the row last used longest ago, and return its bytes."""
        _, (_, num_bytes) = self.rows.popitem(last=False)
        self.num_bytes -= num_bytes
        return num_bytes


class MemoryFeatures:
    """Rows in memory by stretch and key. Any thread may call any method.

    Rows of clearly less useful stretches give way, those last used longest ago first. Rows of the same
    stretch stay: a job reads them in rounds, and would find none if the oldest gave way to each new one.

    Args:
        budget_bytes: Most bytes of memory of all rows.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._stretches: dict[str, _Rows] = {}
        self._used_bytes, self._uses = 0, count(1)
        self._lock = ForkSafeLock()

    @property
    def used_bytes(self) -> int:
        """Bytes of memory of all rows."""
        with self._lock:
            return self._used_bytes

    def keys(self, stretch: str) -> frozenset[bytes]:
        """Return the keys of a stretch's rows."""
        with self._lock:
            kept = self._stretches.get(stretch)
            return frozenset() if kept is None else frozenset(kept.rows)

    def get(self, stretch: str, keys: Sequence[bytes]) -> list[Row | None]:
        """Return the rows of a stretch that are kept, None for others. They are shared: do not write to them.

        Args:
            stretch: Digest of the stretch.
        """
        with self._lock:
            kept = self._stretches.get(stretch)
            if kept is None:
                return [None] * len(keys)
            kept.last_used = next(self._uses)
            return [self._used(kept, key) for key in keys]

    def put(self, stretch: str, key: bytes, row: Row, *, saved_s: float) -> bool:
        """Keep a copy of a row if there is room.

        Args:
            stretch: Digest of the stretch.
            saved_s: Seconds that a row of this stretch saves each time it is read.

        Returns:
            True if the row is kept now.
        """
        try:
            pack = packed(row)
        except ConfigError:  # a type of tensor that rows do not have
            return False
        num_bytes = layout_of(pack.form).memory_nbytes + OBJECT_NBYTES * max(1, len(row))
        with self._lock:
            kept = self._stretches.get(stretch) or _Rows()
            if key in kept.rows:
                return True
            kept.saved_s = saved_s
            if not self._make_room(stretch, num_bytes, saved_s / num_bytes):
                return False
            kept.rows[key] = unpacked(pack), num_bytes
            kept.num_bytes, kept.last_used = kept.num_bytes + num_bytes, next(self._uses)
            self._stretches[stretch] = kept
            self._used_bytes += num_bytes
            return True

    def clear(self, stretch: str) -> None:
        """Remove all rows of a stretch."""
        with self._lock:
            kept = self._stretches.pop(stretch, None)
            self._used_bytes -= kept.num_bytes if kept is not None else 0

    def _used(self, kept: _Rows, key: bytes) -> Row | None:
        found = kept.rows.get(key)
        if found is None:
            return None
        kept.rows.move_to_end(key)
        return found[0]

    def _make_room(self, stretch: str, num_bytes: int, worth: float) -> bool:
        """Remove rows until there is room; none if all that may go would not be enough."""
        needed = self._used_bytes + num_bytes - self.budget_bytes
        if needed <= 0:
            return True
        less = list(self._less_useful(stretch, worth))
        if sum(self._stretches[name].num_bytes for name in less) < needed:
            return False
        for name in less:
            kept = self._stretches[name]
            while kept.rows and needed > 0:
                freed = kept.pop()
                self._used_bytes, needed = self._used_bytes - freed, needed - freed
            if not kept.rows:
                del self._stretches[name]
        return True

    def _less_useful(self, stretch: str, worth: float) -> Iterator[str]:
        """Return the stretches that give way, the least useful first, then the one last used longest ago."""
        found = [
            (kept.saved_s_per_byte, kept.last_used, name)
            for name, kept in self._stretches.items()
            if name != stretch and gives_way(kept.saved_s_per_byte, worth)
        ]
        return (name for _, _, name in sorted(found))
