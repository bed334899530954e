"""Hold FastFlow's metrics of a training job, and read and write their file, ``upriver.metrics/1``.

Um, Oh, Seo, Kweun, Kim, Lee, "FastFlow: Accelerating Deep Learning Model Training with Smart Offloading of
Input Data Pipeline", PVLDB 16(5), 2023, Table 1. Throughputs are megabytes of finished batches per second.
Cycles are CPU seconds of the trainer and its loader's processes for a fixed number of samples. Only ratios of
either count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from upriver.errors import ConfigError
from upriver.types import require_finite

METRICS_SCHEMA = "upriver.metrics/1"

SPEEDUP_THRESHOLD = 1.1
"""FastFlow's default (section 4.1): if offloading gains no more than a tenth, nothing is offloaded."""

MOST = 1e12
"""Upper bound of a machine's megabytes per second, and of a job's seconds."""

MAX_CANDIDATES = 4096
"""More stretches than a chain of 64 stages has."""

MAX_NAME = 200
"""Characters of a candidate's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to offload: a choice of stages that run elsewhere.

    Attributes:
        name: Name, such as ``p2``.
        rthp: Training throughput with everything offloaded in this way, MB/s; 0 where nothing arrived.
        ocycle: CPU seconds of the training node in this way.

    Raises:
        ConfigError: If a number is negative, not finite or too large, or the name is empty or too long.
    """

    name: str
    rthp: float
    ocycle: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise ConfigError(
                f"a candidate's name has 1 to {MAX_NAME} characters, got {str(self.name)[:40]!r}"
            )
        for field in ("rthp", "ocycle"):
            require_finite(f"candidates[{self.name}].{field}", getattr(self, field), at_most=MOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Inputs of the decision whether to offload, which stages, and how much.

    Attributes:
        gthp: Throughput of the model alone, its input ready in memory, MB/s.
        lthp: Training throughput with the whole input pipeline on the training node, MB/s.
        pcycle: CPU seconds of the training node at ``lthp``.
        pseconds: Seconds at ``lthp``: more than ``pcycle`` where the input pipeline waits more than it
            computes; None where unknown, or where cycles are not seconds.
        speedup_threshold: Least speedup that offloading must promise, as a factor.
        candidates: Candidates in the order that decides ties; empty where nothing stalls and none was
            measured.

    Raises:
        ConfigError: If a number is not positive, not finite or too large, or two candidates share a name.
    """

    gthp: float
    lthp: float
    pcycle: float
    speedup_threshold: float = SPEEDUP_THRESHOLD
    candidates: tuple[Candidate, ...] = ()
    pseconds: float | None = None

    def __post_init__(self) -> None:
        for field in ("gthp", "lthp", "pcycle", "speedup_threshold"):
            require_finite(field, getattr(self, field), positive=True, at_most=MOST)
        if self.pseconds is not None:
            require_finite("pseconds", self.pseconds, positive=True, at_most=MOST)
        names = [candidate.name for candidate in self.candidates]
        if len(names) > MAX_CANDIDATES:
            raise ConfigError(f"there are at most {MAX_CANDIDATES} candidates, got {len(names)}")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"candidates must have names of their own, got {twice[0]!r} twice")


class _Candidate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    rthp: float
    ocycle: float


class _Metrics(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: Literal["upriver.metrics/1"]
    gthp: float
    lthp: float
    pcycle: float
    speedup_threshold: float = SPEEDUP_THRESHOLD
    candidates: list[_Candidate] = []
    pseconds: float | None = None


def metrics_from_json(text: str | bytes) -> Metrics:
    """Read metrics.

    Raises:
        ConfigError: If the text is not such metrics; the message names the field.
    """
    try:
        # The standard parser lets a NaN through, so that the error can name its field.
        fields: Any = msgspec.to_builtins(msgspec.convert(json.loads(text), _Metrics))
    except ValueError as error:
        raise ConfigError(f"not a valid {METRICS_SCHEMA} file: {error}") from None
    candidates = tuple(Candidate(**candidate) for candidate in fields.pop("candidates"))
    del fields["schema"]
    return Metrics(**fields, candidates=candidates)


def metrics_to_json(metrics: Metrics) -> str:
    """Write metrics; `metrics_from_json` returns equal ones."""
    known = {name: value for name, value in msgspec.to_builtins(metrics).items() if value is not None}
    fields = {"schema": METRICS_SCHEMA, **known}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
