"""The event loop of a thread that can be broken off at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class Loop(asyncio.SelectorEventLoop):
    """Answers to requests that were broken off may come to it when it is closed: nobody wants them."""

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """As any loop's, but no error when it is closed."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)
