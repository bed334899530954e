"""Define observers, which see each read of a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from upriver.store.store import Store

OnBytes = Callable[[int], None]
"""Function that a read calls with 0 when its answer begins, and with the size of each piece that has come."""


class ReadObserver(Protocol):
    """See the reads of a store; sizes, listings and writes are not reads."""

    @property
    def piece_bytes(self) -> int:
        """Most bytes of a piece that is read into memory of the caller's."""

    def reading(
        self, store: Store, path: str, start: int | None, stop: int | None
    ) -> AbstractContextManager[OnBytes | None]:
        """Surround one read.

        Args:
            store: The store.
            path: The object.
            start: First byte; None reads the whole object.
            stop: One past the last byte.

        Returns:
            A context whose value learns of the read's bytes, if it is not None. It may block: event loops
            call it in another thread.
        """
