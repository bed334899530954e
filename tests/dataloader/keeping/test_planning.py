"""Check which samples go elsewhere where some are kept here, and that measurements count with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.dataloader.keeping.world import COUNT, RANDOM, STEADY, epochs, loader_of, stored
from tests.dataloader.toy_datasets import same
from tests.dataloader.world import World
from upriver.dataloader import Offloading
from upriver.dataloader.autotune.offload_tuner import HERE, TimedPath, TunerMeasurements
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local.workers import SampleMaker
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.share import OffloadShare
from upriver.dataloader.tasks import Arrival, Task
from upriver.features.keep import Keep
from upriver.pipeline import Dataset
from upriver.rpc.local_server import EmbeddedServer
from upriver.types import DONE

KEPT_AT = -3
FIRST, STORED = -6, -5


class Source:
    """Five stages that do nothing."""

    dataset, seed = None, 0
    positions = tuple(range(FIRST, DONE + 1))
    stages = ("read", "decode", "resize", "crop", "flip", "normalize")

    def make_all(self, indices: Sequence[int], **_: Any) -> list[int]:
        return list(indices)

    def join(self, samples: list[Any], collate: Any, *, epoch: int, batch: int) -> list[Any]:
        return list(samples)


class Kept:
    position = KEPT_AT

    def __init__(self, samples: Sequence[int]) -> None:
        self.samples = samples

    def holds(self, samples: Sequence[int], epoch: int) -> list[bool]:
        return [sample in self.samples for sample in samples]


class Elsewhere:
    """Machines that do every task at once, and write it down."""

    slots, ready, coming = 4, True, False

    def __init__(self, arrivals: SimpleQueue[Arrival]) -> None:
        self.arrivals, self.tasks = arrivals, list[Task]()

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        self.tasks.append(task)
        self.arrivals.put(Arrival(task.number, list(task.indices), place="there"))
        return True

    def look(self, task: Task) -> bool:
        return True

    def late(self) -> Sequence[int]:
        return ()


def planned(
    kept: Sequence[int], stretch: OffloadStretch, ratio: float
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Return the batches of an epoch of one batch, and the tasks elsewhere: their start and samples."""
    arrivals: SimpleQueue[Arrival] = SimpleQueue()
    there = Elsewhere(arrivals)
    epoch = Epoch(
        0,
        iter([(0, 1, 2, 3, 4, 5)]),
        maker=SampleMaker(Source(), list),  # type: ignore[arg-type]
        split=OffloadShare(ratio, stretch),
        arrivals=arrivals,
        elsewhere=there,
        kept=Kept(kept),
    )
    return list(epoch), [(task.start, task.indices) for task in there.tasks]


def test_samples_that_are_not_kept_go_elsewhere_first() -> None:
    stretch = OffloadStretch(start=FIRST, stop=DONE)
    assert planned((0, 2, 4), stretch, 0.5) == ([[0, 1, 2, 3, 4, 5]], [(FIRST, (1, 3, 5))])
    assert planned((0, 2, 4), stretch, 0.67) == ([[0, 1, 2, 3, 4, 5]], [(FIRST, (1, 2, 3, 5))])
    assert planned((), stretch, 0.5) == ([[0, 1, 2, 3, 4, 5]], [(FIRST, (1, 3, 5))])


def test_kept_samples_of_a_stretch_after_the_read_start_where_they_are_kept() -> None:
    stretch = OffloadStretch(start=STORED, stop=DONE)
    batches, tasks = planned((0, 2, 4), stretch, 1.0)
    assert batches == [[0, 1, 2, 3, 4, 5]]
    assert sorted(tasks) == [(STORED, (1, 3, 5)), (KEPT_AT, (0, 2, 4))]


def test_kept_samples_beyond_a_stretch_stay_here() -> None:
    batches, tasks = planned((0, 2, 4), OffloadStretch(start=STORED, stop=KEPT_AT), 1.0)
    assert batches == [[0, 1, 2, 3, 4, 5]] and tasks == [(STORED, (1, 3, 5))]


def test_a_whole_batch_starts_where_it_is_kept_only_if_all_of_it_is() -> None:
    stretch = OffloadStretch(start=STORED, stop=DONE, whole=True)
    for kept, start in (((0, 1, 2), STORED), (range(6), KEPT_AT)):
        batches, tasks = planned(kept, stretch, 1.0)  # type: ignore[arg-type]
        assert tasks == [(start, (0, 1, 2, 3, 4, 5))] and batches == [[0, 1, 2, 3, 4, 5]]


