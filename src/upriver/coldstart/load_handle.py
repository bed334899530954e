"""Handle the load of a model or a program: its waiting callers, its events and its end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from upriver._threads.background import BackgroundThread
from upriver.coldstart import link_cache
from upriver.coldstart.fetch.strategy import Groupings, RequestPlan
from upriver.coldstart.fetch.stream_limits import DEFAULT_LIMITS, StreamLimits
from upriver.coldstart.fetch.weight_stream import WeightStream
from upriver.coldstart.format.checkpoint import WeightSource
from upriver.coldstart.format.readahead import ENDING_S, Readahead, reading
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping.groups import check_policy
from upriver.coldstart.model.arrivals import Arrivals
from upriver.coldstart.model.assignment import WeightMemory
from upriver.errors import Cancelled, ConfigError, StoreError, UpriverError
from upriver.program.graph.devices import check_device
from upriver.store import Store
from upriver.types import MOST_SECONDS, require_finite, require_type

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEvent:
    """Event of a load.

    Attributes:
        at_s: Seconds since the load began.
        kind: ``found`` (the weights' location is known), ``constructed`` (the model), ``request``,
            ``first_byte``, ``refetch`` and ``filled`` of the stream, ``touched`` (first read of a weight,
            which waits if it has not arrived), ``loaded`` or ``failed``.
        weights: Names of the first and the last weight concerned; empty if none is.
        nbytes: Bytes of these weights.
    """

    at_s: float
    kind: str
    weights: tuple[str, ...] = ()
    nbytes: int = 0


def check_options(
    store: Store | None,
    options: Mapping[str, str] | None,
    device: str | torch.device,
    grouping: str,
    limits: StreamLimits | None,
) -> tuple[torch.device, StreamLimits]:
    """Check the options that all loads have, before any lookup. Return the device and the limits.

    Raises:
        ConfigError: If torch cannot compute on the device, no such grouping exists, or another option has
            another type.
    """
    if store is not None:
        require_type("store", store, Store, "Store.open(URI)")
    if options is not None:
        texts = (*options.keys(), *options.values()) if isinstance(options, Mapping) else (options,)
        others = [each for each in texts if not isinstance(each, str)]
        if others or not isinstance(options, Mapping):  # values may be secret: the error names only the type
            kind = type(others[0] if others else options).__name__
            raise ConfigError(
                f"store_options must be a mapping of texts to texts, got something of type {kind}"
            )
    check_policy(grouping)
    if limits is not None:
        require_type("limits", limits, StreamLimits, "coldstart.StreamLimits()")
    return check_device(device), limits or DEFAULT_LIMITS


class Handle(ABC, Generic[Owner]):
    """Handle of a load, running or finished.

    Attributes:
        nbytes: Bytes of all wanted weights.
        touched: Weights by number, in the order of their first read, and its time in seconds of
            ``time.monotonic``.
    """

    def __init__(
        self,
        plan: RequestPlan,
        memories: Sequence[WeightMemory],
        *,
        ahead: Readahead | None,
        steps: Mapping[str, float],
        also: int = 0,
    ) -> None:
        """Prepare the load without sending a request.

        Args:
            plan: Requests of the wanted weights.
            steps: Times of past events, ``began`` among them.
            also: Number of other tasks to wait for, besides the weights.
        """
        self._source, self._memories = plan.source, list(memories)
        self._steps, self._stream_s = dict(steps), 0.0
        self._groupings = plan.groupings
        self._left = len(self._memories)
        self._arrivals = Arrivals(self._left + also)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.nbytes = plan.source.nbytes
        self.touched: dict[int, float] = {}
        self._stream = plan.stream(self, ahead)

    def start(self, owner: Owner) -> None:
        """Start the load.

        Raises:
            UpriverError: If no thread can be started.
        """
        self._owner = weakref.ref(owner)
        self._dropped = weakref.finalize(owner, self._stream.cancel)
        self._dropped.atexit = False
        under_way[owner] = self
        self._stream_s = time.monotonic()
        if self._memories:
            try:
                self._stream.start()
                _streaming.add(self._stream)
            except UpriverError as error:
                raise UpriverError(f"{self._source.path!r} cannot be loaded: {error}") from None
        else:
            self._all_here(None)

    # ------------------------------------------------------------------------------------- callers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all weights have arrived and are correct. Return False after a timeout.

        In the remaining time, also wait until the cached results for the next load are written.

        Raises:
            ConfigError: If the timeout is no number.
            UpriverError: If a weight does not arrive or is wrong.
        """
        timeout_s = _checked(timeout_s)
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not self._over.wait(timeout_s):
            return False
        self._stream.join(_left(until_s))
        for thread in self._threads:
            thread.join(_left(until_s))
        self._arrivals.check()
        return True

    def cancel(self) -> None:
        """Stop reading, and raise an error in all waiting callers. Do nothing after the last weight."""
        self._stream.cancel()
        self._stream.join()

    def nbytes_here(self) -> int:
        """Return the bytes of the weights that have arrived."""
        return sum(event.nbytes for event in tuple(self._stream.events) if event.kind == "filled")

    def names_between(self, first: str, last: str | None = None) -> list[str]:
        """Return the names of the weights from one to another, in execution order if it is known."""
        names = [placed.name for placed in self._source.tensors]
        return names[names.index(first) : names.index(last or first) + 1]

    def history(self) -> list[LoadEvent]:
        """Return the events so far, in order."""
        began_s, tensors = self._steps["began"], self._source.tensors
        steps = {kind: at for kind, at in dict(self._steps).items() if kind != "began"}
        found = [LoadEvent(at_s=at - began_s, kind=kind) for kind, at in steps.items()]
        for event in tuple(self._stream.events):
            names = dict.fromkeys(tensors[at].name for at in (event.tensors[0], event.tensors[-1]))
            at_s = self._stream_s + event.at_s - began_s
            found.append(LoadEvent(at_s=at_s, kind=event.kind, weights=tuple(names), nbytes=event.nbytes))
        for index, at in dict(self.touched).items():
            read, at_s = tensors[index], at - began_s
            found.append(LoadEvent(at_s=at_s, kind="touched", weights=(read.name,), nbytes=read.nbytes))
        return sorted(found, key=lambda event: event.at_s)

    # -------------------------------------------------------------------------- what the stream tells

    def room(self, index: int) -> memoryview:
        """Return the memory of a tensor, see :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        return self._memories[index].room()

    def filled(self, index: int) -> None:
        """Settle a tensor, see :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        self._memories[index].settle()
        self._left -= 1
        if self._left:
            self._arrivals.filled(index)
        else:
            self._all_here(index)

    def failed(self, error: UpriverError) -> None:
        """Fail the load, see :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        if self._arrivals.failed(error):
            self._steps["failed"] = time.monotonic()
            self._let_go()
            self._over.set()

    def forked(self) -> None:
        """Fail the load in a forked child, where weights never arrive."""
        self._stream.forked()
        self._arrivals.forked()
        self._over = threading.Event()
        path = self._source.path
        self.failed(Cancelled(f"the process was forked while {path!r} was loading; wait for it before"))
        self._over.set()

    # ---------------------------------------------------------------------------------------- inside

    @abstractmethod
    def _release(self, owner: Owner) -> None:
        """Remove the guard from the owner after all weights have arrived."""

    def _all_here(self, last: int | None) -> None:
        """Finish the load. `last` is the last weight, not yet announced; None if there was none."""
        self._finish(last)

    def _let_go(self) -> None:
        """Release all memory but what the owner itself holds."""
        self._memories.clear()

    def _finish(self, last: int | None) -> None:
        """Release the owner, wake all callers and store results for the next load.

        Args:
            last: Number of the last arrival. Its callers are woken after the owner's release: a copy made
                earlier would stay guarded.
        """
        self._give_back()
        if last is not None:
            self._arrivals.filled(last)
        self._dropped.detach()
        self._let_go()
        self._steps["loaded"] = time.monotonic()
        self._over.set()
        if self._source.tensors:
            self._write_down("keep", remember, self._source, self._stream, self._groupings)

    def _give_back(self) -> None:
        if (owner := self._owner()) is not None:
            self._release(owner)
            under_way.pop(owner, None)

    def _write_down(self, name: str, target: Callable[..., object], *args: object) -> None:
        """Write a result for the next load in a thread. The end of the process waits a moment for it."""
        with contextlib.suppress(UpriverError):  # no thread can be started
            _writing.add(self._begin_beside(name, target, *args))

    def _begin_beside(self, name: str, target: Callable[..., object], *args: object) -> threading.Thread:
        """Run a function in a thread that only `wait` waits for.

        Raises:
            UpriverError: If no thread can be started.
        """
        thread = BackgroundThread(target, *args, name=f"coldstart-{name}")
        thread.start()
        self._threads.append(thread)
        return thread


def _checked(timeout_s: float | None) -> float | None:
    """Return the seconds to wait, None for no limit. A negative rest of a deadline counts as 0."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float):
        timeout_s = max(timeout_s, 0.0)
    require_finite("timeout_s", timeout_s, at_most=MOST_SECONDS)
    return timeout_s


def _left(until_s: float) -> float | None:
    return None if until_s == math.inf else max(0.0, until_s - time.monotonic())


def remember(source: WeightSource, stream: WeightStream, groupings: Groupings) -> None:
    """Store the results of a stream that the next load can start with."""
    if not stream.bounded:
        link_cache.keep(source.store, stream.measured, nbytes=source.nbytes)
    if groupings:
        try:
            grouping_cache.keep(source, groupings)
        except StoreError as error:
            log.info("the grouping is not kept: %s", error)


under_way: weakref.WeakKeyDictionary[object, Handle[Any]] = weakref.WeakKeyDictionary()
"""Running loads, by their models and programs."""


_streaming: weakref.WeakSet[WeightStream] = weakref.WeakSet()
_writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Cancel running loads at exit and wait: a thread that Python ends within an operator aborts the process.

    Wait for results that are being written, too. A process may live for one load and one result, and the next
    one should gain from it.
    """
    for handle in list(under_way.values()):
        handle._stream.cancel()
    for ahead in list(reading):
        ahead.cancel()
    until_s = time.monotonic() + ENDING_S
    for stream in list(_streaming):
        stream.join(_left(until_s))
    for ahead in list(reading):
        ahead.join(_left(until_s))
    for thread in list(_writing):
        thread.join(_left(until_s))


def _forked() -> None:
    reading.clear()
    for handle in list(under_way.values()):
        handle.forked()


os.register_at_fork(after_in_child=_forked)
