"""Share the device's link out among its requests and probes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_WAIT_S = 10.0
"""Longest wait of a probe before it is sent anyway: a hanging server must not keep other servers out."""


class Uplink:
    """Track the requests and probes under way, to all servers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._began: dict[object, float] = {}
        self._probing = self._closed = False
        self._listeners: list[Callable[[], None]] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark a request as under way."""
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
        """Mark probes as under way, after probes to other servers and earlier requests have ended.

        Two overlapping probes share the link and end together, so that the next ones would overlap again.

        Args:
            due_s: Time since when the probes are due; they do not wait for later requests.
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
        """End all waits, now and later."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    @property
    def busy_since_s(self) -> float:
        """Start of the oldest request under way; infinite where there is none."""
        with self._lock:
            return self._busy_since_s()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call a listener whenever a request has ended, with no lock held."""
        with self._lock:
            self._listeners.append(listener)

    def _busy_since_s(self) -> float:
        return min(self._began.values(), default=math.inf)
