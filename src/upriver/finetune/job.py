"""Define a fine-tuning job: an iterator over (features, targets), and the tail to call on them.

The plan says where the frozen prefix runs, in micro-batches of one size. The job puts the results in order
and finishes them locally up to the freeze point. A training step therefore sees the same bits wherever its
features were computed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from upriver import tracing
from upriver.control.delivery_table import PrefetchWindow
from upriver.control.window_size import told
from upriver.engine.fingerprint import flags, here, numerics
from upriver.errors import (
    CaptureError,
    ConfigError,
    DatasetError,
    FrozenChanged,
    NoFeasibleCut,
    NotExact,
    StoreError,
    UpriverError,
)
from upriver.features.kept import RowsLost
from upriver.finetune.feature_source import FeatureSource, PassWork, forms
from upriver.finetune.model_wrapper import TailRunner
from upriver.finetune.options import JobOptions
from upriver.finetune.planner import PlannedJob
from upriver.finetune.planning.idle_waits import IdleWaits
from upriver.finetune.planning.plan_builder import unsplit_plan, with_notes
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.finetune.prefetch.replay import Placed
from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.finetune.prefetch.step_assembly import Values
from upriver.finetune.preparation.background import Preparation
from upriver.finetune.preparation.snapshot import NoSnapshot
from upriver.finetune.replanner import StepClock, Switch
from upriver.finetune.report import Report
from upriver.finetune.unavailable import Availability
from upriver.pipeline import Dataset
from upriver.program.eval_mode import in_eval
from upriver.program.freeze import InEval
from upriver.program.module_state.frozen_guard import FrozenGuard
from upriver.program.split.split import Split
from upriver.rpc import validation
from upriver.rpc.discovery import DirectoryFollower
from upriver.rpc.link_meter import LinkMeter, metered
from upriver.rpc.link_probe import QuietLink
from upriver.rpc.server_pool import ServerPool, ServerStatus
from upriver.rpc.tolerance import Agreement, Mode, tolerance
from upriver.rpc.validation import Indexed
from upriver.types import Plan, require_type

log = logging.getLogger("upriver")

STATE_SCHEMA = "upriver.job/1"

ABSENT = {
    "num_ranks": 1,
    "autocast": None,
    "subset": None,
    "freeze_point": None,
    "frozen": None,
    "exact": None,
    "prefix": None,
    "views": None,
}
"""Values to assume for fields that an older state does not have."""

ADVICE = {
    "micro_batch": "; make this one with micro_batch={!r}",
    "freeze_point": "; the other one may have begun before it was captured: try "
    "splitting=Splitting(in_background=True), or False",
}
"""Ways to make a job that fits a state, by the field that differs."""

OF_THE_SPLIT = ("program", "freeze_point", "frozen")
"""Fields that are None where they are not known, and then equal any value."""

PACED_STEPS = 4
"""Training steps after which their pace is known. The samples of the first two are read during the trace."""

LOST = "some kept features cannot be read any more: they are computed anew"

Features: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""The value at the freeze point, or a tuple of all values where several cross it."""


class JobConnection(Protocol):
    """The connection that a job is made through."""

    meter: LinkMeter

    def follow(self, pool: ServerPool) -> DirectoryFollower | None:
        """Keep a pool in step with a directory of servers; return None if the servers are fixed."""

    def forget(self, job: FinetuneJob) -> None:
        """Drop a job that was closed."""


