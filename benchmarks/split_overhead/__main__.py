"""Compare prefix and tail with the whole model on one machine: the cost of a cut that gains nothing.

Run with ``python -m benchmarks.split_overhead``; it writes ``benchmarks/results/split_overhead.md``.
One training iteration (forward, backward, no step) of the user's model takes turns with the same through the
captured prefix and the tail. Memory is the peak of a process that does only the one or the other. The cost of
a job's step without the tail's own modules is measured by itself: ``--steps`` measures only that, and
replaces only this part of the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.children import module_command, paths
from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, interleave, machine, versions
from benchmarks.harness.networks import BATCH, NETWORKS, build
from benchmarks.harness.records import Output, command_line, exit_on_faults
from benchmarks.harness.reports import table
from upriver._torchvision import ensure_torchvision
from upriver.program.eval_mode import no_fast_path
from upriver.program.freeze import InEval, freeze_to, frozen_units, keep_in_eval
from upriver.program.module_state.frozen_guard import FrozenGuard
from upriver.program.split.split import split

GOAL = 1.03
REPEATS = 7
PEAKS = 3
STEP_REPEATS, QUICK_STEP_REPEATS = 200, 5
QUICK_BATCH = 2
STEPS_TITLE = "## What a step takes beside the tail's own modules"
WAYS = ("plain", "whole", "split")


def loss_of(answer: Any) -> torch.Tensor:
    """Return a loss to differentiate."""
    return answer.float().square().mean()


class Run:
    """Measure one network, whole and split."""

    def __init__(self, name: str, samples: int) -> None:
        self.model, self.batch = build(name, samples)
        began = time.perf_counter()
        self.parts = split(self.model, self.batch)
        self.split_s = time.perf_counter() - began
        if self.parts.program is None:
            raise SystemExit(f"{name} runs unsplit: {self.parts.why_not}")
        self.losses: dict[str, list[float]] = {"fused": [], "whole": [], "split": []}

    def ways(self) -> dict[str, Callable[[int], float]]:
        """Return the compared ways; ``fused`` only where torch has a fused path for this network."""
        ways: dict[str, Callable[[int], float]] = {"whole": self.whole, "split": self.cut}
        has_fused = any(isinstance(module, torch.nn.MultiheadAttention) for module in self.model.modules())
        return ways | ({"fused": self.fused} if has_fused else {})

    def whole(self, repeat: int) -> float:
        """Return the seconds of an iteration of the user's own model, by the reference's numerics."""
        with no_fast_path():
            return self._whole(repeat, "whole")

    def fused(self, repeat: int) -> float:
        """Return the seconds with torch's fused attention in eval, which has other low bits."""
        return self._whole(repeat, "fused")

    def _whole(self, repeat: int, way: str) -> float:
        self._begin(repeat)
        began = time.perf_counter()
        loss = loss_of(self.model(self.batch))
        loss.backward()
        self.losses[way].append(loss.item())
        return time.perf_counter() - began

    def cut(self, repeat: int) -> float:
        """Return the seconds of an iteration through prefix and tail."""
        program = self.parts.program
        assert program is not None
        self._begin(repeat)
        began = time.perf_counter()
        values = program.run((self.batch,), 0, program.num_stages)
        loss = loss_of(self.parts.tail(self.parts.tail.values.one_or_all(values)))
        loss.backward()
        self.losses["split"].append(loss.item())
        return time.perf_counter() - began

    def _begin(self, repeat: int) -> None:
        torch.manual_seed(repeat)
        self.model.zero_grad(set_to_none=True)
        keep_in_eval(self.model, list(self.parts.in_eval))


def measure(name: str, repeats: int, samples: int) -> dict[str, Any]:
    """Measure one row's times in this process."""
    run = Run(name, samples)
    interleave(run.ways(), 1)  # warms up
    run.losses = {"fused": [], "whole": [], "split": []}
    seconds = interleave(run.ways(), repeats)
    program = run.parts.program
    assert program is not None
    return {
        "network": name,
        "cuts": program.num_stages,
        **seconds,
        "losses": run.losses,
        "split_s": run.split_s,
    }


def peak_of(name: str, way: str, samples: int) -> dict[str, float]:
    """Return the peak memory of a process that trains one way, and of cutting the model before.

    Args:
        name: Name of the network.
        way: ``plain`` never cuts the model; ``whole`` cuts it, but trains it whole; ``split``.
        samples: Samples of a batch.
    """
    model, batch = build(name, samples)
    keep_in_eval(model, frozen_units(model))
    _reset_peak()
    parts = split(model, batch) if way != "plain" else None
    cutting = _peak()
    _reset_peak()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        if parts is None or way == "whole":
            answer = model(batch)
        else:
            assert parts.program is not None
            values = parts.program.run((batch,), 0, parts.program.num_stages)
            answer = parts.tail(parts.tail.values.one_or_all(values))
        loss_of(answer).backward()
    return {"training": _peak(), "cutting": cutting}


