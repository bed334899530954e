"""Compare the frozen part of a model as it is written with each faster prefix: seconds, and features.

Run with ``python -m benchmarks.faster_prefix``. The ways of a network take turns on the same micro-batch, in
one process, with all of torch's threads. Networks have random weights and statistics: speed does not depend
on them, errors do. Each network is stored in ``benchmarks/results/faster_prefix.jsonl``, so that a stopped
run resumes; ``faster_prefix.md`` is the report, which ``--report`` makes again. ``--only NAME…`` selects
networks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, interleave, let_threads_sleep, machine, versions
from benchmarks.harness.records import Deadline, Output, command_line, exit_on_faults, until_time_is_up
from benchmarks.harness.reports import table
from upriver._torchvision import ensure_torchvision
from upriver.errors import ConfigError
from upriver.finetune.calibration.faster_prefix import error_of
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import Example
from upriver.program.graph.executor import Program
from upriver.program.rewrite.compiled import compile_stages
from upriver.program.rewrite.faster import PREFIXES, PrefixKind, rewritten
from upriver.program.split.cut_survey import answers_of
from upriver.rpc.tolerance import tolerance_of

SAMPLES, REPEATS = 16, 11
QUICK_SAMPLES, QUICK_REPEATS = 2, 2
TOKENS = 128

WRITTEN = "as written"
Row = dict[str, Any]

NETWORKS: dict[str, tuple[str, str]] = {
    "ResNet-18": ("resnet18", "layer4.0"),
    "ResNet-50": ("resnet50", "layer4.1"),
    "MobileNetV3-large": ("mobilenet_v3_large", "features.14"),
    "ViT-B/16": ("vit_b_16", "encoder.layers.encoder_layer_9"),
    "BERT-base": ("bert", "encoder.layer.9"),
}
"""Name in torchvision, or ``bert``, and last frozen module."""

QUICK: dict[str, tuple[str, str]] = {"a small network": ("small", "frozen")}


def main() -> None:
    """Measure the networks that have no record, and write the report."""
    let_threads_sleep()
    parser = command_line(__doc__, resumable=True)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, metavar="NAME", help="these networks")
    options = parser.parse_args()
    networks = QUICK if options.quick else NETWORKS
    output = Output.of(options, "faster_prefix")
    records = output.records()
    if not options.report:
        with until_time_is_up():
            _measure(records, networks, options)
    rows = [records.rows[name] for name in networks if name in records]
    output.write(_report(rows, networks))
    exit_on_faults([f"{row['key']}, {kind}: {way['fault']}" for row in rows for kind, way in _faults(row)])


def _measure(records: Any, networks: Mapping[str, tuple[str, str]], options: argparse.Namespace) -> None:
    deadline = Deadline(options.minutes)
    for name in networks:
        if name not in records and name in (options.only or networks):
            deadline.check()
            records.add(name, _network(*networks[name], quick=options.quick))


# -------------------------------------------------------------------------------------------- one network


def _network(kind: str, path: str, *, quick: bool) -> Row:
    """Measure one network."""
    model, inputs = _built(kind, QUICK_SAMPLES if quick else SAMPLES)
    example = Example.of(inputs)
    written = capture(model, example, outputs=answers_of(model, example, path))
    wanted = _run(written, example.tensors)
    ways: dict[str, Row] = {WRITTEN: {"bytes": written.stages[-1].out_bytes}}
    runs: dict[str, Callable[[int], float]] = {WRITTEN: partial(_timed, written, example.tensors)}
    for prefix in PREFIXES:
        ways[prefix], program = _made(written, prefix, example.tensors, wanted)
        if program is not None:
            runs[prefix] = partial(_timed, program, example.tensors)
    interleave(runs, 1)  # warms up
    for way, seconds in interleave(runs, QUICK_REPEATS if quick else REPEATS).items():
        ways[way]["seconds"] = seconds
    return {
        "ways": ways,
        "samples": example.samples,
        "freeze": path,
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": versions("torch"),
        "commit": commit(),
    }


def _made(
    written: Program, prefix: PrefixKind, tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> tuple[Row, Program | None]:
    """Return what is known of a faster prefix before it is timed, and its program; None if there is none."""
    began = time.perf_counter()
    try:
        program = rewritten(written, prefix)
    except ConfigError as error:
        return {"why_not": str(error)}, None
    why_not = compile_stages(program, tensors) if prefix == "compiled" else ""
    if why_not:
        return {"why_not": f"not compiled: {why_not}"}, None
    row: Row = {"made_s": time.perf_counter() - began, "bytes": program.stages[-1].out_bytes}
    got = [value.to(like.dtype) for value, like in zip(_run(program, tensors), wanted, strict=True)]
    row["error"], row["bound"] = error_of(wanted, got), tolerance_of(program).rtol
    return row, program


def _run(program: Program, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return program.run(tensors, 0, program.num_stages)


def _timed(program: Program, tensors: Sequence[torch.Tensor], repeat: int) -> float:
    began = time.perf_counter()
    _run(program, tensors)
    return time.perf_counter() - began


def _built(kind: str, samples: int) -> tuple[nn.Module, Any]:
    """Return a network in evaluation, with random weights and statistics, and a micro-batch.

    The last BatchNorm of a residual block has small weights, as in trained networks: with those of the start,
    a deep network makes any rounding larger from block to block.
    """
    torch.manual_seed(0)
    ensure_torchvision()  # transformers imports it, too
    if kind == "bert":
        from transformers import BertConfig, BertModel

        tokens = torch.randint(0, 30_000, (samples, TOKENS))
        return BertModel(BertConfig(), add_pooling_layer=False).eval(), {"input_ids": tokens}
    if kind == "small":
        frozen = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 16))
        model, inputs = nn.Sequential(), torch.randn(samples, 3, 8, 8)
        model.add_module("frozen", frozen)
    else:
        from torchvision import models

        model, inputs = getattr(models, kind)(weights=None), torch.randn(samples, 3, 224, 224)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            module.momentum = 0.5
    for block in model.modules():
        last = getattr(block, "bn3", getattr(block, "bn2", None))
        if last is not None:
            nn.init.uniform_(last.weight, 0.1, 0.4)
    with torch.no_grad():
        model.train()
        for _ in range(4):
            model(torch.randn_like(inputs))
    return model.eval(), inputs


# ------------------------------------------------------------------------------------------- the report


def _faults(row: Row) -> list[tuple[str, Row]]:
    """Return the prefixes whose features are farther off than a job accepts."""
    return [
        (kind, way | {"fault": f"an error of {way['error']:.2g}, and {way['bound']:g} is accepted"})
        for kind, way in row["ways"].items()
        if "error" in way and not way["error"] <= way["bound"]
    ]


def _speedup(row: Row, kind: str) -> Spread:
    """Return how many times as fast as written a prefix is, by neighbours in time."""
    pairs = zip(row["ways"][WRITTEN]["seconds"], row["ways"][kind]["seconds"], strict=True)
    return Spread.of(written / faster for written, faster in pairs)


def _report(rows: Sequence[Row], networks: Mapping[str, Any]) -> str:
    timed = [(row, kind) for row in rows for kind in PREFIXES if "seconds" in row["ways"][kind]]
    best = [
        max(_speedup(row, kind).median for other, kind in timed if other is row)
        for row in rows
        if any(other is row for other, _ in timed)
    ]
    told = (
        f"the fastest prefix is {min(best):.2f} to {max(best):.2f} times as fast as written" if best else ""
    )
    lines = [
        "# How much faster a frozen prefix is, and how far off its features are",
        "",
        f"**{len(rows)} of {len(networks)} networks measured{': ' + told if told else ''}.**",
        "",
        "*Milliseconds* are those of a micro-batch up to the freeze point: median (lowest to highest). "
        "*Times as fast* is the median of ratios of neighbours in time (lowest to highest). *Error* is the "
        "largest difference of features at the freeze point from those of the model as it is written, of the "
        "largest value. *Made in* is what a job waits for it, once; compiled code may be in torch's cache.",
        "",
    ]
    header = (
        "network",
        "samples",
        "prefix",
        "milliseconds",
        "times as fast",
        "error",
        "kB a sample",
        "made in, s",
    )
    body = [_line(row, kind) for row in rows for kind in (WRITTEN, *PREFIXES)]
    lines += [table(header, body), ""]
    for text in dict.fromkeys(
        f"{row['machine']}; {row['threads']} threads; {row['versions']}. Commit {row['commit']}"
        for row in rows
    ):
        lines += [text + ".", ""]
    lines += [
        "It does not show what a whole job gains: that depends on link and tail, too. Weights are random, so "
        "errors of trained networks differ; each job measures its own.",
        "",
        "Run it again: `python -m benchmarks.faster_prefix`.",
        "",
    ]
    return "\n".join(lines)


def _line(row: Row, kind: str) -> tuple[str, ...]:
    way, name = row["ways"][kind], f"{row['key']} to `{row['freeze']}`"
    if "seconds" not in way:
        return name, str(row["samples"]), kind, way["why_not"], "", "", "", ""
    fast = "" if kind == WRITTEN else _speedup(row, kind).text()
    error, made = (
        f"{way[part]:{form}}" if part in way else "" for part, form in (("error", ".2g"), ("made_s", ".1f"))
    )
    milliseconds = Spread.of(1e3 * seconds for seconds in way["seconds"]).text(1)
    return name, str(row["samples"]), kind, milliseconds, fast, error, f"{way['bytes'] / 1e3:.1f}", made


if __name__ == "__main__":
    main()
