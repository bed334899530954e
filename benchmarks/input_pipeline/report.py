"""Report the rows of `input_pipeline`: who is ahead, the cost of profiling, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Records
from benchmarks.harness.reports import legend_outside, table
from benchmarks.input_pipeline.bed import Setting
from benchmarks.input_pipeline.job import HERE, POLICIES
from benchmarks.input_pipeline.measure import HEADROOM, NEAR, NEAREST, SWEEPS
from benchmarks.input_pipeline.model import EPOCHS
from benchmarks.input_pipeline.workloads import WORKLOADS
from upriver.report.figure import new_figure

OURS = POLICIES[-1]
PEERS: Mapping[str, str] = {"tfdata": "tf.data service", "ray": "Ray Data"}
WAYS = (HERE, "remote", "greedy", *POLICIES)

NEAR_BEST, NEAR_SWEEP = 0.03, 0.05
MOST_PROFILE_S, MOST_PROFILE, MOST_STORED = 60.0, 0.031, 0.005
TEN = 10
PANEL = (3.2, 2.6)
"""Size of one setting's plot, in inches."""

Row = Mapping[str, Any]


class Found:
    """The records of one setting.

    Args:
        setting: The setting.
        records: All stored records, of any code version. The page names the version.
    """

    def __init__(self, setting: Setting, records: Records) -> None:
        self.setting = setting
        self.row: Row = records.rows.get(setting.key, {})
        kept = {name: records.rows.get(f"{setting.key}|{name}", {}) for name in PEERS}
        self.peers = {
            name: row
            for name, row in kept.items()
            if row and row["wait_s"] == self.row.get("wait_s") and self.row["passed"]
        }

    @property
    def complete(self) -> bool:
        """Return whether the setting has run. Peers may be missing."""
        return bool(self.row)

    # ---------------------------------------------------------------------------------------- epochs

    @property
    def plain(self) -> str:
        """Return the name of the way with PyTorch's own loader at its best."""
        return f"torch {self.row['processes']}"

    def spread(self, way: str) -> Spread:
        """Return the seconds of an epoch that begins without prefetched batches."""
        return Spread.of(row["seconds"] for row in self.row["epochs"][way])

    def in_one_pass(self, who: str) -> Spread:
        """Return the seconds of an epoch among several in one pass, of a peer or of upriver."""
        return Spread.of((self.row["passed"] if who == OURS else self.peers[who])["epochs_s"])

    def seconds(self, way: str) -> float:
        """Return the shortest epoch's seconds. Other load on the machine only makes epochs longer."""
        return min(self.spread(way).values)

    def stalled(self, way: str) -> float:
        """Return the share of its epochs that the trainer waited for a batch."""
        rows = self.row["epochs"][way]
        return sum(row["waited_s"] for row in rows) / sum(row["seconds"] for row in rows)

    def share(self, way: str) -> float:
        """Return the share of the samples that the worker made in the epochs that count."""
        rows = self.row["epochs"][way]
        elsewhere = sum(row["made_elsewhere"] for row in rows)
        return float(elsewhere / (elsewhere + sum(row["made_here"] for row in rows)))

    def cpu_s(self, way: str) -> float:
        """Return the median CPU seconds of an epoch, both hosts together."""
        return statistics.median(sum(row["cpu_s"].values()) for row in self.row["epochs"][way])

    @property
    def others(self) -> list[str]:
        """Return all ways that upriver's policy is compared with in separate epochs."""
        return [self.plain, *(way for way in WAYS if way != OURS)]

    @property
    def best(self) -> str:
        """Return the other way with the shortest epochs."""
        return min(self.others, key=self.seconds)

    @property
    def behind(self) -> float:
        """Return how much longer upriver's epochs are than the best other's; negative if shorter."""
        return self.seconds(OURS) / self.seconds(self.best) - 1

    @property
    def behind_median(self) -> float:
        """Return how much longer upriver's epochs are, by medians."""
        return self.spread(OURS).median / min(self.spread(way).median for way in self.others) - 1

    @property
    def behind_peer(self) -> float | None:
        """Return how much longer upriver's epochs in one pass are than the best peer's.

        The result is None without a peer.
        """
        if not self.peers:
            return None
        best_s = min(min(self.in_one_pass(peer).values) for peer in self.peers)
        return min(self.in_one_pass(OURS).values) / best_s - 1

    # ----------------------------------------------------------------------------------------- ratios

    @property
    def sweep(self) -> dict[str, dict[float, float]]:
        """Return the seconds by candidate and ratio, including nothing offloaded."""
        found: dict[str, dict[float, float]] = {}
        for way in self.row["epochs"]:
            candidate, _, ratio = way.partition(" ")
            if candidate in ("p1", "p2", "p3"):
                found.setdefault(candidate, {0.0: self.seconds(HERE)})[float(ratio)] = self.seconds(way)
        return found

    @property
    def best_fixed(self) -> tuple[str, float, float]:
        """Return the candidate and ratio with the shortest epochs, and their seconds."""
        tried = [
            (seconds, candidate, ratio)
            for candidate, ratios in self.sweep.items()
            for ratio, seconds in ratios.items()
        ]
        seconds, candidate, ratio = min(tried)
        return candidate, ratio, seconds

    @property
    def over_fixed(self) -> float:
        """Return how much longer upriver's epochs are than with the best fixed ratio."""
        return self.seconds(OURS) / self.best_fixed[2] - 1

    # -------------------------------------------------------------------------------------- profiling

    def learning(self, way: str, *, again: bool = False) -> tuple[float, float]:
        """Return the seconds until a policy had decided, and their part that delivered nothing.

        The step of the decision is the last one. Batches delivered meanwhile count with their later time, on
        an equally slow machine.
        """
        rows = self.row["again"] if again else self.row["learned"][way]
        spent_s = nothing_s = 0.0
        step_s = self.seconds(way) / self.setting.batches
        for row in rows:
            steps = row["steps_s"] if row["decided_at"] is None else row["steps_s"][: row["decided_at"] + 1]
            if row is rows[-1] and row["decided_at"] is None and row["decided"]:
                steps = []  # the decision was made before the epoch began
            spent_s += sum(steps)
            nothing_s += sum(steps) - len(steps) * step_s * statistics.fmean(row["slow"])
        return spent_s, max(0.0, nothing_s)

    def decided(self, way: str, *, again: bool = False) -> str:
        """Return a policy's first decision in a few words, or an empty text without one."""
        row = (self.row["again"] if again else self.row["learned"][way])[-1]
        if not row["decided"]:
            return ""
        return "nothing" if row["candidate"] is None else f"{row['candidate']} {row['ratio']:.0%}"

    @property
    def ten_here_s(self) -> float:
        """Return the seconds of ten epochs, as they ran."""
        return TEN * self.seconds(OURS)

    @property
    def ten_published_s(self) -> float:
        """Return the seconds of ten epochs with the bytes of the paper's dataset (Table 3), at our rate."""
        published = WORKLOADS[self.setting.workload].published_bytes / self.row["stored_bytes"]
        return self.ten_here_s * float(published) / self.setting.samples

    # ------------------------------------------------------------------------------------------ goals

    @property
    def goals(self) -> dict[str, bool]:
        """Return each goal that applies to this setting, and whether it is met."""
        _, profile_s = self.learning(OURS)
        _, stored_s = self.learning(OURS, again=True)
        found = {
            "best or near it": self.behind <= NEAR_BEST,
            "near the best ratio": self.over_fixed <= NEAR_SWEEP,
            "profiling": bool(self.decided(OURS))
            and profile_s <= min(MOST_PROFILE_S, MOST_PROFILE * self.ten_published_s),
            "profiling, stored metrics": bool(self.decided(OURS, again=True))
            and stored_s <= MOST_STORED * self.ten_published_s,
            "equal losses": not self.row["unequal"],
        }
        if self.behind_peer is not None:
            found["peers"] = self.behind_peer <= NEAR_BEST
        if self.setting.stall == 0:
            found["nothing offloaded"] = self.share(OURS) == 0
        return found


