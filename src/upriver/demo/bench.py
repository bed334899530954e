"""Train with either policy, and measure the resources used."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Generator, Iterator

import torch
from torch import nn

from upriver.demo.result import CutShare, TrainingRun
from upriver.demo.settings import DemoSettings, Watcher
from upriver.demo.usage import UsageRecorder, Used
from upriver.finetune.job import FinetuneJob
from upriver.finetune.options import Prefetch
from upriver.finetune.session import Near, connect
from upriver.pipeline import Dataset
from upriver.report.demo_plot import BusySpan
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.local_server import EmbeddedServer

WORKER_TRIALS = (1, 2)
"""Loader threads to try for the plain run. One reads or decodes; two overlap both and reach the link's rate.
With three and four the first batch arrived later, since their reads share the link. Five steps then took 27
and 30 s instead of 25."""

TRIAL_STEPS = 3
"""Training steps of one trial: about 14 seconds over the default link."""

LEARNING_RATE = 1e-3
"""Adam's default. The loss falls steadily with it from the first step."""


class Bench:
    """Run the same training with either policy."""

    def __init__(
        self,
        settings: DemoSettings,
        watch: Watcher,
        model: nn.Module,
        train: Dataset,
        heldout: Dataset,
        server: EmbeddedServer,
    ) -> None:
        self._settings, self._watch = settings, watch
        self._model, self._train, self._heldout = model, train, heldout
        self._server = server

    def try_workers(self) -> dict[int, float]:
        """Return the seconds of the plain run's first steps, by number of loader threads."""
        trials: dict[int, float] = {}
        for workers in WORKER_TRIALS:
            with self._job("nosplit", workers) as (job, model, _):
                began = time.perf_counter()
                steps = self._steps(job, model, _optimizer(model))
                for done, _loss in zip(range(1, TRIAL_STEPS + 1), steps, strict=False):
                    self._watch.advance(f"plain way, trying {workers} loader threads", done, TRIAL_STEPS)
                trials[workers] = time.perf_counter() - began
                steps.close()
        return trials

    def run(
        self, label: str, *, policy: str, num_workers: int
    ) -> tuple[TrainingRun, nn.Module, torch.Tensor]:
        """Train and evaluate with one policy. Return the losses also as one tensor, to compare bits."""
        epochs, link_bytes_per_s = self._settings.epochs, self._settings.link_bytes_per_s
        total = epochs * len(self._train)
        losses: list[torch.Tensor] = []
        bounds: list[float] = []
        busy: list[tuple[BusySpan, ...]] = []
        with self._job(policy, num_workers) as (job, model, near):
            optimizer = _optimizer(model)
            done = 0
            for epoch in range(1, epochs + 1):
                before = Used.now(job, near)
                with UsageRecorder(self._server.pid, near.meter) as recorder:
                    for loss, count in self._steps(job, model, optimizer):
                        losses.append(loss)
                        done += count
                        self._watch.advance(f"{label}, epoch {epoch} of {epochs}", done, total)
                busy.append(recorder.busy(link_bytes_per_s))
                bounds.append(Used.now(job, near).since(before).bound_s(link_bytes_per_s))
                self._watch.say(
                    f"{label}, epoch {epoch}: {job.report.epoch_s[-1]:.1f} s, loss {losses[-1].item():.4f}"
                )
            accuracy = job.evaluate(self._heldout, _accuracy)
            names = {row.cut: row.name for row in job.plan.table}
            report = job.report
            way = TrainingRun(
                epoch_s=report.epoch_s,
                epoch_bytes=report.epoch_bytes,
                losses=tuple(loss.item() for loss in losses),
                accuracy=accuracy,
                parts=tuple(
                    CutShare(cut=route.cut, after=names.get(route.cut, "as stored"), share=route.share)
                    for route in job.plan.routes
                ),
                why=job.plan.why,
                plan=str(job.plan),
                bound_s=tuple(bounds),
                samples=report.samples,
                num_workers=num_workers,
                busy=tuple(busy),
            )
        return way, model, torch.stack(losses)

    def _steps(
        self, job: FinetuneJob, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Generator[tuple[torch.Tensor, int], None, None]:
        """Run one epoch of an ordinary training loop, and yield (loss, samples) of each step."""
        model.train()
        for inputs, targets in job:
            loss = nn.functional.cross_entropy(job(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), len(targets)

    @contextlib.contextmanager
    def _job(self, policy: str, num_workers: int) -> Iterator[tuple[FinetuneJob, nn.Module, Near]]:
        """Open a separate job: the initial model, and a link counted from zero."""
        settings = self._settings
        model = copy.deepcopy(self._model)
        torch.manual_seed(settings.seed)
        meter = LinkMeter(settings.link_bytes_per_s)
        with connect(self._server.url, meter=meter) as near:
            job = near.finetune(
                model,
                self._train,
                batch_size=settings.batch_size,
                policy=policy,
                seed=settings.seed,
                prefetch=Prefetch(num_workers=num_workers),
                keep=None,  # both ways compute what each epoch needs
                on_progress=self._watch.say,
            )
            yield job, model, near


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trainable, lr=LEARNING_RATE)


def _accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs.argmax(1) == targets).float().mean())


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two models hold the same names and bits, in parameters and buffers."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
