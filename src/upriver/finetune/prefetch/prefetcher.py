"""Deliver one epoch's micro-batches exactly once and in order, prefetched within a window, despite failures.

The loader's crew (`upriver.finetune.prefetch.fetch_threads`) fetches them; this module hands them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from upriver._threads.closing import close_later
from upriver.control.delivery_table import (
    DealtRoute,
    DeliveryTable,
    Pin,
    PrefetchWindow,
    Received,
    Way,
)
from upriver.errors import ConfigError
from upriver.finetune.prefetch.fetch_threads import FetchThreads, Finish, MakeLocally, RemoteFetch
from upriver.types import MicroBatch, Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport:
    """Counts of what has been delivered so far, by source.

    Attributes:
        samples: Delivered samples by server URL or "local", skipped ones included.
        retried: Micro-batches that had to be requested again.
        skipped: Ids of delivered samples that could not be read, in order.
    """

    samples: Mapping[str, int]
    retried: int
    skipped: tuple[int, ...]


class Prefetcher:
    """Deliver one epoch's micro-batches exactly once and in order.

    Use it as a context manager, or call `close`. It is also closed when it is collected, so the callables
    below must not hold a reference to it.

    Args:
        micro_batches: Sample ids of every micro-batch of the epoch.
        first: Index to start at (resume).
        local: Makes a micro-batch locally; called in ``num_workers`` threads.
        remote: Servers and how to send requests to them, or None to make everything locally.
        num_workers: Threads of the plain way.
        expected_bytes: Bytes of a micro-batch in memory, by route or way, before any has arrived.
        on_timings: Called when a micro-batch is handed out, with its index, source, state on arrival and
            timings.
        finish: Runs the local stages on a micro-batch, in the thread that takes it. While the due one is
            missing, it runs on those that have arrived, so the time is not lost.
        pins: Micro-batches that must come from a certain place, as in an earlier run. No other server makes
            them, and a failure there is an error.
        dealt: The route of each micro-batch; None if all are to take the same.
    """

    def __init__(
        self,
        micro_batches: Sequence[tuple[int, ...]],
        *,
        local: MakeLocally,
        first: int = 0,
        remote: RemoteFetch | None = None,
        window: PrefetchWindow | None = None,
        num_workers: int = 1,
        expected_bytes: Mapping[Way | DealtRoute, int] | None = None,
        on_timings: Callable[[int, str, Received, Timings], None] | None = None,
        finish: Finish | None = None,
        pins: Mapping[int, Pin] | None = None,
        dealt: Sequence[DealtRoute] | None = None,
    ) -> None:
        if remote is None and any(pin.way is Way.REMOTE for pin in (pins or {}).values()):
            raise ConfigError("micro-batches that must come from a server need at least one server")
        table = DeliveryTable(
            len(micro_batches),
            first=first,
            window=window or PrefetchWindow(),
            expected_bytes=expected_bytes,
            pins=pins,
            dealt=dealt,
        )
        self._crew = FetchThreads(micro_batches, table, local=local, remote=remote)
        self._on_timings, self._finish = on_timings, finish
        self._samples: dict[str, int] = {}
        self._skipped: list[int] = []
        self._crew.start(num_workers=num_workers)
        # The garbage collector must not join threads: it may run in one of them, with a lock held.
        close_later(self, self._crew.close, at_exit=True)

    @property
    def position(self) -> int:
        """Index of the micro-batch that is handed out next."""
        return self._crew.table.taken

    @property
    def store_lost(self) -> str:
        """The reason why servers make everything instead of the plain way; empty if the store answers."""
        return self._crew.store_lost

    @property
    def report(self) -> PrefetchReport:
        """Counts of what has been delivered so far."""
        return PrefetchReport(
            samples=dict(self._samples), retried=self._crew.table.retried, skipped=tuple(self._skipped)
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch, as soon as it has arrived.

        Raises:
            UpriverError: The error in the next one's place (BadSample, ObjectChanged, …); again on each call.
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

    def deal(self, dealt: Sequence[DealtRoute], window: PrefetchWindow | None = None) -> None:
        """Set new routes for every micro-batch that no thread works on yet; none is lost or made twice.

        Args:
            dealt: Routes for the whole epoch.
            window: How far to run ahead from now on, if that changes too.
        """
        self._crew.deal(dealt, window)

    def take_servers(
        self,
        remote: RemoteFetch,
        *,
        local: MakeLocally,
        dealt: Sequence[DealtRoute],
        window: PrefetchWindow,
        expected_bytes: Mapping[Way | DealtRoute, int],
    ) -> None:
        """Let servers take part in an epoch that began without any; nothing is lost or made twice.

        Args:
            remote: Servers and how to send requests to them.
            local: Makes a micro-batch locally from now on.
            dealt: Routes for the whole epoch.
            window: How far to run ahead from now on.
            expected_bytes: As for the constructor.
        """
        self._crew.take_servers(remote, local, dealt, window, expected_bytes)

    def close(self) -> None:
        """Interrupt all requests and wait for the threads. Idempotent."""
        self._crew.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
