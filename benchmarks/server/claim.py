"""Define a claim about a near-data server: its runs, their records and the verdict."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.harness.code_version import code, commit
from benchmarks.harness.measuring import Spread
from benchmarks.harness.memory_group import MemoryGroup
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.reports import table
from benchmarks.server.host import Generator, Server, Settings
from benchmarks.server.load import OK, Asked, Question
from benchmarks.server.networks import SIDE
from benchmarks.server.world import World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
"""The record of one run."""

Questions = Mapping[str, Question]
"""Questions by name, as streams request them."""

PIXELS = 4 << 20
"""Most pixels of a stored image for these servers, which keep 6 bytes for each in every worker to decode:
twenty of the photographs used."""

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Verdict on a goal, with the figures that show it; None without data to judge by."""

    met: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "Met", False: "Missed", None: "Not judged"}[self.met]
        return f"{word}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """A claim. Its fields are the settings of its runs.

    A run is one repeat of a cell. Cells take turns, so that other load on the machine affects all alike.

    Attributes:
        repeats: Repeats of every cell.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    says: ClassVar[str]

    repeats: int

    @property
    @abstractmethod
    def cells(self) -> tuple[str, ...]:
        """Return the compared cells."""

    @abstractmethod
    def measure(self, bench: Bench) -> None:
        """Make the missing runs.

        Raises:
            TimeIsUp: If the deadline passes first.
            Failed: If a run cannot be made.
        """

    @abstractmethod
    def verdict(self, rows: Rows) -> Verdict:
        """Judge the goal by the existing runs. Each cell has at least one."""

    @abstractmethod
    def tables(self, rows: Rows) -> str:
        """Return all figures as tables."""

    @abstractmethod
    def draw(self, rows: Rows, figure: Figure) -> None:
        """Draw the figures as a plot."""

    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Return how the claim was measured, and what it does not show."""

    @property
    def settings(self) -> str:
        """Return a key that tells runs of these settings from others."""
        text = json.dumps({"claim": self.name, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Rows:
    """The runs of a claim that count: those with its settings, by the code of the latest of them.

    Args:
        code: Code version of the runs. None selects that of the latest run.
    """

    def __init__(self, claim: Claim, records: Records, *, code: str | None = None) -> None:
        self._claim = claim
        mine = [
            row
            for row in records.rows.values()
            if row["claim"] == claim.name and row["settings"] == claim.settings
        ]
        latest = max(mine, key=lambda row: row["at"], default=None)
        wanted = code if code is not None else latest["code"] if latest is not None else ""
        self.rows = [row for row in mine if row["code"] == wanted]
        self._found = {(row["cell"], row["repeat"]): row for row in self.rows}

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Return the missing runs, in the order in which they are to be made."""
        return [
            (cell, repeat)
            for repeat in range(self._claim.repeats)
            for cell in self._claim.cells
            if (cell, repeat) not in self._found
        ]

    @property
    def complete(self) -> bool:
        """Return whether every cell has at least one run."""
        return all(self.of(cell) for cell in self._claim.cells)

    @property
    def state(self) -> str:
        """Return how many runs exist, or an empty text where nothing is missing."""
        count = self._claim.repeats * len(self._claim.cells)
        return f"{count - len(self.missing)} of {count} runs made" if self.missing else ""

    def of(self, cell: str) -> list[Row]:
        """Return the runs of a cell, in the order of their repeats."""
        return [
            self._found[cell, repeat]
            for repeat in range(self._claim.repeats)
            if (cell, repeat) in self._found
        ]

    def values(self, cell: str, name: str) -> list[Any]:
        """Return one figure of the cell's runs. Runs without it are left out."""
        return [row[name] for row in self.of(cell) if row.get(name) is not None]

    def spread(self, cell: str, name: str, *, scale: float = 1.0) -> Spread:
        """Return the figure's repeats as a spread, divided by ``scale``."""
        return Spread.of(value / scale for value in self.values(cell, name))

    def text(self, cell: str, name: str, *, scale: float = 1.0, digits: int = 2) -> str:
        """Return the figure's spread as text for a table cell."""
        spread = self.spread(cell, name, scale=scale)
        return spread.text(digits) if spread.values else "-"

    def sum(self, name: str) -> int:
        """Return the sum of a count over all runs."""
        return sum(row.get(name, 0) for row in self.rows)

    def ratios(self, cell: str, other: str, name: str) -> Spread:
        """Return one cell's figure over another's of the same repeat."""
        pairs = (
            (self._found.get((cell, n)), self._found.get((other, n))) for n in range(self._claim.repeats)
        )
        return Spread.of(
            one[name] / two[name]
            for one, two in pairs
            if one is not None and two is not None and one.get(name) is not None and two.get(name)
        )


