"""Modules come in sooner while nobody looks for garbage among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For a block that imports much: garbage is looked for afterwards again, and not among what came in.

    Importing PyTorch makes 250,000 objects that all stay, and going through them again and again takes a
    tenth of the time. A process that is to be forked, or to answer without pauses, gains by it later, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
