"""Time the planning for a chain of a thousand stages, by policy.

Run with ``python -m benchmarks.plan_time``; it writes ``benchmarks/results/plan_time.md``. Each
repeat plans another random chain on another random cluster, so that no result is cached.
"""

from __future__ import annotations

import time

from benchmarks.harness.code_version import commit
from benchmarks.harness.long_chain import STAGES, question
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line
from benchmarks.harness.reports import table
from upriver.cost import CostModel
from upriver.policies import POLICIES

REPEATS = 51
GOAL_MS = 5.0


def main() -> None:
    """Measure and report."""
    options = command_line(__doc__).parse_args()
    repeats = 1 if options.quick else REPEATS
    questions = [question(seed) for seed in range(repeats + 1)]
    for asked in questions:
        assert 0 < CostModel(*asked).feasible.sum() <= STAGES, "some cuts fit the memory, and some do not"
    taken: dict[str, list[float]] = {name: [] for name in POLICIES}
    routes: dict[str, int] = dict.fromkeys(POLICIES, 0)
    for number, asked in enumerate(questions):
        for name, policy in POLICIES.items():
            began = time.perf_counter()
            plan = policy(*asked)
            if number:  # the first warms up
                taken[name].append(1e3 * (time.perf_counter() - began))
                routes[name] = max(routes[name], len(plan.routes))
    rows = []
    for name, times in taken.items():
        spread = Spread.of(times)
        rows.append(
            (f"`{name}`", spread.text(), routes[name], "met" if spread.median < GOAL_MS else "missed")
        )
    text = f"""# Planning a chain of {STAGES} stages

**Claim.** Every policy answers in less than {GOAL_MS:.0f} ms, the linear program of the mix included.

{table(("policy", "ms a plan", "routes at most", f"< {GOAL_MS:.0f} ms"), rows)}

- {repeats} random chains and clusters, each policy on each in turn, after one to warm up; the whole call,
  from profile and cluster to the plan with its explanation. Rows of its table are made when they are read.
- Commit {commit()}; {machine()}; {versions("numpy")}.

Run it again: `python -m benchmarks.plan_time`.
"""
    Output.of(options, "plan_time").write(text)


if __name__ == "__main__":
    main()
