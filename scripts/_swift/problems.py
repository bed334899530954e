"""What can go wrong, each as one line for people."""

from __future__ import annotations

from pathlib import Path

LOG_LINES = 15
"""Of a process's log, to follow the line that says it ended."""


class Problem(Exception):
    """Something did not work; ends the command with 1.

    Attributes:
        exit_code: What the command ends with.
    """

    exit_code = 1


class CannotRun(Problem):
    """This machine or user lacks what a Swift needs; ends the command with 3, and tests are skipped."""

    exit_code = 3


def last_lines(log: Path) -> str:
    """The end of a log, to follow a message; empty where there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    except OSError:
        return ""
    return f"; {log} ends with:\n" + "\n".join(lines) if lines else f"; {log} is empty"
