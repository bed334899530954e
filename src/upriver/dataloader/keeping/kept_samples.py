"""Keep the samples of an indexed dataset for a loader: in memory, and on disk across jobs.

All of it is in the training process. Loader processes get kept samples in place of stored ones, and send back
those to keep. So there is one index, one budget and one writer for all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from upriver._threads.closing import close_later
from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.keeping.current_objects import CurrentObjects
from upriver.errors import UpriverError
from upriver.features.keep import Keep
from upriver.features.kept import CHECKED_ROWS, KeptFeatures, KeptStretch
from upriver.pipeline.seeding import apart
from upriver.text import error_text

log = logging.getLogger("upriver")

PROBED = 1024
"""Samples, evenly spaced over the dataset, that show which share of them is kept."""

PROBES = 16
"""Most probes for rows to compute anew; a dataset of which fewer than one in 16,000 rows are kept waits."""


DECODED_BYTES_PER_S = 20e6
"""Bytes of JPEG files that one core decodes in a second: what a sample saves until the first is measured."""


class SampleSeconds:
    """Mean seconds in which a sample is read and brought to the kept position. Any thread may add to it.

    Args:
        expected: Seconds until the first sample is measured.
    """

    def __init__(self, expected: float) -> None:
        self._lock, self._seconds, self._samples = threading.Lock(), 0.0, 0
        self._expected = expected

    def add(self, seconds: float, samples: int) -> None:
        """Add the seconds of some samples."""
        with self._lock:
            self._seconds, self._samples = self._seconds + seconds, self._samples + samples

    def mean(self) -> float:
        """Return the mean."""
        with self._lock:
            return self._seconds / self._samples if self._samples else self._expected


class KeptSamples:
    """Samples at the position before the first random stage, or finished ones of some views.

    Any number of threads may use it. It never raises: a fault costs the saved time and nothing else.

    Args:
        source: Makes the samples.
        keep: Room in memory and on disk.

    Attributes:
        position: Position at which samples are kept.
    """

    def __init__(self, source: Declared, keep: Keep) -> None:
        first_draw = source.dataset.chain.first_draw
        self.position = 0 if first_draw is None or source.views else first_draw
        self._source, self._dataset = source, source.dataset
        self._drawn = first_draw is not None and bool(source.views)
        self._current = CurrentObjects(source.dataset)
        self._seconds = SampleSeconds(source.dataset.stored_bytes / DECODED_BYTES_PER_S)
        self._features = KeptFeatures(
            keep,
            micro_batch=1,
            seed=source.seed,
            device=torch.device("cpu"),
            saved_s=self._seconds.mean,
            num_threads=1,  # as in loader processes
        )
        self._lock, self._served, self._failed = threading.Lock(), 0, ""
        close_later(self, self._features.close, at_exit=True)

    @property
    def served(self) -> int:
        """Return how often a kept sample took the place of a stored one."""
        return self._served

    @property
    def remark(self) -> str:
        """Return what is kept now, in words."""
        return self._failed or self._features.remark

    def begin(self, epoch: int) -> None:
        """Prepare for an epoch. Call it in the training thread before its loader processes start.

        Rows of earlier jobs are used once some of them were computed anew and found equal.
        """
        self._current.begin()
        stretch = self._stretch(epoch)
        if self._failed:
            return
        try:
            stretch.refresh()
            if not stretch.trusted:
                self._check(stretch, epoch)
        except UpriverError as error:  # the epoch will raise it, too, if it needs that sample
            log.info("kept samples are not used in epoch %d: %s", epoch, error_text(error))
        except Exception as error:
            self._fail(error)

    def find(self, samples: Sequence[int], epoch: int) -> dict[int, torch.Tensor]:
        """Return those of the samples that are kept and current. Their memory must not be written to."""
        stretch = self._stretch(epoch)
        if self._failed or not stretch.trusted:
            return {}
        try:
            rows = stretch.found(self._dataset, samples)
            current = self._current.among(list(rows), epoch) if rows else ()
        except Exception as error:
            self._fail(error)
            return {}
        found = {sample: rows[sample][0] for sample in current}
        with self._lock:
            self._served += sum(sample in found for sample in samples)
        return found

    def holds(self, samples: Sequence[int], epoch: int) -> list[bool]:
        """Return for each sample whether it is kept, whether or not it is current."""
        stretch = self._stretch(epoch)
        if self._failed or not stretch.trusted:
            return [False] * len(samples)
        kept = stretch.find(self._dataset, samples)
        return [sample in kept for sample in samples]

    def share(self, epoch: int) -> float:
        """Return about which share of the dataset's samples is kept, 0 to 1."""
        probed = self._probe(0)
        return sum(self.holds(probed, epoch)) / len(probed) if probed else 0.0

    def keep(self, rows: Mapping[int, torch.Tensor], epoch: int, *, seconds: float) -> None:
        """Keep samples at the position, as far as there is room.

        Args:
            seconds: Seconds in which they were made.
        """
        if self._failed or not rows:
            return
        try:
            self._seconds.add(seconds, len(rows))
            self._stretch(epoch).keep(
                self._dataset,
                {sample: (own_memory(row),) for sample, row in rows.items()},
                patience_s=self._seconds.mean() * len(rows),  # as long as making them once more takes
            )
        except Exception as error:
            self._fail(error)

    def flush(self) -> None:
        """Have what waits written to disk meanwhile."""
        if not self._failed:
            self._features.flush()

    def _stretch(self, epoch: int) -> KeptStretch:
        view = self._source.drawn_as(epoch) if self._drawn else None
        return self._features.stretch(self._dataset, position=self.position, view=view)

    def _check(self, stretch: KeptStretch, epoch: int) -> None:
        """Compute some kept rows anew, and trust the others if these are equal."""
        if stretch.empty:
            stretch.trusted = True
            return
        samples = self._some_kept(stretch, epoch)
        if samples:
            with apart():
                again = self._source.values(samples, epoch=epoch, samples=samples, stop=self.position)
            stretch.check(self._dataset, {at: (row,) for at, row in zip(samples, again, strict=True)})

    def _some_kept(self, stretch: KeptStretch, epoch: int) -> list[int]:
        """Return samples whose rows are kept and whose objects are current, at most `CHECKED_ROWS`."""
        found = list[int]()
        for number in range(PROBES):
            probed = self._probe(number)
            kept = stretch.find(self._dataset, probed)
            some = [sample for sample in probed if sample in kept]
            some = some[:: max(1, len(some) // CHECKED_ROWS)][: CHECKED_ROWS - len(found)]
            found += self._current.among(some, epoch) if some else ()
            if len(found) == CHECKED_ROWS:
                break
        return found

    def _probe(self, number: int) -> range:
        count = len(self._dataset)
        step = max(1, count // PROBED)
        return range(number, count, step) if number < step else range(0)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            told, self._failed = self._failed, f"samples are not kept: {error_text(error)}"
        if not told:
            log.warning("%s", self._failed)


def own_memory(row: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds nothing else, with the same order of dimensions.

    A row may be a part of a block of memory that is read or sent at once.
    """
    shared = row.is_shared()  # type: ignore[no-untyped-call]
    return row.clone() if shared or row.untyped_storage().nbytes() > row.nbytes else row
