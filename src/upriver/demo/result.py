"""Hold the demo's results: as data, as JSON, and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from upriver.report.demo_plot import BusySpan
from upriver.text import aligned, bytes_text


@dataclass(frozen=True, kw_only=True, slots=True)
class CutShare:
    """Share of the samples that left the storage tier at one cut.

    Attributes:
        after: Name of the stage before it.
        share: Share of the samples, by the plan.
    """

    cut: int
    after: str
    share: float

    def __str__(self) -> str:
        return f"{self.cut} ({self.after})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """Measurements of one training run.

    Attributes:
        epoch_bytes: Bytes over the link in each epoch.
        losses: Loss of each training step.
        accuracy: Share of correctly classified held-out images.
        parts: Cuts at which samples left the storage tier, at the end.
        why: The plan's reason.
        plan: The plan, formatted.
        bound_s: For each epoch, the longest of: bytes over the link's rate, compute seconds of the storage
            tier, compute seconds of the trainer. No schedule can be faster.
        samples: Source to number of delivered samples, evaluation included.
        num_workers: Loader threads of the plain run.
        busy: For each epoch, how busy storage tier, link and trainer were over time.
    """

    epoch_s: tuple[float, ...]
    epoch_bytes: tuple[int, ...]
    losses: tuple[float, ...]
    accuracy: float
    parts: tuple[CutShare, ...]
    why: str
    plan: str
    bound_s: tuple[float, ...]
    samples: Mapping[str, int]
    num_workers: int
    busy: tuple[tuple[BusySpan, ...], ...]

    @property
    def main(self) -> CutShare:
        """The largest part."""
        return max(self.parts, key=lambda part: part.share)

    @property
    def cuts(self) -> str:
        """All parts in words, with their shares if there are several."""
        if len(self.parts) == 1:
            return str(self.main)
        return ", ".join(f"{part.share:.0%} at {part}" for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes over the link in all epochs."""
        return sum(self.epoch_bytes)

    @property
    def bound_fraction(self) -> float:
        """Physical bound over the epochs' seconds; 1 is perfect."""
        return sum(self.bound_s) / sum(self.epoch_s)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "epoch_s": list(self.epoch_s),
            "bytes": self.bytes,
            "losses": list(self.losses),
            "accuracy": self.accuracy,
            "cut": self.main.cut,
            "after": self.main.after,
            "parts": [asdict(part) for part in self.parts],
            "why": self.why,
            "epoch_bytes": list(self.epoch_bytes),
            "bound_s": list(self.bound_s),
            "bound_fraction": self.bound_fraction,
            "samples": dict(self.samples),
            "num_workers": self.num_workers,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Results of both runs, and whether they are equal.

    Attributes:
        identical: True if every loss and every tensor of the trained models is equal, bit for bit.
        conditions: Conditions of the runs: link, cores, weights, images.
        worker_trials: Number of loader threads to the seconds of a short trial of the plain run.
        plot: Path of the plot, after it is drawn.
    """

    plain: TrainingRun
    near_data: TrainingRun
    identical: bool
    num_classes: int
    conditions: Mapping[str, Any]
    worker_trials: Mapping[int, float]
    plot: str | None = None

    @property
    def speedup(self) -> float:
        """Plain over near-data epoch seconds."""
        return sum(self.plain.epoch_s) / sum(self.near_data.epoch_s)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "plain": self.plain.to_json(),
            "near_data": self.near_data.to_json(),
            "identical": self.identical,
            "speedup": self.speedup,
            "conditions": dict(self.conditions),
            "worker_trials": {str(workers): seconds for workers, seconds in self.worker_trials.items()},
            "plot": self.plot,
        }

    def table(self) -> str:
        """Format both runs side by side."""
        ways = (self.plain, self.near_data)
        epochs = zip(*(way.epoch_s for way in ways), strict=True)
        chance = f"{1 / self.num_classes:.0%}"
        rows = [
            *([f"epoch {n}, seconds", *(f"{s:.1f}" for s in seconds)] for n, seconds in enumerate(epochs, 1)),
            ["over the link, all epochs", *(bytes_text(way.bytes) for way in ways)],
            ["first loss", *(f"{way.losses[0]:.4f}" for way in ways)],
            ["last loss", *(f"{way.losses[-1]:.4f}" for way in ways)],
            [f"held-out accuracy (chance {chance})", *(f"{way.accuracy:.1%}" for way in ways)],
            ["cut", *(way.cuts for way in ways)],
            ["fraction of the physical bound", *(f"{way.bound_fraction:.2f}" for way in ways)],
        ]
        return aligned(["", "plain", "near-data"], rows, left=frozenset({0}))

    def verdict(self) -> str:
        """Summarize the result in two sentences."""
        same = "Every loss and every trained weight is identical" if self.identical else "THE RESULTS DIFFER"
        ratio = self.plain.bytes / self.near_data.bytes
        return (
            f"Near-data is {self.speedup:.2f} times as fast and moves 1/{ratio:.1f} of the bytes. "
            f"{same}, bit for bit."
        )