GOALS: Mapping[str, str] = {
    "best or near it": f"shortest epochs, or within {NEAR_BEST:.0%} of whoever has them",
    "peers": f"the same against {' and '.join(PEERS.values())}",
    "nothing offloaded": "nothing offloaded where nothing stalls",
    "near the best ratio": f"within {NEAR_SWEEP:.0%} of the best fixed ratio and candidate",
    "profiling": f"profiling delivers nothing for at most {MOST_PROFILE_S:g} s and {MOST_PROFILE:.1%} of ten "
    "epochs of the paper's datasets",
    "profiling, stored metrics": f"for at most {MOST_STORED:.1%} of them with stored metrics",
    "equal losses": "losses equal to the bit whatever is offloaded",
}


# ------------------------------------------------------------------------------------------------ the page


def write(found: Sequence[Found], folder: Path, name: str) -> str:
    """Write the page and its plot from the existing records. Return the text of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(found, name)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    complete = [each for each in found if each.complete]
    if complete:
        draw(complete, folder / f"{name}.png")
    return text


def page(found: Sequence[Found], name: str) -> str:
    """Return the text of the page."""
    complete = [each for each in found if each.complete]
    left = [each.setting.key for each in found if not each.complete]
    return TEMPLATE.format(
        verdicts="\n".join(f"- {verdict(goal, complete)}" for goal in GOALS),
        left=f"\nNot run yet: {', '.join(left)}.\n" if left else "",
        epochs=epochs_table(complete),
        passes=passes_table(complete),
        noise=noise(complete),
        shares=shares_table(complete),
        ratios=ratios_table(complete),
        candidates=candidates_table(complete),
        profiles=profiles_table(complete),
        workloads=workloads_table(),
        name=name,
        headroom=HEADROOM,
        sweeps=SWEEPS,
        near=NEAR - 1,
        nearest=NEAREST,
        near_best=NEAR_BEST,
        medians=f"{sum(each.behind_median <= NEAR_BEST for each in complete)} of {len(complete)} settings",
        epochs_in_a_pass=EPOCHS,
        unequal="".join(
            f"\n- {each.setting.key}: {', '.join(each.row['unequal'])}"
            for each in complete
            if each.row["unequal"]
        )
        or " none.",
        missing=", ".join(PEERS[peer] for peer in PEERS if not any(peer in each.peers for each in complete))
        or "none",
        commits=", ".join(sorted({each.row["commit"] for each in complete})) or "-",
        machine=machine(),
        versions=versions("torch", "pillow", "numpy"),
        peers=", ".join(sorted({row["version_of"] for each in complete for row in each.peers.values()}))
        or "-",
    )


def verdict(goal: str, found: Sequence[Found]) -> str:
    """Return a goal, and where it is missed."""
    judged = {each.setting.key: each.goals[goal] for each in found if goal in each.goals}
    if not judged:
        return f"{GOALS[goal]}: not judged"
    missed = [key for key, met in judged.items() if not met]
    met = f"met in {len(judged) - len(missed)} of {len(judged)} settings"
    return f"{GOALS[goal]}: **{'missed' if missed else 'met'}**, {met}" + (
        f"; not in {', '.join(missed)}" if missed else ""
    )


def epochs_table(found: Sequence[Found]) -> str:
    """Return the seconds of an epoch by all ways."""
    header = ["setting", "PyTorch", *WAYS, "best other", "upriver over it", "by medians"]
    rows = []
    for each in found:
        cells = [f"{each.spread(each.plain).text()}, {each.row['processes']} processes"]
        cells += [each.spread(way).text() for way in WAYS]
        rows.append(
            [each.setting.key, *cells, each.best, f"{each.behind:+.1%}", f"{each.behind_median:+.1%}"]
        )
    return table(header, rows)


def passes_table(found: Sequence[Found]) -> str:
    """Return the seconds of an epoch in one pass over several, against peers."""
    rows = []
    for each in found:
        if each.behind_peer is None:
            continue
        cells = [each.in_one_pass(peer).text() if peer in each.peers else "" for peer in PEERS]
        rows.append([each.setting.key, *cells, each.in_one_pass(OURS).text(), f"{each.behind_peer:+.1%}"])
    header = ["setting", *PEERS.values(), OURS, "upriver over the best, shortest epochs"]
    return table(header, rows) if rows else "Not run yet."


def noise(found: Sequence[Found]) -> str:
    """Return the machine's slowness after the counted epochs. Before them, processes may be starting."""
    slow = [row["slow"][1] for each in found for rows in each.row["epochs"].values() for row in rows]
    return f"{statistics.median(slow):.2f}, at most {max(slow):.2f}" if slow else "-"


