"""Report the records of `device_mix`: each plan's epoch over the better of the two extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.reports import legend_outside, table
from benchmarks.harness.slowed import way
from benchmarks.harness.training.plans import LOADER, Setting, short, so_far
from benchmarks.harness.training.ways import PLAIN, Ways, commits_of
from upriver.report.figure import new_figure

PUSH = "freeze"
"""The policy that pushes all frozen work to the server."""

SINGLE = "exhaustive"
"""The policy that takes the single cut with the shortest predicted epoch."""

POLICIES = ("upriver", PUSH, SINGLE)
TITLES = {"upriver": "`upriver`", PUSH: "full push", SINGLE: "best single cut", PLAIN: "plain"}

GOAL = 1.05
PAYS = 0.95
"""A mix pays where its predicted epoch takes at most this share of both extremes' predicted epochs."""


class Mix(Ways):
    """A setting and its records, with what was predicted of its ways."""

    policies = POLICIES
    forms = (f"{LOADER}0x2", f"{LOADER}1x2")

    @property
    def sweep(self) -> tuple[str, ...]:
        """Return the forms of the loop to search: a third one where a side has several cores."""
        setting = self.setting
        many = (f"{LOADER}{setting.cores}x2",) if setting.cores > 2 else ()
        return (*self.forms, *many)

    def predicted_s(self, name: str) -> float:
        """Return the predicted seconds of a way's epoch; infinite where it does not fit.

        Those of the plain way are of the cut that offloads nothing.
        """
        plan = self.found.plan
        assert plan is not None
        cost = plan["predicted"][self.unsplit] if name == PLAIN else plan["plans"][name]["predicted"]
        return math.inf if cost is None else float(cost["epoch_s"])

    @property
    def pays(self) -> bool:
        """Return whether the plan is predicted to be clearly ahead of both extremes."""
        return self.predicted_s("upriver") <= PAYS * min(self.predicted_s(PLAIN), self.predicted_s(PUSH))

    @property
    def better_s(self) -> float:
        """Return the seconds of the better of the two extremes, of those with enough runs that count."""
        return min(
            (each.median for name in (PLAIN, PUSH) if (each := self.seconds(name)) is not None),
            default=math.inf,
        )

    @property
    def ratio(self) -> float:
        """Return the plan's seconds over those of the better extreme; infinite if too few runs count."""
        seconds, plain = self.seconds("upriver"), self.seconds(PLAIN)
        return math.inf if seconds is None or plain is None else seconds.median / self.better_s

    @property
    def exactness(self) -> str:
        """Return how exact the features of a server were, as the runs of the full push say."""
        rows = self.rows(self.ways[PUSH] or "")
        return str(rows[0]["exactness"]) if rows else "-"


def verdict(done: Sequence[Mix], declared: int) -> str:
    """Return the goals in two sentences, over the finished ones of the declared settings."""
    ratios, paying = [one.ratio for one in done], [one for one in done if one.pays]
    ahead = sum(one.ratio < 1 for one in paying)
    return (
        f"{_held(max(ratios) <= GOAL)}{so_far(len(done), declared)}: an epoch by `upriver`'s plan takes "
        f"{min(ratios):.2f} to {max(ratios):.2f} times the better of the plain way and the full push "
        f"(goal at most {GOAL}). {_held(ahead == len(paying))}: it is ahead of both in {ahead} of "
        f"{len(paying)} settings where that is predicted by {100 * (1 - PAYS):.0f} % or more."
    )


def _held(held: bool) -> str:
    return "Met" if held else "Missed"


def mix_of(setting: Setting) -> str:
    """Return the mix in words."""
    if setting.one_device:
        return f"server {setting.server_speed:g}, trainer {setting.client_speed:g} of a core"
    return f"server {setting.server_device}, trainer {setting.client_device}"


def _name(setting: Setting) -> list[str]:
    link = "no limit" if setting.mbit is None else f"{setting.mbit:g} Mbit/s"
    return [setting.network, link, mix_of(setting)]


NAMES = ("network", "link", "mix")


