"""Train the same task in two ways: upriver's plain way, and an ordinary loop over a ``DataLoader``.

Both read one store with the same ranged reads, run the same input stages with the same draws in the same
order of samples, and train the same tail from the same start with the same optimizer.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from benchmarks.harness.measuring import cpu_seconds
from upriver.engine.read import read_samples
from upriver.finetune.options import Prefetch, Splitting
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.finetune.session import connect
from upriver.pipeline import Dataset
from upriver.pipeline.chain import stored_tensor
from upriver.rpc.link_meter import BURST_BYTES, LinkMeter
from upriver.types import DEFAULT_MICRO_BATCH

CONTEXT = multiprocessing.get_context("forkserver")
"""Workers fork from a process without busy threads. A fork of this process would copy locks its threads hold.
"""
CONTEXT.set_forkserver_preload(["torch.utils.data", "upriver.rpc.link_meter", "upriver.pipeline"])

LEARNING_RATE = 1e-3
"""Default learning rate of Adam."""

Sample = tuple[torch.Tensor, int, int]
"""Pixels, target, id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Time and results of one epoch."""

    wall_s: float
    cpu_s: float
    link_bytes: int
    losses: tuple[float, ...]
    ids: tuple[int, ...]
    targets: tuple[int, ...]


class Side(Protocol):
    """One way of training."""

    model: nn.Module

    def outputs(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tail's outputs and the targets of each step."""

    def ids(self) -> Sequence[int]:
        """Return the sample ids of the last epoch, in order of delivery."""

    def link_bytes(self) -> int:
        """Return the bytes that crossed the link so far."""

    def close(self) -> None:
        """End threads and processes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of both sides.

    Attributes:
        model: The initial model of every epoch: ResNet-18, frozen through ``layer4.0``.
        data: Dataset by seed.
        start: The trainable part's parameters and buffers.
    """

    model: nn.Module
    data: Mapping[int, Dataset]
    batch_size: int
    start: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        state = self.model.state_dict()
        tail = {name: value.clone() for name, value in state.items() if name.startswith(("layer4.1.", "fc."))}
        object.__setattr__(self, "start", tail)

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Return the order of an epoch, for both sides."""
        return epoch_order(
            len(self.data[seed]),
            seed=seed,
            epoch=epoch,
            batch_size=self.batch_size,
            micro_batch=DEFAULT_MICRO_BATCH,
            shuffle=True,
        )

    def train(self, side: Side, label: str, epoch: int) -> Epoch:
        """Train and measure one epoch from the common start."""
        state = side.model.state_dict()
        for name, value in self.start.items():
            state[name].copy_(value)
        side.model.zero_grad()
        tail = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(tail, lr=LEARNING_RATE)
        losses: list[float] = []
        targets: list[int] = []
        gc.collect()
        cpu, num_bytes, began = cpu_seconds(), side.link_bytes(), time.perf_counter()
        for outputs, wanted in side.outputs(epoch):
            loss = nn.functional.cross_entropy(outputs, wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            targets += wanted.tolist()
        done = Epoch(
            wall_s=time.perf_counter() - began,
            cpu_s=cpu_seconds() - cpu,
            link_bytes=side.link_bytes() - num_bytes,
            losses=tuple(losses),
            ids=tuple(side.ids()),
            targets=tuple(targets),
        )
        say(f"  {label}, epoch {epoch}: {done.wall_s:.2f} s, {done.cpu_s:.2f} s of CPU")
        return done


class Plain:
    """Train with upriver and nothing offloaded."""

    def __init__(self, task: Task, rate: float | None, *, seed: int, workers: int) -> None:
        self.model, self._order = copy.deepcopy(task.model), partial(task.order, seed)
        self._meter = LinkMeter(rate)
        self._near = connect(meter=self._meter)
        self._job = self._near.finetune(
            self.model,
            task.data[seed],
            batch_size=task.batch_size,
            policy="nosplit",
            exact="bitwise",
            seed=seed,
            splitting=Splitting(in_background=False),
            keep=None,
            prefetch=Prefetch(num_workers=workers),
        )
        # Warms up the tail. The proof has already warmed up the frozen part.
        self._job(torch.zeros((task.batch_size, 512, 7, 7))).sum().backward()
        self._placed = 0

    def outputs(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield outputs and targets; see `Side`."""
        self._placed = len(self._job.placed)
        self._job.load_state_dict({**self._job.state_dict(), "epoch": epoch, "step": 0})
        self.model.train()
        for features, targets in self._job:
            yield self._job(features), targets

    def ids(self) -> Sequence[int]:
        """Return the sample ids; see `Side`."""
        placed = self._job.placed[self._placed :]
        return [sample for at in placed for sample in self._order(at.epoch).micro_batches[at.index]]

    def link_bytes(self) -> int:
        """Return the link's bytes; see `Side`."""
        return self._meter.total_bytes

    def close(self) -> None:
        """End threads and processes; see `Side`."""
        self._near.close()


