"""Test the runs and records of `cold_start`: by simulated runs, and once with real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cold_start import __main__ as cold_start
from benchmarks.cold_start import bed as cold_bed
from benchmarks.cold_start import measure as cold_measure
from benchmarks.cold_start import settings as cold_settings
from benchmarks.cold_start import ways as cold_ways
from benchmarks.cold_start.bed import copied
from benchmarks.cold_start.found import Found, wrong
from benchmarks.cold_start.measure import (
    AFTER_REPEATS,
    BASELINES,
    TRIES,
    Measures,
    after_key,
    baseline_key,
    missing,
    narrowed,
    sweep_key,
    turn_key,
)
from benchmarks.cold_start.models import MODELS, SMALL
from benchmarks.cold_start.peers import Peers
from benchmarks.cold_start.report import verdict
from benchmarks.cold_start.settings import (
    CROSSED,
    MAIN,
    OURS,
    PARTS,
    PLAIN,
    QUICK,
    SETTINGS,
    STREAMED,
    SWEEPS,
    WAYS,
    XL,
    Setting,
    forms_of,
    swept,
    way_of,
)
from benchmarks.cold_start.versions import CONSTRUCTION, Versions
from benchmarks.cold_start.ways import LOADERS
from benchmarks.harness import testbed
from benchmarks.harness.children import Failed, module_command
from benchmarks.harness.records import Deadline, Records, TimeIsUp
from tests.benchmarks.cold_start.simulated import (
    NBYTES,
    PACKAGES,
    SETTING,
    VERSIONS,
    Simulated,
    keys_of,
    made,
    measured,
    tasks_of,
)
from upriver.program.graph.weights_file import ALIGNMENT
from upriver.store import Store

# --------------------------------------------------------------------------------------------- settings


def test_settings_have_keys_of_their_own_and_cover_models_links_and_batches() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.model for setting in SETTINGS} == set(MODELS) == {*MAIN, *SMALL, XL.model}
    assert {setting.gbit for setting in SETTINGS} == {None, 0.1, 1.0}
    assert {1, 32} <= {setting.batch for setting in SETTINGS}
    for setting in SETTINGS:
        assert setting.repeats >= 10 or setting.gbit == 0.1 or setting == XL
    for model in (*MAIN, *SMALL):
        both = [run for each in SETTINGS if each.model == model for run in each.runs]
        assert {way + ending for way in WAYS for ending in ("", PLAIN)} - set(both) <= (
            set() if model in CROSSED else {"pisel" + PLAIN, "layers" + PLAIN}
        )
    thin = [setting for setting in SETTINGS if setting.gbit == 0.1]
    assert [(each.batch, each.repeats) for each in thin] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    "wrong_one",
    [{"model": "none"}, {"batch": 0}, {"cores": 3}, {"ways": ("nobody",)}, {"plain": ("no",)}],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused(wrong_one: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong_one))):
        Setting(**{"model": "gpt2", **wrong_one})


def test_every_way_runs_with_and_without_our_construction_and_after_another_one_each_turn() -> None:
    assert set(SETTING.runs) == {way + ending for way in WAYS for ending in ("", PLAIN)}
    turns = [SETTING.turn(number) for number in range(10)]
    assert turns == [SETTING.turn(number) for number in range(10)]
    assert all(sorted(set(turn) - {PARTS}) == sorted(SETTING.runs) for turn in turns)
    assert [PARTS in turn for turn in turns] == [True] * 5 + [False] * 5
    for run in SETTING.runs:
        places = [turn.index(run) for turn in turns]
        before = {turn[place - 1] for turn, place in zip(turns, places, strict=True) if place}
        assert len(before) > 3, "neighbours vary"
        assert min(places) < 9 < max(places), "early in some turns, late in others"
    assert narrowed(SETTING, {OURS}, 1).runs == (OURS, OURS + PLAIN)
    assert narrowed(SETTING, WAYS, 99).repeats == SETTING.repeats
    assert Setting(model="gpt2", ways=(OURS, "runai"), plain=("runai",)).runs == (
        OURS,
        "runai",
        "runai" + PLAIN,
    )


def test_every_way_has_a_loader_and_a_form() -> None:
    assert set(LOADERS) == set(cold_settings.FORMS) == set(WAYS)
    assert set(forms_of(SETTING)) == set(cold_settings.FORMS.values())


# ---------------------------------------------------------------------------------------------- records


@pytest.mark.full
def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    expected = {sweep_key(SETTING, way) for way in WAYS}
    expected |= {baseline_key(SETTING, number, way) for number in range(BASELINES) for way in WAYS}
    expected |= {turn_key(SETTING, number, run) for number in range(3) for run in SETTING.turn(number)}
    expected |= {after_key(SETTING, number) for number in range(min(AFTER_REPEATS, SETTING.repeats))}
    first = keys_of(SETTING, Records(tmp_path / "none.jsonl"))
    assert set(first) == expected and len(first) == len(expected)
    records, jobs = measured(tmp_path)
    assert keys_of(SETTING, Records(records.path)) == []
    assert len(jobs.published) == 1
    more = Setting(model="gpt2", repeats=5)
    left = keys_of(more, records)
    assert {key.split("|")[1] for key in left} == {"turn3", "turn4", "after3", "after4"}
    key = turn_key(SETTING, 1, "runai")
    records.add(key, {**records.rows[key], "version": "old"})
    assert keys_of(SETTING, records) == [key]


def test_everybody_takes_turns_with_ours_anew_where_ours_is_of_other_code(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    key, turn = turn_key(SETTING, 1, OURS), {turn_key(SETTING, 1, run) for run in SETTING.runs}
    records.add(key, {**records.rows[key], "version": "old"})
    assert set(keys_of(SETTING, records)) == turn
    for run in (OURS, "runai"):  # and then it was interrupted
        each = turn_key(SETTING, 1, run)
        records.add(each, {**records.rows[each], "version": VERSIONS.of("run", run), "begun": 2e9})
    assert set(keys_of(SETTING, records)) == turn - {key, turn_key(SETTING, 1, "runai")}


def test_a_peer_that_came_later_takes_part_in_every_turn_and_nobody_else_again(tmp_path: Path) -> None:
    without = narrowed(SETTING, set(WAYS) - {"runai"})
    records, _ = measured(tmp_path, without)
    assert keys_of(without, records) == []
    left = missing(SETTING, records, VERSIONS)
    assert {way_of(task.run) for task in left} == {"runai"}
    assert {task.do for task in left} == {"run", "sweep", "baseline"}
    assert {task.key for task in left if task.do == "run"} == {
        turn_key(SETTING, number, run) for number in range(3) for run in ("runai", "runai" + PLAIN)
    }


def test_what_fails_is_tried_once_more(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, failing=("runai", "pisel"))
    left = missing(SETTING, records, VERSIONS)
    assert {way_of(task.run) for task in left} == {"runai", "pisel"}
    made(Simulated(failing=("runai",)), records)
    assert missing(SETTING, records, VERSIONS) == []
    assert records.rows[turn_key(SETTING, 0, "runai")]["tries"] == TRIES
    assert records.rows[turn_key(SETTING, 0, "pisel")]["equal"]


def test_a_sweep_is_of_the_knobs_that_there_are(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    key = sweep_key(SETTING, "runai")
    records.add(key, {**records.rows[key], "knobs": [1, 2]})
    assert keys_of(SETTING, records) == [key]


RUNS = [run for way in WAYS for run in (way, way + PLAIN)]


@pytest.mark.full
def test_a_record_of_a_copy_is_of_the_same_code(tmp_path: Path) -> None:
    copy = Versions(copied(tmp_path), PACKAGES)
    assert [copy.of("run", run) for run in RUNS] == [VERSIONS.of("run", run) for run in RUNS]


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "text", "aged"),
    [
        pytest.param("benchmarks/cold_start/models.py", "ONE = 1", set(WAYS), marks=pytest.mark.full),
        pytest.param("benchmarks/cold_start/ways.py", "# a remark", set(), marks=pytest.mark.full),
        ("src/upriver/store/more.py", "ONE = 1", {*STREAMED, "sequential"}),
        pytest.param(
            "src/upriver/coldstart/model/construction.py", "ONE = 1", set(WAYS), marks=pytest.mark.full
        ),
        pytest.param(
            "src/upriver/coldstart/model/weight_barrier.py", "ONE = 1", set(WAYS), marks=pytest.mark.full
        ),
        ("src/upriver/server/more.py", "ONE = 1", set()),
    ],
)
def test_a_record_is_of_the_code_that_it_depends_on(
    file: str, text: str, aged: set[str], tmp_path: Path
) -> None:
    code = copied(tmp_path)
    earlier = {run: VERSIONS.of("run", run) for run in RUNS}
    with (code / file).open("a") as module:
        module.write(f"\n{text}\n")
    after = Versions(code, PACKAGES)
    assert {way for way in WAYS if after.of("run", way) != earlier[way]} == aged
    if file.startswith("src"):
        plain = {way for way in aged if after.of("run", way + PLAIN) != earlier[way + PLAIN]}
        assert plain == aged & {*STREAMED, "sequential"}, "who constructs by itself needs nothing of ours"


@pytest.mark.full
def test_a_peers_record_is_of_its_own_class_and_packages(tmp_path: Path) -> None:
    code = copied(tmp_path)
    path = code / "benchmarks" / "cold_start" / "ways.py"
    before = {way: VERSIONS.of("run", way) for way in WAYS}
    path.write_text(
        path.read_text().replace("found.load_into_module(network)", "found.load_into_module(model)")
    )
    after = Versions(code, {"boto3": "2"})
    changed = {way for way in WAYS if after.of("run", way) != before[way]}
    assert changed == {"tensorizer", "boto3-safetensors", "boto3-torch"}
    assert VERSIONS.of("parts", "sequential") != VERSIONS.of("run", "sequential")


@pytest.mark.full
def test_versions_name_all_that_constructs_for_everybody() -> None:
    script = (
        "import sys\n"
        "from benchmarks.cold_start import ways\n"
        "ways._our_construction()\n"
        "print(*(name for name in sys.modules if name.startswith('upriver.coldstart.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=cold_bed.paths(), capture_output=True, text=True, check=True
    )
    named = {f"upriver.coldstart.{name.replace('/', '.')}" for name in CONSTRUCTION}
    assert set(done.stdout.split()) - named == {
        "upriver.coldstart.model",
        "upriver.coldstart.model.arrivals",
    }, "a package, and what only Gate needs"


def test_processes_run_a_copy_that_no_edit_reaches(tmp_path: Path) -> None:
    code = copied(tmp_path)
    assert (code / "src" / "upriver" / "coldstart" / "fetch" / "weight_stream.py").exists()
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import benchmarks.cold_start.ways as w, upriver; print(w.__file__, upriver.__file__)",
        ],
        cwd=code / "src",  # a command finds what lies where it is begun before all else
        env=cold_bed.paths(code),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(each).is_relative_to(tmp_path) for each in said)


def test_forward_passes_are_compared_once_a_model() -> None:
    compared = [setting.model for setting in SETTINGS if cold_measure.has_after(setting)]
    assert sorted(compared) == sorted([*MAIN, *SMALL])


@pytest.mark.full
def test_no_setting_begins_when_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(TimeIsUp):
        cold_start.run_all(
            [SETTING], Records(tmp_path / "r.jsonl"), Deadline(0), Peers(without=True), [], quick=True
        )


def test_no_turn_begins_when_time_is_up(tmp_path: Path) -> None:
    jobs = Simulated()
    measures = Measures(jobs, Records(tmp_path / "r.jsonl"), [SETTING], VERSIONS, lambda _: None)
    with pytest.raises(TimeIsUp):
        cold_start.go_through(measures, Deadline(0), [], lambda _: None)
    assert not jobs.asked


def test_settings_take_turns_one_after_another_and_what_fails_holds_up_nobody(tmp_path: Path) -> None:
    class Bad(Simulated):
        def shape(self, rate: float | None) -> float | None:
            if rate is not None and len(self.asked) < 60:
                raise testbed.TestbedError("the link is busy")
            return super().shape(rate)

        def publish(
            self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]
        ) -> dict[str, Any]:
            if model == "vgg19":
                raise Failed("no room")
            return super().publish(model, forms, calls)

    settings = [
        Setting(model="gpt2", gbit=1.0, repeats=3, ways=(OURS,)),
        Setting(model="vgg19", repeats=2, ways=(OURS,)),
        Setting(model="bert", repeats=2, ways=(OURS, "runai")),
    ]
    records, jobs = Records(tmp_path / "r.jsonl"), Bad(failing=("runai",))
    failed, said = list[str](), list[str]()
    measures = Measures(jobs, records, settings, VERSIONS, lambda _: None)
    cold_start.go_through(measures, Deadline(None), failed, said.append)
    assert [line.split(":")[0] for line in said] == [
        f"{settings[0].key}, turn 0",
        f"{settings[1].key}, turn 0",
        f"{settings[2].key}, turn 0",
        f"{settings[0].key}, turn 1",
        f"{settings[2].key}, turn 1",
        f"{settings[0].key}, turn 2",
    ], "a model that cannot be published is not tried again; a link is"
    assert len([why for why in failed if "no room" in why]) == 1
    assert any("the link is busy" in why for why in failed)
    assert not any("runai" in why for why in failed), "a peer's failure is for the report"
    jobs.failing = (OURS,)
    more = Setting(model="bert", repeats=3, ways=(OURS, "runai"))
    cold_start.go_through(
        Measures(jobs, records, [more], VERSIONS, lambda _: None), Deadline(None), failed, said.append
    )
    assert any(turn_key(more, 2, OURS) in why and "does not start" in why for why in failed)


# --------------------------------------------------------------------------------------------- measuring


def test_models_are_published_once_in_every_form_and_with_every_answer_that_is_asked_for(
    tmp_path: Path,
) -> None:
    settings = [
        Setting(model="resnet50", batch=4, ways=(OURS,), repeats=1),
        Setting(model="resnet50", cores=2, ways=(OURS, "boto3-torch"), repeats=1),
    ]
    records, jobs = Records(tmp_path / "r.jsonl"), Simulated()
    measures = Measures(jobs, records, settings, VERSIONS, lambda _: None)
    for setting in settings:
        for task in measures.missing(setting):
            measures.make(task)
    forms = {model: (forms, calls) for model, forms, calls in jobs.published}
    assert [model for model, _, _ in jobs.published] == ["gpt2", "resnet50"], "one to find knobs with"
    assert forms["resnet50"] == (("upriver.safetensors", "model.pt"), {(4, 1), (1, 2)})
    assert forms["gpt2"][1] == {(1, 1)}


def test_a_sweep_takes_the_best_that_answers_rightly(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, failing=("tensorizer",), unaligned=("boto3-torch",))
    sweeps = {way: records.rows[sweep_key(SETTING, way)] for way in WAYS}
    assert sweeps[OURS]["choice"] == {"knob": 16, "assign": False}
    assert sweeps["boto3-safetensors"]["choice"] == {"knob": 16, "assign": True}
    assert sweeps["boto3-torch"]["choice"] == {"knob": 16, "assign": False}
    assert [row["seconds"] for row in sweeps["tensorizer"]["tried"]] == [None] * len(WAYS["tensorizer"].knobs)
    said = sweeps["tensorizer"]["error"]
    assert "does not start" in said and "and says why" in said and "machine" not in said
    assert sweeps["tensorizer"]["tries"] == 1


def test_of_values_that_are_as_good_a_sweep_takes_the_lowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_measure, "SWEEP_EVEN", 1e9)
    records, _ = measured(tmp_path)
    for way in WAYS:
        choice = records.rows[sweep_key(SETTING, way)]["choice"]
        assert choice == {"knob": WAYS[way].knobs[0], "assign": WAYS[way].assigns}


def test_values_of_a_sweep_take_turns_and_hopeless_ones_only_one(tmp_path: Path) -> None:
    _, jobs = measured(tmp_path, keys=[sweep_key(SETTING, OURS)])
    assert [spec["knob"] for _, _, _, spec in jobs.asked] == [1, 4, 16, *((4, 16) * (SWEEPS - 1))]


def test_small_models_are_swept_by_themselves(tmp_path: Path) -> None:
    small = Setting(model="squeezenet", repeats=1, ways=(OURS,))
    _, jobs = measured(tmp_path, small)
    assert jobs.asked[0][3]["model"] == "mobilenet" and sweep_key(small, OURS) != sweep_key(SETTING, OURS)
    assert [model for model, _, _ in jobs.published] == ["mobilenet", "squeezenet"]


def test_streamed_ways_have_learnt_of_the_link_before_they_count(tmp_path: Path) -> None:
    records, jobs = measured(tmp_path)
    before = [run for do, run, _, _ in jobs.asked if do == "run"]
    for run in SETTING.runs:
        more = way_of(run) in STREAMED and run not in WAYS  # the others learn in the sweep
        assert run in WAYS or before.count(run) == SETTING.repeats + more
    jobs.asked = []
    later = [turn_key(SETTING, number, run) for number in range(2) for run in (OURS, "runai")]
    made(jobs, records, keys=later)
    assert [run for _, run, _, _ in jobs.asked] == [OURS, OURS, "runai", OURS, "runai"], "once a start"


def test_a_record_says_what_it_follows_what_the_link_carries_and_what_peers_have(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, link=1e8)
    first, second = SETTING.turn(0)[-2:]
    row = records.rows[turn_key(SETTING, 0, second)]
    assert row["follows"] == first and row["carried"] == 1e8 and row["nbytes"] == NBYTES
    assert records.rows[turn_key(SETTING, 0, "runai")]["packages"] == dict.fromkeys(WAYS["runai"].needs, "")


def test_the_load_that_is_kept_is_that_before_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, records = Simulated(), Records(tmp_path / "r.jsonl")
    monkeypatch.setattr(os, "getloadavg", lambda: (float(len(jobs.asked)), 0.0, 0.0))
    made(jobs, records, keys=[sweep_key(SETTING, way) for way in (OURS, "runai")])
    assert records.rows[sweep_key(SETTING, OURS)]["load"] == 0
    assert 0 < records.rows[sweep_key(SETTING, "runai")]["load"] < len(jobs.asked)


def test_a_download_is_read_into_aligned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_ways, "PART_BYTES", 10_000_001)
    (tmp_path / "object").write_bytes(data := os.urandom(34 << 20))  # which malloc aligns by 16
    found = cold_ways.downloaded(Store.open(tmp_path.as_uri()), "object", 35_000_000, 3)
    assert bytes(found.numpy()) == data[:35_000_000] and found.data_ptr() % ALIGNMENT == 0


def test_a_slow_link_takes_the_knobs_of_a_faster_one(tmp_path: Path) -> None:
    thin = Setting(model="resnet50", gbit=0.1, repeats=1, ways=(OURS,))
    assert swept(thin) == Setting(model="gpt2", gbit=1.0, repeats=1, ways=(OURS,))
    assert swept(replace(thin, cores=2)) == swept(thin)
    _, jobs = measured(tmp_path, thin)
    assert jobs.rates[0] == 1e9 / 8 and jobs.rates[-1] == 1e8 / 8
    assert next(link for _, _, link, _ in jobs.asked) == "1Gbit-1core"


def test_weights_that_are_taken_as_they_came_are_copied_where_that_changes_bits(tmp_path: Path) -> None:
    records, jobs = measured(tmp_path)
    assert records.rows[turn_key(SETTING, 0, "sequential")]["assign"] is True
    jobs.unaligned, jobs.asked = ("sequential",), []
    measures = Measures(jobs, records, [SETTING], VERSIONS, lambda _: None)
    for task in tasks_of(SETTING, [turn_key(SETTING, number, "sequential") for number in range(2)]):
        measures.make(task)
    row = records.rows[turn_key(SETTING, 0, "sequential")]
    assert row["equal"] and row["assign"] is False
    assert [spec["assign"] for _, _, _, spec in jobs.asked] == [True, False, False], "it is remembered"


def test_who_fails_is_told_and_ours_fails_the_benchmark(tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path, failing=("runai",))[0])
    assert not found.usable("runai") and found.usable(OURS) and found.goals["right"]
    assert any("runai: 3 times runai does not start … and says why" in line for line in found.told())
    assert wrong([found]) == ["runai answered rightly nowhere, so nothing is compared with it"]
    assert f"they failed or were wrong: runai in {SETTING.key}" in verdict("fastest", [found])
    ours = Found(SETTING, measured(tmp_path / "ours", failing=(OURS,))[0])
    assert not ours.goals["right"] and not ours.goals["fastest"]
    assert f"{SETTING.key}, {OURS}: an answer is missing" in wrong([ours])


# -------------------------------------------------------------------------------------------- a real run


@pytest.mark.full
def test_the_smallest_form_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    command = module_command("cold_start", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    (setting,) = QUICK
    assert setting.key in done.stdout
    rows = Records(tmp_path / "cold_start_quick.jsonl").rows
    assert all(rows[turn_key(setting, 0, run)]["equal"] for run in (*setting.runs, PARTS))
    left = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=120)
    assert left.stdout.strip() == f"{setting.key}: finished"
