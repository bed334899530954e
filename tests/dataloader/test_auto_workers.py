"""Check the number of workers: determined with one worker, grown during training, and released."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dataloader.toy_datasets import same
from tests.dataloader.world import BATCH, World, part
from upriver.dataloader import AutoOffload, DataLoader, Offloading, dataset
from upriver.dataloader.autotune.offload_tuner import TunerMeasurements
from upriver.dataloader.autotune.throughput_recall import ThroughputRecall
from upriver.dataloader.autotune.worker_count import WorkerGrowth
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local_fleet import LocalFleet, LocalWorkers, beside_training
from upriver.errors import ConfigError, NotAuthorized, ServerUnavailable
from upriver.rpc.client import ServerClient
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.worker_fleet import Fleet, Provider, Serves

COUNT = 300


# ------------------------------------------------------------------- number of workers, by a simulated clock


class Team:
    """Replace `ProvisionedWorkers`: further workers join some steps later, each like the first."""

    candidates = ("p2", "p3")

    def __init__(self, world: World, *, most: int, useful: bool = True, delay: int = 5) -> None:
        self.world, self.most, self.useful, self.delay = world, most, useful, delay
        self.joined = self.wanted = self.there = 1
        self.why = ""

    @property
    def count(self) -> int:
        return self.there if self.useful else 0

    @property
    def released(self) -> bool:
        return not self.there

    def come(self) -> None:
        if self.there < self.wanted:
            self.delay -= 1
            if not self.delay:
                self.world.there *= self.there / self.wanted
                self.joined += self.wanted - self.there
                self.there = self.wanted

    def grow_to(self, number: int) -> None:
        self.wanted = number

    def release(self, why: str) -> None:
        self.there, self.wanted, self.why = 0, 0, why

    def hire_again(self) -> None:
        self.there, self.wanted = 1, 1
        self.joined += 1


def train(
    world: World, team: Team, *epochs: int, known: tuple[TunerMeasurements, WorkerGrowth] | None = None
) -> tuple[TunerMeasurements, WorkerGrowth]:
    measured = TunerMeasurements() if known is None else known[0]
    growth = WorkerGrowth(team, measured) if known is None else known[1]  # type: ignore[arg-type]
    for batches in epochs:
        epoch = world.epoch(batches, part(measured.decision), hold=measured.measuring)

        def begin(candidates: Sequence[str], epoch: Epoch = epoch) -> Iterator[Any]:
            return world.auto_of(epoch, measured, candidates=candidates)

        count = 0
        for batch in growth.batches(begin):
            assert len(batch) == BATCH
            count += 1
            world.now += world.step
        assert count == batches, "nothing is lost or comes twice where measuring begins anew"
    return measured, growth


@pytest.mark.parametrize(("there", "most", "needed"), [(0.2, 8, 2), (0.45, 8, 5), (0.45, 3, 3), (0.12, 8, 2)])
def test_as_many_as_make_up_for_what_is_lacking(there: float, most: int, needed: int) -> None:
    """Gthp 40, Lthp 8, Ocycle / Pcycle 1/8: Lower is 32 x 9/8 = 36 MB/s, and one worker makes 4 / there."""
    world = World(here=0.1, there=there / BATCH, step=0.1, receive=0.05)
    team = Team(world, most=most)
    measured, growth = train(world, team, 250)
    assert team.there == team.wanted == needed
    assert growth.why.startswith(f"{needed} of at most {most} workers")
    [name] = measured.rthp
    assert growth.candidates == (name,), "the best one, measured again with all of them"
    # A step takes 0.1 s, plus 0.05 s for each received batch, unless the workers are slower.
    assert measured.rthp[name] == pytest.approx(4 / max(0.15, there / needed), rel=0.05)
    assert measured.decision is not None and measured.decision.candidate == name


def test_workers_that_come_between_two_epochs_are_measured_too() -> None:
    world = World(here=0.1, there=0.4 / BATCH, step=0.1, receive=0.05)
    team = Team(world, most=8, delay=60)
    measured, _ = train(world, team, 190, 60, 200)
    assert team.there == 4
    assert [round(rthp, 1) for rthp in measured.rthp.values()] == [pytest.approx(4 / 0.15, rel=0.05)]
    assert measured.decision is not None


def test_where_nothing_stalls_the_one_is_released() -> None:
    world = World(here=0.001, there=0.1 / BATCH, step=0.5)
    team = Team(world, most=8)
    measured, growth = train(world, team, 40, 40)
    assert (team.there, world.made_there) == (0, 0)
    assert "nothing keeps the model waiting" in team.why and "no worker is needed" in growth.why
    assert measured.decision is not None and not measured.decision.offload


def test_one_is_hired_again_where_it_is_to_be_decided_again() -> None:
    """Once the model is faster, the number of workers is open again."""
    world = World(here=0.1, there=0.2 / BATCH, step=100.0, receive=0.05)
    team = Team(world, most=8)
    measured, growth = train(world, team, 40)
    assert team.released
    measured.gthp, measured.lthp, measured.decision = 40.0, 8.0, None
    world.step = 0.1
    train(world, team, 250, known=(measured, growth))
    assert (team.there, team.joined) == (2, 3)
    assert growth.why.startswith("2 of at most 8") and measured.decision is not None


def test_where_the_one_cannot_be_used_no_other_is_started() -> None:
    world = World(here=0.1, there=0.2 / BATCH, step=0.1)
    team = Team(world, most=8, useful=False)
    _, growth = train(world, team, 150)
    assert (team.there, team.joined, team.why) == (0, 1, "not used")
    assert "none of the workers can be used" in growth.why


def test_where_the_one_does_nothing_it_is_released_and_that_is_said() -> None:
    world = World(here=0.1, there=0.2 / BATCH, step=0.1)
    world.dead = True
    team = Team(world, most=8)
    measured, growth = train(world, team, 150)
    assert (team.there, team.joined, team.why) == (0, 1, "not used") and measured.nobody
    assert growth.why == "none of the workers can be used"


# -------------------------------------------------------------------------------------------- real workers


def named(kind: str = "Noisy") -> Any:
    return dataset(f"tests.dataloader.toy_datasets:{kind}", count=COUNT)


def rows(batch: list[Any]) -> list[Any]:
    """Return the batch; no worker finds this function by its name, so only p2 is measured."""
    return list(batch)


rows.__qualname__ = "nowhere"


def loader_of(workers: Provider | int | str, *, stalls: bool | None = None, **arguments: Any) -> DataLoader:
    """Return a loader that knows whether the model waits, which a real clock would leave to chance."""
    loader = DataLoader(named(), batch_size=2, seed=3, collate_fn=rows, workers=workers, **arguments)
    if stalls is not None:
        found = loader._measured
        found.gthp, found.lthp, found.pcycle = 100.0 if stalls else 1.0, 1.0, 1.0
    return loader


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)


class Watched(LocalWorkers):
    """Remember its fleets."""

    fleets: list[LocalFleet]

    def open(self, what: Serves) -> Fleet:
        fleet = LocalFleet(what, most=self.most)
        Watched.fleets.append(fleet)
        return fleet


@pytest.fixture
def fleets() -> Iterator[list[LocalFleet]]:
    Watched.fleets = []
    yield Watched.fleets
    for fleet in Watched.fleets:
        fleet.stop()


def servers(fleet: LocalFleet) -> list[EmbeddedServer]:
    return list(fleet._servers.values())


@pytest.fixture(scope="module")
def reference() -> list[list[Any]]:
    loader = DataLoader(named(), batch_size=2, seed=3, collate_fn=rows)
    return [list(loader) for _ in range(12)]


def ours(thread: threading.Thread) -> bool:
    """Return whether a thread is ours and ends with a loader; one closes what nobody uses any more."""
    return thread.name.startswith("upriver-") and thread.name != "upriver-closing"


@pytest.mark.slow
@pytest.mark.full
def test_it_grows_while_training_goes_on(fleets: list[LocalFleet], reference: list[list[Any]]) -> None:
    before = set(threading.enumerate())
    loader = loader_of(Watched(number=None, most=2), stalls=True)
    for epoch in reference:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number == len(epoch) - 2 and loader._growth is not None and loader._growth.why:
                until(lambda: len(servers(fleets[0])) == 2)
        assert same(found, epoch), f"{loader.report}"
        for server in servers(fleets[0]):
            with ServerClient(server.url) as stranger, pytest.raises(NotAuthorized):
                stranger.info()  # another user of this machine could have this user's code run
        assert loader._hired is not None
        if loader._hired.count == 2:
            break
    assert loader._hired is not None and loader._hired.count == len(servers(fleets[0])) == 2
    assert loader.report.made.keys() - {"here"} <= {server.url for server in servers(fleets[0])}
    assert "2 of at most 2 workers" in loader.why
    started = servers(fleets[0])
    fleets.clear()
    del loader
    until(lambda: not any(server.running for server in started))
    until(lambda: not {each.name for each in set(threading.enumerate()) - before if ours(each)})


@pytest.mark.full
def test_none_is_needed(fleets: list[LocalFleet], reference: list[list[Any]]) -> None:
    loader = loader_of(Watched(number=None, most=2), stalls=False)
    iterator = iter(loader)
    [server] = servers(fleets[0])
    assert same([list(iterator), list(loader)], reference[:2])
    assert not server.running and not servers(fleets[0])
    assert "no worker is needed" in loader.why
    assert loader.report.made == {"here": 2 * COUNT}
    assert "not needed" in loader.report.why_not[server.url]
    assert loader.offloading is None


@pytest.mark.full
@pytest.mark.slow
def test_one_that_has_died_is_replaced(fleets: list[LocalFleet], reference: list[list[Any]]) -> None:
    loader = loader_of(Watched(number=1, most=1), offload=Offloading(candidate="p2"))
    assert same(list(loader), reference[0])
    [server] = servers(fleets[0])
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.running)
    for epoch in reference[1:]:
        assert same(list(loader), epoch)
        if loader.report.made.get(other := next(iter(fleets[0]._servers), ""), 0):
            break
        until(lambda: servers(fleets[0]))
    assert other != server.url and loader.report.made[other]
    assert loader.report.why_not == {server.url: "it has ended"}


@pytest.mark.full
def test_a_fleet_that_is_stopped_starts_nobody() -> None:
    fleet = LocalWorkers(number=1, most=1).open(Serves(allow=["tests.dataloader.toy_datasets"]))
    fleet.stop()
    fleet.stop()
    with pytest.raises(ServerUnavailable, match="stopped"):
        fleet.start(1)
    assert not fleet.lost()


# -------------------------------------------------------------------------------------- impossible requests


def named_rows(batch: list[Any]) -> list[Any]:
    return list(batch)


@pytest.mark.parametrize(
    ("collate_fn", "names"),
    [
        (None, ["tests.dataloader.toy_datasets:Noisy"]),
        (rows, ["tests.dataloader.toy_datasets:Noisy"]),
        (
            named_rows,
            ["tests.dataloader.test_auto_workers:named_rows", "tests.dataloader.toy_datasets:Noisy"],
        ),
    ],
)
def test_what_is_allowed_is_what_makes_the_batches(collate_fn: Any, names: list[str]) -> None:
    asked: list[list[str]] = []

    class Asked(LocalWorkers):
        def open(self, what: Serves) -> Fleet:
            asked.append(list(what.allow))
            return LocalFleet(what, most=1)

    DataLoader(named(), collate_fn=collate_fn, workers=Asked(number=1, most=1))
    assert asked == [names]


def test_only_cpus_that_training_leaves() -> None:
    assert beside_training(0, cpus=8) == LocalWorkers(number=None, most=7)
    assert beside_training(5, cpus=8).most == 2
    for num_workers, cpus in ((0, 1), (3, 4), (9, 4)):
        with pytest.raises(ConfigError, match=r"upriver\.ray_workers\('auto'\)"):
            beside_training(num_workers, cpus=cpus)
    all_cpus = len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=rf"num_workers={all_cpus}\).*ray_workers"):
        DataLoader(named(), workers="auto", num_workers=all_cpus)


def test_processes_that_train_on_one_machine_share_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside_training(3, cpus=64, ranks=8).most == 4
    assert [beside_training(0, cpus=17, ranks=ranks).most for ranks in (1, 2, 3, 8)] == [16, 7, 4, 1]
    with pytest.raises(
        ConfigError, match="it has 64, for each of 8 processes that train 8, and training uses 8"
    ):
        beside_training(7, cpus=64, ranks=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert beside_training(0, cpus=64).most == 7
    for nothing in ("", "0", "-3", "many", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nothing)
        assert beside_training(0, cpus=64).most == 63


def test_processes_that_have_cpus_of_their_own_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    sharing = {0: {4, 5}, os.getppid(): set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", sharing.__getitem__)
    assert beside_training(0, cpus=2).most == 1


class Refusing(LocalFleet):
    """Fail to start more than a number of workers."""

    def __init__(self, what: Serves, *, most: int, can: int) -> None:
        super().__init__(what, most=most)
        self.can = can

    def _start(self) -> str:
        if not self.can:
            raise ServerUnavailable("no memory")
        self.can -= 1
        return super()._start()


@pytest.mark.full
def test_those_that_can_be_started_are_used() -> None:
    fleet = Refusing(Serves(allow=["tests.dataloader.toy_datasets"]), most=4, can=1)
    [url] = fleet.start(3)
    [server] = servers(fleet)
    assert server.url == url and server.running and fleet.room() == 3
    with pytest.raises(ServerUnavailable, match="no memory"):
        fleet.start(1)
    fleet.stop()
    assert not server.running


def test_what_does_not_hang_on_workers_is_kept_where_their_number_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))

    def job(workers: Provider) -> tuple[TunerMeasurements, ThroughputRecall]:
        loader = DataLoader(named(), batch_size=2, workers=workers, offload=AutoOffload(model="mine"))
        assert loader._recall is not None
        return loader._measured, loader._recall

    measured, recall = job(LocalWorkers(number=None, most=2))
    recall.begin()
    assert measured.gthp is None
    measured.gthp, measured.lthp, measured.pcycle, measured.pseconds = 100.0, 3.0, 2.0, 1.0
    measured.rthp, measured.ocycles = {"p2": 5.0}, {"p2": 0.5}
    recall.keep()
    for most in (2, 7):
        again, recall = job(LocalWorkers(number=None, most=most))
        recall.begin()
        assert (again.gthp, again.lthp, again.pcycle, again.pseconds) == (100.0, 3.0, 2.0, 1.0)
        assert not again.rthp and not again.ocycles


def test_what_is_not_measured_cannot_be_decided_by() -> None:
    for offload in ("always", Offloading(candidate="p2")):
        with pytest.raises(ConfigError, match="offload='auto' only"):
            loader_of(LocalWorkers(number=None, most=2), offload=offload)
    assert len(list(loader_of(LocalWorkers(number=None, most=2), offload="never"))) == COUNT // 2
