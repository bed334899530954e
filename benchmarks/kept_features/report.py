"""Report the records of `kept_features`: seconds until the end of each epoch, way by way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.reports import goal_line, legend_outside, table
from benchmarks.harness.training.plans import LOSS_TOLERANCE
from benchmarks.kept_features.networks import LEARNING_RATES
from benchmarks.kept_features.runs import Runs
from benchmarks.kept_features.settings import (
    AUTO,
    COMPUTED_EPOCHS,
    COMPUTED_JOBS,
    FIRST_JUDGED,
    HAND,
    LEAST_PAIRS,
    NONE,
    PLAIN,
    RIVAL,
    SWEPT_EPOCHS,
    WAYS,
)
from upriver.report.figure import BLUE, GREY, PALE_BLUE, VERMILION, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL_RATIO = 1.03
"""What the interval of a ratio to the best other way must stay below."""

GOAL_HAND, GOAL_OLD = 1.2, 3.0
"""How many times as fast as by hand, and as version 0.1.0, five epochs must be over the slow link."""

SLOW_MBIT, SLOW_EPOCHS = 20, 5

OLD_S = {"resnet18": 135.8, "vit_tiny": 125.8}
"""Seconds of five epochs over 20 Mbit/s by version 0.1.0, preparation included, with deterministic stages, as
measured on 28 November 2026."""

TITLES = {PLAIN: "DataLoader", HAND: "by hand", NONE: "keep=None", AUTO: 'keep="auto"'}
COLOURS = {PLAIN: GREY, HAND: VERMILION, NONE: PALE_BLUE, AUTO: BLUE}
MARKS = {PLAIN: "s", HAND: "^", NONE: "D", AUTO: "o"}

PANELS = 5
"""Panels in a row of the figure: those of a network."""


# -------------------------------------------------------------------------------------------- verdicts


def verdicts(found: Sequence[Runs]) -> list[str]:
    """Return each goal with where it is met, missed or not judged yet."""
    return [
        _goal(
            f"not behind the best other way from {FIRST_JUDGED} epochs on, and in a sweep of jobs (95 % "
            f"interval of {LEAST_PAIRS} pairs below {GOAL_RATIO})",
            {_name_of(one, end): not_behind(one, end) for one in found for end in one.setting.judged},
        ),
        _goal(
            f"{SLOW_EPOCHS} epochs at {SLOW_MBIT} Mbit/s at least {GOAL_HAND} times as fast as by hand",
            {one.setting.key: _at_least(over_hand(one), GOAL_HAND) for one in slow(found)},
        ),
        _goal(
            f"{SLOW_EPOCHS} epochs at {SLOW_MBIT} Mbit/s at least {GOAL_OLD:g} times as fast as by 0.1.0",
            {
                one.setting.key: _at_least(over_old(one), GOAL_OLD)
                for one in slow(found)
                if one.setting.views is None
            },
        ),
    ]


def _goal(words: str, judged: dict[str, bool | None]) -> str:
    """Return a goal's verdict; None is what cannot be judged yet."""
    left = [key for key, met in judged.items() if met is None]
    return goal_line(words, {key: met for key, met in judged.items() if met is not None}, left)


def not_behind(one: Runs, end: int) -> bool | None:
    """Return whether the interval of a ratio stays below the goal; None with too few pairs."""
    ratio = one.over_best(end)
    return None if ratio is None or ratio.pairs < LEAST_PAIRS else ratio.high < GOAL_RATIO


def slow(found: Sequence[Runs]) -> list[Runs]:
    """Return the settings of one job over the slow link."""
    return [
        one
        for one in found
        if one.setting.mbit == SLOW_MBIT and one.setting.jobs == 1 and one.setting.epochs >= SLOW_EPOCHS
    ]


def over_hand(one: Runs) -> float | None:
    """Return how many times as fast as by hand five epochs are; None with too few pairs."""
    ratio = one.ratio(HAND, AUTO, SLOW_EPOCHS)
    return None if ratio is None or ratio.pairs < LEAST_PAIRS else ratio.middle


