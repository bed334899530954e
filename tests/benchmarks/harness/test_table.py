"""Test the tables of results: what they read from reports, and that a stale one is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import reports, table
from benchmarks.harness.children import ROOT
from benchmarks.harness.claims import CLAIMS, HEADLINES
from benchmarks.harness.reports import Claim, ReportError, column, figures, goals_met, met, ratios
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
    assert claim.commits() == ["0123456789ab", "123456789abc"]
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


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "src" / "upriver" / "store").mkdir(parents=True)
    (tmp_path / "src" / "upriver" / "a.py").write_text('"""A."""\none = 1\n')
    (tmp_path / "src" / "upriver" / "store" / "b.py").write_text("two = 2\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *name, *arguments], check=True)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.harness.code_version.ROOT", tmp_path)
    return tmp_path


def test_code_has_changed_by_more_than_prose_and_outside_of_what_is_left_out(tree: Path) -> None:
    assert not changed_since("HEAD", ())
    (tree / "src" / "upriver" / "a.py").write_text('"""Another text."""\none = 1\n')
    (tree / "src" / "upriver" / "store" / "b.py").write_text("two = 3\n")
    assert changed_since("HEAD", ()) and not changed_since("HEAD", ["store"])
    (tree / "src" / "upriver" / "a.py").unlink()
    assert changed_since("HEAD", ["store"])


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
