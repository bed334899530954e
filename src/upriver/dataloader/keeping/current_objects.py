"""Find out in each epoch which samples' objects are still those that were indexed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

from upriver._threads.executor import DaemonExecutor
from upriver.errors import UpriverError
from upriver.features.unchanged import unchanged
from upriver.pipeline import Dataset
from upriver.text import error_text

log = logging.getLogger("upriver")

PATIENCE_S = 2.0
"""Seconds for which an epoch's first samples wait for the listing. A thousand objects take one request, so
more than some ten thousand are listed while the first samples are read as if nothing were kept."""


class CurrentObjects:
    """Samples whose objects have the indexed ETag. Any number of threads may use it.

    Files of a local store are asked for one by one, each time. The objects of another store are listed once
    in an epoch, in a thread of their own.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()
        self._epoch, self._until_s = -1, 0.0
        self._listed: Future[Collection[int]] = Future()

    def begin(self) -> None:
        """Forget which objects were found: another epoch begins."""
        with self._lock:
            self._epoch = -1

    def among(self, samples: Sequence[int], epoch: int) -> Collection[int]:
        """Return those of the samples that are known to be current; a store's error means that none are."""
        if self._dataset.store.is_local:
            return _unchanged(self._dataset, samples)
        listed, until_s = self._listing(epoch)
        try:
            current = listed.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            return ()
        return [sample for sample in samples if sample in current]

    def _listing(self, epoch: int) -> tuple[Future[Collection[int]], float]:
        with self._lock:
            if self._epoch != epoch:
                self._epoch, self._until_s = epoch, time.monotonic() + PATIENCE_S
                thread = DaemonExecutor(1, name="listing")
                self._listed = thread.submit(_unchanged, self._dataset, range(len(self._dataset)))
                thread.shutdown(wait=False)
            return self._listed, self._until_s


def _unchanged(dataset: Dataset, samples: Sequence[int]) -> Collection[int]:
    try:
        return unchanged(dataset, samples)
    except UpriverError as error:  # reading the samples will tell whether the store can be read
        log.warning("kept samples are not used, as their objects cannot be looked up: %s", error_text(error))
        return ()
