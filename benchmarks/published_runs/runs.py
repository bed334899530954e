"""Read the runs that HAPI's authors published, from a CSV file.

A text next to the file describes its columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from upriver.errors import ConfigError
from upriver.types import require_finite

RUNS = Path(__file__).parent / "data" / "hapi_published_runs.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One published run: a network, a link and a split. Seconds are of one batch, except ``epoch_s``."""

    model: str
    link_gbps: float
    split: int
    freeze: int
    train_batch: int
    received_bytes_per_batch: int
    fetch_s: float
    forward_s: float
    backward_s: float
    iteration_s: float
    epoch_s: float

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            require_finite(field.name, getattr(self, field.name), positive=True)
        if self.split > self.freeze:
            raise ConfigError(f"split must lie in 1..{self.freeze} (the freeze point), got {self.split}")

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Return the link's nominal rate."""
        return self.link_gbps * 1e9 / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """All runs of one network over one link, by split.

    HAPI's Algorithm 1 tries two of them before it decides: the earliest split that fits and the freeze point.
    """

    runs: tuple[Run, ...]

    @property
    def model(self) -> str:
        """Return the network."""
        return self.runs[0].model

    @property
    def link_gbps(self) -> float:
        """Return the link's nominal rate."""
        return self.runs[0].link_gbps

    @property
    def profiling(self) -> tuple[Run, Run]:
        """Return the runs at the earliest split and at the freeze point."""
        return self.runs[0], self.runs[-1]


def read_runs(path: Path = RUNS) -> list[Run]:
    """Read the file.

    Raises:
        ConfigError: If the file cannot be read or holds no valid runs. The text names line and column.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(path, reader.fieldnames or ())
            return [_run(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def pairs(runs: Iterable[Run]) -> list[Pair]:
    """Group runs of the same network and link, in the order of the file.

    Raises:
        ConfigError: If a split was run twice, or the runs of a pair lack its freeze point.
    """
    found: dict[tuple[str, float], dict[int, Run]] = {}
    for run in runs:
        here = found.setdefault((run.model, run.link_gbps), {})
        if here.setdefault(run.split, run) is not run:
            raise ConfigError(f"{run.model} at {run.link_gbps:g} Gbit/s: split {run.split} was run twice")
    for (model, link), here in found.items():
        freezes = {run.freeze for run in here.values()}
        if len(here) < 2 or freezes != {max(here)}:
            raise ConfigError(
                f"{model} at {link:g} Gbit/s: needs an early split and the freeze point "
                f"({', '.join(map(str, sorted(freezes)))}), has {', '.join(map(str, sorted(here)))}"
            )
    return [Pair(runs=tuple(here[split] for split in sorted(here))) for here in found.values()]


def _check_header(path: Path, header: Sequence[str]) -> None:
    expected = [field.name for field in fields(Run)]
    if list(header) != expected:
        raise ConfigError(f"{path}: the columns must be {','.join(expected)}, got {','.join(header)}")


def _run(path: Path, line: int, row: Mapping[str | None, object]) -> Run:
    if None in row or None in row.values():
        raise ConfigError(f"{path}, line {line}: a row has {len(fields(Run))} columns")
    values: dict[str, str | int | float] = {}
    for field in fields(Run):
        kind = {"str": str, "int": int, "float": float}[str(field.type)]
        try:
            values[field.name] = kind(str(row[field.name]))
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(
                f"{path}, line {line}: {field.name} must be {wanted}, got {row[field.name]!r}"
            ) from None
    try:
        return Run(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{path}, line {line}: {error}") from None
