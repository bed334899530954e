"""Compare our bytes and our cost model with the runs that HAPI's authors published.

Run with ``python -m benchmarks.published_runs``; it writes ``benchmarks/results/published_runs.md`` and
``results/published_runs.png``. Nothing is measured: the five networks are captured, and two published runs of
each network and link predict all others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import versions
from benchmarks.harness.records import Output, command_line
from benchmarks.published_runs.model import capture
from benchmarks.published_runs.report import hold, plot, report
from benchmarks.published_runs.runs import RUNS, pairs, read_runs
from upriver.errors import ConfigError


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS, help="the published runs")
    options = parser.parse_args()
    output = Output.of(options, "published_runs", whole=options.runs == RUNS)
    try:
        runs = pairs(read_runs(options.runs))
        if options.quick:
            some = list(dict.fromkeys(pair.model for pair in runs))[:2]
            runs = [pair for pair in runs if pair.model in some]
        networks = {name: capture(name) for name in dict.fromkeys(pair.model for pair in runs)}
        facts = {"commit": commit(), "versions": versions("torch", "torchvision", "scipy", "numpy")}
        document = report(networks, runs, facts)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    output.write(document)
    plot(hold(networks, runs), output.path(".png"))


if __name__ == "__main__":
    main()