def test_figures_of_this_machine_are_discarded_where_far_more_is_kept() -> None:
    found = TunerMeasurements(gthp=9.0, lthp=1.0, pcycle=2.0, pseconds=3.0)
    found.rthp, found.ocycles = {"p1": 1.0, "p2": 2.0}, {"p1": 0.1, "p2": 0.2}
    found.timed = {HERE: TimedPath(), "p1": TimedPath(), "p2": TimedPath()}
    assert not found.count_kept(0.2, ["p1"]) and found.lthp == 1.0
    assert found.count_kept(0.9, ["p1"])
    assert (found.gthp, found.lthp, found.pcycle, found.pseconds) == (9.0, None, None, None)
    assert set(found.rthp) == set(found.ocycles) == set(found.timed) == {"p2"}
    assert not found.anew and not found.count_kept(1.0, ["p1"])


@pytest.mark.parametrize("policy", ["upriver", "fastflow"])
def test_a_job_whose_samples_are_kept_is_measured_again_and_offloads_nothing(policy: str) -> None:
    world, measured = World(here=0.1, there=0.05, step=0.1, receive=0.05), TunerMeasurements()
    world.train(world.auto(400, measured, policy=policy))
    assert measured.decision is not None and measured.decision.offload
    workers = dict(measured.rthp)
    world.here = 0.001  # as read from memory
    assert measured.count_kept(1.0, ())
    world.train(world.auto(200, measured, number=1, policy=policy))
    assert measured.decision is not None and not measured.decision.offload
    assert measured.rthp == workers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    made = stored(tmp_path_factory.mktemp("planning"), RANDOM)
    made.publish()
    made.with_stages(STEADY).publish()
    return made


@pytest.fixture(scope="module")
def server(data: Dataset) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start({"default": data.store.uri}, workers=1, threads=1) as started:
        yield started


CANDIDATES = ["p1", "p2", "p3", "read..resize", "decode..normalize", "decode..collate", "resize..resize"]
QUICK = {
    ("p1", 0.4, 1),
    ("p2", 0.4, 0),
    ("p3", 0.4, 0),
    ("decode..collate", 1.0, 0),
    ("resize..resize", 1.0, 0),
}
WAYS = [
    pytest.param(*way, marks=() if way in QUICK else pytest.mark.full)
    for way in product(CANDIDATES, (0.4, 1.0), (0, 1))
]


@pytest.mark.parametrize(("candidate", "ratio", "num_workers"), WAYS)
@pytest.mark.full
def test_any_share_elsewhere_gives_the_same_with_kept_samples(
    data: Dataset, server: EmbeddedServer, candidate: str, ratio: float, num_workers: int
) -> None:
    """Compare a chain that draws, and one whose finished samples are kept."""
    offload = Offloading(candidate=candidate, ratio=ratio)
    for made_of in (data, data.with_stages(STEADY)):
        loader = loader_of(
            made_of,
            keep=Keep(memory="64 MB", disk=0),
            workers=[server.url],
            offload=offload,
            num_workers=num_workers,
        )
        assert same([list(loader) for _ in range(3)], epochs(made_of))
        assert sum(loader.report.made.values()) == 3 * COUNT and not loader.report.why_not


@pytest.mark.full
def test_auto_gives_the_same_with_kept_samples(data: Dataset, server: EmbeddedServer) -> None:
    loader = loader_of(data, keep=Keep(memory="64 MB", disk=0), workers=[server.url])
    assert same([list(loader) for _ in range(6)], epochs(data, 6))


def test_finished_samples_that_are_kept_are_never_sent(data: Dataset, server: EmbeddedServer) -> None:
    steady = data.with_stages(STEADY)
    keep = Keep(memory="64 MB", disk=0)
    loader = loader_of(steady, keep=keep, workers=[server.url], offload=Offloading(candidate="p1"))
    samples = loader._samples
    assert samples is not None
    here = loader_of(steady)
    samples.begin(0)
    made = here._plain_maker.source.values(  # type: ignore[attr-defined]
        range(COUNT), epoch=0, samples=range(COUNT)
    )
    samples.keep(dict(enumerate(made)), 0, seconds=1.0)
    assert same([list(loader) for _ in range(2)], epochs(steady, 2))
    assert loader.report.made == {"here": 2 * COUNT} and loader.report.kept == 2 * COUNT
    assert torch.equal(made[0], samples.find([0], 0)[0])
