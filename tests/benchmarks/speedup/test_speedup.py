"""Test the report of the speed-up benchmark on hand-made records, and the declared settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.records import Records
from benchmarks.harness.training.plans import REPEATS, Setting, alike, plan_key, run_key
from benchmarks.harness.training.ways import PLAIN
from benchmarks.speedup import __main__ as speedup
from benchmarks.speedup.report import (
    POLICIES,
    SWEEP,
    Speeds,
    measuring_verdict,
    report,
    verdict,
)

SETTING = Setting(network="alexnet", mbit=8, batch_size=32, samples=64)
LOSSES = [2.0, 1.5]
FACTS = {"setting": SETTING.key, "commit": "abc", "code": "def", "load": 1.0}


def row(seconds: float, **other: Any) -> dict[str, Any]:
    return {
        **FACTS,
        "misplaced": "",
        "seconds": seconds,
        "digest": "same",
        "losses": LOSSES,
        "bytes_from_storage": 4e6,
        "cpu_s": {"server": 2.0, "storage": 2.5, "compute": 3.0},
        **other,
    }


def cost(storage_s: float, compute_s: float) -> dict[str, float]:
    return {"storage_s": storage_s, "network_s": 1.0, "compute_s": compute_s}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Return runs in which each policy chooses cut 2 in 5 s, 4 of them on the link; the loader takes 10 s."""
    made = Records(tmp_path / "records.jsonl")
    plan = {"feasible": True, "shares": {"2": 1.0}, "predicted": cost(3.0, 2.0)}
    facts = {**FACTS, "cuts": [-1, 0, 1, 2], "why_not": {}}
    measuring = {"canary": 0.3, "stages": 0.4, "link": 0.5}
    plans = {name: plan for name in POLICIES}
    predicted = {"-1": cost(0.0, 8.0)}
    made.add(plan_key(SETTING), {**facts, "plans": plans, "predicted": predicted, "measuring_s": measuring})
    made.add(run_key(SETTING, "-1", 0), row(11.0))
    for at, label in enumerate(SWEEP):
        made.add(run_key(SETTING, label, 0), row(12.0 - at))
    for repeat in range(1, REPEATS + 1):
        made.add(run_key(SETTING, "2", repeat), row(5.0))
        cpu = {"server": 0.0, "storage": 0.5, "compute": 8.5}
        made.add(
            run_key(SETTING, SWEEP[-1], repeat),
            row(10.0, digest="rounded", losses=[2.00001, 1.5], cpu_s=cpu),
        )
    return made


def test_seconds_and_bounds_of_a_finished_setting(records: Records) -> None:
    one = Speeds(SETTING, records)
    assert one.missing == ""
    assert one.best_loader == SWEEP[-1] and one.labels == ["2", SWEEP[-1]]
    assert one.bound_s("upriver") == pytest.approx(4.0)  # 4 MB at 8 Mbit/s
    assert one.bound_s(PLAIN) == pytest.approx(8.5)
    assert one.profile_bound_s(PLAIN) == pytest.approx(8.0)
    assert one.of_bound("upriver") == pytest.approx(0.8)
    assert one.over_plain("upriver") == pytest.approx(2.0)
    assert verdict([one], 1).startswith("Missed: `upriver` reaches 0.80 of the bound")
    assert verdict([one], 2).startswith("Missed so far, 1 of 2 settings: ")
    assert one.measuring_share == pytest.approx(1.2 / 50)
    assert measuring_verdict([one]).startswith("Met: in the smallest job")
    text = report([one, Speeds(Setting(network="resnet18", mbit=5, batch_size=32, samples=64), records)], "x")
    assert "resnet18-jpeg-5Mbit-batch32-n64: not begun" in text and "5.00 (5.00 to 5.00)" in text


def test_each_side_has_the_share_of_its_core(tmp_path: Path) -> None:
    slow = Setting(network="alexnet", mbit=8, batch_size=32, samples=64, client_speed=0.5, server_speed=0.25)
    records = Records(tmp_path / "slow.jsonl")
    plan = {"feasible": True, "shares": {"2": 1.0}, "predicted": cost(3.0, 2.0)}
    facts = {**FACTS, "setting": slow.key, "cuts": [-1, 2], "why_not": {}}
    records.add(plan_key(slow), {**facts, "plans": {"upriver": plan}})
    records.add(run_key(slow, "-1", 0), row(5.0))
    for server, storage, compute, bound in ((1.0, 2.0, 3.0, 6.0), (2.0, 2.5, 3.0, 8.0), (1.0, 9.0, 3.0, 9.0)):
        for repeat in range(1, REPEATS + 1):
            cpu = {"server": server, "storage": storage, "compute": compute}
            records.add(run_key(slow, "2", repeat), row(5.0, cpu_s=cpu))
        assert Speeds(slow, records).bound_s("upriver") == pytest.approx(bound)


def test_a_loader_that_learns_something_else_does_not_count(records: Records) -> None:
    for repeat in range(1, REPEATS + 1):
        records.add(run_key(SETTING, SWEEP[-1], repeat), row(1.0, losses=[2.1, 1.5]))
    one = Speeds(SETTING, records)
    assert not one.missing and one.seconds(PLAIN) is None
    assert "other losses" in report([one], "x")
    assert "0.00 at least (goal 0.95)" in verdict([one], 1), "a plain way that failed is none to be ahead of"


def test_a_plan_whose_runs_do_not_count_is_a_miss(records: Records) -> None:
    for repeat in range(1, 3):
        records.add(run_key(SETTING, "2", repeat), row(1.0, misplaced="elsewhere"))
    text = report([Speeds(SETTING, records)], "x")
    assert "3 of 5" in text, "how few count is said"
    records.add(run_key(SETTING, "2", 3), row(1.0, digest="other"))
    assert verdict([Speeds(SETTING, records)], 1).startswith("Missed: `upriver` reaches 0.00 of the bound")


def test_runs_by_other_code_do_not_count(records: Records) -> None:
    records.add(plan_key(SETTING), {**records.rows[plan_key(SETTING)], "code": "new"})
    assert Speeds(SETTING, records).missing == "the loader's sweep is not done"
    assert alike([1.0, 2.0], [1.0, 2.0001]) and not alike([1.0], [1.0, 2.0])


def test_a_setting_that_was_only_begun_says_how_far_it_is(tmp_path: Path, records: Records) -> None:
    begun = Records(tmp_path / "begun.jsonl")
    begun.add(plan_key(SETTING), records.rows[plan_key(SETTING)])
    assert Speeds(SETTING, begun).missing == "the loader's sweep is not done"
    for label in ("-1", *SWEEP):
        begun.add(run_key(SETTING, label, 0), records.rows[run_key(SETTING, label, 0)])
    assert Speeds(SETTING, begun).missing == f"0 of {2 * REPEATS} repeats run"
    assert "Nothing is finished yet" in report([Speeds(SETTING, begun)], "x")


def test_the_declared_settings_are_what_was_promised() -> None:
    settings = speedup.SETTINGS
    assert len({setting.key for setting in settings}) == len(settings)
    assert {setting.mbit for setting in settings} >= {5, 20, 80, None}
    assert {setting.client_speed for setting in settings} == {1.0, 0.5}
    assert {setting.stored_scale for setting in settings} == {1, 2, 8}
    assert min(setting.batch_size for setting in settings) < 16
