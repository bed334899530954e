"""Describe the settings of the benchmarks of plans, their choices, and the records of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.harness.networks import FROZEN
from benchmarks.harness.records import Records

LOADER = "loader "
"""Prefix of the plain loop's label. ``loader 1x2`` has one worker and a prefetch factor of 2."""

MEASURED, SWEPT = 0, 1
"""Seeds of the order of samples: of the measured runs, and of the plain loop's sweep."""


REPEATS = 5

LEAST_REPEATS = 3
"""Least number of valid repeats for a median, if a setting has as many. A choice with fewer counts as failed.
"""

LOSS_TOLERANCE = 1e-4
"""Relative tolerance. Whole batches through the frozen modules may round otherwise than micro-batches."""

DEVICES_TOLERANCE = 1e-2
"""Relative tolerance where one side computes on an accelerator: that of features in TF32."""

Shares = Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of a benchmark.

    Attributes:
        network: One of ``networks.FROZEN``, frozen as there.
        stored: ``jpeg`` or ``tensor``.
        mbit: Rate of the link; None for no limit.
        batch_size: Samples of a training step.
        samples: Samples of an epoch.
        server_speed: Share of its core that the near-data server gets.
        client_speed: Share of its core that the training process gets.
        server_device: Device on which the near-data server computes.
        client_device: Device of the model that is trained.
        cores: Cores of each side.
        cap_share: Compute memory, from 0 (the need of the smallest cut) to 1 (of the largest); None: no cap.
        stored_scale: Factor on the bytes and pixels of stored images.
        repeats: Repeats of each finalist.
    """

    network: str
    stored: str = "jpeg"
    mbit: float | None
    batch_size: int
    samples: int
    server_speed: float = 1.0
    client_speed: float = 1.0
    server_device: str = "cpu"
    client_device: str = "cpu"
    cores: int = 1
    cap_share: float | None = None
    stored_scale: int = 1
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        if self.network not in FROZEN:
            raise ValueError(f"network must be one of {', '.join(FROZEN)}, got {self.network!r}")
        if self.stored not in ("jpeg", "tensor") or (self.stored == "tensor" and self.stored_scale != 1):
            raise ValueError(f"stored must be jpeg or tensor, and a tensor has one size, got {self.stored!r}")
        if self.mbit is not None and not 0.1 <= self.mbit <= 2000:
            raise ValueError(f"mbit must be None or lie in 0.1..2000, got {self.mbit}")
        if self.batch_size < 1 or self.samples % self.batch_size or self.samples < 2 * self.batch_size:
            raise ValueError(f"samples must be two or more whole training batches, got {self.samples}")
        for name in ("server_speed", "client_speed"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if self.cap_share is not None and not 0 <= self.cap_share < 1:
            raise ValueError(f"cap_share must be None or lie in [0, 1), got {self.cap_share}")

    @property
    def measured(self) -> range:
        """Return the numbers of the repeats. Repeat 0 belongs to the sweep."""
        return range(1, self.repeats + 1)

    @property
    def least_repeats(self) -> int:
        """Return the least number of valid repeats for a median."""
        return min(LEAST_REPEATS, self.repeats)

    @property
    def one_device(self) -> bool:
        """Return whether both sides compute on the CPU, so that runs are compared bit for bit."""
        return self.server_device == self.client_device == "cpu"

    @property
    def loss_tolerance(self) -> float:
        """Return by how much losses may differ, relative to each, from those of other roundings."""
        return LOSS_TOLERANCE if self.one_device else DEVICES_TOLERANCE

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""
        parts = [
            self.network,
            self.stored + (f"x{self.stored_scale}" if self.stored_scale > 1 else ""),
            "unshaped" if self.mbit is None else f"{self.mbit:g}Mbit",
            f"batch{self.batch_size}",
            f"n{self.samples}",
        ]
        for name, speed in (("server", self.server_speed), ("client", self.client_speed)):
            parts += [f"{name}{speed:g}"] if speed != 1 else []
        for name, device in (("server", self.server_device), ("client", self.client_device)):
            parts += [f"{name}-{device}"] if device != "cpu" else []
        parts += [f"cores{self.cores}"] if self.cores != 1 else []
        return "-".join(parts + ([f"cap{self.cap_share:g}"] if self.cap_share is not None else []))


def label_of(shares: Shares) -> str:
    """Return the label of a choice in the records: ``4``, or ``-3:0.25,4:0.75``."""
    if len(shares) == 1:
        return str(next(iter(shares)))
    return ",".join(f"{cut}:{share!r}" for cut, share in sorted(shares.items()))


def shares_from(label: str) -> dict[int, float]:
    """Return the choice with this label."""
    if ":" not in label:
        return {int(label): 1.0}
    pairs = (part.split(":") for part in label.split(","))
    return {int(cut): float(share) for cut, share in pairs}


def short(label: str | None) -> str:
    """Format a choice for a narrow column, with shares in per cent."""
    if label is None or ":" not in label:
        return label or "does not fit"
    pairs = (part.split(":") for part in label.split(","))
    return " + ".join(f"{float(share):.0%} at {cut}" for cut, share in pairs)


def plan_key(setting: Setting) -> str:
    """Return the key of the record that holds every policy's choice."""
    return f"{setting.key}|plan"


