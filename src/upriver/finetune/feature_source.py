"""Supply a job's micro-batches: a loader for each pass over a dataset, and the rest of the prefix."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from upriver.control.delivery_table import DealtRoute, Pin, PrefetchWindow, Received, Way
from upriver.control.route_dealing import besides, deal
from upriver.control.window_size import told, window_for
from upriver.engine.clock import Clock
from upriver.engine.engine import Engine
from upriver.errors import CaptureError, UpriverError
from upriver.features import Row
from upriver.features.kept import KeptFeatures, KeptStretch
from upriver.features.unchanged import unchanged
from upriver.finetune.calibration.server_gate import JobRequirements
from upriver.finetune.earlier_rows import EarlierPoint, EarlierRows
from upriver.finetune.options import JobOptions
from upriver.finetune.planner import PlannedJob
from upriver.finetune.planning.keep_planning import stored_share
from upriver.finetune.prefetch.fetch_threads import LOCAL, Finish, RemoteFetch
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.finetune.prefetch.read_ahead import ReadAhead
from upriver.finetune.prefetch.replay import PlacementLog
from upriver.finetune.prefetch.sampler import EpochOrder, EpochWork
from upriver.finetune.prefetch.step_assembly import Values, steps
from upriver.finetune.report import JobTally
from upriver.finetune.row_check import RowCheck
from upriver.finetune.stored_features import StoredFeatures
from upriver.pipeline import Dataset, InputChain
from upriver.program.freeze import fold
from upriver.program.split.frozen_name import frozen_name
from upriver.program.split.split import Split
from upriver.protocol import KEPT, RunRequest
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.server_pool import ServerPool
from upriver.types import MicroBatch, Plan, Tier, Timings

log = logging.getLogger("upriver")

Form = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Digest of a tensor's values, its type, shape and strides."""


