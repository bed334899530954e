"""A stream that brings weights in an order of the test's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from upriver.coldstart.source import Source
from upriver.errors import StoreError, UpriverError
from upriver.types import Link


class Ordered:
    """Brings tensors one by one, each when it is let.

    Args:
        order: Numbers of all tensors; as they lie without it.
        lets: Released once for each that may come; None: all may.
        error: Comes in the place of the last ones, after so many.
    """

    measured, bounded = Link(bandwidth_bytes_per_s=1e9), False

    def __init__(
        self,
        order: Sequence[int] = (),
        *,
        lets: threading.Semaphore | None = None,
        error: tuple[int, UpriverError] | None = None,
    ) -> None:
        self.order, self.lets, self.error = order, lets, error
        self.hurried: list[int] = []
        self.events: list[Any] = []
        self.over = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def of(self, source: Source, _groups: Any, sink: Any, **_: Any) -> Ordered:
        """As `Stream` is made."""
        self.source, self.sink = source, sink
        self.order = self.order or range(len(source.tensors))
        return self

    def start(self) -> None:
        """Begin."""
        self.thread.start()

    def hurry(self, index: int) -> None:
        """Note it."""
        self.hurried.append(index)

    def cancel(self) -> None:
        """End."""
        self.over = True
        if self.lets is not None:
            self.lets.release()

    def forked(self) -> None:
        """Nothing of it is there."""

    def join(self, timeout_s: float | None = None) -> None:
        """Until it is over, if it was begun."""
        if self.thread.ident is not None:
            self.thread.join(60 if timeout_s is None else timeout_s)

    def _run(self) -> None:
        for number, index in enumerate(self.order):
            if self.lets is not None:
                self.lets.acquire()
            if self.over:
                return self.sink.failed(StoreError("cancelled"))
            if self.error is not None and number == self.error[0]:
                return self.sink.failed(self.error[1])
            placed = self.source.tensors[index]
            data = self.source.store.get_range(placed.path, placed.start, placed.stop)
            self.sink.room(index)[:] = data
            self.sink.filled(index)
