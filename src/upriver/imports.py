"""Import large modules faster, with the garbage collector off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector during a block of imports, and exempt the imported objects from it.

    Importing PyTorch makes 250,000 permanent objects, and scanning them repeatedly takes a tenth of the time.
    A process that will fork, or must respond without pauses, gains from the exemption later, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
