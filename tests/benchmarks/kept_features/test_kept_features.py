"""Test the report of `kept_features` on hand-made records, what is run when, and features kept by hand."""

from __future__ import annotations

import inspect
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import upriver
from benchmarks.harness import testbed
from benchmarks.harness.children import ROOT, module_command
from benchmarks.harness.claims import CLAIMS
from benchmarks.harness.networks import build
from benchmarks.harness.records import Records
from benchmarks.kept_features import __main__ as kept_features
from benchmarks.kept_features.by_hand import InFiles, InMemory, frozen_features
from benchmarks.kept_features.job import Script
from benchmarks.kept_features.networks import LEARNING_RATES, build_for, halves
from benchmarks.kept_features.report import (
    not_behind,
    over_hand,
    over_old,
    plot,
    report,
    sources_of,
    verdicts,
)
from benchmarks.kept_features.rig import after_each, order_of, together
from benchmarks.kept_features.runs import Runs
from benchmarks.kept_features.settings import (
    AUTO,
    FILE,
    HAND,
    LOADER,
    MEMORY,
    NONE,
    PLAIN,
    SWEPT_EPOCHS,
    Setting,
    run_key,
)
from upriver.finetune.session import Near

ONE = Setting(network="resnet18", mbit=20, epochs=5, workers=(0, 1))
SWEEP = replace(ONE, jobs=3, epochs=3)
LOSSES = [2.0, 1.5, 1.25, 1.0, 0.5]
EPOCH_S = {NONE: 14.0, PLAIN: 15.0}
LABELS = {NONE: NONE, AUTO: AUTO, PLAIN: f"{LOADER} 1", HAND: f"{MEMORY} 0"}


def row(setting: Setting, ends_s: Sequence[float], **other: Any) -> dict[str, Any]:
    return {
        "setting": setting.key,
        "commit": "abc",
        "code": "def",
        "seconds": ends_s[-1] + 0.5,
        "ends_s": list(ends_s),
        "losses": LOSSES[: len(ends_s)],
        "cpu_s": {"storage": 10.0, "compute": 20.0},
        "link_bytes": {"from_storage": 33e6, "from_compute": 1e6},
        "peak_bytes": {"training": 500e6, "children": 400e6},
        "kept_bytes": 30e6,
        **other,
    }


def steady(first: float, later: float, ends: int) -> list[float]:
    return [first + later * end for end in range(ends)]


def swept(records: Records, setting: Setting) -> None:
    """Add a sweep in which one worker is best for the loop, none for memory, and files are slower."""
    seconds = {f"{LOADER} 0": 40, f"{LOADER} 1": 30, f"{MEMORY} 0": 17, f"{MEMORY} 1": 19}
    for label, last in {**seconds, f"{FILE} 0": 18}.items():
        made = row(setting, steady(last - 2, 2, SWEPT_EPOCHS)) | {"setting": setting.sweep_key}
        records.add(run_key(setting, label, 0), made)


def first_turn(
    records: Records, setting: Setting, auto: float, hand: float, labels: Mapping[str, str] = LABELS
) -> None:
    for way in (NONE, PLAIN):
        ends = steady(EPOCH_S[way], EPOCH_S[way], setting.ends)
        records.add(run_key(setting, labels[way], 1), row(setting, ends))
    pair(records, setting, 1, auto, hand, labels)


