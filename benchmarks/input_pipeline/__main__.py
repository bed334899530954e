"""Measure whether offloading the input pipeline pays, and how near upriver's policy is to the best.

The claim: with workloads of real JPEG and WAV files and prep stalls from none to 80 % of a step,

- upriver's policy has the shortest epochs, or is within 3 % of the shortest: against PyTorch's DataLoader
  with its best number of processes, everything on the worker, a greedy assignment of batches, FastFlow's
  policy, tf.data service with local and remote workers, Ray Data on both nodes;
- nothing is offloaded where nothing stalls;
- it is within 5 % of the best of all fixed ratios in tenths, and of the best candidate where disks are slow;
- the undelivered part of its profiling is at most 60 s and 3.1 % of ten epochs, 0.5 % with stored metrics;
- losses are the same to the bit, for any offloading.

Run ``python -m benchmarks.input_pipeline`` as root. It may be ended at any moment: each setting is a line of
``results/input_pipeline.jsonl``, each peer in it another one, and the next start resumes there. ``--only R``
selects workloads or settings, ``--minutes 20`` ends it between two of them, ``--list`` prints the progress,
``--quick`` shows in some seconds that it works, ``--report`` only writes ``results/input_pipeline.md`` and
``.png`` from the existing runs. All of it takes some 100 minutes on two cores.

The trainer has the first core and a network namespace, the worker the second and another one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.harness.children import ROOT, Failed
from benchmarks.harness.code_version import commit, version_of
from benchmarks.harness.hosts import sigterm_raises
from benchmarks.harness.progress import Bar, progress_shown
from benchmarks.harness.records import (
    Deadline,
    Output,
    Records,
    command_line,
    exit_on_faults,
    until_time_is_up,
)
from benchmarks.harness.testbed import TestbedError
from benchmarks.input_pipeline.bed import Bed, Job, Setting, peer
from benchmarks.input_pipeline.data import FILES, make_data, mean_bytes
from benchmarks.input_pipeline.measure import CANDIDATES, measure
from benchmarks.input_pipeline.pace import Probe
from benchmarks.input_pipeline.report import PEERS, Found, write
from benchmarks.input_pipeline.workloads import WORKLOADS

SHAPED_MBIT = 200.0
SLOW_DISK_MBIT = 40.0
"""5 MB/s: a third of what the worker's core could compute."""

BOTH = ("tfdata", "ray")

SETTINGS = (
    Setting(workload="R", stall=0.0),
    Setting(workload="R", stall=0.6, peers=BOTH),
    Setting(workload="R", stall=0.8),
    Setting(workload="G", stall=0.4, peers=BOTH),
    Setting(workload="L", stall=0.0),
    Setting(workload="L", stall=0.2, peers=BOTH),
    Setting(workload="T", stall=0.6, peers=BOTH),
    Setting(workload="C", stall=0.4),
    Setting(workload="S", stall=0.8, peers=BOTH),
    *(
        Setting(workload=workload, stall=0.6, mbit=SHAPED_MBIT, batch_scale=0.5, peers=peers)
        for workload, peers in (("R", BOTH), ("L", ()), ("T", ()))
    ),
    Setting(workload="R", stall=0.6, disk_mbit=SLOW_DISK_MBIT, batches=50),
)
"""The settings vary the stall, then the workload, with about its stall in the paper (Figure 7), then add a
slow link and a slow disk. Behind the slow link batches have half the samples, as one takes that many times
longer there."""

QUICK = (
    Setting(
        workload="R",
        stall=0.6,
        batches=12,
        repeats=1,
        batch_scale=1 / 16,
        most_learning=4,
        ratios=(0.5, 1.0),
    ),
)
QUICK_FILES = 4

MEASURING = ("bed", "data", "job", "measure", "model", "pace", "workloads")
"""Benchmark modules that determine a setting's figures, in addition to the package."""

HARNESS = ("children", "photographs")
"""Modules of the harness that determine all figures, those of peers too."""

APART = ("coldstart", "inference")
"""Parts of the package that take no part in them."""

ENVIRONMENTS: Mapping[str, tuple[str, str]] = {
    "tfdata": ("TENSORFLOW", "tensorflow-cpu==2.21.0"),
    "ray": ("RAY", "ray[data]==2.60.0"),
}
"""Environments of peers: the suffix of the variable that names a peer's environment, and its needed package.
"""


def interpreter(name: str) -> Path:
    """Return the interpreter of the environment that has a peer.

    Raises:
        Failed: If no environment has it.
    """
    ending, package = ENVIRONMENTS[name]
    variable = f"UPRIVER_BENCHMARK_{ending}"
    place = Path(os.environ.get(variable, ROOT / f".venv-{ending.lower()}"))
    found = place / "bin" / "python"
    if not found.exists():
        raise Failed(
            f"{name}: no {found}; make it with `python -m venv {place}` and `{place}/bin/pip install "
            f"'{package}'`, or name another environment in {variable}"
        )
    return found


# ------------------------------------------------------------------------------------------------ records