def run_key(setting: Setting, label: str, repeat: int) -> str:
    """Return the key of a run. Repeat 0 belongs to the sweep."""
    return f"{setting.key}|{label}|{repeat}"


def run_of(records: Records, setting: Setting, label: str, repeat: int) -> dict[str, Any] | None:
    """Return the record of a run, or None if no run has the code version of the setting's plans."""
    plan, row = records.rows.get(plan_key(setting)), records.rows.get(run_key(setting, label, repeat))
    return row if plan is not None and row is not None and row["code"] == plan["code"] else None


def alike(losses: Sequence[float], reference: Sequence[float], *, tolerance: float = LOSS_TOLERANCE) -> bool:
    """Return whether two runs learned the same, except for rounding."""
    return len(losses) == len(reference) and all(
        math.isclose(ours, theirs, rel_tol=tolerance) for ours, theirs in zip(losses, reference, strict=True)
    )


def why_not_valid(row: Mapping[str, Any], reference: str) -> str:
    """Return why a run does not count, or an empty text if it does."""
    if "error" in row:
        return f"failed: {row['error']}"
    if row["digest"] != reference:
        return "other losses or samples"
    return str(row.get("misplaced", ""))


def spread_of(values: Sequence[float]) -> float:
    """Return half the range over the median: the spread of the repeats of one figure."""
    return (max(values) - min(values)) / 2 / float(np.median(values))


FINALISTS = 3


