"""Test the benchmarks of plans: their records, their reports, and the declared settings."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness.photographs import JPEG_BYTES, jpeg
from benchmarks.harness.records import Deadline, Records, TimeIsUp
from benchmarks.harness.training.job import digest_of, misplaced
from benchmarks.harness.training.plans import (
    REPEATS,
    Found,
    Setting,
    label_of,
    plan_key,
    run_key,
    shares_from,
    why_not_valid,
)
from benchmarks.harness.training.rig import command, make_data
from benchmarks.plan_quality import __main__ as plan_quality
from benchmarks.plan_quality.report import (
    BINS,
    PAPER,
    POLICIES,
    bin_of,
    judged,
    plot,
    report,
    shares,
    verdict,
)
from upriver.cost import route_between
from upriver.policies import POLICIES as ALL_POLICIES

SETTING = Setting(network="alexnet", mbit=20, batch_size=32, samples=64)
MIX = {-1: 0.25, 2: 0.75}


def row(seconds: float, **other: Any) -> dict[str, Any]:
    return {
        "setting": SETTING.key,
        "commit": "abc",
        "code": "def",
        "load": 1.0,
        "seconds": seconds,
        "digest": "same",
        "misplaced": "",
        **other,
    }


def plan_of(choices: Mapping[str, Mapping[int, float] | None], why_not: Mapping[str, str]) -> dict[str, Any]:
    plans = {
        name: {
            "feasible": chosen is not None,
            "shares": {str(cut): share for cut, share in (chosen or {-1: 1.0}).items()},
        }
        for name, chosen in choices.items()
    }
    facts = {"setting": SETTING.key, "commit": "abc", "code": "def"}
    return {**facts, "cuts": [-1, 0, 1, 2, 3], "why_not": dict(why_not), "plans": plans}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Return a finished setting: cut 2 is best with 10 s, the mix needs 9, cut 1 10.8; cut 0 does not fit."""
    made = Records(tmp_path / "records.jsonl")
    chosen: dict[str, Mapping[int, float] | None] = {name: {2: 1.0} for name in POLICIES}
    chosen |= {"upriver": MIX, "neurosurgeon": {1: 1.0}, "freeze": {3: 1.0}, "nosplit": None}
    made.add(plan_key(SETTING), plan_of(chosen, {"0": "too large"}))
    for cut, seconds in ((-1, 30.0), (1, 11.0), (2, 10.0), (3, 20.0)):
        made.add(run_key(SETTING, str(cut), 0), row(seconds))
    medians = {"-1": 30.0, "1": 10.8, "2": 10.0, "3": 20.0, label_of(MIX): 9.0}
    for label in Found(SETTING, made).finalists:
        for repeat, off in zip(range(1, REPEATS + 1), (0.1, -0.1, 0.0, -0.05, 0.05), strict=True):
            made.add(run_key(SETTING, label, repeat), row(medians[label] + off))
    return made


# ------------------------------------------------------------------------------------------------ records


def test_records_go_on_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    first = Records(path)
    first.add("a|1|0", {"seconds": 1.5})
    again = Records(path)
    assert "a|1|0" in again and "a|1|1" not in again
    again.add("a|1|1", {"seconds": 2.5})
    assert [json.loads(line)["seconds"] for line in path.read_text().splitlines()] == [1.5, 2.5]
    assert Records(path).rows == again.rows


@pytest.mark.parametrize("torn", ['{"key": "a|2|0", "sec', '{"key": "a|2|0", "seconds": 9.5}', '"\xff'])
def test_a_line_that_was_torn_is_ignored_and_written_over(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "records.jsonl"
    Records(path).add("a|1|0", {"seconds": 1.5})
    with path.open("ab") as file:
        file.write(torn.encode("latin-1"))
    records = Records(path)
    assert list(records.rows) == ["a|1|0"]
    records.add("a|3|0", {"seconds": 3.5})
    assert list(Records(path).rows) == ["a|1|0", "a|3|0"]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"key": "a"}\n[1]\n')
    with pytest.raises(SystemExit, match="line 2: not a record"):
        Records(path)


def test_only_what_is_not_there_is_run(records: Records) -> None:
    class NeverAsked:
        setting = SETTING

        def choice(self, label: str, *, swept: bool) -> dict[str, Any]:
            raise AssertionError(label)

    late = Deadline(0.0)
    plan_quality.run_once(NeverAsked(), records, "2", 0, late)  # type: ignore[arg-type]
    with pytest.raises(TimeIsUp):
        plan_quality.run_once(NeverAsked(), records, "0", 0, late)  # type: ignore[arg-type]


