"""A fine-tuning job: an iterator over (features, targets), and the tail to call on them.

The frozen prefix runs where the plan says, in micro-batches of one size; what comes back is put in order and
finished here up to the freeze point, so a training step sees the same bits wherever its features were
computed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from upriver.client import checks
from upriver.client.flow import first_micro_batch, steps
from upriver.client.loader import LOCAL, Loader, LoaderReport, Remote
from upriver.client.local import LocalSource
from upriver.client.order import EpochOrder, epoch_order
from upriver.client.pool import ServerPool, ServerStatus
from upriver.client.servers import Question
from upriver.client.slots import Way, Window
from upriver.engine.clock import Clock
from upriver.engine.engine import Engine, OnBadSample
from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import Dataset
from upriver.program.freeze import FrozenGuard, keep_in_eval
from upriver.program.split import Split
from upriver.program.trace import in_eval
from upriver.protocol import RunRequest
from upriver.types import MicroBatch, Plan, Timings, require_type

log = logging.getLogger("upriver")

STATE_SCHEMA = "upriver.job/1"

MIN_WINDOW = 8
"""Micro-batches in flight at least: with a mix of routes a window of 8 came to 1.03 times the bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What a job was asked for; see :meth:`upriver.client.connect.Near.finetune`."""

    batch_size: int
    micro_batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    on_bad_sample: OnBadSample
    num_workers: int
    connections: int
    per_request: int
    window_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a job has delivered, and where it was computed.

    Attributes:
        samples: Server URL or ``local`` to samples.
        retried: Micro-batches that had to be asked for again.
        skipped: Ids of samples that could not be read and were left out, in the order in which they were due.
        epoch_s: Wall-clock seconds of each finished epoch, the caller's training steps included.
        epoch_bytes: Bytes that crossed the link in each finished epoch.
        phases: Seconds by source and phase (``local``, or a server's URL).
    """

    samples: Mapping[str, int]
    retried: int
    skipped: tuple[int, ...]
    epoch_s: tuple[float, ...]
    epoch_bytes: tuple[int, ...]
    phases: Mapping[str, Mapping[str, float]]

    @property
    def shares(self) -> dict[str, float]:
        """Share of the delivered samples by source."""
        total = sum(self.samples.values())
        return {source: count / total for source, count in self.samples.items()} if total else {}


@dataclass(kw_only=True, slots=True)
class _Tally:
    samples: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    skipped: list[int] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)
    epoch_bytes: list[int] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, report: LoaderReport) -> None:
        """Add what a loader delivered."""
        for source, count in report.samples.items():
            self.samples[source] = self.samples.get(source, 0) + count
        self.retried += report.retried
        self.skipped += report.skipped

    def timings(self, source: str, timings: Timings) -> None:
        """Add one micro-batch's phases."""
        phases = self.phases.setdefault(source, {})
        for name, seconds in timings.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One micro-batch's route, for replaying a numeric run: where it came from and at which cut."""

    epoch: int
    index: int
    source: str
    cut: int


