"""Fine-tune a small network while servers are killed, and compare two runs.

Every stored sample is in a class of its own, so its target identifies it. The network learns the remainder of
that target.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

import upriver
from upriver.finetune.job import FinetuneJob
from upriver.finetune.prefetch.fetch_threads import LOCAL
from upriver.pipeline import Dataset

CLASSES = 5
SEED = 7
BATCH, MICRO_BATCH = 20, 8
"""Sizes that do not divide each other, so that steps cut through micro-batches."""

PER_REQUEST = 2
"""Micro-batches of a request: most requests are inside their answer at some moment of a step."""

STORED_SIDE, SIDE = 64, 48
"""Pixels of a stored image and of the network's input: some milliseconds for a micro-batch."""

AfterStep = Callable[[int, FinetuneJob], object]
"""Callback that receives the number of finished steps and the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a run.

    Attributes:
        epochs: Ids of the samples, in the order of their delivery.
        losses: Loss of every step.
        weights: Parameters and buffers at the end.
        samples: Server or ``local`` to the number of samples that it computed.
        retried: Micro-batches that were requested again.
    """

    epochs: Sequence[Sequence[int]]
    losses: Sequence[torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    samples: Mapping[str, int]
    retried: int

    @property
    def through_servers(self) -> float:
        """Return the share of the samples that came through servers."""
        return through_servers(self.samples)


def through_servers(samples: Mapping[str, int]) -> float:
    """Return the share of the samples that came through servers, or 0 without samples."""
    total = sum(samples.values())
    return 1 - samples.get(LOCAL, 0) / total if total else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Differences between two runs.

    Attributes:
        lost: Samples that are missing from their epoch.
        doubled: Samples that came more often than expected.
        moved: Positions of the order that hold another sample.
        losses: Steps whose loss differs in any bit.
        weights: Names of the tensors that differ at the end.
    """

    lost: int
    doubled: int
    moved: int
    losses: int
    weights: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.lost or self.doubled or self.moved or self.losses or self.weights)

    @classmethod
    def of(cls, got: Outcome, wanted: Outcome) -> Difference:
        """Compare two outcomes bit for bit."""
        epochs = list(zip_longest(got.epochs, wanted.epochs, fillvalue=()))
        names = sorted(got.weights.keys() | wanted.weights.keys())
        return cls(
            lost=sum((Counter(there) - Counter(here)).total() for here, there in epochs),
            doubled=sum((Counter(here) - Counter(there)).total() for here, there in epochs),
            moved=sum(mine != other for pair in epochs for mine, other in zip_longest(*pair)),
            losses=sum(not _equal(*pair) for pair in zip_longest(got.losses, wanted.losses)),
            weights=tuple(
                name for name in names if not _equal(got.weights.get(name), wanted.weights.get(name))
            ),
        )


def _equal(mine: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return mine is not None and other is not None and torch.equal(mine, other)


def _layer(inner: int, outer: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class Network(nn.Module):
    """A few convolutions. Moving statistics and dropout in the trainable part expose every difference."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _layer(3, 16)
        self.body = nn.Sequential(_layer(16, 32, 2), _layer(32, 32), _layer(32, 32))
        self.last = _layer(32, 48, 2)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        x = self.last(self.body(self.stem(x)))
        return self.head(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


def network() -> Network:
    """Return a network with seeded weights and moving statistics, frozen up to ``body``."""
    torch.manual_seed(SEED)
    model = Network().train()
    with torch.no_grad():
        model(torch.randn(MICRO_BATCH, 3, SIDE, SIDE))
    upriver.freeze_to(model, "body")
    return model


def make_data(folder: Path, count: int) -> Dataset:
    """Write `count` small images of noise, each in a class of its own: its target is its id."""
    for number in range(count):
        place = folder / "data" / f"{number:05}"
        place.mkdir(parents=True)
        pixels = np.random.default_rng(number).integers(0, 256, (STORED_SIDE, STORED_SIDE, 3), dtype=np.uint8)
        (place / "image.png").write_bytes(_png(pixels))
    stages = (
        upriver.Decode(),
        upriver.RandomResizedCrop(SIDE),
        upriver.RandomHorizontalFlip(),
        upriver.Normalize(),
    )
    return upriver.index(folder.as_uri(), "data", stages=stages)


def _png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as the servers do. Another number may give other low bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    urls: Sequence[str],
    data: Dataset,
    *,
    epochs: int,
    after_step: AfterStep = lambda step, job: None,
) -> Outcome:
    """Fine-tune from the same initial weights, with the frozen part on servers while any server runs."""
    came: list[list[int]] = []
    losses: list[torch.Tensor] = []
    with _one_thread(), upriver.connect(*urls) as near:
        model = network()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO_BATCH,
            seed=SEED,
            policy="freeze",
            exact="bitwise",
            splitting=upriver.Splitting(in_background=False),
            keep=None,
            prefetch=upriver.Prefetch(per_request=PER_REQUEST),
        ) as job:
            for _ in range(epochs):
                came.append([])
                for features, ids in job:
                    torch.manual_seed(len(losses))  # dropout draws the same in every run
                    loss = functional.cross_entropy(job(features), ids % CLASSES)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    came[-1] += ids.tolist()
                    losses.append(loss.detach())
                    after_step(len(losses), job)
            report = job.report
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Outcome(
        epochs=came, losses=losses, weights=weights, samples=dict(report.samples), retried=report.retried
    )
