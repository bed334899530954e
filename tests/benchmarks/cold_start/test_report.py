"""Test the report of `cold_start`, and the bound that it checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cold_start.bound import Parts
from benchmarks.cold_start.found import IMPORTED, STARTED, Found, wrong
from benchmarks.cold_start.measure import (
    AFTER_REPEATS,
    BASELINES,
    after_key,
    baseline_key,
    narrowed,
    turn_key,
)
from benchmarks.cold_start.report import GOALS, behind_table, page, verdict, write
from benchmarks.cold_start.settings import (
    OURS,
    PARTS,
    PLAIN,
    QUICK,
    WAYS,
    XL,
    Setting,
    way_of,
)
from benchmarks.harness.netns import PAYLOAD_SHARE
from benchmarks.harness.records import Records
from tests.benchmarks.cold_start.simulated import (
    NBYTES,
    SETTING,
    keys_of,
    made,
    measured,
    parts_row,
)
from upriver.coldstart.grouping.groups import GROUPINGS
from upriver.coldstart.grouping.timeline import Timeline

# ------------------------------------------------------------------------------------------------ bound


def test_the_bound_of_one_core_and_of_two() -> None:
    rows = [parts_row(download_s=seconds, execute_s=1 - seconds) for seconds in (0.9, 0.5, 0.6)]
    parts = Parts.of(rows, None)
    assert parts.download_s == 0.6 and parts.execute_s == 0.4, "the median of each"
    assert parts.bound(one_core=True) == pytest.approx(0.01 + 0.6 + 0.002 + 0.05)
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
    rows = [parts_row(carried=carried) for carried in (None, 0.9e8, 1.05e8)]
    assert Parts.of(rows, 1e8).download_s == pytest.approx(NBYTES / 1.05e8), "if it carries more"
    assert Parts.of(rows[:2], 1e8).download_s == pytest.approx(1 / PAYLOAD_SHARE)


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


@pytest.mark.full
def test_who_is_ahead_is_told_by_turns(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, seconds={OURS: 1.02, "pisel": 1.0})
    for number, factor in enumerate((1.0, 3.0, 2.0)):  # the machine is slower in some turns
        for run in SETTING.runs:
            records.rows[turn_key(SETTING, number, run)]["after_imports_s"] *= factor
    found = Found(SETTING, records)
    assert found.best_other(IMPORTED) == "pisel"
    assert found.behind(IMPORTED) == pytest.approx(1.0825 / 1.0625 - 1)
    assert found.goals["fastest"] and found.goals["fastest after imports"]
    assert found.best_other(IMPORTED, PLAIN) == "pisel" + PLAIN
    slower = Found(SETTING, measured(tmp_path / "slower", seconds={OURS: 1.5, "pisel": 1.0})[0])
    assert slower.behind(IMPORTED) == pytest.approx(0.5 / 1.0625)
    assert not slower.goals["fastest after imports"]


@pytest.mark.full
def test_nobody_is_the_best_other_by_the_turn_in_which_it_is_compared(tmp_path: Path) -> None:
    """All are equally good, and each of the others is lucky in one turn."""
    records, _ = measured(tmp_path, seconds={OURS: 1.0})
    others = [run for run in SETTING.runs if way_of(run) != OURS and not run.endswith(PLAIN)]
    for number, lucky in enumerate(others[:3]):
        for run in SETTING.runs:
            records.rows[turn_key(SETTING, number, run)]["total_s"] = 0.5 if run == lucky else 1.0
    found = Found(SETTING, records)
    assert found.behind(STARTED) == 0
    for number in range(3):
        records.rows[turn_key(SETTING, number, others[1])]["total_s"] = 0.7
    assert Found(SETTING, records).behind(STARTED) == pytest.approx(1 / 0.7 - 1), (
        "one that is ahead in all turns"
    )
    for number in (1, 2):
        for run in SETTING.runs:
            del records.rows[turn_key(SETTING, number, run)]
    assert Found(SETTING, records).behind(STARTED) == pytest.approx(1.0), "of a single turn it is its best"


def test_where_the_median_lies_is_told_by_ranks(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", repeats=10)
    records, _ = measured(tmp_path, setting, seconds={OURS: 2.0, "pisel": 1.0})
    for number in range(10):
        records.rows[turn_key(setting, number, OURS)]["total_s"] = 1.0 + number / 10
        records.rows[turn_key(setting, number, "pisel")]["total_s"] = 0.5
    found = Found(setting, records)
    assert found.behind(STARTED) == pytest.approx(1.9)
    # Of ten coins at most one shows heads, or at most one tails, with a chance of 22 in 1,024.
    assert found.behind_between(STARTED) == pytest.approx((1.2, 2.6))
    assert "+190.0% (+120.0% to +260.0%)" in behind_table([found], {"from start": STARTED})
    assert verdict("fastest", [found]).endswith(f". With a certainty of 95% behind in: {setting.key}")
    for number in range(2):  # too many turns of ten for such a certainty
        records.rows[turn_key(setting, number, OURS)]["total_s"] = 0.4
    open_yet = Found(setting, records)
    assert not open_yet.goals["fastest"]
    assert verdict("fastest", [open_yet]).endswith(". With a certainty of 95% behind in: none")
    few = Found(SETTING, measured(tmp_path / "few")[0])
    assert few.behind(STARTED) is not None and few.behind_between(STARTED) is None


def test_a_way_that_answers_wrongly_is_no_competitor(tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path, seconds={"runai": 0.1}, wrong=("runai",))[0])
    assert not found.usable("runai") and found.best_other(IMPORTED) != "runai"
    assert any("runai: 3 answers are not" in line for line in found.told())
    assert found.goals["right"] and wrong([found]) == [], "it is not ours, and right if built as ever"


def test_a_way_that_failed_once_is_compared_where_it_did_not(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", repeats=10)
    records, _ = measured(tmp_path, setting, seconds={OURS: 1.5, "runai": 1.0})
    for number in range(3):
        key = turn_key(setting, number, "runai")
        records.rows[key] = {**records.rows[key], "error": "timed out", "equal": None}
        found = Found(setting, records)
        assert found.usable("runai") == (number < 2)
        assert found.goals["fastest"] == (number == 2)
    assert found.out == ["runai"] and "runai in" in verdict("fastest after imports", [found])


def test_only_the_newest_code_of_a_run_counts(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, seconds={OURS: 1.0})
    key = turn_key(SETTING, 1, OURS)
    later = records.rows[key]["begun"] + 100
    records.add(key, {**records.rows[key], "version": "newer", "begun": later, "after_imports_s": 9.0})
    found = Found(SETTING, records)
    assert found.spread(OURS, IMPORTED).values == (9.0,) and len(found.rows("runai")) == 3
    assert not found.goals["fastest after imports"] and found.apart == 1
    other = Setting(model="bert", repeats=1)
    text = page([found, Found(other, measured(tmp_path / "o", other)[0])], "page")
    assert "newer (commit unknown): settings are of different ones" in text
    assert "Of 2 turns of upriver's, 1 were run in another start" in " ".join(text.split())


@pytest.mark.parametrize("what", [OURS, "pisel" + PLAIN, "parts", "after"])
def test_an_answer_of_ours_that_is_wrong_fails_the_benchmark(what: str, tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path, wrong=(what,))[0])
    assert not found.goals["right"] and SETTING.key in wrong([found])[0]
    text = page([found], "page")
    told = f"{GOALS['right']}: **missed**, met in 0 of 1 settings; not in {SETTING.key} ({found.wrong()[0]}"
    assert told in text and "Not run yet:" not in text


def test_the_share_of_the_bound_memory_and_calls_afterwards(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", gbit=1.0, repeats=2)
    found = Found(setting, measured(tmp_path, setting)[0])
    assert found.bound_s is not None and found.share(OURS) == pytest.approx(found.bound_s / (2 + 1 / 16))
    assert found.goals["bound"] is False
    assert found.above(OURS) == 105_000_000, "what imports take for a while is there again"
    assert found.goals["memory"]
    for row in found.rows(OURS):
        assert isinstance(row, dict)
        row["hwm_bytes"] += 10_000_000
    assert not found.goals["memory"] and found.goals["memory for weights"], "a call takes 0.1"
    assert found.above(OURS, "group_bytes") == 200_000_000
    assert "after" not in found.goals and found.after("arrived") is None
    calm = Found(SETTING, measured(tmp_path / "calm")[0])
    arrived = calm.after("arrived")
    assert arrived is not None and arrived.median == pytest.approx(1.025)
    assert calm.goals["after"] is False and "bound" not in calm.goals


def test_a_share_is_of_the_bound_that_was_measured_in_the_same_turn(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", gbit=1.0, repeats=3)
    records, _ = measured(tmp_path, setting)
    share = Found(setting, records).share(OURS)
    for row in (records.rows[turn_key(setting, 1, run)] for run in (PARTS, OURS)):
        row |= {name: 9 * value for name, value in row.items() if name.endswith("_s")}
    first = Parts.of([parts_row()], setting.rate).bound(one_core=True) / (2 + 1 / 16)
    assert share == pytest.approx(first) == Found(setting, records).share(OURS), "the median of three turns"
    del records.rows[turn_key(setting, 2, PARTS)]
    records.rows[turn_key(setting, 2, OURS)][IMPORTED] = 900.0
    slow = Parts.of([records.rows[turn_key(setting, 1, PARTS)]], setting.rate).bound(one_core=True) / 9
    assert Found(setting, records).share(OURS) == pytest.approx((first + slow / (2 + 1 / 16)) / 2)
    for number in range(2):
        del records.rows[turn_key(setting, number, OURS)]
    found = Found(setting, records)
    assert found.bound_s is not None and found.share(OURS) is None and "bound" not in found.goals
    assert f"| {setting.key} | 0.050 |" in page([found], "page")


def test_who_never_answers_rightly_misses_the_bound(tmp_path: Path) -> None:
    setting = Setting(model="gpt2", gbit=1.0, repeats=1)
    found = Found(setting, measured(tmp_path, setting, wrong=[OURS])[0])
    assert found.bound_s is not None and found.goals["bound"] is False


def test_calls_afterwards_are_not_judged_where_plain_ones_differ(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    for number in range(min(AFTER_REPEATS, SETTING.repeats)):
        records.rows[after_key(SETTING, number)]["seconds"]["control"] = [0.21, 0.21]
    found = Found(SETTING, records)
    assert "after" not in found.goals and found.after_is_even() is None


def test_memory_is_above_the_median_of_processes_that_only_import(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    records.rows[baseline_key(SETTING, 0, OURS)]["rss_bytes"] += 50_000_000
    assert Found(SETTING, records).above(OURS) == 105_000_000
    for number in range(2):
        records.rows[turn_key(SETTING, number, OURS)].pop("group_bytes")
    assert Found(SETTING, records).above(OURS, "group_bytes") is not None, "another turn has it"
    for number in range(BASELINES):
        del records.rows[baseline_key(SETTING, number, OURS)]
    assert Found(SETTING, records).above(OURS) is None
    assert "memory" not in Found(SETTING, records).goals


def test_memory_of_small_models_is_told_and_not_judged(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    for row in records.rows.values():
        row["nbytes"] = 5_000_000
    found = Found(SETTING, records)
    assert "memory" not in found.goals and "100 MiB / 191 MiB" in page([found], "page")


def test_small_models_are_judged_by_themselves(tmp_path: Path) -> None:
    small = Setting(model="squeezenet", repeats=1)
    assert Found(small, measured(tmp_path, small, seconds={OURS: 1.0})[0]).goals["small"]
    assert not Found(small, measured(tmp_path / "b", small, seconds={OURS: 9.0})[0]).goals["small"]
    assert "small" not in Found(SETTING, measured(tmp_path / "c")[0]).goals
    large, jobs = measured(tmp_path / "d", XL)
    found = Found(XL, large)
    assert "fastest" not in found.goals and "memory" in found.goals
    assert not {"parts", "after"} & {do for do, _, _, _ in jobs.asked}, "nor is there memory for three of it"
    assert found.bound_s is None and "memory for weights" not in found.goals


def test_verdicts_name_where_a_goal_is_missed(tmp_path: Path) -> None:
    good = Found(SETTING, measured(tmp_path, seconds={OURS: 1.0})[0])
    bad = Found(SETTING, measured(tmp_path / "bad", seconds={OURS: 9.0})[0])
    assert verdict("fastest", [good]).endswith("**met**, met in 1 of 1 settings")
    assert verdict("fastest", [bad]).endswith(
        f"not in {SETTING.key}. With a certainty of 95% behind in: none"
    )
    assert verdict("fastest, evened", [bad]).endswith("not judged"), "before that has been done"
    assert verdict("bound", [good]).endswith("not judged") and "not judged" in verdict("fastest", [])


def test_the_page_and_its_picture_say_what_there_is(tmp_path: Path) -> None:
    records, jobs = measured(tmp_path, narrowed(SETTING, set(WAYS) - {"tensorizer"}), wrong=("layers",))
    made(jobs, records, XL)
    found = [Found(setting, records) for setting in (SETTING, XL, QUICK[0])]
    text = write(found, tmp_path, "page", hint="`pip install it`")
    assert (tmp_path / "page.md").read_text() == text == page(found, "page", hint="`pip install it`")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    _, told, untimed = text.partition("Run for their memory, in 2 turns, and not judged")
    assert told and untimed.partition("## Who is ahead")[0].count(f"| {XL.key} |") == 2
    assert f"Not run yet: {QUICK[0].key}" in text and "layers: 3 answers are not the model's" in text
    assert "not installed: tensorizer. Their environment: `pip install it`" in text
    assert all(goal in text for goal in GOALS.values())
    assert "`memory.peak`" in text and "GPT-2-XL" in text and "1.05 / 2.00" in text and "boto3 1.2" in text
    assert text.count(f"| {XL.key} |") == 3, "its seconds by two clocks, and its memory"


def test_a_page_of_nothing(tmp_path: Path) -> None:
    text = write([Found(SETTING, Records(tmp_path / "none.jsonl"))], tmp_path, "none")
    assert "not judged" in text and SETTING.key in text and not (tmp_path / "none.png").exists()


def test_what_is_kept_is_whole_after_a_torn_line(tmp_path: Path) -> None:
    records, _ = measured(tmp_path)
    with records.path.open("ab") as file:
        file.write(b'{"key": "torn')
    assert keys_of(SETTING, Records(records.path)) == []


def test_a_clock_is_named_in_every_run(tmp_path: Path) -> None:
    found = Found(SETTING, measured(tmp_path)[0])
    for clock in (STARTED, IMPORTED):
        assert found.spread(OURS, clock).median > 0
