"""Keep the records of a benchmark that can be ended at any moment and resumes where it stopped."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
