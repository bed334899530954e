"""What workers are asked for: samples of a user's own dataset by its name, or of one of ours in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.tasks import Task
from upriver.pipeline.mapstyle import DONE, RAW, START
from upriver.profile.throughput_cache import pipeline_key
from upriver.protocol import BY_DEFAULT, DEFAULT_CAPS, CodeRef, Collate, DatasetRef, RunRequest
from upriver.protocol.tree import build, flatten
from upriver.types import MicroBatch

PIECE = 16
"""Samples of a task that are made together, where they are not collated: an answer has a bounded number of
tensors."""


class SampleSpec(Protocol):
    """What workers are asked for."""

    @property
    def name(self) -> str:
        """Of the dataset."""

    @property
    def joins(self) -> bool:
        """Whether they collate batches, too."""

    @property
    def collates(self) -> str | None:
        """Name of what collates; None where that has none."""

    @property
    def key(self) -> str:
        """Names all of it, for figures that are kept."""

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """The request for a task, and what is sent along.

        Raises:
            ConfigError: If it cannot be sent.
        """

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """What came of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByName:
    """A user's own dataset, whose code workers have.

    Attributes:
        name: Of the dataset's code.
        arguments: Its keyword arguments.
        seed: Of what is drawn.
        collate: Name of what collates; None where batches are collated here.
        code: What makes it.
    """

    name: str
    arguments: Mapping[str, Any]
    seed: int
    collate: str | None
    code: object = None

    @property
    def joins(self) -> bool:
        """Whether they can collate."""
        return self.collate is not None

    @property
    def collates(self) -> str | None:
        """See `SampleSpec`."""
        return self.collate

    @property
    def key(self) -> str:
        """See `SampleSpec`."""
        return pipeline_key(self.name, self.arguments, self.collate, code=self.code)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """See `SampleSpec`."""
        collate, size = None, min(PIECE, len(task.samples))
        if task.whole and self.collate is not None:
            collate, size = Collate(name=self.collate, batches=(task.batch,)), len(task.samples)
        pieces = _pieces(task, size)
        request = RunRequest(
            code=CodeRef(name=self.name, arguments=dict(self.arguments), collate=collate),
            micro_batches=tuple(task.samples[piece] for piece in pieces),
            micro_batch=size,
            start=START if raw is None else RAW,
            stop=DONE,
            seed=self.seed,
            epoch=task.epoch,
        )
        if raw is None:
            return request, []
        return request, [_sent(task.samples[piece], raw[piece]) for piece in pieces]

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """See `SampleSpec`."""
        made = [build(batch.tree, batch.tensors) for batch in answers]
        return made[0] if task.whole and self.joins else [sample for piece in made for sample in piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class InStore:
    """A dataset of ours, whose stages every server has that is near its store.

    Attributes:
        source: The dataset.
        joins: Whether batches are what `torch.utils.data.default_collate` makes.
    """

    source: Declared
    joins: bool

    @property
    def name(self) -> str:
        """Of the dataset."""
        return f"dataset {self.source.dataset.digest[:12]}"

    @property
    def collates(self) -> str | None:
        """See `SampleSpec`."""
        return BY_DEFAULT if self.joins else None

    @property
    def key(self) -> str:
        """See `SampleSpec`."""
        return pipeline_key(self.source.dataset.digest, {}, self.collates)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """See `SampleSpec`."""
        dataset = self.source.dataset
        whole = task.whole and self.joins and len(task.samples) <= DEFAULT_CAPS.tensors
        size = len(task.samples) if whole else min(PIECE, len(task.samples))
        pieces = _pieces(task, size)
        request = RunRequest(
            dataset=DatasetRef(store=dataset.store.name, digest=dataset.digest),
            micro_batches=tuple(task.samples[piece] for piece in pieces),
            micro_batch=size,
            start=max(task.start, dataset.chain.start),
            stop=task.stop,
            seed=self.source.seed,
            epoch=task.epoch,
            given=raw is not None,
        )
        if raw is None:
            return request, []
        return request, [
            MicroBatch(ids=task.samples[piece], position=task.start, tensors=tuple(raw[piece]))
            for piece in pieces
        ]

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """See `SampleSpec`; of samples that are done, a row each."""
        if task.stop < DONE:
            return [tensor for batch in answers for tensor in batch.tensors]
        rows = [batch.tensors[0][: len(batch.ids)] for batch in answers]
        targets = self.source.targets(task.indices)
        if task.whole and self.joins:
            return [rows[0] if len(rows) == 1 else torch.cat(rows), torch.tensor(targets, device="cpu")]
        return list(zip([row for piece in rows for row in piece], targets, strict=True))


def _pieces(task: Task, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(task.samples), size)]


def _sent(ids: tuple[int, ...], raw: Sequence[Any]) -> MicroBatch:
    """What was read of some samples."""
    tree, tensors = flatten(list(raw))
    return MicroBatch(ids=ids, position=RAW, tensors=tuple(tensors), tree=tree)
