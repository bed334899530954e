"""Report the records of `first_batch`: seconds until the first batch, and the time of short jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.first_batch.settings import (
    BOTH,
    COLD,
    DEFAULT,
    FOREGROUND,
    LIMIT_S,
    LOADER,
    SWEPT_EPOCHS,
    UNSPLIT,
    WARM,
    Setting,
    run_key,
)
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Records
from benchmarks.harness.reports import table
from benchmarks.harness.training.plans import LOSS_TOLERANCE, alike, so_far
from upriver.report.figure import BLUE, GREY, PALE_BLUE, VERMILION, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL_S = {COLD: 5.0, WARM: 2.0}
"""Most seconds until the first batch, by the state of the caches."""

GOAL_RATIO = 1.05
"""Most time of a short job, over that of the plain loop."""

TITLES = {
    DEFAULT: "upriver",
    FOREGROUND: "upriver, in_background=False",
    LOADER: "DataLoader",
    UNSPLIT: "upriver, nosplit",
}

PALE_VERMILION = "#f0b288"


@dataclass(frozen=True)
class Runs:
    """A setting and its records."""

    setting: Setting
    records: Records

    @property
    def reference(self) -> dict[str, Any] | None:
        """Return the run without a split, whose losses are the reference."""
        return self.records.rows.get(run_key(self.setting, UNSPLIT, 0))

    def row(self, label: str, repeat: int) -> dict[str, Any] | None:
        """Return a record; None if there is none by the code of the reference."""
        row, reference = self.records.rows.get(run_key(self.setting, label, repeat)), self.reference
        return row if row is not None and reference is not None and row["code"] == reference["code"] else None

    def why_not(self, label: str, repeat: int) -> str | None:
        """Return why a run does not count: empty when it does, None when it does not exist."""
        row, reference = self.row(label, repeat), self.reference
        if row is None or reference is None:
            return None
        if "error" in row:
            return f"failed: {row['error']}"
        if "error" in reference:
            return "no reference"
        losses, wanted = row["losses"], reference["losses"]
        if self.setting.epochs is None or repeat == 0:  # of runs that end early, what both did
            steps = min(len(losses), len(wanted))
            losses, wanted = losses[:steps], wanted[:steps]
        same = alike(losses, wanted) if label.startswith(LOADER) else losses == wanted
        if not losses or not same:
            return "other losses"
        if self.setting.forced and label.startswith(DEFAULT) and not (row["begun"] and row["remote"]):
            return "not prepared in the background, or no sample came through the server"
        return ""

    def rows(self, label: str) -> list[dict[str, Any]]:
        """Return the repeats that count."""
        found = [self.row(label, n) for n in self.setting.measured if self.why_not(label, n) == ""]
        return [row for row in found if row is not None]

    @cached_property
    def loaders(self) -> tuple[str, ...]:
        """Return the plain loop's best forms: the fastest after one epoch, and the fastest after the sweep.

        Empty before the sweep has ended, or if no form counts.
        """
        sweep = self.setting.sweep
        if len(sweep) == 1:
            return sweep
        counting = [label for label in sweep if self.why_not(label, 0) == ""]
        if not counting or any(self.why_not(label, 0) is None for label in sweep):
            return ()
        seconds = {label: row["epochs_s"] for label in counting if (row := self.row(label, 0)) is not None}
        lengths = range(min(map(len, seconds.values())))
        best = (min(seconds, key=lambda label: seconds[label][epoch]) for epoch in lengths)
        return tuple(dict.fromkeys(best))

    @property
    def labels(self) -> list[str]:
        """Return the labels of the runs that take turns."""
        return [*self.setting.ways, *self.loaders]

    @cached_property
    def missing(self) -> str:
        """Return how much is still missing, or an empty text when the setting is finished."""
        if self.reference is None:
            return "not begun"
        if len(self.setting.sweep) > 1 and any(self.why_not(each, 0) is None for each in self.setting.sweep):
            return "the loader's sweep is not done"
        wanted = [(label, repeat) for label in self.labels for repeat in self.setting.measured]
        there = sum(self.why_not(*each) is not None for each in wanted)
        return f"{there} of {len(wanted)} repeats run" if there < len(wanted) else ""

    @property
    def not_counted(self) -> list[str]:
        """Return the runs that do not count, and why."""
        labels = dict.fromkeys((UNSPLIT, *self.setting.sweep, *self.labels))
        return [
            f"{self.setting.key}, {label}, {repeat}: {why}"
            for label in labels
            for repeat in (0, *self.setting.measured)
            if (why := self.why_not(label, repeat))
        ]

    def at(self, label: str, event: str) -> Spread | None:
        """Return the seconds until an event, of the repeats in which it happened; None if not all count."""
        rows = self._all(label)
        seconds = [row["at_s"][event] for row in rows if event in row["at_s"]]
        return Spread.of(seconds) if seconds else None

    def total(self, label: str, epochs: int) -> Spread | None:
        """Return the seconds until the end of an epoch, from 1; None if not all repeats count."""
        rows = self._all(label)
        return Spread.of(row["epochs_s"][epochs - 1] for row in rows) if rows else None

    def plain(self, epochs: int) -> tuple[str, Spread] | None:
        """Return the plain loop's best form for that many epochs, and its seconds."""
        found = [(label, spread) for label in self.loaders if (spread := self.total(label, epochs))]
        return min(found, key=lambda each: each[1].median) if found else None

    def ratio(self, label: str, epochs: int) -> float:
        """Return the median of the seconds over the plain loop's; infinite if one of the two failed."""
        ours, plain = self.total(label, epochs), self.plain(epochs)
        return math.inf if ours is None or plain is None else ours.median / plain[1].median

    def figure(self, label: str, *path: str) -> Spread | None:
        """Return another figure of the repeats, by its path in the record."""
        values = []
        for row in self._all(label):
            value: Any = row
            for part in path:
                value = value.get(part, {}) if isinstance(value, dict) else {}
            values += [value] if isinstance(value, int | float) else []
        return Spread.of(values) if values else None

    def _all(self, label: str) -> list[dict[str, Any]]:
        """Return the repeats if all of them count."""
        rows = self.rows(label)
        return rows if len(rows) == self.setting.repeats else []


