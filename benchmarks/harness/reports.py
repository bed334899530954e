"""Write the tables of reports, and read what the reports in ``benchmarks/results`` say."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.harness.children import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = ROOT / "benchmarks" / "results"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"

LOCAL = ", with local changes"

COMMITS = re.compile(rf"(?:[Cc]ommits? |Upriver at )((?:[0-9a-f]{{12}}(?:{LOCAL})?(?:, )?)+)")
"""How a report names the commits that it measured."""

Count = Callable[[str], str]


class ReportError(Exception):
    """Error for a report that does not say what its row needs."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table of results.

    Attributes:
        name: Folder of the claim.
        report: Report in ``results``, without its ending; the same name if empty.
        goal: The goal.
        judged_by: The statistic that the goal is judged by.
        says: Pattern of the report's words, with a named group for each figure.
        counts: Functions that derive further figures from the whole report.
        result: Format of the result, filled with the figures of `says` and `counts`.
        without: Rooms of the package that the claim does not depend on.
    """

    name: str
    report: str = ""
    goal: str
    judged_by: str
    says: str = ""
    counts: Mapping[str, Count] = field(default_factory=dict)
    result: str
    without: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """Return the path of the report."""
        return RESULTS / f"{self.report or self.name}.md"

    @property
    def text(self) -> str:
        """Return the text of the report."""
        return self.path.read_text(encoding="utf-8")

    def filled(self, template: str) -> str:
        """Fill a format with the report's figures.

        Raises:
            ReportError: If the report does not hold them.
        """
        text = self.text
        match = re.search(self.says, " ".join(text.split()))
        if match is None:
            raise ReportError(f"{self.path.name} does not say: {self.says}")
        try:
            counted = {name: count(text) for name, count in self.counts.items()}
        except ReportError as error:
            raise ReportError(f"{self.path.name}: {error}") from None
        found = template.format(**match.groupdict(), **counted)
        return found[:1].upper() + found[1:]

    def commits(self) -> list[str]:
        """Return the commits that the report names, each once, `LOCAL` behind those with local changes."""
        named = " ".join(COMMITS.findall(self.text))
        changed = {each[:12] for each in re.findall(f"[0-9a-f]{{12}}{LOCAL}", named)}
        each_once = dict.fromkeys(re.findall("[0-9a-f]{12}", named))
        return [commit + (LOCAL if commit in changed else "") for commit in each_once]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One row of README's table.

    Attributes:
        claim: Name of the `Claim`.
        title: What upriver does.
        compared_with: What it is compared with.
        result: Format of the result, filled with the claim's figures.
        measured_on: The machines, with the cores that each way has, and what stands for what.
    """

    claim: str
    title: str
    compared_with: str
    result: str
    measured_on: str


def legend_outside(
    figure: Figure, *, loc: Literal["outside lower center", "outside right upper"], ncols: int = 1
) -> None:
    """Place one legend for all axes at an edge of the figure.

    Args:
        figure: The figure.
        loc: Edge without the title, and without the label of several axes.
        ncols: Columns of the legend.
    """
    from upriver.report.figure import legend_entries  # not needed by children that run an older package

    entries = legend_entries(*figure.axes)
    figure.legend(list(entries.values()), list(entries), loc=loc, ncols=ncols, fontsize=8, frameon=False)


def goals_met(text: str) -> str:
    """Return how many of the goals that a report lists are met."""
    verdicts = re.findall(r"^- .*\*\*(met|missed)\*\*", text, flags=re.MULTILINE)
    return f"{verdicts.count('met')} of {len(verdicts)}"


def goal_line(goal: str, judged: Mapping[str, bool], left: Sequence[str]) -> str:
    """Return whether every setting of a goal has met it, the settings that missed it, and those not run.

    Args:
        goal: The goal in words.
        judged: Whether a setting has met it, by the setting's key.
        left: Keys of the settings that cannot be judged yet.
    """
    if not judged:
        return f"{goal}: not judged"
    missed = [key for key, met in judged.items() if not met]
    said = "**missed**" if missed else "met so far" if left else "**met**"
    return (
        f"{goal}: {said}, met in {len(judged) - len(missed)} of {len(judged)}"
        + (f"; not in {', '.join(missed)}" if missed else "")
        + (f"; not run: {', '.join(left)}" if left else "")
    )


def holds(*patterns: str) -> Count:
    """Return a function that says ``met`` if the report's words match every pattern."""

    def count(text: str) -> str:
        words = " ".join(text.split())
        return "met" if all(re.search(pattern, words) for pattern in patterns) else "missed"

    return count


def column(text: str, name: str, after: str = "") -> list[str]:
    """Return the cells of a column of the first table behind some words.

    Raises:
        ReportError: If there is no such table.
    """
    if after not in text:
        raise ReportError(f"no words {after!r}")
    rest = text[text.index(after) :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines()]
    headers = [at for at, row in enumerate(rows) if name in row]
    if not headers:
        raise ReportError(f"no column {name!r} behind {after!r}")
    body = rows[headers[0] + 2 :]
    until = next((at for at, row in enumerate(body) if row == [""]), len(body))
    return [row[rows[headers[0]].index(name)] for row in body[:until]]


def figures(name: str, after: str = "", *, of: Callable[[list[float]], float], digits: int = 2) -> Count:
    """Return a function that reduces the first number of each cell of a column, such as to its greatest."""

    def count(text: str) -> str:
        return f"{of(_numbers(column(text, name, after))):.{digits}f}"

    return count


def span(name: str, after: str = "", *, digits: int = 2) -> Count:
    """Return a function that tells the least and the greatest number of a column; ``?`` without any."""

    def count(text: str) -> str:
        numbers = _numbers(column(text, name, after))
        return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}" if numbers else "?"

    return count


def met(name: str, after: str = "") -> Count:
    """Return a function that counts the cells ``met`` of a column."""

    def count(text: str) -> str:
        cells = [cell.strip("*") for cell in column(text, name, after)]
        return f"{cells.count('met')} of {len(cells)}"

    return count


def ratios(name: str, over: str, after: str = "") -> dict[str, Count]:
    """Return functions that find the least, the median and the greatest ratio of two columns."""

    def between(of: Callable[[list[float]], float]) -> Count:
        def count(text: str) -> str:
            both = zip(_numbers(column(text, name, after)), _numbers(column(text, over, after)), strict=True)
            return f"{of([one / other for one, other in both]):.2f}"

        return count

    return {"least": between(min), "median": between(statistics.median), "most": between(max)}


def _numbers(cells: Sequence[str]) -> list[float]:
    """Return the first number of each cell that has one."""
    found = (re.search(NUMBER, cell) for cell in cells)
    return [float(number[0].replace(",", "")) for number in found if number]
