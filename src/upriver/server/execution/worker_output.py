"""Read a worker's output: keep it during the start, pass it on later, report its last line."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import IO

from upriver._threads.background import BackgroundThread
from upriver.server.observability import logging as logs
from upriver.text import said

log = logging.getLogger(__name__)

KEPT_LINES = 50
"""Lines kept of a worker's output before it is ready: a traceback, and some warnings before it."""

LINE_BYTES = 8192
"""Longest piece that is passed on at once."""

STDERR = 2


class WorkerOutput:
    """Read a stream to its end in a thread, so that its writer never blocks.

    Args:
        stream: Reading end of a pipe; closed at its end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept: deque[bytes] | None = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._last = b""
        self._thread = BackgroundThread(self._read, name="worker-output")
        self._thread.start()

    def pass_on(self) -> None:
        """Print the output so far, and all later output as it arrives."""
        with self._lock:
            kept, self._kept = self._kept or (), None
            for line in kept:
                _print(line)

    def last_line(self, *, timeout_s: float = 0.0) -> str:
        """Return the last line that is not blank, as safe text; wait that long for the stream's end."""
        self._thread.join(timeout_s)
        return said(self._last.decode(errors="replace"), 300)

    def _read(self) -> None:
        with self._stream:
            while line := self._stream.readline(LINE_BYTES):
                self._last = line if line.strip() else self._last
                with self._lock:
                    if self._kept is None:
                        _print(line)
                    else:
                        self._kept.append(line)


def _print(line: bytes) -> None:
    """Write a line to the front's stderr, past Python's object, which may be replaced; or log it as JSON."""
    if logs.writes_json():
        if line.strip():
            log.warning("a worker printed: %s", line.decode(errors="replace").rstrip())
        return
    try:
        os.write(STDERR, line)
    except OSError:  # stderr is closed: reading goes on, or the worker would block
        return