def title(label: str) -> str:
    """Return a way in words."""
    way, _, detail = label.partition(" ")
    if way == LOADER:
        return f"{TITLES[way]}, {detail} worker{'s' * (detail != '1')}"
    return f"{TITLES[way]}, {detail}" if detail else TITLES[way]


# -------------------------------------------------------------------------------------------- verdicts


def latest(done: Sequence[Runs], label: str) -> float:
    """Return the largest median of the seconds until the first batch; infinite if the way failed."""
    spreads = [one.at(label, "first batch") for one in done]
    return max(spread.median if spread is not None else math.inf for spread in spreads)


def first_verdict(found: Sequence[Runs]) -> str:
    """Return whether the first batch comes soon enough."""
    asked = [one for one in found if one.setting.epochs is None]
    done = [one for one in asked if not one.missing]
    if not done:
        return "Nothing is finished yet of the first batch."
    ours = {cache: latest(done, f"{DEFAULT} {cache}") for cache in GOAL_S}
    before = {cache: latest(done, f"{FOREGROUND} {cache}") for cache in GOAL_S}
    held = "Met" if all(ours[cache] <= goal for cache, goal in GOAL_S.items()) else "Missed"
    return (
        f"{held}{so_far(len(done), len(asked))}: the first batch of {len(done)} networks comes "
        f"{ours[COLD]:.2f} s after the call at most with cold caches (goal {GOAL_S[COLD]:g}) and "
        f"{ours[WARM]:.2f} s with warm ones (goal {GOAL_S[WARM]:g}); prepared before it, after "
        f"{before[COLD]:.2f} and {before[WARM]:.2f} s; in a `DataLoader` loop, after "
        f"{latest(done, f'{LOADER} 0'):.2f} s."
    )