class SharedLink:
    """The state of one emulated link, shared by several processes."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.free_at = CONTEXT.Value("d", 0.0)
        self.num_bytes = CONTEXT.Value("q", 0)


class SharedMeter(LinkMeter):
    """`LinkMeter` that paces through a `SharedLink`. All processes have the same monotonic clock."""

    def __init__(self, link: SharedLink) -> None:
        super().__init__(link.rate_bytes_per_s)
        self._link = link

    def _reserve(self, num_bytes: int) -> float:
        free_at, rate = self._link.free_at, self.rate_bytes_per_s
        with free_at.get_lock():
            self._link.num_bytes.value += num_bytes
            if rate is None:
                return 0.0
            now = time.monotonic()
            free_at.value = max(free_at.value, now - BURST_BYTES / rate) + num_bytes / rate
            return float(free_at.value - now)


class Photos(MapDataset[Sample]):
    """A map-style dataset over the same store: (epoch, id) to a sample."""

    def __init__(self, data: Dataset, link: SharedLink, *, seed: int) -> None:
        self._data, self._link, self._seed = data, link, seed
        self._direct: Dataset | None = None  # made in the process that reads

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Sample]:
        """Read a whole batch with joined and parallel reads.

        A ``DataLoader`` calls this method where it exists.
        """
        if self._direct is None:
            self._direct = self._data.with_store(self._data.store.observed_by(SharedMeter(self._link)))
        blobs = read_samples(self._direct, [sample for _, sample in keys])
        return [
            (self._pixels(blob, epoch, sample), int(self._data.targets_of([sample])), sample)
            for blob, (epoch, sample) in zip(blobs, keys, strict=True)
        ]

    def _pixels(self, blob: memoryview, epoch: int, sample: int) -> torch.Tensor:
        chain, value = self._data.chain, stored_tensor(blob)
        return chain.run(value, sample=sample, epoch=epoch, seed=self._seed, start=chain.start, stop=0)


class Vanilla:
    """An ordinary loop: whole batches from a ``DataLoader``, the frozen part in eval without gradients."""

    def __init__(self, task: Task, rate: float | None, *, seed: int, workers: int, prefetch: int) -> None:
        model: Any = copy.deepcopy(task.model).train()
        self.model: nn.Module = model
        stem = (model.conv1, model.bn1, model.relu, model.maxpool, model.layer1, model.layer2, model.layer3)
        self._frozen = nn.Sequential(*stem, model.layer4[0]).eval()
        self._tail = nn.Sequential(model.layer4[1], model.avgpool, nn.Flatten(), model.fc)
        self._order, self._link = partial(task.order, seed), SharedLink(rate)
        self._ids: list[int] = []
        self._batches = [[(0, 0)]] * max(workers, 1)
        many: dict[str, Any] = {"prefetch_factor": prefetch, "persistent_workers": True}
        many["multiprocessing_context"] = CONTEXT
        self._loader: DataLoader[Sample] | None = DataLoader(
            Photos(task.data[seed], self._link, seed=seed),
            batch_sampler=self._batches,
            num_workers=workers,
            **(many if workers else {}),
        )
        list(self._loader)  # starts every worker, with one sample
        with torch.no_grad():
            features = self._frozen(torch.zeros((task.batch_size, 3, 224, 224)))
        self._tail(features).sum().backward()

    def outputs(self, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield outputs and targets; see `Side`."""
        order = self._order(epoch)
        stretches = (order.step(step) for step in range(order.num_steps))
        self._batches[:] = [[(epoch, sample) for sample in order.ids[slice(*both)]] for both in stretches]
        self._ids = []
        for pixels, targets, samples in self._loader or ():
            self._ids += samples.tolist()
            with torch.no_grad():
                features = self._frozen(pixels)
            yield self._tail(features), targets

    def ids(self) -> Sequence[int]:
        """Return the sample ids; see `Side`."""
        return self._ids

    def link_bytes(self) -> int:
        """Return the link's bytes; see `Side`."""
        return int(self._link.num_bytes.value)

    def close(self) -> None:
        """End threads and processes; see `Side`."""
        self._loader = None  # ends the workers
        gc.collect()


def say(text: str) -> None:
    """Print progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)
