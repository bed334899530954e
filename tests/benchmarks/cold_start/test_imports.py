"""Check that chance in imports decides nothing, and a way's additional imports count as its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cold_start.found import EVENED, STARTED, Found
from benchmarks.cold_start.imports import even_imports, kind_of, polished
from benchmarks.cold_start.measure import turn_key
from benchmarks.cold_start.report import verdict
from benchmarks.cold_start.settings import OURS, PLAIN, STREAMED, XL, Setting, way_of
from benchmarks.harness.records import Records
from tests.benchmarks.cold_start.simulated import SETTING, Simulated, made, measured

SETTINGS = (
    Setting(model="gpt2", repeats=6),
    Setting(model="bert", repeats=6),
    Setting(model="resnet50", repeats=6),
)


def several(folder: Path, imports: Callable[[Setting, int, str], float], **options: Any) -> list[Found]:
    """Return settings whose processes import in the given seconds."""
    records = Records(folder / "records.jsonl")
    for setting in SETTINGS:
        made(Simulated(**options), records, setting)
        for number in range(setting.repeats):
            for run in setting.runs:
                row = records.rows[turn_key(setting, number, run)]
                seconds = imports(setting, number, run)
                row["total_s"] += seconds - row["imported_s"]
                row["imported_s"] = seconds
    return [Found(setting, records) for setting in SETTINGS]


def usual(setting: Setting, number: int, run: str) -> float:
    """Return the import seconds: the machine's speed in a turn, and for peers their additional imports."""
    return 5 + number / 3 + ("boto3" in run) * 0.5 + run.endswith(PLAIN) * ("boto3" in run) * 0.1


@pytest.mark.full
def test_imports_as_usual_are_left_as_they_are(tmp_path: Path) -> None:
    found = several(tmp_path, usual)
    imports = even_imports(found)
    for each in found:
        for run in each.runs:
            for row in each.right(run):
                assert row[EVENED] == pytest.approx(row[STARTED])
    assert set(imports) == {"transformers", "torchvision"}
    of_texts = imports["transformers"]
    assert (of_texts.turns, of_texts.off_s) == (12, pytest.approx(0))
    assert of_texts.usual_s == pytest.approx(5 + 2.5 / 3)
    assert of_texts.extra_s["boto3-torch"] == pytest.approx(0.5)
    assert of_texts.extra_s["boto3-torch" + PLAIN] == pytest.approx(0.6)
    assert of_texts.extra_s["runai"] == pytest.approx(0) and OURS not in of_texts.extra_s


@pytest.mark.full
def test_what_chance_does_to_imports_decides_nothing(tmp_path: Path) -> None:
    """Some processes of upriver import for seconds longer; after that it is ahead of all."""
    draw = random.Random(1)
    slow = {(setting.key, number) for setting in SETTINGS for number in draw.sample(range(6), 4)}

    def imports(setting: Setting, number: int, run: str) -> float:
        late = 3.0 if run == OURS and (setting.key, number) in slow else draw.choice((0.0, 0.0, 0.4))
        return usual(setting, number, run) + late

    found = several(tmp_path, imports, seconds={OURS: 1.7})
    even_imports(found)
    for each in found:
        assert not each.goals["fastest"] and each.goals["fastest, evened"]
        assert (each.behind(EVENED) or 0) < 0 < (each.behind(STARTED) or 0)
    assert verdict("fastest, evened", found).endswith("**met**, met in 3 of 3 settings")


def test_a_way_that_imports_longer_in_every_turn_stays_behind(tmp_path: Path) -> None:
    def imports(setting: Setting, number: int, run: str) -> float:
        return usual(setting, number, run) + (way_of(run) in STREAMED)

    found = several(tmp_path, imports)
    even_imports(found)
    for each in found:
        assert not each.goals["fastest, evened"]
        assert each.behind(EVENED) == pytest.approx(each.behind(STARTED))


def test_whoever_is_behind_after_imports_stays_so(tmp_path: Path) -> None:
    found = several(tmp_path, usual, seconds={OURS: 4.0})
    even_imports(found)
    assert not any(each.goals["fastest, evened"] for each in found)
    assert "With a certainty of 95% behind in: gpt2" in verdict("fastest, evened", found)


def test_wrong_answers_and_settings_without_any_have_no_part_in_it(tmp_path: Path) -> None:
    records, _ = measured(tmp_path, wrong=("runai",))
    found = [Found(SETTING, records), Found(replace(SETTING, model="bert"), records), Found(XL, records)]
    [imports] = even_imports(found).values()
    assert imports.turns == SETTING.repeats and "runai" not in imports.extra_s
    assert not any(EVENED in row for row in found[0].rows("runai"))
    assert all(EVENED in row for row in found[0].right("pisel"))
    assert even_imports([Found(XL, Records(tmp_path / "none.jsonl"))]) == {}


def test_all_ways_of_one_loader_import_the_same() -> None:
    assert {kind_of(way + ending) for way in STREAMED for ending in ("", PLAIN)} == {OURS}
    assert kind_of("runai" + PLAIN) == "runai" + PLAIN and kind_of("sequential") == "sequential"


@given(
    rows=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    columns=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
)
def test_a_table_that_is_a_sum_is_had_again(rows: list[float], columns: list[float]) -> None:
    table = [(r, str(c), row + column) for r, row in enumerate(rows) for c, column in enumerate(columns)]
    of_row, of_column = polished(table)
    for row, column, value in table:
        assert of_row[row] + of_column[column] == pytest.approx(value, abs=1e-6)
