"""Check `scripts/mutate.py`: what it draws, and that it tells tests that notice from tests that do not."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import mutate

SOURCE = '''
def largest(numbers: "list[int] | None", most: int = 3) -> int | None:
    """Return the largest number up to a bound."""
    found = [one for one in numbers if one <= most and not one < 0]
    total = 0
    for one in found:
        if one == 2:
            continue
        total += one
    print(total)
    return max(found) + total
'''


def changes(tmp_path: Path) -> list[mutate.Mutant]:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    [found] = mutate.mutants_of("any", path, tmp_path)
    return found


def test_mutants_of_a_module_change_one_line_each_and_no_annotation(tmp_path: Path) -> None:
    found = changes(tmp_path)
    assert {(one.before, one.after) for one in found} >= {
        ("if one == 2:", "if one != 2:"),
        ("if one == 2:", "if one == 3:"),
        ("if one == 2:", "if not (one == 2):"),
        ("continue", "break"),
        ("total += one", "pass"),
        ("print(total)", "pass"),
        ("total = 0", "total = 1"),
        ("return max(found) + total", "return max(found) - total"),
        ("return max(found) + total", "return min(found) + total"),
        ("return max(found) + total", "return None"),
    }
    assert all(one.function == "largest" and one.before != one.after for one in found)
    assert not any("list[int]" in one.before for one in found)
    for one in found:
        ast.parse(SOURCE.encode()[: one.start] + one.text.encode() + SOURCE.encode()[one.end :])


def test_draw_is_decided_by_its_seed_and_takes_rooms_in_turns() -> None:
    rooms = ["order", "draws"]
    drawn = mutate.draw(3, 12, rooms)
    assert drawn == mutate.draw(3, 12, rooms) != mutate.draw(4, 12, rooms)
    assert [one.room for one in drawn] == rooms * 6
    assert [one for one in drawn if one.room == "draws"] == mutate.draw(3, 6, ["draws"])
    assert len({(one.path, one.start, one.end, one.text) for one in drawn}) == 12


def test_every_room_names_code_and_tests_that_exist() -> None:
    for room in mutate.ROOMS.values():
        assert all((mutate.ROOT / "src" / "upriver" / path).exists() for path in room.code)
        assert all((mutate.ROOT / "tests" / path).exists() for path in room.tests)


def test_the_mirror_of_a_module_is_its_test_file() -> None:
    assert mutate.mirror_of("src/upriver/cost.py") == "test_cost.py"
    assert mutate.mirror_of("src/upriver/control/partition.py") == "control/test_partition.py"


def test_summary_counts_a_test_that_hung_as_a_kill_and_tells_of_it(tmp_path: Path) -> None:
    outcomes = [
        mutate.Outcome(mutant=mutant, result=result, seconds=1.0)
        for mutant, result in zip(changes(tmp_path), ["killed", "timeout", "survived"], strict=False)
    ]
    text, reached = mutate.summary(outcomes)
    assert "2 killed (1 by a test that hung), 1 survived" in text
    assert "killed 2 of 3 (66.7%" in text
    assert not reached
    assert mutate.summary(outcomes[:2])[1]


CONFTEST = """
from hypothesis import settings

settings.register_profile("unshrunk")

def pytest_addoption(parser):
    parser.addoption("--fork", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "full: slow")
"""


def small_repository(root: Path, monkeypatch: pytest.MonkeyPatch, test: str) -> Path:
    """Write a repository of one function, a mirroring test file and another one; return the latter."""
    package, tests = root / "src" / "upriver", root / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").write_text("")
    (package / "small.py").write_text("def twice(number):\n    return 2 * number\n")
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_small.py").write_text("def test_nothing():\n    pass\n")
    other = tests / "test_other.py"
    other.write_text(f"from upriver.small import twice\n\ndef test_it():\n    {test}\n")
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "COPIED", ("src", "tests"))
    room = mutate.Room(code=("small.py",), tests=("test_small.py", "test_other.py"))
    monkeypatch.setattr(mutate, "ROOMS", {"small": room})
    return other


@pytest.mark.full
@pytest.mark.parametrize(
    ("test", "result"),
    [
        ("assert twice(2) == 4", "killed"),
        ("twice(2)", "survived"),
        ("import time; twice(2) == 4 or time.sleep(60)", "timeout"),
    ],
)
def test_judge_tells_a_test_that_notices_from_one_that_does_not_or_hangs(
    test: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    small_repository(root, monkeypatch, test)
    monkeypatch.setattr(mutate, "QUICK", [*mutate.QUICK, "--timeout=5"])
    [found] = mutate.mutants_of("small", root / "src" / "upriver" / "small.py", root)
    mutant = next(one for one in found if one.after == "return 2 / number")
    (tmp_path / "copies").mkdir()
    copies = mutate.Copies(tmp_path / "copies", 1)
    assert copies.run("small", None, 60)[0] == 0
    assert mutate.judge(copies, mutant, 60).result == result
    assert (tmp_path / "copies" / "0" / mutant.path).read_bytes() == (root / mutant.path).read_bytes()
    assert copies.run("small", None, 60)[0] == 0, "no bytecode of the change is left"


@pytest.mark.full
def test_a_report_is_continued_and_survivors_in_it_are_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = small_repository(tmp_path / "repository", monkeypatch, "assert twice(2) is not None")
    options = ["--count", "9", "--at-once", "1", "--report", str(tmp_path / "report")]

    def results() -> Counter[str]:
        lines = (tmp_path / "report").read_text().splitlines()
        return Counter(json.loads(line)["result"] for line in lines)

    assert mutate.main(options) == 1
    assert results() == {"killed": 1, "survived": 2}
    other.write_text(other.read_text().replace("is not None", "== 4"))
    assert mutate.main(options) == 0
    assert results() == {"killed": 3, "survived": 2}


def test_judge_of_an_equivalent_change_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = changes(tmp_path)[0]
    monkeypatch.setattr(mutate, "EQUIVALENT", {mutant.key: "it is the same"})
    monkeypatch.setattr(mutate, "COPIED", ())
    outcome = mutate.judge(mutate.Copies(tmp_path, 1), mutant, 60)
    assert (outcome.result, outcome.by) == ("equivalent", "it is the same")
    assert mutate.summary([outcome])[1]
