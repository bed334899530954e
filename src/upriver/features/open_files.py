"""Keep files open for reading, the last used ones. What is open stays readable after its removal."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from upriver._threads.forks import ForkSafeLock

SHARE = 8
"""Part of this process's descriptors that may stay open: an eighth, 128 of the usual 1024."""


class Descriptor:
    """Number of an open file, which is closed with its last reference.

    A reader holds a reference, so no other file can get the number meanwhile.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # a default outlives its module
        close(self.number)


class OpenFiles:
    """Open files by path, at most a share of what this process may open."""

    def __init__(self, at_most: int | None = None) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        share = limit // SHARE if limit != resource.RLIM_INFINITY else 2**16
        self._at_most = max(1, share if at_most is None else at_most)
        self._open: OrderedDict[Path, Descriptor] = OrderedDict()
        self._lock = ForkSafeLock()

    def __contains__(self, path: Path) -> bool:
        with self._lock:
            return path in self._open

    def get(self, path: Path) -> Descriptor:
        """Return a file, opened for reading.

        Raises:
            OSError: If it cannot be opened.
        """
        with self._lock:
            if path not in self._open:
                self._open[path] = opened(path)
                if len(self._open) > self._at_most:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def close(self, path: Path) -> None:
        """Close a file once nobody reads it any more."""
        with self._lock:
            self._open.pop(path, None)


def opened(path: Path) -> Descriptor:
    """Open a file for reading; never wait for the writer of a pipe, never follow a link."""
    return Descriptor(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
