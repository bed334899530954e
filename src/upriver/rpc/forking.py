"""Notify objects in a forked child, which must not share connections or held locks with its parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that needs another state in a forked child."""

    def forked(self) -> None:
        """Reset the object; called in a child, before any other thread exists."""


_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell(thing: Forked) -> None:
    """Register an object to be notified in each child of this process; a weak reference is kept."""
    _told.add(thing)


def _forked() -> None:
    for thing in list(_told):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
