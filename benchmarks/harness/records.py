"""Keep what a benchmark makes: its report, and records by which it resumes where it stopped."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.reports import RESULTS


class Records:
    """JSON lines, one per run, written as the runs finish.

    A last line that the end of a process truncated is dropped.

    Attributes:
        rows: Records by key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        data = path.read_bytes() if path.exists() else b""
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, KeyError, TypeError):
                raise SystemExit(f"{path}, line {number}: not a record; remove the line") from None

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Store the record of a run."""
        record = {"key": key, **row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._whole)  # removes the rest of a truncated line
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._whole = file.tell()
        self.rows[key] = record


class TimeIsUp(Exception):
    """Error for a benchmark whose time limit has passed."""


class Deadline:
    """End a benchmark between two runs."""

    def __init__(self, minutes: float | None) -> None:
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def check(self) -> None:
        """Check the deadline between two runs.

        Raises:
            TimeIsUp: If no further run may begin.
        """
        if time.monotonic() >= self._until:
            raise TimeIsUp


@contextlib.contextmanager
def until_time_is_up() -> Iterator[None]:
    """End the block where a deadline has passed, and say so."""
    try:
        yield
    except TimeIsUp:
        print("time is up; the next start goes on from here", file=sys.stderr)


def command_line(description: str | None, *, resumable: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has, or every one with records."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.parent}" if spec is not None else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a small form; its figures say nothing")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where report and records lie: benchmarks/results otherwise, a temporary folder with --quick",
    )
    if resumable:
        parser.add_argument("--minutes", type=float, help="begin no further run after so many")
        parser.add_argument("--report", action="store_true", help="only write the report from what is there")
    return parser


def exit_on_faults(faults: Sequence[str]) -> None:
    """End the benchmark with exit code 1 and a line for each fault, if it found any.

    A fault is a wrong answer or a failed run. A missed goal is none.
    """
    if faults:
        sys.exit("\n".join(f"error: {fault}" for fault in faults))


@dataclass(frozen=True)
class Output:
    """The place of a benchmark's records and report.

    Attributes:
        folder: The folder.
        name: Name of the files, without their endings.
    """

    folder: Path
    name: str

    @classmethod
    def of(cls, options: argparse.Namespace, name: str, *, whole: bool = True) -> Output:
        """Return the place that the options of `command_line` name.

        Quick forms have files of their own, in a new folder if none is named.

        Args:
            options: The parsed command line.
            name: Name of the files.
            whole: Whether the report will cover all of the claim.

        Raises:
            SystemExit: If a report on a part would replace that of the claim, or a quick form has no records.
        """
        folder = options.out or RESULTS
        if options.quick and not options.out:
            if getattr(options, "report", False):
                sys.exit("error: --quick --report needs --out FOLDER, which holds the records")
            if not getattr(options, "list", False):
                folder = Path(tempfile.mkdtemp(prefix="upriver-benchmark-quick-"))
                print(f"report and records: {folder}", file=sys.stderr)
        elif not options.quick and not whole and folder.resolve() == RESULTS:
            sys.exit(
                "error: these options measure a part of the claim; name a folder for its report by --out"
            )
        return cls(folder, f"{name}_quick" if options.quick else name)

    def path(self, ending: str) -> Path:
        """Return the path of a file, whose folder exists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{self.name}{ending}"

    def records(self) -> Records:
        """Return the records."""
        return Records(self.folder / f"{self.name}.jsonl")

    def write(self, report: str) -> None:
        """Write and print the report."""
        self.path(".md").write_text(report, encoding="utf-8")
        print(report)
