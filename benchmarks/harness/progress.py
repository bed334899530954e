"""Show how far a benchmark is, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Show bars during the block."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as progress:
        yield progress


class Bar:
    """One line of the progress.

    Args:
        progress: The display.
        total: Number of parts to come.
        name: Begins each description.
    """

    def __init__(self, progress: Progress, total: int, name: str = "") -> None:
        self._progress, self._name = progress, name
        self._task: TaskID = progress.add_task(name, total=total)

    def say(self, text: str) -> None:
        """Show the current activity."""
        self._progress.update(self._task, description=self._described(text))

    def begin(self, text: str) -> None:
        """Show that a part begins."""
        self._progress.update(self._task, description=self._described(text), advance=1)

    def log(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, highlight=False)

    def done(self) -> None:
        """Show that all parts are finished."""
        self._progress.update(self._task, description=self._name, total=1, completed=1)

    def _described(self, text: str) -> str:
        return f"{self._name}: {text}" if self._name else text