class FinetuneJob:
    """What :meth:`~upriver.client.connect.Near.finetune` gives.

    Iterate over it once an epoch; call it on the features it yields. Everything else stays the model's: its
    parameters, ``state_dict``, hooks, and the optimizer that was made for them.

    Attributes:
        plan: Where each part runs and why; print it.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        split: Split,
        plan: Plan,
        options: JobOptions,
        *,
        pool: ServerPool | None,
        link_bytes: Callable[[], int],
    ) -> None:
        """Made by ``finetune``."""
        self.plan = plan
        self._model = model
        self._dataset = dataset
        self._split = split
        self._options = options
        self._pool = pool
        self._link_bytes = link_bytes
        self._closed = False
        self._device = next(model.parameters()).device
        self._guard = FrozenGuard(model, list(split.prefix_units))
        self._epoch = 0
        self._step = 0
        self._resumed = False
        self._loader: Loader | None = None
        self._tally = _Tally()
        self._placed: list[Placed] = []

    # ------------------------------------------------------------------------------------ training

    def __len__(self) -> int:
        """Training steps of an epoch."""
        return self._order(self._epoch).num_steps

    def __call__(self, features: torch.Tensor) -> Any:
        """The model's answer, from what the job yielded: runs only what is left of the model.

        Raises:
            FrozenChanged: If a frozen parameter was written to since the job started.
        """
        require_type("features", features, torch.Tensor, "what iterating over the job yields")
        self._guard.check_versions()
        keep_in_eval(self._model, list(self._split.in_eval))
        return self._split.tail(features)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch: (features, targets) of each training step, in order.

        After :meth:`load_state_dict` it goes on where that state was taken; after a ``break`` it begins the
        next epoch.

        Raises:
            BadSample: If a stored sample cannot be read and the job was not asked to skip it.
            FrozenChanged: If a frozen parameter changed since the job started.
            ConfigError: If the job was closed.
        """
        self._check_open()
        if self._step and not self._resumed:
            self._epoch, self._step = self._epoch + 1, 0
        self._resumed = False
        self._guard.check_values()
        began, bytes_before = time.perf_counter(), self._link_bytes()
        whole = self._step == 0
        order = self._order(self._epoch)
        with contextlib.closing(self._steps(order)) as steps:
            for features, targets in steps:
                self._step += 1
                yield features, targets
                self._guard.check_versions()
        self._guard.check_values()
        if whole:
            self._tally.epoch_s.append(time.perf_counter() - began)
            self._tally.epoch_bytes.append(self._link_bytes() - bytes_before)
        self._epoch, self._step = self._epoch + 1, 0

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this job was closed; make another one with finetune()")

    def _order(self, epoch: int) -> EpochOrder:
        options = self._options
        return epoch_order(
            len(self._dataset),
            seed=options.seed,
            epoch=epoch,
            batch_size=options.batch_size,
            micro_batch=options.micro_batch,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
        )

    def _steps(self, order: EpochOrder) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        self.close_loader()
        with self._loading(
            self._dataset, order, epoch=self._epoch, first=self._step, log_routes=True
        ) as loader:
            self._loader = loader
            finish = self._finisher(self._dataset, self._epoch)
            for features, ids in steps(loader, order, finish=finish, first=self._step):
                if features is None:
                    raise DatasetError("every sample of a training batch had to be skipped")
                yield features, self._dataset.targets[ids].to(features.device)

    @contextlib.contextmanager
    def _loading(
        self, dataset: Dataset, order: EpochOrder, *, epoch: int, first: int = 0, log_routes: bool = False
    ) -> Iterator[Loader]:
        """A loader for one pass over a dataset; what it delivered is added up when it ends."""

        def note(index: int, source: str, timings: Timings) -> None:
            tally.timings(source, timings)
            if log_routes:
                placed.append(
                    Placed(epoch=epoch, index=index, source=source, cut=0 if source == LOCAL else cut)
                )

        tally, placed, cut = self._tally, self._placed, self.plan.cut  # the loader must not hold the job
        loader = Loader(
            order.micro_batches,
            local=LocalSource(
                dataset=dataset,
                engine=self._engine(dataset),
                seed=self._options.seed,
                epoch=epoch,
                on_bad_sample=self._options.on_bad_sample,
            ),
            first=first_micro_batch(order, first),
            remote=self._remote(dataset, order, epoch),
            window=self._window(),
            num_workers=self._options.num_workers,
            expected_bytes=self._expected_bytes(),
            on_timings=note,
        )
        try:
            yield loader
        finally:
            loader.close()
            if self._loader is loader:  # an evaluation in mid-epoch has a loader of its own
                self._loader = None
            tally.add(loader.report)

    def _finisher(self, dataset: Dataset, epoch: int) -> Callable[[MicroBatch], torch.Tensor]:
        """What runs the rest of the prefix on a micro-batch, here, up to the freeze point."""
        engine = self._engine(dataset)

        def finish(batch: MicroBatch) -> torch.Tensor:
            clock = Clock()
            # Only input stages can find a sample bad, and name its object; as a rule they have run.
            names = [ref.object for ref in dataset.locate(batch.ids)] if batch.position < 0 else []
            done = engine.resume(
                batch,
                object_names=names,
                stop=self._split.freeze,
                seed=self._options.seed,
                epoch=epoch,
                on_bad_sample=self._options.on_bad_sample,
                clock=clock,
            )
            self._tally.timings("finish", clock.timings())
            return done.tensors[0].to(self._device)

        return finish

    def _engine(self, dataset: Dataset) -> Engine:
        program, micro_batch = self._split.program, self._options.micro_batch
        return Engine(chain=dataset.chain, program=program, micro_batch=micro_batch)

    def _remote(self, dataset: Dataset, order: EpochOrder, epoch: int) -> Remote | None:
        program, cut = self._split.program, self.plan.cut
        if self._pool is None or program is None or cut == dataset.chain.start:
            return None
        question = Question(
            dataset=dataset,
            program=program,
            seed=self._options.seed,
            on_bad_sample=self._options.on_bad_sample,
        )
        micro_batches = order.micro_batches

        def make_request(indices: Sequence[int]) -> RunRequest:
            return question.request([micro_batches[i] for i in indices], stop=cut, epoch=epoch)

        return Remote(
            pool=self._pool,
            make_request=make_request,
            connections=self._options.connections,
            per_request=self._options.per_request,
        )

    def _window(self) -> Window:
        """About two training batches, and never less than keeps every connection busy."""
        options = self._options
        two_batches = -(-2 * options.batch_size // options.micro_batch)
        return Window(micro_batches=max(two_batches, MIN_WINDOW), num_bytes=options.window_bytes)

    def _expected_bytes(self) -> dict[Way, int]:
        program = self._split.program
        if program is None:
            return {}
        cut = max(self.plan.cut, 0)
        crossing = program.stages[cut - 1].out_bytes if cut else program.graph.input_bytes
        size = self._options.micro_batch
        return {Way.REMOTE: int(crossing * size), Way.LOCAL: int(program.graph.input_bytes * size)}

    # ------------------------------------------------------------------------------------- judging

    def evaluate(self, dataset: Dataset, metric: Any, *, batch_size: int | None = None) -> float:
        """A metric over another dataset, which takes the same path; nothing is trained, nothing is shuffled.

        Args:
            dataset: Held-out samples; its own input stages are used.
            metric: ``metric(outputs, targets)`` giving a mean over the batch, or an object with
                ``update(outputs,
                targets)`` and ``compute()``.
            batch_size: Samples at once in the tail; the job's where not given.

        Returns:
            The mean over all samples, or what ``compute()`` gives.

        Raises:
            ConfigError: If the job was closed, or an argument is none that can be used.
        """
        self._check_open()
        require_type("dataset", dataset, Dataset, "from upriver.index()")
        keeps_count = all(callable(getattr(metric, name, None)) for name in ("update", "compute"))
        if not keeps_count and not callable(metric):
            raise ConfigError(f"metric must be a function, or have update() and compute(), got {metric!r}")
        size = self._options.batch_size if batch_size is None else checks.whole("batch_size", batch_size)
        order = EpochOrder(
            ids=tuple(range(len(dataset))), batch_size=size, micro_batch=self._options.micro_batch
        )
        if self._pool is not None:
            dataset.publish()
        finish = self._finisher(dataset, epoch=0)
        total, count = 0.0, 0
        with (
            self._loading(dataset, order, epoch=0) as loader,
            torch.no_grad(),
            in_eval(self._model),
        ):
            for features, ids in steps(loader, order, finish=finish):
                if features is None:
                    continue
                targets = dataset.targets[ids].to(features.device)
                outputs = self._split.tail(features)
                if keeps_count:
                    metric.update(outputs, targets)
                else:
                    total += float(metric(outputs, targets)) * len(ids)
                count += len(ids)
        if not count:
            raise DatasetError("no sample of the dataset could be evaluated")
        return float(metric.compute()) if keeps_count else total / count

    # ----------------------------------------------------------------------------- state and report

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, as plain data: what was yielded counts as done."""
        program = self._split.program
        return {
            "schema": STATE_SCHEMA,
            "epoch": self._epoch,
            "step": self._step,
            "seed": self._options.seed,
            "shuffle": self._options.shuffle,
            "drop_last": self._options.drop_last,
            "batch_size": self._options.batch_size,
            "micro_batch": self._options.micro_batch,
            "dataset": self._dataset.digest,
            "program": program.digest if program is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken: the next iteration yields the step after it.

        Raises:
            ConfigError: If the state is of another job; names what differs.
        """
        mine = self.state_dict()
        require_type("state", state, Mapping, "from state_dict()")  # type: ignore[type-abstract]
        if set(state) != set(mine):
            raise ConfigError(f"not the state of a fine-tuning job: fields {sorted(map(str, state))}")
        for key, value in mine.items():
            if key not in ("epoch", "step") and state[key] != value:
                raise ConfigError(
                    f"the state is of another job: its {key} is {state[key]!r}, this job's {value!r}"
                )
        epoch, step = state["epoch"], state["step"]
        steps = self._order(0).num_steps
        if type(epoch) is not int or type(step) is not int or epoch < 0 or not 0 <= step <= steps:
            raise ConfigError(
                f"epoch must be at least 0 and step lie in 0..{steps}, got {epoch!r} and {step!r}"
            )
        self.close_loader()
        self._epoch, self._step = (epoch + 1, 0) if step == steps else (epoch, step)
        self._resumed = True

    @property
    def report(self) -> Report:
        """What was delivered so far, and from where."""
        tally = self._tally
        samples, retried, skipped = dict(tally.samples), tally.retried, list(tally.skipped)
        if self._loader is not None:
            running = self._loader.report
            for source, count in running.samples.items():
                samples[source] = samples.get(source, 0) + count
            retried += running.retried
            skipped += running.skipped
        return Report(
            samples=samples,
            retried=retried,
            skipped=tuple(skipped),
            epoch_s=tuple(tally.epoch_s),
            epoch_bytes=tuple(tally.epoch_bytes),
            phases={source: dict(phases) for source, phases in tally.phases.items()},
        )

    @property
    def placed(self) -> Sequence[Placed]:
        """The route of every micro-batch of training so far."""
        return tuple(self._placed)

    @property
    def servers(self) -> tuple[ServerStatus, ...]:
        """The servers as they stand."""
        return self._pool.status() if self._pool is not None else ()

    @property
    def why_unsplit(self) -> str:
        """Why the model could not be cut; empty when it could."""
        return self._split.why_not

    def close_loader(self) -> None:
        """Stop fetching; an iteration under way ends."""
        if self._loader is not None:
            self._loader.close()

    def close(self) -> None:
        """Stop fetching and let the servers go; no further iteration. May be called again."""
        self._closed = True
        self.close_loader()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> FinetuneJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