class Bench:
    """Hold what all claims share: a folder, one process that makes load, and the records.

    Args:
        records: The records of the runs.
        deadline: Time after which no further run may begin.
        folder: For temporary files.
        samples: Photographs in the store.
        side: Width and height of the networks' input, in pixels.
    """

    def __init__(
        self, records: Records, deadline: Deadline, folder: Path, *, samples: int, side: int = SIDE
    ) -> None:
        self.records, self.folder = records, folder
        self._deadline, self._samples, self._side = deadline, samples, side
        self._facts = {"commit": commit(), "code": code()}
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @cached_property
    def world(self) -> World:
        """Return the stored photographs and networks."""
        folder = self.folder / "store"
        folder.mkdir()
        return World(folder, self._samples, side=self._side)

    @cached_property
    def generator(self) -> Generator:
        """Return the process that puts load on servers."""
        return self._stack.enter_context(Generator())

    def server(
        self,
        settings: Settings,
        tenants: Mapping[str, Settings] | Iterable[str],
        *,
        group: MemoryGroup | None = None,
    ) -> Server:
        """Return a server that is not started yet. Tenants may be names alone."""
        named = tenants if isinstance(tenants, Mapping) else {name: {} for name in tenants}
        capped = {"caps": {"pixels": PIXELS}, **settings}
        return Server(self.world.uri, self.folder, capped, tenants=named, group=group)

    def missing(self, claim: Claim) -> list[tuple[str, int]]:
        """Return the runs by the current code that were not made yet."""
        return Rows(claim, self.records, code=self._facts["code"]).missing

    def todo(
        self, claim: Claim, wanted: Callable[[str], bool] = lambda cell: True
    ) -> Iterator[tuple[str, int]]:
        """Yield the cells and repeats of the missing runs.

        Raises:
            TimeIsUp: If the deadline passes first.
        """
        for cell, repeat in self.missing(claim):
            if wanted(cell):
                self._deadline.check()
                yield cell, repeat

    def add(self, claim: Claim, cell: str, repeat: int, row: Row) -> None:
        """Store the record of a run."""
        key = f"{claim.name}|{claim.settings}|{cell}|{repeat}"
        about = {"claim": claim.name, "settings": claim.settings, "cell": cell, "repeat": repeat}
        self.records.add(key, {**about, **self._facts, "at": time.time(), **row})
        seconds = f": {row['seconds']:.1f} s" if "seconds" in row else ""
        print(f"{claim.name}, {cell}, repeat {repeat + 1}{seconds}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- figures


def outcomes(asked: Iterable[Asked]) -> dict[str, Any]:
    """Return how requests ended, for a record: the number of right answers and of each other outcome."""
    requests = list(asked)
    counts = Counter(each.outcome for each in requests)
    others = {outcome: count for outcome, count in counts.items() if outcome != OK}
    why = next((each.why for each in requests if each.outcome != OK and each.why), "")
    return {
        "asked": len(requests),
        "right": counts[OK],
        "others": others,
        "why": why[:300],
        "refused": sum(max(0, each.tries - 1) for each in requests),
    }


def span_s(asked: Iterable[Asked]) -> float:
    """Return the seconds from the first question to the last answer."""
    requests = list(asked)
    return max(each.done_s for each in requests) - min(each.asked_s for each in requests)


def latencies(asked: Iterable[Asked]) -> list[float]:
    """Return the latencies of answered requests, in seconds."""
    return [round(each.done_s - each.asked_s, 4) for each in asked if each.outcome == OK]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def all_right(rows: Rows) -> bool:
    """Return whether every request of every run was answered correctly."""
    return rows.sum("asked") > 0 and rows.sum("right") == rows.sum("asked")


def wrong_text(rows: Rows) -> str:
    """Return the number of requests without a right answer, in words."""
    asked, right = rows.sum("asked"), rows.sum("right")
    if asked == right:
        return f"all {asked} requests answered, each rightly"
    counts: Counter[str] = Counter()
    for row in rows.rows:
        counts.update(row.get("others", {}))
    named = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{right} of {asked} requests answered rightly ({named})"


def mib(nbytes: float) -> str:
    """Format bytes for a table cell."""
    return f"{nbytes / MIB:.0f}"


def table_of(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown, followed by an empty line."""
    return table(header, lines) + "\n"