def pair(
    records: Records,
    setting: Setting,
    repeat: int,
    auto: float,
    hand: float,
    labels: Mapping[str, str] = LABELS,
) -> None:
    for way, first in ((AUTO, auto), (HAND, hand)):
        records.add(run_key(setting, labels[way], repeat), row(setting, steady(first, 1.0, setting.ends)))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Return five pairs in which a job takes 11 s and 1 s an epoch, and by hand 15 s and 1 s."""
    made = Records(tmp_path / "records.jsonl")
    swept(made, ONE)
    first_turn(made, ONE, 11.0, 15.0)
    for repeat in range(2, 6):
        pair(made, ONE, repeat, 11.0 + 0.01 * repeat, 15.0)
    return made


# ---------------------------------------------------------------------------------------------- verdicts


def test_ways_that_compute_each_epoch_anew_end_earlier() -> None:
    one = Setting(network="resnet18", mbit=20)
    several = Setting(network="resnet18", mbit=20, jobs=4, epochs=3)
    assert [one.ends_of(way) for way in (PLAIN, NONE, HAND, AUTO)] == [3, 3, 10, 10]
    assert [several.ends_of(way) for way in (PLAIN, NONE, HAND, AUTO)] == [2, 2, 4, 4]
    assert ONE.ends_of(NONE) == 3


def test_a_job_is_judged_against_the_best_other_way_in_pairs(records: Records) -> None:
    one = Runs(ONE, records)
    assert one.missing == "" and one.not_counted == []
    assert [one.best_other(end) for end in ONE.horizons] == [NONE, HAND, HAND]
    ratio = one.over_best(3)
    assert ratio is not None and ratio.pairs == 5 and ratio.middle == pytest.approx(13.03 / 17, rel=1e-3)
    assert not_behind(one, 3) and one.over_best(1).pairs == 1  # type: ignore[union-attr]
    assert over_hand(one) == pytest.approx(19 / 15.03, rel=1e-3)
    assert over_old(one) == pytest.approx(135.8 / 15.03, rel=1e-3)
    assert [line.rpartition(": ")[2] for line in verdicts([one])] == [
        "**met**, met in 2 of 2",
        "**met**, met in 1 of 1",
        "**met**, met in 1 of 1",
    ]


def test_the_page_tells_every_figure(records: Records, tmp_path: Path) -> None:
    one, other = Runs(ONE, records), Runs(SWEEP, records)
    text = report([one, other], "x")
    seconds = "42.0 (42.0 to 42.0) | 13.0 (13.0 to 13.1) | by hand | 0.77 (0.76 to 0.77) | 5 | met |"
    others = "| 3 | 45.0 (45.0 to 45.0) | 17.0 (17.0 to 17.0)"
    assert f"| resnet18 | 20 Mbit/s | deterministic {others} | {seconds}" in text
    assert "| 33 | 1 | 10 | 20 | 500 | 400 | 30 | - |" in text
    assert f"| {ONE.key} | 2.0000 | 0.5000 | 5 of 5 | 5 of 5 | 0.0e+00 | 0.0e+00 |" in text
    assert f"- {SWEEP.key}: not begun" in text and "count: 0 to 5 in each setting" in text
    assert "Commits abc." in text
    plot([one, other], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_a_ratio_that_may_be_above_the_goal_is_a_miss(records: Records) -> None:
    for repeat, auto in enumerate((15.0, 15.1, 14.9, 17.0, 14.0), start=1):
        pair(records, ONE, repeat, auto, 15.0)
    one = Runs(ONE, records)
    assert not_behind(one, 3) is False
    assert "**missed**, met in 0 of 2; not in " in verdicts([one])[0]
    assert "**missed**" in verdicts([one])[1]


def test_too_few_pairs_are_not_judged(tmp_path: Path) -> None:
    records = Records(tmp_path / "few.jsonl")
    swept(records, ONE)
    first_turn(records, ONE, 11.0, 15.0)
    one = Runs(ONE, records)
    assert not_behind(one, 3) is None and one.missing == "4 of 12 runs"
    assert all(line.endswith(": not judged") for line in verdicts([one]))
    assert "| by hand | 0.76 (one pair) | 1 | - |" in report([one], "x")


# ------------------------------------------------------------------------------------------ what is run


def test_a_setting_begins_with_its_sweep_and_the_reference(tmp_path: Path) -> None:
    records = Records(tmp_path / "none.jsonl")
    assert Runs(ONE, records).unswept == list(ONE.sweep)
    assert Runs(ONE, records).missing == "the sweep of forms is not done"
    swept(records, ONE)
    file = records.rows.pop(run_key(ONE, f"{FILE} 0", 0))
    one = Runs(ONE, records)
    assert one.unswept == [f"{FILE} 0"], "with the workers that are best for memory"
    assert one.label(HAND) is None and one.label(PLAIN) == f"{LOADER} 1"
    records.rows[file["key"]] = file
    one = Runs(ONE, records)
    assert one.missing == "not begun"
    assert [each[0] for each in one.next_turn] == [NONE, f"{MEMORY} 0", AUTO, f"{LOADER} 1"]
    assert Runs(SWEEP, records).label(HAND) == f"{FILE} 0", "jobs share files, and the sweep"


def test_pairs_take_turns_and_a_way_that_is_near_is_repeated(tmp_path: Path) -> None:
    records = Records(tmp_path / "turns.jsonl")
    swept(records, ONE)
    first_turn(records, ONE, 11.0, 35.0)
    one = Runs(ONE, records)
    assert one.rivals == {NONE: 3, PLAIN: 3}, "they are not run further"
    assert one.next_turn == [(AUTO, 2, 5), (NONE, 2, 3), (f"{LOADER} 1", 2, 3), (f"{MEMORY} 0", 2, 5)]
    for label, repeat, ends in one.next_turn:
        records.add(run_key(ONE, label, repeat), row(ONE, steady(10.0, 10.0, ends)))
    assert [each[0] for each in Runs(ONE, records).next_turn] == [f"{MEMORY} 0", f"{LOADER} 1", NONE, AUTO]
    later = Runs(ONE, records)
    assert later.ends_s(NONE, 5) == {1: 70.0} and later.ends_s(NONE, 3) == {1: 42.0, 2: 30.0}


def test_runs_that_learned_something_else_do_not_count(records: Records) -> None:
    records.add(run_key(ONE, AUTO, 2), row(ONE, steady(1, 1, 5), losses=[2.0000001, *LOSSES[1:]]))
    records.add(run_key(ONE, f"{MEMORY} 0", 2), row(ONE, steady(1, 1, 5), losses=[2.00001, *LOSSES[1:]]))
    records.add(run_key(ONE, f"{MEMORY} 0", 3), row(ONE, steady(1, 1, 5), losses=[2.1, *LOSSES[1:]]))
    one = Runs(ONE, records)
    assert one.not_counted == [
        f"{ONE.key}, {MEMORY} 0, 3: other losses",
        f"{ONE.key}, {AUTO}, 2: other losses",
    ]
    assert one.equal_bits(HAND) == (3, 4) and one.furthest(HAND) == pytest.approx(5e-6)
    assert one.equal_bits(AUTO) == (4, 4) and one.over_best(3).pairs == 3  # type: ignore[union-attr]


def test_runs_by_other_code_and_failed_ones_do_not_count(records: Records) -> None:
    records.add(run_key(ONE, AUTO, 2), row(ONE, steady(1, 1, 5), code="old"))
    assert Runs(ONE, records).next_turn == [(AUTO, 2, 5)]
    failed = {"setting": ONE.key, "commit": "abc", "code": "def", "error": "gone"}
    records.add(run_key(ONE, AUTO, 2), failed)
    assert Runs(ONE, records).not_counted == [f"{ONE.key}, {AUTO}, 2: failed: gone"]
    records.add(run_key(ONE, NONE, 1), failed)
    assert "no reference" in Runs(ONE, records).not_counted[1]
    assert "-" in report([Runs(ONE, records)], "x")


def test_a_way_without_a_form_that_counts_is_left_out(records: Records) -> None:
    for label in ONE.sweep:
        records.add(run_key(ONE, label, 0), {"setting": ONE.sweep_key, "commit": "abc", "error": "gone"})
    one = Runs(ONE, records)
    assert one.label(HAND) is None and one.spread(HAND, 1) is None and one.best_other(3) == NONE


# --------------------------------------------------------------------------------------------- settings


def test_the_declared_settings_are_what_was_promised() -> None:
    settings = kept_features.SETTINGS
    assert len({setting.key for setting in settings}) == len(settings) == 10
    single, sweeps = settings[:8], settings[8:]
    assert {(each.network, each.mbit, each.views) for each in single} == {
        (network, mbit, views)
        for network in ("resnet18", "vit_tiny")
        for mbit in (20, 200)
        for views in (None, 4)
    }
    assert all(each.horizons == (1, 3, 5, 10) and each.judged == (3, 5, 10) for each in single)
    assert all((each.jobs, each.epochs, each.judged) == (4, 3, (4,)) for each in sweeps)
    assert all((each.batch_size, each.samples, each.repeats) == (64, 300, 5) for each in settings)
    assert len(LEARNING_RATES) == 4 and len({each.sweep_key for each in settings}) == 4
    with pytest.raises(ValueError, match="batch_size must be whole micro-batches, got 24"):
        replace(ONE, batch_size=24)


def test_orders_follow_from_the_labels() -> None:
    folder = Path("/cache/features")
    assert order_of("loader 2", folder) == {"do": "plain"}
    assert order_of("file 0", folder) == {"do": "by_hand", "form": FILE, "folder": "/cache/features"}
    assert order_of(NONE, folder) == {"do": "near", "keep": None}
    assert order_of(AUTO, folder) == {"do": "near", "keep": "auto"}


def test_jobs_count_together() -> None:
    done = [
        {**row(SWEEP, [1.0, 2.0]), "from": {"local": 5}},
        {**row(SWEEP, [2.0, 3.0], peak_bytes={"training": 9, "children": 1}), "from": {"kept": 5}},
    ]
    found = together(done)
    assert after_each(done) == [2.5, 6.0] and found["seconds"] == 6.0
    assert found["losses"] == LOSSES[:2] * 2 and found["from"] == {"local": 5, "kept": 5}
    assert found["peak_bytes"] == {"training": 500e6, "children": 400e6}
    assert found["cpu_s"] == {"storage": 20.0, "compute": 40.0}
    assert sources_of({"http://a:1": 10, "http://b:2": 20, "memory": 70}) == "30% server, 70% memory"
    assert sources_of({}) == "-"


def test_the_row_of_the_table_finds_its_figures_in_the_page(records: Records, tmp_path: Path) -> None:
    [claim] = [claim for claim in CLAIMS if claim.name == "kept_features"]

    def told(text: str) -> str:
        return claim.result.format(**{name: count(text) for name, count in claim.counts.items()})

    page = report([Runs(ONE, records)], "x")
    assert told(page) == "3 of 3 goals met: 0.77 to 0.79 times the best other way's time"
    nothing = report([Runs(ONE, Records(tmp_path / "nothing.jsonl"))], "x")
    assert told(nothing) == "0 of 0 goals met: ? times the best other way's time"


# ---------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("network", ["resnet18", "vit_tiny", "small"])
def test_the_halves_of_a_network_give_what_the_whole_gives(network: str) -> None:
    model = build_for(network, 0)
    frozen, tail = halves(network, model)
    assert model.training and not any(each.training for each in frozen.modules())  # type: ignore[attr-defined]
    trained = {id(each) for each in tail.parameters()}  # type: ignore[attr-defined]
    assert trained == {id(each) for each in model.parameters() if each.requires_grad}
    model.eval()
    inputs = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(tail(frozen(inputs)), model(inputs))


def test_features_of_a_short_micro_batch_are_padded() -> None:
    frozen, _ = halves("small", build_for("small", 0))
    inputs = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    alone = frozen_features(frozen, inputs, 4)
    assert len(alone) == 3 and not alone.requires_grad
    assert torch.equal(alone[1:], frozen_features(frozen, inputs[1:], 4))


def test_each_job_has_a_head_of_its_own_and_the_same_frozen_part() -> None:
    alone, same, other = (build_for("small", job).state_dict() for job in (0, 0, 1))
    differing = {name for name, value in alone.items() if not torch.equal(value, other[name])}
    assert differing == {"3.weight"}
    assert all(torch.equal(value, same[name]) for name, value in alone.items())
    assert torch.equal(build("small", samples=1)[0].state_dict()["3.weight"], alone["3.weight"])


def test_features_in_files_are_found_by_the_next_job_only_if_they_are_whole(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    first = InFiles(4, tmp_path / "features")
    assert not first.has(0)
    first.put(0, (2, 0), rows[[2, 0]])
    assert not InFiles(4, tmp_path / "features").has(0)
    first.put(0, (3, 1), rows[[3, 1]])
    first.finish(0)
    assert first.has(0) and torch.equal(first.take(0, (1, 2)), rows[1:3])
    second = InFiles(4, tmp_path / "features")
    assert second.has(0) and torch.equal(second.take(0, (0, 3)), rows[[0, 3]]) and not second.has(1)


def test_features_in_memory_are_there_once_they_are_whole() -> None:
    rows, kept = torch.arange(6.0).reshape(2, 3), InMemory(2)
    kept.put(1, (1, 0), rows[[1, 0]])
    assert not kept.has(1)
    kept.finish(1)
    assert kept.has(1) and not kept.has(0) and torch.equal(kept.take(1, (0, 1)), rows)


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """Return what a training process is told, with 20 stored images."""
    for number in range(20):
        place = tmp_path / "store" / "data" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return {
        "network": "small",
        "views": 2,
        "batch_size": 16,
        "epochs": 3,
        "seed": 3,
        "job": 1,
        "workers": 0,
        "threads": torch.get_num_threads(),
        "uri": (tmp_path / "store").as_uri(),
        "options": {},
        "url": "http://nowhere",
    }


def test_by_hand_learns_what_the_plain_loop_learns(spec: dict[str, Any], tmp_path: Path) -> None:
    plain = Script(spec).plain()
    made = [
        Script(spec).by_hand(form=form, folder=str(tmp_path / "features")) for form in (MEMORY, FILE, FILE)
    ]
    assert all(each["losses"] == made[0]["losses"] for each in made)
    assert made[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert len(plain["losses"]) == 6 and len(plain["ends_s"]) == 3 and plain["seconds"] >= plain["ends_s"][-1]
    assert len(list((tmp_path / "features").iterdir())) == 2, "one for each view"
    assert made[0]["peak_bytes"]["training"] > 0 and math.isfinite(made[0]["losses"][-1])


@pytest.mark.parametrize("keep", [None, AUTO])
def test_upriver_is_told_what_to_keep_and_how_many_views(
    keep: str | None, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def finetune(*model_and_data: object, **given: Any) -> None:
        told.update(given)
        raise InterruptedError

    monkeypatch.setenv("UPRIVER_TOKEN", "token")
    monkeypatch.setattr(upriver, "connect", lambda url, token: SimpleNamespace(finetune=finetune))
    monkeypatch.setattr(upriver, "Sampling", lambda **given: given)
    for views in (2, None):
        with pytest.raises(InterruptedError):
            Script({**spec, "views": views}).near(keep=keep)
        assert told["keep"] == keep and told["sampling"] == ({} if views is None else {"views": views})
        assert told["batch_size"] == 16 and told["seed"] == 3


# ---------------------------------------------------------------------------------------------- the whole


@pytest.mark.full
@pytest.mark.skipif("keep" not in inspect.signature(Near.finetune).parameters, reason="nothing is kept yet")
def test_the_quick_form_runs_every_way_to_the_same_losses(tmp_path: Path) -> None:
    try:
        with testbed.Testbed(check=False):
            pass
    except testbed.Unavailable as error:
        pytest.skip(str(error))
    command = module_command("kept_features", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    one = Runs(kept_features.QUICK, Records(tmp_path / "kept_features_quick.jsonl"))
    assert one.missing == "" and one.not_counted == []
    assert one.equal_bits(HAND) == one.equal_bits(AUTO) == (1, 1)
    assert one.rows(AUTO, 2)[1]["from"]["kept"] > 0, "by the second job, if not sooner"
    assert one.figure(HAND, "kept_bytes") > 0 and one.figure(NONE, "kept_bytes") == 0
    assert "kept_features_quick.png" in (tmp_path / "kept_features_quick.md").read_text(encoding="utf-8")
