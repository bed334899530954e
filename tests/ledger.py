"""Measure the cost of each test: run ``pytest --ledger FILE``, then read the file from its top.

Each test has a line with tabs between its fields: seconds, processor seconds of the test's own process, those
of the processes below it, and the number of new ones. The test that first needs a fixture carries its cost:
the first test of a file starts the server that the file shares.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

LOOK_S = 0.1
"""Seconds between two looks at the processes below this one. Their last moments are not counted."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

COSTLIEST = 10
"""Number of files listed at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a test, or a sum of costs."""

    seconds: float = 0.0
    own_s: float = 0.0
    below_s: float = 0.0
    processes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            seconds=self.seconds + other.seconds,
            own_s=self.own_s + other.own_s,
            below_s=self.below_s + other.below_s,
            processes=self.processes + other.processes,
        )

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            seconds=self.seconds - other.seconds,
            own_s=self.own_s - other.own_s,
            below_s=self.below_s - other.below_s,
            processes=self.processes - other.processes,
        )

    @property
    def processor_s(self) -> float:
        return self.own_s + self.below_s


class Meter:
    """Read the costs so far of this process and those below it."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}  # by process, including ended ones
        threading.Thread(target=self._watch, name="ledger", daemon=True).start()

    def read(self) -> Cost:
        self._look()
        return Cost(
            seconds=time.monotonic(),
            own_s=time.process_time(),
            below_s=sum(self._taken.values()),
            processes=len(self._taken),
        )

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(LOOK_S):  # tests count the callers of time.sleep
            self._look()

    def _look(self) -> None:
        """Ask the kernel: no process here waits for one that is killed with its parent."""
        waiting = _children(os.getpid())
        while waiting:
            pid = waiting.pop()
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self._taken[pid] = (
                    int(fields[11]) + int(fields[12])
                ) / TICKS_PER_S  # in user mode, in the kernel
            waiting += _children(pid)


def _children(pid: int) -> list[int]:
    """Return the processes that this one's threads started; none when it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


class Ledger:
    """Measure where tests run, and write where they are reported: with xdist these are two processes."""

    def __init__(self, path: Path, *, runs_tests: bool, reports: bool) -> None:
        self._path = path
        self._reports = reports
        self._meter = Meter() if runs_tests else None
        self._before = self._meter.read() if self._meter else Cost()
        self._tests: defaultdict[str, Cost] = defaultdict(Cost)

    def pytest_collection_finish(self) -> None:
        """Count from here on: imports, and the processes that they started, belong to no test."""
        if self._meter:
            self._before = self._meter.read()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Write on each part's report the cost since the last: a test has three."""
        report = yield
        if self._meter:
            now = self._meter.read()
            cost, self._before = now - self._before, now
            report.cost = [cost.seconds, cost.own_s, cost.below_s, cost.processes]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the reported costs."""
        if self._reports and hasattr(report, "cost"):
            seconds, own_s, below_s, processes = report.cost
            self._tests[report.nodeid] += Cost(
                seconds=seconds, own_s=own_s, below_s=below_s, processes=processes
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the file, and list the most costly test files."""
        if not self._reports:
            return
        self._path.write_text("seconds\town_s\tbelow_s\tprocesses\ttest\n" + _lines(self._tests))
        files: defaultdict[str, Cost] = defaultdict(Cost)
        for test, cost in self._tests.items():
            files[test.partition("::")[0]] += cost
        total = sum(files.values(), Cost())
        terminalreporter.section(
            f"{self._path}: {total.processor_s:.0f} s of processor time, {total.processes} processes"
        )
        for name, cost in _sorted(files)[:COSTLIEST]:
            terminalreporter.line(
                f"{cost.processor_s:6.1f} s of processor time, {cost.seconds:6.1f} s, "
                f"{cost.processes:4} processes  {name}"
            )


def _sorted(costs: dict[str, Cost]) -> list[tuple[str, Cost]]:
    """Sort costs, highest first."""
    return sorted(costs.items(), key=lambda item: item[1].processor_s, reverse=True)


def _lines(tests: dict[str, Cost]) -> str:
    return "".join(
        f"{cost.seconds:.2f}\t{cost.own_s:.2f}\t{cost.below_s:.2f}\t{cost.processes}\t{test}\n"
        for test, cost in _sorted(tests)
    )
