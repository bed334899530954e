"""Import modules faster, with the garbage collector off, or late: at first use, or outside the event loop."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
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


def lazy_names(
    package: str, places: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported at first use.

    Args:
        package: Name of the package. Its ``__all__`` is what ``dir()`` shows.
        places: Module by public name, relative to the package.
        modules: Modules of the package that are attributes from the start.
    """

    def getattr_(name: str) -> Any:
        if name in places:
            return getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        return list(sys.modules[package].__all__)

    return getattr_, dir_


async def imported(name: str) -> Any:
    """Return a module. If it is new, import it in a thread: the event loop serves others meanwhile."""
    import asyncio  # a worker's process needs none

    if name not in _IMPORTED:
        _IMPORTED[name] = await asyncio.to_thread(_import, name)
    return _IMPORTED[name]


def _import(name: str) -> Any:
    with uncollected():
        return importlib.import_module(name)