def shares_table(found: Sequence[Found]) -> str:
    """Return the share of waiting in a step, the offloaded share, and its CPU time."""
    header = ["setting", "accelerator, ms a step", "stall, PyTorch", *(f"stall, {way}" for way in WAYS)]
    header += [f"offloaded, {way}" for way in ("greedy", *POLICIES)]
    header += [f"CPU s, {way}" for way in (HERE, OURS)]
    rows = []
    for each in found:
        cells = [f"{1e3 * each.row['wait_s']:.0f}"]
        cells += [f"{each.stalled(way):.0%}" for way in (each.plain, *WAYS)]
        cells += [f"{each.share(way):.0%}" for way in ("greedy", *POLICIES)]
        cells += [f"{each.cpu_s(way):.2f}" for way in (HERE, OURS)]
        rows.append([each.setting.key, *cells])
    return table(header, rows)


def ratios_table(found: Sequence[Found]) -> str:
    """Return the best fixed ratio against the policies."""
    header = [
        "setting",
        "best fixed",
        "s",
        *(f"{way}: share, s" for way in POLICIES),
        "upriver over the best",
    ]
    rows = []
    for each in found:
        candidate, ratio, seconds = each.best_fixed
        cells = [f"{candidate} {ratio:.0%}" if ratio else "nothing", f"{seconds:.2f}"]
        cells += [f"{each.share(way):.0%}, {each.seconds(way):.2f}" for way in POLICIES]
        rows.append([each.setting.key, *cells, f"{each.over_fixed:+.1%}"])
    return table(header, rows)