def version(*names: str, package: Path = ROOT / "src" / "upriver") -> str:
    """Return the version of the code behind a figure: benchmark modules, and a package without `APART`."""
    apart = {package / part for part in APART}
    files = [ROOT / "benchmarks" / "input_pipeline" / f"{name}.py" for name in names]
    files += [ROOT / "benchmarks" / "harness" / f"{name}.py" for name in HARNESS]
    files += [path for path in sorted(package.rglob("*.py")) if apart.isdisjoint(path.parents)]
    return version_of(files)


def versions_of(setting: Setting) -> dict[str, str]:
    """Return the versions of every row of a setting, by its key."""
    stages = ROOT / "src" / "upriver" / "pipeline"
    measuring = ("bed", "data", "model", "workloads")
    return {
        setting.key: version(*MEASURING),
        **{
            f"{setting.key}|{name}": version(*measuring, f"peer_{name}", package=stages)
            for name in setting.peers
        },
    }


def missing(setting: Setting, records: Records) -> list[str]:
    """Return the keys without a run by the current code. Peers use the setting's wait, so they follow it."""
    wanted = versions_of(setting)
    whole = records.rows.get(setting.key, {})
    if whole.get("version") != wanted[setting.key] or (setting.peers and not whole["passed"]):
        return list(wanted)
    return [key for key, now in wanted.items() if not _valid(records.rows.get(key, {}), now, whole)]


def _valid(row: Mapping[str, Any], now: str, whole: Mapping[str, Any]) -> bool:
    return bool(row.get("version") == now and row["wait_s"] == whole["wait_s"])


# ---------------------------------------------------------------------------------------------- measuring


def bar_of(setting: Setting, progress: Progress) -> Bar:
    """Return the bar of a setting, as long as it has epochs at most."""
    candidates = len(CANDIDATES) if setting.disk_mbit is not None else 1
    expected = 4 + 3 * 5 + 6 * setting.repeats + (len(setting.ratios) + 3 * 4) * candidates
    return Bar(progress, expected, setting.key)


def run(setting: Setting, keys: Sequence[str], records: Records, root: Path, bar: Bar) -> list[str]:
    """Run the missing rows of a setting. Return why a peer could not run.

    Raises:
        Failed: If the setting itself fails.
    """
    failed: list[str] = []
    with Bed(setting, root) as bed:
        for key in keys:
            began, facts = time.monotonic(), facts_of(setting, key)
            if key == setting.key:
                stored = mean_bytes(root, WORKLOADS[setting.workload].kind)
                found = {"stored_bytes": stored, **run_ways(bed, setting, root, bar)}
            else:
                wait_s, name = records.rows[setting.key]["wait_s"], key.removeprefix(f"{setting.key}|")
                bar.begin(PEERS[name])
                try:
                    told = peer(bed, name, interpreter(name), setting, root, wait_s)
                except Failed as error:  # the others may work
                    failed.append(f"{key}: {error}")
                    continue
                found = {"wait_s": wait_s, **told}
            records.add(key, {**facts, **found})
            bar.log(f"{key}: {time.monotonic() - began:.0f} s")
    bar.done()
    return failed


def run_ways(bed: Bed, setting: Setting, root: Path, bar: Bar) -> dict[str, Any]:
    """Run every way of a setting except the peers, in one training process."""
    with tempfile.TemporaryDirectory() as cache:
        job = Job(bed, setting, root, Path(cache))
        try:
            return measure(job, setting, Probe(root, setting.workload), bar.begin)
        finally:
            job.end()


def facts_of(setting: Setting, key: str) -> dict[str, Any]:
    """Return the provenance of a row."""
    load = round(os.getloadavg()[0], 2)
    return {"commit": commit(), "version": versions_of(setting)[key], "load": load}


def run_all(
    settings: Sequence[Setting], records: Records, deadline: Deadline, files: int | None
) -> list[str]:
    """Run everything that is missing. Return why some of it failed.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    failed: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(progress_shown())
        for kind in FILES:
            if any(WORKLOADS[setting.workload].kind == kind for setting in settings):
                make_data(root, kind, files)
        for setting in settings:
            keys = missing(setting, records)
            if not keys:
                continue
            deadline.check()
            try:
                failed += run(setting, keys, records, root, bar_of(setting, progress))
            except (Failed, TestbedError) as error:  # the others may work
                failed.append(f"{setting.key}: {error}")
    return failed


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="settings that begin with one"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    return parser.parse_args(arguments)


def main() -> None:
    """Run what is missing, then report all records."""
    options = parsed()
    output, settings = Output.of(options, "input_pipeline"), QUICK if options.quick else SETTINGS
    records = output.records()
    wanted = [setting for setting in settings if any(setting.key.startswith(part) for part in options.only)]
    if options.no_peers:
        wanted = [setting.with_peers() for setting in wanted]
    if options.list:
        for setting in wanted:
            print(f"{setting.key}: {', '.join(missing(setting, records)) or 'finished'}")
        return
    failed: list[str] = []
    if not options.report:
        with until_time_is_up():
            failed = run_all(
                wanted, records, Deadline(options.minutes), QUICK_FILES if options.quick else None
            )
    found = [Found(setting, records) for setting in settings]
    print(write(found, output.folder, output.name))
    failed += [
        f"{each.setting.key}: other losses: {', '.join(each.row['unequal'])}"
        for each in found
        if each.complete and each.row["unequal"]
    ]
    exit_on_faults(failed)


if __name__ == "__main__":
    main()
