"""Measure one setting of `input_pipeline`: the wait, each policy's beginning, then epochs in turns.

A row holds the epochs as `job` reported them, without fields that only the comparison needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.input_pipeline.bed import Job, Setting
from benchmarks.input_pipeline.job import AGAIN, HERE, POLICIES
from benchmarks.input_pipeline.pace import Pace

HEADROOM = 1.5
"""Time of the accelerator's step over a batch's local cost, where nothing must stall."""

PROCESSES = (0, 1, 2)
"""Numbers of processes of PyTorch's loader, of which the best counts."""

SWEPT = 1000
"""Number of the epoch that compares them, which is none of the counted ones."""

SKIPPED = 3
"""Steps at the start of an epoch that do not show a batch's cost, because no batch is prefetched yet."""

SWEEPS, NEAR, NEAREST = 5, 1.25, 4
"""Repeats of each ratio this near to the best one, and the most ratios that are repeated."""

CANDIDATES = ("p1", "p2", "p3")
OTHERWISE = "p2"
"""The candidate whose ratios are swept where upriver offloads nothing."""

HOPELESS = 2.0
"""A way that takes this multiple of the best time is not repeated. The sweep of a candidate ends after two
ratios that take this multiple of its own best time."""

Tick = Callable[[str], None]
Told = dict[str, Any]


class Epochs:
    """Make a job train, and keep the results.

    Attributes:
        rows: Of each way, its epochs in order.
    """

    def __init__(self, job: Job, pace: Pace, tick: Tick) -> None:
        self._job, self._pace, self._tick = job, pace, tick
        self.wait_s, self.num_workers = 0.0, 1
        self.rows: dict[str, list[Told]] = {}

    def run(self, way: str, number: int, *, keep: bool = True) -> Told:
        """Run one more epoch, and measure the machine's slowness before and after it."""
        self._tick(way)
        self._job.open(way, num_workers=self.num_workers)
        before = self._pace()
        told = self._job.epoch(way, number=number, wait_s=self.wait_s)
        told["slow"] = [round(before, 3), round(self._pace(), 3)]
        told |= {"number": number, "batches": len(told["steps_s"])}
        if keep:
            self.rows.setdefault(way, []).append(told)
        return told

    def in_one_pass(self, way: str) -> Told:
        """Run several epochs without an end between them, as peers do."""
        self._tick(way)
        return self._job.one_pass(way, num_workers=self.num_workers, wait_s=self.wait_s)

    def close(self, way: str) -> None:
        """Close the resources of a way."""
        self._job.close(way)

    def first_s(self, way: str) -> float:
        """Return the seconds of a way's first recorded epoch."""
        return float(self.rows[way][0]["seconds"])

    @property
    def best_s(self) -> float:
        """Return the seconds of the shortest epoch of all."""
        return min(map(self.first_s, self.rows))


def measure(job: Job, setting: Setting, pace: Pace, tick: Tick) -> Told:
    """Measure everything of a setting except the peers."""
    epochs = Epochs(job, pace, tick)
    found = calibrate(epochs, setting)
    labels = [f"torch {found['processes']}", HERE, "remote", "greedy"]
    learned = {way: learn(epochs, way, setting) for way in POLICIES}
    again = learn(epochs, POLICIES[-1] + AGAIN, setting)
    epochs.close(POLICIES[-1] + AGAIN)
    turns(epochs, [*labels, *POLICIES], setting.repeats)
    candidate = learned[POLICIES[-1]][-1]["candidate"] or OTHERWISE
    for each in CANDIDATES if setting.disk_mbit is not None else (candidate,):
        sweep(epochs, each, setting.ratios, repeats=min(SWEEPS, setting.repeats))
    passed = epochs.in_one_pass(POLICIES[-1]) if setting.peers else None
    told = {way: rows for way, rows in epochs.rows.items()}
    return {
        **found,
        "candidate": candidate,
        "passed": passed,
        "unequal": unequal(
            {**told, **{f"{way}, first epochs": rows for way, rows in learned.items()}}, again
        ),
        "learned": {way: [short(row, steps=True) for row in rows] for way, rows in learned.items()},
        "again": [short(row, steps=True) for row in again],
        "epochs": {way: [short(row) for row in rows] for way, rows in told.items()},
    }


