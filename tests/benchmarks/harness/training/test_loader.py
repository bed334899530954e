"""Test the baseline's loader: what it reads, and by which epoch its random stages draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import upriver
from benchmarks.harness.training.loader import Batches
from upriver.pipeline import Dataset, Decode, RandomCrop, stored_tensor

SEED = 7


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    for number in range(4):
        place = tmp_path / "data" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return upriver.index(upriver.Store.open(tmp_path.as_uri()), "data", stages=(Decode(), RandomCrop(8)))


def drawn(data: Dataset, sample: int, epoch: int) -> torch.Tensor:
    [ref] = data.locate([sample])
    blob = data.store.get_range(ref.object, ref.start, ref.stop, etag=ref.etag)
    chain = data.chain
    return chain.run(stored_tensor(blob), sample=sample, epoch=epoch, seed=SEED, start=chain.start, stop=0)


def test_batches_draw_by_the_epoch_that_is_asked_for(data: Dataset) -> None:
    batches = Batches(data, workers=0, prefetch=2, seed=SEED)
    wanted = [[(0, 3), (1, 3)], [(5, 0)]]
    for _ in range(2):
        read = list(batches.read(wanted))
        assert [targets.tolist() for _, targets in read] == [
            [int(data.targets_of([sample])) for _, sample in batch] for batch in wanted
        ]
        for (inputs, _), batch in zip(read, wanted, strict=True):
            assert torch.equal(inputs, torch.stack([drawn(data, sample, epoch) for epoch, sample in batch]))
    batches.close()
    assert not torch.equal(drawn(data, 3, 0), drawn(data, 3, 1))
