"""Check local reads that share a link with servers: enough reads to fill the link, and the same samples."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.engine.test_read import CountingStore
from upriver.engine import read
from upriver.engine.engine import Engine
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.pipeline import Dataset, Decode, index
from upriver.rpc.link_meter import LinkMeter

SAMPLES, MICRO_BATCH = 24, 6


class Filled(LinkMeter):
    """A link with a known number of reads that fill it."""

    def __init__(self, enough: int | None) -> None:
        super().__init__()
        self.enough, self.asked = enough, list[float]()

    def filled_by(self, num_bytes: float) -> int | None:
        self.asked.append(num_bytes)
        return self.enough


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    store = CountingStore.at(tmp_path.as_uri())
    for number in range(SAMPLES):
        stream = io.BytesIO()
        Image.new("RGB", (4, 2), (number, 0, 255)).save(stream, "PNG")
        store.put(f"data/class{number % 3}/{number:02}.png", stream.getvalue())
    return index(store, "data", stages=(Decode(),))


def epoch(dataset: Dataset, shared: LinkMeter | None) -> list[torch.Tensor]:
    """Return all samples, in micro-batches read by three threads."""
    engine = Engine(chain=dataset.chain, program=None, micro_batch=MICRO_BATCH)
    source = LocalSource(dataset=dataset, engine=engine, seed=0, epoch=0, shared=shared)
    asked = [tuple(range(first, first + MICRO_BATCH)) for first in range(0, SAMPLES, MICRO_BATCH)]
    with ThreadPoolExecutor(3) as pool:
        return [tensor for batch, _ in pool.map(source, asked) for tensor in batch.tensors]


@pytest.mark.parametrize("enough", [1, 2, read.CONCURRENCY, 100, None])
def test_no_more_gets_run_at_once_than_fill_the_link(dataset: Dataset, enough: int | None) -> None:
    link, store = Filled(enough), dataset.store
    assert isinstance(store, CountingStore)
    wanted = epoch(dataset, None)
    store.gets.clear()
    store.most_running = 0
    got = epoch(dataset, link)
    assert all(map(torch.equal, wanted, got)) and len(got) == len(wanted)
    assert len(store.gets) == SAMPLES
    sizes = [ref.stop - ref.start for ref in dataset.locate(range(SAMPLES))]
    assert sum(link.asked) * MICRO_BATCH == pytest.approx(sum(sizes)), "bytes of a stored sample"
    most = 3 * read.CONCURRENCY if enough is None or enough >= read.CONCURRENCY else enough
    assert store.most_running <= most