def _reset_peak() -> None:
    """Reset this process's peak memory (see proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> float:
    """Return this process's peak memory since the reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def child(do: str, *arguments: object) -> Any:
    """Execute one of `ACTIONS` in a process of its own, and return its result."""
    argv = [*map(str, module_command("split_overhead", "--one", json.dumps([do, *arguments])))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | paths())
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def here(do: str, *arguments: object) -> Any:
    """Execute one of `ACTIONS` in this process, which has imported everything after the first one."""
    return ACTIONS[do](*arguments)


class Step:
    """Measure a step of a job on existing features, and direct calls of the tail's modules."""

    def __init__(self, name: str) -> None:
        self.model, batch, last, self.by_hand = STEPS[name]()
        freeze_to(self.model, last)
        parts = split(self.model.train(), batch)
        if parts.program is None:
            raise SystemExit(f"{name} runs unsplit: {parts.why_not}")
        self.tail, self.in_eval = parts.tail, InEval(self.model, parts.in_eval)
        self.guard = FrozenGuard(
            self.model,
            parts.prefix_units,
            also=[weight.key for weight in parts.program.graph.weights],
            skipped=parts.skipped,
            attributes=parts.attributes,
        )
        values = parts.program.run((batch,), 0, parts.program.num_stages)
        self.features = parts.tail.values.select(values, range(1))
        self.frozen = sum(1 for path in parts.skipped for _ in self.model.get_submodule(path).modules())

    def step(self) -> None:
        """Run what ``job(features)`` and the job's iterator do around it."""
        self.guard.check_versions()
        self.in_eval()
        self.tail(self.tail.values.one_or_all(self.features))
        self.guard.check_versions()

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return the processor milliseconds of each, in turns, and of one check of the frozen part."""
        ways = {
            "hand": lambda: self.by_hand(self.features[0]),
            "step": self.step,
            "look": self.guard.check_versions,
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        with torch.no_grad():
            for repeat in range(repeats + 5):
                for way, run in ways.items():
                    began = time.process_time()
                    run()
                    if repeat >= 5:
                        found[way].append((time.process_time() - began) * 1e3)
        medians = {way: statistics.median(times) for way, times in found.items()}
        over = statistics.median(b - a for a, b in zip(found["hand"], found["step"], strict=True))
        return {**medians, "over": over, "frozen": self.frozen}


Building = Callable[[], tuple[Any, torch.Tensor, str, Callable[[torch.Tensor], Any]]]
"""A model, two samples, its last frozen module, and its tail as a user would write it."""


def linears() -> Any:
    """Return many modules that compute next to nothing."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(301)])
    return model, torch.randn(2, 4), "299", model[300]


def resnet18() -> Any:
    """Return ResNet-18. The last block and the classifier train."""
    from torchvision import models

    model = models.resnet18(weights=None)
    return (
        model,
        torch.randn(2, 3, 224, 224),
        "layer4.0",
        lambda x: model.fc(model.avgpool(model.layer4[1](x)).flatten(1)),
    )


def vit_b_16() -> Any:
    """Return ViT-B/16. The last layer and the head train."""
    from torchvision import models

    model = models.vit_b_16(weights=None)
    return (
        model,
        torch.randn(2, 3, 224, 224),
        "encoder.layers.encoder_layer_10",
        lambda x: model.heads(model.encoder.ln(model.encoder.layers[11](x))[:, 0]),
    )


def bert() -> Any:
    """Return BERT-base with random weights: the last layer, the pooler and the classifier train."""
    from transformers import BertConfig, BertForSequenceClassification

    model: Any = BertForSequenceClassification(BertConfig())
    return (
        model,
        torch.randint(0, 1000, (2, 128)),
        "bert.encoder.layer.10",
        lambda x: model.classifier(model.dropout(model.bert.pooler(model.bert.encoder.layer[11](x)))),
    )


STEPS: dict[str, Building] = {
    "300 linear layers": linears,
    "resnet18": resnet18,
    "vit_b_16": vit_b_16,
    "bert-base": bert,
}


def steps_of(name: str, repeats: int) -> dict[str, Any]:
    """Measure one row of the steps."""
    ensure_torchvision()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Step(name).measure(repeats)


def _peak_by(run: Callable[..., Any], name: str, way: str, samples: int, _repeat: int) -> Any:
    return run("peak", name, way, samples)


ACTIONS: dict[str, Callable[..., Any]] = {"row": measure, "peak": peak_of, "step": steps_of}


def steps_part(names: Iterable[str], repeats: int, run: Callable[..., Any]) -> str:
    """Return the part of the page about steps of these networks."""
    rows = []
    for name in names:
        print(f"a step of {name} ...", file=sys.stderr, flush=True)
        row = run("step", name, repeats)
        numbers = (f"{row[key]:.2f}" for key in ("hand", "step", "over", "look"))
        rows.append((name, row["frozen"], *numbers))
    header = (
        "network",
        "modules skipped",
        "tail by hand, ms",
        "step, ms",
        "step - by hand, ms",
        "one look, ms",
    )
    return f"""{STEPS_TITLE}

{table(header, rows)}

- Processor time at batch 1, forward without gradients, one thread: medians of {repeats} turns. The table
  above divides by whole iterations, in which this does not show.
- A step is what `job(features)` and the job's iterator do: look twice at what is frozen (versions, modules,
  hooks, attributes), keep it in eval, run the tail. By hand: the tail's modules called one after the other.
- Commit {commit()}; {versions("torch", "torchvision", "transformers")}.

Again: `python -m benchmarks.split_overhead --steps`.
"""


