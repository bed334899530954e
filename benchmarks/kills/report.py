"""Report the records of `kills`: whether anything was lost, and the share that came through servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.measuring import machine, versions
from benchmarks.harness.reports import table

GOAL_SHARE = 0.5
"""Least share of the samples that must come through servers."""

FAULTS = {
    "lost": "samples lost: {}",
    "doubled": "samples doubled: {}",
    "moved": "samples in another place of the order: {}",
    "losses": "losses with other bits: {}",
    "weights": "weights with other bits: {}",
}
"""Possible differences from an undisturbed run, in words."""

Row = Mapping[str, Any]


def faults(row: Row) -> list[str]:
    """Return the faults of a run, in words. The list is empty for a correct run."""
    found = wrong(row)
    if not row["through_servers"] > GOAL_SHARE:
        found.append(f"only {row['through_servers']:.0%} of the samples came through servers")
    return found


def wrong(row: Row) -> list[str]:
    """Return the faults of a run that do not depend on how fast the machine is."""
    found = [text.format(row[name]) for name, text in FAULTS.items() if row[name]]
    if len(row["kills"]) < row["wanted_kills"]:
        found.append(f"only {len(row['kills'])} of {row['wanted_kills']} kills")
    found += [f"a server ended by itself with exit code {code}" for code in row["ended_by_themselves"]]
    found += [f"left at the end: {kind} {name}" for kind, names in row["left"].items() for name in names]
    return found


def kinds(row: Row) -> str:
    """Return the killed processes, counted by kind."""
    fronts = sum(kill["kind"] == "front" for kill in row["kills"])
    return f"{fronts} fronts, {len(row['kills']) - fronts} workers"


def verdict(rows: Sequence[Row], runs: int) -> str:
    """Return the result as a sentence."""
    if not rows:
        return "Not run yet."
    so_far = f" so far, {len(rows)} of {runs} runs" if len(rows) < runs else ""
    found = [fault for row in rows for fault in faults(row)]
    kills, least = sum(len(row["kills"]) for row in rows), min(row["through_servers"] for row in rows)
    said = (
        f"{kills} kills: no sample lost, doubled or out of order, every loss and every weight equal bit for "
        f"bit, at least {least:.0%} of the samples of that time through servers (goal: more than "
        f"{GOAL_SHARE:.0%}), nothing left"
    )
    return f"Missed{so_far}: {'; '.join(found)}." if found else f"Met{so_far}. {said}."


def report(rows: Sequence[Row], runs: int, *, every_s: float) -> str:
    """Return the report as Markdown."""
    summary = [
        (
            row["seed"],
            kinds(row),
            f"{row['fronts']} and {row['processes']}",
            f"{row['through_servers']:.0%}",
            row["retried"],
            f"{row['undisturbed_s']:.0f}",
            f"{row['least_s']:.0f}",
            f"{row['seconds']:.0f}",
            "; ".join(faults(row)) or "none",
        )
        for row in rows
    ]
    kills = [
        (row["seed"], f"{kill['at_s']:.1f}", kill["server"], kill["kind"])
        for row in rows
        for kill in row["kills"]
    ]
    header = ["seed", "killed", "fronts and processes seen", "through servers", "asked again"]
    header += ["undisturbed s", "paced s", "with kills s", "faults"]
    commits = ", ".join(sorted({row["commit"] for row in rows})) or "none"
    return f"""# Servers that are killed

**Claim.** With two servers, SIGKILL of any one process every {every_s:g} seconds for a minute: no sample is
lost, doubled or out of order, losses and weights are equal bit for bit, and more than half of the samples
still come through the servers. At the end nothing is left.

{verdict(rows, runs)}

{table(header, summary)}

- A small network with a frozen part, `policy="freeze"`, shuffled, with random crops and flips, Dropout and
  BatchNorm in what is trained. The same job twice, near the same two servers: undisturbed, then with kills.
  What came with each step says which samples they were.
- In the second run each step takes so long at least that the job outlasts the kills by a quarter ("paced s"
  is all of these together): it stands for a larger network's. Samples are fetched as they are needed, so the
  share that came through servers is about the share of the time in which any could be used. It is counted
  from the first kill to {every_s:g} seconds after the last, without what came before and what came once the
  servers were left alone.
- A front or a process of a worker, of either server, never the trainer; which one is drawn from the seed. A
  front is started again at once on its port, as a supervisor would. Where a worker was drawn and there is
  none, its front is killed.
- Left at the end would be: a process (by descent, or by a command line that names a front), a port that
  somebody listens at, shared memory that such a process was seen to hold, a control group of one of the
  fronts. Seen meanwhile, in all runs: {sum(row["memory"] for row in rows)} pieces of shared memory,
  {sum(row["groups"] for row in rows)} control groups (none where none can be made).
- It does not show kills of the store, or the loss of a whole machine.
- Commit {commits}; {machine()}; {versions("torch")}.

{table(("seed", "after s", "server", "killed"), kills)}

Run it again: `python -m benchmarks.kills`.
"""
