"""What a worker prints: kept back while it starts, passed on afterwards; its last line says why it ended."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import IO

from upriver.server.observability import logging as logs
from upriver.text import said

log = logging.getLogger(__name__)

KEPT_LINES = 50
"""Of what a worker prints before it is ready: a traceback, and some warnings before it."""

LINE_BYTES = 8192
"""Longest piece passed on at once."""

STDERR = 2


class Output:
    """Reads a stream to its end in a thread, so that its writer never blocks.

    Args:
        stream: A pipe's reading end; closed at its end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept: deque[bytes] | None = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._last = b""
        self._thread = threading.Thread(target=self._read, name="upriver-worker-output", daemon=True)
        self._thread.start()

    def pass_on(self) -> None:
        """Print what came so far, and from here on everything as it comes."""
        with self._lock:
            kept, self._kept = self._kept or (), None
            for line in kept:
                _print(line)

    def last_line(self, *, timeout_s: float = 0.0) -> str:
        """The last line that is not blank, as safe text; waits so long for the stream's end."""
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
    """To the front's own stderr, past Python's, which may be somebody's object; as JSON where all is."""
    if logs.writes_json():
        if line.strip():
            log.warning("a worker printed: %s", line.decode(errors="replace").rstrip())
        return
    try:
        os.write(STDERR, line)
    except OSError:  # nobody listens: no reason to stop reading, or the worker would block
        return
