"""The device's way out, which its requests and its probes share."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Uplink:
    """Requests that are under way, to whichever server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began: dict[object, float] = {}
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
            for listener in listeners:
                listener()

    @property
    def busy_since_s(self) -> float:
        """When the oldest request under way began; infinite where none is."""
        with self._lock:
            return min(self._began.values(), default=math.inf)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call it, with no lock held, whenever a request has ended."""
        with self._lock:
            self._listeners.append(listener)
