"""Handle forks: a child has no thread of its parent, and must share neither connections nor held locks."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import ParamSpec, Protocol

_P = ParamSpec("_P")

log = logging.getLogger("upriver")


class Forked(Protocol):
    """An object that needs another state in a forked child."""

    def forked(self) -> None:
        """Reset the object; called in a child, before any other thread exists."""


_forked: weakref.WeakSet[Forked] = weakref.WeakSet()


def reset_in_child(thing: Forked) -> None:
    """Reset an object in each forked child of this process; only a weak reference is kept."""
    _forked.add(thing)


def _reset_all() -> None:
    for thing in list(_forked):
        try:
            thing.forked()
        except Exception:  # the others are to be reset all the same
            log.exception("%s could not be reset in a forked process", type(thing).__name__)


os.register_at_fork(after_in_child=_reset_all)


class ForkSafeLock:
    """Reentrant lock that is free in a forked child, unless the forking thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        reset_in_child(self)

    def forked(self) -> None:
        """Replace the lock if a thread holds it that does not exist here."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def unless_forked(call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Callable[[], None]:
    """Return a call that does nothing in a fork of this process: what it would end is the parent's."""
    owner = os.getpid()

    def in_owner() -> None:
        if os.getpid() == owner:
            call(*args, **kwargs)

    return in_owner
