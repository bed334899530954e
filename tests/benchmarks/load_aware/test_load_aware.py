"""Test the benchmark of load-aware split inference: its events, its turns, its page, its smallest form."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import testbed
from benchmarks.harness.children import module_command
from benchmarks.harness.loadpart_networks import NETWORKS
from benchmarks.harness.records import Deadline, Records, TimeIsUp
from benchmarks.load_aware import __main__ as load_aware
from benchmarks.load_aware.__main__ import missing, parsed, run_all, version
from benchmarks.load_aware.found import BEST_GAIN, GOALS, MEAN_GAIN, OVER_ENDS_BY, Found
from benchmarks.load_aware.measure import FIRST, LATER, MOST_FIXED, WARM, cutting_of, measure
from benchmarks.load_aware.report import page, phases_table, verdict, write
from benchmarks.load_aware.schedule import (
    BESIDE,
    CHOOSING,
    COMPARED,
    FULL,
    LEVELS,
    LOAD_MBIT,
    LOCAL,
    MIN_ROUNDS,
    NEUROSURGEON,
    OURS,
    QUICK,
    RATES,
    SETTINGS,
    STEADY,
    Phase,
    Setting,
    Turns,
    cut_of,
    link_setting,
    load_setting,
    steady_cut,
    way_of,
)

LOAD = load_setting("alexnet", seconds=10.0, levels=("0%", "100%(h)", "0%"))
LINK = link_setting("alexnet", seconds=10.0, rates=(8.0, 1.0, 64.0))
STAGES = 10


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# ---------------------------------------------------------------------------------------------- schedule


def test_settings_have_keys_of_their_own_and_cover_every_network_level_and_rate() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS) == 2 * len(NETWORKS)
    load, link = ([each for each in SETTINGS if each.part == part] for part in ("load", "link"))
    assert {each.network for each in load} == {each.network for each in link} == set(NETWORKS)
    assert all([phase.level for phase in each.phases] == [*LEVELS, "0%"] for each in load)
    assert all([phase.mbit for phase in each.phases] == list(RATES) for each in link)
    assert all(phase.level == "0%" for each in link for phase in each.phases)
    assert min(RATES) == 1 and max(RATES) == 64 and len(LEVELS) == 6
    assert sum(each.seconds for each in SETTINGS) < 45 * 60, "and then some to begin with"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"network": "lenet"}, "network"),
        ({"part": "both"}, "part"),
        ({"phases": ()}, "phases"),
        ({"factor": 0.5}, "factor"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict[str, Any], match: str) -> None:
    fields = {"part": "load", "network": "alexnet", "phases": LOAD.phases}
    with pytest.raises(ValueError, match=match):
        Setting(**{**fields, **wrong})


@pytest.mark.parametrize("wrong", [{"level": "110%"}, {"mbit": 0.0}, {"seconds": 0.0}])
def test_a_phase_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Phase(**{"mbit": 8.0, "seconds": 1.0, **wrong})


def test_levels_say_what_they_are() -> None:
    assert LEVELS["0%"].text == "no other process"
    assert LEVELS["60%"].text == "2 processes, 30 ms of CPU time every 100 ms"
    assert LEVELS["100%(h)"].text == "31 processes in a loop"


def test_ways_with_a_cut_are_told_by_their_names() -> None:
    assert [cut_of(way_of(7)), cut_of(OURS), cut_of(LOCAL)] == [7, None, None]
    assert [steady_cut(way, 9) for way in (LOCAL, FULL, "cut 4", OURS)] == [9, 0, 4, None]


def rounds(turns: Turns, count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    found = []
    for _ in range(count):
        found.append(turns.round())
        for way in found[-1]:
            turns.took(way, seconds.get(way, 1.0))
    return found


def test_everybody_has_turns_and_not_always_the_same_first() -> None:
    turns = Turns([3, 5])
    assert not turns.complete
    found = rounds(turns, 4, {})
    assert all(set(CHOOSING) <= set(ways) and len(ways) == 3 + BESIDE for ways in found)
    beside = [way for ways in found for way in ways if way not in CHOOSING]
    assert set(beside) == {LOCAL, FULL, "cut 3", "cut 5"}
    assert max(map(beside.count, beside)) - min(map(beside.count, beside)) == 0
    assert len({ways[0] for ways in found}) == 4 and turns.complete


def test_who_takes_long_comes_rarely_but_comes() -> None:
    found = rounds(Turns([]), 20, {LOCAL: 8.0, FULL: 1.0})
    counts = {way: sum(ways.count(way) for ways in found) for way in (*CHOOSING, *STEADY)}
    assert counts[OURS] == counts[NEUROSURGEON] == counts[FULL] == 20 and counts[LOCAL] == 3


def test_a_phase_is_complete_when_all_have_come_and_there_were_some_rounds() -> None:
    turns = Turns([])
    rounds(turns, MIN_ROUNDS - 1, {})
    assert not turns.complete
    rounds(turns, 1, {})
    assert turns.complete
    crowded = Turns(range(1, 8))
    rounds(crowded, MIN_ROUNDS, {})
    assert not crowded.complete


# -------------------------------------------------------------------------------------------- measuring


class Simulated:
    """Device whose requests last as a formula says, under its conditions.

    Args:
        wrong: Ways whose answers differ.
        gives_up: Ways whose server fails.
        aware: Whether ours knows the load.
        likely: Cuts that would win.
        local_s: All stages here.
        server_s: All stages there, without load.
        upload_s: The input at 8 Mbit/s.
        slowed: Factor by which stages slow down there, by load.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        wrong: Sequence[str] = (),
        gives_up: Sequence[str] = (),
        aware: bool = True,
        likely: Sequence[int] = (5, 6, 7, 8, 9),
        local_s: float = 1.0,
        server_s: float = 0.1,
        upload_s: float = 1.0,
        slowed: Mapping[str, float] = {"100%(h)": 16.0},
    ) -> None:
        self.clock, self.wrong, self.gives_up, self.aware = clock, wrong, gives_up, aware
        self.likely = likely
        self.local_s, self.server_s, self.upload_s, self.slowed = local_s, server_s, upload_s, slowed
        self.phase = Phase(mbit=8.0, seconds=1.0)
        self.begun: list[Phase] = []
        self.asked: list[tuple[str, str]] = []
        self.opened: set[str] = set()

    def begin(self, phase: Phase) -> None:
        self.phase = phase
        self.begun.append(phase)

    def seconds(self, cut: int, k: float | None = None) -> float:
        """Return the seconds of a cut: stages are equal, and a fifth of the bytes crosses after the fifth."""
        k = self.slowed.get(self.phase.level, 1.0) if k is None else k
        there = STAGES - cut
        sent = 0.0 if not there else 0.2 if cut >= 5 else 1.0
        sent_s = sent * self.upload_s * 8 / self.phase.mbit
        return self.local_s * cut / STAGES + sent_s + k * self.server_s * there / STAGES

    def best(self, *, blind: bool) -> int:
        return min(range(STAGES + 1), key=lambda cut: (self.seconds(cut, 1.0 if blind else None), -cut))

    def ask(self, **order: Any) -> dict[str, Any]:
        do, way = order["do"], order.get("way", "")
        self.asked.append((do, way))
        match do:
            case "likely":
                return {"cuts": [*self.likely], "named": [3]}
            case "open":
                new = way not in self.opened
                self.opened.add(way)
                return {"new": new}
            case "close":
                self.opened.discard(way)
                return {}
            case "decide":
                return {"seconds": 1e-5}
        cut = steady_cut(way, STAGES)
        if cut is None:
            cut = self.best(blind=way == NEUROSURGEON or not self.aware)
        first = (do, way) not in self.asked[:-1]
        seconds = self.seconds(cut) + (0.05 if first else 0.0)
        self.clock.sleep(seconds)
        return {
            "seconds": seconds,
            "cut": cut,
            "equal": way not in self.wrong,
            "why": "it died" if way in self.gives_up else "",
            "k": 2.0 if way == OURS else None,
            "wait_s": 0.0,
            "upload_bytes_per_s": 1e6 if way == OURS else None,
        }


