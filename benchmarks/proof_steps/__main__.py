"""Check that a split trains as the whole model does, for the models of docs/models.md, and time the proofs.

Each model is tried unchanged; with activation checkpointing both ways (``use_reentrant``), where it supports
that, with inputs that require gradients; with LoRA adapters; and, some of them, with a momentum encoder. A
row is right in two cases. Either the model and the generators are unchanged, and one step of the job leaves
the same bits in the ``.grad`` of every parameter as one of the whole model. Or the model runs unsplit, with
the reason.

Run with ``python -m benchmarks.proof_steps``. Each row is made in a process of its own, printed, and stored
in ``benchmarks/results/proof_steps.jsonl``, so that a stopped run resumes; ``proof_steps.md`` is the table,
which ``--report`` makes again. ``--only NAME…`` selects models, ``--ways WAY…`` ways, ``--minutes N`` ends it
between two rows. ``--before SRC`` makes each row with another source tree, too, right before, and prints both
times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.children import ROOT
from benchmarks.harness.code_version import commit
from benchmarks.harness.records import Deadline, Output, command_line, exit_on_faults, until_time_is_up

WAYS = ("plain", "checkpoint", "reentrant", "lora", "momentum")
MOMENTUM = ("torchvision:resnet18", "torchvision:squeezenet1_1", "timm:vit_small_patch16_224")
"""Models with a second, frozen copy that follows them, as in contrastive learning."""

LARGE = 50_000_000
TIMEOUT_S = 1800

Row = dict[str, Any]


def main() -> None:
    """Make the missing rows, or the report."""
    parser = command_line(__doc__, resumable=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="these ways")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--before", metavar="SRC", help="a src folder to compare with")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(_row(*options.row)))
        return
    if options.quick:
        options.only, options.ways = ["own_models:siamese"], ["plain"]
    output = Output.of(options, "proof_steps")
    rows = _kept(output.path(".jsonl"))
    if not options.report:
        with until_time_is_up():
            _make(rows, options, output.path(".jsonl"))
    output.write(_report(rows))
    exit_on_faults([f"{row['name']}, {row['way']}: {row['how']}" for row in rows if not row["right"]])


def _make(rows: list[Row], options: argparse.Namespace, path: Path) -> None:
    deadline = Deadline(options.minutes)
    done = {(row["name"], row["way"]) for row in rows if not options.again}
    for name, way in _wanted(options.only, options.ways):
        if (name, way) in done:
            continue
        deadline.check()
        before = _in_a_child(name, way, options.before) if options.before else None
        row = _in_a_child(name, way, str(ROOT / "src")) | {"commit": commit()}
        if before is not None:
            row |= {"before_s": before["proof_s"], "before": before["how"]}
            row |= {"split_before_s": before["split_s"]}
        rows[:] = [other for other in rows if (other["name"], other["way"]) != (name, way)] + [row]
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        print(_line(row), flush=True)


def _kept(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _wanted(only: Sequence[str] | None, ways: Sequence[str]) -> Iterator[tuple[str, str]]:
    from scripts.model_list import ENTRIES

    for entry in ENTRIES:
        if only is not None and entry.name not in only:
            continue
        has = {"plain", *({"momentum"} if entry.name in MOMENTUM else ())}
        has |= {"checkpoint", "reentrant", "lora"} if entry.library in ("transformers", "timm") else set()
        yield from ((entry.name, way) for way in ways if way in has)


def _in_a_child(name: str, way: str, source: str) -> Row:
    with tempfile.TemporaryDirectory() as cache:  # proofs are made, not read from the cache
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((source, str(ROOT), str(ROOT / "scripts"))),  # own models
            "UPRIVER_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.proof_steps", "--row", name, way]
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            lines = (ended.stderr if ended.returncode else ended.stdout).strip().splitlines()
            if not ended.returncode:
                row: Row = json.loads(lines[-1])
                return row
            how = f"failed: {lines[-1] if lines else ended.returncode}"
        except subprocess.TimeoutExpired:
            how = f"took more than {TIMEOUT_S} s"
    return _empty(name, way, how)


def _empty(name: str, way: str, how: str, *, right: bool = False) -> Row:
    return {"name": name, "way": way, "how": how, "right": right, "proof_s": 0.0, "split_s": 0.0}


# -------------------------------------------------------------------------------------------- one row


def _row(name: str, way: str) -> Row:
    from upriver._torchvision import ensure_torchvision

    ensure_torchvision()
    import torch

    from scripts.model_list import ENTRIES
    from upriver.errors import ModelError
    from upriver.program.example_inputs import Example
    from upriver.program.models.registry import load_model
    from upriver.program.split.freeze_point import EvalPlan
    from upriver.program.split.split import split

    torch.set_num_threads(1)
    entry = next(entry for entry in ENTRIES if entry.name == name)
    torch.manual_seed(0)
    model, inputs = load_model(name)
    large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
    example = Example.of(inputs.example(2 if large else 4))
    entry.freeze(model)
    try:
        model = _altered(model, way).train()
    except (AttributeError, ValueError, AssertionError, NotImplementedError) as error:
        return _empty(name, way, f"has none ({str(error).splitlines()[0][:60]})", right=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    states = _generators()
    clock = _Clock()
    try:
        with _plans_noted() as plans:
            parts = split(model, example, on_progress=clock)
    except ModelError as error:
        if way == "plain":
            raise
        return _empty(name, way, f"has none, as it does not run ({str(error).splitlines()[0]})", right=True)
    clock("")
    row = _empty(name, way, "") | {"proof_s": round(clock.proof_s, 2), "split_s": round(clock.split_s, 2)}
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    if changed or _generators() != states:
        return row | {"how": f"changed {changed[0] if changed else 'generators'}"}
    if parts.program is None:
        return row | {"how": f"unsplit: {parts.why_not}", "right": True}
    features = parts.program.run(tuple(example.tensors), 0, parts.freeze)
    wanted = _gradients(model, plans[-1], lambda: model(*example.args, **example.kwargs))
    alone = EvalPlan(modules=plans[-1].modules)  # calls of the prefix are not made
    ours = _gradients(model, alone, lambda: parts.tail(parts.tail.values.one_or_all(features)))
    differing = [key for key, value in wanted.items() if not _same(value, ours[key])]
    trained = sum(value is not None for value in wanted.values())
    if differing:
        return row | {"how": f"other gradients: {len(differing)}, e.g. {differing[0]}"}
    note = f" ({parts.note})" if parts.note else ""
    return row | {"how": f"{trained} gradients, behind {parts.boundary}{note}", "right": True}


def _altered(model: Any, way: str) -> Any:
    """Return the model in that way.

    Raises:
        Exception: If the model does not support it.
    """
    if way == "lora":
        import peft

        config = peft.LoraConfig(target_modules="all-linear", r=4)
        adapted = peft.get_peft_model(model, config)
        names = [name for name, p in adapted.named_parameters() if "lora_" in name]
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # only those of the last third, so that a part before them is frozen
                parameter.requires_grad_(names.index(name) >= 2 * len(names) // 3)
        return adapted
    if way == "momentum":
        return _followed(model)
    if way in ("checkpoint", "reentrant"):
        reentrant = way == "reentrant"
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        else:
            from timm import layers

            there: Any = layers  # it does not list the function
            there.set_reentrant_ckpt(reentrant)
            model.set_grad_checkpointing(True)
    return model


def _followed(model: Any) -> Any:
    import copy

    import torch
    from torch import nn

    class Followed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = model, copy.deepcopy(model).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                with torch.no_grad():
                    for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                        theirs.data.mul_(0.99).add_(ours.data, alpha=0.01)
            return self.query(x) + self.key(x)

    return Followed()


@contextlib.contextmanager
def _plans_noted() -> Iterator[list[Any]]:
    """Record the untrained parts: modules, and calls of modules also called behind the freeze point."""
    module: Any = sys.modules["upriver.program.split.split"]
    real, plans = module.in_eval_for, list[Any]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        plans.append(real(*args, **kwargs))
        return plans[-1]

    module.in_eval_for = noted
    try:
        yield plans
    finally:
        module.in_eval_for = real


def _gradients(model: Any, in_eval: Any, run: Any) -> dict[str, Any]:
    import torch

    from upriver.program.eval_mode import calls_in_eval
    from upriver.program.freeze import keep_in_eval
    from upriver.program.split import verification

    there: Any = verification  # wherever a source tree has them
    with there.state_kept(model), there.no_fast_path():
        model.zero_grad(set_to_none=True)
        model.train()
        keep_in_eval(model, list(in_eval.modules))
        torch.manual_seed(3)
        with calls_in_eval(model, in_eval.calls):
            answer = run()
        leaves = torch.utils._pytree.tree_leaves(answer)
        terms = [t.float().square().mean() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.stack(terms).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}


def _same(a: Any, b: Any) -> bool:
    import torch

    return b is None if a is None else b is not None and torch.equal(a, b)


def _generators() -> Any:
    import random

    import numpy as np
    import torch

    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tolist(), torch.get_rng_state().tolist()


class _Clock:
    """Sum up the processor seconds of splitting, and those of proving among them."""

    def __init__(self) -> None:
        self.proof_s = self.split_s = 0.0
        self._now, self._since = "", time.process_time()

    def __call__(self, text: str) -> None:
        spent = time.process_time() - self._since
        self.split_s += spent
        self.proof_s += spent if self._now.startswith("proving") else 0.0
        self._now, self._since = text, time.process_time()


# ------------------------------------------------------------------------------------------ the report


def _line(row: Row) -> str:
    before = f", {row['before_s']} s before ({row['before']})" if "before_s" in row else ""
    mark = "right" if row["right"] else "WRONG"
    return f"{mark}  {row['name']}, {row['way']}: {row['how']}; proof {row['proof_s']} s{before}"


def _report(rows: Sequence[Row]) -> str:
    lines = ["# What a proof compares, over the models of docs/models.md", ""]
    wrong = [row for row in rows if not row["right"]]
    lines += [
        f"{len(rows)} rows, {len(wrong)} of them wrong. Seconds are the processor's, of one thread.",
        "",
    ]
    both = [row for row in rows if row.get("before_s") and row["proof_s"]]
    if both:
        after, before = (sum(row[key] for row in both) for key in ("proof_s", "before_s"))
        lines += [
            f"Proofs of {len(both)} rows took {after:.1f} s, {before:.1f} s before.",
            "",
        ]
    lines += [
        "| model | way | what came out | proof s | split s | proof s before |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["name"], WAYS.index(row["way"]))):
        how = row["how"].replace("|", "/")
        lines.append(
            f"| `{row['name']}` | {row['way']} | {'' if row['right'] else 'WRONG: '}{how} | "
            f"{row['proof_s']} | {row['split_s']} | {row.get('before_s', '')} |"
        )
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if "commit" in row))
    untold = sum("commit" not in row for row in rows)
    told = f"Commit {commits}" + (f"; that of {untold} rows is not told." if untold else ".")
    lines += ["", told if commits else "Commit not told.", ""]
    lines += ["Run it again: `python -m benchmarks.proof_steps`.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
