"""What `cold_start.py` runs and keeps, and what it makes of that: by made-up runs, and once in earnest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cold_bed
import cold_measure
import cold_settings
import cold_start
from _netns import PAYLOAD_SHARE
from _planned import Deadline, Records, TimeIsUp
from cold_bed import Lines, Local, Peers, told
from cold_bound import Parts
from cold_measure import (
    AFTER_REPEATS,
    Measures,
    after_key,
    baseline_key,
    missing,
    narrowed,
    sweep_key,
    turn_key,
    version,
)
from cold_models import MODELS, SMALL
from cold_report import GOALS, IMPORTED, STARTED, Found, page, verdict, write, wrong
from cold_settings import MAIN, OURS, PLAIN, QUICK, SETTINGS, WAYS, XL, Setting, forms_of, swept, way_of
from cold_ways import LOADERS
from input_bed import Failed
from upriver.coldstart.grouping import GROUPINGS
from upriver.coldstart.timeline import Timeline

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETTING = Setting(model="gpt2", repeats=3)
NBYTES = 100_000_000


class Simulated:
    """Jobs without a process.

    Args:
        seconds: From the end of imports, of each way; 2 where nothing is said, 3 if built as ever.
        wrong: Runs whose answers are wrong, and ``parts`` or ``after``.
        failing: Ways that cannot be run.
        unaligned: Ways whose answers are wrong where tensors are taken as they came.
    """

    def __init__(
        self,
        *,
        seconds: dict[str, float] | None = None,
        wrong: Collection[str] = (),
        failing: Collection[str] = (),
        unaligned: Collection[str] = (),
    ) -> None:
        self.seconds, self.wrong = seconds or {}, wrong
        self.failing, self.unaligned = failing, unaligned
        self.asked: list[tuple[str, str, str, dict[str, Any]]] = []
        self.published: list[tuple[str, tuple[str, ...], set[tuple[int, int]]]] = []
        self.rates: list[float | None] = []

    def shape(self, rate: float | None) -> None:
        self.rates.append(rate)

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        self.published.append((model, tuple(forms), set(calls)))
        return {"nbytes": NBYTES, "tensors": 10}

    def ask(self, do: str, run: str, *, way: Any, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        self.asked.append((do, run, link, spec))
        if way_of(run) in self.failing:
            raise Failed(f"{run} does not start\nand says why")
        if do == "baseline":
            return {"hwm_bytes": 400_000_000, "group_bytes": 300_000_000, "group_file": "memory.peak"}
        if do == "parts":
            return parts_row() | {"equal": "parts" not in self.wrong}
        if do == "after":
            seconds = {"arrived": [0.2, 0.21], "plain": [0.2, 0.2], "control": [0.2, 0.2]}
            return {"seconds": seconds, "equal": "after" not in self.wrong, "kind": "Model"}
        took = self.seconds.get(run, self.seconds.get(way_of(run), 2.0) + (run != way_of(run)))
        took += 1 / spec["knob"] - 0.1 * spec["assign"]
        return {
            "hwm_bytes": 505_000_000,
            "group_bytes": 500_000_000,
            "group_file": "memory.peak",
            "after_imports_s": took,
            "total_s": took + 4.0,
            "imported_s": 4.0,
            "cpu_s": 3.0,
            "equal": run not in self.wrong and not (spec["assign"] and way_of(run) in self.unaligned),
        }


def parts_row(**changed: Any) -> dict[str, Any]:
    row = {
        "first_byte_s": 0.01,
        "download_s": 0.5,
        "load_s": 0.1,
        "execute_s": 0.4,
        "last_execute_s": 0.05,
        "needed_bytes": NBYTES,
        "object_bytes": NBYTES,
        "first_bytes": NBYTES // 100,
        "last_bytes": NBYTES // 50,
        "call_bytes": 10_000_000,
        "equal": True,
    }
    return row | changed


def measured(
    folder: Path, setting: Setting = SETTING, *, keys: Collection[str] | None = None, **options: Any
) -> tuple[Records, Simulated]:
    """Everything of a setting, by made-up runs."""
    records, jobs = Records(folder / "records.jsonl"), Simulated(**options)
    measures = Measures(jobs, records, [setting], lambda _: None)
    for key in missing(setting, records, measures.now) if keys is None else keys:
        measures.make(setting, key)
    return records, jobs


# --------------------------------------------------------------------------------------------- settings


def test_settings_have_keys_of_their_own_and_cover_models_links_and_batches() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    assert {setting.model for setting in SETTINGS} == set(MODELS) == {*MAIN, *SMALL, XL.model}
    assert {setting.gbit for setting in SETTINGS} == {None, 0.1, 1.0}
    assert {1, 32} <= {setting.batch for setting in SETTINGS}
    for setting in SETTINGS:
        assert setting.repeats >= 10 or setting.gbit == 0.1 or setting == XL
    thin = [setting for setting in SETTINGS if setting.gbit == 0.1]
    assert [(each.batch, each.repeats) for each in thin] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    "wrong_one", [{"model": "none"}, {"batch": 0}, {"cores": 3}, {"ways": ("nobody",)}], ids=str
)
def test_a_setting_that_cannot_be_is_refused(wrong_one: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong_one))):
        Setting(**{"model": "gpt2", **wrong_one})


def test_every_way_runs_with_and_without_our_construction_and_turns_begin_elsewhere() -> None:
    assert set(SETTING.runs) == {way + ending for way in WAYS for ending in ("", PLAIN)}
    turns = [list(SETTING.turns(number)) for number in range(len(SETTING.runs))]
    assert all(sorted(turn) == sorted(SETTING.runs) for turn in turns)
    assert len({turn[0] for turn in turns}) == len(turns)
    assert narrowed(SETTING, {OURS}, 1).runs == (OURS, OURS + PLAIN)
    assert narrowed(SETTING, WAYS, 99).repeats == SETTING.repeats


def test_every_way_has_a_loader_and_a_form() -> None:
    assert set(LOADERS) == set(cold_settings.FORMS) == set(WAYS)
    assert set(forms_of(SETTING)) == set(cold_settings.FORMS.values())


# ---------------------------------------------------------------------------------------------- records


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    now = version()
    expected = [sweep_key(SETTING), baseline_key(SETTING)]
    expected += [turn_key(SETTING, number) for number in range(3)]
    assert missing(SETTING, Records(tmp_path / "none.jsonl"), now) == [
        *expected,
        *([after_key(SETTING, number) for number in range(AFTER_REPEATS)]),
    ]
    records, jobs = measured(tmp_path)
    assert missing(SETTING, Records(records.path), now) == []
    assert len(jobs.published) == 1
    more = Setting(model="gpt2", repeats=5)
    assert missing(more, records, now) == [turn_key(SETTING, 3), turn_key(SETTING, 4)]
    records.add(turn_key(SETTING, 1), {**records.rows[turn_key(SETTING, 1)], "version": "old"})
    assert missing(SETTING, records, now) == [turn_key(SETTING, 1)]


def test_a_peer_that_came_later_takes_part_in_every_turn(tmp_path: Path) -> None:
    without = narrowed(SETTING, set(WAYS) - {"runai"})
    records, _ = measured(tmp_path, without)
    assert missing(without, records, version()) == []
    left = missing(SETTING, records, version())
    assert sweep_key(SETTING) in left and turn_key(SETTING, 0) in left
    assert after_key(SETTING, 0) not in left


def test_a_version_is_of_the_code_that_it_depends_on(tmp_path: Path) -> None:
    module = tmp_path / "coldstart" / "a.py"
    module.parent.mkdir()
    module.write_text("one = 1\n")
    first = version(tmp_path)
    (tmp_path / "elsewhere.py").write_text("two = 2\n")
    assert version(tmp_path) == first
    module.write_text("one = 2\n")
    assert version(tmp_path) != first


def test_forward_passes_are_compared_once_a_model() -> None:
    compared = [setting.model for setting in SETTINGS if cold_measure.has_after(setting)]
    assert sorted(compared) == sorted([*MAIN, *SMALL])


def test_no_setting_begins_when_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(TimeIsUp):
        cold_start.run_all(
            [SETTING], Records(tmp_path / "r.jsonl"), Deadline(0), Peers(without=True), quick=True
        )


# --------------------------------------------------------------------------------------------- measuring


def test_models_are_published_once_in_every_form_and_with_every_answer_that_is_asked_for(
    tmp_path: Path,
) -> None:
    settings = [
        Setting(model="resnet50", batch=4, ways=(OURS,), repeats=1),
        Setting(model="resnet50", cores=2, ways=("boto3-torch",), repeats=1),
    ]
    records, jobs = Records(tmp_path / "r.jsonl"), Simulated()
    measures = Measures(jobs, records, settings, lambda _: None)
    for setting in settings:
        for key in missing(setting, records, measures.now):
            measures.make(setting, key)
    forms = {model: (forms, calls) for model, forms, calls in jobs.published}
    assert [model for model, _, _ in jobs.published] == ["gpt2", "resnet50"], "one to find knobs with"
    assert forms["resnet50"] == (("upriver.safetensors", "model.pt"), {(4, 1), (1, 2)})
    assert forms["gpt2"][1] == {(1, 1), (1, 2)}


def test_a_sweep_takes_the_best_that_answers_rightly(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, failing=("tensorizer",), unaligned=("boto3-torch",))
    choices = records.rows[sweep_key(SETTING)]["choices"]
    assert choices[OURS] == {"knob": 16, "assign": False}
    assert choices["boto3-safetensors"] == {"knob": 16, "assign": True}
    assert choices["boto3-torch"] == {"knob": 16, "assign": False}
    tried = records.rows[sweep_key(SETTING)]["tried"]
    assert [row["seconds"] for row in tried["tensorizer"]] == [None] * len(WAYS["tensorizer"].knobs)
    asked = [(run, spec["knob"]) for do, run, _, spec in measured(tmp_path / "again")[1].asked if do == "run"]
    assert ("upriver", 1) in asked and asked[-1][1] == max(WAYS[way_of(asked[-1][0])].knobs)


def test_a_slow_link_takes_the_knobs_of_a_faster_one(tmp_path: Path) -> None:
    thin = Setting(model="resnet50", gbit=0.1, repeats=1, ways=(OURS,))
    assert swept(thin) == Setting(model="gpt2", gbit=1.0, repeats=1, ways=(OURS,))
    _, jobs = measured(tmp_path, thin)
    assert jobs.rates[0] == 1e9 / 8 and jobs.rates[-1] == 1e8 / 8
    assert next(link for _, _, link, _ in jobs.asked) == "1Gbit-1core"


def test_weights_that_are_taken_as_they_came_are_copied_where_that_changes_bits(tmp_path: Path) -> None:
    records, jobs = measured(tmp_path)
    assert records.rows[turn_key(SETTING, 0)]["runs"]["sequential"]["assign"] is True
    jobs.unaligned, jobs.asked = ("sequential",), []
    measures = Measures(jobs, records, [SETTING], lambda _: None)
    for number in range(2):
        measures.make(SETTING, turn_key(SETTING, number))
    row = records.rows[turn_key(SETTING, 0)]["runs"]["sequential"]
    assert row["equal"] and row["assign"] is False
    assigned = [spec["assign"] for do, run, _, spec in jobs.asked if do == "run" and run == "sequential"]
    assert assigned == [True, False, False], "it is remembered"


def test_a_peer_that_fails_is_told_and_ours_that_fails_ends_it(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, failing=("runai",))
    found = Found(SETTING, records)
    assert not found.usable("runai") and found.usable(OURS)
    assert any("runai: 3 times runai does not start … and says why" in line for line in found.told())
    measures = Measures(Simulated(failing=(OURS,)), records, [SETTING], lambda _: None)
    with pytest.raises(Failed, match="does not start"):
        measures.make(SETTING, turn_key(SETTING, 0))


def test_moments_are_seconds_since_a_process_was_asked_for() -> None:
    said = {"imported": 13.0, "callable": 13.5, "answered": 15.0, "whole": 15.5, "equal": True, "cpu_s": 2.0}
    found = told(said, 10.0, 15.25)
    assert found["imported_s"] == 3.0 and found["whole_s"] == 5.5
    assert found["total_s"] == 5.25, "the parent's clock"
    assert found["after_imports_s"] == 2.0 and found["equal"] is True and "answered" not in found


def test_a_process_that_ends_or_hangs_is_told() -> None:
    def saying(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE)

    with saying("print('one'); print('two')") as process:
        lines = Lines(process)
        assert [lines.line(60), lines.line(60)] == ["one", "two"]
        with pytest.raises(Failed, match="has ended"):
            lines.line(60)
    with saying("import time; time.sleep(60)") as process:
        with pytest.raises(Failed, match="said nothing for 0 s"):
            Lines(process).line(0)
        process.kill()


# ------------------------------------------------------------------------------------------------ peers


def test_peers_that_are_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cold_bed.VARIABLE, str(tmp_path / "nothing"))
    peers = Peers()
    assert peers.ways() == ("upriver", "pisel", "layers", "sequential")
    assert all(part in peers.hint() for part in ("pip install", "tensorizer", cold_bed.VARIABLE))


def test_what_an_environment_has_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cold_bed.VARIABLE, str(tmp_path))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho \'{"boto3": "1.2"}\'\n')
    python.chmod(0o755)
    peers = Peers()
    assert peers.versions == {"boto3": "1.2"}
    assert {"boto3-torch", "boto3-safetensors"} <= set(peers.ways())
    assert peers.lacks(WAYS["tensorizer"]) == ("tensorizer",)
    assert Peers(without=True).versions == {}
    python.write_text("#!/bin/sh\necho it is broken >&2; exit 3\n")
    with pytest.raises(Failed, match="it is broken"):
        Peers()


def test_one_host_has_no_link() -> None:
    with pytest.raises(Failed, match="no link"):
        Local().shape(1e6)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cold_start.parsed([]).only == [""]
    assert cold_start.parsed(["--only", "gpt2", "bert", "--repeats", "3"]).repeats == 3
    with pytest.raises(SystemExit):
        cold_start.parsed(["--repeats", "0"])
    assert "at least 1" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ bound


def test_the_bound_of_one_core_and_of_two() -> None:
    parts = Parts.of([parts_row(), parts_row(download_s=0.6, execute_s=0.3)], None)
    assert parts.download_s == 0.5 and parts.execute_s == 0.3, "the shortest of each"
    assert parts.bound(one_core=True) == pytest.approx(0.01 + 0.5 + 0.002 + 0.05)
    slow = Parts.of([parts_row(execute_s=2.0)], None)
    assert slow.bound(one_core=True) == pytest.approx(0.01 + 0.005 + 0.1 + 2.0)
    assert slow.bound(one_core=False) == pytest.approx(0.01 + 0.005 + 0.001 + 2.0)
    loading = Parts.of([parts_row(load_s=3.0)], None)
    assert loading.bound(one_core=False) == pytest.approx(0.01 + 0.005 + 3.0 + 0.05)
    with pytest.raises(ValueError, match="at least one"):
        Parts.of([], None)


def test_a_shaped_link_is_taken_at_its_payload_rate_for_what_is_needed() -> None:
    parts = Parts.of([parts_row(needed_bytes=NBYTES // 2)], 1e8)
    assert parts.download_s == pytest.approx(0.5 / PAYLOAD_SHARE)


@given(
    layers=st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(0, 2), st.floats(0, 2)),
        min_size=1,
        max_size=8,
    ),
    latency_s=st.floats(0, 0.5),
    one_core=st.booleans(),
)
def test_no_grouping_beats_the_bound(
    layers: list[tuple[float, float, float]], latency_s: float, one_core: bool
) -> None:
    sizes, load, execute = (list(column) for column in zip(*layers, strict=True))
    rate = 1e6
    link = {"latency_s": latency_s, "bandwidth_bytes_per_s": rate}
    timeline = Timeline(sizes, load, execute, **link, one_core=one_core)
    parts = Parts(
        first_byte_s=latency_s,
        download_s=sum(sizes) / rate,
        load_s=sum(load),
        execute_s=sum(execute),
        first_download_s=sizes[0] / rate,
        first_load_s=load[0],
        last_load_s=load[-1],
        last_execute_s=execute[-1],
    )
    least = parts.bound(one_core=one_core)
    for policy in GROUPINGS.values():
        assert least <= timeline.makespan(policy(timeline)) * (1 + 1e-9)


# ------------------------------------------------------------------------------------------- the report


def test_who_is_ahead_is_told_by_turns(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, seconds={OURS: 1.02, "pisel": 1.0})
    for number, factor in enumerate((1.0, 3.0, 2.0)):  # a machine that is slower in some turns
        for row in records.rows[turn_key(SETTING, number)]["runs"].values():
            row["after_imports_s"] *= factor
    found = Found(SETTING, records)
    assert found.best_other(IMPORTED) == "pisel"
    assert found.behind(IMPORTED) == pytest.approx(1.0825 / 1.0625 - 1)
    assert found.goals["fastest"] and found.goals["fastest after imports"]
    assert found.best_other(IMPORTED, PLAIN) == "pisel" + PLAIN
    slower = Found(SETTING, measured(tmp_path / "slower", seconds={OURS: 1.5, "pisel": 1.0})[0])
    assert slower.behind(IMPORTED) == pytest.approx(0.5 / 1.0625)
    assert not slower.goals["fastest after imports"]


def test_a_way_that_answers_wrongly_is_no_competitor(tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path, seconds={"runai": 0.1}, wrong=("runai",))[0])
    assert not found.usable("runai") and found.best_other(IMPORTED) != "runai"
    assert any("runai: 3 answers are not" in line for line in found.told())
    assert found.goals["right"] and wrong([found]) == [], "it is not ours"


@pytest.mark.parametrize("what", [OURS, "pisel" + PLAIN, "parts", "after"])
def test_an_answer_of_ours_that_is_wrong_fails_the_benchmark(what: str, tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path, wrong=(what,))[0])
    assert not found.goals["right"] and SETTING.key in wrong([found])[0]


def test_the_share_of_the_bound_memory_and_calls_afterwards(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", gbit=1.0, repeats=2)
    found = Found(setting, measured(tmp_path, setting)[0])
    assert found.share(OURS) == pytest.approx(found.bound_s / (2 + 1 / 16))
    assert found.goals["bound"] is False
    assert found.memory(OURS) == pytest.approx(1.05) and found.goals["memory"]
    for row in (turn["runs"][OURS] for turn in found.turns):
        row["hwm_bytes"] += 10_000_000
    assert not found.goals["memory"] and found.goals["memory for weights"], "a call takes 0.1"
    assert found.memory(OURS, "group_bytes") == pytest.approx(2.0)
    assert "after" not in found.goals and found.after("arrived") is None
    calm = Found(SETTING, measured(tmp_path / "calm")[0])
    arrived = calm.after("arrived")
    assert arrived is not None and arrived.median == pytest.approx(1.025)
    assert calm.goals["after"] is False and "bound" not in calm.goals


def test_memory_without_a_control_group(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    for row in records.rows[turn_key(SETTING, 0)]["runs"].values():
        del row["group_bytes"]
    found = Found(SETTING, records)
    assert found.memory(OURS, "group_bytes") is not None, "other turns have it"
    del records.rows[baseline_key(SETTING)]
    assert Found(SETTING, records).memory(OURS) is None
    assert "memory" not in Found(SETTING, records).goals


def test_small_models_are_judged_by_themselves(tmp_path: Path) -> None:
    small = Setting(model="squeezenet", repeats=1)
    assert Found(small, measured(tmp_path, small, seconds={OURS: 1.0})[0]).goals["small"]
    assert not Found(small, measured(tmp_path / "b", small, seconds={OURS: 9.0})[0]).goals["small"]
    assert "small" not in Found(SETTING, measured(tmp_path / "c")[0]).goals
    large = Found(XL, measured(tmp_path / "d", XL)[0])
    assert "fastest" not in large.goals and "memory" in large.goals


def test_verdicts_name_where_a_goal_is_missed(tmp_path: Path) -> None:
    good = Found(SETTING, measured(tmp_path, seconds={OURS: 1.0})[0])
    bad = Found(SETTING, measured(tmp_path / "bad", seconds={OURS: 9.0})[0])
    assert verdict("fastest", [good]).endswith("**met**, met in 1 of 1 settings")
    assert verdict("fastest", [bad]).endswith(f"not in {SETTING.key}")
    assert verdict("bound", [good]).endswith("not judged") and "not judged" in verdict("fastest", [])


def test_the_page_and_its_picture_say_what_there_is(tmp_path: Path) -> None:
    records, jobs = measured(tmp_path, narrowed(SETTING, set(WAYS) - {"tensorizer"}), wrong=("layers",))
    measures = Measures(jobs, records, [XL], lambda _: None)
    for key in missing(XL, records, measures.now):
        measures.make(XL, key)
    found = [Found(setting, records) for setting in (SETTING, XL, QUICK[0])]
    text = write(found, records, tmp_path, "page", hint="`pip install it`")
    assert (tmp_path / "page.md").read_text() == text == page(found, records, "page", hint="`pip install it`")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert f"Not run yet: {QUICK[0].key}" in text and "layers: 3 answers are not the model's" in text
    assert "not installed: tensorizer. Their environment: `pip install it`" in text
    assert all(goal in text for goal in GOALS.values())
    assert "`memory.peak`" in text and "GPT-2-XL" in text and "1.05 / 2.00" in text and "4.00 / 3.00" in text


def test_a_page_of_nothing(tmp_path: Path) -> None:
    records = Records(tmp_path / "none.jsonl")
    text = write([Found(SETTING, records)], records, tmp_path, "none")
    assert "not judged" in text and SETTING.key in text and not (tmp_path / "none.png").exists()


def test_what_is_kept_is_whole_after_a_torn_line(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    with records.path.open("ab") as file:
        file.write(b'{"key": "torn')
    assert missing(SETTING, Records(records.path), version()) == []


def test_a_clock_is_named_in_every_run(tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path)[0])
    for clock in (STARTED, IMPORTED):
        assert found.spread(OURS, clock).median > 0


# ------------------------------------------------------------------------------------------ the real one


@pytest.mark.slow
def test_the_smallest_form_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "cold_start.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    (setting,) = QUICK
    assert setting.key in done.stdout
    row = Records(tmp_path / "cold_start_quick.jsonl").rows[turn_key(setting, 0)]
    assert set(row["runs"]) == set(setting.runs)
    assert all(run["equal"] for run in row["runs"].values()) and row["parts"]["equal"]
    left = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=120)
    assert left.stdout.strip() == f"{setting.key}: finished"
