"""Supply a job's micro-batches: a loader for each pass over a dataset, and the rest of the prefix."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from upriver.control.delivery_table import DealtRoute, Pin, PrefetchWindow, Received, Way
from upriver.control.route_dealing import deal
from upriver.control.window_size import told, window_for
from upriver.engine.clock import Clock
from upriver.engine.engine import Engine
from upriver.finetune.calibration.server_gate import JobRequirements
from upriver.finetune.options import JobOptions
from upriver.finetune.planner import PlannedJob
from upriver.finetune.prefetch.fetch_threads import LOCAL, Finish, RemoteFetch
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.finetune.prefetch.replay import PlacementLog
from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.finetune.prefetch.step_assembly import Values, first_micro_batch
from upriver.finetune.report import JobTally
from upriver.pipeline import Dataset, InputChain
from upriver.program.freeze import fold
from upriver.program.split.split import Split
from upriver.protocol import RunRequest
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.server_pool import ServerPool
from upriver.types import MicroBatch, Plan, Tier, Timings

log = logging.getLogger("upriver")

Form = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Digest of a tensor's values, its type, shape and strides."""


def forms(tensors: Sequence[torch.Tensor]) -> tuple[Form, ...]:
    """Return what tells tensors apart without keeping them."""
    return tuple((fold(each), each.dtype, tuple(each.shape), each.stride()) for each in tensors)


