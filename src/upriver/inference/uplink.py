"""The device's way out, which its requests and its probes share."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_WAIT_S = 10.0
"""For a probe, until it is sent all the same: a server that hangs is to keep no other one out."""


class Uplink:
    """Requests and probes that are under way, to whichever server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._began: dict[object, float] = {}
        self._probing = self._closed = False
        self._listeners: list[Callable[[], None]] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request is under way."""
        request = object()
        with self._lock:
            self._began[request] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._began[request]
                listeners = list(self._listeners)
                self._changed.notify_all()
            for listener in listeners:
                listener()

    @contextmanager
    def probing(self, due_s: float) -> Iterator[None]:
        """While probes are sent; waits for those to other servers, and for requests that were there before.

        Two that overlap share the link and end together, so that the next ones would overlap again.

        Args:
            due_s: Since when they have been due; later requests are not waited for.
        """

        def free() -> bool:
            return self._closed or (not self._probing and self._busy_since_s() > due_s)

        with self._lock:
            mine = self._changed.wait_for(free, LONGEST_WAIT_S) and not self._closed
            if mine:
                self._probing = True
        try:
            yield
        finally:
            if mine:
                with self._lock:
                    self._probing = False
                    self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    @property
    def busy_since_s(self) -> float:
        """When the oldest request under way began; infinite where none is."""
        with self._lock:
            return self._busy_since_s()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call it, with no lock held, whenever a request has ended."""
        with self._lock:
            self._listeners.append(listener)

    def _busy_since_s(self) -> float:
        return min(self._began.values(), default=math.inf)