def ratios(found: Sequence[Runs]) -> list[float]:
    """Return the time of every finished short job over the plain loop's."""
    return [
        one.ratio(label, epochs)
        for one in found
        if one.setting.epochs is not None and not one.missing
        for label in one.setting.ways
        for epochs in range(1, one.setting.epochs + 1)
    ]


def short_verdict(found: Sequence[Runs]) -> str:
    """Return whether short jobs keep up with the plain loop."""
    asked = [one for one in found if one.setting.epochs is not None]
    done = [one for one in asked if not one.missing]
    each = ratios(done)
    if not each:
        return "Nothing is finished yet of short jobs."
    held = "Met" if max(each) <= GOAL_RATIO else "Missed"
    return (
        f"{held}{so_far(len(done), len(asked))}: jobs of 1 to {max(one.setting.epochs or 0 for one in done)} "
        f"epochs take {min(each):.2f} to {max(each):.2f} times as long as a `DataLoader` loop (goal at most "
        f"{GOAL_RATIO:g}), over {len(done)} links with cold and warm caches."
    )


# -------------------------------------------------------------------------------------------- the page


def report(found: Sequence[Runs], name: str) -> str:
    """Return the report as Markdown."""
    unfinished = [f"- {one.setting.key}: {one.missing}" for one in found if one.missing]
    bad = [f"- {line}" for one in found for line in one.not_counted]
    rows = [row for one in found for row in one.records.rows.values() if row["setting"] == one.setting.key]
    return TEMPLATE.format(
        first_verdict=first_verdict(found),
        short_verdict=short_verdict(found),
        first=_first(found),
        costs=_costs(found),
        short=_short(found),
        sweep=_sweep(found),
        name=name,
        limit=f"{LIMIT_S:g}",
        swept=SWEPT_EPOCHS,
        tolerance=f"{LOSS_TOLERANCE:g}",
        commits=", ".join(sorted({str(row["commit"]) for row in rows})) or "-",
        machine=machine(),
        versions=versions("torch", "torchvision", "transformers"),
        bad="\n".join(bad) or "None.",
        unfinished="\n".join(unfinished) or "None.",
    )


def _text(spread: Spread | None, *, of: int, digits: int = 2) -> str:
    """Return a spread as text, with the number of its repeats if it has fewer than ``of``."""
    if spread is None:
        return "-"
    few = "" if len(spread.values) == of else f", {len(spread.values)} of {of}"
    return spread.text(digits) + few


def _first(found: Sequence[Runs]) -> str:
    events = ("returned", "first batch", "first step", "first remote")
    header = ("network", "link", "cores", "way", *(f"{event}, s" for event in events), "begun at once")
    rows = []
    for one in found:
        for label in one.labels:
            if not (counting := one.rows(label)):
                continue
            seconds = (_text(one.at(label, event), of=one.setting.repeats) for event in events)
            begun = sum(row.get("begun", False) for row in counting)
            at_once = "-" if label.startswith(LOADER) else f"{begun} of {len(counting)}"
            setting = one.setting
            rows.append((setting.title, setting.link, setting.cores, title(label), *seconds, at_once))
    return table(header, rows)


def _costs(found: Sequence[Runs]) -> str:
    header = ["network", "way", "core s to first batch", "to the end", "preparing process, core s"]
    header += ["seconds", "peak MB, training", "peak MB, preparing"]
    rows = []
    for one in found:
        if one.setting.epochs is not None:
            continue
        for label in one.labels:
            seconds = [
                one.figure(label, *path)
                for path in (("cpu_s", "first batch"), ("cpu_s", "end"), ("preparing_cpu_s",), ("seconds",))
            ]
            peaks = [one.figure(label, "pss", which) for which in ("training", "preparing")]
            megabytes = [Spread.of(v / 1e6 for v in peak.values) if peak else None for peak in peaks]
            cells = [_text(each, of=one.setting.repeats, digits=1) for each in seconds]
            cells += [_text(each, of=one.setting.repeats, digits=0) for each in megabytes]
            rows.append((one.setting.title, title(label), *cells))
    return table(header, rows)


