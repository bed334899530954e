"""Report the records of `speedup`: seconds and bytes of an epoch, and their distance from the bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.reports import legend_outside, table
from benchmarks.harness.slowed import way
from benchmarks.harness.training.plans import LOADER, LOSS_TOLERANCE, short, so_far
from benchmarks.harness.training.ways import PLAIN, Ways, commits_of
from upriver.finetune.calibration.measurement import CANARY
from upriver.report.figure import label_logarithmic, new_figure

SWEEP = tuple(
    f"{LOADER}{workers}x{prefetch}" for workers, prefetch in ((0, 2), (1, 2), (1, 4), (2, 2), (2, 4))
)
POLICIES = ("upriver", "hapi", "neurosurgeon", "freeze", "min")
GOAL_BOUND, GOAL_PLAIN, GOAL_MEASURING = 0.85, 0.95, 0.03
EPOCHS = 10
"""Epochs whose time the measuring share refers to."""


class Speeds(Ways):
    """A setting and its records, with the distance of its seconds from the bound."""

    policies = POLICIES
    forms = SWEEP

    def _link_s(self, name: str) -> float:
        """Return the seconds of the link for the bytes it carried, at its rate."""
        mbit = self.setting.mbit
        return 0.0 if mbit is None else 8 * self.megabytes(name) / mbit

    def bound_s(self, name: str) -> float:
        """Return the seconds of the busiest of storage, link and compute, if it were never idle.

        The link's seconds are its bytes at its rate. The seconds of a side are what its processes computed on
        its core, or on its share of a core.
        """
        setting = self.setting
        storage_s = max(self.cpu_s(name, "server") / setting.server_speed, self.cpu_s(name, "storage"))
        return max(storage_s, self._link_s(name), self.cpu_s(name, "compute") / setting.client_speed)

    def profile_bound_s(self, name: str) -> float:
        """Return the same bound by the measured profile of both sides, which covers the stages alone."""
        plan = self.found.plan
        assert plan is not None
        cost = plan["predicted"][self.unsplit] if name == PLAIN else plan["plans"][name]["predicted"]
        return max(float(cost["storage_s"]), float(cost["compute_s"]), self._link_s(name))

    def of_bound(self, name: str) -> float | None:
        """Return the bound over the median of the seconds."""
        seconds = self.seconds(name)
        return None if seconds is None else self.bound_s(name) / seconds.median

    def of_profile_bound(self, name: str) -> float | None:
        """Return the profile's bound over the median of the seconds."""
        seconds = self.seconds(name)
        return None if seconds is None else self.profile_bound_s(name) / seconds.median

    @property
    def measuring_s(self) -> dict[str, float]:
        """Return the seconds of each measurement before the first iteration, the canary's among them."""
        assert self.found.plan is not None
        return {part: float(s) for part, s in self.found.plan["measuring_s"].items()}

    @property
    def measuring_share(self) -> float:
        """Return the measuring time as a share of the first epochs, at the epoch time of `upriver`'s plan."""
        seconds = self.seconds("upriver")
        return math.inf if seconds is None else sum(self.measuring_s.values()) / (EPOCHS * seconds.median)


def verdict(done: Sequence[Speeds], declared: int) -> str:
    """Return the goals in a few sentences, over the finished ones of the declared settings."""
    bounds = [one.of_bound("upriver") or 0.0 for one in done]
    plain = [one.over_plain("upriver") or 0.0 for one in done]
    held = "Met" if min(bounds) >= GOAL_BOUND and min(plain) >= GOAL_PLAIN else "Missed"
    of_bound, over_plain = statistics.median(bounds), statistics.median(plain)
    return (
        f"{held}{so_far(len(done), declared)}: `upriver` reaches {of_bound:.2f} of the bound at the median "
        f"and {min(bounds):.2f} at least (goal {GOAL_BOUND}), and is {over_plain:.2f} times as fast as the "
        f"plain way at the median, {min(plain):.2f} at least (goal {GOAL_PLAIN})."
    )


