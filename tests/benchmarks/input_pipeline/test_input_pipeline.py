"""Test the benchmark of the input pipeline: its ways, its order of runs, its page, and its smallest form."""

from __future__ import annotations

import gc
import os
import subprocess
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import upriver
from benchmarks.harness import testbed
from benchmarks.harness.children import Failed, module_command, paths
from benchmarks.harness.records import Deadline, Records, TimeIsUp
from benchmarks.input_pipeline import __main__ as input_pipeline
from benchmarks.input_pipeline import measure as input_measure
from benchmarks.input_pipeline.__main__ import QUICK, SETTINGS, missing, parsed, run_all, version, versions_of
from benchmarks.input_pipeline.bed import Setting
from benchmarks.input_pipeline.data import make_data
from benchmarks.input_pipeline.job import Decided, TakesNext, Trainer
from benchmarks.input_pipeline.measure import HERE, HOPELESS, SKIPPED, Epochs, measure
from benchmarks.input_pipeline.model import EPOCHS, Consumer, train, train_apart
from benchmarks.input_pipeline.pace import Pace, Probe
from benchmarks.input_pipeline.report import GOALS, Found, page, verdict, write
from benchmarks.input_pipeline.workloads import CLASSES, MODULE, WORKLOADS
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.share import Backlog, OffloadShare
from upriver.rpc.local_server import EmbeddedServer
from upriver.types import DONE, START

SETTING = Setting(workload="R", stall=0.5, batches=10, repeats=2, ratios=(0.1, 0.5, 0.8, 0.9, 1.0))


# ------------------------------------------------------------------------------------------------- model


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(first: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.arange(first, first + count) % CLASSES
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(first)), targets


