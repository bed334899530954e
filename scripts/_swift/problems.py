"""Define the errors of Swift, each as one line for people."""

from __future__ import annotations

from pathlib import Path

LOG_LINES = 15
"""Lines of a process's log that follow the message of its end."""


class Problem(Exception):
    """Error that ends the command with 1.

    Attributes:
        exit_code: Exit code of the command.
    """

    exit_code = 1


class CannotRun(Problem):
    """Error for a missing requirement of the machine or user.

    The command ends with 3, and tests are skipped.
    """

    exit_code = 3


def last_lines(log: Path) -> str:
    """Return the end of a log, to follow a message, or an empty text without a log."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    except OSError:
        return ""
    return f"; {log} ends with:\n" + "\n".join(lines) if lines else f"; {log} is empty"
