"""The plain way: stored samples to the model's input, made here with the same code that servers run."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.engine.clock import Clock
from upriver.engine.engine import Engine, OnBadSample
from upriver.engine.read import read_samples
from upriver.pipeline import Dataset
from upriver.types import MicroBatch, Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """Reads a micro-batch straight from the store, runs its input stages. Any number of threads may call it.

    Attributes:
        dataset: Its store is a `upriver.client.link.MeteredStore` where the link is counted.
        engine: For the dataset's chain.
        seed: Of the job.
        epoch: Of the pass over the data.
        on_bad_sample: As `upriver.engine.engine.Engine.begin`.
    """

    dataset: Dataset
    engine: Engine
    seed: int
    epoch: int
    on_bad_sample: OnBadSample = "fail"

    def __call__(self, ids: tuple[int, ...]) -> tuple[MicroBatch, Timings]:
        """The micro-batch of these samples at position 0.

        Raises:
            UpriverError: As `read_samples` and `Engine.begin`.
        """
        clock = Clock()
        with clock.phase("read"):
            blobs = read_samples(self.dataset, ids)
        batch = self.engine.begin(
            blobs,
            ids,
            object_names=[ref.object for ref in self.dataset.locate(ids)],
            stop=0,
            seed=self.seed,
            epoch=self.epoch,
            on_bad_sample=self.on_bad_sample,
            clock=clock,
        )
        return batch, clock.timings()
