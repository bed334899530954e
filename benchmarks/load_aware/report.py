"""Report the rows of `load_aware` as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.reports import goal_line, table
from benchmarks.load_aware.bed import LOAD_WATCH_S, LOAD_WINDOW_S
from benchmarks.load_aware.found import GOALS, OVER_ENDS_BY, REUSED, Found
from benchmarks.load_aware.job import DEADLINE_S, RUNS
from benchmarks.load_aware.plots import draw_over_time, draw_rates
from benchmarks.load_aware.schedule import (
    CHOOSING,
    COMPARED,
    FACTOR,
    FULL,
    LEVELS,
    LOAD_MBIT,
    LOADPART,
    LOCAL,
    NEUROSURGEON,
    OURS,
    PARTS,
)
from upriver.inference.offload import DEADLINE_S as USUAL_DEADLINE_S

PAPER_SPEEDUPS = {
    ("alexnet", FULL): (6.96, 21.98),
    ("alexnet", LOCAL): (1.75, 3.37),
    ("squeezenet1_0", FULL): (7.05, 23.93),
    ("squeezenet1_0", LOCAL): (1.41, 2.53),
}
"""LoADPart's speed-ups over full offload and over local, on average over the rates and at most (section V-B).
"""


def write(found: Sequence[Found], folder: Path, name: str) -> str:
    """Write the page and its plots from the existing records. Return the text of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(found, name)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for part in PARTS:
        complete = of_part(found, part)
        if complete:
            draw_over_time(complete, folder / f"{name}_{part}.png")
    compared = [each for each in of_part(found, "link") if each.setting.network in COMPARED]
    if compared:
        draw_rates(compared, folder / f"{name}_rates.png")
    return text


def of_part(found: Sequence[Found], part: str) -> list[Found]:
    """Return the results of a part."""
    return [each for each in found if each.complete and each.setting.part == part]


def lasting(found: Sequence[Found], part: str) -> str:
    """Return the least duration of a part's phases."""
    every = {phase.seconds for each in found if each.setting.part == part for phase in each.setting.phases}
    return " or ".join(f"{seconds:g} s" for seconds in sorted(every)) or "none"


def page(found: Sequence[Found], name: str) -> str:
    """Return the text of the page."""
    complete = [each for each in found if each.complete]
    left = [each.setting.key for each in found if not each.complete]
    load, link = of_part(found, "load"), of_part(found, "link")
    return TEMPLATE.format(
        verdicts="\n".join(f"- {verdict(goal, found)}" for goal in GOALS),
        left=f"\nNot run yet: {', '.join(left)}.\n" if left else "",
        gains=gains_table(load),
        loads=phases_table(load),
        links=phases_table(link),
        choices=choices_table(link),
        rates=rates_table(link),
        speedups=speedups_table(link),
        steady=steady_table(complete),
        cutting=cutting_table(complete),
        levels="\n".join(f"  - {level.name}: {level.text}" for level in LEVELS.values()),
        answers=sum(len(each.row["requests"]) for each in complete),
        wrong=sum(each.wrong for each in complete),
        fallen_back=sum(each.fallen_back for each in complete),
        name=name,
        factor=FACTOR,
        mbit=LOAD_MBIT,
        lasts="; ".join(f"{part}, {lasting(found, part)}" for part in PARTS),
        runs=RUNS,
        deadline_s=DEADLINE_S,
        usual_deadline_s=USUAL_DEADLINE_S,
        reused=REUSED,
        window_s=LOAD_WINDOW_S,
        watch_s=LOAD_WATCH_S,
        commits=", ".join(sorted({each.row["commit"] for each in complete})) or "-",
        busy=", ".join(f"{each.row['load']:.1f}" for each in complete) or "-",
        machine=machine(),
        versions=versions("torch", "torchvision", "timm", "numpy"),
    )


def verdict(goal: str, found: Sequence[Found]) -> str:
    """Return whether every setting of a goal has met it, where it is missed, and the missing settings."""
    about = [each for each in found if goal in each.asked]
    judged = {each.setting.key: each.goals[goal] for each in about if each.complete and goal in each.goals}
    return goal_line(GOALS[goal], judged, [each.setting.key for each in about if not each.complete])


# -------------------------------------------------------------------------------------------- load


def gains_table(found: Sequence[Found]) -> str:
    """Return ours against the other choosing ways while the load changes."""
    if not found:
        return "Not run yet."
    header = ["network", *(f"{way}, s" for way in found[0].ways)]
    for other in (NEUROSURGEON, LOADPART):
        header += [f"ours saves of {other}", "in its best phase", "at best"]
        header += ["foreseen"] if other == NEUROSURGEON else []
    rows = []
    for each in found:
        phases = len(each.phases)
        cells = [f"{each.total_s(way) / phases:.3f}" for way in each.ways]
        for other in (NEUROSURGEON, LOADPART):
            gain, phase = each.best_gain(other)
            cells += [f"{each.mean_gain(other):+.1%}", f"{gain:+.1%} at {each.phases[phase].level}"]
            cells.append(f"{each.best_round(other):+.1%}")
            cells += [f"{each.most_gain(other):+.1%}"] if other == NEUROSURGEON else []
        rows.append([each.setting.network, *cells])
    return table(header, rows)


