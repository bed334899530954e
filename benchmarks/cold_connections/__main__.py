"""Time the first answer with a store that limits the rate of each connection.

The claim: with a store that gives a connection 80 MB/s and is 20 ms away, a process whose machine has loaded
from it before answers sooner than the first one there, which has to find the best number of concurrent
requests; and as soon as with the best number of requests, within 10 %, however that is known.

The store is on the same host, behind loopback, and holds each connection to its rate. Each run is a fork of a
process that has imported PyTorch and the models. A round has five sequential runs that share a cache, and two
runs without a cache: one begins with as many requests as it may have, and one downloads everything by 8
threads, and only then loads and runs.

Run ``python -m benchmarks.cold_connections``; it writes ``results/cold_connections.md``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.cold_start.bed import Local
from benchmarks.cold_start.forked import BATCH, child, publish, run, spec_of
from benchmarks.cold_start.models import MODELS
from benchmarks.cold_start.settings import OURS, WAYS
from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line, exit_on_faults
from benchmarks.harness.reports import table

CONNECTION_BYTES_PER_S, LATENCY_S = 80e6, 0.02
MOST_REQUESTS = 8
CHOSEN = ("resnet50", "gpt2", "vgg19")
LOADS, REPEATS = 5, 7
NEAR = 0.1

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Times of each run, by model and by name of the load."""

KNOWN, SEQUENTIAL = "told", "sequential"


def load_number(number: int) -> str:
    """Return the name of a run: the number of the load from this store."""
    return f"load {number}"


NAMES = (*map(load_number, range(1, LOADS + 1)), KNOWN, SEQUENTIAL)


def ours(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Load with upriver. Return the times and the first and last number of requests."""
    from upriver.coldstart.fetch.concurrency import ConcurrencySearch
    from upriver.coldstart.link_cache import StoreLink

    flows: list[ConcurrencySearch] = []
    begin = ConcurrencySearch.__init__

    def begun(self: ConcurrencySearch, link: StoreLink, **limits: Any) -> None:
        if spec["requests"]:
            link = replace(link, requests=spec["requests"])
        begin(self, link, **limits)
        self.began = self.wanted  # type: ignore[attr-defined]
        flows.append(self)

    ConcurrencySearch.__init__ = begun  # type: ignore[method-assign]
    found = run(spec)
    (used,) = flows
    return {**found, "began": used.began, "ended": used.wanted}  # type: ignore[attr-defined]


def measure(models: Sequence[str], *, repeats: int) -> tuple[Runs, dict[str, int]]:
    """Run rounds of all models in turn. Return the results, and the bytes of each model."""
    console = Console(stderr=True)
    found: Runs = {model: {name: [] for name in NAMES} for model in models}
    for model in models:
        MODELS[model].prepare()
    told = ("--latency-s", LATENCY_S, "--connection-bytes-per-s", CONNECTION_BYTES_PER_S)
    with Local(*told) as place, tempfile.TemporaryDirectory() as scratch:
        knob = {"knob": MOST_REQUESTS, "started": False}
        specs = {model: spec_of(model, place, scratch, [OURS]) | knob for model in models}
        nbytes = {model: child(publish, spec)["nbytes"] for model, spec in specs.items()}
        for repeat in range(repeats):
            for model, spec in specs.items():
                for name in NAMES:
                    shared = name not in (KNOWN, SEQUENTIAL)
                    cache = f"{scratch}/{model} {repeat}{'' if shared else f' {name}'}"
                    task = {**spec, "cache": cache, "run": SEQUENTIAL if name == SEQUENTIAL else OURS}
                    task["requests"] = 2 * MOST_REQUESTS if name == KNOWN else 0
                    got = child(run if name == SEQUENTIAL else ours, task)
                    found[model][name].append(got)
                    console.print(f"{repeat} {model} {name}: {got['answered_s']:.3f} s", markup=False)
    return found, nbytes


def text(found: Runs, nbytes: Mapping[str, int]) -> str:
    """Return the report."""
    _, claim, place, *_ = __doc__.split("\n\n")
    rows, sooner, near = [], 0, 0
    for model, runs in found.items():
        seconds = {name: Spread.of(each["answered_s"] for each in runs[name]) for name in NAMES}
        last = load_number(LOADS)
        sooner += seconds[last].median < seconds[load_number(1)].median
        near += seconds[last].median <= (1 + NEAR) * seconds[KNOWN].median
        rows.append(
            [MODELS[model].title, f"{nbytes[model] / 1e6:.0f}", *(each.text() for each in seconds.values())]
        )
    began = [
        [
            MODELS[model].title,
            *(
                ", ".join(sorted({f"{each['began']} to {each['ended']}" for each in runs[name]}))
                for name in NAMES[:LOADS]
            ),
        ]
        for model, runs in found.items()
    ]
    every = [each for runs in found.values() for many in runs.values() for each in many]
    right = sum(each["equal"] for each in every)
    header = ["model", "MB", *(f"{name} from there" for name in NAMES[:LOADS])]
    header += [f"told to begin with {MOST_REQUESTS}", WAYS[SEQUENTIAL].title]
    return "\n".join(
        [
            "# Cold start where a connection has a part of the link",
            "",
            claim.replace("The claim: with", "**Claim.** With"),
            "",
            place,
            "",
            f"The {LOADS}th load sooner than the first: {sooner} of {len(found)}. Within {NEAR:.0%} of one "
            f"that is told: {near} of {len(found)}.",
            "",
            table(header, rows),
            "",
            f"Seconds from the end of imports to the first answer: median (least to most) of "
            f"{len(every) // len(NAMES) // len(found)} rounds, batch {BATCH}.",
            "",
            "Requests at once that a load began and ended with, in all rounds:",
            "",
            table(["model", *NAMES[:LOADS]], began),
            "",
            f"{right} of {len(every)} answers were `torch.equal` to those of the whole model.",
            "",
            f"Upriver at {commit()}; {machine()}; {versions('torch', 'obstore')}.",
            "",
        ]
    )


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, help=f"rounds; {REPEATS}, or 1 with --quick")
    parser.add_argument("--models", help=f"{','.join(CHOSEN)}, or squeezenet with --quick")
    chosen = parser.parse_args()
    models = (chosen.models or ("squeezenet" if chosen.quick else ",".join(CHOSEN))).split(",")
    repeats = chosen.repeats or (1 if chosen.quick else REPEATS)
    output = Output.of(chosen, "cold_connections", whole=set(CHOSEN) <= set(models))
    found, nbytes = measure(models, repeats=repeats)
    output.write(text(found, nbytes))
    every = ((model, name, each) for model, runs in found.items() for name in runs for each in runs[name])
    wrong = dict.fromkeys((model, name) for model, name, each in every if not each["equal"])
    exit_on_faults([f"{model}, {name}: answers with other bits" for model, name in wrong])


if __name__ == "__main__":
    main()
