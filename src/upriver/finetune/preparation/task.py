"""Define what a preparing process receives and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from upriver.engine.fingerprint import Numerics, numerics
from upriver.finetune.options import JobOptions
from upriver.finetune.planner import PlanDecision
from upriver.pipeline import Dataset
from upriver.program.split.split import Attempt, Parts
from upriver.rpc.tls import FilePath
from upriver.store import Store


@dataclass(frozen=True, kw_only=True)
class StoredDataset:
    """A dataset as another process opens it: its index, and the place of its store."""

    uri: str
    name: str
    options: Mapping[str, str] = field(repr=False)
    chain: bytes = field(repr=False)
    index: bytes = field(repr=False)
    prefix: str

    @classmethod
    def of(cls, dataset: Dataset) -> StoredDataset:
        """Return the description of a dataset."""
        store, (chain, index) = dataset.store, dataset.files
        return cls(
            uri=store.uri,
            name=store.name,
            options=store.options,
            chain=chain,
            index=index,
            prefix=dataset.prefix,
        )

    def open(self) -> Dataset:
        """Return the dataset in this process."""
        store = Store.open(self.uri, name=self.name, options=self.options or None)
        return Dataset(store, self.chain, self.index, prefix=self.prefix)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Token and certificates that servers ask a client for.

    Attributes:
        ca: PEM file of the authorities, as for ``upriver.connect``.
        certificate: PEM file of the client's certificate.
        key: PEM file of its private key.
    """

    token: str | None = field(repr=False)
    ca: FilePath | None
    certificate: FilePath | None
    key: FilePath | None


@dataclass(frozen=True, kw_only=True)
class PreparationTask:
    """A job to prepare.

    Attributes:
        model: The model, out of its wrappers.
        example: A micro-batch of input.
        dataset: The training data.
        options: The job's options, without those of the tail.
        parts: What the job has begun with; the captured program must have the same.
        numerics: Settings of the process that trains.
    """

    model: nn.Module
    example: torch.Tensor
    dataset: StoredDataset
    options: JobOptions
    credentials: Credentials
    parts: Parts
    numerics: Numerics = field(default_factory=numerics)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a preparation.

    Attributes:
        graph: ``graph.json`` of the program.
        keys: Keys of its weights, in the order of the weights file.
        constants: Weights that are no parameters or buffers of the model, by key.
        attempts: Cuts that were tried, for reports.
        capture_s: Seconds of the capture.
        decision: The plan.
        num_bytes: Bytes that crossed the link, by kind of traffic.
    """

    graph: bytes
    keys: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    attempts: tuple[Attempt, ...]
    capture_s: float
    decision: PlanDecision
    num_bytes: Mapping[str, int]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