def over_old(one: Runs) -> float | None:
    """Return how many times as fast as version 0.1.0 five epochs are; None with too few runs."""
    ours = one.spread(AUTO, SLOW_EPOCHS)
    if ours is None or len(ours.values) < LEAST_PAIRS or one.setting.network not in OLD_S:
        return None
    return OLD_S[one.setting.network] / ours.median


def _at_least(factor: float | None, goal: float) -> bool | None:
    return None if factor is None else factor >= goal


def _name_of(one: Runs, end: int) -> str:
    return f"{one.setting.key} after {end}"


# -------------------------------------------------------------------------------------------- the page


def report(found: Sequence[Runs], name: str) -> str:
    """Return the report as Markdown."""
    unfinished = [f"- {one.setting.key}: {one.missing}" for one in found if one.missing]
    bad = [f"- {line}" for one in found for line in one.not_counted]
    keys = {key for one in found for key in (one.setting.key, one.setting.sweep_key)}
    rows = [row for one in found[:1] for row in one.records.rows.values() if row.get("setting") in keys]
    return TEMPLATE.format(
        verdicts="\n".join(f"- {line}" for line in verdicts(found)),
        pairs=_pairs(found),
        jobs=_horizons([one for one in found if one.setting.jobs == 1], "epochs"),
        sweeps=_horizons([one for one in found if one.setting.jobs > 1], "jobs"),
        slow=_slow(found),
        costs=_costs(found),
        losses=_losses(found),
        forms=_forms(found),
        name=name,
        rates=", ".join(f"{rate:g}" for rate in LEARNING_RATES),
        rival=f"{RIVAL:g}",
        swept=SWEPT_EPOCHS,
        computed=COMPUTED_EPOCHS,
        computed_jobs=COMPUTED_JOBS,
        tolerance=f"{LOSS_TOLERANCE:g}",
        commits=", ".join(sorted({str(row["commit"]) for row in rows})) or "-",
        machine=machine(),
        versions=versions("torch", "torchvision", "pillow"),
        bad="\n".join(bad) or "None.",
        unfinished="\n".join(unfinished) or "None.",
    )


def _place(one: Runs) -> tuple[str, str, str]:
    return one.setting.network, one.setting.link, one.setting.stages


PLACE = ("network", "link", "stages")


def _pairs(found: Sequence[Runs]) -> str:
    """Return how many pairs the settings have, in words."""
    counts = [len(one.ends_s(AUTO, 1).keys() & one.ends_s(HAND, 1).keys()) for one in found]
    return f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else str(min(counts))


def _horizons(found: Sequence[Runs], of: str) -> str:
    """Return the table of the seconds until each end.

    Args:
        of: Word for the ends.
    """
    header = [*PLACE, of, *(f"{TITLES[way]}, s" for way in WAYS), "best other"]
    header += ['keep="auto" / best other', "pairs", "goal"]
    rows = []
    for one, end in _whole(found):
        spreads = [one.spread(way, end) for way in WAYS]
        ratio, best = one.over_best(end), one.best_other(end)
        judged = not_behind(one, end) if end in one.setting.judged else None
        rows.append(
            (
                *_place(one),
                end,
                *("-" if spread is None else spread.text(1) for spread in spreads),
                TITLES[best] if best else "-",
                ratio.text() if ratio else "-",
                ratio.pairs if ratio else 0,
                {True: "met", False: "**missed**", None: "-"}[judged],
            )
        )
    return table(header, rows)


def _whole(found: Sequence[Runs]) -> Iterator[tuple[Runs, int]]:
    """Yield the settings with runs that count, and their horizons."""
    for one in found:
        if any(one.spread(way, 1) for way in WAYS):
            yield from ((one, end) for end in one.setting.horizons)


def _slow(found: Sequence[Runs]) -> str:
    header = ["network", "stages", f"by hand / {TITLES[AUTO]}", f"{TITLES[NONE]} / {TITLES[AUTO]}"]
    header += [f"0.1.0 / {TITLES[AUTO]}", "pairs"]
    rows = []
    for one in slow(found):
        ratios = [one.ratio(way, AUTO, SLOW_EPOCHS) for way in (HAND, NONE)]
        if ratios[0] is None:
            continue
        ours, old = one.spread(AUTO, SLOW_EPOCHS), OLD_S.get(one.setting.network)
        factor = f"{old / ours.median:.2f}" if ours and old and one.setting.views is None else "-"
        cells = [ratio.text() if ratio else "-" for ratio in ratios]
        rows.append((one.setting.network, one.setting.stages, *cells, factor, ratios[0].pairs))
    return table(header, rows)


