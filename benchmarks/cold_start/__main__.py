"""Time the first answer of a fresh process whose model is in an object store, and measure its resources.

The claim: from process start to the first right answer, and from the end of its imports,

- upriver is fastest, or within 3 % of the fastest system, for seven models from 98 MB to 1 GB and batches of
  1 to 32, on links of 0.1, 1 and (without a shape) about 10 Gbit/s: against downloading everything first,
  layer by layer, PISeL's groups, boto3 with safetensors or torch.load, runai-model-streamer, tensorizer and
  s3torchconnector, each at its best concurrency, with a model that its constructor or upriver constructs;
- no model is too small to gain by it;
- it reaches 0.85 of the bound at 1 Gbit/s (see `bound`);
- it takes at most 1.1 times the weights above the memory of its imports;
- after the load, a call costs the same as in a plain model, within 1 %;
- every answer is ``torch.equal`` to that of the whole model.

Run ``python -m benchmarks.cold_start`` as root, after installing Swift (``scripts/swift install``). It may be
ended at any moment: each run is a line of ``results/cold_start.jsonl``, and the next start resumes there. It
makes the first turn of all settings, then the second one of all, and so on, so that every setting has early
results. ``--only gpt2`` selects settings by the beginning of their names, ``--minutes 90`` ends it between
two turns, ``--repeats 3`` makes fewer of them, ``--list`` prints the progress, ``--report`` only writes
``results/cold_start.md`` and ``.png`` from the existing runs. All of it takes 10 to 16 hours.
``--quick`` shows in some seconds, without root and on this host alone, that it works.

All processes run a copy of the code that is made at the start. Runs by other code are repeated: upriver's own
after a change of upriver, with all of their turn, and others' after a change of their way (`versions`).

Other systems are in an environment of their own, which ``UPRIVER_BENCHMARK_COLD_PEERS`` names. Without it
only ``--no-peers`` starts. The process has one core and a network namespace, and the store another one of
each.
"""

from __future__ import annotations

import argparse
import compileall
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.cold_start.bed import Jobs, Local, Namespaces, Place, copied
from benchmarks.cold_start.found import Found, wrong
from benchmarks.cold_start.measure import Measures, missing, narrowed
from benchmarks.cold_start.peers import Peers
from benchmarks.cold_start.report import write
from benchmarks.cold_start.settings import QUICK, SETTINGS, Setting
from benchmarks.cold_start.versions import Versions
from benchmarks.harness.children import Failed
from benchmarks.harness.code_version import commit
from benchmarks.harness.hosts import sigterm_raises
from benchmarks.harness.records import (
    Deadline,
    Output,
    Records,
    command_line,
    exit_on_faults,
    until_time_is_up,
)
from benchmarks.harness.testbed import TestbedError


def run_all(
    settings: Sequence[Setting],
    records: Records,
    deadline: Deadline,
    peers: Peers,
    failed: list[str],
    *,
    quick: bool,
) -> None:
    """Run everything that is missing.

    Args:
        settings: With the ways that can be run.
        records: Store of the records.
        deadline: Time after which no further turn begins.
        peers: Their environment runs the ways of others.
        failed: Receives the reasons for missing records.
        quick: Whether to run on this host alone, without sweeps of knobs.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        stack.enter_context(sigterm_raises())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="upriver-cold-scratch-")))
        code, of_commit = copied(scratch / "code"), commit()
        compileall.compile_dir(code, quiet=1)  # otherwise the first process of each kind would compile
        versions = Versions(code, peers.versions)
        wanted = [each for each in settings if missing(each, records, versions, sweeps=not quick)]
        if not wanted:
            return
        deadline.check()
        status = stack.enter_context(console.status("starting"))
        place: Place = stack.enter_context(Local()) if quick else stack.enter_context(Namespaces())
        jobs = Jobs(place, peers, scratch, code)
        measures = Measures(
            jobs, records, wanted, versions, status.update, commit=of_commit, sweeps=not quick
        )
        go_through(measures, deadline, failed, console.print)


def go_through(measures: Measures, deadline: Deadline, failed: list[str], say: Callable[[str], None]) -> None:
    """Run the first turn of all settings, then the second one of all, and so on.

    Args:
        measures: Runs the turns.
        deadline: Time after which no further turn begins.
        failed: Receives the reasons for missing records.
        say: Called with each finished turn, and with the expected time of the rest.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    broken: set[str] = set()
    spent_s, spent = 0.0, 0
    for number in range(max(setting.repeats for setting in measures.settings)):
        for setting in measures.settings:
            tasks = measures.missing(setting, number)
            if setting.key in broken or not tasks:
                continue
            deadline.check()
            began = time.monotonic()
            try:
                for task in tasks:
                    row = measures.make(task)
                    if task.ours and "error" in row:
                        failed.append(f"{task.key}: {row['error']}")
            except TestbedError as error:  # the link may have its rate in the next turn
                failed.append(f"{setting.key}, turn {number}: {error}")
            except Failed as error:  # this model is not in the store, but others may be
                failed.append(f"{setting.key}: {error}")
                broken.add(setting.key)
            took_s = time.monotonic() - began
            spent_s, spent = spent_s + took_s, spent + sum(task.weight for task in tasks)
            left = {task.key: task.weight for each in measures.settings for task in measures.missing(each)}
            rest = sum(left.values())
            say(
                f"{setting.key}, turn {number}: {took_s:.0f} s; what is left would take some "
                f"{rest * spent_s / spent / 3600:.1f} h"
            )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="settings that begin with one"
    )
    parser.add_argument("--repeats", type=int, help="turns of each setting, if it has more")
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    parser.add_argument("--list", action="store_true", help="only list the settings and how far they are")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"argument --repeats: must be at least 1, got {options.repeats}")
    return options


def main() -> None:
    """Run what is missing, then report all records."""
    options = parsed()
    output, settings = Output.of(options, "cold_start"), QUICK if options.quick else SETTINGS
    records = output.records()
    failed: list[str] = []
    try:
        peers = Peers(without=options.no_peers or options.quick)
        wanted = [
            narrowed(setting, peers.ways(), options.repeats)
            for setting in settings
            if any(setting.key.startswith(part) for part in options.only)
        ]
        if options.list:
            list_what_is_left(wanted, records, Versions(packages=peers.versions), sweeps=not options.quick)
            return
        if not options.report:
            if not (options.no_peers or options.quick):
                peers.check()
            print(f"ways that take part: {', '.join(peers.ways())}", file=sys.stderr)
            print(f"ways that are left out: {', '.join(peers.left_out()) or 'none'}", file=sys.stderr)
            with until_time_is_up():
                run_all(wanted, records, Deadline(options.minutes), peers, failed, quick=options.quick)
    except (TestbedError, Failed) as error:  # no hosts to run on, or no system to compare with
        sys.exit(f"error: {error}")
    found = [Found(setting, records) for setting in settings]
    print(write(found, output.folder, output.name, hint=peers.hint()))
    exit_on_faults([*failed, *wrong(found)])


def list_what_is_left(
    settings: Sequence[Setting], records: Records, versions: Versions, *, sweeps: bool
) -> None:
    """Print the progress of all settings."""
    for setting in settings:
        left = sum(task.weight for task in missing(setting, records, versions, sweeps=sweeps))
        print(f"{setting.key}: {f'some {left} processes are left' if left else 'finished'}")


if __name__ == "__main__":
    main()
