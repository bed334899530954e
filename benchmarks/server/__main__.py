"""Measure a near-data server whose tenants request more than its capacity.

Run ``python -m benchmarks.server``. It may be ended at any moment: each run is a line of
``results/server.jsonl``, and the next start resumes there. ``--minutes 20`` ends it by itself, ``--only
NAME…`` selects claims, ``--list`` names them, ``--quick`` shows with a tiny network that one of them works,
``--report`` writes ``results/server.md`` and its plots from the existing runs. All of it takes some 50
minutes where a core takes 16 ms for a photograph through AlexNet.

The server has the first core. The processes that load or watch it have the last one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from benchmarks.harness.children import Failed
from benchmarks.harness.hosts import sigterm_raises
from benchmarks.harness.measuring import confine, let_threads_sleep
from benchmarks.harness.records import (
    Deadline,
    Output,
    Records,
    command_line,
    exit_on_faults,
    until_time_is_up,
)
from benchmarks.server import adaptation as server_adaptation
from benchmarks.server import concurrency as server_concurrency
from benchmarks.server import fairness as server_fairness
from benchmarks.server import memory as server_memory
from benchmarks.server import overload as server_overload
from benchmarks.server import reuse as server_reuse
from benchmarks.server import stalled as server_stalled
from benchmarks.server import tenants as server_tenants
from benchmarks.server.claim import Bench, Claim, Rows
from benchmarks.server.host import CORES, LOAD_CORE
from benchmarks.server.load import WRONG
from benchmarks.server.networks import SIDE, SIDES, TINY
from benchmarks.server.report import write
from upriver.errors import UpriverError

MODULES = (
    server_memory,
    server_fairness,
    server_concurrency,
    server_tenants,
    server_adaptation,
    server_reuse,
    server_overload,
    server_stalled,
)
FULL: tuple[Claim, ...] = tuple(module.FULL for module in MODULES)
QUICK: tuple[Claim, ...] = tuple(module.QUICK for module in MODULES)

QUICK_NAMES = ("reuse",)
"""Claims of the quick form, unless it is told which. Each takes some ten seconds."""

SAMPLES, QUICK_SAMPLES = 200, 10
"""Numbers of photographs. All are different within any request whose answer is read."""


def bench(records: Records, deadline: Deadline, folder: Path, *, quick: bool) -> Bench:
    """Return the bench of the claims."""
    return Bench(
        records,
        deadline,
        folder,
        samples=QUICK_SAMPLES if quick else SAMPLES,
        side=SIDES[TINY] if quick else SIDE,
    )


def measure(claims: Sequence[Claim], on: Bench) -> list[str]:
    """Make the missing runs. Return why some of them failed.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    failed = []
    for claim in claims:
        if on.missing(claim):
            try:
                claim.measure(on)
            except (Failed, UpriverError, OSError, psutil.Error) as error:  # the others may work
                failed.append(f"{claim.name}: {error}")
                print(f"error: {failed[-1]}", file=sys.stderr, flush=True)
    return failed


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = [claim.name for claim in FULL]
    parser = command_line(__doc__, resumable=True)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="claims")
    parser.add_argument("--list", action="store_true", help="only list the claims and how far they are")
    options = parser.parse_args(arguments)
    options.only = options.only or (list(QUICK_NAMES) if options.quick and not options.list else names)
    return options


def main() -> None:
    """Run what is missing, then report all records."""
    options = parsed()
    if not (options.report or options.list):
        let_threads_sleep()
    output, claims = Output.of(options, "server"), QUICK if options.quick else FULL
    records = output.records()
    wanted = [claim for claim in claims if claim.name in options.only]
    if options.list:
        for claim in wanted:
            print(f"{claim.name}: {claim.title}; {Rows(claim, records).state or 'finished'}")
        return
    failed: list[str] = []
    if not options.report:
        confine([LOAD_CORE])
        torch.set_num_threads(1)
        with until_time_is_up(), sigterm_raises(), tempfile.TemporaryDirectory() as folder:
            deadline = Deadline(options.minutes)
            with bench(records, deadline, Path(folder), quick=options.quick) as on:
                failed = measure(wanted, on)
        confine(CORES)  # the report names them
    print(write(claims, records, output.folder, output.name))
    for claim in claims:
        wrong = sum(row.get("others", {}).get(WRONG, 0) for row in Rows(claim, records).rows)
        failed += [f"{claim.name}: {wrong} wrong answers"] if wrong else []
    exit_on_faults(failed)


if __name__ == "__main__":
    main()