def _costs(found: Sequence[Runs]) -> str:
    header = ["setting", "way", "MB to training", "MB to storage", "core s, storage", "core s, training"]
    header += ["peak MB, training", "peak MB, its children", "MB of features on disk", "samples from"]
    paths = (
        (1e6, "link_bytes", "from_storage"),
        (1e6, "link_bytes", "from_compute"),
        (1, "cpu_s", "storage"),
        (1, "cpu_s", "compute"),
        (1e6, "peak_bytes", "training"),
        (1e6, "peak_bytes", "children"),
        (1e6, "kept_bytes"),
    )
    rows = []
    for one in found:
        for way in WAYS:
            whole = one.rows(one.label(way), one.setting.ends_of(way))
            if whole:
                figures = (f"{one.figure(way, *path) / unit:.0f}" for unit, *path in paths)
                sources = sources_of(whole[max(whole)].get("from", {}))
                rows.append((one.setting.key, TITLES[way], *figures, sources))
    return table(header, rows)


def sources_of(samples: dict[str, int]) -> str:
    """Return where a job's samples came from, in shares; all servers count as one."""
    shares: dict[str, float] = {}
    for source, count in samples.items():
        name = "server" if "://" in source else source
        shares[name] = shares.get(name, 0.0) + count / sum(samples.values())
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items()) or "-"


