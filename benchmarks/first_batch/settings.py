"""Describe the settings of `first_batch`, the ways of a run, and their keys in the records."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.first_batch.networks import NETWORKS

COLD, WARM = "cold", "warm"
"""Caches: empty and with a server that has just started, or as an earlier run of the same job left both."""

DEFAULT, FOREGROUND, LOADER, UNSPLIT = "default", "foreground", "loader", "unsplit"
"""Ways: `finetune` as it is, `finetune` that prepares everything before it returns, a ``DataLoader``, and the
job whose losses are the reference."""

BOTH = tuple(f"{way} {cache}" for cache in (COLD, WARM) for way in (DEFAULT, FOREGROUND))
ALONE = tuple(f"{DEFAULT} {cache}" for cache in (COLD, WARM))

LIMIT_S = 60.0
"""Seconds after which a job that waits for its first remote batch takes no further step."""

LOADER_STEPS = 2
"""Steps of the plain loop where the first batch alone matters."""

SWEPT_EPOCHS = 2
"""Epochs of a run that searches for the best number of workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the benchmark.

    Attributes:
        network: One of ``networks.NETWORKS``.
        mbit: Rate of the link; None for no limit.
        cores: Cores of the training side. With two, the storage side shares both; with one, it has another.
        batch_size: Samples of a training step.
        samples: Samples of an epoch.
        epochs: Epochs of a job; None ends it with its first batch from a server, or after `LIMIT_S`.
        ways: Upriver's ways that take turns.
        workers: Numbers of workers among which the plain loop's best is sought.
        repeats: Repeats of each way.
        forced: Whether every sample is to come through the server, from the second epoch on: the job is
            prepared in the background however small it is, and waits for that after an epoch.
    """

    network: str
    mbit: float | None
    cores: int
    batch_size: int
    samples: int
    epochs: int | None = None
    ways: tuple[str, ...] = BOTH
    workers: tuple[int, ...] = (0,)
    repeats: int = 3
    forced: bool = False

    @property
    def title(self) -> str:
        """Return the name of the network."""
        return NETWORKS[self.network].title

    @property
    def link(self) -> str:
        """Return the link in words."""
        return "unshaped" if self.mbit is None else f"{self.mbit:g} Mbit/s"

    @property
    def key(self) -> str:
        """Return a short key of everything that a run depends on."""
        parts = [
            self.network,
            self.link.replace(" Mbit/s", "Mbit"),
            f"cores{self.cores}",
            f"batch{self.batch_size}",
            f"n{self.samples}",
        ]
        return "-".join(parts + ([f"epochs{self.epochs}"] if self.epochs is not None else []))

    @property
    def measured(self) -> range:
        """Return the numbers of the repeats. Repeat 0 is for the reference and the sweep."""
        return range(1, self.repeats + 1)

    @property
    def sweep(self) -> tuple[str, ...]:
        """Return the labels of the plain loop's forms."""
        return tuple(f"{LOADER} {number}" for number in self.workers)


def run_key(setting: Setting, label: str, repeat: int) -> str:
    """Return the key of a run."""
    return f"{setting.key}|{label}|{repeat}"
