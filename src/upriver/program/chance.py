"""Layers that are left out at random: a frozen part that such code decides about cannot be taken out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from upriver.program.flow import Flow
from upriver.program.freeze import keep_in_eval
from upriver.program.point import FreezePoint
from upriver.program.precision import autocasting
from upriver.program.trace import Trace, buffers_kept, mode, no_fast_path, watch


def random_branch(
    model: nn.Module,
    calls: Trace,
    point: FreezePoint,
    in_eval: Sequence[str],
    *,
    autocast: torch.dtype | None = None,
) -> str:
    """Why chance decides what runs around the prefix while the model trains; empty when it does not.

    One pass in training mode shows it: Python looks at a random number in a module that skipped ones are part
    of. (In evaluation such code, a layer drop, does nothing.)
    """
    example = calls.example
    device = example.tensors[0].device
    by_index = {call.index: call for call in calls.calls}
    skipped = [by_index[index].path for index in point.skipped]
    with (
        mode(model, training=True),
        buffers_kept(model),
        torch.no_grad(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        no_fast_path(),
        autocasting(device, autocast),
    ):
        keep_in_eval(model, list(in_eval))
        seen, flow = watch(model, example)
    paths = {call.index: call.path for call in seen}
    for index in _looks_at_chance(flow):
        path = paths[flow.operations[index].call]
        if any(name.startswith(f"{path}." if path else "") for name in skipped):
            where = f"module {path!r}" if path else "the model"
            return (
                f"{where} decides by a random number which of its layers run (layer drop?); "
                "set that probability to 0"
            )
    return ""


def _looks_at_chance(flow: Flow) -> list[int]:
    """Operations that show Python a value that depends on a random number."""
    random: set[int] = set()
    found = []
    for index, operation in enumerate(flow.operations):
        makers = {flow.makers.get(value.tensor, -1) for value in operation.reads}
        makers |= {value.writer for value in operation.reads}
        depends = not makers.isdisjoint(random)
        if depends or operation.trouble.startswith("runs the random"):
            random.add(index)
        if depends and operation.observes:
            found.append(index)
    return found
