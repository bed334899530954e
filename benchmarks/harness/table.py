"""Fill the tables of results in ``benchmarks/README.md`` and ``README.md`` from the reports.

Run ``python -m benchmarks.harness.table``; ``--check`` only says which table is stale, by its exit status
too. Each claim is a row: what its report says, the commit that was measured, and whether the code that the
claim depends on has changed since any of its commits, docstrings and comments aside. That code is the
package's, the claim's own folder and the harness. A report without the expected words is an error, so that no
row outlives its report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness.children import ROOT
from benchmarks.harness.claims import CLAIMS, HEADLINES
from benchmarks.harness.code_version import essence, git
from benchmarks.harness.reports import RESULTS, Claim, ReportError, table

TABLES = ("claims", "reports", "table")
"""Modules of the harness that measure nothing."""

BEGIN, END = "<!-- results -->", "<!-- /results -->"
HEADER = ("claim", "goal", "judged by", "result", "measured at", "on", "code since")
UNKNOWN = "?"


class StaleError(Exception):
    """Error for a page whose table is missing, or is not that of the reports."""


def all_claims(before: str) -> str:
    """Return the table of every claim.

    Args:
        before: The page so far. Its cells stand where this clone lacks the measured commit.
    """
    known = {cells[0]: cells for cells in map(_cells, before.splitlines()) if len(cells) == len(HEADER)}
    rows = []
    for claim in CLAIMS:
        link = f"[{claim.name}](results/{claim.path.name})"
        measured = provenance(claim) or known.get(link, [UNKNOWN] * len(HEADER))[-3:]
        rows.append([link, claim.goal, claim.judged_by, claim.filled(claim.result), *measured])
    return table(HEADER, rows)


def headlines(_: str = "") -> str:
    """Return the table of README: each headline claim, with what it is compared with."""
    claims = {claim.name: claim for claim in CLAIMS}
    rows = [
        [
            f"[{each.title}](benchmarks/results/{claims[each.claim].path.name})",
            each.compared_with,
            claims[each.claim].filled(each.result),
            each.measured_on,
        ]
        for each in HEADLINES
    ]
    return table(("", "compared with", "result", "measured on"), rows)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []


# -------------------------------------------------------------------------------------------- provenance


def provenance(claim: Claim) -> list[str] | None:
    """Return the newest measured commit, its date, and whether code changed since. None if git lacks it."""
    commits = claim.commits()
    if not commits:
        return ["not told", UNKNOWN, UNKNOWN]
    dates = {commit: date for commit in commits if (date := git("log", "-1", "--format=%cI", commit[:12]))}
    if len(dates) < len(commits):
        return None
    newest = max(commits, key=dates.__getitem__)
    others = f" and {len(commits) - 1} before" if len(commits) > 1 else ""
    changed = any(changed_since(commit[:12], claim) for commit in commits)
    return [newest + others, dates[newest][:10], "changed" if changed else "the same"]


def changed_since(commit: str, claim: Claim) -> bool:
    """Return whether the code that a claim depends on differs from a commit in more than prose."""
    code = ["src/upriver/*.py", f"benchmarks/{claim.name}/*.py", "benchmarks/harness/*.py"]
    code += [f":(exclude)src/upriver/{room}" for room in claim.without]
    code += [f":(exclude)benchmarks/harness/{name}.py" for name in TABLES]
    listed = git("diff", "--name-status", "--no-renames", commit, "--", *code)
    for line in listed.splitlines():
        state, path = line.split("\t")
        if state != "M" or essence(git("show", f"{commit}:{path}")) != essence((ROOT / path).read_bytes()):
            return True
    return False


# -------------------------------------------------------------------------------------------------- pages

PAGES: Mapping[Path, Callable[[str], str]] = {
    RESULTS.parent / "README.md": all_claims,
    ROOT / "README.md": headlines,
}


def filled(page: str, made: str, name: str) -> str:
    """Return a page with a table between its markers.

    Raises:
        StaleError: If the page lacks the markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise StaleError(f"{name}: no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which table is stale")
    options = parser.parse_args()
    stale = []
    try:
        for path, make in PAGES.items():
            page = path.read_text(encoding="utf-8")
            now = filled(page, make(page), _name(path))
            if now != page:
                stale.append(_name(path))
                if not options.check:
                    path.write_text(now, encoding="utf-8")
    except (ReportError, StaleError) as error:
        sys.exit(f"error: {error}")
    if options.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python -m benchmarks.harness.table")
    print(f"tables of results: {', '.join(stale) + ' written' if stale else 'as the reports say'}")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
