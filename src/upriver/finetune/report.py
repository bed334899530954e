"""Count what a job has delivered, and where it was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from upriver.finetune.prefetch.prefetcher import PrefetchReport
from upriver.rpc.tolerance import Tolerance
from upriver.types import Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Counts of what a job has delivered, by the place where it was computed.

    Attributes:
        samples: Number of samples by server URL, ``local``, or ``kept`` where features were read.
        retried: Micro-batches that had to be requested again.
        skipped: Ids of samples that could not be read and were left out, in the order in which they were due.
        epoch_s: Wall-clock seconds of each finished epoch, including the caller's training steps.
        epoch_bytes: Bytes that crossed the link in each finished epoch.
        phases: Seconds by source and phase. A source is ``local``, a server's URL, or ``finish``: the rest of
            the prefix, which runs locally on the output of any source.
        exact: ``bitwise`` or ``numeric``; ``auto`` while no server took part.
        tolerance: By how much a server's features may differ; None if they may not.
        prefix: How the frozen part is made faster; None if it computes as it is written.
        prefix_error: Largest difference of the canary's features from those of the model as it is written,
            relative to the largest value.
    """

    samples: Mapping[str, int]
    retried: int
    skipped: tuple[int, ...]
    epoch_s: tuple[float, ...]
    epoch_bytes: tuple[int, ...]
    phases: Mapping[str, Mapping[str, float]]
    exact: str = "bitwise"
    tolerance: Tolerance | None = None
    prefix: str | None = None
    prefix_error: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of the delivered samples by source."""
        total = sum(self.samples.values())
        return {source: count / total for source, count in self.samples.items()} if total else {}


@dataclass(kw_only=True, slots=True)
class JobTally:
    """Counters of a running job."""

    samples: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    skipped: list[int] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)
    epoch_bytes: list[int] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, report: PrefetchReport) -> None:
        """Add what a loader delivered."""
        for source, count in report.samples.items():
            self.samples[source] = self.samples.get(source, 0) + count
        self.retried += report.retried
        self.skipped += report.skipped

    def timings(self, source: str, timings: Timings) -> None:
        """Add one micro-batch's phases."""
        phases = self.phases.setdefault(source, {})
        for name, seconds in timings.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds

    def report(self, running: PrefetchReport | None, *, exact: str, tolerance: Tolerance | None) -> Report:
        """Return the totals so far, including what a running loader has delivered."""
        total = JobTally(samples=dict(self.samples), retried=self.retried, skipped=list(self.skipped))
        if running is not None:
            total.add(running)
        return Report(
            samples=total.samples,
            retried=total.retried,
            skipped=tuple(total.skipped),
            epoch_s=tuple(self.epoch_s),
            epoch_bytes=tuple(self.epoch_bytes),
            phases={source: dict(phases) for source, phases in self.phases.items()},
            exact=exact,
            tolerance=tolerance,
        )
