"""Run the two hosts of `kept_features`, with cold caches and a fresh training process for every job."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.children import Failed, ProcessLost
from benchmarks.harness.code_version import code, commit
from benchmarks.harness.photographs import write_photographs
from benchmarks.harness.slowed import cpu_s
from benchmarks.harness.testbed import Testbed
from benchmarks.harness.training.places import Place, Places
from benchmarks.harness.training.rig import CACHE
from benchmarks.kept_features.settings import (
    AUTO,
    FILE,
    LOADER,
    MEASURED,
    MEMORY,
    NONE,
    SWEPT,
    SWEPT_EPOCHS,
    Setting,
)

RUN_LIMIT_S = 1800.0

FEATURES = "features"
"""Folder of kept features within the caches, by hand as by upriver."""


class Rig:
    """Run the two hosts of a setting. Each run has its own store and caches, and a server if it needs one.

    Args:
        setting: The setting to measure.

    Attributes:
        facts: Provenance that every record carries.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.facts = {"commit": commit(), "code": code()}

    def __enter__(self) -> Rig:
        rate = None if self.setting.mbit is None else self.setting.mbit * 1e6 / 8
        data = stored_photographs(self.setting.samples)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE))
            self._bed = stack.enter_context(Testbed(rate))
            self._places = Places(self._bed, data, Path(folder), threads=1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def run(self, label: str, *, ends: int, swept: bool = False) -> dict[str, Any]:
        """Run a way once with cold caches, and return what its jobs answered, together.

        Args:
            label: Label of the way.
            ends: Epochs of the job, or number of jobs where there are several.
            swept: Whether the run only searches for the best form, on samples in another order.

        Raises:
            Failed: If the run fails.
        """
        one = swept or self.setting.jobs == 1
        try:
            with ExitStack() as stack:
                place = self._places.make(stack, with_server=label in (NONE, AUTO))
                specs = [self._spec(label, job, ends=ends, swept=swept) for job in range(1 if one else ends)]
                done = [self._job(place, spec, label) for spec in specs]
                files = [path for path in (place.cache / FEATURES).rglob("*") if path.is_file()]
                kept = sum(path.stat().st_size for path in files)
        except ProcessLost as error:
            raise Failed(str(error)) from None  # the next run has a process of its own
        return {
            **together(done),
            "ends_s": done[0]["ends_s"] if one else after_each(done),
            "kept_bytes": kept,
        }

    def _spec(self, label: str, job: int, *, ends: int, swept: bool) -> dict[str, Any]:
        setting = self.setting
        epochs = ends if setting.jobs == 1 else setting.epochs
        return {
            "network": setting.network,
            "views": None if swept else setting.views,
            "batch_size": setting.batch_size,
            "epochs": SWEPT_EPOCHS if swept else epochs,
            "seed": SWEPT if swept else MEASURED,
            "job": job,
            "workers": int(label.partition(" ")[2] or 0),
        }

    def _job(self, place: Place, spec: Mapping[str, Any], label: str) -> dict[str, Any]:
        """Run a job, and return its answer with the bytes that it moved and the core seconds that it took."""
        with ExitStack() as stack:
            child = self._places.start("kept_features.job", spec, place, stack)
            sides = {"storage": place.pids, "compute": [child.process.pid]}
            before, spent = self._bed.bytes_carried(), _cpu_s(sides)
            done = child.ask(RUN_LIMIT_S, order_of(label, place.cache / FEATURES))
            carried, spent_now = self._bed.bytes_carried() - before, _cpu_s(sides)
        return {
            **done,
            "cpu_s": {side: spent_now[side] - spent[side] for side in sides},
            "link_bytes": {"from_storage": carried.from_storage, "from_compute": carried.from_compute},
        }


def order_of(label: str, features: Path) -> dict[str, Any]:
    """Return what a training process is asked to do."""
    form = label.split()[0]
    if form == LOADER:
        return {"do": "plain"}
    if form in (MEMORY, FILE):
        return {"do": "by_hand", "form": form, "folder": str(features)}
    return {"do": "near", "keep": None if form == NONE else AUTO}


def together(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answers of jobs that ran one after the other as that of one run."""
    return {
        **done[-1],
        "seconds": sum(each["seconds"] for each in done),
        "losses": [loss for each in done for loss in each["losses"]],
        "peak_bytes": _by_name(done, "peak_bytes", max),
        "cpu_s": _by_name(done, "cpu_s", sum),
        "link_bytes": _by_name(done, "link_bytes", sum),
        **({"from": _by_name(done, "from", sum)} if "from" in done[0] else {}),
    }


def after_each(done: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds at the end of each of some jobs, starts and imports between them aside."""
    return [sum(each["seconds"] for each in done[: number + 1]) for number in range(len(done))]


def _by_name(done: Sequence[Mapping[str, Any]], field: str, of: Any) -> dict[str, float]:
    names = dict.fromkeys(name for each in done for name in each[field])
    return {name: of(each[field].get(name, 0) for each in done) for name in names}


def _cpu_s(sides: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {side: sum(map(cpu_s, pids)) for side, pids in sides.items()}


def stored_photographs(samples: int) -> Path:
    """Return a folder with that many stored photographs. It is made once, and stays."""
    folder = CACHE / f"photographs-{samples}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            write_photographs(Path(made) / "data", samples)
            (Path(made) / "data").rename(folder)
    return folder