def measured(setting: Setting = LOAD, **options: Any) -> tuple[dict[str, Any], Simulated]:
    clock = Clock()
    device = Simulated(clock, **options)
    return measure(device, device, setting, lambda text: None, clock), device


def test_everything_is_asked_in_turns_phase_by_phase() -> None:
    found, device = measured()
    assert device.begun == [LOAD.phases[0], *LOAD.phases]
    assert found["fixed"] == [3, 5, 6, 7, 8] and len(found["fixed"]) == MOST_FIXED + 1
    assert len(found["phases"]) == 3 and found["phases"][0]["at_s"] == 0
    for number in range(3):
        ways = [each["way"] for each in found["requests"] if each["phase"] == number]
        assert {*CHOOSING, *STEADY, *map(way_of, found["fixed"])} == set(ways)
        assert ways.count(OURS) == ways.count(NEUROSURGEON) == found["phases"][number]["rounds"]
    assert [each["at_s"] for each in found["requests"]] == sorted(each["at_s"] for each in found["requests"])


def test_what_cutting_costs_is_the_first_request_beyond_the_next() -> None:
    found, device = measured()
    assert set(found["cutting"]) == {"3", "5", "6", "7", "8"}
    for costs in found["cutting"].values():
        assert costs["first_s"] - costs["later_s"] == pytest.approx(0.05)
    requests = [way for do, way in device.asked if do == "request"]
    assert requests[: FIRST + LATER] == ["cut 3"] * (FIRST + LATER)
    assert requests[5 * (FIRST + LATER) :][: 2 * WARM] == [OURS] * WARM + ["loadpart"] * WARM
    assert cutting_of(device, 3) is None, "it has been used"