def test_a_run_counts_only_with_the_reference_s_digest_and_in_its_place() -> None:
    assert why_not_valid(row(1.0), "same") == ""
    assert why_not_valid(row(1.0), "other") == "other losses or samples"
    assert why_not_valid(row(1.0, misplaced="3 of 4 elsewhere"), "same") == "3 of 4 elsewhere"
    assert why_not_valid({"error": "gone"}, "same") == "failed: gone"


@pytest.mark.parametrize("choice", [{4: 1.0}, {-3: 1.0}, MIX, {0: 0.1, 3: 0.3, 16: 0.6}])
def test_a_choice_is_had_again_from_its_name(choice: dict[int, float]) -> None:
    assert shares_from(label_of(choice)) == choice
    assert label_of(dict(reversed(choice.items()))) == label_of(choice)


@pytest.mark.parametrize(
    ("shares", "placed", "right"),
    [
        ({-4: 1.0}, [-4] * 6, True),
        ({-4: 1.0}, [0] * 6, False),
        ({0: 1.0}, [-4] * 6, False),
        ({2: 1.0}, [2] * 6, True),
        ({2: 1.0}, [2] * 5 + [-4], False),
        ({-4: 0.5, 2: 0.5}, [-4, 2, -4, 2, -4, 2], True),
        ({-4: 0.5, 2: 0.5}, [2, 2, 2, -4, -4, -4], True),
        ({-4: 0.5, 2: 0.5}, [2, 2, 2, 2, -4, -4], False),
        ({0: 0.2, 2: 0.8}, [2, 2, 2, 2, 0], True),
        ({0: 0.2, 2: 0.8}, [2, 2, 2, 2, -4], False),
    ],
)
def test_a_micro_batch_that_ran_elsewhere_is_seen(
    shares: dict[int, float], placed: list[int], right: bool
) -> None:
    routes = [route_between(-4, cut, 5, share=share) for cut, share in shares.items()]
    assert (misplaced(routes, placed, start=-4) == "") is right


def test_a_digest_shows_every_bit_and_the_order() -> None:
    same = digest_of([1.0, 2.0], (0, 1))
    assert digest_of([1.0, 2.0], (0, 1)) == same
    assert same not in (digest_of([1.0, 2.0 + 2**-51], (0, 1)), digest_of([1.0, 2.0], (1, 0)))


# ------------------------------------------------------------------------------------------------- report


def test_the_best_three_and_every_choice_are_run_again(records: Records) -> None:
    found = Found(SETTING, records)
    assert found.finalists == ["2", "1", "3", label_of(MIX)]
    assert found.missing == "" and found.best == "2"
    assert found.noise == pytest.approx(0.1 / 10.4, rel=0.1)


def test_ratios_are_medians_over_the_best_single_cut(records: Records) -> None:
    found = Found(SETTING, records)
    assert found.ratio("upriver") == pytest.approx(0.9)
    assert found.ratio("hapi") == 1.0
    assert found.ratio("neurosurgeon") == pytest.approx(1.08)
    assert found.ratio("freeze") == 2.0
    assert found.ratio("nosplit") is None


def test_bins_are_those_of_the_paper(records: Records) -> None:
    ratios = (0.9, 1.0, 1.001, 1.05, 1.0501, 1.1, 1.15, 1.16, None)
    assert [BINS.index(bin_of(ratio)) for ratio in ratios] == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    done = judged([Found(SETTING, records)])
    assert shares(done, "upriver") == (100, 0, 0, 0, 0, 0)
    assert shares(done, "neurosurgeon") == (0, 0, 100, 0, 0, 0)
    assert shares(done, "nosplit") == (0, 0, 0, 0, 0, 100)
    for column in PAPER.values():
        assert len(column) == len(BINS) and sum(column) == pytest.approx(100, abs=0.3)


def test_the_goal_wants_both_share_and_mean(records: Records) -> None:
    done = judged([Found(SETTING, records)])
    assert verdict(done, 1).startswith(
        "Met: `upriver` is within 5% of the best measured single cut in 100% of 1"
    )
    assert verdict(done, 12).startswith("Met so far, 1 of 12 settings: ")
    for repeat in range(1, REPEATS + 1):
        records.add(run_key(SETTING, label_of(MIX), repeat), row(10.2))
    assert verdict([Found(SETTING, records)], 1).startswith("Missed")


def test_a_choice_whose_runs_do_not_count_is_a_miss(records: Records) -> None:
    for repeat in range(1, 4):
        records.add(run_key(SETTING, label_of(MIX), repeat), row(1.0, misplaced="elsewhere"))
    done = judged([Found(SETTING, records)])
    assert [one.ratio("upriver") for one in done] == [math.inf]
    assert verdict(done, 1).startswith("Missed")
    assert BINS[4] == bin_of(math.inf)


