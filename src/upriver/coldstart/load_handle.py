"""Weights on their way to a model or a program: who waits for them, what has happened, how it ends."""

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
from typing import Any, Generic, TypeAlias, TypeVar

from upriver.coldstart import link_cache
from upriver.coldstart.fetch.weight_stream import Sink, Stream
from upriver.coldstart.format.checkpoint import WeightSource
from upriver.coldstart.format.readahead import ENDING_S, reading
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.load_history import FILLED, LoadEvent, moments
from upriver.coldstart.model.arrivals import Arrivals
from upriver.coldstart.model.assignment import WeightMemory
from upriver.errors import Cancelled, StoreError, UpriverError
from upriver.text import error_text
from upriver.types import MOST_SECONDS, require_finite

log = logging.getLogger(__name__)

Groupings: TypeAlias = Mapping[str, list[range]]
"""By what they are kept under."""

Owner = TypeVar("Owner")


class Handle(ABC, Generic[Owner]):
    """A load that is under way, or over.

    Attributes:
        nbytes: That are to come.
        touched: Weights, by their numbers, in the order in which something first read them, and when, in
            seconds of ``time.monotonic``.
    """

    def __init__(
        self,
        source: WeightSource,
        memories: Sequence[WeightMemory],
        stream_of: Callable[[Sink], Stream],
        *,
        steps: Mapping[str, float],
        groupings: Groupings,
        also: int = 0,
    ) -> None:
        """Prepare; nothing is asked for yet.

        Args:
            source: Of the weights that are wanted.
            memories: What each of them comes into.
            stream_of: Makes what brings them.
            steps: Moments that have been, ``began`` among them.
            groupings: To be kept when everything is there.
            also: How many things there are to wait for beside the weights.
        """
        self._source, self._memories = source, list(memories)
        self._steps, self._stream_s = dict(steps), 0.0
        self._groupings = groupings
        self._left = len(self._memories)
        self._arrivals = Arrivals(self._left + also)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.nbytes = sum(placed.stop - placed.start for placed in source.tensors)
        self.touched: dict[int, float] = {}
        self._stream = stream_of(self)

    def start(self, owner: Owner) -> None:
        """Begin.

        Args:
            owner: Whose weights they are. Once nobody has it any more the rest is not asked for.

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
            except RuntimeError as error:
                what = f"{self._source.path!r} cannot be loaded: no thread can be started"
                raise UpriverError(f"{what}: {error_text(error)}") from None
        else:
            self._all_here(None)

    # ------------------------------------------------------------------------------------- callers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything is there and is what it should be; False where that takes longer.

        Where time is left, also until what the next load can use is written down.

        Raises:
            ConfigError: If the time is no number.
            UpriverError: If something does not come, or is something else.
        """
        timeout_s = _checked(timeout_s)
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not self._over.wait(timeout_s):
            return False
        self._stream.join(_left(until_s))
        for thread in self._threads:
            thread.join(_left(until_s))
        if (error := self._arrivals.error) is not None:
            raise error
        return True

    def cancel(self) -> None:
        """Everybody who waits gets an error, and nothing more is read; nothing where all has come already."""
        self._stream.cancel()
        self._stream.join()

    def nbytes_here(self) -> int:
        """Bytes of the weights that are there."""
        events = tuple(self._stream.events)
        return sum(event.nbytes for event in events if event.kind == FILLED)

    def names_between(self, first: str, last: str | None = None) -> list[str]:
        """Of the weights from one to another, in the order of execution where it is known."""
        names = [placed.name for placed in self._source.tensors]
        return names[names.index(first) : names.index(last or first) + 1]

    def history(self) -> list[LoadEvent]:
        """What has happened so far, in order."""
        return moments(
            self._source,
            began_s=self._steps["began"],
            steps={kind: at for kind, at in dict(self._steps).items() if kind != "began"},
            stream_s=self._stream_s,
            events=tuple(self._stream.events),
            touched=dict(self.touched),
        )

    # -------------------------------------------------------------------------- what the stream tells

    def room(self, index: int) -> memoryview:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        return self._memories[index].room()

    def filled(self, index: int) -> None:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        self._memories[index].settle()
        self._left -= 1
        if self._left:
            self._arrivals.filled(index)
        else:
            self._all_here(index)

    def failed(self, error: UpriverError) -> None:
        """See :class:`~upriver.coldstart.fetch.weight_stream.Sink`."""
        if self._arrivals.failed(error):
            self._steps["failed"] = time.monotonic()
            self._let_go()
            self._over.set()

    def forked(self) -> None:
        """In a child of this process, where nothing comes any more: who waits there is told so."""
        self._stream.forked()
        self._arrivals.forked()
        self._over = threading.Event()
        path = self._source.path
        self.failed(Cancelled(f"the process was forked while {path!r} was loading; wait for it before"))
        self._over.set()

    # ---------------------------------------------------------------------------------------- inside

    @abstractmethod
    def _release(self, owner: Owner) -> None:
        """Everything is there: the owner waits for nothing any more."""

    def _all_here(self, last: int | None) -> None:
        """The last weight is in, which nobody was told of yet; None where none was to come."""
        self._finish(last)

    def _let_go(self) -> None:
        """Of all memory but what the owner holds itself."""
        self._memories.clear()

    def _finish(self, last: int | None) -> None:
        """Nothing waits any more, and nothing holds on to the owner.

        Args:
            last: What came last. Who waits for it is woken when the owner is as any other: a copy made
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
        """Do what the next load gains from alone: the end of the process waits for it a little, too."""
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _writing.add(self._begin_beside(name, target, *args))

    def _begin_beside(self, name: str, target: Callable[..., object], *args: object) -> threading.Thread:
        """Do something in a thread that nobody waits for but `wait`.

        Raises:
            RuntimeError: If no thread can be started.
        """
        thread = threading.Thread(target=target, args=args, name=f"upriver-coldstart-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread


def _checked(timeout_s: float | None) -> float | None:
    """Seconds to wait, None for ever; what somebody has left of a time may be less than none."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if isinstance(timeout_s, int | float):
        timeout_s = max(timeout_s, 0.0)
    require_finite("timeout_s", timeout_s, at_most=MOST_SECONDS)
    return timeout_s


def _left(until_s: float) -> float | None:
    return None if until_s == math.inf else max(0.0, until_s - time.monotonic())


def remember(source: WeightSource, stream: Stream, groupings: Groupings) -> None:
    """Keep what the next load can begin with.

    Args:
        source: What was loaded.
        stream: What brought it.
        groupings: All that are to be kept beside it; none where nothing is new.
    """
    nbytes = sum(placed.stop - placed.start for placed in source.tensors)
    if not stream.bounded:
        link_cache.keep(source.store, stream.measured, nbytes=nbytes)
    if groupings:
        try:
            grouping_cache.keep(source, groupings)
        except StoreError as error:
            log.info("the grouping is not kept: %s", error)


under_way: weakref.WeakKeyDictionary[object, Handle[Any]] = weakref.WeakKeyDictionary()
"""Of models and programs some of whose weights are still to come."""


_streaming: weakref.WeakSet[Stream] = weakref.WeakSet()
_writing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Break off what still loads, and wait: a thread that Python ends in an operator aborts the process.

    Also for what is being written down: a load, an answer and an end may be all that a process is for, and
    the next one is to gain from it.
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
