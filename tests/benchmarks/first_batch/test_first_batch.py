"""Test the report of `first_batch` on hand-made records, its orders, and the declared settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_batch import __main__ as first_batch
from benchmarks.first_batch.report import Runs, first_verdict, report, short_verdict, title
from benchmarks.first_batch.rig import order_of
from benchmarks.first_batch.settings import LOADER_STEPS, SWEPT_EPOCHS, UNSPLIT, Setting, run_key
from benchmarks.harness.claims import CLAIMS
from benchmarks.harness.records import Records

FIRST = Setting(network="resnet18", mbit=200, cores=2, batch_size=16, samples=96, repeats=2)
SHORT = Setting(
    network="resnet18",
    mbit=20,
    cores=1,
    batch_size=32,
    samples=300,
    epochs=3,
    ways=("default cold", "default warm"),
    workers=(0, 1),
    repeats=2,
)
LOSSES = [2.0, 1.5, 1.25]


def row(setting: Setting, **other: Any) -> dict[str, Any]:
    at_s = {"returned": 0.5, "first batch": 1.0, "first step": 1.5, "end": 9.0, **other.pop("at_s", {})}
    return {
        "setting": setting.key,
        "commit": "abc",
        "code": "def",
        "seconds": 9.0,
        "at_s": at_s,
        "cpu_s": {event: 2 * seconds for event, seconds in at_s.items()},
        "epochs_s": [],
        "losses": LOSSES,
        "begun": True,
        "remote": 0.25,
        "preparing_cpu_s": 7.0,
        "pss": {"training": 600e6, "preparing": 500e6},
        **other,
    }


@pytest.fixture
def first(tmp_path: Path) -> Records:
    """Return runs with a first batch after 4 s cold and 1 s warm, and after 20 and 3 s if prepared first."""
    records = Records(tmp_path / "first.jsonl")
    records.add(run_key(FIRST, UNSPLIT, 0), row(FIRST))
    for label, seconds in {
        "default cold": 4.0,
        "default warm": 1.0,
        "foreground cold": 20.0,
        "foreground warm": 3.0,
        "loader 0": 0.75,
    }.items():
        for repeat in FIRST.measured:
            records.add(run_key(FIRST, label, repeat), row(FIRST, at_s={"first batch": seconds}))
    return records


@pytest.fixture
def short(tmp_path: Path) -> Records:
    """Return jobs of 3 epochs by two forms of the plain loop and two ways of upriver."""
    records = Records(tmp_path / "short.jsonl")
    records.add(run_key(SHORT, UNSPLIT, 0), row(SHORT))
    plain = {"loader 0": [10.5, 25.0, 40.0], "loader 1": [11.0, 21.0, 31.0]}
    for label, seconds in plain.items():
        records.add(run_key(SHORT, label, 0), row(SHORT, epochs_s=seconds[:2]))
    for repeat in SHORT.measured:
        for label, seconds in plain.items():
            losses = [2.00001, 1.5, 1.25]
            records.add(run_key(SHORT, label, repeat), row(SHORT, epochs_s=seconds, losses=losses))
        records.add(run_key(SHORT, "default cold", repeat), row(SHORT, epochs_s=[12.6, 17.0, 22.0]))
        records.add(run_key(SHORT, "default warm", repeat), row(SHORT, epochs_s=[10.5, 16.0, 20.0]))
    return records


def test_first_batch_is_judged_by_the_largest_median_and_every_way_is_in_the_page(first: Records) -> None:
    one = Runs(FIRST, first)
    assert one.missing == "" and one.not_counted == []
    said = first_verdict([one])
    assert said.startswith("Met: the first batch of 1 networks comes 4.00 s after the call at most with cold")
    assert "1.00 s with warm ones (goal 2); prepared before it, after 20.00 and 3.00 s; in a" in said
    assert said.endswith("`DataLoader` loop, after 0.75 s.")
    text = report([one], "x")
    assert text.count("| ResNet-18 | 200 Mbit/s | 2 | ") == 5
    assert "| upriver, in_background=False, cold | 0.50 (0.50 to 0.50) | 20.00 (20.00 to 20.00) |" in text
    assert "| 600 (600 to 600) | 500 (500 to 500) |" in text and "Commits abc." in text


@pytest.mark.parametrize(("label", "seconds"), [("default cold", 5.1), ("default warm", 2.1)])
def test_a_first_batch_that_comes_late_misses_the_goal(first: Records, label: str, seconds: float) -> None:
    for repeat in FIRST.measured:
        first.add(run_key(FIRST, label, repeat), row(FIRST, at_s={"first batch": seconds}))
    assert first_verdict([Runs(FIRST, first)]).startswith("Missed: ")


def test_a_remote_batch_that_did_not_come_in_some_runs_is_told(first: Records) -> None:
    first.add(run_key(FIRST, "default cold", 1), row(FIRST, at_s={"first remote": 12.0}))
    assert "12.00 (12.00 to 12.00), 1 of 2" in report([Runs(FIRST, first)], "x")


def test_short_jobs_are_compared_with_the_best_loop_for_their_length(short: Records) -> None:
    one = Runs(SHORT, short)
    assert one.missing == "" and one.loaders == ("loader 0", "loader 1")
    assert [one.plain(epochs)[0] for epochs in (1, 2, 3)] == ["loader 0", "loader 1", "loader 1"]  # type: ignore[index]
    assert one.ratio("default cold", 1) == pytest.approx(1.2)
    assert one.ratio("default cold", 3) == pytest.approx(22 / 31)
    said = short_verdict([one])
    assert said.startswith("Missed: jobs of 1 to 3 epochs take 0.65 to 1.20 times as long")
    assert "| 20 Mbit/s | 1 | 10.50 (10.50 to 10.50) | 0 | 12.60 (12.60 to 12.60) | 1.20 |" in report(
        [one], "x"
    )


def test_runs_that_learned_something_else_do_not_count(first: Records, short: Records) -> None:
    first.add(run_key(FIRST, "default cold", 1), row(FIRST, losses=[2.0, 1.5000001]))
    one = Runs(FIRST, first)
    assert one.not_counted == [f"{FIRST.key}, default cold, 1: other losses"]
    assert "inf s after the call" in first_verdict([one]), "a way that failed once has failed"
    short.add(run_key(SHORT, "loader 0", 1), row(SHORT, epochs_s=[1.0, 2.0, 3.0], losses=[2.1, 1.5, 1.25]))
    short.add(run_key(SHORT, "default cold", 2), row(SHORT, epochs_s=[1.0, 2.0, 3.0], losses=LOSSES[:2]))
    two = Runs(SHORT, short)
    assert [line.rpartition(", ")[2] for line in two.not_counted] == ["1: other losses", "2: other losses"]
    assert two.plain(1)[0] == "loader 1"  # type: ignore[index]
    assert short_verdict([two]).startswith("Missed: ")


def test_a_run_that_ended_early_is_compared_as_far_as_it_went(first: Records) -> None:
    first.add(run_key(FIRST, "default cold", 1), row(FIRST, losses=LOSSES[:1]))
    first.add(run_key(FIRST, "default cold", 2), row(FIRST, losses=[*LOSSES, 1.0]))
    assert Runs(FIRST, first).not_counted == []
    first.add(run_key(FIRST, "default cold", 2), row(FIRST, losses=[]))
    assert len(Runs(FIRST, first).not_counted) == 1


def test_runs_by_other_code_do_not_count_and_failed_ones_are_named(short: Records) -> None:
    short.add(run_key(SHORT, "default warm", 1), {"setting": SHORT.key, "commit": "abc", "code": "old"})
    assert Runs(SHORT, short).missing == "7 of 8 repeats run"
    error = {"setting": SHORT.key, "commit": "abc", "code": "def", "error": "gone"}
    short.add(run_key(SHORT, "default warm", 1), error)
    assert Runs(SHORT, short).not_counted == [f"{SHORT.key}, default warm, 1: failed: gone"]
    short.add(run_key(SHORT, "loader 1", 0), {**error, "code": "old"})
    assert Runs(SHORT, short).missing == "the loader's sweep is not done"
    short.add(run_key(SHORT, UNSPLIT, 0), error)
    assert "no reference" in Runs(SHORT, short).not_counted[1]


def test_the_quick_form_wants_samples_from_the_server(tmp_path: Path) -> None:
    setting, records = first_batch.QUICK, Records(tmp_path / "quick.jsonl")
    assert Runs(setting, records).missing == "not begun"
    records.add(run_key(setting, UNSPLIT, 0), row(setting))
    for remote, begun, wrong in ((0.5, True, 0), (0.0, True, 1), (0.5, False, 1)):
        records.add(run_key(setting, "default cold", 1), row(setting, remote=remote, begun=begun))
        assert len(Runs(setting, records).not_counted) == wrong


def test_orders_follow_from_the_labels() -> None:
    assert order_of(SHORT, "loader 2", swept=True) == {
        "do": "loader",
        "workers": 2,
        "epochs": SWEPT_EPOCHS,
        "steps": None,
    }
    assert order_of(SHORT, "loader 2", swept=False)["epochs"] == 3
    assert order_of(FIRST, "loader 0", swept=False)["steps"] == LOADER_STEPS
    ways = {
        label: order_of(FIRST, label, swept=False) for label in ("default cold", "foreground warm", UNSPLIT)
    }
    assert [order["in_background"] for order in ways.values()] == [None, False, False]
    assert [order["policy"] for order in ways.values()] == [None, None, "nosplit"]
    quick = order_of(first_batch.QUICK, "default cold", swept=False)
    assert quick["in_background"] is True and quick["policy"] == "freeze" and quick["waits"]
    assert title("default cold") == "upriver, cold" and title("loader 1") == "DataLoader, 1 worker"


def test_the_declared_settings_are_what_was_promised() -> None:
    settings = first_batch.SETTINGS
    assert len({setting.key for setting in settings}) == len(settings)
    first, short = settings[:3], settings[3:]
    assert {setting.network for setting in first} == {"resnet18", "vit_b_16", "bert_base"}
    assert {setting.mbit for setting in short} == {20, 200, None}
    assert all(setting.samples == 300 and setting.epochs == 5 for setting in short)
    assert all(setting.workers == (0, 1, 2) and setting.repeats == 3 for setting in short)


def test_the_row_of_the_table_finds_its_figures_in_the_page(first: Records, short: Records) -> None:
    merged = Records(first.path.with_name("both.jsonl"))
    for records in (first, short):
        for key, each in records.rows.items():
            merged.add(key, each)
    text = report([Runs(FIRST, merged), Runs(SHORT, merged)], "x")
    [claim] = [claim for claim in CLAIMS if claim.name == "first_batch"]
    match = re.search(claim.says, " ".join(text.split()))
    assert match is not None
    assert claim.result.format(**match.groupdict()) == (
        "Met: the first batch after 4.00 s cold and 1.00 s warm (20.00 and 3.00 s if prepared before it). "
        "Missed: short jobs take 0.65 to 1.20 times as long"
    )
