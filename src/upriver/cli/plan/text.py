"""Print the result of ``upriver plan`` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upriver.cli.common import print_fields, print_table
from upriver.report.choices import choice_text, fastest, unit_of
from upriver.report.sweep import SweepPoint, choices_table, epochs_table
from upriver.text import bytes_text, seconds_text, wrapped
from upriver.types import Plan


def print_plans(facts: Mapping[str, str], notes: Sequence[str], plans: Mapping[str, Plan]) -> None:
    """Print the inputs, each policy's choice, the table of cuts, and the reason for each choice."""
    print_fields(facts)
    for note in notes:
        print(wrapped(f"note: {note}"))
    print()
    if len(plans) > 1:
        _print_choices(plans)
    shown = fastest(plans.values()) or next(iter(plans.values()))
    print(shown)
    for plan in plans.values():
        if plan is not shown:
            print(wrapped(f"{plan.policy}: {plan.why}"))


def print_sweep(points: Sequence[SweepPoint]) -> None:
    """Print each policy's choice at each bandwidth, and the predicted seconds."""
    print("\nchosen cut (- where none fits)\n" + choices_table(points))
    print(f"\npredicted seconds of one {unit_of(points[0].plans)}\n" + epochs_table(points))


def _print_choices(plans: Mapping[str, Plan]) -> None:
    columns = ("policy", "cut", "epoch s", "storage s", "network s", "compute s", "B/epoch")
    print_table(
        columns,
        [[name, choice_text(plan), *_cells(plan)] for name, plan in plans.items()],
        left=frozenset({0, 1}),
    )
    print()


def _cells(plan: Plan) -> list[str]:
    cost = plan.predicted
    if cost is None:
        return ["-"] * 5
    times = (cost.epoch_s, cost.storage_s, cost.network_s, cost.compute_s)
    return [*map(seconds_text, times), bytes_text(cost.bytes)]