def slow(clock: Clock, seconds: list[float]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number, each in enumerate(seconds):
        clock.now += each
        yield batch(number)


def test_the_same_batches_give_the_same_losses_and_others_do_not() -> None:
    found = []
    for offset in (0, 0, 1):
        consumer = Consumer(0.0)
        for number in range(3):
            consumer(*batch(number + offset))
        found.append(consumer.losses)
    assert found[0] == found[1] != found[2]


def test_the_model_learns() -> None:
    consumer = Consumer(0.0)
    for _ in range(30):
        consumer(*batch(0))
    assert consumer.losses[-1] < 0.9 * consumer.losses[0]
    assert consumer.targets == [30] * 4 + [0] * 6


def test_a_step_is_its_wait_and_what_follows() -> None:
    clock, waits = Clock(), [3.0, 0.0, 2.0]
    consumer = Consumer(0.0)

    def step(*values: torch.Tensor) -> None:
        consumer(*values)
        clock.now += 1.0

    found = train(slow(clock, waits), step, clock=clock)
    assert found == {"steps_s": [4.0, 1.0, 3.0], "waits_s": waits, "seconds": 8.0}


def test_a_peers_epochs_end_with_their_samples() -> None:
    clock = Clock()
    steps = [
        float(number) for number in range(1, 2 * EPOCHS + 1)
    ]  # of four: two are an epoch of eight samples
    found = train_apart(slow(clock, steps), {"wait_s": 0.0, "samples": 8}, clock=clock)
    assert found["epochs_s"] == [4.0 * number + 3 for number in range(1, EPOCHS)]
    assert sum(found["targets"]) == 8 * EPOCHS and found["batches"] == 2 * EPOCHS


# --------------------------------------------------------------------------------------------------- ways


SPLIT = OffloadShare(0.5, OffloadStretch(start=START, stop=DONE, whole=True))
NOTHING = Backlog(here=0, elsewhere=0)


class Planned:
    """Epoch as `TakesNext` sees it; an arrival is the place of a ready batch."""

    def __init__(self, *missing: int) -> None:
        self._planned = deque(SimpleNamespace(missing=each) for each in missing)
        self._arrivals: SimpleQueue[int] = SimpleQueue()

    def _arrived(self, at: int) -> None:
        self._planned[at].missing = 0


def plan(epoch: Any, split: TakesNext) -> bool:
    epoch._planned.append(SimpleNamespace(missing=1))
    (goes,) = set(split.split(3, NOTHING))
    return bool(goes)


def test_greedy_gives_to_whoever_has_less_to_do() -> None:
    epoch = Planned()
    split = TakesNext(epoch, SPLIT)
    assert [plan(epoch, split) for _ in range(4)] == [False, True, False, True]
    for at in (1, 3):  # the worker is done with its two
        epoch._planned[at].missing = 0
    assert [plan(epoch, split) for _ in range(3)] == [True, True, False]


def test_greedy_looks_at_what_has_come_and_forgets_what_was_handed_out() -> None:
    epoch = Planned()
    split = TakesNext(epoch, SPLIT)
    assert [plan(epoch, split) for _ in range(2)] == [False, True]
    epoch._arrivals.put(0)
    assert plan(epoch, split) is False, "its batch was there"
    epoch._planned.popleft()
    assert [plan(epoch, split) for _ in range(2)] == [False, True]


def test_what_was_planned_before_greedy_does_not_count() -> None:
    epoch = Planned(1, 1, 1)
    split = TakesNext(epoch, SPLIT)
    assert [plan(epoch, split)] == [False] and split.stretch == SPLIT.stretch


class Deciding(upriver.DataLoader):
    """Loader that has decided from a certain look on."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def decided(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("looks", "at"), [(0, None), (1, 0), (3, 2), (4, 3), (5, None)])
def test_it_is_noted_when_a_loader_decides(looks: int, at: int | None) -> None:
    decided = Decided(Deciding(looks))
    assert list(decided.watched(range(3))) == [0, 1, 2]
    assert decided.at == at


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    make_data(folder, "words", 4)
    return folder


@pytest.fixture(scope="module")
def trainer(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths()["PYTHONPATH"])
        patch.setenv("UPRIVER_TOKEN", "token")
        patch.setenv("UPRIVER_CACHE", os.devnull)
        worker = EmbeddedServer.start_worker([MODULE], workers=1, token="token")
        spec = {"workload": "S", "root": str(root), "samples": 40, "batch_size": 4, "url": worker.url}
        yield Trainer({**spec, "cache": str(tmp_path_factory.mktemp("cache"))})
        worker.close()


@pytest.fixture(scope="module")
def reference(trainer: Trainer) -> dict[str, Any]:
    trainer.open(HERE, num_workers=0)
    return trainer.epoch(HERE, number=1, wait_s=0.0)


WAYS = {
    "remote": 40,
    "greedy": None,
    "p1 0.5": 20,
    "p2 0.5": 20,
    "p3 0.5": 20,
    "fastflow": None,
    "upriver": None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full
def test_every_way_has_the_same_losses(trainer: Trainer, reference: dict[str, Any], way: str) -> None:
    trainer.open(way, num_workers=0)
    told = trainer.epoch(way, number=1, wait_s=0.0)
    assert len(told["losses"]) == 10 and told["targets"] == reference["targets"] == [4] * CLASSES
    assert torch.equal(input_measure.bits(told["losses"]), input_measure.bits(reference["losses"]))
    assert told["made_here"] + told["made_elsewhere"] == 40 and told["why_not"] == []
    assert WAYS[way] in (None, told["made_elsewhere"])
    assert reference["made_here"] == 40 and reference["decided_at"] is None
    trainer.close(way)


@pytest.mark.full
def test_another_epoch_is_another_one_and_comes_again(trainer: Trainer, reference: dict[str, Any]) -> None:
    other = trainer.epoch(HERE, number=2, wait_s=0.0)
    assert other["losses"] != reference["losses"]
    assert trainer.epoch(HERE, number=1, wait_s=0.0)["losses"] == reference["losses"]


@pytest.mark.full
def test_pytorchs_loader_has_the_same_samples(trainer: Trainer, reference: dict[str, Any]) -> None:
    trainer.open("torch 0", num_workers=1)
    told = trainer.epoch("torch 0", number=1, wait_s=0.0)
    assert told["targets"] == reference["targets"] and "made_here" not in told


@pytest.mark.full
def test_a_greedy_epoch_that_nobody_iterates_ends_at_once(trainer: Trainer) -> None:
    epoch = iter(trainer._made("greedy", 0, torch.Generator()))
    next(epoch)
    left = weakref.ref(epoch)
    gc.disable()  # else a collection would end it at some time, in any thread
    try:
        del epoch
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.full
def test_epochs_in_one_pass_have_all_samples_of_each(trainer: Trainer) -> None:
    told = trainer.one_pass("upriver", num_workers=0, wait_s=0.0)
    assert told["targets"] == [4 * EPOCHS] * CLASSES and len(told["epochs_s"]) == EPOCHS - 1
    assert told["made_here"] + told["made_elsewhere"] == 40 * EPOCHS


@pytest.mark.parametrize("way", ["nowhere", "p4 0.5", "remote 0.5", "p2"])
@pytest.mark.full
def test_an_unknown_way_is_named(trainer: Trainer, way: str) -> None:
    with pytest.raises(ValueError, match="no such way"):
        trainer.open(way, num_workers=0)


# -------------------------------------------------------------------------------------------- measuring


class Simulated:
    """Job whose epochs last as a formula says: a second a batch here, half a second elsewhere.

    Args:
        decides_after: Epochs after which policies have decided.
        odd: Ways whose losses differ.
    """

    def __init__(self, *, decides_after: int = 2, odd: tuple[str, ...] = ()) -> None:
        self.decides_after, self.odd = decides_after, odd
        self.asked: list[tuple[str, int, int, float]] = []
        self.opened: dict[str, int] = {}
        self.closed: list[str] = []

    def open(self, way: str, *, num_workers: int) -> None:
        self.opened.setdefault(way, num_workers)

    def one_pass(self, way: str, *, num_workers: int, wait_s: float) -> dict[str, Any]:
        return {"epochs_s": [wait_s] * (EPOCHS - 1), "num_workers": num_workers}

    def epoch(self, way: str, *, number: int, wait_s: float) -> dict[str, Any]:
        before = sum(each[0] == way for each in self.asked)
        self.asked.append((way, number, self.opened[way], wait_s))
        kind, _, rest = way.partition(" ")
        shares = {"torch": 0.0, HERE: 0.0, "remote": 1.0, "greedy": 0.5}
        ratio = float(rest) if kind in ("p1", "p2", "p3") else shares.get(kind, 2 / 3)
        step_s = max(1.0 - ratio, 0.5 * ratio * (8 if kind == "p3" else 1), 0.1 + wait_s)
        step_s += 0.5 if way == "torch 0" else 0.0
        policy = kind in ("fastflow", "upriver")
        return {
            "steps_s": [9.0] * SKIPPED + [step_s] * 7 if before == 0 and way == "torch 1" else [step_s] * 10,
            "waits_s": [step_s - 0.1 - wait_s] * 10,
            "seconds": 10 * step_s,
            "losses": [float(number)] * 9 + [1.5 if way in self.odd else 1.0],
            "targets": [1] * CLASSES,
            "alone_s": 1.0,
            "decided_at": 5 if policy and before + 1 == self.decides_after else None,
            "cpu_s": {"trainer": 3.0, "worker": 1.0},
            "decided": policy and before + 1 >= self.decides_after,
            "candidate": "p2" if policy and before + 1 >= self.decides_after else None,
            "ratio": 2 / 3,
            "made_here": 100 - round(100 * ratio),
            "made_elsewhere": round(100 * ratio),
        }

    def close(self, way: str) -> None:
        self.closed.append(way)

    def count(self, way: str) -> int:
        return sum(each[0] == way for each in self.asked)


def measured(
    setting: Setting = SETTING, pace: Pace = lambda: 1.0, **options: Any
) -> tuple[dict[str, Any], Simulated]:
    job = Simulated(**options)
    return measure(job, setting, pace, lambda way: None), job


@pytest.mark.parametrize(("stall", "wait_s"), [(0.0, 1.4), (0.2, 0.7), (0.8, 0.1), (0.95, 0.0)])
def test_the_wait_makes_the_stall(stall: float, wait_s: float) -> None:
    found, job = measured(Setting(workload="R", stall=stall, batches=10, repeats=1, ratios=(0.5,)))
    assert found["step_s"] == pytest.approx(1.0), "the first steps do not count"
    assert found["wait_s"] == pytest.approx(wait_s)
    assert job.asked[0] == ("torch 1", input_measure.SWEPT, 1, 0.0)
    assert {each[3] for each in job.asked[1:]} == {found["wait_s"]}


def test_everything_runs_in_turns_and_as_often_as_it_must() -> None:
    found, job = measured()
    assert found["processes"] == 1 and sorted(found["tried_s"]) == ["0", "1", "2"]
    assert "torch 0" in job.closed and "torch 1" not in job.closed
    epochs = found["epochs"]
    assert [row["number"] for row in epochs["upriver"]] == [0, 1]
    assert [len(found["learned"][way]) for way in ("fastflow", "upriver")] == [2, 2]
    assert len(found["again"]) == 2 and found["candidate"] == "p2" and found["unequal"] == []
    ways = [each[0] for each in job.asked]
    first, second = (number for number, way in enumerate(ways) if way == "greedy")
    assert ways[first - 3 : first] == ways[second - 3 : second] == ["torch 1", HERE, "remote"]


def test_what_is_hopeless_is_not_repeated_nor_tried_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_measure, "OTHERWISE", "p3")
    found, job = measured(decides_after=99)  # p3, which is slow, is chosen
    assert found["candidate"] == "p3" and len(found["learned"]["upriver"]) == SETTING.most_learning
    seconds = {way: rows[0]["seconds"] for way, rows in found["epochs"].items()}
    slow_ones = [way for way, each in seconds.items() if each > HOPELESS * min(seconds.values())]
    assert "p3 0.5" in slow_ones and "p3 0.8" in slow_ones and job.count("p3 0.9") == 0
    assert [job.count(way) for way in ("p3 0.1", "p3 0.5", "p3 0.8")] == [2, 1, 1]


def test_small_ratios_are_no_reason_to_stop_where_large_ones_are_needed() -> None:
    _, job = measured(Setting(workload="R", stall=0.8, batches=10, repeats=2, ratios=(0.1, 0.2, 0.3, 0.6)))
    assert [job.count(f"p2 {ratio}") for ratio in (0.1, 0.2, 0.3, 0.6)] == [1, 1, 1, 2], (
        "one is near the best"
    )


def test_an_epoch_tells_how_slow_the_machine_was_before_and_after() -> None:
    left = deque([1.0, 2.0, 1.25, 1.1])
    epochs = Epochs(Simulated(), left.popleft, lambda way: None)
    assert [epochs.run(HERE, number)["slow"] for number in (0, 1)] == [[1.0, 2.0], [1.25, 1.1]]
    assert [row["number"] for row in epochs.rows[HERE]] == [0, 1]


def test_a_probe_tells_how_slow_both_cores_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    probe = Probe(root, "S")
    assert probe() == 1.0 and probe() >= 1.0
    taken = {0: [1.0, 2.0, 0.5], 1: [1.0, 3.0, 1.0]}
    monkeypatch.setattr(probe, "_shortest", {})
    monkeypatch.setattr(probe, "_on", lambda core: taken[core].pop(0))
    assert [probe(), probe(), probe()] == [1.0, 3.0, 1.0]
    assert os.sched_getaffinity(0) == before


def test_every_candidate_is_forced_where_the_disk_is_slow() -> None:
    found, _ = measured(Setting(workload="R", stall=0.5, batches=10, repeats=1, disk_mbit=40, ratios=(0.5,)))
    assert [len(found["epochs"][f"{name} 0.5"]) for name in ("p1", "p2", "p3")] == [1, 1, 1]


@pytest.mark.parametrize("way", ["remote", "p2 0.5", "upriver", "upriver again"])
def test_other_losses_are_found(way: str) -> None:
    found, _ = measured(odd=(way,))
    name = {"upriver again": "stored metrics"}.get(way, way)
    assert found["unequal"] and all(each.startswith(name) for each in found["unequal"])


# ---------------------------------------------------------------------------------------------- records


def recorded(folder: Path, setting: Setting = SETTING, **options: Any) -> Records:
    records = Records(folder / "records.jsonl")
    found, _ = measured(setting, **options)
    facts = {"version": versions_of(setting)[setting.key], "commit": "abc", "stored_bytes": 110_000}
    records.add(setting.key, {**facts, **found})
    return records


def with_peer(records: Records, setting: Setting, name: str, **changed: Any) -> str:
    key = f"{setting.key}|{name}"
    row = {
        "version": versions_of(setting)[key],
        "wait_s": records.rows[setting.key]["wait_s"],
        "epochs_s": [4.0, 4.5, 4.2],
        "version_of": "peer 1.0",
    }
    records.add(key, row | changed)
    return key


@pytest.mark.full
def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    setting = Setting(workload="R", stall=0.5, batches=10, repeats=1, ratios=(0.5,), peers=("ray", "tfdata"))
    empty = Records(tmp_path / "none.jsonl")
    keys = [setting.key, f"{setting.key}|ray", f"{setting.key}|tfdata"]
    assert missing(setting, empty) == keys
    records = recorded(tmp_path, setting)
    assert missing(setting, records) == keys[1:]
    with_peer(records, setting, "ray")
    with_peer(records, setting, "tfdata", wait_s=99.0)
    assert missing(setting, records) == keys[2:], "it had another accelerator"
    with_peer(records, setting, "tfdata")
    assert missing(setting, Records(records.path)) == []
    records.add(setting.key, {**records.rows[setting.key], "version": "old"})
    assert missing(setting, records) == keys, "other code, and everything is compared in one run"


def test_a_version_is_of_the_code_that_it_depends_on(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("one = 1\n")
    first = version("job", package=tmp_path)
    assert first == version("job", package=tmp_path) != version("bed", package=tmp_path)
    source.write_text("one = 2\n")
    second = version("job", package=tmp_path)
    assert second != first
    for part in ("coldstart", "inference", "rpc"):
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
        (tmp_path / part / "b.py").write_text("two = 2\n")
        assert (version("job", package=tmp_path) == second) == (part != "rpc"), part


def test_settings_have_keys_of_their_own_and_cover_every_stall_and_workload() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.workload for setting in SETTINGS} == set(WORKLOADS)
    assert {setting.stall for setting in SETTINGS} == {0.0, 0.2, 0.4, 0.6, 0.8}
    assert any(setting.mbit == 200 for setting in SETTINGS)
    assert any(setting.disk_mbit for setting in SETTINGS)


@pytest.mark.parametrize("wrong", [{"workload": "X"}, {"stall": 1.0}, {"stall": -0.1}])
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Setting(**{"workload": "R", "stall": 0.5, **wrong})


@pytest.mark.full
def test_no_setting_begins_when_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(TimeIsUp):
        run_all([SETTING], Records(tmp_path / "r.jsonl"), Deadline(0), files=1)


def test_a_peer_without_its_environment_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_BENCHMARK_TENSORFLOW", str(tmp_path / "nothing"))
    with pytest.raises(Failed, match="pip install 'tensorflow-cpu"):
        input_pipeline.interpreter("tfdata")


def test_the_command_line() -> None:
    assert parsed([]).only == [""] and parsed(["--only", "R", "T"]).only == ["R", "T"]


# --------------------------------------------------------------------------------------------- the page


def found_with(tmp_path: Path, setting: Setting = SETTING, **seconds: float) -> Found:
    """Return a setting whose ways need these seconds."""
    records = recorded(tmp_path, setting)
    for way, each in seconds.items():
        for row in records.rows[setting.key]["epochs"][way]:
            row["seconds"] = each
    return Found(setting, records)


@pytest.mark.full
def test_who_is_ahead(tmp_path: Path) -> None:
    found = found_with(tmp_path, greedy=4.9, fastflow=5.1, upriver=4.998)
    assert found.best == "greedy" and found.behind == pytest.approx(0.02)
    assert found.goals["best or near it"]
    behind = found_with(tmp_path, greedy=4.9, fastflow=5.1, upriver=5.1)
    assert not behind.goals["best or near it"]


def test_a_peer_counts_if_its_accelerator_was_the_same(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    assert not Found(SETTING, records).peers
    key = f"{SETTING.key}|ray"
    wait_s = records.rows[SETTING.key]["wait_s"]
    records.add(key, {"wait_s": wait_s, "epochs_s": [1.0, 3.0, 2.0], "version_of": "ray 2"})
    found = Found(SETTING, records)
    assert not found.peers, "there is nothing of ours in one pass"
    records.rows[SETTING.key]["passed"] = {"epochs_s": [1.5, 1.02, 2.0]}
    found = Found(SETTING, records)
    assert found.behind_peer == pytest.approx(0.02) and found.goals["peers"]
    records.rows[SETTING.key]["passed"] = {"epochs_s": [1.5, 1.04, 2.0]}
    assert not Found(SETTING, records).goals["peers"]
    records.add(key, {**records.rows[key], "wait_s": wait_s + 1})
    assert Found(SETTING, records).behind_peer is None and "peers" not in Found(SETTING, records).goals


def test_the_best_fixed_ratio_is_of_every_candidate_and_nothing(tmp_path: Path) -> None:
    found = found_with(tmp_path)
    assert found.best_fixed == ("p2", 0.5, 5.0) or found.best_fixed[2] <= 6.0
    assert found.sweep["p2"][0.0] == found.seconds(HERE)
    nothing = found_with(tmp_path, **{HERE: 1.0})
    assert nothing.best_fixed[1:] == (0.0, 1.0)
    assert nothing.over_fixed == pytest.approx(nothing.seconds("upriver") - 1)


def test_profiling_is_what_its_batches_took_beyond_their_due(tmp_path: Path) -> None:
    found = found_with(tmp_path, upriver=5.0)
    rows = [
        {"steps_s": [1.0] * 10, "decided_at": None, "decided": False, "slow": [1.0, 1.0]},
        {"steps_s": [2.0] * 4 + [0.5] * 6, "decided_at": 4, "decided": True, "slow": [1.0, 2.0]},
    ]
    found = Found(SETTING, SimpleNamespace(rows={SETTING.key: {**found.row, "learned": {"upriver": rows}}}))
    spent_s, nothing_s = found.learning("upriver")
    assert spent_s == 18.5 and nothing_s == pytest.approx(18.5 - (10 + 5 * 1.5) * 0.5)
    known = [{"steps_s": [0.5] * 10, "decided_at": None, "decided": True, "slow": [1.0, 1.0]}]
    row = {**found.row, "again": known}
    again = Found(SETTING, SimpleNamespace(rows={SETTING.key: row}))
    assert again.learning("upriver", again=True) == (0.0, 0.0), "decided before it began"


def test_profiling_without_a_decision_is_missed(tmp_path: Path) -> None:
    met = Found(SETTING, recorded(tmp_path / "met"))
    assert met.goals["profiling"] and met.decided("upriver") == "p2 67%"
    never = Found(SETTING, recorded(tmp_path / "never", decides_after=99))
    assert never.decided("upriver") == "" and "none yet" in page([never], "page")
    assert not never.goals["profiling"] and not never.goals["profiling, stored metrics"]


def test_where_nothing_stalls_nothing_may_be_offloaded(tmp_path: Path) -> None:
    calm = Setting(workload="R", stall=0.0, batches=10, repeats=1, ratios=(0.5,))
    found = found_with(tmp_path, calm)
    assert found.goals["nothing offloaded"] is False, "the simulated policy always offloads"
    assert "nothing offloaded" not in found_with(tmp_path).goals
    for row in found.row["epochs"]["upriver"]:
        row |= {"made_here": 100, "made_elsewhere": 0}
    assert found.goals["nothing offloaded"] is True


def test_verdicts_name_where_a_goal_is_missed(tmp_path: Path) -> None:
    good = found_with(tmp_path, upriver=4.0)
    assert verdict("best or near it", [good]).endswith("**met**, met in 1 of 1 settings")
    bad = found_with(tmp_path, upriver=9.0)
    assert verdict("best or near it", [bad]).endswith(f"not in {SETTING.key}")
    assert verdict("nothing offloaded", [good]).endswith("not judged")
    assert "not judged" in verdict("best or near it", [])


def test_the_page_and_its_picture_say_what_there_is(tmp_path: Path) -> None:
    disk = Setting(workload="R", stall=0.6, disk_mbit=40, batches=10, repeats=2, ratios=(0.5, 1.0))
    records = recorded(tmp_path, odd=("remote",))
    found, _ = measured(disk)
    records.rows[SETTING.key]["passed"] = {"epochs_s": [1.5, 1.02, 2.0]}
    records.add(disk.key, {**records.rows[SETTING.key], **found})
    with_peer(records, SETTING.with_peers("ray"), "ray")
    every = [Found(SETTING, records), Found(disk, records), Found(QUICK[0], records)]
    text = write(every, tmp_path, "page")
    assert (tmp_path / "page.md").read_text() == text == page(every, "page")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert f"Not run yet: {QUICK[0].key}" in text and "remote, epoch 0" in text
    assert "5.00 s at 50%" in text and "peer 1.0" in text and "have not been run: tf.data service" in text
    assert all(goal in text for goal in GOALS.values())


def test_a_page_of_nothing(tmp_path: Path) -> None:
    text = write([Found(SETTING, Records(tmp_path / "none.jsonl"))], tmp_path, "none")
    assert "not judged" in text and SETTING.key in text and not (tmp_path / "none.png").exists()


# --------------------------------------------------------------------------------------------- a real run


@pytest.mark.full
def test_the_smallest_form_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    try:
        with testbed.Testbed(check=False):
            pass
    except testbed.Unavailable as error:
        pytest.skip(str(error))
    command = module_command("input_pipeline", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr
    (key,) = (setting.key for setting in QUICK)
    records = Records(tmp_path / "input_pipeline_quick.jsonl")
    row = records.rows[key]
    assert row["unequal"] == [] and key in done.stdout
    made = {way: rows[0].get("made_elsewhere") for way, rows in row["epochs"].items()}
    samples = QUICK[0].samples
    assert made[HERE] == 0 and made["remote"] == samples and 0 < made["greedy"] < samples
    candidate = row["candidate"]
    assert made[f"{candidate} 1"] == samples and made[f"{candidate} 0.5"] == samples // 2
    for rows in row["learned"].values():  # a busy machine may give no figures to decide by
        assert rows[-1]["decided"] or len(rows) == QUICK[0].most_learning
    assert list(row["learned"]) == ["fastflow", "upriver"]
    left = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=120)
    assert left.stdout.strip() == f"{key}: finished"
