"""Compare our bytes and our cost model with the runs that HAPI's authors published.

Run with ``python -m benchmarks.published_runs``; ``--write`` writes ``results/published_runs.md`` and
``results/published_runs.png``. Nothing is measured: the five networks are captured, and two published runs of
each network and link predict all others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import versions
from benchmarks.harness.reports import RESULTS
from benchmarks.published_runs.model import capture
from benchmarks.published_runs.report import hold, plot, report
from benchmarks.published_runs.runs import RUNS, pairs, read_runs
from upriver.errors import ConfigError

RESULT = RESULTS / "published_runs.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS, help="the published runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name} and its picture")
    options = parser.parse_args()
    try:
        runs = pairs(read_runs(options.runs))
        networks = {name: capture(name) for name in dict.fromkeys(pair.model for pair in runs)}
        facts = {"commit": commit(), "versions": versions("torch", "torchvision", "scipy", "numpy")}
        document = report(networks, runs, facts)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(document)
    if options.write:
        RESULT.write_text(document, encoding="utf-8")
        plot(hold(networks, runs), RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