def _peaks(row: dict[str, Any], way: str, what: str) -> Spread:
    """Return the peaks of one way, in MB."""
    return Spread.of(peak[what] / 1e6 for peak in row["peak"][way])


def report(rows: list[dict[str, Any]]) -> str:
    """Return the report as Markdown."""
    lines = []
    shares, peaks = [], []
    for row in rows:
        share = Spread.of(b / a for a, b in zip(row["whole"], row["split"], strict=True))
        shares.append(share.median)
        equal = row["losses"]["whole"] == row["losses"]["split"]
        plain, whole, cut = (_peaks(row, way, "training") for way in WAYS)
        peaks.append(cut.median / whole.median)
        lines.append(
            (
                row["network"],
                NETWORKS[row["network"]],
                row["cuts"],
                Spread.of(row["whole"]).text(),
                Spread.of(row["split"]).text(),
                share.text(3),
                f"{Spread.of(b / a for a, b in zip(row['fused'], row['split'], strict=True)).text(3)}"
                if "fused" in row
                else "-",
                "equal" if equal else "DIFFERENT",
                plain.text(0),
                whole.text(0),
                cut.text(0),
                f"{_peaks(row, 'split', 'cutting').median:.0f}",
                f"{row['split_s']:.1f}",
            )
        )
    median = statistics.median(shares)
    met = "met" if median <= GOAL else "missed"
    header = (
        "network",
        "frozen through",
        "cuts",
        "whole, s",
        "cut, s",
        "cut / whole",
        "cut / fused",
        "losses",
        "peak never cut, MB",
        "peak whole, MB",
        "peak cut, MB",
        "peak while cutting, MB",
        "capture and proof, s",
    )
    losses = table(
        ("network", "losses of the repeats, whole and cut alike"),
        [(row["network"], ", ".join(f"{loss:.6g}" for loss in row["losses"]["split"])) for row in rows],
    )
    return f"""# What cutting costs on one machine

**Claim.** A training iteration through the captured prefix and the tail takes at most 3 % longer than the
whole model, at the median over the seven networks of the papers; memory is no higher.

{table(header, lines)}

Median of the medians of cut / whole: **{median:.3f}**; the goal of {GOAL} is {met}.

Peak memory cut / whole: {statistics.median(peaks):.3f} at the median, {max(peaks):.3f} at most.

{losses}

- {REPEATS} interleaved repeats after one to warm up, batch and micro-batch {BATCH}, 224 x 224 pixels,
  forward and backward; the share is taken within a repeat. Random weights: speed does not depend on them.
- `whole` is the reference: the user's model with torch's fused attention for eval switched off, since its low
  bits are others. `fused` has it on, where the network has any, and is not judged by the goal.
- Peaks are those of {PEAKS} processes that do two iterations one way each (`VmHWM`), model included: median
  (lowest to highest), since the allocator gives memory back or keeps it as it likes. `whole`
  and `cut` have cut the model before, `never cut` has not: the difference is what `torch.export` and what it
  imports leave in a process. The program shares the frozen weights with the model. While it cuts, a process
  holds what every operator gives for two samples, and export's own records.
- Capture and proof: tracing, export, three micro-batches whole and cut with gradients, every cut with what
  crosses it sent; once a model and its versions, then remembered.
- Commit {commit()}; {machine()}; {versions("torch", "torchvision")}.

Run it again: `python -m benchmarks.split_overhead`.
"""


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), help="networks")
    parser.add_argument("--steps", action="store_true", help="only what a step takes")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(here(*options.one)))
        return
    whole = options.steps or set(NETWORKS) <= set(options.only)
    output = Output.of(options, "split_overhead", whole=whole)
    run = here if options.quick else child
    stepping = (list(STEPS)[:1], QUICK_STEP_REPEATS) if options.quick else (list(STEPS), STEP_REPEATS)
    if options.steps:
        page = output.path(".md")
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        kept = re.split(f"^{re.escape(STEPS_TITLE)}", text, flags=re.MULTILINE)[0].rstrip()
        output.write(f"{kept}\n\n{steps_part(*stepping, run)}".lstrip())
        return
    names, repeats, peaks, samples = options.only, REPEATS, PEAKS, BATCH
    if options.quick:
        names, repeats, peaks, samples = ["resnet18"], 1, 1, QUICK_BATCH
    rows = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        row = run("row", name, repeats, samples)
        row["peak"] = interleave({way: partial(_peak_by, run, name, way, samples) for way in WAYS}, peaks)
        rows.append(row)
    steps = "" if options.quick else f"\n{steps_part(*stepping, run)}"  # those of --quick are apart
    output.write(report(rows) + steps)
    unequal = [row["network"] for row in rows if row["losses"]["whole"] != row["losses"]["split"]]
    exit_on_faults([f"{network}: losses differ, whole and cut" for network in unequal])


if __name__ == "__main__":
    main()
