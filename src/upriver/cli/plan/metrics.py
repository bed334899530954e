"""``upriver plan --metrics``: decide whether to offload an input pipeline, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from upriver.cli.common import emit, print_fields, print_table
from upriver.cli.plan.question import read_metrics
from upriver.errors import ConfigError
from upriver.policies import OFFLOAD_POLICIES, OffloadDecision, fastflow, pipeline
from upriver.profile.throughput import Candidate, Metrics
from upriver.text import wrapped

ALL = "all"


def plan_metrics(path: Path, policy: str, *, idle: Sequence[str], as_json: bool) -> int:
    """Read the metrics, decide, and explain the decision.

    Args:
        policy: Name of a policy for metrics, or ``all``.
        idle: Given options that have no effect here.

    Raises:
        ConfigError: If the file cannot be read, another policy is asked for, or an option has no effect.
    """
    if idle:
        raise ConfigError(f"--{', --'.join(idle)} would not count with --metrics")
    if policy not in (*OFFLOAD_POLICIES, ALL):
        names = ", ".join(OFFLOAD_POLICIES)
        raise ConfigError(f"with --metrics --policy must be one of {names} or {ALL}, got {policy!r}")
    metrics = read_metrics(path)
    asked = OFFLOAD_POLICIES if policy == ALL else {policy: OFFLOAD_POLICIES[policy]}
    decisions = {name: each.decide(metrics) for name, each in asked.items()}
    documents: dict[str, dict[str, Any]] = {
        name: {"policy": name, **asdict(decision)} for name, decision in decisions.items()
    }
    document = {"plans": documents} if policy == ALL else documents[policy]
    emit(document, as_json=as_json, text=lambda: _print(metrics, decisions))
    return 0


def _print(metrics: Metrics, decisions: Mapping[str, OffloadDecision]) -> None:
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
        columns = (
            "candidate",
            "MB/s",
            "CPU s here",
            "FastFlow's estimate",
            "at least",
            "both at once, MB/s",
            "at",
        )
        print_table(columns, [_row(metrics, each) for each in metrics.candidates], left=frozenset({0}))
        print()
    for name, decision in decisions.items():
        part = f"{decision.candidate} for {decision.ratio:.1%} of the samples"
        print(wrapped(f"{name}: {part if decision.offload else 'all here'}: {decision.why}."))


def _row(metrics: Metrics, candidate: Candidate) -> list[str]:
    numbers = (
        candidate.rthp,
        candidate.ocycle,
        fastflow.estimate(metrics, candidate),
        fastflow.lower(metrics, candidate),
        pipeline.highest(metrics, candidate),
    )
    return [
        candidate.name,
        *(f"{number:.4g}" for number in numbers),
        f"{pipeline.crossing(metrics, candidate):.0%}",
    ]