def phases_table(found: Sequence[Found]) -> str:
    """Return every phase: its knowledge, its choices, and its times."""
    if not found:
        return "Not run yet."
    header = ["network", "load", "Mbit/s", "k", "known, Mbit/s", *(f"{way}, s (cut)" for way in CHOOSING)]
    header += [
        f"{LOCAL}, s",
        f"{FULL}, s",
        "ours over the better one",
        "by its own requests",
        "so many",
        "before it settled, too",
        "late",
    ]
    rows = []
    for each in found:
        for number, phase in enumerate(each.phases):
            cells = [phase.level, f"{phase.mbit:g}", f"{each.known(number, 'k'):.1f}"]
            cells.append(f"{each.known(number, 'upload_bytes_per_s') * 8 / 1e6:.2g}")
            for way in CHOOSING:
                cut = each.label(each.usual_cut(number, way))
                cells.append(f"{each.spread(number, way).text(3)} ({cut})")
            cells += [each.spread(number, way).text(3) for way in (LOCAL, FULL)]
            over = [f"{each.over_ends(number, how):+.1%}" for how in OVER_ENDS_BY]
            own = len(each.requests(number, OURS, settled=True))
            cells += [*over[:2], str(own), *over[2:], str(each.late(number))]
            rows.append([each.setting.network, *cells])
    return table(header, rows)


# -------------------------------------------------------------------------------------------- link


def choices_table(found: Sequence[Found]) -> str:
    """Return our cut at each rate, in order."""
    if not found:
        return "Not run yet."
    header = ["network", *(f"{phase.mbit:g}" for phase in found[0].phases)]
    rows = [
        [each.setting.network, *(each.label(each.usual_cut(number, OURS)) for number in _phases(each))]
        for each in found
        if len(each.phases) == len(found[0].phases)
    ]
    return table(header, rows)


def rates_table(found: Sequence[Found]) -> str:
    """Return the latency against bandwidth of the two networks that the paper shows."""
    rows = []
    for each in found:
        if each.setting.network not in COMPARED:
            continue
        for mbit in each.rates:
            cells = [f"{each.at_rate(way, mbit) * 1e3:.0f}" for way in each.ways]
            rows.append([each.setting.network, f"{mbit:g}", *cells])
    if not rows:
        return "Not run yet."
    return table(["network", "Mbit/s", *(f"{way}, ms" for way in found[0].ways)], rows)


def speedups_table(found: Sequence[Found]) -> str:
    """Return the speed-ups as in the paper: on average and at most."""
    rows = []
    for each in found:
        for (network, over), paper in PAPER_SPEEDUPS.items():
            if each.setting.network == network:
                cells = [_mean_and_most(each.speedups(way, over)) for way in (OURS, LOADPART)]
                rows.append([network, over, *cells, _mean_and_most(paper, of=paper)])
    header = ["network", "over", "ours", "LoADPart", "LoADPart in its paper"]
    return table(header, rows) if rows else "Not run yet."


def _mean_and_most(values: Sequence[float], of: tuple[float, float] | None = None) -> str:
    mean, most = of or (statistics.fmean(values), max(values))
    return f"{mean:.2f} x, at most {most:.2f} x"


# ------------------------------------------------------------------------------------------- both


def steady_table(found: Sequence[Found]) -> str:
    """Return the best fixed cut in hindsight against our choices."""
    rows = []
    for each in found:
        cut, seconds = each.best_fixed
        tried = ", ".join(f"{each.label(at)} {sum_s:.2f}" for at, sum_s in each.fixed_s.items())
        cells = [f"{each.label(cut)}, {seconds:.2f} s", f"{each.over_fixed:+.1%}", tried]
        for how in OVER_ENDS_BY:
            worst, phase = each.worst_over_ends(how)
            cells.append(f"{worst:+.1%} at {each.phases[phase].level}, {each.phases[phase].mbit:g} Mbit/s")
        rows.append([each.setting.key, *cells, ", ".join(map(each.label, each.untried)) or "none"])
    header = ["setting", "best fixed cut", "ours over it", "all that were tried, s"]
    header += ["most over local and full", "by its own requests", "before it settled, too"]
    header.append("chosen but not tried throughout")
    return table(header, rows) if rows else "Not run yet."


def cutting_table(found: Sequence[Found]) -> str:
    """Return the cost of cutting."""
    rows = []
    for each in found:
        if each.cutting is None:
            continue
        share, cut = each.cutting
        extra = max(costs["first_s"] - costs["later_s"] for costs in each.row["cutting"].values())
        cells = [each.stages, f"{1e6 * each.row['decide_s']:.0f}", f"{1e3 * extra:.0f}"]
        rows.append([each.setting.key, *cells, f"{share:.2%}", each.label(cut)])
    header = ["setting", "stages", "a decision, us", "first request beyond the next, ms"]
    return table([*header, f"of {REUSED} requests", "most at"], rows) if rows else "Not run yet."


