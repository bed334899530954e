"""Time the first answer of a fresh process on an accelerator, with a model in an object store.

The claim: from the end of its imports to the first right answer, the accelerator's own start included,
upriver is fastest, or within 3 % of the fastest system. Weights reach the accelerator's memory while it
computes, and every answer is ``torch.equal`` to that of the whole model there.

The store is on the same host, behind loopback and without a limit; `cold_start` covers links. Every way
constructs the model as upriver does, without filling weights that will arrive. Each has its own number of
requests, the best of those tried.

Run ``python -m benchmarks.cold_accelerator``. ``--minutes 8`` ends it before the next turn, and still writes
the runs so far to ``results/cold_accelerator.md``. Every run is a fork of a process that has imported PyTorch
and the models, and has not touched an accelerator. Other systems take part where they are installed next to
upriver.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from benchmarks.cold_start.bed import Local
from benchmarks.cold_start.forked import BATCH, child, publish, run, spec_of
from benchmarks.cold_start.found import NEAR_BEST
from benchmarks.cold_start.models import MODELS
from benchmarks.cold_start.settings import OURS, STREAMED, WAYS
from benchmarks.harness.children import Failed
from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line, exit_on_faults
from benchmarks.harness.reports import table

MINUTES = 30.0
CHOSEN = ("resnet50", "vgg19", "gpt2", "bert")
KNOBS, REPEATS = (4, 16), 5


@dataclass
class Found:
    """All runs.

    Attributes:
        runs: The specification and the times of each run.
        nbytes: Bytes of each model's weights.
        failed: The runs that failed.
        where: The code version and the machine.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    where: str = ""

    @property
    def turns(self) -> int:
        """Return the number of turns that count. The first turn chose the numbers of requests."""
        return max((each["turn"] for each in self.runs), default=0)

    def best(self, model: str, way: str) -> int:
        """Return the number of requests with the fastest run of this way in the first turn."""
        tried = [
            each
            for each in self.runs
            if (each["turn"], each["model"], each["run"], each["started"]) == (0, model, way, False)
        ]
        return min(tried, key=lambda each: each["answered_s"])["knob"] if tried else KNOBS[0]

    def seconds(self, model: str, way: str, started: bool) -> Spread | None:
        """Return the seconds to the first answer."""
        values = [
            each["answered_s"]
            for each in self.runs
            if each["turn"] and (each["model"], each["run"], each["started"]) == (model, way, started)
        ]
        return Spread.of(values) if values else None


# ------------------------------------------------------------------------------------------- beside it


def can_run() -> list[str]:
    """Return the names of the ways whose packages are installed."""
    needs = {name: [package.replace("-", "_") for package in way.needs] for name, way in WAYS.items()}
    return [name for name in WAYS if all(map(importlib.util.find_spec, needs[name]))]


def measure(
    models: Sequence[str], ways: Sequence[str], *, device: str, repeats: int, minutes: float
) -> Found:
    """Measure a turn of every model to choose each way's number of requests, and then the counted turns."""
    ends_s, console = time.monotonic() + 60 * minutes, Console(stderr=True)
    found = Found()
    for model in models:
        MODELS[model].prepare()
    with Local() as place, tempfile.TemporaryDirectory() as scratch:
        specs = {model: spec_of(model, place, scratch, ways, device=device) for model in models}
        for model, spec in specs.items():
            found.nbytes[model] = child(publish, spec)["nbytes"]
        for turn, model in itertools.product(range(repeats + 1), models):
            if time.monotonic() > ends_s:
                break
            knobs = {way: KNOBS if turn == 0 else (found.best(model, way),) for way in ways}
            tasks = [(way, knob, started) for way in ways for knob in knobs[way] for started in (False, True)]
            random.Random(f"{turn} {model}").shuffle(tasks)
            for way, knob, started in tasks:
                task = {"run": way, "knob": knob, "started": started}
                task["cache"] = f"{scratch}/{model}-{way}-{knob}"
                try:
                    got = child(run, specs[model] | task)
                except Failed as error:
                    found.failed.append(f"{model}, {way}: {error}")
                    console.print(found.failed[-1], style="red", markup=False)
                    continue
                found.runs.append({"turn": turn, "model": model} | task | got)
                told = f"{turn} {model} {way} {knob}{' started' if started else ''}"
                console.print(f"{told}: {got['answered_s']:.3f} s", markup=False)
    return found