def forms(tensors: Sequence[torch.Tensor]) -> tuple[Form, ...]:
    """Return what tells tensors apart without keeping them."""
    return tuple((fold(each), each.dtype, tuple(each.shape), each.stride()) for each in tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassWork:
    """Describe one pass over a dataset: the micro-batches to compute, and the rows that are kept.

    Attributes:
        epoch: Epoch of the job, for the log of places.
        drawn: Epoch as which the input stages draw.
        work: Micro-batches to compute.
        stretch: Rows that are kept and found in this pass; None if none are.
        usable: Samples whose rows may be used.
        earlier: Rows of other samples after an earlier freeze point; None if there are none.
        store_cut: Cut after which servers keep rows in the store; None if they keep none.
    """

    dataset: Dataset
    order: EpochOrder
    epoch: int
    drawn: int
    work: EpochWork
    stretch: KeptStretch | None = None
    usable: frozenset[int] = frozenset()
    earlier: EarlierRows | None = None
    store_cut: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptInputs:
    """Samples that are kept among the input stages, for a `LocalSource`."""

    position: int
    stretch: KeptStretch
    dataset: Dataset
    usable: frozenset[int]

    def find(self, ids: Sequence[int]) -> dict[int, torch.Tensor]:
        wanted = [sample for sample in ids if sample in self.usable]
        return {sample: row[0] for sample, row in self.stretch.found(self.dataset, wanted).items()}

    def keep(self, batch: MicroBatch) -> None:
        pairs = zip(batch.ids, batch.tensors, strict=True)
        self.stretch.keep(
            self.dataset, {sample: (value,) for sample, value in pairs if sample not in batch.skipped}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Anew:
    """Features that the frozen part gave when rows of other jobs were checked.

    Attributes:
        drawn: Epoch as which the input stages drew.
        forms: Forms of each sample's row.
    """

    dataset: Dataset
    drawn: int
    forms: Mapping[int, tuple[Form, ...]]


class FeatureSource:
    """Make loaders and keep what they delivered.

    A feed holds no reference to its job, so the job can be collected.

    Args:
        chain: Input stages of the training data; plans name its cuts, and canaries cover them.
        device: Where the tail runs.
        model_name: Name of the model's class, for those who list what is kept.

    Attributes:
        tally: What finished passes have delivered.
        places: Where the micro-batches of training were computed.
        eager_s: Least seconds of a micro-batch of the frozen part as it is written; None if none has run.
        canary: Forms of the features of the job's first micro-batch, as it is written; None if it has not
            run.
        kept: Room for kept features; None if none are kept.
        stored: Features that servers keep near the data.
        ahead: Samples that were read while the model was traced; None if none were.
        earlier: Freeze points of other jobs, whose kept rows this job may begin with.
        begins: How many samples of the last pass with any did so, in words; empty if none did.
    """

    def __init__(
        self,
        split: Split,
        options: JobOptions,
        planned: PlannedJob,
        *,
        chain: InputChain,
        device: torch.device,
        model_name: str,
    ) -> None:
        self._options, self._chain, self._device, self._model_name = options, chain, device, model_name
        self.kept: KeptFeatures | None = None
        self.stored = StoredFeatures()
        self.ahead: ReadAhead | None = None
        self.earlier: tuple[EarlierPoint, ...] = ()
        self.begins = ""
        if options.keep is not None:
            self.kept = KeptFeatures(
                options.keep,
                micro_batch=options.micro_batch,
                seed=options.seed,
                device=device,
                saved_s=self._saved_s,
            )
        self.tally = JobTally()
        self.places = PlacementLog()
        self.eager_s: float | None = None
        self.canary: tuple[Form, ...] | None = None
        self._anew: _Anew | None = None
        self._outlined: str | None = None
        self._check = RowCheck(
            options.micro_batch,
            source=lambda dataset, drawn: self._local(dataset, drawn, remote=False),
            finish=lambda batch, dataset: self._resume(batch, dataset, self._split, 0, Clock()),
            rows_of=self._rows_of_values,
        )
        self.adopt(split, planned)

    def outlined(self, digest: str) -> None:
        """Find kept rows by the digest of the outline that the job begins with."""
        self._outlined = digest
        self._name_rows()

    def _name_rows(self) -> None:
        program = self._split.captured
        if self.kept is not None and (self._outlined is not None or program is not None):
            about = f"{self._model_name} up to {self._split.boundary}"
            self.kept.frozen = frozen_name(self._outlined, program, about=about)

    def adopt(self, split: Split, planned: PlannedJob) -> None:
        """Go on with the program and the servers of a split that was prepared meanwhile."""
        self._split = split
        self._pool, self._replanner, self._larger = planned.pool, planned.replanner, planned.offers
        self._agreement, self._plan, self._model = planned.agreement, planned.plan, planned.model
        if self.kept is not None and self._may_keep(self.kept):
            self._name_rows()

    def take_servers(self, loader: Prefetcher, plan: Plan, given: PassWork) -> None:
        """Let the servers take part in an epoch of training that began without them."""
        dealt = self.dealt(plan, given)
        remote = self._remote(self._pool, given, {}, dealt)
        if remote is not None:
            loader.take_servers(
                remote,
                local=self._local(given.dataset, given.drawn, remote=True, kept=self._kept_inputs(given)),
                dealt=dealt,
                window=self.window(plan),
                expected_bytes=self._expected_bytes(),
            )

    @contextlib.contextmanager
    def training(self, plan: Plan, given: PassWork, *, pins: Mapping[int, Pin]) -> Iterator[Prefetcher]:
        """Provide a loader for the rest of an epoch of training; log where micro-batches come from.

        Args:
            pins: Micro-batches that must come from a certain place.
        """
        places, epoch, work = self.places, given.epoch, given.work
        level = logging.INFO if self._agreement.mode == "numeric" else logging.DEBUG

        def note(index: int, source: str, came: Received, timings: Timings) -> None:
            if not work.is_packed:  # else these are no micro-batches of the epoch
                places.note(epoch=epoch, index=index, source=source, cut=came.position)
            if self.kept is not None:
                places.note_rows(work.micro_batches[index], source=source, cut=came.position)
            log.log(level, "epoch %d, micro-batch %d: %s, cut %d", epoch, index, source, came.position)
            if (replanner := self._replanner) is not None and KEPT not in timings.phases:
                tier = Tier.COMPUTE if source == LOCAL else Tier.STORAGE
                replanner.saw(tier, timings, sent_bytes=came.num_bytes)

        def saw(timings: Timings) -> None:
            if (replanner := self._replanner) is not None:
                replanner.saw(Tier.COMPUTE, timings)

        log.info("%s", told(self.window(plan)))
        with self._loading(
            plan,
            given,
            dealt=self.dealt(plan, given),
            pool=self._pool,
            pins=pins,
            note=note,
            saw=saw,
            canary=given.order.micro_batches[0] if epoch == 0 and not work.is_packed else None,
        ) as loader:
            yield loader

    @contextlib.contextmanager
    def evaluating(self, plan: Plan, given: PassWork, *, servers: bool) -> Iterator[Prefetcher]:
        """Provide a loader for one pass over a separate dataset.

        Args:
            servers: Whether servers can read the dataset; if not, this process makes every micro-batch.
        """

        def note(index: int, source: str, came: Received, timings: Timings) -> None:
            pass

        with self._loading(
            plan,
            given,
            dealt=self._dealt_elsewhere(plan, given, servers=servers),
            pool=self._pool if servers else None,
            pins={},
            note=note,
            saw=lambda timings: None,
        ) as loader:
            yield loader

    def dealt(self, plan: Plan, given: PassWork) -> tuple[DealtRoute, ...]:
        """Return the route of each micro-batch: to servers that have its rows, else as the plan says."""
        stored, count, cut = given.work.stored, len(given.work.micro_batches), given.store_cut
        start = self._chain.start
        if cut is None or not stored:
            return deal(plan.routes, count, start=start)
        routes = besides(plan.routes, cut=cut, share=len(stored) / count)
        others = iter(deal(routes, count - len(stored), start=start))
        near = DealtRoute(way=Way.REMOTE, cut=cut)
        return tuple(near if index in stored else next(others) for index in range(count))

    def _dealt_elsewhere(self, plan: Plan, given: PassWork, *, servers: bool) -> tuple[DealtRoute, ...]:
        """Return the routes of another dataset's micro-batches, as close to the plan's as possible.

        In another chain a cut below 0 may lie behind other stages, or may not exist, so no canary has covered
        it. Micro-batches with such a cut are made locally.
        """
        chain = given.dataset.chain
        hands = self.dealt(plan, given)
        first = self._chain.start if chain == self._chain else 0
        here = DealtRoute(way=Way.LOCAL, cut=chain.start)
        return tuple(hand if servers and hand.cut >= first else here for hand in hands)

    @contextlib.contextmanager
    def _loading(
        self,
        plan: Plan,
        given: PassWork,
        *,
        dealt: Sequence[DealtRoute],
        pool: ServerPool | None,
        pins: Mapping[int, Pin],
        note: Callable[[int, str, Received, Timings], None],
        saw: Callable[[Timings], None],
        canary: tuple[int, ...] | None = None,
    ) -> Iterator[Prefetcher]:
        """Provide a loader for one pass, and add up what it delivered when the pass ends.

        Args:
            note: Called for each micro-batch handed out.
            saw: Called with the timings of the rest of the prefix, run locally.
        """
        tally = self.tally

        def count(index: int, source: str, came: Received, timings: Timings) -> None:
            tally.timings(source, timings)
            note(index, source, came, timings)

        remote = self._remote(pool, given, pins, dealt)
        loader = Prefetcher(
            given.work.micro_batches,
            local=self._local(
                given.dataset, given.drawn, remote=remote is not None, kept=self._kept_inputs(given)
            ),
            first=given.work.first,
            remote=remote,
            window=self.window(plan),
            num_workers=self._options.prefetch.worker_threads,
            expected_bytes=self._expected_bytes(),
            on_timings=count,
            finish=self._finisher(given, saw, canary),
            pins=pins,
            dealt=dealt,
        )
        try:
            yield loader
        finally:
            loader.close()
            tally.add(loader.report)

    def _local(
        self, dataset: Dataset, epoch: int, *, remote: bool, kept: _KeptInputs | None = None
    ) -> LocalSource:
        """Return the source of the plain way.

        Args:
            epoch: Epoch as which the input stages draw.
            remote: Whether servers answer over the same link.
        """
        meter = dataset.store.observer
        return LocalSource(
            dataset=dataset,
            engine=self._engine(dataset, self._split),
            seed=self._options.seed,
            epoch=epoch,
            on_bad_sample=self._options.sampling.on_bad_sample,
            shared=meter if remote and isinstance(meter, LinkMeter) else None,
            kept=kept,
            ahead=self.ahead,
        )

    def values(self, batch: MicroBatch) -> Values:
        """Return the values at the freeze point, on the device where the tail runs, in its types."""
        return self._split.tail.values.as_read([value.to(self._device) for value in batch.tensors])

    def _finisher(
        self, given: PassWork, saw: Callable[[Timings], None], canary: tuple[int, ...] | None
    ) -> Finish:
        """Return a function that runs the rest of the prefix locally on a micro-batch.

        Args:
            canary: Sample ids of the job's canary, if it is among this pass's micro-batches.
        """
        inputs, dataset, epoch = self._kept_inputs(given), given.dataset, given.drawn

        def finish(batch: MicroBatch) -> MicroBatch:
            clock, split = Clock(), self._split  # a program may have come meanwhile
            if inputs is not None and batch.position <= inputs.position:
                batch = self._resume(batch, dataset, split, epoch, clock, stop=inputs.position)
                inputs.keep(batch)
            if given.stretch is not None and inputs is None and batch.position == 0:
                self._check.note(given.stretch, dataset, batch)
            done = self._resume(batch, dataset, split, epoch, clock)
            self.tally.timings("finish", clock.timings())
            saw(clock.timings())
            if split.eager is not None:
                self._saw_eager(done, clock.timings(), canary=batch.ids == canary)
            if given.stretch is not None and inputs is None:
                given.stretch.keep(dataset, self._check.rows_of(done))
            return done

        return finish

    def of_canary(self, dataset: Dataset, split: Split) -> tuple[Form, ...]:
        """Return the features of the job's canary, of the training data, by the prefix of a split."""
        batch, _ = self._local(dataset, 0, remote=False)(self._options.order(0).micro_batches[0])
        return forms(self._resume(batch, dataset, split, 0, Clock()).tensors)

    def _resume(
        self,
        batch: MicroBatch,
        dataset: Dataset,
        split: Split,
        epoch: int,
        clock: Clock,
        *,
        stop: int | None = None,
    ) -> MicroBatch:
        """Return a micro-batch after the rest of a split's prefix, or at ``stop``, run locally."""
        # Only input stages can find a sample bad and need its object's name. Usually they have run already.
        names = [ref.object for ref in dataset.locate(batch.ids)] if batch.position < 0 else []
        return self._engine(dataset, split).resume(
            batch,
            object_names=names,
            stop=split.freeze if stop is None else stop,
            seed=self._options.seed,
            epoch=epoch,
            on_bad_sample=self._options.sampling.on_bad_sample,
            clock=clock,
        )

    # ------------------------------------------------------------------------------- kept features

    def work(self, dataset: Dataset, order: EpochOrder, *, epoch: int, step: int) -> PassWork:
        """Return the rest of an epoch of training, with the rows that are kept now."""
        first, chain = dataset.chain.first_draw, dataset.chain
        position = None if self._options.sampling.views is not None else first
        given = self._pass(
            dataset,
            order,
            epoch=epoch,
            drawn=self._options.view(epoch),
            step=step,
            position=position,
            keeps=position != chain.start,
            servers=True,
        )
        if given.work.is_packed:
            self.note_canary(dataset)
            self.places.note_kept(order.micro_batches, epoch=epoch)
        return given

    def work_elsewhere(self, dataset: Dataset, order: EpochOrder, *, step: int, servers: bool) -> PassWork:
        """Return a pass over another dataset from a step on; its input stages draw as in epoch 0.

        Args:
            servers: Whether servers can read the dataset.
        """
        return self._pass(
            dataset, order, epoch=0, drawn=0, step=step, position=None, keeps=True, servers=servers
        )

    def steps(
        self, loader: Prefetcher, given: PassWork, *, first: int
    ) -> Iterator[tuple[Values | None, list[int]]]:
        """Yield values at the freeze point and sample ids of each step, from the first one on.

        Raises:
            RowsLost: If a kept row cannot be read any more; the step is then still due.
        """
        form = self._split.tail.values  # the same before and after moving over
        kept = partial(self._kept_values, given)
        return steps(loader, given.order, given.work, form=form, finish=self.values, kept=kept, first=first)

    def _pass(
        self,
        dataset: Dataset,
        order: EpochOrder,
        *,
        epoch: int,
        drawn: int,
        step: int,
        position: int | None,
        keeps: bool,
        servers: bool,
    ) -> PassWork:
        """Return a pass from a step on, in which rows are kept after a cut.

        Args:
            position: Cut before the first random stage; None for the freeze point.
            keeps: Whether rows can be kept there.
            servers: Whether servers can read the dataset.
        """
        stretch, usable = None, frozenset[int]()
        earlier, begun = None, frozenset[int]()
        store_cut, stored, ids = None, frozenset[int](), order.ids[order.step(step)[0] :]
        if keeps and self.kept is not None and self._may_keep(self.kept):
            draws = position is None and dataset.chain.first_draw is not None
            view = drawn if draws else None
            stretch = self.kept.stretch(dataset, position=position, view=view)
            stretch.refresh()
            usable = self._usable(stretch, dataset, ids, drawn)
            if position is None and self.earlier and len(usable) < len(ids) and not self.kept.why_not:
                earlier = EarlierRows(
                    self.kept, self.earlier, dataset, view=view, rows_of=self._rows_of_values
                )
                missing = [sample for sample in ids if sample not in usable]
                begun = self._found_earlier(earlier, dataset, missing, drawn)
                self.begins = earlier.remark or self.begins
            store_cut = self._store_cut(dataset) if servers and position is None else None
            if store_cut is not None and not self.kept.why_not:
                missing = [sample for sample in ids if sample not in usable and sample not in begun]
                found = self._stored(dataset, missing, drawn, store_cut)
                stored = self._worth_reading(found, ids=ids, missing=missing, cut=store_cut)
        kept = usable | begun if position is None else frozenset[int]()
        if self.ahead is not None and (usable or begun):
            self.ahead.close()  # what was read ahead may be in no micro-batch of this pass
        return PassWork(
            dataset=dataset,
            order=order,
            epoch=epoch,
            drawn=drawn,
            work=EpochWork.of(order, step=step, kept=kept, stored=stored),
            stretch=stretch,
            usable=usable,
            earlier=earlier,
            store_cut=store_cut,
        )

    def _found_earlier(
        self, earlier: EarlierRows, dataset: Dataset, ids: Sequence[int], drawn: int
    ) -> frozenset[int]:
        """Return the samples that begin with a row after an earlier freeze point."""

        def anew(groups: Sequence[frozenset[int]]) -> dict[int, Row]:
            return self._compute_anew(dataset, self._check.some(groups, self._read_ahead(dataset)), drawn)

        try:
            found = earlier.find(ids, anew=anew)
            return found & unchanged(dataset, sorted(found)) if found else found
        except UpriverError as error:  # the samples that are computed anew meet it, too
            log.info("features of earlier jobs are not used in this pass: %s", error)
            return frozenset()

    def _compute_anew(
        self, dataset: Dataset, ids: Sequence[int], drawn: int, *, position: int | None = None
    ) -> dict[int, Row]:
        """Return rows as :meth:`RowCheck.anew`, and note those at the freeze point in a canary's place."""
        rows = self._check.anew(dataset, ids, drawn, position=position)
        if position is None and self._anew is None and rows:
            self._anew = _Anew(dataset=dataset, drawn=drawn, forms={i: forms(row) for i, row in rows.items()})
        return rows

    def _read_ahead(self, dataset: Dataset) -> list[tuple[int, ...]]:
        return self.ahead.begun(dataset) if self.ahead is not None else []

    def _store_cut(self, dataset: Dataset) -> int | None:
        """Return the cut after which servers keep rows: that of most of the plan's; None without servers."""
        keep, chain = self._options.keep, dataset.chain
        if keep is None or not keep.store or self._pool is None or self._split.program is None:
            return None
        asked = [route for route in self._plan.routes if route.cut > self._chain.start]
        cut = max(asked, key=lambda route: route.share).cut if asked else self._open_cut()
        return cut if cut is None or cut >= 0 or chain == self._chain else None

    def _worth_reading(
        self, stored: frozenset[int], *, ids: Sequence[int], missing: Sequence[int], cut: int
    ) -> frozenset[int]:
        """Return those of the samples whose stored rows the epoch's plan reads, evenly over the epoch."""
        if not stored or self._model is None:
            return stored
        share = stored_share(
            self._model,
            self._plan.routes,
            cut=cut,
            stored=len(stored) / len(ids),
            here=1 - len(missing) / len(ids),
        )
        part = min(1.0, share * len(ids) / len(stored))
        there = [sample for sample in missing if sample in stored]
        return frozenset(
            sample
            for number, sample in enumerate(there)
            if math.floor((number + 1) * part + 1e-9) > math.floor(number * part + 1e-9)
        )

    def _stored(self, dataset: Dataset, ids: Sequence[int], drawn: int, cut: int) -> frozenset[int]:
        """Return the samples whose rows servers have kept, and are right."""
        question, pool = self._question(dataset), self._pool
        if question is None or pool is None or not ids:
            return frozenset()
        found = self.stored.find(pool, question, ids, cut=cut, epoch=drawn)
        if not found or self.stored.is_trusted(question, cut=cut, epoch=drawn):
            return found
        some, kept = self._check.some([found]), dict[int, Row]()
        try:
            again = self._compute_anew(dataset, some, drawn)
            for batch in self.stored.fetch(pool, question, some, cut=cut, epoch=drawn):
                kept |= self._check.rows_of(self._resume(batch, dataset, self._split, drawn, Clock()))
            right = self.stored.compare(pool, question, kept=kept, again=again, cut=cut, epoch=drawn)
            return found if right else frozenset()
        except CaptureError as error:
            if self.kept is not None:
                self.kept.stop(str(error))
        except UpriverError as error:  # the samples that are computed anew meet it, too
            log.info("features near the data are not used in this pass: %s", error)
        return frozenset()

    def _kept_values(self, given: PassWork, ids: Sequence[int]) -> Values:
        """Return the kept values at the freeze point of some samples, as :meth:`values`."""
        form, stretch, rows = self._split.tail.values, given.stretch, list[Row]()
        if stretch is not None:
            later = [sample for sample in ids if sample not in given.usable]
            computed = given.earlier.compute(later) if given.earlier is not None else {}
            stretch.keep(given.dataset, computed)
            here = iter(stretch.read(given.dataset, [sample for sample in ids if sample in given.usable]))
            rows = [computed[sample] if sample in computed else next(here) for sample in ids]
        self.tally.samples[KEPT] = self.tally.samples.get(KEPT, 0) + len(ids)
        return form.as_read([value.to(self._device) for value in form.concatenate(rows)])

    def _may_keep(self, kept: KeptFeatures) -> bool:
        """Return whether rows are the same bits wherever they are computed, and keep none if not."""
        why_not = ""
        if self._agreement.mode == "numeric" or self._split.faster is not None:
            why_not = "they are not bit for bit those of the model as it is written"
        elif self._options.replay:
            why_not = "the routes of an earlier run are replayed"
        if why_not:
            kept.stop(why_not)
        return not kept.why_not

    def _usable(
        self, stretch: KeptStretch, dataset: Dataset, ids: Sequence[int], drawn: int
    ) -> frozenset[int]:
        """Return the samples whose rows are kept, are right, and belong to objects that did not change."""
        found = stretch.find(dataset, ids)
        if not found:
            return found
        try:
            theirs = stretch.unproven(dataset, list(found))
            if theirs or stretch.needs_check:
                again = {} if theirs else self._check.noted(stretch, dataset, found)
                some = self._check.some(theirs or [found], self._read_ahead(dataset))
                again = again or self._compute_anew(dataset, some, drawn, position=stretch.position)
                if not stretch.check(dataset, again):
                    return frozenset()
            return found & unchanged(dataset, sorted(found))
        except CaptureError as error:
            if self.kept is not None:
                self.kept.stop(str(error))
            return frozenset()
        except UpriverError as error:  # the samples that are computed anew meet it, too
            log.info("kept features are not used in this pass: %s", error)
            return frozenset()

    def _kept_inputs(self, given: PassWork) -> _KeptInputs | None:
        stretch = given.stretch
        if stretch is None or stretch.position is None:
            return None
        return _KeptInputs(
            position=stretch.position, stretch=stretch, dataset=given.dataset, usable=given.usable
        )

    def _rows_of_values(self, ids: Sequence[int], values: Sequence[torch.Tensor]) -> dict[int, Row]:
        """Return the row of each sample of values at the freeze point, in main memory."""
        select, tensors = self._split.tail.values.select, [value.to("cpu") for value in values]
        return {
            sample: tuple(value.clone() for value in select(tensors, [row])) for row, sample in enumerate(ids)
        }

    def _saved_s(self) -> float:
        """Return the seconds that a sample takes under the plan, as far as they are known."""
        predicted = self._plan.predicted
        if predicted is not None:
            return predicted.epoch_s / max(1, len(self._options.rows))
        return (self.eager_s or 0.0) / self._options.micro_batch

    # ------------------------------------------------------------------------------------ canaries

    def note_canary(self, dataset: Dataset) -> None:
        """Note the canary's bits by the frozen part as it is written, unless bits of that part are known."""
        if self._split.eager is not None and self._anew is None:
            self.as_written(dataset)

    def as_written(self, dataset: Dataset) -> tuple[Form, ...]:
        """Return the canary's bits by the frozen part as it is written, as they were at first if known."""
        if self.canary is None:
            self.canary = self.of_canary(dataset, self._split)
        return self.canary

    def is_as_before(self, dataset: Dataset) -> bool:
        """Return whether the frozen part as it is written gives the bits that it gave at first."""
        if self.canary is not None:
            return self.canary == self.of_canary(dataset, self._split)
        known = self._anew
        if known is None:
            return True
        rows = self._check.anew(known.dataset, list(known.forms), known.drawn)
        return {sample: forms(row) for sample, row in rows.items()} == known.forms

    def _saw_eager(self, done: MicroBatch, timings: Timings, *, canary: bool) -> None:
        """Note the pace of the frozen part as it is written, and the bits of the canary."""
        # Not the forward phase: on an accelerator it includes the wait for the training's own work.
        seconds = sum(seconds for position, seconds in timings.stages.items() if position > 0)
        self.eager_s = min(seconds, self.eager_s or seconds)
        if canary:
            self.canary = forms(done.tensors)

    def _engine(self, dataset: Dataset, split: Split) -> Engine:
        return Engine(chain=dataset.chain, program=split.prefix, micro_batch=self._options.micro_batch)

    def _remote(
        self,
        pool: ServerPool | None,
        given: PassWork,
        pins: Mapping[int, Pin],
        dealt: Sequence[DealtRoute],
    ) -> RemoteFetch | None:
        ways = (*(hand.way for hand in dealt), *(pin.way for pin in pins.values()))
        asks = self._replanner is not None or Way.REMOTE in ways
        question = self._question(given.dataset)
        if pool is None or question is None or not asks:
            return None
        micro_batches = given.work.micro_batches

        def make_request(indices: Sequence[int], cut: int | None) -> RunRequest:
            stop = 0 if cut is None else cut
            wanted = [micro_batches[i] for i in indices]
            keep = stop == given.store_cut
            larger = () if keep else self._larger()
            return question.request(wanted, stop=stop, epoch=given.drawn, larger=larger, keep=keep)

        return RemoteFetch(
            pool=pool,
            make_request=make_request,
            connections=self._options.prefetch.connections,
            per_request=max(self._options.prefetch.per_request, self._together),
            open_cut=self._open_cut,
        )

    def _question(self, dataset: Dataset) -> JobRequirements | None:
        """Return what this job asks of servers about a dataset; None before its program is known."""
        if (program := self._split.program) is None:
            return None
        return JobRequirements(
            dataset=dataset,
            program=program,
            seed=self._options.seed,
            on_bad_sample=self._options.sampling.on_bad_sample,
        )

    @property
    def _together(self) -> int:
        """Most micro-batches that a server may run at once; a request with fewer gives it no choice."""
        micro_batch = self._options.micro_batch
        return max((each.micro_batch for each in self._larger()), default=micro_batch) // micro_batch

    def _open_cut(self) -> int | None:
        """Return the freeze point if servers pass the canary there, else None.

        Used when the plan asked no server, and servers are needed now.
        """
        replanner, freeze = self._replanner, self._split.freeze
        return freeze if replanner is not None and replanner.opened(freeze) else None

    def window(self, plan: Plan) -> PrefetchWindow:
        """Return the prefetch window of loaders under a plan."""
        options = self._options
        return window_for(
            plan,
            start=self._chain.start,
            batch_size=self._options.step_samples,
            micro_batch=options.micro_batch,
            connections=options.prefetch.connections,
            num_workers=options.prefetch.worker_threads,
            crossing_bytes=self._crossing_bytes,
            num_bytes=options.prefetch.window_bytes,
            together=self._together,
        )

    def _crossing_bytes(self, cut: int) -> float:
        """Return the bytes of a sample that arrives at a cut; for input stages this is an upper bound."""
        program = self._split.program
        if program is None:
            return 0.0
        return program.stages[cut - 1].out_bytes if cut > 0 else program.graph.input_bytes

    def _expected_bytes(self) -> dict[Way | DealtRoute, int]:
        program = self._split.program
        if program is None:
            return {}
        sizes = {
            cut: int(self._crossing_bytes(cut) * self._options.micro_batch)
            for cut in range(self._chain.start + 1, program.num_stages + 1)
        }
        remote: dict[Way | DealtRoute, int] = {
            DealtRoute(way=Way.REMOTE, cut=cut): size for cut, size in sizes.items()
        }
        return remote | {Way.LOCAL: sizes[0]}
