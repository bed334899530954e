"""Run the training side of `first_batch`: one job in a fresh process, timed from its first call on.

Torch and upriver are imported, the model and its optimizer are built and the dataset is indexed before the
process says that it is ready. Each order is a method of `Trainer`. ``finetune`` and ``loader`` train, and
answer with the times.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

import upriver
from benchmarks.first_batch.networks import NETWORKS
from benchmarks.harness.children import answer_orders, by_name
from benchmarks.harness.training.job import LEARNING_RATE, digest_of
from benchmarks.harness.training.loader import CONTEXT, Loop
from upriver.finetune.job import FinetuneJob
from upriver.finetune.prefetch.fetch_threads import LOCAL
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.types import DEFAULT_MICRO_BATCH

# What this module imports, which each worker runs again.
CONTEXT.set_forkserver_preload(["benchmarks.first_batch.networks", "benchmarks.harness.training.job"])

Steps = Generator[tuple[Callable[[], Any], torch.Tensor], None, None]
"""For each training step: a function that returns the model's answer, and the targets."""


class Clock:
    """Note when something happens first, in seconds since the clock was made.

    Attributes:
        at_s: Seconds by event.
        cpu_s: Processor seconds of this process by event.
        epochs_s: Seconds at the end of each epoch.
    """

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self.at_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self.epochs_s: list[float] = []

    @property
    def now_s(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self._began

    def mark(self, event: str) -> None:
        """Note an event, unless it happened before."""
        if event not in self.at_s:
            self.at_s[event], self.cpu_s[event] = self.now_s, time.process_time() - self._cpu


class Trainer:
    """Execute orders on one model and its data."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        network = NETWORKS[spec["network"]]
        store = upriver.Store.open(spec["uri"], options=dict(spec["options"]))
        self._data = upriver.index(store, "data", stages=network.stages)
        self._model = network.build()
        self._last_frozen = self._model.get_submodule(network.last_frozen)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        self._batch_size: int = spec["batch_size"]
        self._near = upriver.connect(spec["url"], token=os.environ["UPRIVER_TOKEN"])

    def fill(self) -> dict[str, Any]:
        """Leave what an earlier run of the job leaves: proofs, profiles and the program."""
        for in_background in (False, True):
            with self._job(in_background=in_background) as job:
                if not job.wait_until_split():
                    raise RuntimeError(f"the model cannot be split: {job.why_unsplit or job.plan.why}")
        return {}

    def finetune(
        self,
        *,
        epochs: int | None,
        limit_s: float,
        in_background: bool | None,
        policy: str | None,
        waits: bool,
    ) -> dict[str, Any]:
        """Train by upriver.

        Args:
            epochs: Epochs to train; None trains up to the first batch from a server, or for ``limit_s``.
            in_background: As in `upriver.Splitting`.
            policy: As in `Near.finetune`.
            waits: Whether to wait for the split after the first epoch.
        """
        clock = Clock()
        job = self._job(in_background=in_background, policy=policy)
        clock.mark("returned")
        begun = not job.wait_until_split(0.0) and not job.why_unsplit

        def steps() -> Steps:
            for epoch in itertools.count() if epochs is None else range(epochs):
                for features, targets in job:
                    clock.mark("first batch")
                    if job.report.samples.keys() - {LOCAL}:
                        clock.mark("first remote")
                    yield partial(job, features), targets
                clock.epochs_s.append(clock.now_s)
                if waits and epoch == 0:
                    job.wait_until_split()

        def over() -> bool:
            return epochs is None and ("first remote" in clock.at_s or clock.now_s >= limit_s)

        found = self._train(steps(), clock, over)
        shares, plan = job.report.shares, job.plan
        job.close()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            **found,
            "begun": begun,
            "preparing_cpu_s": children.ru_utime + children.ru_stime,
            "remote": 1 - shares.get(LOCAL, 0.0) if shares else 0.0,
            "plan": {str(route.cut): route.share for route in plan.routes},
            "why": plan.why,
            "exactness": job.exactness,
        }

    def loader(self, *, epochs: int, steps: int | None, workers: int) -> dict[str, Any]:
        """Train by an ordinary loop over a ``DataLoader``. The fork server of its workers runs already.

        Args:
            epochs: Epochs to train.
            steps: Steps to train at most.
        """
        if workers:
            process = CONTEXT.Process(target=int)
            process.start()
            process.join()
        clock = Clock()
        self._last_frozen.register_forward_hook(lambda *call: clock.mark("first batch"))
        loop = Loop(self._model, self._data, workers=workers, prefetch=2)
        clock.mark("returned")

        def every() -> Steps:
            for epoch in range(epochs):
                yield from loop.steps(self._order(epoch))
                clock.epochs_s.append(clock.now_s)

        done = itertools.count(1)

        def over() -> bool:
            return steps is not None and next(done) == steps

        found = self._train(every(), clock, over)
        loop.close()
        return found

    def _job(self, *, in_background: bool | None, policy: str | None = None) -> FinetuneJob:
        return self._near.finetune(
            self._model,
            self._data,
            batch_size=self._batch_size,
            policy=policy,
            splitting=upriver.Splitting(in_background=in_background),
            keep=None,
            on_progress=lambda text: None,
        )

    def _order(self, epoch: int) -> EpochOrder:
        return epoch_order(
            len(self._data),
            seed=0,
            epoch=epoch,
            batch_size=self._batch_size,
            micro_batch=DEFAULT_MICRO_BATCH,
            shuffle=True,
        )

    def _train(self, steps: Steps, clock: Clock, over: Callable[[], bool]) -> dict[str, Any]:
        """Train until the steps end or ``over`` says so after one."""
        losses, targets = list[float](), list[int]()
        with closing(steps):
            for outputs, wanted in steps:
                torch.manual_seed(len(losses))  # the tail may contain dropout
                answer: Any = outputs()
                loss = nn.functional.cross_entropy(getattr(answer, "logits", answer), wanted)
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(loss.item())
                targets += wanted.tolist()
                clock.mark("first step")
                if over():
                    break
            clock.mark("end")
        epochs = -(-len(targets) // len(self._data))
        ids = [sample for epoch in range(epochs) for sample in self._order(epoch).ids][: len(targets)]
        if targets != self._data.targets[ids].tolist():
            raise RuntimeError("the targets are not those of the epochs' samples")
        return {
            "seconds": clock.at_s["end"],
            "at_s": clock.at_s,
            "cpu_s": clock.cpu_s,
            "epochs_s": clock.epochs_s,
            "losses": losses,
            "digest": digest_of(losses, tuple(ids)),
        }


def main() -> None:
    """Execute orders until the input ends."""
    # A sweep includes more workers than this host has cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    answer_orders(lambda spec: by_name(Trainer(spec)))


if __name__ == "__main__":
    main()
