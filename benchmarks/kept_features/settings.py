"""Describe the settings of `kept_features`, the ways of a run, and their keys in the records."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.types import DEFAULT_MICRO_BATCH

PLAIN, HAND, NONE, AUTO = "plain", "hand", "none", "auto"
"""Ways: a ``DataLoader`` around the whole model, features kept by hand, and upriver with ``keep=None`` and
with ``keep="auto"``."""

WAYS = (PLAIN, HAND, NONE, AUTO)

LOADER, MEMORY, FILE = "loader", "memory", "file"
"""Forms of the ways without upriver, each with a number of workers: the plain loop, and features kept by hand
in memory or in memory-mapped files."""

MEASURED, SWEPT = 0, 1
"""Seeds of the order of samples and of random input stages: of measured runs, and of the sweep of forms."""

SWEPT_EPOCHS = 2
"""Epochs of a run of the sweep: one that computes features, and one that reads them."""

HORIZONS = (1, 3, 5, 10)
"""Epochs at whose end a job is compared."""

COMPUTED_EPOCHS, COMPUTED_JOBS = 3, 2
"""Epochs of one job, or number of several jobs, after which the ways that compute each epoch anew are ended:
each further one takes as long as the last."""

FIRST_JUDGED = 3
"""Epochs from which a job must not be behind."""

LEAST_PAIRS = 5
"""Pairs of runs from which a ratio is judged."""

RIVAL = 1.25
"""A way is repeated as often as ``auto`` if its first run took at most so many times the best other's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the benchmark: a job, or several jobs one after the other.

    Attributes:
        network: One of ``harness.networks.FROZEN``, frozen as there.
        mbit: Rate of the link; None for no limit.
        views: Number of views of random input stages; None for deterministic stages.
        jobs: Jobs, each a new process with another head and another learning rate.
        epochs: Epochs of a job.
        batch_size: Samples of a training step.
        samples: Samples of an epoch.
        workers: Numbers of workers among which the best is sought.
        repeats: Repeats of ``auto`` and its rivals.
        ways: The ways that are run.
    """

    network: str
    mbit: float | None
    views: int | None = None
    jobs: int = 1
    epochs: int = 10
    batch_size: int = 64
    samples: int = 300
    workers: tuple[int, ...] = (0, 1)
    repeats: int = LEAST_PAIRS
    ways: tuple[str, ...] = WAYS

    def __post_init__(self) -> None:
        if self.batch_size % DEFAULT_MICRO_BATCH:
            raise ValueError(f"batch_size must be whole micro-batches, got {self.batch_size}")

    @property
    def link(self) -> str:
        """Return the link in words."""
        return "unshaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"

    @property
    def stages(self) -> str:
        """Return the input stages in words."""
        return "deterministic" if self.views is None else f"{self.views} views"

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""
        stages = "deterministic" if self.views is None else f"views{self.views}"
        parts = [self._common, stages, f"epochs{self.epochs}"]
        return "-".join(parts + ([f"jobs{self.jobs}"] if self.jobs > 1 else []))

    @property
    def sweep_key(self) -> str:
        """Return the key of the sweep of forms, which settings with other stages and lengths share."""
        return f"{self._common}-sweep"

    @property
    def _common(self) -> str:
        link = self.link.replace(" Mbit/s", "Mbit")
        return f"{self.network}-{link}-batch{self.batch_size}-n{self.samples}"

    @property
    def measured(self) -> range:
        """Return the numbers of the repeats. Repeat 0 is for the sweep."""
        return range(1, self.repeats + 1)

    @property
    def sweep(self) -> tuple[str, ...]:
        """Return the labels of the forms whose best number of workers is sought."""
        return tuple(f"{form} {number}" for form in (LOADER, MEMORY) for number in self.workers)

    @property
    def ends(self) -> int:
        """Return the number of ends that a run notes: of its epochs, or of its jobs."""
        return self.epochs if self.jobs == 1 else self.jobs

    def ends_of(self, way: str) -> int:
        """Return the number of ends that a run of a way notes, at most."""
        most = COMPUTED_EPOCHS if self.jobs == 1 else COMPUTED_JOBS
        return min(self.ends, most) if way in (PLAIN, NONE) else self.ends

    @property
    def horizons(self) -> tuple[int, ...]:
        """Return the ends at which the ways are compared."""
        if self.jobs > 1:
            return tuple(range(1, self.jobs + 1))
        return tuple(horizon for horizon in HORIZONS if horizon <= self.epochs)

    @property
    def judged(self) -> tuple[int, ...]:
        """Return the ends at which ``auto`` must not be behind: from three epochs on, and of all jobs."""
        if self.jobs > 1:
            return (self.jobs,)
        return tuple(horizon for horizon in self.horizons if horizon >= FIRST_JUDGED)


def run_key(setting: Setting, label: str, repeat: int) -> str:
    """Return the key of a run. Repeat 0 belongs to the sweep."""
    return f"{setting.key if repeat else setting.sweep_key}|{label}|{repeat}"
