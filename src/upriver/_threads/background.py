"""Run one function in a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from upriver.errors import UpriverError
from upriver.text import error_text

log = logging.getLogger("upriver")


class BackgroundThread(threading.Thread):
    """Daemon thread that runs one function. An error is logged by the thread's name.

    Args:
        work: Function to run.
        args: Its arguments.
        name: Name of the thread, after ``upriver-``.
    """

    def __init__(self, work: Callable[..., object], *args: object, name: str) -> None:
        super().__init__(target=work, args=args, name=f"upriver-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            UpriverError: If no thread can be started.
        """
        try:
            super().start()
        except RuntimeError as error:
            raise UpriverError(f"no thread can be started: {error_text(error)}") from None

    def run(self) -> None:
        """Run the function."""
        try:
            super().run()
        except Exception:
            log.exception("the thread %s failed", self.name)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended. Return at once if it never started, and in the thread itself."""
        if self.ident is not None and self is not threading.current_thread():
            super().join(timeout)