def text(found: Found, ways: Sequence[str]) -> str:
    """Return the report."""
    _, claim, place, *_ = __doc__.split("\n\n")
    lines = ["# Cold start on an accelerator", ""]
    lines += [claim.replace("The claim: from", "**Claim.** From").replace("``", "`"), "", place, ""]
    for started in (False, True):
        lines += [f"## {'An accelerator that computed before' if started else 'A fresh process'}", ""]
        header = ["model", "MB", *(WAYS[way].title for way in ways), "upriver / best other"]
        rows, met = [], []
        for model, nbytes in found.nbytes.items():
            spreads = [found.seconds(model, way, started) for way in ways]
            medians = {way: each.median for way, each in zip(ways, spreads, strict=True) if each is not None}
            others = [median for way, median in medians.items() if way not in STREAMED]
            ratio = medians[OURS] / min(others) if OURS in medians and others else float("nan")
            met.append(ratio <= 1 + NEAR_BEST)
            cells = ["" if each is None else each.text(2) for each in spreads]
            rows.append([MODELS[model].title, f"{nbytes / 1e6:.0f}", *cells, f"{ratio:.2f}"])
        lines += [f"First, or within 3 % of who is: {sum(met)} of {len(met)}.", "", table(header, rows), ""]
    knobs = " and ".join(map(str, KNOBS))
    turns = f"{found.turns} {'turn' if found.turns == 1 else 'turns'}"
    lines += [
        f"Seconds to the first answer: median (least to most) of {turns} of all ways in an order drawn for "
        f"each, batch {BATCH}. Requests at once: the better of {knobs} in a turn before.",
        "",
    ]
    wrong = Counter((each["model"], each["run"]) for each in found.runs if not each["equal"])
    right = len(found.runs) - wrong.total()
    lines += [
        f"{right} of {len(found.runs)} answers were `torch.equal` to those of the whole model there.",
        "",
    ]
    lines += [
        f"- not equal: {MODELS[model].title} by {WAYS[way].title}, {number} times"
        for (model, way), number in wrong.items()
    ]
    lines += [f"- failed: {each}" for each in sorted(set(found.failed))]
    return "\n".join([*lines, *([""] if wrong or found.failed else []), found.where, ""])


def where() -> str:
    """Return the code version and the machine."""
    import torch

    there = torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"
    return f"Upriver at {commit()}; {there}; {machine()}; {versions('torch', 'obstore')}."


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--models", default=",".join(CHOSEN))
    parser.add_argument("--device", default="cuda", help="cpu shows without an accelerator that it works")
    parser.add_argument("--ways", default=",".join(can_run()))
    parser.set_defaults(minutes=MINUTES)
    chosen = parser.parse_args()
    if chosen.quick:
        vars(chosen).update(device="cpu", models="squeezenet", ways=f"{OURS},sequential", repeats=1)
    ways = chosen.ways.split(",")
    whole = chosen.device == "cuda" and set(CHOSEN) <= set(chosen.models.split(","))
    whole = whole and set(can_run()) <= set(ways)
    output = Output.of(chosen, "cold_accelerator", whole=whole or chosen.report)
    runs = output.path(".json")
    if chosen.report:
        found = Found(**json.loads(runs.read_text(encoding="utf-8")))
    else:
        models, device = chosen.models.split(","), chosen.device
        found = measure(models, ways, device=device, repeats=chosen.repeats, minutes=chosen.minutes)
        found.where = where()
        runs.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
    output.write(text(found, ways))
    wrong = dict.fromkeys((each["model"], each["run"]) for each in found.runs if not each["equal"])
    exit_on_faults([*found.failed, *(f"{model}, {run}: answers with other bits" for model, run in wrong)])


if __name__ == "__main__":
    main()
