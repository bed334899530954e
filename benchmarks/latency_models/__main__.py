"""Measure the errors of latency models: operators by kind, as in LoADPart's Table III, and six networks.

Run with ``python -m benchmarks.latency_models``; it writes ``benchmarks/results/latency_models.md``.
The configurations are those of `upriver.profile.latency.benchmark_configs`, fixed beforehand. Every fifth of
a kind is held out, and errors are of the held-out ones. All of it takes some 10 minutes, on one core. Each
kind's timings become a record, so the benchmark can be ended at any moment and resumes there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.harness.code_version import commit
from benchmarks.harness.loadpart_networks import NETWORKS, model_of
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Deadline, Output, Records, command_line, until_time_is_up
from benchmarks.harness.reports import table
from upriver.profile.latency import op_benchmark
from upriver.profile.latency.benchmark_configs import RANGES
from upriver.profile.latency.calibration import LONG_S, OCCASIONS, TABLE_III, MeasuredConfig, fit, plan
from upriver.profile.latency.op_benchmark import OpBenchmark
from upriver.profile.latency.op_calls import OpCall
from upriver.profile.latency.op_kinds import works_of
from upriver.profile.latency.predictor import (
    MODELS,
    KindError,
    ModelName,
    Predictor,
    measure_unknown,
    place_of,
)
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program

RUNS = 9
GOAL = 0.15
"""Largest relative error of a whole network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Measurement and predictions of one network.

    Attributes:
        nodes: Operators of its graph.
        measured_ms: The shortest of the lower quartiles of all occasions, as of an operator.
        runs_ms: All whole runs.
        predicted_ms: By model.
        took_ms: Duration of our prediction.
    """

    name: str
    nodes: int
    measured_ms: float
    runs_ms: Spread
    predicted_ms: Mapping[ModelName, float]
    took_ms: float

    def off(self, model: ModelName) -> float:
        """Return the error relative to the measurement."""
        return self.predicted_ms[model] / self.measured_ms - 1


# ------------------------------------------------------------------------------------- measuring


def build(name: str) -> tuple[Program, torch.Tensor]:
    """Return a network with random weights as a program, and one sample."""
    model, x = model_of(name)
    return capture(model, x), x


def run_network(name: str) -> dict[str, Any]:
    """Return the seconds of whole runs."""
    program, x = build(name)
    seconds = []
    for _ in range(2 + RUNS):
        began = time.perf_counter()
        program.run((x,), 0, program.num_stages)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[2:]}


@functools.cache
def configurations(kind: str, quick: bool) -> tuple[tuple[OpCall, bool], ...]:
    """Return the configurations of a kind, each with whether it is held out."""
    return tuple(plan(kinds=[kind], quick=quick))


def time_kind(kind: str, bench: OpBenchmark, *, quick: bool) -> dict[str, Any]:
    """Return the seconds of each of a kind's configurations."""
    seconds = [float(f"{bench.seconds(call):.4g}") for call, _ in configurations(kind, quick)]
    return {"digest": digest_of(kind, quick=quick), "seconds": seconds}


def digest_of(kind: str, *, quick: bool) -> str:
    """Return a digest of the timed configurations and the method."""
    how = hashlib.sha256(Path(op_benchmark.__file__).read_bytes())
    for call, _ in configurations(kind, quick):
        how.update(call.signature.encode())
    return how.hexdigest()[:16]


def measure(
    records: Records,
    deadline: Deadline,
    *,
    kinds: Sequence[str],
    networks: Sequence[str],
    quick: bool,
    occasions: int = OCCASIONS,
) -> None:
    """Measure the missing records, each on every occasion.

    Raises:
        TimeIsUp: If a record is still missing.
    """
    bench = OpBenchmark()
    for occasion in range(occasions):
        for name in networks:
            if f"{name} {occasion}" not in records:
                deadline.check()
                _keep(records, f"{name} {occasion}", run_network(name))
        for kind in kinds:
            row = records.rows.get(f"{kind} {occasion}")
            if row is None or row["digest"] != digest_of(kind, quick=quick):
                deadline.check()
                _keep(records, f"{kind} {occasion}", time_kind(kind, bench, quick=quick))


