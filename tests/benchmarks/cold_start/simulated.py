"""Replace the processes of `cold_start`: simulated runs, and their records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cold_start.measure import (
    Measures,
    Task,
    missing,
    tasks,
)
from benchmarks.cold_start.settings import (
    Setting,
    way_of,
)
from benchmarks.cold_start.versions import Versions
from benchmarks.harness.children import Failed
from benchmarks.harness.records import Records

SETTING = Setting(model="gpt2", repeats=3)
NBYTES = 100_000_000
PACKAGES = {"boto3": "1.2"}
VERSIONS = Versions(packages=PACKAGES)


class Simulated:
    """Jobs without a process.

    Args:
        seconds: From the end of imports, of each way; 2 where nothing is said, 3 if built as ever.
        wrong: Runs whose answers are wrong, and ``parts`` or ``after``.
        failing: Ways that cannot be run.
        unaligned: Ways whose answers are wrong where tensors keep their alignment from the transfer.
        link: Rate of the link when it is measured.
    """

    def __init__(
        self,
        *,
        seconds: dict[str, float] | None = None,
        wrong: Collection[str] = (),
        failing: Collection[str] = (),
        unaligned: Collection[str] = (),
        link: float | None = None,
    ) -> None:
        self.seconds, self.wrong = seconds or {}, wrong
        self.failing, self.unaligned, self.link = failing, unaligned, link
        self.asked: list[tuple[str, str, str, dict[str, Any]]] = []
        self.published: list[tuple[str, tuple[str, ...], set[tuple[int, int]]]] = []
        self.rates: list[float | None] = []

    def shape(self, rate: float | None) -> float | None:
        self.rates.append(rate)
        return self.link

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        self.published.append((model, tuple(forms), set(calls)))
        return {"nbytes": NBYTES, "tensors": 10}

    def ask(self, do: str, run: str, *, way: Any, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        self.asked.append((do, run, link, spec))
        if way_of(run) in self.failing:
            raise Failed(f"{run} does not start\n  at a place of this machine\nand says why")
        if do == "baseline":
            return {
                "hwm_bytes": 450_000_000,
                "rss_bytes": 400_000_000,
                "group_bytes": 300_000_000,
                "group_file": "memory.peak",
            }
        if do == "parts":
            return parts_row() | {"equal": "parts" not in self.wrong}
        if do == "after":
            seconds = {"arrived": [0.2, 0.21], "plain": [0.2, 0.2], "control": [0.2, 0.2]}
            return {"seconds": seconds, "equal": "after" not in self.wrong, "kind": "Model"}
        took = self.seconds.get(run, self.seconds.get(way_of(run), 2.0) + (run != way_of(run)))
        took += 1 / spec["knob"] - 0.1 * spec["assign"]
        return {
            "hwm_bytes": 505_000_000,
            "group_bytes": 500_000_000,
            "group_file": "memory.peak",
            "after_imports_s": took,
            "total_s": took + 4.0,
            "imported_s": 4.0,
            "cpu_s": 3.0,
            "equal": run not in self.wrong and not (spec["assign"] and way_of(run) in self.unaligned),
        }


def parts_row(**changed: Any) -> dict[str, Any]:
    row = {
        "first_byte_s": 0.01,
        "download_s": 0.5,
        "load_s": 0.1,
        "execute_s": 0.4,
        "last_execute_s": 0.05,
        "needed_bytes": NBYTES,
        "object_bytes": NBYTES,
        "first_bytes": NBYTES // 100,
        "last_bytes": NBYTES // 50,
        "call_bytes": 10_000_000,
        "equal": True,
    }
    return row | changed


def measured(
    folder: Path, setting: Setting = SETTING, *, keys: Collection[str] | None = None, **options: Any
) -> tuple[Records, Simulated]:
    """Return the records of a setting, or those under some keys, from simulated runs."""
    records, jobs = Records(folder / "records.jsonl"), Simulated(**options)
    made(jobs, records, setting, keys)
    return records, jobs


def made(
    jobs: Simulated, records: Records, setting: Setting = SETTING, keys: Collection[str] | None = None
) -> None:
    """Run what is missing, or the runs under some keys."""
    measures = Measures(jobs, records, [setting], VERSIONS, lambda _: None)
    for task in missing(setting, records, VERSIONS) if keys is None else tasks_of(setting, keys):
        measures.make(task)


def tasks_of(setting: Setting, keys: Collection[str]) -> list[Task]:
    every = {task.key: task for number in range(setting.repeats) for task in tasks(setting, number)}
    return [every[key] for key in keys]


def keys_of(setting: Setting, records: Records) -> list[str]:
    return [task.key for task in missing(setting, records, VERSIONS)]