def test_who_is_blind_to_load_has_a_part_while_the_link_changes_too() -> None:
    found, device = measured(LINK)
    for number in range(len(LINK.phases)):
        ways = [each["way"] for each in found["requests"] if each["phase"] == number]
        assert len({ways.count(way) for way in CHOOSING}) == 1
    assert [way for do, way in device.asked if do == "open"][: len(CHOOSING)] == list(CHOOSING)


MEASURED_S = {
    "alexnet": 0.020,
    "vgg16": 0.186,
    "resnet18": 0.030,
    "resnet50": 0.080,
    "squeezenet1_0": 0.026,
    "xception": 0.233,
}
"""Measured seconds on one core, from results/latency_models.md."""


def planned_s(setting: Setting) -> float:
    """Return the likely seconds of a setting, by the network, the rates and the loads."""
    clock = Clock()
    device = Simulated(
        clock,
        likely=(6, 8),
        local_s=setting.factor * MEASURED_S[setting.network],
        server_s=MEASURED_S[setting.network],
        upload_s=3 * 4 * NETWORKS[setting.network] ** 2 / (LOAD_MBIT * 1e6 / 8),
        slowed={level.name: 1 + level.processes * level.busy for level in LEVELS.values()},
    )
    measure(device, device, setting, lambda text: None, clock)
    return clock.now


def test_all_of_it_is_planned_to_end_after_little_more_than_an_hour() -> None:
    planned = {setting.key: planned_s(setting) for setting in SETTINGS}
    assert all(planned[setting.key] > setting.seconds for setting in SETTINGS)
    assert sum(planned.values()) < 60 * 60, "and then a minute for each network to begin with"


# ------------------------------------------------------------------------------------------- the records