def test_runs_by_other_code_do_not_count(records: Records) -> None:
    records.add(plan_key(SETTING), {**records.rows[plan_key(SETTING)], "code": "new"})
    assert Found(SETTING, records).missing == "0 of 4 cuts run"


def test_a_run_with_other_losses_counts_for_nothing(records: Records) -> None:
    records.add(run_key(SETTING, "1", 0), row(0.1, digest="other"))
    for repeat in range(1, REPEATS + 1):
        records.add(run_key(SETTING, "-1", repeat), row(0.1, digest="other"))
    found = Found(SETTING, records)
    assert found.best == "2"
    assert f"{SETTING.key}, 1, repeat 0: other losses or samples" in report([found], POLICIES)


def test_settings_that_are_not_finished_are_listed_and_not_judged(records: Records) -> None:
    other = Setting(network="resnet18", mbit=None, batch_size=32, samples=64)
    begun = Setting(network="alexnet", mbit=5, batch_size=32, samples=64)
    records.add(plan_key(begun), plan_of({"upriver": {2: 1.0}}, {}))
    records.add(run_key(begun, "-1", 0), row(3.0))
    found = [Found(setting, records) for setting in (SETTING, other, begun)]
    assert [one.setting for one in judged(found)] == [SETTING]
    text = report(found, POLICIES)
    assert f"- {other.key}: not begun" in text
    assert f"- {begun.key}: 1 of 5 cuts run" in text
    assert "59.2" in text and "hapi 2025" in text.lower()
    assert "Nothing is finished yet" in report(found[1:2], POLICIES)


# ----------------------------------------------------------------------------------------------- settings


def test_the_declared_settings_are_what_was_promised() -> None:
    settings = plan_quality.SETTINGS
    assert len({setting.key for setting in settings}) == len(settings) >= 12
    assert {setting.network for setting in settings} == {"alexnet", "resnet18", "densenet121"}
    assert {setting.stored for setting in settings} == {"jpeg", "tensor"}
    assert {setting.mbit for setting in settings} >= {5, 20, 80, None}
    assert len({setting.batch_size for setting in settings}) >= 2
    assert {setting.server_speed for setting in settings} == {1.0, 0.5}
    assert any(setting.cap_share is not None for setting in settings)
    assert set(POLICIES) == set(ALL_POLICIES)


@pytest.mark.parametrize(
    "wrong",
    [
        {"network": "lenet"},
        {"stored": "png"},
        {"mbit": 0},
        {"samples": 33},
        {"samples": 32},
        {"server_speed": 0},
        {"client_speed": 2},
        {"cap_share": 1},
        {"stored": "tensor", "stored_scale": 2},
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"network": "alexnet", "mbit": 20, "batch_size": 32, "samples": 64}
    with pytest.raises(ValueError, match="must"):
        Setting(**{**right, **wrong})


@pytest.mark.parametrize("scale", [1, 2])
def test_stored_images_have_their_size_and_are_always_the_same(scale: int) -> None:
    first, again = (jpeg(np.random.default_rng(3), scale=scale) for _ in range(2))
    assert first == again
    assert len(first) == pytest.approx(JPEG_BYTES * scale, rel=0.05), "one step of the JPEG quality"
    with Image.open(io.BytesIO(first)) as picture:
        assert picture.width * picture.height == pytest.approx(500 * 375 * scale, rel=0.01)


def test_stored_tensors_are_what_the_papers_store(tmp_path: Path) -> None:
    make_data(Setting(network="alexnet", stored="tensor", mbit=20, batch_size=1, samples=2), tmp_path)
    files = sorted(tmp_path.glob("data/*/*.npy"))
    assert len(files) == 2
    assert all(np.load(file).nbytes == 602_112 and file.stat().st_size == 602_240 for file in files)


def test_a_run_that_does_not_count_fails_the_command(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["records", "--report", "--out", str(tmp_path)])

    def reported() -> None:
        command(
            None,
            "records",
            [SETTING],
            SETTING,
            found=Found,
            measure=plan_quality.measure,
            report=lambda found, name: report(found, POLICIES, name),
            plot=lambda found, path: plot(found, POLICIES, path),
        )

    reported()
    records.add(run_key(SETTING, "3", 0), row(20.0, digest="other"))
    with pytest.raises(SystemExit, match=r"error: .*, 3, repeat 0: other losses or samples"):
        reported()