def _short(found: Sequence[Runs]) -> str:
    header = ["link", "epochs", "DataLoader, s", "workers"]
    header += [f"{cache}{what}" for cache in (COLD, WARM) for what in (", s", ", ratio", ", remote")]
    rows = []
    for one in found:
        for epochs in range(1, (one.setting.epochs or 0) + 1):
            if (plain := one.plain(epochs)) is None:
                continue
            cells = []
            for cache in (COLD, WARM):
                label = f"{DEFAULT} {cache}"
                ours, remote = one.total(label, epochs), one.figure(label, "remote")
                cells += [
                    _text(ours, of=one.setting.repeats),
                    f"{one.ratio(label, epochs):.2f}" if ours else "-",
                ]
                last = epochs == one.setting.epochs and remote is not None
                cells.append(f"{remote.median:.0%}" if last and remote else "")
            workers = plain[0].removeprefix(f"{LOADER} ")
            rows.append((one.setting.link, epochs, plain[1].text(), workers, *cells))
    return table(header, rows)


def _sweep(found: Sequence[Runs]) -> str:
    rows = []
    for one in found:
        for label in one.setting.sweep if len(one.setting.sweep) > 1 else ():
            row = one.row(label, 0)
            if row is not None and "epochs_s" in row:
                rows.append((one.setting.link, title(label), *(f"{each:.2f}" for each in row["epochs_s"])))
    return table(("link", "way", *(f"{n + 1} epochs, s" for n in range(SWEPT_EPOCHS))), rows)


TEMPLATE = """# How soon a job begins, and what a short one takes

**Claim.** On two cores a fine-tuning job has its first batch within 5 s of the call of `finetune()` with cold
caches, and within 2 s with warm ones. Short jobs take no more than 1.05 times as long as an ordinary PyTorch
loop, from the first epoch on. Judged by medians: the largest one of the networks, and the largest ratio of
all links, lengths and caches.

**{first_verdict}**

**{short_verdict}**

![Seconds until the first batch, and the time of short jobs]({name}.png)

## Until the first batch

Seconds since the call of `finetune()`, median (lowest to highest). *Returned*: `finetune()` has returned.
*First batch*: the first features and targets are there. *First step*: the optimizer has stepped. *First
remote*: the first training batch with samples from a server. *Begun at once*: runs in which `finetune()`
returned before the frozen part was captured.

{first}

What that costs, where a run ends with the first batch from a server or after {limit} s: processor seconds of
the training process and of the process that prepares the job, and the peaks of their memory (PSS).

{costs}

## Short jobs

Seconds from the call of `finetune()`, or from the making of the `DataLoader`, to the end of each epoch of one
run. *Remote*: the share of all samples that came through the server.

{short}

## How it was measured

- Two network namespaces with a link shaped both ways: a server and an object store on one, training on the
  other, in a fresh process for each run.
- **Until the first batch**: both sides share the machine's two cores, two threads each, so what the server
  computes is taken from the training. Batches of 16 samples: one micro-batch. Over 200 Mbit/s.
- **Short jobs**: ResNet-18 on 300 JPEG files of about 110 KB, batches of 32; the server on one core, training
  with its preparing process on the other, one thread each, as in `speedup`.
- Random weights. ResNet-18 is frozen through `layer4.0`, the Transformers up to their last two encoder
  layers. BERT reads 128 tokens a sample. Plain SGD trains the rest.
- **Upriver** has its defaults but for `keep=None`, so that each epoch computes its features. With
  `in_background=False` everything is captured, proven, measured and planned before `finetune()` returns.
- **Cold**: an empty `$UPRIVER_CACHE`, a server that has just started, and no program in the store. **Warm**:
  all three as an earlier run of the job left them. Before each run the hosts come to rest.
- **The clock starts** when torch and upriver are imported, the model and its optimizer are built, and the
  dataset is indexed. The modules that `finetune()` itself imports are in the time.
- **DataLoader**: the whole model in an ordinary loop, which reads whole batches from the same object store
  with the same joined reads and input stages. Its first batch is there when the last frozen module has
  returned. The fork server of its workers runs, with all imports, before the clock starts. For short jobs the
  number of workers is the best of 0, 1 and 2 after one epoch and after {swept}, in the sweep below; the
  better one counts for each length.
- A run of upriver counts only if each loss is bit for bit that of the job without a split; one of the
  `DataLoader` if each is within {tolerance} of it. Runs that end early are compared as far as both went. All
  ways of a setting take turns.
- Commits {commits}. {machine}. {versions}.

The sweep, each once:

{sweep}

Runs that do not count:

{bad}

Settings that are not finished:

{unfinished}

## What it does not show

Accelerators; links with a long round trip; a training host with more cores than the training needs, where
preparing takes nothing away; a storage host with cores of its own in the first part.

Run it again: `python -m benchmarks.first_batch`.
"""


