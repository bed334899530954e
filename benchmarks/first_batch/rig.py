"""Run the two hosts of `first_batch`, with a fresh training process for every run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.first_batch.networks import make_data
from benchmarks.first_batch.settings import (
    COLD,
    DEFAULT,
    LIMIT_S,
    LOADER,
    LOADER_STEPS,
    SWEPT_EPOCHS,
    UNSPLIT,
    WARM,
    Setting,
)
from benchmarks.harness.children import Child, Failed, ProcessLost
from benchmarks.harness.code_version import code, commit
from benchmarks.harness.memory_group import Watch
from benchmarks.harness.testbed import Testbed
from benchmarks.harness.training.places import Place, Places

RUN_LIMIT_S = 900.0

LOOK_S = 0.25
"""Seconds between two looks at the memory. A look takes some milliseconds of a core."""


class Rig:
    """Run the two hosts of a setting.

    A run with cold caches has a server that has just started, and a store that holds the samples alone. All
    others share a server, a store and caches, which an earlier job has filled before the first warm run.

    Args:
        setting: The setting to measure.
        folder: An empty folder.

    Attributes:
        facts: Provenance that every record carries.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self._folder = setting, folder
        self.facts = {"setting": setting.key, "commit": commit(), "code": code()}
        self._kept: Place | None = None
        self._filled = False

    def __enter__(self) -> Rig:
        setting = self.setting
        with ExitStack() as stack:
            make_data(setting.network, setting.samples, self._folder)
            rate = None if setting.mbit is None else setting.mbit * 1e6 / 8
            bed = stack.enter_context(Testbed(rate))
            self._places = Places(
                bed,
                self._folder / "data",
                self._folder,
                threads=setting.cores,
                cores=sorted(os.sched_getaffinity(0))[:2] if setting.cores == 2 else None,
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def run(self, label: str, *, swept: bool = False) -> dict[str, Any]:
        """Run a way once, and return the training process's answer, with its peak memory where it counts.

        Args:
            label: Label of the way.
            swept: Whether the loop only searches for its best number of workers.

        Raises:
            Failed: If the run fails.
        """
        try:
            with ExitStack() as stack:
                cold = label.endswith(COLD)
                place = self._places.make(stack) if cold else self._shared(filled=label.endswith(WARM))
                child = self._begun(place, stack)
                with self._watched(child.process.pid) as watch:
                    done = child.ask(RUN_LIMIT_S, order_of(self.setting, label, swept=swept))
                if watch is not None:
                    peaks = watch.peaks
                    done["pss"] = {"training": peaks["front"], "preparing": peaks["workers"]}
                return done
        except ProcessLost as error:
            raise Failed(str(error)) from None  # the next run has a process of its own

    def _watched(self, pid: int) -> AbstractContextManager[Watch | None]:
        """Watch the memory of a process where seconds of a whole job are not compared."""
        return Watch(pid, every_s=LOOK_S) if self.setting.epochs is None else nullcontext()

    def _shared(self, *, filled: bool) -> Place:
        """Return the place that runs share, after an earlier job if it must be filled."""
        if self._kept is None:
            self._kept = self._places.make(self._stack)
        if filled and not self._filled:
            with ExitStack() as stack:
                self._begun(self._kept, stack).ask(RUN_LIMIT_S, {"do": "fill"})
            self._filled = True
        return self._kept

    def _begun(self, place: Place, stack: ExitStack) -> Child:
        """Start a process that trains, and wait until it is ready. It ends with the stack."""
        spec = {"network": self.setting.network, "batch_size": self.setting.batch_size}
        return self._places.start("first_batch.job", spec, place, stack)


def order_of(setting: Setting, label: str, *, swept: bool) -> dict[str, Any]:
    """Return what the training process is asked to do."""
    way, _, detail = label.partition(" ")
    if way == LOADER:
        order = {"do": "loader", "workers": int(detail)}
        if setting.epochs is None:
            return order | {"epochs": 1, "steps": LOADER_STEPS}
        return order | {
            "epochs": min(SWEPT_EPOCHS, setting.epochs) if swept else setting.epochs,
            "steps": None,
        }
    return {
        "do": "finetune",
        "epochs": setting.epochs,
        "limit_s": LIMIT_S,
        "in_background": (True if setting.forced else None) if way == DEFAULT else False,
        "policy": "nosplit" if way == UNSPLIT else "freeze" if setting.forced else None,
        "waits": setting.forced,
    }
