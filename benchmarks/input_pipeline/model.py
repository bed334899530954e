"""Train the consumer of every way of `input_pipeline`: a small model, and an accelerator's time.

The wait is a sleep, so the core is as free as while an accelerator computes. Peers import this module in
environments of their own, so it imports PyTorch alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.input_pipeline.workloads import CLASSES

SIDE = 8
"""Width of the patches that the model sees."""

LEARNING_RATE = 0.05

EPOCHS = 6
"""Epochs that a peer trains in one pass, so that only the first begins without prefetched batches."""

Clock = Callable[[], float]


class Consumer:
    """Train on batches, from the same start for each instance.

    Args:
        wait_s: The accelerator's time for a batch.

    Attributes:
        losses: Of each batch.
        targets: Number of samples of each class.
        alone_s: Seconds of the model itself on this machine's core, all batches together.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self.losses: list[float] = []
        self.targets = [0] * CLASSES
        self.alone_s = 0.0

    def __call__(self, values: torch.Tensor, targets: torch.Tensor) -> None:
        """Run one step. The optimizer has seen the batch on return."""
        began = time.perf_counter()
        model, optimizer = self._parts(values)
        loss = nn.functional.cross_entropy(model(values), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())
        for number, count in enumerate(torch.bincount(targets, minlength=CLASSES).tolist()):
            self.targets[number] += count
        self.alone_s += time.perf_counter() - began
        time.sleep(self._wait_s)

    def _parts(self, values: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self._model is None or self._optimizer is None:
            self._model = small(values.shape[1:])
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        return self._model, self._optimizer


def small(shape: torch.Size) -> nn.Module:
    """Return a model of patch means and one linear layer.

    Samples are (channels, length) or (channels, height, width).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pool: nn.Module = nn.AdaptiveAvgPool2d(SIDE) if len(shape) == 3 else nn.AdaptiveAvgPool1d(SIDE**2)
        return nn.Sequential(pool, nn.Flatten(), nn.Linear(shape[0] * SIDE**2, CLASSES))


def train(batches: Iterable[Any], consumer: Consumer, *, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Train on all batches. Return the seconds of each step, and their part spent waiting for the batch."""
    found: dict[str, list[float]] = {"steps_s": [], "waits_s": []}
    began = clock()
    source = iter(batches)
    asked = began
    while (batch := next(source, None)) is not None:
        got = clock()
        consumer(*batch)
        found["waits_s"].append(got - asked)
        found["steps_s"].append(clock() - asked)
        asked = clock()
    return {**found, "seconds": clock() - began}


def train_apart(
    batches: Iterable[Any], spec: Mapping[str, Any], *, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Train `EPOCHS` that a peer yields in one pass, in any order and with any batch sizes.

    An epoch ends with the step in which its number of samples is reached.

    Args:
        batches: Values and targets.
        spec: ``wait_s``, the accelerator's time for a batch, and ``samples`` of an epoch.

    Returns:
        Seconds of each epoch but the first, and the total number of samples of each class.
    """
    consumer, ends = Consumer(spec["wait_s"]), list[float]()
    for batch in batches:
        consumer(*batch)
        if sum(consumer.targets) >= (len(ends) + 1) * spec["samples"]:
            ends.append(clock())
    epochs = [end - begin for begin, end in itertools.pairwise(ends)]
    return {"epochs_s": epochs, "targets": consumer.targets, "batches": len(consumer.losses)}
