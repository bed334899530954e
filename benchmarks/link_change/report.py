"""Report the runs of `link_change`: after how many iterations the plan equals a fresh one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.reports import table
from benchmarks.harness.training.plans import Setting

GOAL = 10
"""Iterations after the change within which the plan must equal a fresh one."""

NEAR = 0.03
"""A plan counts as the fresh one if its predicted epoch is longer by at most this share."""

Step = Mapping[str, Any]
Shares = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A run in which the link changed.

    Attributes:
        steps: Steps of the whole run, in order.
        at: Number of trained steps when the link changed.
        judged: By profile (``live``, ``new``): the fresh plan, and the cost of each of `plans`.
    """

    steps: Sequence[Step]
    at: int
    judged: Mapping[str, Mapping[str, Any]]

    @property
    def plans(self) -> list[Shares]:
        """Return every plan that ran, the first one first."""
        found: list[Shares] = []
        for step in self.steps:
            if step["plan"] not in found:
                found.append(step["plan"])
        return found

    def over_fresh(self, plan: Shares, profile: str) -> float:
        """Return by what share the plan's predicted epoch is longer than a fresh plan's."""
        judged = self.judged[profile]
        return float(judged["plans_s"][self.plans.index(plan)]) / float(judged["fresh_s"]) - 1

    def iterations(self, profile: str) -> int | None:
        """Return the steps after the change with a plan that a fresh one beats.

        The result is None if the last step has such a plan.
        """
        after = [self.over_fresh(step["plan"], profile) for step in self.steps[self.at :]]
        wrong = [number for number, over in enumerate(after, start=1) if over > NEAR]
        last = wrong[-1] if wrong else 0
        return last if last < len(after) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Jitter:
    """A run over a link whose rate changed each second.

    Attributes:
        mbit: Mean rate of the link.
        settling: Steps in which a job may still leave a plan because of its first measurements.
        steady: Steps at a constant rate. They show the other reasons for leaving a plan on this machine.
        steps: Steps with jitter.
    """

    mbit: float
    settling: Sequence[Step]
    steady: Sequence[Step]
    steps: Sequence[Step]

    @property
    def switches(self) -> int:
        """Return how often the plan changed with jitter."""
        return _switches(self.steady, self.steps)

    @property
    def switches_without(self) -> int:
        """Return how often the plan changed without jitter."""
        return _switches(self.settling, self.steady)

    @property
    def observed_mbit(self) -> tuple[float, float]:
        """Return the least and the greatest rate that the job estimated during the jitter."""
        seen = [step["bandwidth"] * 8e-6 for step in self.steps if step["bandwidth"] is not None]
        return min(seen), max(seen)


def _switches(before: Sequence[Step], steps: Sequence[Step]) -> int:
    return int(steps[-1]["switches"]) - int(before[-1]["switches"])


def same_losses(steps: Sequence[Step], others: Sequence[Step]) -> bool:
    """Return whether two runs agree in every bit of every loss. Runs of different lengths do not."""
    return [step["loss"] for step in steps] == [step["loss"] for step in others]


def verdict(change: Change, reference: Sequence[Step], jitters: Sequence[Jitter]) -> str:
    """Return the result as a paragraph."""
    parts = []
    for profile, words in (("live", "by what the job knows"), ("new", "by what a new job measures")):
        took = change.iterations(profile)
        met = took is not None and took <= GOAL
        when = "never" if took is None else f"after {took} iterations"
        parts.append(f"{words}, {when} ({'met' if met else 'missed'}: within {GOAL} iterations)")
    equal = "equal bit for bit" if same_losses(change.steps, reference) else "NOT equal"
    calm = ", ".join(
        f"{j.switches} switches in {len(j.steps)} steps around {j.mbit:g} Mbit/s" for j in jitters
    )
    return (
        f"The plan is that of a fresh one, its epoch within {NEAR:.0%}, {'; '.join(parts)}. "
        f"Losses are {equal} to those of the undisturbed run. With jitter of a fifth: {calm}."
    )


def report(
    setting: Setting, after_mbit: float, change: Change, reference: Sequence[Step], jitters: Sequence[Jitter]
) -> str:
    """Return the report as Markdown."""
    plans = [
        (
            shown(plan),
            next(n for n, step in enumerate(change.steps, start=1) if step["plan"] == plan) - change.at,
            f"{change.over_fresh(plan, 'live'):+.1%}",
            f"{change.over_fresh(plan, 'new'):+.1%}",
        )
        for plan in change.plans
    ]
    steps = [
        (
            number - change.at,
            f"{step['at_s']:.1f}",
            "" if step["bandwidth"] is None else f"{step['bandwidth'] * 8e-6:.1f}",
            shown(step["plan"]),
        )
        for number, step in enumerate(change.steps, start=1)
    ]
    jittered = [
        (
            f"{j.mbit:g}",
            len(j.steps),
            "{:.0f} to {:.0f}".format(*j.observed_mbit),
            j.switches,
            j.switches_without,
        )
        for j in jitters
    ]
    fresh = "; ".join(f"{shown(judged['fresh'])} ({name})" for name, judged in change.judged.items())
    return f"""# A link that changes in the middle of an epoch

{verdict(change, reference, jitters)}

One job with `policy="upriver"`: {setting.network}, batches of {setting.batch_size}, {setting.samples} stored
samples ({setting.stored}). The link carries {setting.mbit:g} Mbit/s, and {after_mbit:g} Mbit/s after
{change.at} steps; two hosts as in [the testbed](../README.md). Iterations count from the change. A fresh plan
for {after_mbit:g} Mbit/s would be {fresh}.

{table(["cut: share", "from iteration", "over a fresh plan (live profile)", "(new job's profile)"], plans)}

{table(["iteration", "s", "observed Mbit/s", "cut: share"], steps)}

Jitter: the rate is another one each second, up to a fifth above or below. Each run settles for
{change.at} steps; then the rate stays for as long as it jitters afterwards, to show what else makes a plan be
left.

{table(["around Mbit/s", "steps", "observed Mbit/s", "switches", "switches without jitter"], jittered)}

{machine()}; {versions("torch", "torchvision")}; commit {commit()}. One run: seconds, and with them the number
of the iteration, vary with the machine; what is compared is predicted, not measured.
"""


def shown(plan: Shares) -> str:
    """Format a plan for a table cell."""
    return ", ".join(f"{cut}: {share:.0%}" for cut, share in plan.items())
