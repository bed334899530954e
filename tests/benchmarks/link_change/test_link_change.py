"""Test the report of a changing link on hand-made runs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import testbed
from benchmarks.link_change import __main__ as link_change
from benchmarks.link_change.report import GOAL, Change, Jitter, report, same_losses, verdict

OLD, NEW = {"-1": 0.4, "11": 0.6}, {"11": 1.0}


def steps(plans: list[dict[str, float]], *, switches: int = 0, mbit: float = 20.0) -> list[dict[str, Any]]:
    return [
        {"loss": 1.0 / n, "at_s": float(n), "plan": plan, "switches": switches, "bandwidth": mbit * 1e6 / 8}
        for n, plan in enumerate(plans, start=1)
    ]


def change(after_old: int, after_new: int, *, new_over: float = 0.02) -> Change:
    """Return four steps before the change, then some with each plan."""
    judged = {
        name: {"fresh": NEW, "fresh_s": 10.0, "plans_s": [20.0, 10.0 * (1 + over)]}
        for name, over in (("live", 0.0), ("new", new_over))
    }
    return Change(steps=steps([OLD] * (4 + after_old) + [NEW] * after_new), at=4, judged=judged)


def jitter(settling: int, steady: int, jittered: int) -> Jitter:
    return Jitter(
        mbit=20,
        settling=steps([NEW], switches=settling),
        steady=steps([NEW] * 3, switches=steady),
        steps=steps([NEW], switches=jittered, mbit=17) + steps([NEW] * 2, switches=jittered, mbit=22),
    )


def test_iterations_are_those_with_a_plan_that_a_fresh_one_beats() -> None:
    run = change(7, 5)
    assert run.plans == [OLD, NEW]
    assert run.over_fresh(OLD, "live") == pytest.approx(1.0)
    assert run.iterations("live") == run.iterations("new") == 7
    assert change(0, 5).iterations("live") == 0


def test_a_plan_that_is_never_near_a_fresh_one_is_never_the_right_one() -> None:
    run = change(7, 5, new_over=0.04)
    assert run.iterations("live") == 7 and run.iterations("new") is None
    assert change(7, 0).iterations("live") is None


def test_a_plan_that_is_left_again_does_not_count() -> None:
    run = change(2, 3)
    again = Change(steps=[*run.steps, *steps([OLD, NEW])], at=4, judged=run.judged)
    assert again.iterations("live") == 6


def test_losses_are_the_same_to_the_bit_or_not() -> None:
    run = change(2, 3).steps
    assert same_losses(run, change(3, 2).steps)
    assert not same_losses(run, run[:-1])
    other = [*run[:-1], {**run[-1], "loss": run[-1]["loss"] * (1 + 2**-50)}]
    assert not same_losses(run, other)


def test_switches_of_the_start_are_not_those_of_jitter() -> None:
    found = jitter(2, 3, 3)
    assert (found.switches, found.switches_without) == (0, 1)
    assert jitter(0, 0, 2).switches == 2
    assert found.observed_mbit == pytest.approx((17, 22))


def test_the_verdict_says_what_was_met() -> None:
    good = verdict(change(GOAL, 5), change(GOAL, 5).steps, [jitter(0, 0, 0)])
    assert good.count(f"after {GOAL} iterations (met") == 2 and "equal bit for bit" in good
    assert "0 switches in 3 steps around 20 Mbit/s" in good
    bad = verdict(change(GOAL + 1, 5), change(1, 1).steps, [jitter(0, 0, 1)])
    assert bad.count("missed") == 2 and "NOT equal" in bad


def test_the_page_has_every_step_and_plan() -> None:
    run = change(7, 5)
    page = report(link_change.SETTING, link_change.AFTER_MBIT, run, run.steps, [jitter(0, 0, 0)])
    assert "| -3 | 1.0 | 20.0 | -1: 40%, 11: 60% |" in page and "| 12 | 16.0 | 20.0 | 11: 100% |" in page
    assert "| 11: 100% | 8 | +0.0% | +2.0% |" in page
    assert "| 20 | 3 | 17 to 22 | 0 | 0 |" in page


def test_the_link_changes_in_the_middle_of_an_epoch() -> None:
    for setting, length in (
        (link_change.SETTING, link_change.LENGTH),
        (link_change.QUICK, link_change.QUICK_LENGTH),
    ):
        per_epoch = setting.samples // setting.batch_size
        assert 0 < length.before < per_epoch and length.after > GOAL


# ------------------------------------------------------------------------------------------- the link


class Bed:
    """Testbed that records the calls on its link, in order."""

    def __init__(self, done: list[object]) -> None:
        self.done = done

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.done.append("end")

    def run_server(self, *args: object) -> SimpleNamespace:
        return SimpleNamespace(url="http://storage")

    def run_objects(self, *args: object) -> SimpleNamespace:
        return SimpleNamespace(uri="s3://store", options={})

    def popen(self, *args: object, **options: object) -> None:
        pass

    def end(self, process: object) -> None:
        pass

    def set_rate(self, rate: float) -> None:
        self.done.append(8e-6 * rate)

    def check(self) -> None:
        self.done.append("check")


@pytest.mark.full
def test_the_link_is_checked_at_each_rate_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(link_change, "make_data", lambda setting, folder: None)
    monkeypatch.setattr(link_change, "Testbed", lambda rate: Bed(done))
    monkeypatch.setattr(link_change.LinkRig, "_begun", lambda rig, module, spec, stack: None)
    monkeypatch.setattr(link_change.LinkRig, "_ask", lambda rig, order, limit_s: done.append(order["do"]))
    with link_change.LinkRig(link_change.SETTING, tmp_path, True) as rig:
        rig.begin()
    assert done == ["publish", 20.0, "check", 200.0, "check", "begin", "end"]


class Jittering(link_change.LinkRig):
    """Rig of which only the link's rate is used."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.rates: list[float] = []
        self.fails_after = fails_after
        self.changed = threading.Event()

    def set_mbit(self, mbit: float) -> None:
        if len(self.rates) == self.fails_after:
            self.changed.set()
            raise testbed.TestbedError("tc has failed")
        self.rates.append(mbit)
        if self.fails_after is None and len(self.rates) == 50:
            self.changed.set()


def test_jitter_stays_within_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_change, "EVERY_S", 1e-4)
    rig = Jittering()
    with rig.jitter(100.0):
        assert rig.changed.wait(60)
    assert min(rig.rates) < 85 and max(rig.rates) > 115
    assert all(80 <= rate <= 120 for rate in rig.rates)


def test_jitter_that_has_ended_by_itself_is_no_run_without_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_change, "EVERY_S", 1e-4)
    rig = Jittering(fails_after=3)
    with pytest.raises(testbed.TestbedError, match="tc has failed"), rig.jitter(100.0):
        assert rig.changed.wait(60)


def test_other_losses_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = change(1, 2)
    others = [*run.steps[:-1], {**run.steps[-1], "loss": 2.0}]
    monkeypatch.setattr(link_change, "LinkRig", lambda *_: nullcontext())
    monkeypatch.setattr(link_change, "changed", lambda *_: run)
    monkeypatch.setattr(link_change, "jittered", lambda *_: jitter(0, 0, 0))
    monkeypatch.setattr("sys.argv", ["link_change", "--quick", "--out", str(tmp_path)])
    monkeypatch.setattr(link_change, "undisturbed", lambda *_: run.steps)
    link_change.main()
    monkeypatch.setattr(link_change, "undisturbed", lambda *_: others)
    with pytest.raises(SystemExit, match="error: losses differ"):
        link_change.main()
