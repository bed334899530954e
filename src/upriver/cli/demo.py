"""``upriver demo``: run the main job on real photographs, without upriver and near the data."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID

from upriver.cli.common import DebugOption, JsonOption, emit
from upriver.cli.options import WeightsOption
from upriver.cli.output import check_picture, write_picture
from upriver.errors import ConfigError
from upriver.extras import DEMO, why_missing
from upriver.progress import progress_bar

if TYPE_CHECKING:
    from upriver.demo.result import DemoResult


def demo(
    epochs: Annotated[int, typer.Option(help="Epochs of each way.")] = 3,
    images: Annotated[int, typer.Option(help="Training images.")] = 224,
    heldout: Annotated[int, typer.Option(help="Held-out images.")] = 60,
    batch_size: Annotated[int, typer.Option(help="Samples of a training step.")] = 32,
    link_mbit: Annotated[float, typer.Option(help="Rate of the emulated link, in Mbit/s.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Decides weights, order and augmentation.")] = 0,
    weights: WeightsOption = None,
    plot: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("upriver-demo.png"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fine-tune over a thin link, the plain way and near the data, and compare."""
    why = why_missing("upriver demo", "demo", *DEMO)
    if why:
        raise ConfigError(why)
    check_picture(plot)
    from upriver.demo.run import picture, run_demo
    from upriver.demo.settings import DemoSettings

    settings = DemoSettings(
        epochs=epochs,
        images=images,
        heldout=heldout,
        batch_size=batch_size,
        link_mbit=link_mbit,
        seed=seed,
        weights=weights,
    )
    with progress_bar() as bar:
        result = run_demo(settings, BarWatcher(bar))
    write_picture(plot, picture(result))
    result = replace(result, plot=str(plot))
    emit(result.to_json(), as_json=as_json, text=lambda: _print(result))


class BarWatcher:
    """Show the demo's progress on stderr: lines, and one bar for the present work."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._what = ""

    def say(self, text: str) -> None:
        """Print a line above the bar.

        If stderr cannot be written, as a log on a full disk, the work goes on.
        """
        with contextlib.suppress(OSError):
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, what: str, done: int, total: int) -> None:
        """Move the bar; new work gets a new bar."""
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task, self._what = self._bar.add_task(what, total=total), what
        self._bar.update(self._task, completed=done, total=total)


def _print(result: DemoResult) -> None:
    print(f"\n{result.table()}\n")
    print(f"Why this cut:\n{result.near_data.plan}\n")
    print(result.verdict())
    if result.plot is not None:
        print(f"Picture: {result.plot}")