def measuring_verdict(done: Sequence[Speeds]) -> str:
    """Return the verdict on measuring, judged where epochs are shortest."""
    known = [(seconds.median, one) for one in done if (seconds := one.seconds("upriver")) is not None]
    if not known:
        return "Nothing is known of measuring yet."
    epoch_s, smallest = min(known, key=lambda each: each[0])
    share = smallest.measuring_share
    return (
        f"{'Met' if share < GOAL_MEASURING else 'Missed'}: in the smallest job ({smallest.setting.key}, "
        f"epochs of {epoch_s:.2f} s) measuring takes {sum(smallest.measuring_s.values()):.2f} s, of which "
        f"{smallest.measuring_s.get(CANARY, 0.0):.2f} s are the canary's, {share:.2%} of {EPOCHS} epochs "
        f"(goal {GOAL_MEASURING:.0%})."
    )


def report(found: Sequence[Speeds], name: str) -> str:
    """Return the report as Markdown."""
    done = [one for one in found if not one.missing]
    names = (*POLICIES, PLAIN)
    header = ("setting", *names)

    def of_each(cell: Callable[[Speeds, str], str]) -> str:
        """Return a table of the settings and the ways. A cell is empty where too few runs count."""
        cells = [[cell(one, each) if one.seconds(each) else "-" for each in names] for one in done]
        return table(header, [[one.setting.key, *row] for one, row in zip(done, cells, strict=True)])

    unfinished = [f"- {one.setting.key}: {one.missing}" for one in found if one.missing]
    return TEMPLATE.format(
        verdict=verdict(done, len(found)) if done else "Nothing is finished yet.",
        measuring_verdict=measuring_verdict(done),
        seconds=of_each(lambda one, each: _spread(one.seconds(each), one.setting.repeats)),
        factors=of_each(lambda one, each: _two(one.over_plain(each))),
        bounds=of_each(lambda one, each: f"{_two(one.of_bound(each))} ({_two(one.of_profile_bound(each))})"),
        moved=of_each(lambda one, each: f"{one.megabytes(each):.1f}"),
        cpu=of_each(lambda one, each: f"{one.cpu_s(each, 'storage'):.1f} + {one.cpu_s(each, 'compute'):.1f}"),
        chosen=table(header, [[one.setting.key, *(short(one.ways[each]) for each in names)] for one in done]),
        sweep=_sweep(done),
        measuring=_measuring(done),
        bad="\n".join(f"- {line}" for one in found for line in one.not_counted) or "None.",
        unfinished="\n".join(unfinished) or "None.",
        name=name,
        repeats=found[0].setting.repeats,
        least=found[0].setting.least_repeats,
        tolerance=f"{LOSS_TOLERANCE:g}",
        way=way(),
        commits=commits_of(found),
        machine=machine(),
        versions=versions("torch", "torchvision", "pillow"),
    )


def _spread(seconds: Spread | None, repeats: int) -> str:
    """Format repeats for a table cell, with their number if some do not count."""
    assert seconds is not None
    few = len(seconds.values) < repeats
    return seconds.text() + (f", {len(seconds.values)} of {repeats}" if few else "")


def _sweep(done: Sequence[Speeds]) -> str:
    rows = []
    for one in done:
        found = [one.rows(label, [0]) for label in SWEEP]
        rows.append([one.setting.key, *(f"{row[0]['seconds']:.2f}" if row else "-" for row in found)])
    return table(("setting", *(label.removeprefix(LOADER) for label in SWEEP)), rows)


def _measuring(done: Sequence[Speeds]) -> str:
    parts = list(dict.fromkeys(part for one in done for part in one.measuring_s))
    rows = [
        [
            one.setting.key,
            *(f"{one.measuring_s.get(part, 0.0):.2f}" for part in parts),
            f"{one.measuring_share:.2%}",
        ]
        for one in done
    ]
    return table(("setting", *parts, f"of {EPOCHS} epochs"), rows)


