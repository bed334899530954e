"""Turn element-wise operators, normalisations, reductions and copies into works, which memory dominates."""

from __future__ import annotations

import math
from dataclasses import replace

from upriver.profile.latency.op_calls import OpCall, in_order, is_same_layout, is_view, run_length
from upriver.profile.latency.op_features import Maker, OpWork, one
from upriver.program.graph.schema import TensorSpec


def on_each(kind: str) -> Maker:
    """Return a maker of works of element-wise operators."""
    return lambda call: one(kind, call, run=_run(call))


def _run(call: OpCall) -> float:
    return float(run_length(call.made[0], [call.specs[name] for name in call.read]))


def added(call: OpCall) -> tuple[OpWork, ...]:
    """Return the work of an addition; adding one weight for each channel is the paper's bias."""
    given = call.arguments
    names = [call.spec(given["self"]), call.spec(given["other"])]
    weights = [call.specs[name] for name in call.read if name in call.fixed]
    alone = [spec for spec in weights if spec.numel == max(spec.shape, default=1) > 1]
    if len(alone) == 1 and None not in names and max(spec.numel for spec in names if spec) > alone[0].numel:
        return one("bias", call, run=_run(call))
    return one("elementwise.add", call, run=_run(call))


def normalised(kind: str) -> Maker:
    """Return a maker of works of normalisations over the last dimensions."""

    def maker(call: OpCall) -> tuple[OpWork, ...]:
        return one(kind, call, row=float(math.prod(call.arguments["normalized_shape"])))

    return maker


def grouped(kind: str) -> Maker:
    """Return a maker of works of normalisations over the pixels of a channel or group of channels."""

    def maker(call: OpCall) -> tuple[OpWork, ...]:
        shape = call.made[0].shape
        groups = call.arguments.get("num_groups", shape[1])
        return one(kind, call, row=math.prod(shape[1:]) / max(1, int(groups)))

    return maker


def softmax(call: OpCall) -> tuple[OpWork, ...]:
    """Return the work of a softmax or its logarithm, over contiguous or strided rows."""
    made, dimension = call.made[0], int(call.arguments["dim"])
    kind = "log_softmax" if "log" in call.name else "softmax"
    if not made.shape:
        return one(kind, call, row=1.0, behind=1.0)
    row = made.shape[dimension]
    behind = math.prod(made.shape[dimension % len(made.shape) + 1 :])
    return one(kind, call, row=float(row), behind=float(behind))


def reduction(kind: str) -> Maker:
    """Return a maker of works of reductions such as sums and means over some dimensions."""

    def maker(call: OpCall) -> tuple[OpWork, ...] | None:
        given = call.arguments
        x, made = call.spec(given["self"]), call.made[0]
        if x is None or not x.shape:
            return None
        dimensions = given.get("dim")
        chosen = dimensions if isinstance(dimensions, list) else [] if dimensions is None else [dimensions]
        last = max((int(d) % len(x.shape) for d in chosen), default=len(x.shape) - 1)
        behind = math.prod(x.shape[last + 1 :])
        return one(kind, call, x.numel, row=x.numel / max(1, made.numel), behind=float(behind))

    return maker


# ------------------------------------------------------------------------------ views and copies


def nothing(_call: OpCall) -> tuple[OpWork, ...]:
    """Return no work, as for a view."""
    return ()


def copied(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of a copy of the first operand, in another type or order where requested."""
    source = _first(call)
    if source is None:
        return None
    made = call.made[0]
    walked = made if source.shape == made.shape else in_order(source)
    kind = "copy.clone" if source.dtype == made.dtype else f"copy.cast_{made.dtype}"
    return one(kind, call, run=float(run_length(walked, [source])), leap=float(_leap(walked, source)))


def _leap(made: TensorSpec, source: TensorSpec) -> int:
    """Return the distance in the source between elements that become neighbours in the result."""
    dimensions = zip(made.shape, made.stride, source.stride, strict=True)
    return next((theirs for size, mine, theirs in dimensions if size > 1 and mine == 1), 1)


def reshaped(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return no work where the strides allow a view, else the work of a copy."""
    source = _first(call)
    return () if source is not None and is_view(source, call.made[0].shape) else copied(call)


def converted(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return no work where the operand already has the requested type and order, else a copy's work."""
    source, made = _first(call), call.made[0]
    if source is not None and source.dtype == made.dtype and is_same_layout(source, made):
        return () if not call.arguments.get("copy") else copied(call)
    return copied(call)


def _first(call: OpCall) -> TensorSpec | None:
    names = call.read
    return call.specs[names[0]] if names else None


def joined(kind: str) -> Maker:
    """Return a maker of works that join several tensors into one."""

    def maker(call: OpCall) -> tuple[OpWork, ...]:
        made, parts = call.made[0], call.arguments["tensors"]
        dimension = int(call.arguments.get("dim") or 0) % max(1, len(made.shape))
        behind = math.prod(made.shape[dimension + 1 :])
        run = behind if kind == "copy.stack" else behind * made.shape[dimension] / len(parts)
        return one(kind, call, parts=float(len(parts)), run=float(run))

    return maker


def bordered(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of a constant padding; other modes, such as mirroring, are measured."""
    if call.arguments.get("mode", "constant") != "constant":
        return None
    return one("copy.pad", call, run=float(call.made[0].shape[-1]))


def by_last(kind: str) -> Maker:
    """Return a maker of works of copies along the last dimension."""
    return lambda call: one(kind, call, run=float(call.made[0].shape[-1] if call.made[0].shape else 1))


def picked(call: OpCall) -> tuple[OpWork, ...]:
    """Return the work of a selection of slices by index."""
    behind = call.made[0].shape[int(call.arguments["dim"]) :][1:] if call.made[0].shape else []
    return one("copy.index_select", call, run=float(math.prod(behind)))


def embedding(call: OpCall) -> tuple[OpWork, ...]:
    """Return the work of a look-up of rows; the whole table's bytes are not read."""
    table = call.spec(call.arguments["weight"])
    rows = float(table.shape[0]) if table is not None else 0.0
    (work,) = one("embedding", call, row=float(call.made[0].shape[-1]), table=rows)
    return (replace(work, facts={**work.facts, "weight_bytes": 0.0}),)


def interpolation(kind: str) -> Maker:
    """Return a maker of works of image resizing."""

    def maker(call: OpCall) -> tuple[OpWork, ...] | None:
        x, made = _first(call), call.made[0]
        if x is None:
            return None
        maps, width = float(math.prod(made.shape[:2])), float(made.shape[-1])
        scale = made.numel / max(1, x.numel)
        return one(f"interpolation.{kind}", call, scale=scale, maps=maps, width=width)

    return maker
