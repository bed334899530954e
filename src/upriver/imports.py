"""Import large modules: faster, with the garbage collector off, or late, outside an event loop's thread."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_IMPORTED: dict[str, Any] = {}


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


async def imported(name: str) -> Any:
    """Return a module. If it is new, import it in a thread: the event loop serves others meanwhile."""
    import asyncio  # a worker's process needs none

    if name not in _IMPORTED:
        _IMPORTED[name] = await asyncio.to_thread(_import, name)
    return _IMPORTED[name]


def _import(name: str) -> Any:
    with uncollected():
        return importlib.import_module(name)
