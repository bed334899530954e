"""Run the training side of `kept_features`: one job in a fresh process, timed from its script's start.

Everything is imported, and the fork server of a ``DataLoader``'s workers runs, before the process says that
it is ready. The clock then starts with the order: opening the store, indexing the dataset and building the
model are in the time. Each order is a method of `Script`.
"""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # which upriver's tracing imports at its first use
from torch import nn

import upriver
from benchmarks.harness.children import answer_orders, by_name
from benchmarks.harness.training.loader import CONTEXT, Loop
from benchmarks.kept_features.by_hand import HandMade, InFiles, InMemory, Steps
from benchmarks.kept_features.networks import LEARNING_RATES, build_for, import_networks
from benchmarks.kept_features.settings import FILE
from upriver.finetune.job import FinetuneJob
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.pipeline import imagenet_eval, imagenet_train
from upriver.types import DEFAULT_MICRO_BATCH

PREFETCH = 2
"""Training batches that each worker of the plain loop reads ahead, as PyTorch does by default."""

# What this module imports, which each worker runs again.
CONTEXT.set_forkserver_preload(["benchmarks.kept_features.by_hand", "upriver.finetune.job"])


class Script:
    """Execute one order, as a script that trains one job.

    Args:
        spec: The setting, the place, and which job it is; see `rig.Rig`.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        import_networks()
        self._spec = spec
        self._views: int = spec["views"] or 1
        if spec["workers"]:
            _start_fork_server()

    # ---------------------------------------------------------------------------------------- orders

    def plain(self) -> dict[str, Any]:
        """Train the whole model in an ordinary loop over a ``DataLoader``."""
        self._begin()
        spec = self._spec
        loop = Loop(self._model, self._data, workers=spec["workers"], prefetch=PREFETCH, seed=spec["seed"])
        epochs = (loop.steps(order, view=at % self._views) for at, order in enumerate(self._orders))
        return self._train(epochs, loop.close)

    def by_hand(self, *, form: str, folder: str) -> dict[str, Any]:
        """Train on features that are kept by hand.

        Args:
            form: Whether they are kept in memory or in files.
            folder: Folder of the files.
        """
        self._begin()
        samples = len(self._data)
        made = HandMade(
            self._spec["network"],
            self._model,
            self._data,
            InFiles(samples, Path(folder)) if form == FILE else InMemory(samples),
            orders=self._orders,
            views=self._views,
            workers=self._spec["workers"],
            seed=self._spec["seed"],
        )
        return self._train(made.epochs(), made.close)

    def near(self, *, keep: str | None) -> dict[str, Any]:
        """Train by upriver.

        Args:
            keep: As in `Near.finetune`.
        """
        self._begin()
        views: Mapping[str, Any] = {} if self._spec["views"] is None else {"views": self._spec["views"]}
        given: Mapping[str, Any] = {"sampling": upriver.Sampling(**views), "keep": keep}
        near = upriver.connect(self._spec["url"], token=os.environ["UPRIVER_TOKEN"])
        job = near.finetune(
            self._model,
            self._data,
            batch_size=self._spec["batch_size"],
            seed=self._spec["seed"],
            on_progress=lambda text: None,
            **given,
        )
        facts: dict[str, Any] = {}

        def close() -> None:
            facts.update(_facts_of(job))
            job.close()
            near.close()

        return self._train(_epochs_of(job, len(self._orders)), close) | facts

    # ------------------------------------------------------------------------------------- the script

    def _begin(self) -> None:
        """Start the clock, index the dataset, and build the model and its optimizer."""
        self._began = time.perf_counter()
        spec = self._spec
        store = upriver.Store.open(spec["uri"], options=dict(spec["options"]))
        stages = imagenet_eval() if spec["views"] is None else imagenet_train()
        self._data = upriver.index(store, "data", stages=stages)
        self._model = build_for(spec["network"], spec["job"])
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=LEARNING_RATES[spec["job"]])
        self._orders = [self._order(epoch) for epoch in range(spec["epochs"])]

    def _order(self, epoch: int) -> EpochOrder:
        return epoch_order(
            len(self._data),
            seed=self._spec["seed"],
            epoch=epoch,
            batch_size=self._spec["batch_size"],
            micro_batch=DEFAULT_MICRO_BATCH,
            shuffle=True,
        )

    def _train(self, epochs: Iterable[Steps], close: Callable[[], None]) -> dict[str, Any]:
        """Train, and close what the way has opened; both count."""
        losses, targets, ends_s = list[float](), list[int](), list[float]()
        for steps in epochs:
            for outputs, wanted in steps:
                loss = nn.functional.cross_entropy(outputs(), wanted)
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.item())
                targets += wanted.tolist()
            ends_s.append(time.perf_counter() - self._began)
        peaks = peak_bytes()
        close()
        seconds = time.perf_counter() - self._began
        ids = [sample for order in self._orders for sample in order.ids]
        if targets != self._data.targets[ids].tolist():
            raise RuntimeError("the targets are not those of the epochs' samples")
        return {"seconds": seconds, "ends_s": ends_s, "losses": losses, "peak_bytes": peaks}


def _epochs_of(job: FinetuneJob, epochs: int) -> Iterator[Steps]:
    for _ in range(epochs):
        yield ((partial(job, features), targets) for features, targets in job)


def _facts_of(job: FinetuneJob) -> dict[str, Any]:
    plan = job.plan
    return {
        "from": dict(job.report.samples),
        "plan": {str(route.cut): route.share for route in plan.routes},
        "why": plan.why,
        "exactness": job.exactness,
    }


def _start_fork_server() -> None:
    """Start the process from which a loader's workers are forked, with all their imports."""
    process = CONTEXT.Process(target=int)
    process.start()
    process.join()


def peak_bytes() -> dict[str, int]:
    """Return the largest resident memory of this process, and the sum of that of its children.

    Pages that processes share count in each of them. Of children that have ended, the largest counts.
    """
    ended = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    living = sum(_peak_of(child.pid) for child in psutil.Process().children(recursive=True))
    return {"training": _peak_of(os.getpid()), "children": living + ended}


def _peak_of(pid: int) -> int:
    """Return the largest resident memory of a process so far; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main() -> None:
    """Execute orders until the input ends."""
    # A sweep includes more workers than this host has cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    answer_orders(lambda spec: by_name(Script(spec)))


if __name__ == "__main__":
    main()
