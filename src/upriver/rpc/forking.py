"""What a forked child does not share with its parent: connections, and locks that threads held there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that is another thing in a child."""

    def forked(self) -> None:
        """Called in a child, when no other thread is there yet."""


_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell(thing: Forked) -> None:
    """From here on it is told in each child of this process; it is not kept alive by that."""
    _told.add(thing)


def _forked() -> None:
    for thing in list(_told):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
