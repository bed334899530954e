"""Write rows to disk in a background thread that training never waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Set

from upriver._threads.background import BackgroundThread
from upriver.features.folder import StretchFolder
from upriver.features.row_form import Row

FULL = 0.9
"""Share of a shard from which it counts as full: the next row may be larger than the rest."""


class FeatureWriter:
    """Collect rows into shards, and append each to its folder. Any number of threads may call it.

    At most two shards are in memory: one that is written, and one that fills. Rows that come while both are
    full are not written, so a slow disk delays nobody.

    Args:
        shard_bytes: Size from which collected rows are written.
    """

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._changed = threading.Condition()
        self._filling: dict[StretchFolder, dict[bytes, Row]] = {}
        self._filled_bytes = 0
        self._writing: dict[StretchFolder, dict[bytes, Row]] = {}
        self._hurry = self._closed = False
        self._thread: BackgroundThread | None = None

    def waiting(self, folder: StretchFolder) -> Set[bytes]:
        """Return the keys of a folder's rows that are not written yet."""
        with self._changed:
            return self._filling.get(folder, {}).keys() | self._writing.get(folder, {}).keys()

    def put(
        self, folder: StretchFolder, key: bytes, row: Row, *, wait: bool = False, until_s: float = 0.0
    ) -> bool:
        """Take a row, and return whether it will be written.

        Args:
            wait: Wait for room in place of leaving the row out.
            until_s: Time of the monotonic clock until which to wait otherwise.
        """
        num_bytes = sum(tensor.nbytes for tensor in row)
        with self._changed:
            while not self._closed and not self._has_room(num_bytes):
                self._hurry = True  # what is collected may be less than FULL, as rows may be large
                self._changed.notify_all()
                left_s = None if wait or not self._writing else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._changed.wait(left_s)  # the thread is about to take what is collected, or is writing
            if self._closed:
                return False
            self._filling.setdefault(folder, {})[key] = row
            self._filled_bytes += num_bytes
            self._start()
            self._changed.notify_all()
            return True

    def flush(self, *, wait: bool = False) -> None:
        """Have all rows written that were taken so far, however few.

        Args:
            wait: Wait until they are written.
        """
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while wait and (self._filling or self._writing):
                self._changed.wait()

    def close(self) -> None:
        """Write what was taken, and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._filling or self._filled_bytes + num_bytes <= self._shard_bytes

    def _start(self) -> None:
        if self._thread is None:
            self._thread = BackgroundThread(self._run, name="features")
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._next():
                self._write()
        finally:  # nobody waits for a thread that failed
            with self._changed:
                self._closed = True
                self._filling, self._writing = {}, {}
                self._changed.notify_all()

    def _write(self) -> None:
        for folder, rows in self._writing.items():
            folder.append(rows)
        with self._changed:
            self._writing = {}
            self._changed.notify_all()

    def _next(self) -> bool:
        """Wait for a full shard, a flush or the end; return whether there is anything to write."""
        with self._changed:
            while not self._closed and not self._is_due():
                self._changed.wait()
            self._writing, self._filling, self._filled_bytes = self._filling, {}, 0
            self._hurry = False
            self._changed.notify_all()
            return bool(self._writing) or not self._closed

    def _is_due(self) -> bool:
        if not self._filling:
            self._hurry = False  # nothing is left to hurry with
            return False
        return self._hurry or self._filled_bytes >= FULL * self._shard_bytes
