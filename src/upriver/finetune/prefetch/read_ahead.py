"""Read the first micro-batches of a job while its model is traced: the link does not rest meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from upriver._threads.background import BackgroundThread
from upriver.engine.read import read_samples
from upriver.pipeline import Dataset

LOOK_EVERY_S = 0.02
"""Seconds between two looks at how long the trace has taken."""

Blobs = Sequence[bytes | memoryview]


class ReadAhead:
    """Stored samples of some micro-batches, read in a thread, in order.

    The thread begins once this thread has worked for a while: a model that is traced sooner is prepared
    before its first batch, and its plan may read nothing here.

    Args:
        dataset: The dataset, read over the metered link.
        micro_batches: Sample ids of each micro-batch.
        after_s: Seconds of this thread's processor time after which the first one is read.
    """

    def __init__(self, dataset: Dataset, micro_batches: Sequence[tuple[int, ...]], *, after_s: float) -> None:
        self._dataset, self._left = dataset, list(micro_batches)
        self._read: dict[tuple[int, ...], Future[Blobs]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        until_s = time.clock_gettime(clock) + after_s
        self._thread = BackgroundThread(
            self._run, lambda: time.clock_gettime(clock) >= until_s, name="read-ahead"
        )
        self._thread.start()

    def begun(self, dataset: Dataset) -> list[tuple[int, ...]]:
        """Return the micro-batches of a dataset that are read, or are being read."""
        with self._lock:
            return list(self._read) if dataset is self._dataset else []

    def take(self, dataset: Dataset, ids: tuple[int, ...]) -> Blobs | None:
        """Return the stored samples of a micro-batch or of some of its samples, and read no more ahead.

        Returns:
            None if they were not read, or could not be.
        """
        if dataset is not self._dataset:
            return None
        with self._lock:
            self._left.clear()
            whole = next((each for each in self._read if set(ids) <= set(each)), ())
            found = self._read.pop(whole, None)
        if found is None or found.exception() is not None:
            return None
        blobs = dict(zip(whole, found.result(), strict=True))
        return [blobs[sample] for sample in ids]

    def close(self) -> None:
        """Read nothing more, and drop what was read. Idempotent."""
        self._ended.set()
        with self._lock:
            self._left.clear()
            self._read.clear()

    def _run(self, may_begin: Callable[[], bool]) -> None:
        while not may_begin():
            if self._ended.wait(LOOK_EVERY_S):
                return
        while True:
            with self._lock:
                if not self._left or self._ended.is_set():
                    return
                ids = self._left.pop(0)
                future = self._read[ids] = Future[Blobs]()
            try:
                future.set_result(read_samples(self._dataset, ids))
            except BaseException as error:  # the loader reads them again, and meets it, too
                future.set_exception(error)