def _two(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


TEMPLATE = """# How long an epoch takes

**Claim.** On two hosts with a shaped link, an epoch by `upriver`'s plan reaches at least 0.85 of the bound
that storage, link and compute set, and is never below 0.95 times as fast as an ordinary PyTorch loop.
Measuring before the first iteration takes less than 3 % of ten epochs of the smallest job.

**{verdict}**

**{measuring_verdict}**

Times as fast as the plain way, medians:

{factors}

Seconds of an epoch, median (lowest to highest) of {repeats} repeats in turns:

{seconds}

The bound over the seconds; in brackets by the profile's bound:

{bounds}

MB that crossed the link to the training side:

{moved}

Seconds of a core that were computed, on the storage side + on the training side:

{cpu}

What was chosen (a cut, shares of several, or the loader's workers x prefetch factor):

{chosen}

![Times as fast as the plain way]({name}.png)

## How it was measured

- Two network namespaces with a link shaped both ways; server and object store on core 0, training on core 1,
  one thread each. The near-data ways compute on both cores, the plain way on one: that is their point, and
  the seconds of both are above. Random weights; frozen as in `split_overhead`. JPEG files of about 110 KB;
  `jpegx8` has 8 times the pixels and bytes.
- **Plain way**: the whole model in a loop over `DataLoader`, which reads whole batches from the same object
  store with the same joined reads and input stages; the fastest form of the sweep below is repeated.
- **Policies** choose from one measurement by the running system, and keep their plan. Eight settings were
  planned before `upriver` took a mix only for a gain of some 5 %; by what was predicted it would choose the
  same. ResNet-18 at 5 and 20 Mbit/s and AlexNet with `client0.5` were planned and run anew, ResNet-18 with
  `client0.5` and `jpegx8` planned anew: the one's choice had been run, the other's was run by itself.
- Seconds are those of a whole epoch, from the first request to the last optimizer step. Warm: worker
  processes, programs, tail.
- A run of upriver counts only if its losses are bit for bit those of the run that is not split, and every
  micro-batch ran where the plan says; one of the plain way if each loss is within {tolerance} of it. All runs
  of a setting are by the same code, policies aside. A way of which fewer than {least} repeats count has
  failed.
- **Bound**: the largest of what crossed the link at its rate and what the processes of each side computed, in
  seconds of the core that they have, as the kernel counts them; protocol and copies are in it. The profile's
  bound has the seconds of the stages alone in their place, as measured before the first iteration.
- `client0.5`: the training process, {way}.
- Commits {commits}. {machine}. {versions}.
  Settings may be of different machines of this kind: compare within a row.

Seconds of the loader's sweep, workers x prefetch factor, each once, on samples in another order:

{sweep}

Seconds of measuring before the first iteration, by part; frozen weights are in the store, no profile is kept:

{measuring}

Runs that do not count:

{bad}

Settings that are not finished:

{unfinished}

## What it does not show

Accelerators; links with a long round trip; several jobs at once. In short epochs filling the pipeline weighs
more than in long ones.

Run it again: `python -m benchmarks.speedup`.
"""


def plot(found: Sequence[Speeds], path: Path) -> None:
    """Plot the speed-ups over the plain way, a group of points for each setting."""
    done = [one for one in found if not one.missing]
    figure = new_figure(
        9.0, 2.0 + 0.4 * max(len(done), 1), "How many times as fast as the plain way each policy is"
    )
    axes = figure.subplots()
    for at, (mark, policy) in enumerate(zip("osD^v", POLICIES, strict=True)):
        # Next to each other, since equal ones would hide each other.
        points = [(row + 0.12 * (at - 2), one.over_plain(policy)) for row, one in enumerate(done)]
        there = [(row, factor) for row, factor in points if factor is not None]
        axes.plot([factor for _, factor in there], [row for row, _ in there], mark, label=policy, alpha=0.8)
    axes.axvline(1.0, color="black", linewidth=0.8, label="plain way")
    axes.set_yticks(range(len(done)), [one.setting.key for one in done])
    axes.set(xscale="log", xlabel="speed-up over the plain way (times)", ylabel="setting")
    label_logarithmic(axes.xaxis)
    axes.invert_yaxis()
    legend_outside(figure, loc="outside lower center", ncols=6)
    figure.savefig(path)
