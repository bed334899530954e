"""Run the canary locally: the bits that servers must match, and the seconds of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from upriver.engine.clock import Clock
from upriver.engine.engine import Engine, OnBadSample
from upriver.engine.read import read_samples
from upriver.pipeline import Dataset
from upriver.types import MicroBatch, Timings


@dataclass(frozen=True, kw_only=True)
class LocalCanary:
    """A real micro-batch of a job, run to the freeze point; its samples are read from the store once.

    Attributes:
        dataset: The dataset, read over the metered link.
    """

    engine: Engine
    dataset: Dataset
    ids: tuple[int, ...]
    freeze: int
    seed: int
    on_bad_sample: OnBadSample

    def run(self) -> tuple[MicroBatch, Timings]:
        """Return the features, and the seconds of each stage."""
        clock = Clock()
        batch = self._resume(self._stored(), 0, clock)
        return self.engine.advance(batch, self.freeze, clock), clock.timings()

    def inputs(self) -> MicroBatch:
        """Return the micro-batch at the model's input."""
        return self._resume(self._stored(), 0)

    def run_in_steps(self) -> tuple[Timings, dict[int, float]]:
        """Return the seconds of each stage, and the mean bytes of a sample after each input stage.

        Decoded and cropped pixels are often the smallest representation.
        """
        clock, batch, sizes = Clock(), self._stored(), {}
        for position in range(batch.position + 1, 1):
            batch = self._resume(batch, position, clock)
            samples = len(self.ids) - len(batch.skipped) if position < 0 else self.engine.micro_batch
            sizes[position] = sum(tensor.nbytes for tensor in batch.tensors) / max(samples, 1)
        self.engine.advance(batch, self.freeze, clock)
        return clock.timings(), sizes

    def finish(self, batch: MicroBatch) -> MicroBatch:
        """Run the rest of the prefix on what a server computed."""
        return self._resume(batch, self.freeze)

    def release(self) -> None:
        """Drop the stored samples, which only local runs need."""
        self.__dict__.pop("_blobs", None)

    @cached_property
    def _blobs(self) -> Sequence[bytes | memoryview]:
        return read_samples(self.dataset, self.ids)

    @cached_property
    def _names(self) -> list[str]:
        return [ref.object for ref in self.dataset.locate(self.ids)]

    def _stored(self) -> MicroBatch:
        return self.engine.begin(
            self._blobs,
            self.ids,
            object_names=self._names,
            stop=self.dataset.chain.start,
            seed=self.seed,
            epoch=0,
            on_bad_sample=self.on_bad_sample,
        )

    def _resume(self, batch: MicroBatch, stop: int, clock: Clock | None = None) -> MicroBatch:
        return self.engine.resume(
            batch,
            object_names=self._names,
            stop=stop,
            seed=self.seed,
            epoch=0,
            on_bad_sample=self.on_bad_sample,
            clock=clock,
        )
