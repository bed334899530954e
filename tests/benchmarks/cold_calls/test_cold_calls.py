"""Test the benchmark that counts the instructions of a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cold_calls import __main__ as cold_calls
from benchmarks.cold_calls.__main__ import (
    ARRIVED,
    COPIED,
    NETWORKS,
    PLAIN,
    Counted,
    dumped,
    in_turns,
    keep,
    kept,
    text,
)
from benchmarks.harness.children import Failed


def test_parts_are_read_in_the_order_in_which_they_were_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (2, 10, 1):
        (tmp_path / f"out.{number}").write_text(
            f"part: {number}\ndesc: Trigger: Client Request\ntotals: {number}00\n"
        )
    (tmp_path / "out.11").write_text("part: 11\ndesc: Trigger: Program termination\ntotals: 5\n")
    assert dumped(out) == [100, 200, 1000]


def test_totals_belong_to_whose_turn_it_was() -> None:
    assert in_turns([1, 2, 3, 5, 6, 4, 9, 7, 8], 3) == {
        ARRIVED: [1, 4, 7],
        PLAIN: [2, 5, 8],
        COPIED: [3, 6, 9],
    }
    with pytest.raises(Failed, match="5 of 6 calls were counted"):
        in_turns([1, 2, 3, 4, 5], 2)


def counted(arrived: int, *, equal: bool = True) -> Counted:
    counts = {name: [arrived if name == ARRIVED else 1_000_000] for name in NETWORKS}
    return Counted(counts, equal, "Here.")


def test_the_report_says_who_is_near_and_who_has_the_same_bits() -> None:
    met = {"gpt2": counted(1_009_000), "vgg19": counted(1_000_000)}
    assert "**Met**: within 1% for 2 of 2 models; the same bits in all calls for 2 of 2." in text(met)
    row = "| GPT-2 | 1.0 (1.0 to 1.0) | 1.0 (1.0 to 1.0) | 1.0 (1.0 to 1.0) | 1.00900 | 1.00000 |"
    assert row in text(met)
    assert "**Missed**: within 1% for 1 of 2" in text(met | {"gpt2": counted(1_011_000)})
    assert "bits in all calls for 1 of 2" in text(met | {"gpt2": counted(1_000_000, equal=False)})


def test_a_model_that_failed_is_missed_and_named() -> None:
    found = {"vgg19": counted(1_000_000), "gpt2": Counted({}, False, "Here.", "no end within 3600 s")}
    assert "**Missed**: within 1% for 1 of 2 models; the same bits in all calls for 1 of 2." in text(found)
    assert "- failed: GPT-2: no end within 3600 s" in text(found)


def test_what_was_counted_is_kept_as_it_comes(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    assert kept(runs) == {}
    found = {"vgg19": counted(1), "gpt2": Counted({}, False, "Here.", "it ended with 1")}
    keep(found, runs)
    assert kept(runs) == found
    assert list(kept(runs)) == ["gpt2", "vgg19"]


def test_without_valgrind_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Failed, match="valgrind is not installed"):
        cold_calls.counted({"cache": "", "calls": 1})


def test_other_bits_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_calls, "KERNELS", {})
    monkeypatch.setattr(cold_calls, "uncounted", lambda model: False)
    monkeypatch.setattr("sys.argv", ["cold_calls", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="squeezenet: answers with other bits"):
        cold_calls.main()
    assert "all calls: NO." in (tmp_path / "cold_calls_quick.md").read_text(encoding="utf-8")
    keep({"gpt2": counted(1), "vgg19": counted(1, equal=False)}, tmp_path / "cold_calls.json")
    monkeypatch.setattr("sys.argv", ["cold_calls", "--report", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: vgg19: answers with other bits"):
        cold_calls.main()
