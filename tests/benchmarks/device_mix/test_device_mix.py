"""Test the report of the benchmark of device mixes on hand-made records, and the declared settings."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_mix import __main__ as device_mix
from benchmarks.device_mix.report import GOAL, POLICIES, PUSH, SINGLE, Mix, mix_of, report, verdict
from benchmarks.harness.children import ROOT, module_command
from benchmarks.harness.claims import CLAIMS
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.plans import DEVICES_TOLERANCE, Setting, plan_key, run_key
from benchmarks.harness.training.ways import PLAIN

SLOW = Setting(network="resnet18", mbit=20, batch_size=16, samples=96, client_speed=0.25, repeats=3)
CUDA = Setting(network="resnet18", mbit=None, batch_size=16, samples=96, client_device="cuda", repeats=3)
LABELS = {"upriver": "-3:0.5,11:0.5", PUSH: "11", SINGLE: "5"}
LOSSES = [2.0, 1.5]


def made(
    setting: Setting,
    path: Path,
    seconds: dict[str, float],
    predicted: dict[str, float],
    *,
    losses: list[float] = LOSSES,
) -> Records:
    """Return the records of a finished setting.

    Args:
        seconds: Measured seconds of each way.
        predicted: Predicted seconds of each way.
        losses: Losses of the runs, but for the reference's.
    """
    records, facts = Records(path), {"setting": setting.key, "commit": "abc", "code": "def"}
    plans: dict[str, Any] = {}
    for name, label in LABELS.items():
        pairs = (part.split(":") if ":" in part else (part, "1.0") for part in label.split(","))
        shares = {cut: float(share) for cut, share in pairs}
        plans[name] = {"feasible": True, "shares": shares, "predicted": {"epoch_s": predicted[name]}}
    plan = {"cuts": [-4, 5, 11], "why_not": {}, "plans": plans}
    records.add(plan_key(setting), {**facts, **plan, "predicted": {"-4": {"epoch_s": predicted[PLAIN]}}})
    row = {**facts, "misplaced": "", "digest": "same", "exactness": "bit for bit"}
    records.add(run_key(setting, "-4", 0), {**row, "seconds": 9.0, "losses": LOSSES})
    forms = Mix(setting, records).sweep
    for at, label in enumerate(forms):
        records.add(run_key(setting, label, 0), {**row, "seconds": 9.0 - at, "losses": losses})
    for name, label in {**LABELS, PLAIN: forms[-1]}.items():
        for repeat in setting.measured:
            one = {**row, "seconds": seconds[name], "losses": losses}
            if not setting.one_device:
                one["digest"] = f"{name} {repeat}"
            records.add(run_key(setting, label, repeat), one)
    return records


def all_ways(upriver: float, push: float, single: float, plain: float) -> dict[str, float]:
    return {"upriver": upriver, PUSH: push, SINGLE: single, PLAIN: plain}


def test_a_plan_is_judged_by_the_better_of_both_extremes(tmp_path: Path) -> None:
    records = made(SLOW, tmp_path / "x.jsonl", all_ways(4.0, 5.0, 4.5, 8.0), all_ways(4.0, 6.0, 4.2, 7.0))
    one = Mix(SLOW, records)
    assert not one.missing and one.better_s == 5.0 and one.ratio == pytest.approx(0.8) and one.pays
    assert one.predicted_s(PLAIN) == 7.0 and one.predicted_s(PUSH) == 6.0
    assert verdict([one], 1) == (
        "Met: an epoch by `upriver`'s plan takes 0.80 to 0.80 times the better of the plain way and the full "
        "push (goal at most 1.05). Met: it is ahead of both in 1 of 1 settings where that is predicted by 5 "
        "% or more."
    )
    text = report([one, Mix(CUDA, records)], "x")
    assert "| resnet18 | 20 Mbit/s | server 1, trainer 0.25 of a core | 4.00 (4.00 to 4.00) |" in text
    assert "4.00 / 4.00 | 6.00 / 5.00 | 4.20 / 4.50 | 7.00 / 8.00 | yes |" in text
    assert "50% at -3 + 50% at 11 | 11 | 5 | loader 1x2 | bit for bit |" in text
    assert f"{CUDA.key}: not begun" in text


def test_the_row_of_the_table_finds_its_figures_in_the_page(tmp_path: Path) -> None:
    records = made(SLOW, tmp_path / "x.jsonl", all_ways(4.0, 5.0, 4.5, 8.0), all_ways(4.0, 6.0, 4.2, 7.0))
    text = report([Mix(SLOW, records), Mix(CUDA, records)], "x")
    [claim] = [claim for claim in CLAIMS if claim.name == "device_mix"]
    match = re.search(claim.says, " ".join(text.split()))
    assert match is not None
    counted = {name: count(text) for name, count in claim.counts.items()}
    assert claim.result.format(**match.groupdict(), **counted) == (
        "Met: 0.80 to 0.80 times the better of both in 1 settings. Met: ahead of both in 1 of 1 where that "
        "is predicted"
    )


def test_a_plan_that_is_behind_is_a_miss_and_one_that_promised_more_another(tmp_path: Path) -> None:
    behind = made(SLOW, tmp_path / "x.jsonl", all_ways(6.0, 5.0, 5.0, 8.0), all_ways(4.0, 6.0, 4.2, 7.0))
    one = Mix(SLOW, behind)
    assert one.ratio > GOAL
    assert verdict([one], 2).startswith("Missed so far, 1 of 2 settings: ")
    assert "Missed: it is ahead of both in 0 of 1 settings" in verdict([one], 2)
    near = made(SLOW, tmp_path / "y.jsonl", all_ways(5.1, 5.0, 5.0, 8.0), all_ways(5.9, 6.0, 5.9, 7.0))
    assert verdict([Mix(SLOW, near)], 1).startswith("Met: ")
    assert "Met: it is ahead of both in 0 of 0 settings" in verdict([Mix(SLOW, near)], 1)


def test_a_plain_way_that_failed_is_none_to_be_ahead_of(tmp_path: Path) -> None:
    records = made(SLOW, tmp_path / "x.jsonl", all_ways(4.0, 5.0, 4.5, 8.0), all_ways(4.0, 6.0, 4.2, 7.0))
    for repeat in SLOW.measured:
        key = run_key(SLOW, "loader 1x2", repeat)
        records.add(key, {**records.rows[key], "losses": [2.1, 1.5]})
    assert verdict([Mix(SLOW, records)], 1).startswith("Missed")
    assert "other losses" in report([Mix(SLOW, records)], "x")


def test_runs_on_two_devices_count_within_a_tolerance_and_on_one_by_their_bits(tmp_path: Path) -> None:
    ways, near = (all_ways(4.0, 5.0, 4.5, 8.0),) * 2, [2.0 * (1 + DEVICES_TOLERANCE / 2), 1.5]
    one = Mix(CUDA, made(CUDA, tmp_path / "x.jsonl", *ways, losses=near))
    assert one.ratio == pytest.approx(0.8) and not one.not_counted
    text = report([one], "x")
    assert "within 0.01 of that of the run that is" in " ".join(text.split()) and "--device cuda" in text
    far = Mix(CUDA, made(CUDA, tmp_path / "y.jsonl", *ways, losses=[2.0 * (1 + 2 * DEVICES_TOLERANCE), 1.5]))
    assert far.ratio == float("inf") and any("other losses" in line for line in far.not_counted)
    records = made(SLOW, tmp_path / "z.jsonl", *ways)
    key = run_key(SLOW, "11", 1)
    records.add(key, {**records.rows[key], "digest": "other"})
    assert Mix(SLOW, records).not_counted == [f"{SLOW.key}, 11, 1: other losses or samples"]


def test_a_micro_batch_that_ran_elsewhere_does_not_count_on_two_devices_either(tmp_path: Path) -> None:
    records = made(CUDA, tmp_path / "x.jsonl", *(all_ways(4.0, 5.0, 4.5, 8.0),) * 2)
    key = run_key(CUDA, "11", 1)
    records.add(key, {**records.rows[key], "misplaced": "elsewhere"})
    assert Mix(CUDA, records).not_counted == [f"{CUDA.key}, 11, 1: elsewhere"]


def test_the_declared_settings_are_what_was_promised() -> None:
    settings = device_mix.SETTINGS
    assert len({setting.key for setting in settings}) == len(settings) == 8
    assert {setting.mbit for setting in settings} == {20, 200}
    assert {setting.network for setting in settings} == {"resnet18", "vit_tiny"}
    assert {(setting.server_speed, setting.client_speed) for setting in settings} == {(0.2, 1.0), (1.0, 0.25)}
    assert all(setting.one_device and setting.repeats == 3 for setting in settings)
    mixed = device_mix.SETTINGS_CUDA
    assert len({setting.key for setting in mixed}) == len(mixed)
    assert {mix_of(setting) for setting in mixed[:2]} == {
        "server cpu, trainer cuda",
        "server cuda, trainer cpu",
    }
    assert not any(setting.one_device for setting in mixed) and mixed[0].mbit is None
    assert set(LABELS) == set(POLICIES)


@pytest.mark.full
def test_without_a_limit_two_devices_are_measured_on_the_loopback_device(tmp_path: Path) -> None:
    """``cpu:0`` counts as a device of its own, so this needs neither an accelerator nor rights."""
    setting = replace(device_mix.QUICK_CUDA, client_device="cpu:0", cores=1)
    records = Records(tmp_path / "x.jsonl")
    device_mix.measure(setting, records, Deadline(None))
    one = Mix(setting, records)
    assert not one.missing and not one.not_counted
    assert one.exactness == "bit for bit"
    assert "server cpu, trainer cpu:0" in report([one], "x")


@pytest.mark.parametrize("form", [("--quick",), ()])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_its_form_says_so_and_measures_nothing(
    form: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["device_mix", *form, "--device", "cuda", "--out", str(tmp_path)])
    device_mix.main()
    said = capsys.readouterr().out
    assert said.startswith("skipped, nothing was measured: device 'cuda' is not available here")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_quick_form_runs_on_an_accelerator(tmp_path: Path) -> None:
    command = module_command("device_mix", "--quick", "--device", "cuda", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "server cpu, trainer cuda" in (tmp_path / "device_mix_cuda_quick.md").read_text(encoding="utf-8")