@dataclass(frozen=True)
class Found:
    """A setting and its records."""

    setting: Setting
    records: Records

    @property
    def plan(self) -> dict[str, Any] | None:
        """Return the record of the policies' choices, or None before it exists."""
        return self.records.rows.get(plan_key(self.setting))

    @cached_property
    def choices(self) -> dict[str, str | None]:
        """Return each policy's choice by name, or None where the policy does not fit."""
        plans = (self.plan or {}).get("plans", {})
        return {
            name: label_of({int(cut): share for cut, share in plan["shares"].items()})
            if plan["feasible"]
            else None
            for name, plan in plans.items()
        }

    @property
    def unsplit(self) -> str:
        """Return the cut that offloads nothing and gives the reference."""
        assert self.plan is not None
        return str(self.plan["cuts"][0])

    @property
    def sweep_labels(self) -> list[str]:
        """Return every legal cut, starting with the reference cut."""
        assert self.plan is not None
        legal = [str(cut) for cut in self.plan["cuts"] if str(cut) not in self.plan["why_not"]]
        return [self.unsplit, *(label for label in legal if label != self.unsplit)]

    @cached_property
    def reference(self) -> str:
        """Return the digest of the plain way's results, or an empty text if it did not run."""
        return str((self._row(self.unsplit, 0) or {}).get("digest", ""))

    def _row(self, label: str, repeat: int) -> dict[str, Any] | None:
        return run_of(self.records, self.setting, label, repeat)

    def why_not(self, label: str, repeat: int) -> str | None:
        """Return why a run does not count: empty when it does, None when it does not exist."""
        row, setting = self._row(label, repeat), self.setting
        if row is None or setting.one_device or "error" in row:
            return None if row is None else why_not_valid(row, self.reference)
        reference = (self._row(self.unsplit, 0) or {}).get("losses", ())
        if not alike(row["losses"], reference, tolerance=setting.loss_tolerance):
            return "other losses"
        return str(row.get("misplaced", ""))

    def seconds(self, label: str, repeats: Sequence[int]) -> list[float]:
        """Return the seconds of the runs that count."""
        rows = [self._row(label, repeat) for repeat in repeats if self.why_not(label, repeat) == ""]
        return [float(row["seconds"]) for row in rows if row is not None]

    @cached_property
    def finalists(self) -> list[str]:
        """Return the best three cuts of the sweep and every policy's choice.

        They are known after the sweep.
        """
        excluded = set((self.plan or {}).get("why_not", {}))
        swept = {
            label: seconds[0]
            for label in self.sweep_labels
            if label not in excluded and (seconds := self.seconds(label, [0]))
        }
        best = sorted(swept, key=swept.__getitem__)[:FINALISTS]
        return list(dict.fromkeys([*best, *(label for label in self.choices.values() if label is not None)]))

    @cached_property
    def missing(self) -> str:
        """Return how much is still missing, or an empty text when the setting is finished."""
        if self.plan is None:
            return "not begun"
        swept = [label for label in self.sweep_labels if self.why_not(label, 0) is not None]
        if len(swept) < len(self.sweep_labels):
            return f"{len(swept)} of {len(self.sweep_labels)} cuts run"
        wanted = [(label, repeat) for label in self.finalists for repeat in self.setting.measured]
        there = [each for each in wanted if self.why_not(*each) is not None]
        return f"{len(there)} of {len(wanted)} repeats run" if len(there) < len(wanted) else ""

    @cached_property
    def medians(self) -> dict[str, float]:
        """Return each finalist's median seconds over its valid repeats, if it has enough of them."""
        found = {label: self.seconds(label, self.setting.measured) for label in self.finalists}
        return {
            label: statistics.median(seconds)
            for label, seconds in found.items()
            if len(seconds) >= self.setting.least_repeats
        }

    @property
    def best(self) -> str:
        """Return the single cut that was measured fastest."""
        singles = {label: seconds for label, seconds in self.medians.items() if ":" not in label}
        return min(singles, key=singles.__getitem__)

    @property
    def noise(self) -> float:
        """Return the median over the finalists of half the range of their repeats, as a share."""
        every = (self.seconds(label, self.setting.measured) for label in self.finalists)
        spreads = [spread_of(seconds) for seconds in every if seconds]
        return statistics.median(spreads)

    def ratio(self, policy: str) -> float | None:
        """Return the seconds of a policy's choice over those of the best single cut.

        The result is None where the policy does not fit, and infinite where too few of its runs count.
        """
        label = self.choices[policy]
        return None if label is None else self.medians.get(label, math.inf) / self.medians[self.best]

    @property
    def not_counted(self) -> list[str]:
        """Return the runs that do not count, and why."""
        labels = dict.fromkeys((*self.sweep_labels, *self.finalists)) if self.plan is not None else {}
        return [
            f"{self.setting.key}, {label}, repeat {repeat}: {why}"
            for label in labels
            for repeat in (0, *self.setting.measured)
            if (why := self.why_not(label, repeat))
        ]


def so_far(done: int, declared: int) -> str:
    """Return how to read a verdict on a part of the settings."""
    return "" if done == declared else f" so far, {done} of {declared} settings"
