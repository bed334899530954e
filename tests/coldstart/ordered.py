"""A stream that brings weights in an order of the test's."""

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
from upriver.coldstart.link_estimator import StoreLink
from upriver.errors import StoreError, UpriverError
from upriver.store import Store


def published(model: nn.Module, name: str) -> Store:
    """Weights of a model in a store of their own, as ``model.safetensors``."""
    store = Store.open(f"memory://{name}-{uuid.uuid4().hex}")
    publish(model.state_dict(), store, "model.safetensors")
    return store


class Ordered:
    """Brings tensors one by one, each when it is let.

    Args:
        order: Numbers of all tensors; as they lie without it.
        lets: Released once for each that may come; None: all may.
        error: Comes in the place of the last ones, after so many.
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

    def _let(self, _index: int) -> None:
        """Until the next one may come."""
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
    """Brings a tensor when all callers wait for one, and the rest when all of them have their answers.

    Until then there are no numbers in its memory, so that an answer shows what was read too early.

    Args:
        order: Numbers of all tensors.
        num_callers: Threads that ask; each says when it is :meth:`answered`.
    """

    def __init__(self, order: Sequence[int], *, num_callers: int) -> None:
        super().__init__(order)
        self._num_callers = num_callers
        self._changed = threading.Condition()
        self._missing: dict[int, set[int]] = {}  # by thread
        self._come: set[int] = set()

    def start(self) -> None:
        """Begin."""
        for index in self.order:
            room = self.sink.room(index)
            room[:] = b"\xff" * room.nbytes
        super().start()

    def hurry(self, index: int) -> None:
        """Note who waits for it."""
        super().hurry(index)
        with self._changed:
            if index not in self._come:
                self._missing.setdefault(threading.get_ident(), set()).add(index)
                self._changed.notify_all()

    def answered(self) -> None:
        """The caller in this thread asks for nothing more."""
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
    """A store with the weights of a model, and what brings them in an order that a number decides."""
    store = published(model, name)
    count = len(find(store, "model").tensors)
    order = random.Random(shuffle).sample(range(count), count)
    return store, Hesitant(order, num_callers=num_callers)


class Awaited(Ordered):
    """Brings everything when somebody waits; until then there are no numbers in its memory."""

    def start(self) -> None:
        """Begin."""
        for index in self.order:
            room = self.sink.room(index)
            room[:] = b"\xff" * room.nbytes
        super().start()

    def _let(self, _index: int) -> None:
        while not (self.hurried or self.sink._arrivals._all_waited or self.over):
            time.sleep(0.001)
