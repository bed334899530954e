"""Report the records of `plan_quality`: each setting's best measured cut, and the distance of each plan."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.reports import legend_outside, table
from benchmarks.harness.slowed import way
from benchmarks.harness.training.plans import (
    Found,
    short,
    so_far,
)
from upriver.report.figure import label_logarithmic, new_figure

GOAL_WITHIN, GOAL_SHARE = 0.05, 0.95

POLICIES = ("upriver", "exhaustive", "hapi", "hapi_bandwidth", "neurosurgeon", "freeze", "min", "nosplit")

OPTIMAL, NO_FIT = "optimal", "does not fit"
BINS = (OPTIMAL, "(0-5] % off", "(5-10] % off", "(10-15] % off", "> 15 % off", NO_FIT)

PAPER = {
    # HAPI (2025), Table 3, in %: over the models and batch sizes measured there
    "hapi": (59.2, 27.6, 9.2, 2.0, 2.0, 0.0),
    "neurosurgeon": (14.8, 29.3, 8.5, 6.4, 41.0, 0.0),
    "freeze": (8.2, 26.5, 12.2, 4.1, 49.0, 0.0),
    "min": (4.1, 28.6, 8.2, 6.1, 40.8, 12.2),
    "nosplit": (12.2, 0.0, 0.0, 0.0, 34.7, 53.1),
}


def bin_of(ratio: float | None) -> str:
    """Return the bin of a plan, by its seconds over those of the best single cut.

    None did not fit, infinity failed.
    """
    if ratio is None:
        return NO_FIT
    if ratio <= 1:
        return OPTIMAL
    limits = zip(BINS[1:4], (1.05, 1.10, 1.15), strict=True)
    return next((name for name, limit in limits if ratio <= limit), BINS[4])


def judged(found: Sequence[Found]) -> list[Found]:
    """Return the finished settings in which some single cut can be compared with the choices."""
    return [one for one in found if not one.missing and any(":" not in label for label in one.medians)]


def shares(done: Sequence[Found], policy: str) -> tuple[float, ...]:
    """Return the per cent of the settings in each bin."""
    counts = Counter(bin_of(one.ratio(policy)) for one in done)
    return tuple(100 * counts[name] / len(done) for name in BINS)


def verdict(done: Sequence[Found], declared: int) -> str:
    """Return a sentence that compares the goal with the finished ones of the declared settings."""
    ratios = [ratio for one in done if (ratio := one.ratio("upriver")) is not None]
    within = sum(ratio <= 1 + GOAL_WITHIN for ratio in ratios) / len(done)
    mean = statistics.fmean(ratios) if ratios else float("inf")
    met = "Met" if within >= GOAL_SHARE and mean < 1 else "Missed"
    return (
        f"{met}{so_far(len(done), declared)}: `upriver` is within {GOAL_WITHIN:.0%} of the best measured "
        f"single cut in {within:.0%} of {len(done)} settings, and takes {mean:.3f} times its seconds on the "
        "mean."
    )


def report(found: Sequence[Found], policies: Sequence[str], name: str = "plan_quality") -> str:
    """Return the report as Markdown."""
    done = judged(found)
    open_ = [
        f"- {one.setting.key}: {one.missing or 'a choice has no run that counts'}"
        for one in found
        if one not in done
    ]
    bad = [f"- {line}" for one in found for line in one.not_counted]
    return TEMPLATE.format(
        verdict=verdict(done, len(found)) if done else "Nothing is finished yet.",
        bins=_bins(done, policies) if done else "",
        paper=_paper(),
        settings=_settings(done, policies) if done else "",
        noise=_noise(done),
        unfinished="\n".join(open_) or "None.",
        bad="\n".join(bad) or "None.",
        repeats=found[0].setting.repeats,
        least=found[0].setting.least_repeats,
        name=name,
        facts=_facts(found),
        way=way(),
        machine=machine(),
        versions=versions("torch", "torchvision", "pillow"),
    )


def _bins(done: Sequence[Found], policies: Sequence[str]) -> str:
    columns = [shares(done, policy) for policy in policies]
    rows = [[name, *(f"{column[at]:.1f}" for column in columns)] for at, name in enumerate(BINS)]
    means = []
    for policy in policies:
        ratios = [ratio for one in done if (ratio := one.ratio(policy)) is not None]
        means.append(f"{statistics.fmean(ratios):.3f}" if ratios else "-")
    return table(("% of settings", *policies), [*rows, ["mean of the ratios, where it fits", *means]])


def _paper() -> str:
    return table(
        ("% (HAPI 2025, Table 3)", *PAPER),
        [[name, *(PAPER[policy][at] for policy in PAPER)] for at, name in enumerate(BINS)],
    )


def _settings(done: Sequence[Found], policies: Sequence[str]) -> str:
    rows = []
    for one in done:
        cells = []
        for policy in policies:
            ratio, label = one.ratio(policy), one.choices[policy]
            cells.append("-" if ratio is None else f"{ratio:.3f} ({short(label)})")
        best = f"{one.medians[one.best]:.2f} s at cut {one.best}"
        rows.append([one.setting.key, best, f"{one.noise:.1%}", *cells])
    return table(("setting", "best single cut", "noise", *policies), rows)


def _noise(done: Sequence[Found]) -> str:
    if not done:
        return "not known yet"
    noises = [one.noise for one in done]
    return f"{statistics.median(noises):.1%} at the median over the settings, {max(noises):.1%} at most"


def _facts(found: Sequence[Found]) -> str:
    keys = {one.setting.key for one in found}
    rows: list[Mapping[str, Any]] = (
        [row for row in found[0].records.rows.values() if row.get("setting") in keys] if found else []
    )
    commits = sorted({str(row["commit"]) for row in rows})
    loads = [float(row["load"]) for row in rows if "load" in row]
    if not loads:
        return "no runs"
    return (
        f"{len(rows)} records, measured at commit {', '.join(commits)}; load average {min(loads):.1f} to "
        f"{max(loads):.1f}, the runs themselves included"
    )


TEMPLATE = """# How good the plans are

