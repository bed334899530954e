"""A stream that delivers weights in an order that a test chooses."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch import nn

from upriver.coldstart.format.checkpoint import WeightSource, find
from upriver.coldstart.format.manifest import publish
from upriver.coldstart.link_cache import StoreLink
from upriver.errors import StoreError, UpriverError
from upriver.store import Store


def published(model: nn.Module, name: str) -> Store:
    """Return a store that holds a model's weights, as ``model.safetensors``."""
    store = Store.open(f"memory://{name}-{uuid.uuid4().hex}")
    publish(model.state_dict(), store, "model.safetensors")
    return store


class Ordered:
    """Deliver tensors one by one, each when a test allows it.

    Args:
        order: Numbers of all tensors; stored order if empty.
        lets: Released once for each tensor that may come; None: all may.
        error: A count of tensors, and the error that replaces the ones after them.
    """

    measured, bounded = StoreLink(latency_s=0.0, bandwidth_bytes_per_s=1e9), False

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

    def of(self, source: WeightSource, _groups: Any, sink: Any, **_: Any) -> Ordered:
        """Build the stream with the arguments of `WeightStream`."""
        self.source, self.sink = source, sink
        self.order = self.order or range(len(source.tensors))
        return self

    def start(self) -> None:
        """Start the delivery."""
        self.thread.start()

    def hurry(self, index: int) -> None:
        """Record the hurried tensor."""
        self.hurried.append(index)

    def cancel(self) -> None:
        """Stop the delivery."""
        self.over = True
        if self.lets is not None:
            self.lets.release()

    def forked(self) -> None:
        """Do nothing: a forked child has none of the stream's threads."""

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the stream ends, if it was started."""
        if self.thread.ident is not None:
            self.thread.join(60 if timeout_s is None else timeout_s)

    def _let(self, _index: int) -> None:
        """Wait until the next tensor may come."""
        if self.lets is not None:
            self.lets.acquire()

    def _run(self) -> None:
        for number, index in enumerate(self.order):
            self._let(index)
            if self.over:
                return self.sink.failed(StoreError("cancelled"))
            if self.error is not None and number == self.error[0]:
                return self.sink.failed(self.error[1])
            placed = self.source.tensors[index]
            data = self.source.store.get_range(placed.path, placed.start, placed.stop)
            self.sink.room(index)[:] = data
            self.sink.filled(index)


class Hesitant(Ordered):
    """Deliver a tensor when all callers wait for one, and the rest when all callers have their answers.

    Until a tensor arrives its memory holds no numbers, so an answer reveals any early read.

    Args:
        order: Numbers of all tensors.
        num_callers: Threads that ask; each calls :meth:`answered` at its end.
    """

    def __init__(self, order: Sequence[int], *, num_callers: int) -> None:
        super().__init__(order)
        self._num_callers = num_callers
        self._changed = threading.Condition()
        self._missing: dict[int, set[int]] = {}  # by thread
        self._come: set[int] = set()

    def start(self) -> None:
        """Start the delivery."""
        for index in self.order:
            room = self.sink.room(index)
            room[:] = b"\xff" * room.nbytes
        super().start()

    def hurry(self, index: int) -> None:
        """Record which caller waits for the tensor."""
        super().hurry(index)
        with self._changed:
            if index not in self._come:
                self._missing.setdefault(threading.get_ident(), set()).add(index)
                self._changed.notify_all()

    def answered(self) -> None:
        """Record that the caller in this thread asks nothing more."""
        with self._changed:
            self._num_callers -= 1
            self._missing.pop(threading.get_ident(), None)
            self._changed.notify_all()

    def _let(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: sum(map(bool, self._missing.values())) == self._num_callers)
            self._come.add(index)
            for missing in self._missing.values():
                missing.discard(index)


def hesitating(model: nn.Module, name: str, shuffle: int, *, num_callers: int) -> tuple[Store, Hesitant]:
    """Return a store with a model's weights, and a stream with an order drawn from a seed."""
    store = published(model, name)
    count = len(find(store, "model").tensors)
    order = random.Random(shuffle).sample(range(count), count)
    return store, Hesitant(order, num_callers=num_callers)


class Awaited(Ordered):
    """Deliver everything once a caller waits; until then the memory holds no numbers."""

    def start(self) -> None:
        """Start the delivery."""
        for index in self.order:
            room = self.sink.room(index)
            room[:] = b"\xff" * room.nbytes
        super().start()

    def _let(self, _index: int) -> None:
        while not (self.hurried or self.sink._arrivals._all_waited or self.over):
            time.sleep(0.001)
