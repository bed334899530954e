"""Fill buffers with the bytes of an object as they arrive, without a copy of the whole object."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from upriver.errors import ConfigError

PIECE_BYTES = 1 << 20
"""Default size of a piece. Larger ones save nothing; smaller ones need the interpreter more often."""


class BufferSequence:
    """Buffers that are filled one after the other.

    Args:
        into: One or several writable and contiguous buffers.

    Attributes:
        left: Bytes that are still missing.

    Raises:
        ConfigError: If a buffer is read-only or not contiguous.
    """

    def __init__(self, into: memoryview | Sequence[memoryview]) -> None:
        views = [into] if isinstance(into, memoryview) else into
        self._views = deque(_as_bytes(view) for view in views if view.nbytes)
        self.left = sum(len(view) for view in self._views)

    def take(self, piece: bytes | memoryview) -> None:
        """Copy bytes that have arrived.

        Raises:
            ValueError: If there is no room for them.
        """
        if len(piece) > self.left:
            raise ValueError("the answer has more bytes than were asked for")
        source, at = np.frombuffer(piece, dtype=np.uint8), 0
        while at < len(source):
            room = self.room(len(source) - at)
            # Writing to untouched memory costs more than the copy. NumPy lets other threads run meanwhile.
            np.frombuffer(room, dtype=np.uint8)[:] = source[at : at + len(room)]
            at += len(room)
            self.filled(len(room))

    def room(self, most: int) -> memoryview:
        """Return the memory of the next bytes, at most `most`; empty if no byte is missing."""
        return self._views[0][:most] if self._views else memoryview(b"")

    def filled(self, num_bytes: int) -> None:
        """Count bytes that were written to `room`."""
        self.left -= num_bytes
        rest = self._views.popleft()[num_bytes:]
        if rest:
            self._views.appendleft(rest)


def _as_bytes(view: memoryview) -> memoryview:
    if view.readonly or not view.c_contiguous:
        what = "cannot be written" if view.readonly else "has gaps"
        raise ConfigError(
            f"a buffer to read into must be writable and contiguous; one of {view.nbytes} {what}"
        )
    return view.cast("B")