def _keep(records: Records, key: str, row: Mapping[str, Any]) -> None:
    records.add(key, {"commit": commit(), "load": round(os.getloadavg()[0], 2), **row})
    print(key, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------- judging


def fitted(records: Records, kinds: Sequence[str], *, quick: bool) -> Predictor:
    """Fit the models to the timings. The shortest time of all occasions counts."""
    measured = []
    for kind in kinds:
        rows = list(_of(records, kind))
        if rows:
            shortest = map(min, zip(*(row["seconds"] for row in rows), strict=True))
            measured += [
                MeasuredConfig(works=works_of(call), seconds=seconds, held_out=held_out)
                for (call, held_out), seconds in zip(configurations(kind, quick), shortest, strict=True)
            ]
    return fit(measured, place_of())


def _of(records: Records, name: str) -> Iterator[dict[str, Any]]:
    for occasion in range(OCCASIONS):
        if f"{name} {occasion}" in records:
            yield records.rows[f"{name} {occasion}"]


def apart(records: Records, kind: str) -> float | None:
    """Return how far an operator's time on another occasion is from its shortest time.

    The result is relative, the median over operators of 50 us and more. No model can predict what a repeated
    measurement changes: of two occasions the shorter one counts, and a third might have been shorter yet.
    """
    rows = [row["seconds"] for row in _of(records, kind)]
    times = [sorted(each) for each in zip(*rows, strict=True)] if len(rows) > 1 else []
    long = [each[1] / each[0] - 1 for each in times if each[0] >= LONG_S]
    return statistics.median(long) if long else None


def predicted(records: Records, predictor: Predictor, name: str) -> Network | None:
    """Return the predictions of a network, or None if it did not run."""
    rows = list(_of(records, name))
    if not rows:
        return None
    graph = build(name)[0].graph
    by_model: dict[ModelName, float] = {}
    for model in MODELS:
        unknown = measure_unknown(graph, predictor, model=model)
        by_model[model] = sum(predictor.stage_seconds(graph, measured=unknown, model=model)) * 1e3
    began = time.perf_counter()
    predictor.node_seconds(graph)
    took_ms = (time.perf_counter() - began) * 1e3
    return Network(
        name=name,
        nodes=len(graph.nodes),
        measured_ms=min(sorted(row["seconds"])[RUNS // 4] for row in rows) * 1e3,
        runs_ms=Spread.of(seconds * 1e3 for row in rows for seconds in row["seconds"]),
        predicted_ms=by_model,
        took_ms=took_ms,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Items that meet a goal, items that miss it, and items without a measurement."""

    met: Sequence[str]
    missed: Sequence[str]
    left: Sequence[str]

    @property
    def text(self) -> str:
        """Return the verdict in words."""
        named = {"missed": self.missed, "met": self.met, "not judged": self.left}
        if not self.met and not self.missed:
            return "not judged"
        return "; ".join(f"{word} for {', '.join(names)}" for word, names in named.items() if names)


def judged(within: Mapping[str, bool], every: Iterable[str]) -> Judged:
    """Judge a goal.

    Args:
        within: Of the measured items, whether each is within the goal.
        every: All items of the goal.
    """
    return Judged(
        met=[name for name in every if within.get(name) is True],
        missed=[name for name in every if within.get(name) is False],
        left=[name for name in every if name not in within],
    )


def kinds_within(errors: Sequence[KindError]) -> dict[str, bool]:
    """Return for the paper's kinds with long operators whether ours is no worse than its device column."""
    return {
        error.kind: error.mape_long_percent <= TABLE_III[error.kind]["device"][1]
        for error in errors
        if error.model == "ours" and error.kind in TABLE_III and error.mape_long_percent is not None
    }


def report(
    errors: Sequence[KindError],
    networks: Sequence[Network],
    rows: Collection[Mapping[str, Any]],
    noise: Mapping[str, float | None] = MappingProxyType({}),
) -> str:
    """Return the report as Markdown.

    Args:
        rows: The records.
        noise: Of kinds: `apart`.
    """
    kinds = judged(kinds_within(errors), TABLE_III)
    whole = judged({network.name: abs(network.off("ours")) <= GOAL for network in networks}, NETWORKS)
    took = max((network.took_ms for network in networks), default=0.0)
    loads = [row["load"] for row in rows]
    return f"""# Latency models

**Goals.** By the MAPE of held-out operators that take 50 us and more, ours is off by no more than LoADPart's
paper reports for its device (Table III, operators of any length), kind by kind: {kinds.text}.
The sum that ours predicts for a whole network is at most {GOAL:.0%} off the shortest of its lower quartiles:
{whole.text}.

## By kind of operator

{table(_HEADER, list(_rows(errors, noise)))}

- RMSE in us / MAPE in %, on configurations held out. `LoADPart edge` and `device` are its own models
  (non-negative least squares without an intercept, Tables I and II) with the features of that column, fitted
  to timings of this machine; `paper` is what it reports of its own machines (Table III).
- Each configuration was timed on {OCCASIONS} occasions, minutes apart, of which the shortest time counts: the
  lower quartile of some runs. Before each run what the operator reads is written anew, and all else is pushed
  out of the caches, its code too: in a program other operators have run since.
- `occasions apart`: how far the second shortest time of an operator of 50 us and more is above its shortest,
  at the median. Held against a goal of less, a miss says nothing of the model.

## Whole networks

{table(_NETWORK_HEADER, list(map(_network_row, networks)))}

- Batch 1, float32, one thread, random weights. What is measured is the captured program as a
  whole, {RUNS} runs on each of {OCCASIONS} occasions: the shortest of their lower quartiles, as of operators;
  beside it the median of all runs (lowest to highest). A prediction is the sum over the operators, each as if
  it ran alone; ours takes up to {took:.0f} ms.

## How

- {machine()}. {versions("torch", "torchvision", "timm", "scipy")}.
  Measured at commit {", ".join(dict.fromkeys(row["commit"] for row in rows)) or "none"}.
- Load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f}. A machine that others share, whose
  work makes memory slower at one time than at another: an error of some per cent may be the machine's.
- Not shown: an accelerator, other types than float32, several threads.

Run it again: `python -m benchmarks.latency_models`.
"""


_HEADER = (
    "kind", "n", "LoADPart edge", "LoADPart device", "ours", "n of 50 us", "LoADPart device, %", "ours, %",
    "paper edge", "paper device", "occasions apart, %",
)  # fmt: skip

_NETWORK_HEADER = (
    "network", "operators", "measured, ms", "all runs, ms",
    "ours, ms", "off", "LoADPart edge, ms", "off", "LoADPart device, ms", "off",
)  # fmt: skip


def _rows(errors: Sequence[KindError], noise: Mapping[str, float | None]) -> Iterator[Sequence[object]]:
    found = {(error.kind, error.model): error for error in errors}
    for kind in dict.fromkeys(error.kind for error in errors):
        ours = found.get((kind, "ours"))
        paper = TABLE_III.get(kind)
        yield (
            kind,
            ours.count if ours else "",
            *(_both(found.get((kind, model))) for model in ("edge", "device", "ours")),
            ours.count_long if ours else "",
            *(_long(found.get((kind, model))) for model in ("device", "ours")),
            *("{:.1f} / {:.1f}".format(*paper[side]) if paper else "" for side in ("edge", "device")),
            "" if (apart_by := noise.get(kind)) is None else f"{apart_by * 100:.1f}",
        )


def _both(error: KindError | None) -> str:
    return f"{error.rmse_us:.1f} / {error.mape_percent:.1f}" if error else ""


def _long(error: KindError | None) -> str:
    return f"{error.mape_long_percent:.1f}" if error and error.mape_long_percent is not None else ""


def _network_row(network: Network) -> Sequence[object]:
    cells: list[object] = [network.name, network.nodes, f"{network.measured_ms:.1f}", network.runs_ms.text(1)]
    for model in MODELS:
        cells += [f"{network.predicted_ms[model]:.1f}", f"{network.off(model):+.1%}"]
    return cells


def main() -> None:
    options = command_line(__doc__, resumable=True).parse_args()
    torch.set_num_threads(1)
    output = Output.of(options, "latency_models")
    kinds = tuple(TABLE_III) if options.quick else tuple(RANGES)
    names = tuple(NETWORKS)[: 1 if options.quick else None]
    records = output.records()
    if not options.report:
        with until_time_is_up():
            deadline = Deadline(options.minutes)
            occasions = 1 if options.quick else OCCASIONS
            measure(records, deadline, kinds=kinds, networks=names, quick=options.quick, occasions=occasions)
    predictor = fitted(records, kinds, quick=options.quick)
    networks = [network for each in names if (network := predicted(records, predictor, each))]
    noise = {kind: apart(records, kind) for kind in kinds}
    text = report(predictor.errors, networks, records.rows.values(), noise)
    output.write(text)


if __name__ == "__main__":
    main()