def _losses(found: Sequence[Runs]) -> str:
    header = ["setting", "first loss", "last loss", *(f"{TITLES[way]}: equal bits" for way in (AUTO, HAND))]
    header += [f"{TITLES[way]}: furthest" for way in (HAND, PLAIN)]
    rows = []
    for one in found:
        if one.reference is not None and "losses" in one.reference:
            losses = one.reference["losses"]
            equal = ("{} of {}".format(*one.equal_bits(way)) for way in (AUTO, HAND))
            far = (_scientific(one.furthest(way)) for way in (HAND, PLAIN))
            rows.append((one.setting.key, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", *equal, *far))
    return table(header, rows)


def _scientific(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.1e}"


def _forms(found: Sequence[Runs]) -> str:
    """Return the seconds of the sweep of forms, each sweep once."""
    rows, seen = [], set()
    for one in found:
        if one.setting.sweep_key in seen or one.unswept:
            continue
        seen.add(one.setting.sweep_key)
        for label in one.forms:
            row = one.row(label, 0)
            if row is not None and "ends_s" in row:
                rows.append((one.setting.sweep_key, label, *(f"{each:.1f}" for each in row["ends_s"])))
    return table(("sweep", "form, workers", *(f"{n + 1} epochs, s" for n in range(SWEPT_EPOCHS))), rows)


TEMPLATE = """# Features that are kept, by upriver and by hand

**Claim.** With `keep="auto"` a fine-tuning job is not behind the best of all other ways from three epochs on:
an ordinary `DataLoader` loop, features kept by hand, and upriver with `keep=None`. Five epochs at 20 Mbit/s
are at least 1.2 times as fast as by hand, and 3 times as fast as version 0.1.0. Four jobs of three epochs,
one after the other with other heads and learning rates, count as one job.

{verdicts}

Pairs of `keep="auto"` and by hand that were run and count: {pairs} in each setting, of five.

![Seconds until the end of each epoch]({name}.png)

## One job

Seconds from the start of the script to the end of an epoch, median (lowest to highest). The ratio is the
geometric mean (95 % interval by Student's t on logarithms) over the repeats that both ways have.

{jobs}

## Four jobs, one after the other

Seconds until the end of each job, with what closing it takes; starts and imports between the jobs aside.

{sweeps}

## Five epochs at 20 Mbit/s

How many times as long the others take. Version 0.1.0 took 135.8 s with ResNet-18 and 125.8 s with ViT-tiny:
measured on 28 November 2026, once, by others, with batches of 32, on other JPEG files of 111 to 338 KB, and
with other work on the machine. `keep=None` beside it is the same work as ours.

{slow}

## What it costs

Medians of whole runs. Memory is the largest resident memory of the training process, and the sum over its
children of theirs: shared pages count in each, and so do those of mapped files. Samples are of the last run.

{costs}

## What was learned

A run of `keep="auto"` counts only if each loss is bit for bit that of the first run of `keep=None`; one by
hand or of the `DataLoader` if each is within {tolerance} of it. Furthest is the largest relative difference.

{losses}

## How it was measured

- Two network namespaces with a link shaped both ways: a server and an object store on one core, training
  with all of its processes on the other, one thread each. What uses no server leaves its core idle but for
  the object store.
- ResNet-18 is frozen through `layer4.0`, ViT-tiny through the tenth of twelve layers; random weights. 300
  JPEG files of about 110 KB, batches of 64, plain SGD. Deterministic stages resize and crop; with views a
  random crop and flip draw by the epoch modulo 4, in every way alike.
- **The clock starts** when everything is imported, PyTorch's tracer for upriver included, and the fork
  server of the `DataLoader`'s workers runs. Opening the store, indexing the dataset and building the model
  are in the time. All caches are cold: a new server, a store that holds the samples alone, an empty
  `$UPRIVER_CACHE`. Files of photographs are in the storage host's memory.
- **DataLoader**: the whole model in an ordinary loop, which reads whole batches with joined reads.
- **By hand**: while a view is new, workers decode micro-batches of 16, the frozen part runs on them without
  gradients, and the tail trains on the features at once; one pass of the loader covers all new views, so that
  the link does not rest between epochs. Later epochs take features from memory, or from memory-mapped files
  if those were faster in the sweep. Jobs one after the other share the files.
- **Upriver** has its defaults, and is not told the number of epochs.
- Workers and form are the fastest after {swept} epochs in a sweep with another seed and deterministic
  stages, which settings of the same network and link share. Files have the workers that are best for memory.
- The `DataLoader` and `keep=None` compute each epoch anew, so their runs end after {computed} epochs, or
  after {computed_jobs} of four jobs. Losses are compared as far as those of `keep=None` go.
- The first repeat has all ways, each further one `keep="auto"` and by hand in turns, and any other way up to
  the last judged epoch at which its first run took at most {rival} times the best other's.
- Four jobs have learning rates of {rates}, and a new head each.
- Commits {commits}. {machine}. {versions}.

The sweep, each once:

{forms}

Runs that do not count:

{bad}

Settings that are not finished:

{unfinished}

## What it does not show

Accelerators; links with a long round trip; features that do not fit in memory; several jobs at once; more
than one server.

Run it again: `python -m benchmarks.kept_features`.
"""


# -------------------------------------------------------------------------------------------- the plot


def plot(found: Sequence[Runs], path: Path) -> None:
    """Plot the seconds until the end of each epoch, or job, a panel for each setting."""
    columns = min(PANELS, len(found))
    rows = -(-len(found) // columns)
    figure = new_figure(3.0 * columns, 1.0 + 2.8 * rows, "Seconds from the start of the script")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one, axes in zip(found, panels, strict=False):
        _panel(one, axes)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    legend_outside(figure, loc="outside lower center", ncols=len(WAYS))
    figure.savefig(path)


def _panel(one: Runs, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator  # as late as the figure itself

    ends = range(1, one.setting.ends + 1)
    for way in WAYS:
        seconds = [spread.median if (spread := one.spread(way, end)) else math.nan for end in ends]
        axes.plot(ends, seconds, marker=MARKS[way], markersize=3, color=COLOURS[way], label=TITLES[way])
    jobs = f", {one.setting.jobs} jobs" if one.setting.jobs > 1 else ""
    axes.set_title(f"{one.setting.network}, {one.setting.link}\n{one.setting.stages}{jobs}", fontsize=8)
    axes.set(xlabel="epochs" if one.setting.jobs == 1 else "jobs", ylabel="s")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
