"""Import modules faster, with the garbage collector off, or late: at first use, or outside the event loop."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

_IMPORTS: dict[str, Future[Any]] = {}
_LOCK = threading.Lock()


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
    """Return a module. A thread of its own imports a new one, for all callers: the event loop serves others.

    A pool's threads would all wait for the same module. An import that failed is tried again.
    """
    import asyncio  # a worker's process needs none

    future = _importing(name)
    return future.result() if future.done() else await asyncio.wrap_future(future)


def _importing(name: str) -> Future[Any]:
    """Return the import of a module, which begins unless it has begun."""
    from concurrent.futures import Future

    with _LOCK:
        known = _IMPORTS.get(name)
        if known is not None and not (known.done() and known.exception()):
            return known
        future = Future[Any]()
        future.set_running_or_notify_cancel()  # a caller that is cancelled leaves it to the others
        threading.Thread(target=_import, args=(name, future), name=f"upriver-import-{name}").start()
        _IMPORTS[name] = future
    return future


def _import(name: str, future: Future[Any]) -> None:
    try:
        with uncollected():
            module = importlib.import_module(name)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(module)
