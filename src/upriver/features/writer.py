"""Write rows to disk in a thread of its own, some megabytes at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from upriver._threads.background import BackgroundThread
from upriver._threads.forks import reset_in_child
from upriver.features.folder import StretchFolder
from upriver.features.row_form import Row
from upriver.text import error_text

log = logging.getLogger("upriver")


class FeatureWriter:
    """Collect rows of stretches, and write each stretch's as one shard. Any thread may call any method.

    At most twice the given bytes wait: what is collected, and what is being written. A row that finds no room
    is not written, unless its caller waits.

    Args:
        buffer_bytes: Bytes of rows that are written together.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        reset_in_child(self)
        self.forked()

    def forked(self) -> None:
        """Leave to the parent what waits."""
        self._changed = threading.Condition()
        self._rows: dict[StretchFolder, dict[bytes, Row]] = {}
        self._writing: dict[StretchFolder, dict[bytes, Row]] = {}
        self._num_bytes, self._due, self._closed = 0, False, False
        self._thread: BackgroundThread | None = None

    @property
    def waiting(self) -> frozenset[bytes]:
        """Keys of the rows that are not written yet."""
        with self._changed:
            return frozenset(key for rows in (*self._rows.values(), *self._writing.values()) for key in rows)

    def put(self, folder: StretchFolder, key: bytes, row: Row, *, wait: bool = False) -> bool:
        """Have a row written, which must not change any more.

        Args:
            wait: Wait for room.

        Returns:
            False if there is no room for it now, or the writer is closed.
        """
        num_bytes = sum(tensor.nbytes for tensor in row)
        with self._changed:
            if any(key in rows.get(folder, ()) for rows in (self._rows, self._writing)):
                return True
            while self._num_bytes >= self._buffer_bytes and not self._closed:
                self._begin()
                if not wait and self._writing:
                    return False
                self._changed.wait()
            if self._closed:
                return False
            self._rows.setdefault(folder, {})[key] = row
            self._num_bytes += num_bytes
            if self._num_bytes >= self._buffer_bytes:
                self._begin()
            return True

    def flush(self, *, wait: bool = False) -> None:
        """Write what is collected.

        Args:
            wait: Wait until it is written.
        """
        with self._changed:
            if self._closed:
                return
            self._begin()
            while wait and (self._rows or self._writing) and not self._closed:
                self._changed.wait()

    def close(self) -> None:
        """Write what waits, and end the thread. Idempotent."""
        self.flush(wait=True)
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        """Have the thread write what is collected. The lock is held."""
        if not self._rows:
            return
        self._due = True
        if self._thread is None:
            self._thread = BackgroundThread(self._work, name="features")
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._due and not self._closed:
                    self._changed.wait()
                if not self._due:
                    return
                self._writing, self._rows = self._rows, {}
                self._num_bytes, self._due = 0, False
                self._changed.notify_all()
                writing = self._writing
            with self._written():
                for folder, rows in writing.items():
                    _append(folder, rows)
                del writing

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                self._writing = {}
                self._changed.notify_all()


def _append(folder: StretchFolder, rows: dict[bytes, Row]) -> None:
    """Write rows; an error costs these rows, as the thread must go on for those that wait for it."""
    try:
        folder.append(rows)
    except Exception as error:
        log.warning("%d rows are not kept in %s: %s", len(rows), folder.path, error_text(error))