**Claim.** On two hosts with a shaped link, `upriver` plans an epoch within 5 % of the best single cut that
was really measured in at least 95 % of the settings, and is ahead of it on the mean.

**{verdict}**

{bins}

A ratio is the median of a choice's {repeats} repeats over that of the single cut measured fastest; *optimal*
is a ratio of 1 or less, which a mix of cuts can go below. HAPI's authors, on their hardware, with their
systems:

{paper}

## Every setting

{settings}

*Noise*: half the range of a choice's repeats over their median, at the median over the choices: {noise}.
A plan that is off by less cannot be told from the best.

![Ratios of every setting and policy]({name}.png)

## How it was measured

- Two network namespaces with a link shaped both ways; server and object store on core 0, training on core 1,
  one thread each. Random weights; frozen as in `split_overhead`.
- Stored samples: JPEG files of about 110 KB, or `.npy` tensors of 602,112 bytes and a header.
- One measurement by the running system, as a job makes it before its first iteration, gives the profile from
  which every policy chooses. Planning is not repeated while a job runs.
- Every legal single cut, those among the input stages too, is run once; the best three and each policy's
  choice again {repeats} times, in turns. Seconds are those of a whole epoch, from the first request to the
  last optimizer step; what warms up lies before it.
- A run counts only if its losses are bit for bit those of the run that is not split, its samples and their
  order the same, and every micro-batch ran where the choice says. All runs of a setting are by the same
  code, policies aside, since a run is told its choice. A choice of which fewer than {least} repeats count
  has failed: it is beyond 15 %.
- `server0.5`: the near-data server, {way}.
  The object store beside it is not slowed.
- `cap0.5`: the compute tier's memory lies half-way between what the most frugal and the neediest cut need by
  the cost model; cuts above it are not run, but for the reference, and no policy may take them. Nothing
  enforces it while a job runs.
- The margin by which `upriver` prefers a single cut (5 %, decision 0009) was chosen after the first five
  settings: a mix had been 12 % slower than a single cut in one of them. Its policies then chose anew, and
  what they chose had been run. The other seven settings were measured afterwards.
- {facts}.
- {machine}.
  Settings may be of different machines of this kind: compare within a row.
  {versions}.

Runs that do not count:

{bad}

Settings that are not finished:

{unfinished}

## What it does not show

Accelerators; links with a long round trip; several jobs at once; long epochs, where filling the pipeline
weighs less.

Run it again: `python -m benchmarks.plan_quality`.
"""


def plot(found: Sequence[Found], policies: Sequence[str], path: Path) -> None:
    """Plot the ratios, a row of points for each setting."""
    done = judged(found)
    title = "Epoch of each policy's plan over that of the best measured single cut"
    figure = new_figure(9.0, 2.0 + 0.4 * max(len(done), 1), title)
    axes = figure.subplots()
    marks = "osD^v<>x"
    for at, policy in enumerate(policies):
        points = [(row, one.ratio(policy)) for row, one in enumerate(done)]
        there = [(row, ratio) for row, ratio in points if ratio is not None and ratio < math.inf]
        height = [row + 0.07 * (at - len(policies) / 2) for row, _ in there]
        axes.plot([ratio for _, ratio in there], height, marks[at % len(marks)], label=policy, alpha=0.8)
    axes.axvline(1.0, color="black", linewidth=0.8, label="best single cut")
    axes.axvline(1.05, color="black", linestyle="dotted", linewidth=0.8, label="5 % more")
    axes.set_yticks(range(len(done)), [one.setting.key for one in done])
    axes.set(xscale="log", xlabel="epoch over that of the best single cut (times)", ylabel="setting")
    label_logarithmic(axes.xaxis)
    axes.invert_yaxis()
    legend_outside(figure, loc="outside lower center", ncols=5)
    figure.savefig(path)
