"""Show on stderr what long work does: in a bar on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

LINES = 10
"""Lines in all that counted work prints where there is no terminal."""


def note(message: str) -> None:
    """Print a message on stderr, apart from the result.

    If stderr cannot be written, as a log on a full disk or a closed one, the work goes on.
    """
    if sys.stderr is None:  # `print` would take stdout
        return
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def progress_bar(*, of_bytes: bool = False, counts: bool = True) -> Progress:
    """Return a transient progress bar on stderr; it shows nothing if stderr is no terminal.

    Args:
        of_bytes: Whether the steps are bytes.
        counts: Whether the number of steps is known; if so, the bar shows it and the time left.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    counted: list[ProgressColumn] = []
    if counts:
        counted = [DownloadColumn() if of_bytes else MofNCompleteColumn(), TimeRemainingColumn()]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counted,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # stdout is the caller's, also while a library call shows this bar
        disable=not (console.is_terminal and _is_terminal(sys.stderr)),  # FORCE_COLOR makes no terminal
    )


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


@contextlib.contextmanager
def named_steps() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the name of each step, of which nobody knows the number."""
    with progress_bar(counts=False) as bar:
        if bar.disable:
            yield note
            return
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text, refresh=True)  # each is seen, however short


@contextlib.contextmanager
def counted_steps(what: str) -> Iterator[Callable[[str, float, float], None]]:
    """Yield a function of the present step's name, the finished steps and all steps.

    Args:
        what: Description until the first step is finished.
    """
    with progress_bar() as bar:
        if bar.disable:
            yield _Lines()
            return
        task = bar.add_task(what, total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)


class _Lines:
    """Print a line at each tenth of the work, with the time left at the present rate."""

    def __init__(self) -> None:
        self._began_s, self._printed = time.monotonic(), 0

    def __call__(self, step: str, done: float, total: float) -> None:
        tenths = int(LINES * done / total)
        if tenths <= self._printed:
            return
        self._printed = tenths
        left_s = (time.monotonic() - self._began_s) * (total - done) / done
        note(f"{step}: {100 * done / total:.0f} %, about {left_s:.0f} s left")
