"""Report `plain`: the rows and their validity, the tables, the text and the plot."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import Spread
from benchmarks.harness.reports import table
from benchmarks.plain.sides import LEARNING_RATE, Epoch
from upriver.report.figure import legend_above, new_figure
from upriver.types import DEFAULT_MICRO_BATCH

LOSS_TOLERANCE = 1e-3
"""Relative tolerance. Frozen layers see 16 samples at once on one side and a whole batch on the other, so low
bits may differ. Adam's first steps have one size for gradients of any size, and carry that into the weights.
"""

OURS, THEIRS = "plain way", "DataLoader"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements of one setting: the tried options, the best one, and the epochs with the best one."""

    rate_mbit: float | None
    cores: int
    sweep: Mapping[str, Mapping[str, float]]
    best: Mapping[str, str]
    epochs: Mapping[str, Sequence[Epoch]]

    @property
    def name(self) -> str:
        """Return the name of the setting."""
        link = f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit else "unshaped"
        return f"{link}, {self.cores} core{'s' * (self.cores > 1)}"

    @property
    def pairs(self) -> list[tuple[Epoch, Epoch]]:
        """Return pairs of epochs that ran next to each other: ours, theirs."""
        return list(zip(self.epochs[OURS], self.epochs[THEIRS], strict=True))

    @property
    def ratio(self) -> Spread:
        """Return their seconds over ours."""
        return Spread.of(theirs.wall_s / ours.wall_s for ours, theirs in self.pairs)

    def spread(self, side: str, figure: str) -> Spread:
        """Return one figure of the epochs of a side."""
        return Spread.of(getattr(epoch, figure) for epoch in self.epochs[side])

    @property
    def loss_difference(self) -> float:
        """Return the largest loss difference of any step, relative to theirs."""
        steps = [step for a, b in self.pairs for step in zip(a.losses, b.losses, strict=True)]
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in steps)

    @property
    def why_not(self) -> str:
        """Return why the row does not count, or an empty text if it does."""
        if any(Counter(ours.ids) != Counter(theirs.ids) for ours, theirs in self.pairs):
            return "other samples"
        if any((ours.ids, ours.targets) != (theirs.ids, theirs.targets) for ours, theirs in self.pairs):
            return "another order, or other targets"
        return "" if self.loss_difference <= LOSS_TOLERANCE else "other losses"

    @property
    def verdict(self) -> str:
        """Return the verdict, which depends on whether all repeats agree."""
        if self.why_not:
            return f"does not count: {self.why_not}"
        low, high = min(self.ratio.values), max(self.ratio.values)
        return "faster" if low > 1 else "slower" if high < 1 else "equal within the noise"

    def bound_s(self, work_s: float, num_bytes: float) -> float:
        """Return the seconds of the busier of link and cores, if it were never idle."""
        link_s = num_bytes * 8 / (self.rate_mbit * 1e6) if self.rate_mbit else 0.0
        return max(link_s, work_s / self.cores)


