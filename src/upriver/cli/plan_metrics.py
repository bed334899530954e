"""``upriver plan --metrics``: whether an input pipeline is to be offloaded, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upriver.cli.common import emit, print_fields, print_table
from upriver.cli.plan_question import read_metrics
from upriver.errors import ConfigError
from upriver.policies import fastflow
from upriver.policies.fastflow import POLICY, Offload
from upriver.profile.metrics import Candidate, Metrics
from upriver.text import wrapped

ALL = "all"


def plan_metrics(path: Path, policy: str, *, idle: Sequence[str], as_json: bool) -> int:
    """Read the metrics, decide, and say why.

    Args:
        path: The file.
        policy: ``fastflow``, or ``all`` of those that go by metrics.
        idle: Options that were given and do not count here.
        as_json: Print the document that programs read.

    Raises:
        ConfigError: If the file cannot be read, another policy is asked for, or an option does not count.
    """
    if idle:
        raise ConfigError(f"--{', --'.join(idle)} would not count with --metrics")
    if policy not in (POLICY, ALL):
        raise ConfigError(f"with --metrics --policy must be {POLICY} or {ALL}, got {policy!r}")
    metrics = read_metrics(path)
    decision = fastflow.decide(metrics)
    document: dict[str, Any] = {"policy": POLICY, **asdict(decision)}
    if policy == ALL:
        document = {"plans": {POLICY: document}}
    emit(document, as_json=as_json, text=lambda: _print(metrics, decision))
    return 0


def _print(metrics: Metrics, decision: Offload) -> None:
    print_fields(
        {
            "model alone": f"{metrics.gthp:g} MB/s",
            "all here": f"{metrics.lthp:g} MB/s, for {metrics.pcycle:g} CPU seconds",
            "to be gained": f"{metrics.gthp / metrics.lthp:.2f} times, "
            f"worth it above {metrics.speedup_threshold:g}",
        }
    )
    print()
    if metrics.candidates:
        columns = ("candidate", "MB/s", "CPU s here", "estimate, MB/s", "offload at least", "at most")
        print_table(columns, [_row(metrics, each) for each in metrics.candidates], left=frozenset({0}))
        print()
    head = f"{decision.candidate} for {decision.ratio:.1%} of the samples" if decision.offload else "all here"
    print(wrapped(f"{POLICY}: {head}: {decision.why}."))


def _row(metrics: Metrics, candidate: Candidate) -> list[str]:
    numbers = (
        candidate.rthp,
        candidate.ocycle,
        fastflow.estimate(metrics, candidate),
        fastflow.lower(metrics, candidate),
        candidate.rthp,
    )
    return [candidate.name, *(f"{number:.4g}" for number in numbers)]