def _phases(found: Found) -> range:
    return range(len(found.phases))


TEMPLATE = """# Load-aware split inference: against LoADPart, Neurosurgeon, local and full offload

{verdicts}
{left}
Seconds are of one request, from the input to the answer: medians (lowest to highest), if nothing else is
said. Beside a time stands the cut that was chosen most, by the paper's number of a node where it has one.

## The server's load changes (Figure 9)

![Latency over time while the load changes]({name}_load.png)

{gains}

Means of all requests, those before a change was noticed too, phase by phase; every phase counts alike. The
best phase is judged; at best is a single request against the other's beside it. The paper does not say which
of the two its own figures are. Foreseen is what whoever knew each phase beforehand would save of
Neurosurgeon's mean: by the cut with the least mean there, of all that anybody took.

{loads}

k and the rate are what ours knew when it chose. "Ours over the better one" is over the better one of local
and full once it has settled, which is the later half of a phase: its cuts, each as long as requests at that
cut took in that phase, whoever sent them. "By its own requests" is the median of ours' alone then; "so many"
they were: one or two with slow networks, where a single one that was disturbed decides. "Before it settled,
too" is by its cuts in all of the phase, those before it knew of a change among them. "Late" are the requests
in all of the phase that were more than 3 % above the better one; where the device computed in parallel,
a request counts as long as it took.

## The link changes (Figure 6)

![Latency over time while the link changes]({name}_link.png)

Where ours cuts, rate by rate in Mbit/s, in order of time:

{choices}

{links}

## Latency against bandwidth (Figures 7 and 8)

![Latency against bandwidth]({name}_rates.png)

{rates}

{speedups}

The server is idle. In its paper LoADPart runs on a board with a network of its own and a Tesla T4, so factors
are not to be compared, but signs.

## Against fixed cuts

{steady}

Sums over phases of the typical seconds of a request. Tried in every phase are those that would win at some
load or rate, those that the paper names, none and all.

## What cutting costs

{cutting}

A decision is made for every request. The first request at a cut that nobody has used makes both sides ready
for it; what it took beyond the next two, and {reused} decisions, is held against {reused} requests.

## Answers

{answers} answers were compared with the local model's by `torch.equal`: {wrong} differed. In {fallen_back} of
them the device finished by itself what a server was to.

## How it was measured

- Two hosts in network namespaces: the device on core 0, `upriver serve` with one worker of one thread on core
  1, and a link that `tc tbf` shapes both ways, {mbit:g} Mbit/s where the load changes.
- The device is {factor:g} times slower than its core: after each stage it sleeps until so many times the
  stage's own seconds are over: those of the shortest of {runs} runs before. So a disturbance of this machine
  is none of the device.
- Background load runs on the server's core and ends by itself. Each process multiplies matrices, in memory
  larger than the first caches, and is scheduled as a group of its own:
{levels}
- A server is waited for as long as {deadline_s:g} s (`deadline_s`), so that full offload is that, however
  slow it is. By itself upriver would have the device go on after {usual_deadline_s:g} s; what a deadline
  costs is not shown.
- All ways take turns request by request, in another order each round. Each has a link profiler and a view of
  the server's load of its own, fed by its own requests and, where it has sent none of late, by its own
  probes every 5 s and questions every 10 s. One way uses the link at a time, as a device with one way has no
  others to share it with: its probes wait for the end of another way's request, and so does the next request
  for that of another's probe, untimed. A probe that was held up does not begin during a request of its own,
  and a request may begin during a probe, as anywhere.
  The server is shared, so that its k is measured by everybody's requests. Local, full and fixed cuts come as
  often as their time is no more than ours.
- Neurosurgeon knows what LoADPart knows but for the load: its k is 1, and it expects no wait. A busy server
  is also slow to read what is sent, which makes its link seem thinner, so that it may move its cut all the
  same; in the paper it does not. While the link changes the two differ by what LoADPart's k of an idle server
  is beyond 1: a median of what stages took over the least that they ever did.
- A phase lasts as long as this, or until everybody has had a turn: {lasts}. It is as short
  as it has to be for all of the benchmark to end within an hour.
- The server's factor k looks back {window_s:g} s, and is forgotten when its core, looked at every
  {watch_s:g} s, is less than 90 % busy. Both are the defaults.
- Networks have random weights; inputs are random and of the paper's sizes. Programs lie in the server's store
  beforehand. Batch 1, float32, one thread on either side.
- Commits {commits}; {machine}.
  {versions}. Load averages when the settings began: {busy}.

## What it does not show

An accelerator; a radio link, which loses packets and changes by itself; several devices that adapt to each
other. Both hosts share the memory and the last cache of one machine, so background load slows what little
the device computes, too, within its sleep.

Run it again: `python -m benchmarks.load_aware` as root; it goes on from the records, which are of the code as
it is.
"""