def report(
    rows: Sequence[Row],
    work_s: float,
    num_bytes: float,
    facts: Mapping[str, str],
    options: argparse.Namespace,
) -> str:
    """Return the whole report, in Markdown."""
    times, costs, tried, repeats = [], [], [], []
    for row in rows:
        bound = row.bound_s(work_s, num_bytes)
        wall = {side: row.spread(side, "wall_s") for side in (OURS, THEIRS)}
        cpu = {side: row.spread(side, "cpu_s") for side in (OURS, THEIRS)}
        moved = {side: row.spread(side, "link_bytes").median / 1e6 for side in (OURS, THEIRS)}
        times.append((row.name, wall[OURS].text(), wall[THEIRS].text(), row.ratio.text(), row.verdict))
        shares = [f"{bound / wall[side].median:.2f}" for side in (OURS, THEIRS)]
        megabytes = [f"{moved[side]:.1f}" for side in (OURS, THEIRS)]
        texts = [cpu[side].text() for side in (OURS, THEIRS)]
        costs.append((row.name, *texts, *megabytes, f"{bound:.2f}", *shares, f"{row.loss_difference:.1e}"))
        for side in (OURS, THEIRS):
            every = "; ".join(f"{label}: {seconds:.2f}" for label, seconds in row.sweep[side].items())
            tried.append((row.name, side, every, row.best[side]))
            repeats.append((row.name, side, " ".join(f"{each:.2f}" for each in wall[side].values)))
    against = [row.name for row in rows if row.why_not or row.verdict == "slower"]
    holds = f"It does not hold here: {'; '.join(against)}." if against else "No row speaks against it."
    return TEMPLATE.format(
        **facts,
        **vars(options),
        holds=holds,
        times=table(("setting", f"{OURS}, s", f"{THEIRS}, s", "ratio", f"the {OURS} is"), times),
        costs=table(
            (
                "setting",
                *(f"{side}: {what}" for what in ("CPU s", "MB") for side in (OURS, THEIRS)),
                "bound, s",
                *(f"{side}: bound / time" for side in (OURS, THEIRS)),
                "largest loss difference",
            ),
            costs,
        ),
        tried=table(("setting", "side", "seconds of one epoch", "best"), tried),
        each=table(("setting", "side", "seconds, in order"), repeats),
        megabytes=f"{num_bytes / 1e6:.1f}",
        work=f"{work_s:.2f}",
        steps=-(-options.images // options.batch_size),
        micro_batch=DEFAULT_MICRO_BATCH,
        tolerance=f"{LOSS_TOLERANCE:g}",
        difference=f"{max(row.loss_difference for row in rows):.1e}",
        learning_rate=f"{LEARNING_RATE:g}",
    )


TEMPLATE = """# The plain way beside an ordinary PyTorch loop

**Claim.** With nothing pushed down, upriver trains at least as fast as an ordinary `DataLoader` loop at its
best number of workers, so the near-data way is not measured against a straw man.
**{holds}**

{times}

Seconds of one epoch: median (range) of {repeats} repeats that took turns. The ratio is DataLoader's seconds
over the plain way's, of neighbours in time; *faster* and *slower* mean that all repeats agree.

![Seconds of an epoch, every repeat, and the bound](plain.png)

{costs}

- **Same work.** Samples, their order and their targets are the same on both sides in every repeat (or the
  row says that it does not count); pixels are `torch.equal`. Losses may differ in low bits: the largest
  relative difference is {difference}, {tolerance} is allowed.
- **Bound.** The busier of the link ({megabytes} MB at its rate) and the cores ({work} s of CPU, the least
  that either side needed in any row, over the number of cores), were it never idle. CPU seconds are of the
  process and all its children.

## Configuration

- Commit {commit}.
- {machine}. Load average before the start {load}; the whole run took {minutes} minutes.
- {versions}.
- ResNet-18, weights: {weights}; frozen through `layer4.0`, Adam at {learning_rate} on the rest.
- {images} of the demo's JPEG photographs in tar shards in a file store, read from memory; decode, random
  resized crop, flip, normalise. Training batches of {batch_size}, {steps} steps an epoch. Every repeat is
  another epoch, trained from the same start.
- Link: as it is, or {rate} Mbit/s by a token bucket (64 KiB pieces and burst) that all readers of a side
  share.
- Cores: as many as the row says for everything, and as many threads in torch's operators, on both sides.
  `OMP_WAIT_POLICY=passive` on both: by default these threads spin while they wait, on cores that the
  DataLoader's workers could use.
- **Plain way:** `finetune(policy="nosplit")`, micro-batches of {micro_batch}, loader threads as swept.
- **Baseline:** a map-style dataset whose `__getitems__` reads a batch with the same joined, parallel ranged
  GETs of obstore and runs the same input stages; default collation; persistent workers of a fork server;
  workers and prefetch as swept. Whole batches through the frozen modules in eval under `no_grad`, then the
  tail.
- Warm, and not in the times: the page cache, worker processes, the capture of the model, a first call of
  every part. In the times: starting the loader threads and checking the frozen weights, which the plain way
  does in every epoch.

## Sweep

On another seed: other photographs, another order. One epoch each. Prefetch factors that would only reach past
the end of an epoch are left out, being the same run.

{tried}

## Every repeat

{each}

## What it does not show

- An accelerator, where frozen layers take less of the time and batch sizes matter more; other networks or
  data.
- Long epochs: in {steps} steps the wait for the first batch and the work on the last one, which overlap with
  nothing and depend on the unit a side works in, weigh more than in a long one.
- A real network's latency; the token bucket has none. A cold page cache.
- `channels_last`, `torch.compile` or reduced precision, which could speed up both and change the numbers.
- Memory: worker processes cost more of it than threads; it was not measured.

Run it again, on a quiet machine: `python -m benchmarks.plain`.
"""


def plot(rows: Sequence[Row], work_s: float, num_bytes: float, path: Path) -> None:
    """Plot every repeat as a point, and medians and bounds as lines."""
    figure = new_figure(
        9.0, 4.5, "The plain way and a DataLoader, each at its best (points: epochs, lines: medians)"
    )
    axes = figure.subplots()
    for at, row in enumerate(rows):
        label: dict[str, Any] = {"label": "bound"} if at == 0 else {}
        axes.hlines(row.bound_s(work_s, num_bytes), at - 0.4, at + 0.4, "black", "dotted", **label)
        for side, colour, shift in ((OURS, "#1f6f8b", -0.2), (THEIRS, "#c0762b", 0.2)):
            seconds = row.spread(side, "wall_s")
            label = {"label": side} if at == 0 else {}
            axes.plot(
                [at + shift] * len(seconds.values), seconds.values, "o", color=colour, alpha=0.5, **label
            )
            axes.hlines(seconds.median, at + shift - 0.12, at + shift + 0.12, colour)
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set(xlabel="link and cores", ylabel="epoch (s)")
    axes.set_ylim(bottom=0)
    legend_above(axes, ncols=3)
    figure.savefig(path)
