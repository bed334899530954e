"""Define the public `DataLoader`: PyTorch's loader, whose samples may be made by workers elsewhere."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, Unpack, cast

import msgspec
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

from upriver._threads.closing import close_later
from upriver.dataloader.autotune.offload_tuner import OffloadTuner, TunerMeasurements
from upriver.dataloader.autotune.throughput_recall import ThroughputRecall
from upriver.dataloader.autotune.worker_count import growth
from upriver.dataloader.datasets.declared import Declared
from upriver.dataloader.datasets.digests import DatasetSnapshot, generators_in
from upriver.dataloader.datasets.divided import check_divided
from upriver.dataloader.datasets.named import NamedDataset, name_of
from upriver.dataloader.datasets.worker_spec import ByName, InStore, SampleSpec
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.keeping.keeping_source import KeepingSource
from upriver.dataloader.keeping.kept_reading import KeptReading
from upriver.dataloader.keeping.kept_samples import KeptSamples
from upriver.dataloader.local.cpu_seconds import CpuSeconds
from upriver.dataloader.local.pinned_memory import PinningQueue, pins
from upriver.dataloader.local.workers import (
    FedProcesses,
    LoaderProcesses,
    SampleMaker,
    SampleSource,
    StoreReading,
)
from upriver.dataloader.local_fleet import provider_of
from upriver.dataloader.offload_stretch import CANDIDATES, Offloading, stretch_of
from upriver.dataloader.options import (
    Offload,
    RemoteWorkers,
    TorchOptions,
    Workers,
    take_old_keywords,
)
from upriver.dataloader.prefetch_limit import PrefetchLimit
from upriver.dataloader.remote.provisioning import ProvisionedWorkers
from upriver.dataloader.remote.worker_choice import faults_text
from upriver.dataloader.resumed_order import OrderGenerators
from upriver.dataloader.share import OffloadShare
from upriver.dataloader.state import (
    BatchOrder,
    CompletedEpoch,
    CountedBatches,
    EpochGenerators,
    EpochPosition,
    ProcessesOfRun,
    State,
    begun_anew,
    identity,
    own_state,
    said_by,
    set_own,
    stateful_of,
)
from upriver.dataloader.tasks import MOST_SEED, Arrivals
from upriver.errors import ConfigError
from upriver.features.keep import Keep, room_of
from upriver.pipeline import Dataset
from upriver.pipeline.mapstyle import MapStyle
from upriver.pipeline.subset import Rows, whole_of
from upriver.policies import OFFLOAD_POLICIES
from upriver.rpc import validation
from upriver.rpc.client import ServerClient
from upriver.rpc.tls import client_context
from upriver.types import RAW

log = logging.getLogger("upriver")

_AT_ONCE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

MOST_BEGUN = 1000
"""Limit on how often a sampler is begun again to bring it to the position it had."""

MOST_VIEWS = 1_000_000
"""Limit on the number of views, far beyond any number of epochs."""

LEAST_AHEAD = 4
"""Minimum number of batches planned beyond the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLoaderReport:
    """Counts of the samples handed out, by maker, and the workers' failures.

    Attributes:
        made: Number of samples by worker address, or by ``here`` for this machine.
        why_not: Reason why a worker is no longer asked, or its last failure, by address.
        kept: Number of samples that were taken from what is kept, so that none was read. Those of batches
            made ahead and not handed out count, too.
    """

    made: Mapping[str, int]
    why_not: Mapping[str, str]
    kept: int = 0


