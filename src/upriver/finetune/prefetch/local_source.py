"""Make the model's input locally from stored samples, with the same code that servers run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from upriver.engine.clock import Clock
from upriver.engine.engine import Engine, OnBadSample
from upriver.engine.read import CONCURRENCY, read_samples
from upriver.finetune.prefetch.read_ahead import ReadAhead
from upriver.pipeline import Dataset, SampleRef
from upriver.rpc.link_meter import LinkMeter
from upriver.types import MicroBatch, Timings


class KeptInputs(Protocol):
    """Samples that are kept at a position among the input stages."""

    @property
    def position(self) -> int:
        """Position of the kept samples."""

    def find(self, ids: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Return those of the samples that are kept."""

    def keep(self, batch: MicroBatch) -> None:
        """Keep the samples of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """Read a micro-batch straight from the store and run its input stages. Any number of threads may call it.

    Attributes:
        dataset: The dataset; a meter observes its store if the link is counted.
        on_bad_sample: See `upriver.engine.engine.Engine.begin`.
        shared: The link, if servers respond over it too. Local reads then fill it and no more, one
            micro-batch after the other. Connections share a link evenly, so a due response would otherwise
            wait for a dozen objects that are not due.
        kept: Samples that need no read; None if none are kept.
        ahead: Samples that were read while the model was traced.
    """

    dataset: Dataset
    engine: Engine
    seed: int
    epoch: int
    on_bad_sample: OnBadSample = "fail"
    shared: LinkMeter | None = None
    kept: KeptInputs | None = None
    ahead: ReadAhead | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __call__(self, ids: tuple[int, ...]) -> tuple[MicroBatch, Timings]:
        """Return the micro-batch of these samples at position 0.

        Raises:
            UpriverError: As `read_samples` and `Engine.begin`.
        """
        clock = Clock()
        if self.kept is None:
            return self.begun(ids, 0, clock), clock.timings()
        found = self.kept.find(ids)
        made = self.begun(tuple(i for i in ids if i not in found), self.kept.position, clock)
        self.kept.keep(made)
        tensors = iter(made.tensors)
        batch = replace(made, ids=ids, tensors=tuple(found[i] if i in found else next(tensors) for i in ids))
        done = self.engine.resume(
            batch,
            object_names=[ref.object for ref in self.dataset.locate(ids)],
            stop=0,
            seed=self.seed,
            epoch=self.epoch,
            on_bad_sample=self.on_bad_sample,
            clock=clock,
        )
        return done, clock.timings()

    def begun(self, ids: tuple[int, ...], stop: int, clock: Clock) -> MicroBatch:
        """Return samples, read from the store and run to a position among the input stages.

        Raises:
            UpriverError: As `read_samples` and `Engine.begin`.
        """
        refs = self.dataset.locate(ids)
        at_once = self._at_once(refs)
        with self._turn if at_once < CONCURRENCY else nullcontext(), clock.phase("read"):
            early = self.ahead.take(self.dataset, ids) if self.ahead is not None else None
            blobs = read_samples(self.dataset, ids, at_once=at_once) if early is None else early
        return self.engine.begin(
            blobs,
            ids,
            object_names=[ref.object for ref in refs],
            stop=stop,
            seed=self.seed,
            epoch=self.epoch,
            on_bad_sample=self.on_bad_sample,
            clock=clock,
        )

    def _at_once(self, refs: Sequence[SampleRef]) -> int:
        """Return the number of GETs to have in flight."""
        if self.shared is None or not refs:
            return CONCURRENCY
        enough = self.shared.filled_by(sum(ref.stop - ref.start for ref in refs) / len(refs))
        return CONCURRENCY if enough is None else min(enough, CONCURRENCY)
