"""Provide an event loop for a thread that can be cancelled at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class Loop(asyncio.SelectorEventLoop):
    """Event loop that ignores callbacks after its end, such as responses to cancelled requests."""

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as any loop does, but raise no error on a closed loop."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)
