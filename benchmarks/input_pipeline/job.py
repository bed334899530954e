"""Run the training side of `bed.Job`: read orders as JSON lines, and answer each with one line.

An order is an epoch, or several in one pass, in one way: where its samples are made, and who decides it. A
way keeps its loader, with its processes and measurements, until it is closed. Each epoch begins from the same
model without prefetched batches, and its number alone determines its content.

Ways
    torch 1         PyTorch's own loader with that many processes
    here            upriver with nothing offloaded
    remote          everything offloaded
    greedy          the least busy side makes the next batch
    p2 0.3          a candidate and a ratio
    fastflow        FastFlow's policy
    upriver         upriver's own
    … again         the same, begun anew with the stored metrics of the first time
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import RandomSampler, default_collate

import upriver
from benchmarks.harness.children import answer_orders, by_name
from benchmarks.input_pipeline.model import EPOCHS, Consumer, train, train_apart
from benchmarks.input_pipeline.workloads import NAME, Samples
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.share import Backlog, OffloadShare

HERE = "here"
AGAIN = " again"
POLICIES = ("fastflow", "upriver")
WARM = 2
"""Batches that a loader yields before it is measured, unless it measures by itself. After them its processes
have started, and workers have shown that they make the same batches."""


class TakesNext(OffloadShare):
    """Assign each batch to the side with fewer planned and unfinished batches, or to this side on a tie.

    Args:
        epoch: The epoch of the batches.
        split: Gives the stages that run at the worker.
    """

    def __init__(self, epoch: Epoch, split: OffloadShare) -> None:
        super().__init__(split.ratio, split.stretch)
        self._epoch = weakref.proxy(
            epoch
        )  # the epoch holds this object, and must end as soon as no iterator is left
        self._goes: deque[bool] = deque()

    def split(self, count: int, backlog: Backlog) -> list[bool]:
        """Return the side of each sample of the next planned batch."""
        while not self._epoch._arrivals.empty():  # batches that have arrived since are done
            self._epoch._arrived(self._epoch._arrivals.get())
        before = list(self._epoch._planned)[:-1]
        while len(self._goes) > len(before):
            self._goes.popleft()
        before = before[len(before) - len(self._goes) :]
        waiting = [goes for goes, batch in zip(self._goes, before, strict=True) if batch.missing]
        self._goes.append(sum(waiting) < len(waiting) - sum(waiting))
        return [self._goes[-1]] * count


class Greedy(upriver.DataLoader):
    """upriver's loader without any ratio."""

    def __iter__(self) -> Any:
        epoch = super().__iter__()._batches
        epoch.split = TakesNext(epoch, epoch.split)
        return epoch


