"""Specify the samples that workers make: of a dataset by its name, or of an `upriver.Dataset` in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.tasks import Task
from upriver.profile.throughput_cache import pipeline_key
from upriver.protocol import BY_DEFAULT, DEFAULT_CAPS, CodeRef, Collate, DatasetRef, RunRequest
from upriver.protocol.tree import build, flatten
from upriver.types import DONE, RAW, START, MicroBatch

PIECE = 16
"""Number of samples made together if they are not collated, as the tensors of a response are limited."""


class SampleSpec(Protocol):
    """Specification of the samples that workers make."""

    @property
    def name(self) -> str:
        """Name of the dataset."""

    @property
    def joins(self) -> bool:
        """Return whether workers collate batches, too."""

    @property
    def collates(self) -> str | None:
        """Name of the collate function; None if it has none."""

    @property
    def key(self) -> str:
        """Key of the whole specification, for stored measurements."""

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """Return the request for a task, and the samples to send with it.

        Raises:
            ConfigError: If the samples cannot be sent.
        """

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """Return the result of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByName:
    """A user's own dataset, whose code the workers have.

    Attributes:
        name: Name of the dataset's code.
        collate: Name of the collate function; None where batches are collated here.
        code: Callable that makes the dataset.
    """

    name: str
    arguments: Mapping[str, Any]
    seed: int
    collate: str | None
    code: object = None

    @property
    def joins(self) -> bool:
        """Return whether workers can collate."""
        return self.collate is not None

    @property
    def collates(self) -> str | None:
        """Return the collate function's name; see `SampleSpec`."""
        return self.collate

    @property
    def key(self) -> str:
        """Return the key; see `SampleSpec`."""
        return pipeline_key(self.name, self.arguments, self.collate, code=self.code)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """Return the request for a task; see `SampleSpec`."""
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
        """Return the result of a task; see `SampleSpec`."""
        made = [build(batch.tree, batch.tensors) for batch in answers]
        return made[0] if task.whole and self.joins else [sample for piece in made for sample in piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class InStore:
    """An `upriver.Dataset`, whose stages every server near its store has.

    Attributes:
        joins: Whether the collate function is `torch.utils.data.default_collate`.
    """

    source: Declared
    joins: bool

    @property
    def name(self) -> str:
        """Return the name of the dataset."""
        return f"dataset {self.source.dataset.digest[:12]}"

    @property
    def collates(self) -> str | None:
        """Return the collate function's name; see `SampleSpec`."""
        return BY_DEFAULT if self.joins else None

    @property
    def key(self) -> str:
        """Return the key; see `SampleSpec`."""
        return pipeline_key(self.source.dataset.digest, {}, self.collates)

    def request(self, task: Task, raw: Sequence[Any] | None) -> tuple[RunRequest, list[MicroBatch]]:
        """Return the request for a task; see `SampleSpec`."""
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
            epoch=self.source.drawn_as(task.epoch),
            given=raw is not None,
        )
        if raw is None:
            return request, []
        return request, [
            MicroBatch(ids=task.samples[piece], position=task.start, tensors=tuple(raw[piece]))
            for piece in pieces
        ]

    def value(self, task: Task, answers: Sequence[MicroBatch]) -> Any:
        """Return the result of a task; see `SampleSpec`. Finished samples are rows of tensors."""
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
    """Return the micro-batch of samples that were read here."""
    tree, tensors = flatten(list(raw))
    return MicroBatch(ids=ids, position=RAW, tensors=tuple(tensors), tree=tree)