def report(found: Sequence[Mix], name: str) -> str:
    """Return the report as Markdown."""
    done = [one for one in found if not one.missing]
    ways = (*POLICIES, PLAIN)
    titles = [TITLES[each] for each in ways]

    def spread(seconds: Spread | None) -> str:
        return "-" if seconds is None else seconds.text()

    def predicted(one: Mix, each: str) -> str:
        seconds = one.seconds(each)
        measured = "-" if seconds is None else f"{seconds.median:.2f}"
        return f"{one.predicted_s(each):.2f} / {measured}"

    seconds = [
        [*_name(one.setting), *(spread(one.seconds(each)) for each in ways), f"{one.ratio:.2f}"]
        for one in done
    ]
    foreseen = [
        [*_name(one.setting), *(predicted(one, each) for each in ways), "yes" if one.pays else "no"]
        for one in done
    ]
    chosen = [[*_name(one.setting), *(short(one.ways[each]) for each in ways), one.exactness] for one in done]
    unfinished = [f"- {one.setting.key}: {one.missing}" for one in found if one.missing]
    emulated = not found or found[0].setting.one_device
    tolerance = "" if emulated else f"{found[0].setting.loss_tolerance:g}"
    return TEMPLATE.format(
        verdict=verdict(done, len(found)) if done else "Nothing is finished yet.",
        seconds=table((*NAMES, *titles, "`upriver` / better extreme"), seconds),
        predicted=table((*NAMES, *titles, "ahead by 5 %"), foreseen),
        chosen=table((*NAMES, *titles, "exactness"), chosen),
        sides=EMULATED.format(way=way()) if emulated else DEVICES,
        exactly=BITWISE if emulated else NUMERIC.format(tolerance=tolerance),
        bad="\n".join(f"- {line}" for one in found for line in one.not_counted) or "None.",
        unfinished="\n".join(unfinished) or "None.",
        name=name,
        repeats=found[0].setting.repeats,
        commits=commits_of(found),
        machine=machine() + accelerator(found),
        versions=versions("torch", "torchvision", "pillow"),
        device="" if emulated else " --device cuda",
    )


def accelerator(found: Sequence[Mix]) -> str:
    """Return the name of the accelerator that some settings compute on, behind a comma."""
    import torch

    used = any(not one.setting.one_device for one in found) and torch.cuda.is_available()
    return f", {torch.cuda.get_device_name()}" if used else ""


EMULATED = """- Two network namespaces with a link shaped both ways; server and object store on core 0,
  training on core 1, one thread each. A share below 1 slows the server's or the training process and their
  children, {way}. The object store keeps its core."""

DEVICES = """- Server and object store on four cores, training on four others, on one machine. Limits of the
  link need two network namespaces; without a limit both sides use the loopback device. `cuda` is the device
  of the server's workers, or of the whole model that is trained; input stages run on processors."""

BITWISE = """A run of upriver counts only if its losses are bit for bit those of the run that is not split,
  and every micro-batch ran where the plan says; one of the plain way if each loss is within 0.0001 of it."""

NUMERIC = """Two devices never give the same bits, so `exact="auto"` accepts a tolerance for features; the
  last column of the choices says which. A run counts only if each loss is within {tolerance} of that of the
  run that is not split, and every micro-batch ran where the plan says."""

TEMPLATE = """# A fast and a slow side

**Claim.** With a fast trainer and a slow server, or the reverse, an epoch by `upriver`'s plan takes at most
1.05 times the better of two extremes: the plain way, and all frozen work on the server (full push). Where
the cost model predicts a gain of 5 % over both, the plan is ahead of both.

**{verdict}**

Seconds of an epoch, median (lowest to highest) of {repeats} repeats in turns:

{seconds}

What was chosen (a cut, shares of several, or the loader's workers x prefetch factor):

{chosen}

Predicted / measured seconds; the plain way's prediction is that of the cut that offloads nothing:

{predicted}

![Seconds over those of the better extreme]({name}.png)

## How it was measured

{sides}
- **Plain way**: the whole model in a loop over `DataLoader`, which reads whole batches from the same object
  store with the same joined reads and input stages, with the best number of workers of one epoch each.
- **Policies** choose from one measurement by the running system, and keep their plan. The best single cut is
  the one with the shortest predicted epoch.
- Seconds are those of a whole epoch, from the first request to the last optimizer step. Warm: worker
  processes, programs, tail. All ways of a setting take turns. Random weights; JPEG files of about 110 KB.
- {exactly}
- Commits {commits}. {machine}. {versions}.

Runs that do not count:

{bad}

Settings that are not finished:

{unfinished}

## What it does not show

Replanning while a job runs; several servers or jobs at once; links with a long round trip.

Run it again: `python -m benchmarks.device_mix{device}`.
"""


def plot(found: Sequence[Mix], path: Path) -> None:
    """Plot each way's seconds over those of the better extreme, a group of points for each setting."""
    done = [one for one in found if not one.missing]
    figure = new_figure(
        9.0, 2.0 + 0.5 * max(len(done), 1), "Seconds of an epoch over those of the better extreme"
    )
    axes = figure.subplots()
    for at, (mark, each) in enumerate(zip("osD^", (*POLICIES, PLAIN), strict=True)):
        spreads = [(row, one.seconds(each), one.better_s) for row, one in enumerate(done)]
        there = [(row + 0.12 * (at - 1.5), s.median / better) for row, s, better in spreads if s is not None]
        axes.plot(
            [ratio for _, ratio in there],
            [row for row, _ in there],
            mark,
            label=TITLES[each].strip("`"),
            alpha=0.8,
        )
    axes.axvline(GOAL, color="black", linewidth=0.8, linestyle="--", label=f"goal: at most {GOAL}")
    axes.set_yticks(range(len(done)), [", ".join(_name(one.setting)) for one in done])
    axes.set(xscale="log", xlabel="times the better of plain way and full push")
    axes.invert_yaxis()
    legend_outside(figure, loc="outside lower center", ncols=5)
    figure.savefig(path)
