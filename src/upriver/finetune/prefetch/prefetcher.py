"""One epoch's micro-batches: exactly once, in order, prefetched within a window, whatever dies meanwhile.

Who fetches them is the loader's crew (`upriver.finetune.prefetch.fetch_threads`); here they are handed out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from upriver.errors import ConfigError
from upriver.finetune.prefetch.delivery_table import Dealt, Pin, PrefetchWindow, Received, SlotTable, Way
from upriver.finetune.prefetch.fetch_threads import Crew, Finish, MakeLocally, Remote, dispose
from upriver.types import MicroBatch, Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderReport:
    """What has been delivered so far, and from where.

    Attributes:
        samples: Server URL or "local" to the samples delivered from there, skipped ones included.
        retried: Micro-batches that had to be asked for again.
        skipped: Ids of delivered samples that could not be read, in order.
    """

    samples: Mapping[str, int]
    retried: int
    skipped: tuple[int, ...]


class Loader:
    """Delivers one epoch's micro-batches exactly once and in order.

    Use it as a context manager, or call `close`. It is also closed when it is collected, for which the
    callables below must not hold a reference to it.

    Args:
        micro_batches: Sample ids of every micro-batch of the epoch.
        first: Index to start at (resume).
        local: The plain way; called in ``num_workers`` threads.
        remote: Servers and how to ask them, or None to use the plain way only.
        window: How far to run ahead.
        num_workers: Threads of the plain way.
        expected_bytes: What a micro-batch weighs in memory, by route or way, before any has arrived.
        on_timings: Called with index, source, what the micro-batch was when it came, and its timings, when it
            is handed out.
        finish: What is left to be done to a micro-batch here, in the thread that takes it. Where the one that
            is due has not come, it is done to those that have: that time would be lost.
        pins: Micro-batches that must come from a certain place, as in an earlier run: nobody else is asked
            for them, and what fails there is an error.
        dealt: The route of each micro-batch, where not all are to take the same.
    """

    def __init__(
        self,
        micro_batches: Sequence[tuple[int, ...]],
        *,
        local: MakeLocally,
        first: int = 0,
        remote: Remote | None = None,
        window: PrefetchWindow | None = None,
        num_workers: int = 1,
        expected_bytes: Mapping[Way | Dealt, int] | None = None,
        on_timings: Callable[[int, str, Received, Timings], None] | None = None,
        finish: Finish | None = None,
        pins: Mapping[int, Pin] | None = None,
        dealt: Sequence[Dealt] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        if remote is None and any(pin.way is Way.REMOTE for pin in (pins or {}).values()):
            raise ConfigError("micro-batches that must come from a server need servers to ask")
        table = SlotTable(
            len(micro_batches),
            first=first,
            window=window or PrefetchWindow(),
            expected_bytes=expected_bytes,
            pins=pins,
            dealt=dealt,
        )
        self._crew = Crew(micro_batches, table, local=local, remote=remote)
        self._on_timings, self._finish = on_timings, finish
        self._samples: dict[str, int] = {}
        self._skipped: list[int] = []
        self._crew.start(num_workers=num_workers)
        # Joining threads is nothing for a garbage collector, which may run in one of them, with a lock held.
        weakref.finalize(self, dispose, self._crew).atexit = False

    @property
    def position(self) -> int:
        """Index of the micro-batch that is handed out next."""
        return self._crew.table.taken

    @property
    def store_lost(self) -> str:
        """Why nothing is read from the store here, while servers make it all; empty when that is not so."""
        return self._crew.store_lost

    @property
    def report(self) -> LoaderReport:
        """What has been delivered so far."""
        return LoaderReport(
            samples=dict(self._samples), retried=self._crew.table.retried, skipped=tuple(self._skipped)
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch, as soon as it is there.

        Raises:
            UpriverError: What stands in the next one's place (BadSample, ObjectChanged, …); again on each
                call.
            LoaderClosed: After `close`.
        """
        try:
            index, delivery = self._crew.take(self._finish)
            batch = delivery.result()
            if self._finish is not None and not delivery.done:
                delivery = delivery.finished(self._finish(batch))
                batch = delivery.result()
        except BaseException:  # the end of the epoch too: no thread outlives it
            self.close()
            raise
        self._samples[delivery.source] = self._samples.get(delivery.source, 0) + len(batch.ids)
        self._skipped.extend(batch.skipped)
        if self._on_timings is not None:
            self._on_timings(index, delivery.source, delivery.arrival, delivery.timings)
        return batch

    def deal(self, dealt: Sequence[Dealt], window: PrefetchWindow | None = None) -> None:
        """New routes for every micro-batch that nobody works on yet; none is lost, none is made twice.

        Args:
            dealt: For the whole epoch.
            window: How far to run ahead from now on, where that changes too.
        """
        self._crew.deal(dealt, window)

    def close(self) -> None:
        """Break everything off and wait for the threads. May be called again."""
        self._crew.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