# -------------------------------------------------------------------------------------------- the plot


def plot(found: Sequence[Runs], path: Path) -> None:
    """Plot the seconds until the first batch, and the time of short jobs over the plain loop's."""
    heading = "Left: how soon a job has its first batch. Right: what jobs of a few epochs take."
    figure = new_figure(11.0, 5.0, heading)
    left, right = figure.subplots(1, 2)
    _plot_first([one for one in found if one.setting.epochs is None and not one.missing], left)
    _plot_short([one for one in found if one.setting.epochs is not None and not one.missing], right)
    figure.savefig(path)


def _plot_first(done: Sequence[Runs], axes: Axes) -> None:
    colours = dict(zip(BOTH, (BLUE, VERMILION, PALE_BLUE, PALE_VERMILION), strict=True))
    labels = list(dict.fromkeys(label for one in done for label in one.labels))
    width = 0.8 / max(len(labels), 1)
    for number, label in enumerate(labels):
        spreads = [(at, one.at(label, "first batch")) for at, one in enumerate(done)]
        bars = [(at, spread.median) for at, spread in spreads if spread is not None]
        places = [at + width * (number - (len(labels) - 1) / 2) for at, _ in bars]
        drawn = axes.bar(
            places, [height for _, height in bars], width, label=title(label), color=colours.get(label, GREY)
        )
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    for cache, style in ((COLD, "--"), (WARM, ":")):
        axes.axhline(
            GOAL_S[cache], color="black", linewidth=0.8, linestyle=style, label=f"goal, {cache} caches"
        )
    axes.set_xticks(range(len(done)), [one.setting.title for one in done])
    axes.set(ylabel="until the first batch (s)", xlabel="network, both hosts on two cores")
    legend_above(axes, ncols=2)


def _plot_short(done: Sequence[Runs], axes: Axes) -> None:
    for one, colour in zip(done, (BLUE, VERMILION, GREY), strict=False):
        lengths = range(1, (one.setting.epochs or 0) + 1)
        for label in one.setting.ways:
            style = "-o" if label.endswith(COLD) else "--s"
            ratios = [one.ratio(label, epochs) for epochs in lengths]
            axes.plot(
                lengths, ratios, style, color=colour, label=f"{one.setting.link}, {label.split()[-1]} caches"
            )
    axes.axhline(GOAL_RATIO, color="black", linewidth=0.8, linestyle="--", label="goal: at most 1.05")
    axes.set_xticks(range(1, max((one.setting.epochs or 1 for one in done), default=1) + 1))
    axes.set(
        xlabel="epochs of 300 samples, a core for each host",
        ylabel="seconds over the DataLoader's (below 1: sooner)",
    )
    axes.set_ylim(bottom=0)
    legend_above(axes, ncols=2)
