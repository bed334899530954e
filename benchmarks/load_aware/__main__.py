"""Measure whether knowledge of the server's load pays when a network is split between device and server.

The claim: with a slow device, a thin link and a busy server, upriver's policy

- answers faster than Neurosurgeon, which is blind to load, while the load changes, by the figures of LoADPart
  (SqueezeNet 14.2 % on average and 32.3 % at best, AlexNet 4.95 % and 39.4 %), and at most 3 % slower with
  the networks that cannot gain;
- is never more than 3 % above the best of local and full offload, and within 10 % of the best fixed cut in
  hindsight;
- spends at most 1 % of the time of 100 requests on cutting;
- gives the same answers to the bit, wherever they are computed.

Run ``python -m benchmarks.load_aware`` as root. It may be ended at any moment: each part with each network is
a line of ``results/load_aware.jsonl``, and the next start resumes there. ``--only load`` selects a part,
``--only link-alexnet`` a part with one network, ``--minutes 20`` begins no further one after that time,
``--list`` prints the progress, ``--quick`` shows in some seconds that it works, ``--report`` only writes
``results/load_aware.md`` and its plots from the existing runs. All of it takes some 65 minutes on two cores.

The device has the first core and a network namespace, the server the second, its disturbers, and another one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from benchmarks.load_aware.bed import Bed, device_on
from benchmarks.load_aware.found import Found
from benchmarks.load_aware.measure import measure
from benchmarks.load_aware.report import write
from benchmarks.load_aware.schedule import LEVELS, OURS, QUICK, SETTINGS, Setting

MEASURING = (
    *(f"load_aware/{name}.py" for name in ("background", "bed", "job", "measure", "schedule")),
    "harness/children.py",
    "harness/loadpart_networks.py",
)
"""Benchmark modules that determine a setting's figures, in addition to the package."""


def version() -> str:
    """Return the version of the code behind a row."""
    files = [ROOT / "benchmarks" / name for name in MEASURING]
    return version_of([*files, *sorted((ROOT / "src" / "upriver").rglob("*.py"))])


def missing(setting: Setting, records: Records) -> bool:
    """Return whether the setting has no run by the current code."""
    return bool(records.rows.get(setting.key, {}).get("version") != version())


# ---------------------------------------------------------------------------------------------- measuring


def run(settings: Sequence[Setting], records: Records, deadline: Deadline, bar: Bar) -> None:
    """Run settings of one network, one after another, with one server and one device.

    Raises:
        Failed: If a setting fails.
        TimeIsUp: If no further setting may begin.
    """
    first = settings[0]
    phases = [phase for setting in settings for phase in setting.phases]
    most = max(LEVELS[phase.level].processes for phase in phases)
    with tempfile.TemporaryDirectory() as folder, Bed(Path(folder), most) as bed:
        carried = bed.prove([phase.mbit for phase in phases])
        bed.begin(first.phases[0])
        with device_on(bed, first) as device:
            bar.say(f"{first.network}: the server is measured")
            device.ask(do="open", way=OURS)
            facts = {**device.ask(do="facts"), "carried": carried}
            for setting in settings:
                deadline.check()
                load = round(os.getloadavg()[0], 2)
                bar.say(f"{setting.key}: warms up")
                found = measure(device, bed, setting, bar.begin)
                records.add(setting.key, {**facts_of(setting), **facts, "load": load, **found})


def facts_of(setting: Setting) -> dict[str, Any]:
    """Return the provenance of a row."""
    return {
        "commit": commit(),
        "version": version(),
        "factor": setting.factor,
        "schedule": [asdict(phase) for phase in setting.phases],
    }


def run_all(settings: Sequence[Setting], records: Records, deadline: Deadline) -> list[str]:
    """Run everything that is missing, network by network. Return why some of it failed.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    failed: list[str] = []
    left = [setting for setting in settings if missing(setting, records)]
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises())
        progress = stack.enter_context(progress_shown())
        bar = Bar(progress, sum(len(setting.phases) for setting in left))
        for network in dict.fromkeys(setting.network for setting in left):
            deadline.check()
            try:
                run([each for each in left if each.network == network], records, deadline, bar)
            except (Failed, TestbedError) as error:  # the others may work
                failed.append(f"{network}: {error}")
    return failed


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="settings that begin with one"
    )
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    return parser.parse_args(arguments)


def main() -> None:
    """Run what is missing, then report all records."""
    options = parsed()
    output, settings = Output.of(options, "load_aware"), QUICK if options.quick else SETTINGS
    records = output.records()
    wanted = [setting for setting in settings if any(setting.key.startswith(part) for part in options.only)]
    if options.list:
        for setting in wanted:
            left = "missing" if missing(setting, records) else "finished"
            print(f"{setting.key}, {setting.seconds:g} s at least: {left}")
        return
    failed: list[str] = []
    if not options.report:
        with until_time_is_up():
            failed = run_all(wanted, records, Deadline(options.minutes))
    found = [Found(setting, records) for setting in settings]
    print(write(found, output.folder, output.name))
    failed += [
        f"{each.setting.key}: {each.wrong} wrong answers" for each in found if each.complete and each.wrong
    ]
    exit_on_faults(failed)


if __name__ == "__main__":
    main()