def candidates_table(found: Sequence[Found]) -> str:
    """Return each candidate at its best ratio, where all of them were forced."""
    header = ["setting", "p1", "p2", "p3", *(f"{way} takes" for way in POLICIES)]
    rows = []
    for each in found:
        if len(each.sweep) < 2:
            continue
        best = {name: min((s, r) for r, s in ratios.items() if r) for name, ratios in each.sweep.items()}
        cells = [f"{best[name][0]:.2f} s at {best[name][1]:.0%}" for name in sorted(best)]
        takes = [each.decided(way) or "not decided" for way in POLICIES]
        rows.append([each.setting.key, *cells, *takes])
    return table(header, rows) if rows else "Not run yet."


def profiles_table(found: Sequence[Found]) -> str:
    """Return the time of profiling, and its part that delivered nothing."""
    header = [
        "setting",
        "policy",
        "first decision",
        "s until then",
        "delivered nothing, s",
        "of ten epochs of the paper's data",
        "of ten epochs as run",
    ]
    rows = []
    for each in found:
        for way, again in ((POLICIES[0], False), (OURS, False), (OURS, True)):
            spent_s, nothing_s = each.learning(way, again=again)
            cells = [each.decided(way, again=again) or "none yet", f"{spent_s:.2f}", f"{nothing_s:.2f}"]
            cells += [f"{nothing_s / each.ten_published_s:.2%}", f"{nothing_s / each.ten_here_s:.1%}"]
            rows.append([each.setting.key, f"{way}, stored metrics" if again else way, *cells])
    return table(header, rows)


def workloads_table() -> str:
    """Return the stored files of each workload and their stages."""
    header = ["", "workload", "stages", "samples a batch"]
    rows = [
        [letter, each.title, ", ".join(stage.name for stage in each.stages), each.batch_size]
        for letter, each in WORKLOADS.items()
    ]
    return table(header, rows)