def calibrate(epochs: Epochs, setting: Setting) -> Told:
    """Find the accelerator's time that makes the setting's stall, and PyTorch's best number of processes.

    With everything on one core and no waits, a step is the cost of a batch and of the model. The stall is the
    rest of the batch's cost next to the model and the accelerator.
    """
    alone = epochs.run("torch 1", SWEPT, keep=False)
    step_s = statistics.fmean(alone["steps_s"][SKIPPED:] or alone["steps_s"])
    model_s = alone["alone_s"] / alone["batches"]
    busy_s = step_s * (1 - setting.stall if setting.stall else HEADROOM)
    epochs.wait_s = max(0.0, busy_s - model_s)
    tried = {number: epochs.run(f"torch {number}", SWEPT, keep=False)["seconds"] for number in PROCESSES}
    best = min(tried, key=lambda number: tried[number])
    for number in set(PROCESSES) - {best}:
        epochs.close(f"torch {number}")
    epochs.num_workers = best or fewest(epochs)
    return {
        "step_s": step_s,
        "model_s": model_s,
        "wait_s": epochs.wait_s,
        "processes": best,
        "num_workers": epochs.num_workers,
        "tried_s": {str(number): seconds for number, seconds in tried.items()},
    }


def fewest(epochs: Epochs) -> int:
    """Return the best number of loader processes of upriver where PyTorch's is 0: 0 or 1.

    Each number is judged by the shorter of two ways, because the offloading is not decided yet.
    """
    tried: dict[int, float] = {}
    for epochs.num_workers in (0, 1):
        tried[epochs.num_workers] = min(
            epochs.run(way, SWEPT, keep=False)["seconds"] for way in (HERE, "greedy")
        )
        for way in (HERE, "greedy"):
            epochs.close(way)
    return min(tried, key=lambda number: tried[number])


def learn(epochs: Epochs, way: str, setting: Setting) -> list[Told]:
    """Run a policy's epochs until it has decided."""
    found: list[Told] = []
    while len(found) < setting.most_learning and not (found and found[-1]["decided"]):
        found.append(epochs.run(way, len(found) % setting.repeats, keep=False))
    return found


def turns(epochs: Epochs, ways: Sequence[str], repeats: int) -> None:
    """Run an epoch of each way in turn: all ways in the first round, then those that are not hopeless."""
    for number in range(repeats):
        for way in ways:
            if number == 0 or way == HERE or epochs.first_s(way) <= HOPELESS * epochs.best_s:
                epochs.run(way, number)


def sweep(epochs: Epochs, candidate: str, ratios: Sequence[float], *, repeats: int) -> None:
    """Run a candidate from the smallest ratio until far beyond its best, then repeat the near ones."""
    ways, best_s, hopeless = list[str](), epochs.first_s(HERE), 0
    for ratio in ratios:
        ways.append(f"{candidate} {ratio:g}")
        epochs.run(ways[-1], 0)
        seconds = epochs.first_s(ways[-1])
        best_s = min(best_s, seconds)
        hopeless = hopeless + 1 if seconds > HOPELESS * best_s else 0
        if hopeless == 2:
            break
    near = [way for way in sorted(ways, key=epochs.first_s) if epochs.first_s(way) <= NEAR * best_s]
    for number in range(1, repeats):
        for way in near[:NEAREST]:
            epochs.run(way, number)
    for way in ways:
        epochs.close(way)


def unequal(told: Mapping[str, Sequence[Told]], again: Sequence[Told]) -> list[str]:
    """Return upriver's ways whose losses differ from ``here`` in a bit, and all ways with other samples."""
    reference = {row["number"]: row for row in told[HERE]}
    found = []
    for way, rows in {**told, "stored metrics": again}.items():
        for row in rows:
            wanted = reference[row["number"]]
            same = row["targets"] == wanted["targets"]
            if not way.startswith("torch"):
                same = same and torch.equal(bits(row["losses"]), bits(wanted["losses"]))
            if not same:
                found.append(f"{way}, epoch {row['number']}")
    return found


def bits(losses: Sequence[float]) -> torch.Tensor:
    """Return losses as a tensor for `torch.equal`. JSON keeps every bit of them."""
    return torch.tensor(losses, dtype=torch.float64)


def short(told: Told, *, steps: bool = False) -> Told:
    """Return the fields of an epoch that a record keeps."""
    left_out = {"losses", "targets", "waits_s", "steps_s"} - ({"steps_s"} if steps else set())
    row = {key: value for key, value in told.items() if key not in left_out}
    return row | {"waited_s": sum(told["waits_s"])}