class FeatureSource:
    """Make loaders and keep what they delivered.

    A feed holds no reference to its job, so the job can be collected.

    Args:
        chain: Input stages of the training data; plans name its cuts, and canaries cover them.
        device: Where the tail runs.

    Attributes:
        tally: What finished passes have delivered.
        places: Where the micro-batches of training were computed.
        eager_s: Least seconds of a micro-batch of the frozen part as it is written; None if none has run.
        canary: Forms of the features of the job's first micro-batch, as it is written; None if it has not
            run.
    """

    def __init__(
        self,
        split: Split,
        options: JobOptions,
        planned: PlannedJob,
        *,
        chain: InputChain,
        device: torch.device,
    ) -> None:
        self._options, self._chain, self._device = options, chain, device
        self.adopt(split, planned)
        self.tally = JobTally()
        self.places = PlacementLog()
        self.eager_s: float | None = None
        self.canary: tuple[Form, ...] | None = None

    def adopt(self, split: Split, planned: PlannedJob) -> None:
        """Go on with the program and the servers of a split that was prepared meanwhile."""
        self._split = split
        self._pool, self._replanner, self._larger = planned.pool, planned.replanner, planned.offers
        self._agreement = planned.agreement

    def take_servers(
        self, loader: Prefetcher, dataset: Dataset, plan: Plan, order: EpochOrder, *, epoch: int
    ) -> None:
        """Let the servers take part in an epoch of training that began without them."""
        dealt = deal(plan.routes, len(order.micro_batches), start=dataset.chain.start)
        remote = self._remote(self._pool, dataset, order, epoch, {}, dealt)
        if remote is not None:
            loader.take_servers(
                remote,
                local=self._local(dataset, epoch, remote=True),
                dealt=dealt,
                window=self.window(plan),
                expected_bytes=self._expected_bytes(),
            )

    @contextlib.contextmanager
    def training(
        self,
        dataset: Dataset,
        plan: Plan,
        order: EpochOrder,
        *,
        epoch: int,
        step: int,
        pins: Mapping[int, Pin],
    ) -> Iterator[Prefetcher]:
        """Provide a loader for an epoch of training from a given step on; log where micro-batches come from.

        Args:
            pins: Micro-batches that must come from a certain place.
        """
        places = self.places
        level = logging.INFO if self._agreement.mode == "numeric" else logging.DEBUG

        def note(index: int, source: str, came: Received, timings: Timings) -> None:
            places.note(epoch=epoch, index=index, source=source, cut=came.position)
            log.log(level, "epoch %d, micro-batch %d: %s, cut %d", epoch, index, source, came.position)
            if (replanner := self._replanner) is not None:
                tier = Tier.COMPUTE if source == LOCAL else Tier.STORAGE
                replanner.saw(tier, timings, sent_bytes=came.num_bytes)

        def saw(timings: Timings) -> None:
            if (replanner := self._replanner) is not None:
                replanner.saw(Tier.COMPUTE, timings)

        log.info("%s", told(self.window(plan)))
        with self._loading(
            dataset,
            plan,
            order,
            dealt=deal(plan.routes, len(order.micro_batches), start=dataset.chain.start),
            pool=self._pool,
            epoch=epoch,
            first=first_micro_batch(order, step),
            pins=pins,
            note=note,
            saw=saw,
            canary=order.micro_batches[0] if epoch == 0 else None,
        ) as loader:
            yield loader

    @contextlib.contextmanager
    def evaluating(
        self, dataset: Dataset, plan: Plan, order: EpochOrder, *, servers: bool
    ) -> Iterator[Prefetcher]:
        """Provide a loader for one pass over a separate dataset.

        Args:
            servers: Whether servers can read the dataset; if not, this process makes every micro-batch.
        """

        def note(index: int, source: str, came: Received, timings: Timings) -> None:
            pass

        with self._loading(
            dataset,
            plan,
            order,
            dealt=self._dealt_elsewhere(dataset, plan, order, servers=servers),
            pool=self._pool if servers else None,
            epoch=0,
            first=0,
            pins={},
            note=note,
            saw=lambda timings: None,
        ) as loader:
            yield loader

    def _dealt_elsewhere(
        self, dataset: Dataset, plan: Plan, order: EpochOrder, *, servers: bool
    ) -> tuple[DealtRoute, ...]:
        """Return the routes of another dataset's micro-batches, as close to the plan's as possible.

        In another chain a cut below 0 may lie behind other stages, or may not exist, so no canary has covered
        it. Micro-batches with such a cut are made locally.
        """
        hands = deal(plan.routes, len(order.micro_batches), start=self._chain.start)
        first = self._chain.start if dataset.chain == self._chain else 0
        here = DealtRoute(way=Way.LOCAL, cut=dataset.chain.start)
        return tuple(hand if servers and hand.cut >= first else here for hand in hands)

    @contextlib.contextmanager
    def _loading(
        self,
        dataset: Dataset,
        plan: Plan,
        order: EpochOrder,
        *,
        dealt: Sequence[DealtRoute],
        pool: ServerPool | None,
        epoch: int,
        first: int,
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

        remote = self._remote(pool, dataset, order, epoch, pins, dealt)
        loader = Prefetcher(
            order.micro_batches,
            local=self._local(dataset, epoch, remote=remote is not None),
            first=first,
            remote=remote,
            window=self.window(plan),
            num_workers=self._options.prefetch.worker_threads,
            expected_bytes=self._expected_bytes(),
            on_timings=count,
            finish=self._finisher(dataset, epoch, saw, canary),
            pins=pins,
            dealt=dealt,
        )
        try:
            yield loader
        finally:
            loader.close()
            tally.add(loader.report)

    def _local(self, dataset: Dataset, epoch: int, *, remote: bool) -> LocalSource:
        """Return the source of the plain way.

        Args:
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
        )

    def values(self, batch: MicroBatch) -> Values:
        """Return the values at the freeze point, on the device where the tail runs, in its types."""
        return self._split.tail.values.as_read([value.to(self._device) for value in batch.tensors])

    def _finisher(
        self,
        dataset: Dataset,
        epoch: int,
        saw: Callable[[Timings], None],
        canary: tuple[int, ...] | None,
    ) -> Finish:
        """Return a function that runs the rest of the prefix locally on a micro-batch.

        Args:
            canary: Sample ids of the job's canary, if it is among this pass's micro-batches.
        """

        def finish(batch: MicroBatch) -> MicroBatch:
            clock = Clock()
            done = self._resume(
                batch, dataset, self._split, epoch, clock
            )  # a program may have come meanwhile
            self.tally.timings("finish", clock.timings())
            saw(clock.timings())
            if self._split.eager is not None:
                self._saw_eager(done, clock.timings(), canary=batch.ids == canary)
            return done

        return finish

    def of_canary(self, dataset: Dataset, split: Split) -> tuple[Form, ...]:
        """Return the features of the job's canary, of the training data, by the prefix of a split."""
        batch, _ = self._local(dataset, 0, remote=False)(self._options.order(0).micro_batches[0])
        return forms(self._resume(batch, dataset, split, 0, Clock()).tensors)

    def _resume(
        self, batch: MicroBatch, dataset: Dataset, split: Split, epoch: int, clock: Clock
    ) -> MicroBatch:
        """Return a micro-batch after the rest of a split's prefix, run locally."""
        # Only input stages can find a sample bad and need its object's name. Usually they have run already.
        names = [ref.object for ref in dataset.locate(batch.ids)] if batch.position < 0 else []
        return self._engine(dataset, split).resume(
            batch,
            object_names=names,
            stop=split.freeze,
            seed=self._options.seed,
            epoch=epoch,
            on_bad_sample=self._options.sampling.on_bad_sample,
            clock=clock,
        )

    def note_canary(self, dataset: Dataset) -> None:
        """Note the canary's bits by the frozen part as it is written, unless they are known."""
        if self._split.eager is not None and self.canary is None:
            self.canary = self.of_canary(dataset, self._split)

    def is_as_before(self, dataset: Dataset) -> bool:
        """Return whether the frozen part as it is written gives the canary's bits that it gave at first."""
        return self.canary is None or self.canary == self.of_canary(dataset, self._split)

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
        dataset: Dataset,
        order: EpochOrder,
        epoch: int,
        pins: Mapping[int, Pin],
        dealt: Sequence[DealtRoute],
    ) -> RemoteFetch | None:
        program = self._split.program
        ways = (*(hand.way for hand in dealt), *(pin.way for pin in pins.values()))
        asks = self._replanner is not None or Way.REMOTE in ways
        if pool is None or program is None or not asks:
            return None
        question = JobRequirements(
            dataset=dataset,
            program=program,
            seed=self._options.seed,
            on_bad_sample=self._options.sampling.on_bad_sample,
        )
        micro_batches = order.micro_batches

        def make_request(indices: Sequence[int], cut: int | None) -> RunRequest:
            stop = 0 if cut is None else cut
            wanted = [micro_batches[i] for i in indices]
            return question.request(wanted, stop=stop, epoch=epoch, larger=self._larger())

        return RemoteFetch(
            pool=pool,
            make_request=make_request,
            connections=self._options.prefetch.connections,
            per_request=max(self._options.prefetch.per_request, self._together),
            open_cut=self._open_cut,
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