class DataLoader(TorchLoader[Any]):
    """Drop-in for ``torch.utils.data.DataLoader`` whose samples depend only on their number.

    All arguments of PyTorch's loader keep their meaning, and the order of the samples is the same. Random
    numbers that a dataset draws are tied to (seed, epoch, sample). A batch is therefore bit-identical for
    every ``num_workers``.

    Args:
        dataset: Any map-style dataset, or an `upriver.Dataset`, whose samples are (tensor, target).
        batch_size: As for PyTorch's loader, like all further arguments that are not listed here.
        further: Further positional arguments of PyTorch's loader.
        seed: Seed of the random numbers drawn for samples; by default PyTorch's, as `torch.manual_seed` has
            set it.
        workers: Addresses of machines that run ``upriver worker``, or `RemoteWorkers`; or a provider that
            starts workers (`upriver.ray_workers`); or a number of workers to start on this machine, for a
            trial; or ``auto`` for as many workers on this machine as needed, on CPUs that training leaves
            idle. A dataset of the user's must be given by name (`upriver.dataset`). For an
            `upriver.Dataset`, give the addresses of servers near its store (``upriver serve``).
        offload: Work that runs on the workers: ``auto`` lets a policy decide from measurements of the first
            batches, and an `AutoOffload` says which policy and for which model; ``never`` offloads nothing,
            ``always`` everything, and an `Offloading` states the stages and the ratio.
        keep: Room for samples as they are before the first random stage, in memory and on disk: ``auto``
            takes a tenth of what is free, and a `Keep` says how much; None keeps nothing. Later epochs and
            other jobs do not read and decode kept samples again. Only for an `upriver.Dataset`.
        views: Number of epochs after which random input stages draw the same numbers again, so that finished
            samples can be kept; None if each epoch draws anew. Only for an `upriver.Dataset`.
        options: Further keywords of PyTorch's loader. ``policy`` and ``model`` are accepted as in
            `AutoOffload`, ``token``, ``ca``, ``certificate`` and ``key`` as in `RemoteWorkers`, until 0.3.

    Attributes:
        epoch: Number of the next epoch, counted from 0 by each ``iter()``. Set it to resume.

    Raises:
        ConfigError: If the dataset is not map-style, or the seed is not a whole number in 0..2**63 - 1; or if
            ``keep`` or ``views`` is given for another dataset than an `upriver.Dataset`.
        ValueError: If PyTorch's loader refuses an argument.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *further: Any,
        seed: int | None = None,
        workers: Workers = (),
        offload: Offload = "auto",
        keep: Keep | Literal["auto"] | None = None,
        views: int | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        workers, offload, auto = take_old_keywords(cast(dict[str, Any], options), workers, offload)
        if isinstance(dataset, IterableDataset):
            raise ConfigError("dataset must be map-style: an IterableDataset has no samples by index")
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            *further,
            **options,
        )
        _check_timeout(self.timeout, num_workers)
        self.epoch = 0
        plain = _source(dataset, _seed(seed), self.batch_sampler is not None, views)
        self._plain_maker = SampleMaker(plain, self._collate())
        self._samples = _kept_samples(plain, room_of(keep))
        self._maker = self._plain_maker
        if self._samples is not None and isinstance(plain, Declared):
            self._maker = SampleMaker(KeepingSource(plain, self._samples), self._collate())
        self._offload, self._policy = self._checked(offload), OFFLOAD_POLICIES[auto.policy]
        self._hired = self._hire(dataset, workers)
        self._check_can()
        self._kept: LoaderProcesses | FedProcesses | None = None
        self._copied: DatasetSnapshot | None = None
        self._made: Counter[str] = Counter()
        self._measured, self._room = TunerMeasurements(), PrefetchLimit()
        self._recall = self._recalled(auto.model)
        self._growth = growth(self._hired, self._measured, offload=self._offload)
        self._place: EpochPosition | None = None
        self._goes_on: State | None = None
        self._given: list[bool] | None = None
        self._onward = OrderGenerators()
        self._began = False
        self._processes_resumed: ProcessesOfRun | None = None

    @property
    def seed(self) -> int:
        """Return the seed of the random numbers drawn for samples."""
        return self._maker.source.seed

    def __iter__(self) -> Any:
        """Return an iterator over an epoch, from its first batch or from the loaded state."""
        if type(self.epoch) is not int or not 0 <= self.epoch <= MOST_SEED:
            raise ConfigError(f"epoch must be a whole number in 0..{MOST_SEED}, got {self.epoch!r}")
        _check_timeout(self.timeout, self.num_workers)  # users can set both
        number, self.epoch = self.epoch, self.epoch + 1
        base, place = self._begun(number)
        self._place = place
        if self._samples is not None:
            self._samples.begin(number)
            self._measured.count_kept(self._samples.share(number), self._begun_here)
        arrivals: Arrivals = PinningQueue() if pins(self) else SimpleQueue()
        asked = self._hired if self._offload != "never" else None
        if asked is not None and not asked.is_as_made():
            asked = None
        elsewhere = None if asked is None else asked.work(number, arrivals)
        decides = asked is not None and self._offload == "auto"
        epoch = Epoch(
            number,
            place.order,
            first=place.batches,
            maker=self._maker,
            split=self._split(),
            arrivals=arrivals,
            elsewhere=elsewhere,
            ahead=LEAST_AHEAD,
            here=self.num_workers * (self.prefetch_factor or 0),
            room=self._room,
            on_made=self._made.update,
            hold=decides and self._measured.measuring,
            timeout_s=self.timeout,
            kept=self._samples,
        )
        if elsewhere is not None:
            close_later(epoch, elsewhere.close, at_exit=True)
        cpu_s = CpuSeconds()
        if self.num_workers:
            processes = self._processes(base or self.seed)  # base is 0 where the run's processes persist
            epoch.use(processes)
            cpu_s = CpuSeconds(processes.pids)
            if not self.persistent_workers:
                close_later(epoch, processes.halt)
        batches: Iterator[Any] = epoch
        if asked is not None and decides:
            if self._recall is not None:
                self._recall.begin()
            candidates = asked.candidates
            if self._policy is OFFLOAD_POLICIES["fastflow"]:  # the paper's own candidates
                candidates = tuple(name for name in candidates if name in CANDIDATES)

            def begin(candidates: Sequence[str]) -> Iterator[Any]:
                return OffloadTuner(
                    epoch,
                    self._measured,
                    candidates=candidates,
                    part=self._part,
                    policy=self._policy,
                    warm=self.num_workers,
                    cpu_s=cpu_s,
                    why_not=lambda: asked.why_not,
                    on_decided=self._recall.keep if self._recall is not None else lambda: None,
                )

            batches = begin(candidates) if self._growth is None else self._growth.batches(begin)
        self._began = True
        sampler = self._index_sampler
        on_end = self._samples.flush if self._samples is not None else lambda: None
        return CountedBatches(batches, place, lambda: epoch.handed_out, lambda: len(sampler), on_end)

    def _begun(self, number: int) -> tuple[int, EpochPosition]:
        """Return the number that PyTorch's loader draws for its processes, and the position in the epoch."""
        state, self._goes_on = self._goes_on, None
        drawn = state.drawn if state is not None and state.epoch == number else None
        sampler = own_state(self.batch_sampler, self._sampler)
        if state is not None and drawn is not None:
            try:
                base, order = self._behind(state, drawn)
            except ConfigError:
                if state.sampler is None:
                    raise
                base, order = self._behind(state, drawn)  # without the sampler's state, which is used once
            self._onward.begin()
            return base, EpochPosition(number, drawn, order, state.batches, sampler, self._sampler_epoch)
        processes, starts = self._processes_of_run, self._starts
        if state is not None and state.epoch == number and state.starts is not None:
            starts = state.starts  # as in the loader that saved the state
        with self._onward.drawing():
            drawn = EpochGenerators.now(self._generators, starts=starts, twice=starts and processes != "none")
            base, begun = drawn.begin(self._batches, self._draw)
        if state is not None and state.sampler is not None:
            begun = begun_anew(begun, self._batches)
        order = self._order(begun)
        return base, EpochPosition(number, drawn, order, sampler=sampler, sampler_epoch=self._sampler_epoch)

    def _order(self, begun: Iterator[Any]) -> BatchOrder:
        return BatchOrder(begun, self._onward, late=not _draws_at_once(self.batch_sampler, self._sampler))

    def _behind(self, state: State, drawn: EpochGenerators) -> tuple[int, BatchOrder]:
        """Return the number drawn for loader processes, and the order after the batches handed out."""
        with drawn.again(self._generators):
            base, begun = drawn.begin(self._batches, self._draw)
            if state.sampler is not None and not state.batches and not state.planned:
                begun = begun_anew(begun, self._batches)
            order = self._order(begun)
            order.go_behind(state)
        return base, order

    def _draw(self) -> int:
        """Draw a number for loader processes."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator).item())

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain data.

        It determines the order and contents of the remaining batches.
        Batches that were handed out count as done. The state does not depend on the workers or on what is
        offloaded. With `load_state_dict` this is the protocol of torchdata's stateful loader.
        """
        return self._state().plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next ``iter()`` starts with the batch after it.

        Raises:
            ConfigError: If another loader saved the state; the message names the difference.
        """
        found = State.read(state)
        found.check(self._state())
        onward = OrderGenerators(found.stood)
        if found.drawn is not None:
            with found.drawn.again([torch.Generator() for _ in self._generators]):
                pass
        if found.own is not None:
            set_own([torch.Generator() for _ in self._generators], found.own)
        if found.past is not None:
            with found.past.drawn.again([torch.Generator() for _ in self._generators]):
                pass
        if found.past is not None and found.sampler is None:
            self._look_back(found.past, found.epoch)
        fresh = self._place is None and self._goes_on is None
        told = fresh and bool(getattr(self._sampler, "epoch", 0))
        if found.own is not None:
            set_own(self._generators, found.own)
        if found.sampler_epoch is not None and not (told and found.drawn is None):
            # Except where no epoch is under way and the user has already told a new sampler the next epoch.
            self._sampler.set_epoch(found.sampler_epoch)
        if found.sampler is not None:
            stateful_of(self.batch_sampler, self._sampler).load_state_dict(found.sampler)
        self.epoch, self._goes_on, self._place, self._onward = found.epoch, found, None, onward
        self._processes_resumed = found.processes
        own = list(generators_in(self.dataset)) if found.epoch or found.batches else []
        if own:
            log.warning(
                "the dataset (%s) holds generators that are in no state (%s): samples that draw from them "
                "are others than in the run that the state is of; draw from those of torch, numpy and "
                "random, which are set for each sample",
                type(self.dataset).__qualname__,
                ", ".join(own),
            )

    def _look_back(self, past: CompletedEpoch, epochs: int) -> None:
        """Begin the previous epoch of the sampler once more, and warn where its order differs.

        Between two epochs nothing else shows whether the next epoch's order will be the same.
        """

        def begin(most: int) -> list[Any]:
            with past.drawn.again(self._generators):
                return list(itertools.islice(past.drawn.begin(self._batches, self._draw)[1], most))

        told = self._sampler_epoch
        if told is not None and past.sampler_epoch is not None:
            self._sampler.set_epoch(past.sampler_epoch)
        try:
            same = past.comes_again(begin, max(1, min(epochs, MOST_BEGUN)))
        except Exception:  # the sampler's own error
            same = False
        if told is not None:
            self._sampler.set_epoch(told)
        if not same:
            log.warning(
                "the sampler (%s) gives another order for epoch %d than the run that the state is of had: it "
                "draws from something that is in no state, or was set otherwise, so further epochs may come "
                "in another order, too; give it state_dict and load_state_dict, or set_epoch",
                type(self._sampler).__qualname__,
                epochs - 1,
            )

    @property
    def _sampler_epoch(self) -> int | None:
        """Return the epoch that the sampler was given by ``set_epoch``; None if it has no such method."""
        return getattr(self._sampler, "epoch", None) if hasattr(self._sampler, "set_epoch") else None

    def _state(self) -> State:
        place = self._place
        state = State(
            epoch=self.epoch,
            batches=0,
            seed=self.seed,
            samples=len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            sampler_epoch=self._sampler_epoch,
            num_replicas=_whole(getattr(self._sampler, "num_replicas", None)),
            rank=_whole(getattr(self._sampler, "rank", None)),
            drawn=None,
            sampler=own_state(self.batch_sampler, self._sampler),
            own=said_by(self._generators),
            starts=self._starts,
            processes=self._processes_of_run,
            dataset=identity(self.dataset),
            order_by=type(self._sampler).__qualname__,
            stood=self._onward.stands(),
            past=None if place is None else place.past,
            views=getattr(self._maker.source, "views", None) or 0,
        )
        if place is not None and not place.over:
            more, ahead = place.order.ahead
            return msgspec.structs.replace(
                state,
                epoch=place.epoch,
                batches=place.batches,
                drawn=place.drawn,
                digest=place.order.digest if place.batches else None,
                sampler=place.sampler,
                own=None,
                starts=None,
                planned=place.batches + more,
                ahead=ahead if more else None,
            )
        goes_on = self._goes_on
        if goes_on is not None and goes_on.epoch == self.epoch:
            return msgspec.structs.replace(
                state,
                batches=goes_on.batches,
                drawn=goes_on.drawn,
                digest=goes_on.digest,
                sampler=goes_on.sampler,
                own=None if goes_on.own is None else state.own,
                starts=goes_on.starts,
                past=goes_on.past,
                planned=goes_on.planned,
                ahead=goes_on.ahead,
            )
        return state

    @property
    def _processes_of_run(self) -> ProcessesOfRun:
        """Return how the resumed run starts loader processes; how this loader does if it resumes none."""
        if self._processes_resumed is not None:
            return self._processes_resumed
        if not self.num_workers:
            return "none"
        return "persistent" if self.persistent_workers else "each epoch"

    @property
    def _starts(self) -> bool:
        """Return whether the next epoch draws a number for loader processes; persistent ones keep theirs."""
        return self._processes_of_run != "persistent" or not self._began

    @property
    def _sampler(self) -> Any:
        """Return the object that determines the order of samples."""
        batches = self.batch_sampler
        return self.sampler if batches is None else getattr(batches, "sampler", batches)

    @property
    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the user gave to this loader and its sampler."""
        found = [self.generator, getattr(self._sampler, "generator", None)]
        if self._given is None:  # a sampler may make one of its own when it is begun
            self._given = [isinstance(each, torch.Generator) for each in found]
        found = [None if each is torch.default_generator else each for each in found]  # shared by all
        own = [each for each, given in zip(found, self._given, strict=True) if given]
        return list({id(each): each for each in own if isinstance(each, torch.Generator)}.values())

    # ------------------------------------------------------------------------- where samples are made

    @property
    def offloading(self) -> Offloading | None:
        """Return the stages and the current ratio offloaded; None if nothing is offloaded or decided yet."""
        if self._hired is None or self._offload == "never":
            return None
        if isinstance(self._offload, Offloading):
            return self._offload
        if self._offload == "always":
            return Offloading(candidate=self._hired.candidates[-1])
        candidate, ratio = self._measured.in_force
        return None if candidate is None else Offloading(candidate=candidate, ratio=ratio)

    @property
    def decided(self) -> bool:
        """Return whether the offloading is decided; only ``offload="auto"`` has to measure first."""
        return self._hired is None or self._offload != "auto" or self._measured.settled

    @property
    def why(self) -> str:
        """Return why samples are made where they are; for ``offload="auto"`` the findings, once decided."""
        if self._hired is None:
            return "no workers were named"
        if self._hired.changed:
            return self._hired.changed
        failed = faults_text(self._hired.why_not) if self._hired.nobody else ""
        if self._offload != "auto":
            asked = f"offload={self._offload!r}, as the loader was told"
            if self._offload == "never" or not failed:
                return asked
            return f"{asked}, but no worker can be used, and all samples are made here ({failed})"
        offloaded = self._measured.decision.why if self._measured.decision is not None else ""
        number = self._growth.why if self._growth is not None else ""
        counted = "a sample counts as 1 MB, as none shows its bytes" if self._measured.by_samples else ""
        told = (offloaded, number, counted) if offloaded else (number,)
        undecided = "not decided yet: still measuring"
        if failed:
            undecided += f"; no worker can be used so far ({failed})"
        return "; ".join(filter(None, told)) or undecided

    @property
    def report(self) -> DataLoaderReport:
        """Return how many samples each maker has made so far."""
        return DataLoaderReport(
            made={place: count for place, count in self._made.items() if count},
            why_not={} if self._hired is None else self._hired.why_not,
            kept=0 if self._samples is None else self._samples.served,
        )

    @property
    def kept(self) -> str:
        """Return how much is kept now and where, in words; empty if nothing is to be kept."""
        return "" if self._samples is None else self._samples.remark

    @property
    def _begun_here(self) -> list[str]:
        """Return the candidates whose first stages run on this machine."""
        names = self._hired.candidates if self._hired is not None and self._offload == "auto" else ()
        first = self._maker.source.positions[0]
        return [name for name in names if self._part(name, 1.0).stretch.start > first]

    def _split(self) -> OffloadShare:
        decided = self.offloading
        return OffloadShare.none() if decided is None else self._part(decided.candidate, decided.ratio)

    def _part(self, candidate: str, ratio: float) -> OffloadShare:
        source = self._maker.source
        return OffloadShare(ratio, stretch_of(candidate, source.positions, source.stages))

    def _checked(self, offload: Offload) -> Offload:
        """Return the offloading after checking it against the dataset.

        Raises:
            ConfigError: If the value is unknown, or the dataset has no such stages.
        """
        if isinstance(offload, str) and offload in ("auto", "never", "always"):
            return offload
        if not isinstance(offload, Offloading):
            raise ConfigError(
                f"offload must be 'auto', 'never', 'always', an AutoOffload or an Offloading, got {offload!r}"
            )
        self._part(offload.candidate, offload.ratio)
        return offload

    def _check_can(self) -> None:
        """Check that samples can be divided where the user says, and that workers can collate if needed."""
        offload = self._offload
        if self._hired is None or not isinstance(offload, Offloading):
            return
        stretch = self._part(offload.candidate, offload.ratio).stretch
        if stretch.start == RAW:
            check_divided(self._maker.source)
        if stretch.whole and not self._hired.joins:
            why = (
                "workers do not have this collate_fn: only PyTorch's own, or a function of a module of theirs"
            )
            if self.batch_sampler is None:
                why = "batch_size=None makes no batches"
            raise ConfigError(f"candidate {offload.candidate!r} collates elsewhere, and {why}")

    def _hire(self, dataset: Any, workers: Workers) -> ProvisionedWorkers | None:
        """Return the workers that may make samples; None if the user named none."""
        if isinstance(workers, RemoteWorkers):
            provider, remote = None, workers
        else:
            provider = provider_of(workers, num_workers=self.num_workers)
            remote = RemoteWorkers(() if provider is not None else cast(Sequence[str], workers))
        if not remote.urls and provider is None:
            return None
        tls = client_context(ca=remote.ca, certificate=remote.certificate, key=remote.key)
        return ProvisionedWorkers(
            self._asked(dataset),
            self._plain_maker,
            clients=[ServerClient(url, token=remote.token, tls=tls) for url in remote.urls],
            provider=provider,
            as_made=dataset.as_made if isinstance(dataset, NamedDataset) else None,
        )

    def _recalled(self, model: str | nn.Module | None) -> ThroughputRecall | None:
        """Return measurements of earlier jobs; None where this job's measurements would fit no other job."""
        size = None if self.batch_sampler is None else getattr(self.batch_sampler, "batch_size", 0)
        fixed = size is None or (isinstance(size, int) and size > 0)
        if model is None or self._hired is None or not fixed:
            return None
        return ThroughputRecall(
            model, self._hired, self._measured, batch_size=size, num_workers=self.num_workers
        )

    def _asked(self, dataset: Any) -> SampleSpec:
        """Return the specification of the samples that workers are asked for.

        Raises:
            ConfigError: If workers cannot make them.
        """
        collate = self.collate_fn if self.batch_sampler is not None else None
        source = self._plain_maker.source
        if isinstance(source, Declared):
            return InStore(source=source, joins=collate is default_collate)
        if not isinstance(dataset, NamedDataset):
            raise ConfigError(
                "workers make datasets by name: upriver.dataset('package.module:callable', …); "
                f"got a {type(dataset).__name__}"
            )
        return ByName(
            name=dataset.name,
            arguments=dataset.arguments,
            seed=self.seed,
            collate=name_of(collate) if collate is not None else None,
            code=type(dataset.dataset),
        )

    # ------------------------------------------------------------------------------------ as PyTorch

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, except those that determine the contents of a batch.

        Raises:
            ConfigError: If the attribute is ``collate_fn``. For others PyTorch raises a `ValueError`.
        """
        if name == "collate_fn" and "_maker" in vars(self):
            raise ConfigError(
                "collate_fn cannot be set on a loader, whose processes and workers have it: give it as an "
                "argument, upriver.DataLoader(…, collate_fn=…)"
            )
        super().__setattr__(name, value)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Refuse ``accelerator.prepare``, which reads this and would make a plain loader in its place."""
        raise ConfigError(
            "accelerator.prepare makes a plain PyTorch loader of an upriver.DataLoader: without its workers, "
            "and with samples that are not tied to seed and epoch. Prepare model and optimizer alone, "
            "give each rank a DistributedSampler, and move batches with accelerate.utils.send_to_device"
        )

    @property
    def _batches(self) -> Iterable[tuple[Any, ...]]:
        """Return the indices of each batch; the sampler begins only when they are iterated."""
        batches = _Batches(self._index_sampler, single=self.batch_sampler is None)
        return Rows(self.dataset, batches) if isinstance(self._maker.source, Declared) else batches

    def _collate(self) -> Callable[[list[Any]], Any]:
        return self.collate_fn if self.batch_sampler is not None else _OnlyOne(self.collate_fn)

    def _processes(self, base_seed: int) -> LoaderProcesses | FedProcesses:
        """Return PyTorch's loader processes; persistent ones serve one epoch after another.

        The processes hold a copy of the dataset. If the dataset has changed since, new processes replace
        them.
        """
        dataset = self._maker.source.dataset
        if self._kept is not None:
            if (
                isinstance(self._kept, LoaderProcesses)
                and self._copied is not None
                and self._copied.changed()
            ):
                self._kept.begin_anew()
                self._copied = DatasetSnapshot(dataset)
            return self._kept
        processes = LoaderProcesses(
            self._plain_maker,
            base_seed=base_seed,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )
        source = self._maker.source
        found: LoaderProcesses | FedProcesses = processes
        if isinstance(source, KeepingSource):
            found = FedProcesses(KeptReading(source, self._maker.collate), processes)
        elif isinstance(source, Declared):
            found = FedProcesses(StoreReading(source), processes)
        if self.persistent_workers:
            self._kept = found
            self._copied = None if isinstance(source, Declared) else DatasetSnapshot(dataset)
            close_later(self, found.halt)
        return found


