"""Test the tables of results: what they read from reports, and that a stale one is told."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import reports, table
from benchmarks.harness.children import ROOT
from benchmarks.harness.claims import CLAIMS, HEADLINES, first_of_all, missed_for
from benchmarks.harness.reports import (
    Claim,
    ReportError,
    column,
    figures,
    goals_met,
    holds,
    met,
    ratios,
)
from benchmarks.harness.table import BEGIN, END, PAGES, StaleError, changed_since, filled, provenance

REPORT = """# A claim

- one: **met**, met in 3 of 3
- another: **missed**, met in 2 of 3

## First

| way | s | goal |
| --- | --- | --- |
| ours | 2.00 (1.00 to 3.00) | met |
| theirs | 1,004.0 | **missed** |

## Second

| way | s | other s |
| --- | --- | --- |
| ours | 3 | 6 |
| theirs | -1 | 4 |

Commits 0123456789ab, with local changes, 123456789abc; a machine. Digest ffffffffffff.
"""


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Claim:
    monkeypatch.setattr(reports, "RESULTS", tmp_path)
    (tmp_path / "claim.md").write_text(REPORT, encoding="utf-8")
    return Claim(
        name="claim",
        goal="",
        judged_by="",
        says=r"one: \*\*(?P<held>\w+)\*\*, met in (?P<share>\d of \d)",
        counts={"most": figures("s", "## First", of=max, digits=0)},
        result="{held} in {share}, {most} s at most",
    )


def test_a_row_holds_what_the_report_says(claim: Claim) -> None:
    assert claim.filled(claim.result) == "Met in 3 of 3, 1004 s at most"
    assert claim.commits() == ["0123456789ab, with local changes", "123456789abc"]
    claim.path.write_text(REPORT.replace("one: **met**", "one is met"), encoding="utf-8")
    with pytest.raises(ReportError, match=r"claim\.md does not say: one:"):
        claim.filled(claim.result)


def test_columns_are_of_the_first_table_behind_some_words() -> None:
    assert column(REPORT, "s") == ["2.00 (1.00 to 3.00)", "1,004.0"]
    assert column(REPORT, "s", "## Second") == ["3", "-1"]
    assert met("goal")(REPORT) == "1 of 2" and goals_met(REPORT) == "1 of 2"
    assert {name: count(REPORT) for name, count in ratios("s", "other s", "## Second").items()} == {
        "least": "-0.25",
        "median": "0.12",
        "most": "0.50",
    }
    with pytest.raises(ReportError, match="no column 'goal' behind '## Second'"):
        column(REPORT, "goal", "## Second")
    with pytest.raises(ReportError, match="no words '## Third'"):
        column(REPORT, "s", "## Third")


def test_a_verdict_is_met_only_if_all_of_it_is() -> None:
    assert holds("one: .*?met in 3 of 3", "two")("- one: **met**,\nmet in 3 of 3; two") == "met"
    assert holds("one: .*?met in 3 of 3", "two")("- one: **met**,\nmet in 3 of 3") == "missed"
    assert first_of_all("who is: 4 of 4.\nwho is: 4 of 4.\n9 of 9 answers were") == "met"
    assert first_of_all("who is: 4 of 4.\nwho is: 4 of 4.\n8 of 9 answers were") == "missed"
    assert first_of_all("who is: 4 of 4.\nwho is: 3 of 4.\n9 of 9 answers were") == "missed"


@pytest.mark.parametrize(
    ("verdict", "missed"),
    [
        ("missed for a, b.c; met for d. The", "a, b.c"),
        ("missed for a, b.c. The", "a, b.c"),
        ("met for a, b.c.", "none"),
    ],
)
def test_what_misses_a_goal_is_named(verdict: str, missed: str) -> None:
    assert missed_for("kind by kind:")(f"kind by\nkind: {verdict}") == missed
    with pytest.raises(ReportError, match="no verdict behind 'kind by kind:'"):
        missed_for("kind by kind:")("kind by kind: not judged")


def test_a_page_without_markers_is_refused() -> None:
    assert filled(f"a\n{BEGIN}\nold\n{END}\nb", "new", "page") == f"a\n{BEGIN}\nnew\n{END}\nb"
    with pytest.raises(StaleError, match="page: no <!-- results -->"):
        filled("a", "new", "page")


def test_every_claim_has_a_row_and_every_headline_a_claim() -> None:
    folders = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert [claim.name for claim in CLAIMS] == list(dict.fromkeys(claim.name for claim in CLAIMS))
    assert {claim.name for claim in CLAIMS} == folders
    assert {each.claim for each in HEADLINES} <= folders and len(HEADLINES) == 6


def test_a_stale_page_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "PAGES", {page: PAGES[ROOT / "README.md"]})
    monkeypatch.setattr("sys.argv", ["table", "--check"])
    with pytest.raises(SystemExit, match=r"stale: README\.md; run python -m benchmarks\.harness\.table"):
        table.main()
    monkeypatch.setattr("sys.argv", ["table"])
    table.main()
    monkeypatch.setattr("sys.argv", ["table", "--check"])
    table.main()
    assert "README.md written" in capsys.readouterr().out and "speedup.md" in page.read_text()


# ------------------------------------------------------------------------------------- in a repository


def in_git(tree: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", tree, *name, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(tree: Path) -> str:
    in_git(tree, "add", "src", "benchmarks")
    in_git(tree, "commit", "-qm", "another")
    return in_git(tree, "rev-parse", "--short=12", "HEAD")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "src" / "upriver" / "store").mkdir(parents=True)
    (tmp_path / "src" / "upriver" / "a.py").write_text('"""A."""\none = 1\n')
    (tmp_path / "src" / "upriver" / "store" / "b.py").write_text("two = 2\n")
    (tmp_path / "benchmarks" / "harness").mkdir(parents=True)
    (tmp_path / "benchmarks" / "harness" / "c.py").write_text("three = 3\n")
    (tmp_path / "benchmarks" / "harness" / "table.py").write_text("four = 4\n")
    in_git(tmp_path, "init", "-q")
    committed(tmp_path)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.harness.code_version.ROOT", tmp_path)
    return tmp_path


def test_code_has_changed_by_more_than_prose_and_outside_of_what_is_left_out(
    tree: Path, claim: Claim
) -> None:
    without = replace(claim, without=["store"])
    assert not changed_since("HEAD", claim)
    (tree / "src" / "upriver" / "a.py").write_text('"""Another text."""\none = 1\n')
    (tree / "src" / "upriver" / "store" / "b.py").write_text("two = 3\n")
    (tree / "benchmarks" / "harness" / "table.py").write_text("four = 5\n")
    assert changed_since("HEAD", claim) and not changed_since("HEAD", without)
    (tree / "benchmarks" / "harness" / "c.py").write_text("three = 4\n")
    assert changed_since("HEAD", without)
    in_git(tree, "checkout", "-q", "benchmarks/harness/c.py")
    assert not changed_since("HEAD", without)
    (tree / "src" / "upriver" / "a.py").unlink()
    assert changed_since("HEAD", without)


def test_code_is_the_same_only_since_all_commits_of_a_row(tree: Path, claim: Claim) -> None:
    first = in_git(tree, "rev-parse", "--short=12", "HEAD")
    (tree / "src" / "upriver" / "a.py").write_text("one = 2\n")
    second = committed(tree)
    claim.path.write_text(f"Commits {first}, {second}; a machine.", encoding="utf-8")
    found = provenance(claim)
    assert found is not None and found[0].endswith(" and 1 before") and found[2] == "changed"
    claim.path.write_text(f"Commits {second}, with local changes; a machine.", encoding="utf-8")
    found = provenance(claim)
    assert found is not None and found[::2] == [f"{second}, with local changes", "the same"]


def test_a_commit_that_this_clone_lacks_leaves_the_row_as_it_was(
    tree: Path, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance(claim) is None
    monkeypatch.setattr(table, "CLAIMS", [claim])
    row = "| [claim](results/claim.md) | x | y | z | 0123456789ab | 2026-01-01 | the same |"
    assert table.all_claims(row).endswith(
        "| Met in 3 of 3, 1004 s at most | 0123456789ab | 2026-01-01 | the same |"
    )
    assert table.all_claims("").endswith("| ? | ? | ? |")