class Trainer:
    """Keep the state that lasts from order to order.

    Args:
        spec: ``workload``, ``root``, ``samples``, ``batch_size``, ``url`` of the worker, ``cache`` for what
            is stored between runs.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._arguments = {key: spec[key] for key in ("root", "workload", "samples")}
        self._loaders: dict[str, tuple[Any, torch.Generator]] = {}
        Consumer(0.0)(
            *default_collate([Samples(**self._arguments)[0]])
        )  # imports all modules of the training

    def open(self, way: str, *, num_workers: int) -> dict[str, Any]:
        """Make a way's loader with this many local processes, unless it exists."""
        if way not in self._loaders:
            os.environ["UPRIVER_CACHE"] = self._cache(way)
            generator = torch.Generator()
            loader = self._made(way, num_workers, generator)
            if way.removesuffix(AGAIN) not in POLICIES:
                for batch in itertools.islice(loader, WARM):
                    del batch
            self._loaders[way] = loader, generator
        return {}

    def epoch(self, way: str, *, number: int, wait_s: float) -> dict[str, Any]:
        """Train one epoch. Return its times, its results, and which side made its samples.

        Args:
            way: As above.
            number: Number of the epoch, which determines its content.
            wait_s: The accelerator's time for a batch.
        """
        os.environ["UPRIVER_CACHE"] = self._cache(way)
        loader, generator = self._loaders[way]
        generator.manual_seed(number)
        before: Counter[str] = Counter()
        if isinstance(loader, upriver.DataLoader):
            loader.epoch = number
            before = Counter(loader.report.made)
        consumer = Consumer(wait_s)
        decided = Decided(loader)
        found = train(decided.watched(loader), consumer)
        answer = {
            **found,
            "losses": consumer.losses,
            "targets": consumer.targets,
            "alone_s": consumer.alone_s,
            "decided_at": decided.at,
        }
        if isinstance(loader, upriver.DataLoader):
            answer |= _told(loader, before)
        return answer

    def one_pass(self, way: str, *, num_workers: int, wait_s: float) -> dict[str, Any]:
        """Train `EPOCHS` without a pause by a loader of its own, which has the stored metrics.

        No epoch but the first begins without prefetched batches, as with the peers.
        """
        os.environ["UPRIVER_CACHE"] = self._cache(way)
        loader = self._made(way, num_workers, torch.Generator().manual_seed(0), epochs=EPOCHS)
        found = train_apart(loader, {"wait_s": wait_s, "samples": self._spec["samples"]})
        return {**found, **(_told(loader, Counter()) if isinstance(loader, upriver.DataLoader) else {})}

    def close(self, way: str) -> dict[str, Any]:
        """Close a way's loader and its processes."""
        self._loaders.pop(way, None)
        return {}

    def _cache(self, way: str) -> str:
        policy = way.removesuffix(AGAIN)
        return str(Path(self._spec["cache"]) / policy) if policy in POLICIES else os.devnull

    def _made(self, way: str, num_workers: int, generator: torch.Generator, epochs: int = 1) -> Any:
        kind, *rest = way.split()
        if kind == "torch":
            num_workers = int(rest[0])
        options: dict[str, Any] = {
            "batch_size": self._spec["batch_size"],
            # Not the loader's generator: PyTorch draws from it once more where processes are started.
            "sampler": Repeated(RandomSampler(range(self._spec["samples"]), generator=generator), epochs),
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
        }
        if kind == "torch":
            return TorchLoader(Samples(**self._arguments), **options)
        data = upriver.dataset(NAME, **self._arguments)
        remote = upriver.RemoteWorkers([self._spec["url"]], token=os.environ["UPRIVER_TOKEN"])
        make: Callable[..., Any] = upriver.DataLoader
        match kind, rest:
            case "here", []:
                options["offload"] = "never"
            case "remote", []:
                options["offload"] = "always"
            case "greedy", []:
                make, options["offload"] = Greedy, upriver.Offloading(candidate="p3", ratio=0.5)
            case (("fastflow" | "upriver"), _):
                options["offload"] = upriver.AutoOffload(policy=kind, model=self._spec["workload"])
            case (("p1" | "p2" | "p3"), [ratio]):
                options["offload"] = upriver.Offloading(candidate=kind, ratio=float(ratio))
            case _:
                raise ValueError(f"no such way: {way!r}")
        return make(data, **options, workers=remote, seed=0)


class Repeated:
    """The epochs of a sampler, one right after another.

    Args:
        sampler: The sampler.
        epochs: Number of epochs.
    """

    def __init__(self, sampler: RandomSampler, epochs: int) -> None:
        self._sampler, self._epochs = sampler, epochs

    def __len__(self) -> int:
        return self._epochs * len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._epochs):
            yield from self._sampler


class Decided:
    """Record when a loader that decides by itself has decided.

    Attributes:
        at: Batches of this epoch requested before the decision; None without one, or if it was earlier.
    """

    def __init__(self, loader: Any) -> None:
        self.at: int | None = None
        self._loader = loader
        self._open = isinstance(loader, upriver.DataLoader) and not loader.decided

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches unchanged."""
        number = 0
        for number, batch in enumerate(batches, start=1):
            self._look(number)
            yield batch
        self._look(number + 1)

    def _look(self, number: int) -> None:
        if self._open and self._loader.decided:
            self.at, self._open = number - 1, False


def _told(loader: upriver.DataLoader, before: Counter[str]) -> dict[str, Any]:
    made = Counter(loader.report.made) - before
    now = loader.offloading
    return {
        "made_here": made[HERE],
        "made_elsewhere": sum(made.values()) - made[HERE],
        "decided": loader.decided,
        "candidate": None if now is None else now.candidate,
        "ratio": None if now is None else now.ratio,
        "why": loader.why,
        "why_not": list(loader.report.why_not.values()),
    }


def main() -> None:
    """Execute orders until the input ends."""
    torch.set_num_threads(1)
    # The sweep includes more processes than this host has cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    answer_orders(lambda spec: by_name(Trainer(spec)))


if __name__ == "__main__":
    main()