class _Batches:
    """Index tuples of each batch."""

    def __init__(self, sampler: Iterable[Any], *, single: bool = False) -> None:
        self._sampler, self._single = sampler, single

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        begun = iter(self._sampler)
        return zip(begun, strict=False) if self._single else map(tuple, begun)


class _OnlyOne:
    """Collate function for samples that are handed out one by one."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, rows: list[Any]) -> Any:
        return self._convert(rows[0])


def _source(dataset: Any, seed: int, by_batch: bool, views: int | None) -> SampleSource:
    if views is not None:
        validation.whole("views", views, most=MOST_VIEWS)
    match whole_of(dataset):
        case Dataset() as whole:
            if views is not None and whole.chain.first_draw is None:
                log.info("views=%d changes nothing: no input stage draws random numbers", views)
            return Declared(whole, seed, views=views)
        case NamedDataset():
            dataset = dataset.dataset
    if views is not None:
        raise ConfigError(f"views is for a dataset of upriver.index, got a {type(dataset).__name__}")
    return MapStyle(dataset, seed, by_batch)


def _kept_samples(source: SampleSource, keep: Keep | None) -> KeptSamples | None:
    """Return room for samples; None if none are to be kept.

    Raises:
        ConfigError: If the dataset has no ETags, which show that a sample is still the one that was kept.
    """
    if keep is None:
        return None
    if not isinstance(source, Declared):
        raise ConfigError(
            f"keep is for a dataset of upriver.index, whose samples have ETags; got a "
            f"{type(source.dataset).__name__}"
        )
    return KeptSamples(source, keep)


def _draws_at_once(batches: Any, sampler: Any) -> bool:
    """Return whether the sampler is PyTorch's own, which draws all numbers before the first batch."""
    at_once = type(batches) in (type(None), BatchSampler) and type(sampler) in _AT_ONCE
    return at_once and getattr(sampler, "generator", None) is not torch.default_generator


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _check_timeout(timeout: float, num_workers: int) -> None:
    """Check that a timeout is set only with loader processes."""
    if timeout and not num_workers:
        raise ConfigError(
            f"timeout is how long loader processes may take, and num_workers is 0; got {timeout!r}"
        )


def _seed(seed: int | None) -> int:
    if seed is None:
        return torch.initial_seed() & MOST_SEED
    if type(seed) is not int or not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be a whole number in 0..{MOST_SEED}, got {seed!r}")
    return seed
