"""Time the decision where to cut a request, in a chain of a thousand stages, with its sums prepared.

Run with ``python -m benchmarks.decision_time``; it writes ``benchmarks/results/decision_time.md``.
Sums that do not change from request to request are prepared (`upriver.latency.LatencySums`). The link and the
server's load change at each decision, so that no result is cached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.harness.code_version import commit
from benchmarks.harness.long_chain import STAGES, question
from benchmarks.harness.measuring import Spread, interleave, machine, versions
from benchmarks.harness.records import Output, command_line
from benchmarks.harness.reports import table
from upriver.control.partition import ESTIMATES, CutChoice, PartitionRule, ServerConditions, choose
from upriver.latency import LatencyModel, LatencySums
from upriver.policies import loadpart

CHAINS = 20
DECISIONS = 2001
GOAL_US = 100.0
USUALLY = 99
"""Percentile of the decision times on the page: of thousands, some are interrupted."""

ALGORITHM = "Algorithm 1 alone"
"""``loadpart.decide``: the sums at every cut, and the cut with the least."""

CHOOSING = tuple(name for name in ESTIMATES if PartitionRule(policy=name).cut_of(STAGES) is None)
"""Policies with more than one choice."""

Decision = Callable[[LatencySums, float, float], object]
"""Function of the link's bytes per second and the server's load factor."""


def algorithm(sums: LatencySums, upload: float, load: float) -> int:
    """Return LoADPart's partition decision."""
    return loadpart.decide(sums, upload=upload, load=load)


def choice(rule: PartitionRule, sums: LatencySums, upload: float, load: float) -> CutChoice:
    """Return the choice of `upriver.offload`: the same, against the device alone, by current knowledge."""
    now = ServerConditions(
        upload_bytes_per_s=upload, download_bytes_per_s=upload, rtt_s=1e-3, load=load, wait_s=1e-3
    )
    return choose(rule, float(sums.device_s[-1]), len(sums.device_s) - 1, [(sums, now)])


def decisions() -> dict[str, Decision]:
    """Return every deciding function, by its name."""
    policies = {f"`{name}`": partial(choice, PartitionRule(policy=name)) for name in CHOOSING}
    return {ALGORITHM: algorithm, **policies}


def chain(seed: int) -> LatencySums:
    """Return the sums of a random chain, made once, before any decision."""
    profile, cluster, _ = question(seed)
    return LatencyModel(profile, cluster).sums


def measure(chains: Sequence[LatencySums], repeats: int) -> dict[str, list[float]]:
    """Return the microseconds of each decision, by function.

    Args:
        chains: Chains to cut, one after another.
        repeats: Counted decisions of each function, after one for each chain to warm up.
    """
    draw = random.Random(0)
    nows = [(10 ** draw.uniform(4, 9), draw.uniform(1, 32)) for _ in range(repeats + len(chains))]

    def timed(decide: Decision) -> Callable[[int], float]:
        def run(repeat: int) -> float:
            sums, (upload, load) = chains[repeat % len(chains)], nows[repeat]
            began = time.perf_counter()
            decide(sums, upload, load)
            return 1e6 * (time.perf_counter() - began)

        return run

    taken = interleave({name: timed(decide) for name, decide in decisions().items()}, len(nows))
    return {name: times[len(chains) :] for name, times in taken.items()}


def rows(taken: Mapping[str, Sequence[float]]) -> list[Sequence[object]]:
    """Return each function's microseconds, and whether their median is below the goal."""
    found: list[Sequence[object]] = []
    for name, times in taken.items():
        spread = Spread.of(times)
        usually = float(np.percentile(times, USUALLY))
        found.append((name, spread.text(1), f"{usually:.1f}", "met" if spread.median < GOAL_US else "missed"))
    return found


def report(taken: Mapping[str, Sequence[float]], stages: int) -> str:
    """Return the report as Markdown.

    Args:
        taken: Microseconds, by function.
        stages: Stages of each chain.
    """
    header = (
        "who decides",
        "us, median (lowest to highest)",
        f"{USUALLY} % within, us",
        f"< {GOAL_US:.0f} us",
    )
    found = rows(taken)
    missed = [str(name) for name, *_, judged in found if judged != "met"]
    verdict = f"**missed** for {', '.join(missed)}" if missed else "**met**"
    count = min(map(len, taken.values()))
    return f"""# Deciding where a request is cut, in a chain of {stages} stages

**Goal.** The median decision takes less than {GOAL_US:.0f} us, sums being ready: {verdict}.

{table(header, found)}

- {ALGORITHM} is `loadpart.decide`. Policies are by `choose`, as `upriver.offload` asks it for every request:
  with what is known of one server and its link, and against the device alone.
- {count} decisions each, in turns over {CHAINS} random chains, each with another rate of the link and another
  load. The sums of a chain are made once, before. Looking up what is known of a server is not part of it;
  `load_aware.md` has decisions of its networks with all of that.
- Commit {commit()}; {machine()}; {versions("numpy")}.

Run it again: `python -m benchmarks.decision_time`.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--decisions", type=int, help=f"of each, at least 1; {DECISIONS}, or 3 with --quick")
    options = parser.parse_args(arguments)
    decisions = (3 if options.quick else DECISIONS) if options.decisions is None else options.decisions
    if decisions < 1:
        parser.error(f"--decisions must be at least 1, got {decisions}")
    chains = [chain(seed) for seed in range(CHAINS)]
    text = report(measure(chains, decisions), STAGES)
    Output.of(options, "decision_time").write(text)


if __name__ == "__main__":
    main()