def recorded(folder: Path, setting: Setting = LOAD, **options: Any) -> Records:
    records = Records(folder / "records.jsonl")
    found, _ = measured(setting, **options)
    facts = {"stages": STAGES, "paper": {"5": 19}, "load": 0.5, **load_aware.facts_of(setting)}
    records.add(setting.key, {**facts, **found})
    return records


def found_in(folder: Path, setting: Setting = LOAD, **options: Any) -> Found:
    return Found(setting, recorded(folder, setting, **options))


@pytest.mark.full
def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    records = recorded(tmp_path)
    assert not missing(LOAD, Records(records.path)) and missing(LINK, records)
    records.add(LOAD.key, {**records.rows[LOAD.key], "version": "old"})
    assert missing(LOAD, records), "other code"
    assert version() == version()


def test_no_setting_begins_when_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(TimeIsUp):
        run_all([LOAD], Records(tmp_path / "r.jsonl"), Deadline(0))


def test_the_command_line() -> None:
    assert parsed([]).only == [""] and parsed(["--only", "load", "link-vgg16"]).only == ["load", "link-vgg16"]


# ---------------------------------------------------------------------------------------------- judging


def test_phases_count_alike_and_so_do_gains(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    idle_s, busy_s, ours_busy_s = 0.75, 0.7 + 16 * 0.05, 1.0
    assert found.total_s(NEUROSURGEON) == pytest.approx(2 * idle_s + busy_s)
    assert found.total_s(OURS) == pytest.approx(2 * idle_s + ours_busy_s)
    assert found.mean_gain(NEUROSURGEON) == pytest.approx(1 - 2.5 / 3.0)
    assert found.most_gain(NEUROSURGEON) == pytest.approx(1 - 2.5 / 3.0), "ours could not be better"
    gain, phase = found.best_gain(NEUROSURGEON)
    assert phase == 1 and gain == pytest.approx(1 - ours_busy_s / busy_s)
    assert found.goals["mean"] and not found.goals["best"] and gain < BEST_GAIN["alexnet"]
    assert found.best_round(NEUROSURGEON) == pytest.approx(gain)


def test_who_is_blind_gains_nothing(tmp_path: Path) -> None:
    found = found_in(tmp_path, aware=False)
    assert found.mean_gain(NEUROSURGEON) == pytest.approx(0.0)
    assert found.most_gain(NEUROSURGEON) == pytest.approx(1 - 2.5 / 3.0), "others took the better cut"
    assert not found.goals["mean"] and MEAN_GAIN["alexnet"] > 0
    other = found_in(tmp_path / "other", load_setting("vgg16", levels=("0%", "100%(h)")), aware=False)
    assert other.goals["mean"] and "best" not in other.goals, "3 % worse would do"
    worst, phase = found.worst_over_ends("settled")
    assert phase == 1 and worst == pytest.approx(0.5)
    assert not any(found.goals[how] for how in ("settled", "measured", "late"))


def test_ours_is_held_against_local_full_and_fixed_cuts(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    for how in OVER_ENDS_BY:
        assert found.worst_over_ends(how)[0] == pytest.approx(0.0)
    assert all(found.goals[how] for how in ("settled", "measured", "late")) and found.most_late[0] == 0
    assert set(found.fixed_s) == {0, 3, 5, 6, 7, 8, STAGES} and found.untried == []
    assert found.best_fixed[0] in (5, STAGES) and found.best_fixed[1] == pytest.approx(3.0)
    assert found.over_fixed < 0 and found.goals["fixed"]
    blind = found_in(tmp_path / "blind", aware=False)
    assert blind.over_fixed >= 0


def test_ours_that_learns_late_of_a_change_is_seen_in_the_verdict_on_all_of_a_phase(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    busy = found.requests(1, OURS)
    assert len(busy) >= 4
    for number, request in enumerate(busy[:2], start=1):
        request.update(cut=0, seconds=found.requests(1, FULL)[0]["seconds"])
        assert found.most_late == (number, 1) and found.goals["late"] == (number == 1)
    assert found.goals["settled"] and found.goals["measured"]
    assert found.worst_over_ends("throughout")[1] == 1 and found.worst_over_ends("throughout")[0] > 0.03


@pytest.mark.parametrize(("seconds", "late"), [(1.02, 0), (1.2, 1)])
def test_a_request_that_the_device_computed_too_counts_as_itself(
    seconds: float, late: int, tmp_path: Path
) -> None:
    found = found_in(tmp_path)
    full_s = found.typical_s(1, 0)
    request = found.requests(1, OURS)[0]
    request.update(cut=0, hedged=True, seconds=seconds * found.better_end_s(1))
    again = Found(found.setting, Records(tmp_path / "records.jsonl"))
    again.row = found.row
    assert again.late(1) == late and again.typical_s(1, 0) == full_s, "it tells nothing of the cut"


def test_what_ours_pays_by_itself_is_seen_in_the_verdict_on_its_own_requests(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    for request in found.requests(1, OURS):
        request["seconds"] += 0.5
    assert found.goals["settled"] and not found.goals["measured"]
    assert found.worst_over_ends("measured") == (pytest.approx(0.5), 1)


def test_the_page_tells_how_many_requests_that_verdict_rests_on(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    header, _, *rows = phases_table([found]).splitlines()
    column = [name.strip() for name in header.split("|")].index("so many")
    told = [int(row.split("|")[column]) for row in rows]
    assert told == [len(found.requests(phase, OURS, settled=True)) for phase in range(len(found.phases))]
    assert min(told) > 0


def test_a_cut_that_was_not_tried_throughout_is_no_fixed_one(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    for request in found.row["requests"]:
        if request["way"] == OURS and request["phase"] == 1:
            request["cut"] = 4
    assert found.untried == [4] and 4 not in found.fixed_s


def test_what_the_device_finished_by_itself_tells_nothing_of_a_cut(tmp_path: Path) -> None:
    found = found_in(tmp_path, gives_up=("cut 5",))
    every = found.row["requests"]
    assert found.fallen_back == sum(each["way"] == "cut 5" for each in every) > 0
    assert found.spread(1, "cut 5").values == tuple(
        each["seconds"] for each in every if (each["phase"], each["way"]) == (1, NEUROSURGEON)
    )


def test_cutting_is_spread_over_a_hundred_requests(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    share, cut = found.cutting or (0.0, 0)
    least = min(each["later_s"] for each in found.row["cutting"].values())
    assert share == pytest.approx((0.05 + 100 * 1e-5) / (100 * least)) and found.goals["cutting"]
    assert str(cut) in found.row["cutting"]
    found.row["cutting"][str(cut)]["first_s"] += 2.0
    assert not found.goals["cutting"]
    known = Found(LOAD, Records(tmp_path / "records.jsonl"))
    known.row = {**known.row, "cutting": {}}
    assert known.cutting is None and "cutting" not in known.goals


def test_a_wrong_answer_is_counted(tmp_path: Path) -> None:
    found = found_in(tmp_path, wrong=(FULL,))
    assert found.wrong == sum(each["way"] == FULL for each in found.row["requests"]) > 0
    assert not found.goals["equal"]


def test_cuts_have_the_papers_numbers_where_there_is_one(tmp_path: Path) -> None:
    found = found_in(tmp_path)
    assert [found.label(cut) for cut in (0, 5, 6, STAGES)] == [FULL, "p = 19", "cut 6", LOCAL]


def test_rates_are_compared_once_ways_have_settled(tmp_path: Path) -> None:
    found = found_in(tmp_path, LINK)
    assert found.rates == [1.0, 8.0, 64.0]
    assert found.at_rate(LOCAL, 1.0) == 1.0 == found.at_rate(OURS, 1.0)
    assert found.at_rate(FULL, 8.0) == pytest.approx(1.1)
    assert found.speedups(OURS, FULL)[0] == pytest.approx(8.1)


# --------------------------------------------------------------------------------------------- the page


def test_verdicts_name_where_a_goal_is_missed(tmp_path: Path) -> None:
    good, bad = found_in(tmp_path / "good"), found_in(tmp_path / "bad", aware=False)
    assert verdict("mean", [good]).endswith("**met**, met in 1 of 1")
    assert verdict("mean", [bad]).endswith(f"not in {LOAD.key}")
    assert verdict("best", []).endswith("not judged")


def test_a_goal_is_not_met_before_all_that_it_speaks_of_has_been_run(tmp_path: Path) -> None:
    none = Records(tmp_path / "none.jsonl")
    left = [Found(setting, none) for setting in SETTINGS]
    assert all(verdict(goal, left).endswith(": not judged") for goal in GOALS)
    some = verdict("mean", [found_in(tmp_path / "good"), *left[1:]])
    assert "met so far, met in 1 of 1; not run: load-" in some and "**met**" not in some
    assert "link-" not in some, "where the link changes it says nothing"
    assert {each.setting.key for each in left if "best" in each.asked} == {
        f"load-{name}" for name in COMPARED
    }
    bad = found_in(tmp_path / "bad", aware=False)
    assert "**missed**, met in 0 of 1" in verdict("mean", [bad, *left[1:]])


@pytest.mark.full
def test_the_page_and_its_pictures_say_what_there_is(tmp_path: Path) -> None:
    records = recorded(tmp_path, wrong=("cut 3",))
    found, _ = measured(LINK)
    facts = {"stages": STAGES, "paper": {}, "load": 0.5, **load_aware.facts_of(LINK)}
    records.add(LINK.key, {**facts, **found})
    every = [Found(LOAD, records), Found(LINK, records), Found(SETTINGS[-1], records)]
    text = write(every, tmp_path, "page")
    assert (tmp_path / "page.md").read_text() == text == page(every, "page")
    for name in ("load", "link", "rates"):
        assert (tmp_path / f"page_{name}.png").stat().st_size > 10_000
        assert f"page_{name}.png" in text
    assert f"Not run yet: {SETTINGS[-1].key}" in text and "p = 19" in text
    assert f"{every[0].wrong} differed" in text and all(goal in text for goal in GOALS.values())
    assert "A server is waited for as long as 200 s" in text and "go on after 10 s" in text
    assert "or until everybody has had a turn: load, 10 s; link, 10 s or 13.5 s." in text
    assert "6.96 x, at most 21.98 x" in text and "31 processes in a loop" in text


def test_a_page_of_nothing(tmp_path: Path) -> None:
    text = write([Found(LOAD, Records(tmp_path / "none.jsonl"))], tmp_path, "none")
    assert "not judged" in text and LOAD.key in text and not list(tmp_path.glob("*.png"))


# --------------------------------------------------------------------------------------------- a real run


@pytest.mark.full
def test_the_smallest_form_runs_and_goes_on_where_it_was(tmp_path: Path) -> None:
    try:
        with testbed.Testbed(check=False):
            pass
    except testbed.Unavailable as error:
        pytest.skip(str(error))
    command = module_command("load_aware", "--quick", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr
    records = Records(tmp_path / "load_aware_quick.jsonl")
    for setting in QUICK:
        row = records.rows[setting.key]
        assert setting.key in done.stdout
        assert row["requests"] and all(each["equal"] and not each["why"] for each in row["requests"])
        assert {each["phase"] for each in row["requests"]} == set(range(len(setting.phases)))
        cuts = {way: {each["cut"] for each in row["requests"] if each["way"] == way} for way in STEADY}
        assert cuts == {LOCAL: {row["stages"]}, FULL: {0}}
    left = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=120)
    assert left.stdout.count("finished") == len(QUICK)