def draw(found: Sequence[Found], path: Path) -> None:
    """Plot the seconds over the ratio, a panel for each setting, with the policies at their shares."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    title = "Epoch over the share of samples that a worker makes: fixed shares, and what each way chooses"
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows, title)
    for number, each in enumerate(found, start=1):
        axes = figure.add_subplot(rows, columns, number)
        for candidate, ratios in each.sweep.items():
            style = {"p1": ".:", "p2": ".-", "p3": ".--"}[candidate]
            axes.plot(list(ratios), list(ratios.values()), style, color="0.6", label=f"fixed, {candidate}")
        axes.axhline(each.seconds(each.plain), color="0.8", lw=1, label="PyTorch")
        for way, mark in zip(("greedy", *POLICIES), "sD*", strict=True):
            axes.plot(each.share(way), each.seconds(way), mark, label=way)
        axes.set_title(each.setting.key, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=6)
    figure.supxlabel("share offloaded (of 1)", fontsize=10)
    figure.supylabel("epoch (s)", fontsize=10)
    legend_outside(figure, loc="outside right upper")
    figure.savefig(path)


TEMPLATE = """# The input pipeline on another machine: what it gains, and who finds the best share

{verdicts}
{left}
Figures are medians (lowest to highest); what is compared is the lowest.

## Seconds of an epoch

{epochs}

PyTorch: its own loader with the best of 0, 1 and 2 processes. here: upriver with nothing offloaded. remote:
everything offloaded. greedy: whoever has fewer batches to make takes the next. Each epoch begins with nothing
made ahead. By medians upriver is within {near_best:.0%} of the best other in {medians}.

## Against other systems

{passes}

tf.data service and Ray Data have both hosts and make the same samples by the same code. They run
{epochs_in_a_pass} epochs in one pass, the first of which is left out, so that no other begins with nothing
made ahead; so does upriver here, by a sampler that goes over the samples as often. Blank: not run in this
setting.

## Waiting, and what is offloaded

{shares}

A stall is the share of an epoch that the trainer waits for a batch. CPU seconds are of one epoch and both
hosts.

## Every ratio

![Seconds over the ratio]({name}.png)

{ratios}

## Each candidate, where the worker's disk is slow

{candidates}

## Profiling

{profiles}

All batches of profiling are trained on. What delivers nothing is the time until the decision, less what the
batches handed out meanwhile take in steady state, on a machine that is as slow as it was then. Epochs here
are short so that there can be many of them; ten epochs of the paper's data are those of a dataset with as
many bytes as the paper's (its Table 3), at the steady rate measured here, and by them it is judged.

## Losses

Every epoch of every way of upriver is compared with nothing offloaded by `torch.equal`, those of PyTorch's
loader by how many samples of each class there were. Different:{unequal}

## How it was measured

{workloads}

- Photographs of 500 x 375 pixels and 110 kB as JPEG; speech of 7.5 to 12.5 s at 22,050 Hz, and words of about
  a second at 16,000 Hz, as WAV of 16 bits. All are made here, from fixed seeds, and read from files.
- A small model is trained on every batch; the accelerator's time is a sleep, during which the trainer's core
  is free. It is set by what a batch costs the trainer's core, so that the stall without offloading is that of
  the setting's name; where it is 0 %, a step takes {headroom:g} times what a batch does.
- The trainer with its loader processes has core 0 and a network namespace, `upriver worker` with one process
  core 1 and another one. Links of 200 Mbit/s are shaped by `tc tbf` both ways. A slow disk is an object
  server beside the worker behind a shaped loopback device that carries nothing else.
- PyTorch's loader has 0, 1 or 2 processes, whichever is best, and upriver as many; where that is none, none
  or one, by its own epochs.
- In a setting all ways take turns, an epoch each, after their processes have started and policies have
  decided. Ways that take twice the best are not repeated, nor is a candidate tried beyond two ratios that
  take twice its own best; the {nearest} best ratios, where they are within {near:.0%} of the best, are run
  {sweeps} times. Peers run right after, on the same two hosts.
- The machine is shared, and for seconds or minutes its cores have two thirds of their speed: a fixed
  computation, timed on each of them after every epoch, took so many times the shortest at the
  median: {noise}. That makes epochs longer and never shorter, so of each way the shortest of its epochs
  counts; medians stand beside them.
- Peers that have not been run: {missing}.
- Commits {commits}; {machine}.
  {versions}. Peers: {peers}.

## What it does not show

Accelerators, which here are a sleep; several workers; remote machines that are faster than the trainer; real
networks and disks. Both hosts share the memory and the caches of one machine.

Run it again: `python -m benchmarks.input_pipeline` as root; it goes on from the records, which are of the
code as it is.
"""