class FinetuneJob:
    """Iterate over an epoch's features and train the tail on them.

    :meth:`~upriver.finetune.session.Near.finetune` returns it. Iterate over the job once an epoch and call it
    on the features it yields. Everything else stays with the model: its parameters, ``state_dict``, hooks,
    and the optimizer that was made for them.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        split: Split,
        options: JobOptions,
        planned: PlannedJob,
        *,
        run: TailRunner,
        guard: FrozenGuard,
        connection: JobConnection,
    ) -> None:
        """Initialize the job; only ``finetune`` calls this.

        A job whose split has no program yet begins the plain way, and waits for :meth:`expect`.

        Args:
            dataset: Training data, read over the metered link.
            run: Runs the tail.
            guard: Detects changes in the frozen part.
            connection: What the job was made through.
        """
        self._model, self._dataset, self._split = model, dataset, split
        self._options, self._planned = options, planned
        self._plan, self._pool, self._replanner = planned.plan, planned.pool, planned.replanner
        self._run, self._guard, self._connection = run, guard, connection
        self._keep_in_eval = InEval(model, split.in_eval)
        self._device = next(model.parameters()).device
        self._clock = StepClock(self._device)
        self._switches: list[Switch] = []
        self._following: DirectoryFollower | None = None
        self._quiet: QuietLink | None = None
        self._waits: IdleWaits | None = None
        self._preparation: Preparation | None = None
        self._may_prepare: tuple[Callable[[], Preparation], Callable[[float], bool]] | None = None
        self._resumed_mode: Mode | None = None
        self._resumed_program: str | None = None
        self._ready = split.program is not None
        self._watch_servers()
        self._closed = False
        self._warned = False
        self._epoch = 0
        self._step = 0
        self._resumed = False
        self._loader: Prefetcher | None = None
        self._work: PassWork | None = None
        self._feed = FeatureSource(
            split,
            options,
            planned,
            chain=dataset.chain,
            device=self._device,
            model_name=type(model).__name__,
        )

    def _watch_servers(self) -> None:
        """Begin to watch the flags that count with these servers, and the servers themselves."""
        self._flags = self._flags_now() if self._split.prefix is not None else None
        self._standing = Availability(self._pool, start=self._dataset.chain.start)
        if self._pool is not None:
            self._following = self._connection.follow(self._pool)
            if self._replanner is not None:
                self._quiet = QuietLink(self._pool, self._link_bytes)
                self._waits = IdleWaits(self._pool, self._replanner.answers)

    # --------------------------------------------------------------------------------- preparation

    @property
    def split(self) -> Split:
        """The two parts of the model."""
        return self._split

    @property
    def feed(self) -> FeatureSource:
        """Source of the job's micro-batches."""
        return self._feed

    def expect(self, preparation: Preparation) -> None:
        """Move over to the program and the servers of a preparation once it has ended, between two steps."""
        self._preparation = preparation

    def may_expect(self, prepare: Callable[[], Preparation], *, pays: Callable[[float], bool]) -> None:
        """Start a preparation after `PACED_STEPS` if it then pays, or when the caller waits for it.

        Args:
            pays: Returns whether the preparation pays if an epoch takes so many seconds.
        """
        self._may_prepare = prepare, pays

    def _start_if_it_pays(self, epoch_s: float) -> None:
        """Start the preparation that may be expected if it pays with epochs of so many seconds."""
        if self._may_prepare is None or not self._may_prepare[1](epoch_s):
            return
        (prepare, _), self._may_prepare = self._may_prepare, None
        try:
            self.expect(prepare())
        except NoSnapshot as error:
            log.info("the job goes on as it began: %s", error)

    def _stop_preparing(self, why: str) -> None:
        """Go on as the job began: nothing is left for a program or for servers to compute."""
        self._may_prepare = None
        if self._preparation is not None:
            self._preparation.close()
            self._preparation = None
            self._plan = replace(self._plan, why=f"the job goes on as it began: {why}")

    def wait_until_split(self, timeout_s: float | None = None) -> bool:
        """Wait until the job is prepared: from then on its frozen part may run on servers.

        Call it between two steps, or before the first. Nothing changes but the time of the first step.

        Args:
            timeout_s: Seconds to wait at most; None waits until the preparation has ended.

        Returns:
            Whether the job is prepared. The reason why not is in the plan.

        Raises:
            ConfigError: If the job was closed.
            NoFeasibleCut: If no cut fits the memory.
            NotExact: As :meth:`Near.finetune`.
        """
        self._check_open()
        self._start_if_it_pays(math.inf)
        if self._preparation is not None:
            self._preparation.wait(timeout_s)
            self._adopt()
        return self._ready

    def _adopt(self) -> None:
        """Go on with the program and the plan of a preparation that has ended."""
        preparation = self._preparation
        if preparation is None or not preparation.done:
            return
        self._preparation = None
        try:
            split, planned = preparation.result()
            self._check_prepared(split, planned, preparation)
        except (ConfigError, FrozenChanged, NoFeasibleCut, NotExact):
            preparation.close()
            raise
        except UpriverError as error:
            preparation.close()
            log.warning("the job goes on as it began, on the compute tier: %s", error)
            self._plan = replace(self._plan, why=f"the job goes on as it began: {error}")
            return
        self._ready, self._planned, self._plan = True, planned, planned.plan
        if planned.pool is None:  # the frozen part as it is written does as well
            return
        self._split, self._pool, self._replanner = split, planned.pool, planned.replanner
        self._feed.adopt(split, planned)
        self._watch_servers()
        log.info(
            "the frozen part is captured; the plan from step %d of epoch %d: %s",
            self._step,
            self._epoch,
            self._plan.why,
        )
        if self._loader is not None and self._work is not None:
            self._feed.take_servers(self._loader, self._plan, self._work)

    def _check_prepared(self, split: Split, planned: PlannedJob, preparation: Preparation) -> None:
        """Check that the program gives the bits that the job had so far, and servers as exact ones.

        Raises:
            CaptureError: If it does not, or this process computes otherwise than when the job began.
            ConfigError: If the state that the job resumed from is of another program.
        """
        resumed, program = self._resumed_program, split.program
        if resumed is not None and program is not None and resumed != program.digest:
            raise ConfigError(
                f"the state is of another job: its program is {resumed!r}, this job's {program.digest!r}"
            )
        if numerics() != preparation.numerics:
            raise CaptureError("the settings that low bits depend on changed while the job was prepared")
        mode, agreement = self._resumed_mode, planned.agreement
        if mode is not None and not agreement.resume(mode):
            raise CaptureError(f"the job to resume was bit for bit, and {agreement.why}")
        if planned.pool is None:  # the job goes on as it is written
            return
        written, reference = self._feed.as_written(self._dataset), preparation.reference
        captured = (
            self._feed.of_canary(self._dataset, split) if reference is None else forms(reference.tensors)
        )
        if captured != written:
            raise CaptureError("the captured frozen part gives other bits than the model as it is written")

    # ------------------------------------------------------------------------------------ training

    def __len__(self) -> int:
        """Return the number of training steps in an epoch."""
        return self._order(self._epoch).num_steps

    def __call__(self, features: Features) -> Any:
        """Run the tail on features that the job yielded and return the model's output.

        A model that was given in ``DistributedDataParallel`` runs inside it, so gradients are averaged.

        Raises:
            ConfigError: If the features do not have the form that the job yields.
            FrozenChanged: If a frozen parameter was written to since the job started, or an attribute,
                submodule or hook of the frozen part was replaced.
        """
        self._check_features(features)
        self._check_autocast()
        self._guard.check_versions()
        self._keep_in_eval()
        eager = self._split.eager
        with contextlib.nullcontext() if eager is None else eager.turn:
            return self._run(features)

    def _check_autocast(self) -> None:
        """Warn once about autocast around a call: the frozen part has already run without it."""
        if (
            not self._warned
            and self._options.autocast is None
            and torch.is_autocast_enabled(self._device.type)
        ):
            self._warned = True
            log.warning(
                "torch.autocast around a job has no effect, as the frozen part has already run: give "
                "finetune(autocast=...) instead"
            )

    def _check_flags(self) -> None:
        """Raise `NotExact` if a numerics flag changed since the job started.

        Frozen stages that run locally would then give other low bits than those that run on servers.
        """
        within = self._planned.agreement.mode == "numeric"
        if within or self._flags is None or (now := self._flags_now()) == self._flags:
            return
        name = next(name for name in now if now[name] != self._flags[name])
        raise NotExact(
            f"{name} was {self._flags[name]!r} when the job started and is {now[name]!r} now: features would "
            "depend on where they are made. Put it back, or start a new job after setting it"
        )

    def _flags_now(self) -> Mapping[str, str]:
        """Return the flags that low bits depend on; without servers, the number of threads may change."""
        return flags() if self._pool is None else here()

    def _check_features(self, features: object) -> None:
        wanted = len(self._split.tail.values)
        if wanted == 1:
            require_type("features", features, torch.Tensor, "what iterating over the job yields")
            return
        given = features if isinstance(features, tuple) else ()
        if len(given) != wanted or not all(isinstance(value, torch.Tensor) for value in given):
            raise ConfigError(
                f"features must be the tuple of {wanted} tensors that iterating over the job yields, got "
                + (f"a tuple of {len(given)}" if given else f"a {type(features).__name__}")
            )

    @property
    def tail(self) -> nn.Module:
        """The rest of the model as a module, with the model's own parameters; called on what the job yields.

        Wrap it, for example in ``DistributedDataParallel(job.tail)``, and call the wrapper in place of the
        job.
        """
        return self._split.tail

    def __iter__(self) -> Iterator[tuple[Features, torch.Tensor]]:
        """Yield (features, targets) of each training step of one epoch, in order.

        Features are one tensor where one value crosses the freeze point, else a tuple of tensors.

        After :meth:`load_state_dict` the iteration continues from that state. After a ``break`` it begins the
        next epoch.

        Raises:
            BadSample: If a stored sample cannot be read and the job was not asked to skip it.
            FrozenChanged: If something in the frozen part changed since the job started.
            NotExact: If low bits count and a numerics flag of this process changed, or its number of threads
                while servers take part.
            ConfigError: If the job was closed.
        """
        self._check_open()
        self._check_flags()
        self._adopt()
        if self._step and not self._resumed:
            self._epoch, self._step = self._epoch + 1, 0
        self._resumed = False
        if self._epoch or self._step:  # otherwise it is the first micro-batch
            self._feed.note_canary(self._dataset)
        self._guard.check_values()
        began, bytes_before = time.perf_counter(), self._link_bytes()
        whole = self._step == 0
        order, steps_s = self._order(self._epoch), list[float]()
        with contextlib.closing(self._steps(order)) as steps:
            for features, targets in tracing.each("step", steps, first=self._step, epoch=self._epoch):
                self._step += 1
                self._clock.begin()
                yield features, targets
                self._guard.check_versions()
                self._check_flags()
                self._adopt()
                self._replan(self._clock.end(len(targets)))
                steps_s.append(time.perf_counter())
                if len(steps_s) == PACED_STEPS:
                    self._start_if_it_pays((steps_s[-1] - steps_s[-2]) * order.num_steps)
        self._guard.check_values()
        if self._feed.kept is not None:
            self._feed.kept.flush()
        if whole:
            self._feed.tally.epoch_s.append(time.perf_counter() - began)
            self._feed.tally.epoch_bytes.append(self._link_bytes() - bytes_before)
        self._epoch, self._step = self._epoch + 1, 0

    def _replan(self, trained: tuple[float, int] | None) -> None:
        """Ask the policy again after a training step, and switch to its plan once the gain has lasted.

        Args:
            trained: Seconds and samples of the last known step, if any.
        """
        self._standing.tell(self._plan, self._store_lost)
        replanner, loader, given = self._replanner, self._loader, self._work
        if replanner is None or loader is None or given is None or self._closed:
            return
        if self._quiet is not None:
            self._quiet.look()
        if self._waits is not None and (wait_s := self._waits.look()) is not None:
            replanner.waits(wait_s)
        found = replanner.after_step(*trained) if trained is not None else None
        if found is None:
            return
        plan, before, after = found
        self._plan = with_notes(plan, *self._planned.notes)
        loader.deal(self._feed.dealt(plan, given), self.window)
        switch = Switch(
            epoch=self._epoch,
            step=self._step,
            routes=plan.routes,
            before=before.epoch_s,
            after=after.epoch_s,
        )
        self._switches.append(switch)
        log.info("%s; %s", switch, told(self.window))

    def _link_bytes(self) -> int:
        return self._connection.meter.total_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this job was closed; make another one with finetune()")

    def _order(self, epoch: int) -> EpochOrder:
        return self._options.order(epoch)

    def _steps(self, order: EpochOrder) -> Generator[tuple[Features, torch.Tensor], None, None]:
        """Yield the steps of an epoch that are left; go on with fewer kept rows where some are lost."""
        while True:
            self.close_loader()
            given = self._feed.work(self._dataset, order, epoch=self._epoch, step=self._step)
            if not given.work.micro_batches and self._epoch + 1 >= (self._options.sampling.views or 1):
                self._stop_preparing("the features of all samples are kept")
            try:
                yield from self._steps_of(given)
            except RowsLost:
                log.warning("%s", LOST)
            else:
                return

    def _steps_of(self, given: PassWork) -> Generator[tuple[Features, torch.Tensor], None, None]:
        pins = self._planned.replay.pins(self._epoch)
        with self._feed.training(self._plan, given, pins=pins) as loader:
            self._loader, self._work = loader, given
            form = self._split.tail.values  # the same before and after moving over
            try:
                for values, ids in self._feed.steps(loader, given, first=self._step):
                    if values is None:
                        raise DatasetError("every sample of a training batch had to be skipped")
                    yield form.one_or_all(values), self._dataset.targets_of(ids).to(values[0].device)
            finally:
                if self._loader is loader:  # closing an old iteration must not end the new one
                    self._loader = None

    # ------------------------------------------------------------------------------------- judging

    def evaluate(self, dataset: Indexed, metric: Any, *, batch_size: int | None = None) -> float:
        """Return a metric over another dataset, without training or shuffling.

        The samples take the same path as in training. Servers take part if they can read the dataset: it must
        lie in the training data's store, and this process must be able to write its index there. Otherwise
        this process reads all of it.

        Targets are numbers of the training data's classes: where the classes differ they are matched by name.

        Args:
            dataset: Held-out samples, or a `torch.utils.data.Subset` of an indexed dataset. Its own input
                stages are used.
            metric: ``metric(outputs, targets)`` giving a mean over the batch, or an object with
                ``update(outputs, targets)`` and ``compute()``.
            batch_size: Samples at once in the tail; defaults to the job's.

        Returns:
            The mean over all samples, or the result of ``compute()``.

        Raises:
            ConfigError: If the job was closed, an argument is invalid, the metric gives no number, or the
                held-out samples have a class that the training data do not have.
            NotExact: As while training.
        """
        self._check_open()
        self._check_flags()
        self._adopt()
        dataset, rows = validation.indexed(dataset)
        if not len(rows):
            raise DatasetError("the dataset is empty")
        all_targets = dataset.targets_among(self._dataset, rows)
        keeps_count = all(callable(getattr(metric, name, None)) for name in ("update", "compute"))
        if not keeps_count and not callable(metric):
            raise ConfigError(f"metric must be a function, or have update() and compute(), got {metric!r}")
        size = self._options.batch_size if batch_size is None else validation.whole("batch_size", batch_size)
        order = EpochOrder(ids=tuple(rows), batch_size=size, micro_batch=self._options.micro_batch)
        dataset = metered(dataset, self._connection.meter)
        form, total, count = self._split.tail.values, 0.0, 0
        with torch.no_grad(), in_eval(self._model):
            for values, ids in self._evaluated(dataset, order):
                targets = all_targets[ids].to(values[0].device)
                outputs = self._run.alone(form.one_or_all(values))
                if keeps_count:
                    metric.update(outputs, targets)
                else:
                    total += validation.number(metric, metric(outputs, targets)) * len(ids)
                count += len(ids)
        if not count:
            raise DatasetError("no sample of the dataset could be evaluated")
        return validation.number(metric, metric.compute()) if keeps_count else total / count

    def _evaluated(self, dataset: Dataset, order: EpochOrder) -> Iterator[tuple[Values, list[int]]]:
        """Yield values and sample ids of each step of a pass over another dataset."""
        servers, step = self._servers_can_read(dataset), 0
        while step < order.num_steps:
            given = self._feed.work_elsewhere(dataset, order, step=step, servers=servers)
            try:
                with self._feed.evaluating(self._plan, given, servers=servers) as loader:
                    for values, ids in self._feed.steps(loader, given, first=step):
                        step += 1
                        if values is not None:
                            yield values, ids
            except RowsLost:
                log.warning("%s", LOST)

    def _servers_can_read(self, dataset: Dataset) -> bool:
        """Return whether servers can read a dataset's samples; publish its index for them."""
        if self._pool is None:
            return False
        if _place(dataset) != _place(self._dataset):
            log.info("evaluating without servers: %r lies in another store than the training data", dataset)
            return False
        try:
            dataset.publish()
        except StoreError as error:
            log.warning("evaluating without servers: the index cannot be written to their store: %s", error)
            return False
        return True

    # ----------------------------------------------------------------------------- state and report

    def state_dict(self) -> dict[str, Any]:
        """Return the job's position as plain data; everything that was yielded counts as done.

        All ranks stand at the same step, so one rank's state serves them all. The sizes that servers may run
        at once (``adapt_batch``) are not part of the state. They change no sample, and resuming cannot
        reproduce low bits that servers chose.
        """
        program, autocast = self._split.program, self._options.autocast
        return {
            "schema": STATE_SCHEMA,
            "epoch": self._epoch,
            "step": self._step,
            "seed": self._options.seed,
            "shuffle": self._options.sampling.shuffle,
            "drop_last": self._options.sampling.drop_last,
            "num_ranks": self._options.num_ranks,
            "autocast": str(autocast).removeprefix("torch.") if autocast is not None else None,
            "batch_size": self._options.batch_size,
            "micro_batch": self._options.micro_batch,
            "dataset": self._dataset.digest,
            "subset": self._options.subset,
            "program": program.digest if program is not None else None,
            "freeze_point": self._split.boundary,
            "frozen": self._guard.digest,
            "exact": self._planned.agreement.mode,
            "prefix": self._options.prefix,
            "views": self._options.sampling.views,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`: the next iteration yields the step after it.

        Raises:
            ConfigError: If the state belongs to another job; names the difference.
        """
        mine = self.state_dict()
        require_type("state", state, Mapping, "from state_dict()")  # type: ignore[type-abstract]
        state = {**ABSENT, **state}
        if set(state) != set(mine):
            parts = (("it has no", mine.keys() - state.keys()), ("it has", state.keys() - mine.keys()))
            found = (f"{words} {', '.join(sorted(map(str, keys)))}" for words, keys in parts if keys)
            raise ConfigError(f"not the state of a fine-tuning job: {'; '.join(found)}")
        for key, value in mine.items():
            known = key not in OF_THE_SPLIT or None not in (state[key], value)
            if key not in ("epoch", "step", "exact") and known and state[key] != value:
                take = ADVICE.get(key, "").format(state[key])
                raise ConfigError(
                    f"the state is of another job: its {key} is {state[key]!r}, this job's {value!r}{take}"
                )
        epoch, step = state["epoch"], state["step"]
        steps = self._order(0).num_steps
        if type(epoch) is not int or type(step) is not int or epoch < 0 or not 0 <= step <= steps:
            raise ConfigError(
                f"epoch must be at least 0 and step lie in 0..{steps}, got {epoch!r} and {step!r}"
            )
        self.close_loader()
        self._resumed_program = state["program"]
        if state["exact"] is not None:
            self._keep_mode(validation.choice("exact", state["exact"], ("bitwise", "numeric")))
        self._epoch, self._step = (epoch + 1, 0) if step == steps else (epoch, step)
        self._resumed = True

    def _keep_mode(self, mode: Mode) -> None:
        """Stay bit for bit, or within the tolerance, as the job was that is resumed.

        Raises:
            ConfigError: If this job was asked for the other mode.
        """
        agreement = self._planned.agreement
        if agreement.exact not in ("auto", mode):
            raise ConfigError(
                f"the state is of another job: its exact is {mode!r}, this job's {agreement.exact!r}; make "
                f"this one with exact={mode!r} or 'auto'"
            )
        self._resumed_mode = mode
        if not agreement.resume(mode):
            self._leave_servers(f"the job to resume was bit for bit, and {agreement.why}")

    def _leave_servers(self, why: str) -> None:
        """Go on without servers, on the compute tier."""
        log.warning("the job goes on without servers: %s", why)
        self._close_servers()
        plan = unsplit_plan(self._plan.policy, self._dataset, stop=self._split.freeze, why=why)
        agreement = Agreement("bitwise", tolerance([]))
        self._planned = replace(self._planned, plan=plan, pool=None, replanner=None, agreement=agreement)
        self._plan, self._pool, self._replanner = plan, None, None
        self._feed.adopt(self._split, self._planned)
        self._watch_servers()

    @property
    def report(self) -> Report:
        """Counts of what has been delivered so far, by source."""
        running = self._loader.report if self._loader is not None else None
        agreement = self._planned.agreement
        exact = agreement.mode or self._options.exact
        counts = self._feed.tally.report(running, exact=exact, tolerance=agreement.allowed)
        faster = self._split.faster
        return counts if faster is None else replace(counts, prefix=faster.kind, prefix_error=faster.error)

    @property
    def exactness(self) -> str:
        """Exactness of the job, in one line: bit for bit, or within which tolerance and why."""
        servers, faster = str(self._planned.agreement), self._split.faster
        if faster is None:
            return servers
        return str(faster) if self._pool is None else f"{faster}; servers {servers} of that"

    @property
    def placed(self) -> Sequence[Placed]:
        """The place where every micro-batch of training so far was last computed; each once, in order.

        Pass it to a later ``finetune(..., replay=job.placed)`` to compute each micro-batch at the same place
        again. The bits are then the same, in a ``numeric`` job too.
        """
        return self._feed.places.all()

    @property
    def plan(self) -> Plan:
        """The plan: where each part runs and why. Print it.

        It says so while servers or the store do not answer, and lists what servers have refused so far.
        """
        if self._closed:
            return self._plan
        if self._preparation is not None:
            return with_notes(self._plan, f"being prepared: {self._preparation.step}")
        kept = self._feed.kept
        remarks = (
            self._standing.refused,
            self._standing.lost(self._plan, self._store_lost),
            kept.remark if kept is not None else "",
            self._feed.begins,
            self._feed.stored.remark,
            self._keep_remark,
        )
        return with_notes(self._plan, *filter(None, remarks))

    @property
    def _keep_remark(self) -> str:
        """Return in words why features are not kept where the options ask for it."""
        chain, keep, views = self._dataset.chain, self._options.keep, self._options.sampling.views
        first, stored = chain.first_draw, keep is not None and keep.store
        if first is None and views is not None:
            return f"views={views} changes nothing, as no input stage draws random numbers"
        if keep is not None and first is not None and views is None and (stored or first == chain.start):
            where = "in the store" if first > chain.start else "on this machine or in the store"
            drawing = chain.stage_at(first + 1).name
            return (
                f"no features are kept {where}, as {drawing} draws anew in each epoch: set Sampling(views=…)"
            )
        none_asked = "no features are kept in the store, as no server is asked"
        return none_asked if stored and self._pool is None else ""

    @property
    def _store_lost(self) -> str:
        return self._loader.store_lost if self._loader is not None else ""

    @property
    def window(self) -> PrefetchWindow:
        """The number and bytes of micro-batches that may be in flight under the plan."""
        return self._feed.window(self._plan)

    @property
    def switches(self) -> Sequence[Switch]:
        """The changes of plan so far, in order."""
        return tuple(self._switches)

    @property
    def servers(self) -> tuple[ServerStatus, ...]:
        """The current status of each server."""
        return self._pool.status() if self._pool is not None else ()

    @property
    def why_unsplit(self) -> str:
        """The reason why the model could not be cut; empty if it could."""
        return self._split.why_not

    def close_loader(self) -> None:
        """Stop fetching and end an iteration under way."""
        if self._loader is not None:
            self._loader.close()

    def close(self) -> None:
        """Stop fetching and disconnect from the servers; no further iteration is possible. Idempotent."""
        self._plan = self.plan  # keep the current remarks: closed servers no longer answer
        self._closed = True
        self.close_loader()
        if self._feed.ahead is not None:
            self._feed.ahead.close()
        if self._feed.kept is not None:
            self._feed.kept.close()
        if self._preparation is not None:
            self._preparation.close()
            self._preparation = None
        self._close_servers()
        self._connection.forget(self)

    def _close_servers(self) -> None:
        if self._following is not None:
            self._following.close()
        if self._pool is not None:
            self._pool.close()
        for beside in (self._quiet, self._waits, self._replanner):
            if beside is not None:
                beside.close()
        self._following = self._quiet = self._waits = None

    def __enter__(self) -> FinetuneJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _place(dataset: Dataset) -> tuple[str, str, str]:
    """Return the location where servers look for a dataset's index."""
    return dataset.store.name, dataset.store.uri, dataset.prefix
