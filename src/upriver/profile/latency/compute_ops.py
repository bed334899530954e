"""Turn convolutions, matrix products, attention and pooling into works with more than element counts."""

from __future__ import annotations

import math
from typing import Any

from upriver.profile.latency.op_calls import OpCall, each_of, image
from upriver.profile.latency.op_features import OpWork, fused_bias, moved, one
from upriver.program.graph.schema import TensorSpec

FEW_CHANNELS = 8
"""Input channels below which a convolution reads pixels: with other kernels, and far fewer operations a
second."""


def convolution(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of a convolution of any number of dimensions, and of the bias that it adds."""
    given = call.arguments
    x, w, y = call.spec(given["input"]), call.spec(given["weight"]), call.made[0]
    if x is None or w is None:
        return None
    dimensions = len(w.shape) - 2
    batch, in_channels, before = image(x, dimensions)
    _, out_channels, after = image(y, dimensions)
    groups, transposed = int(given["groups"]), "transpose" in call.name
    depthwise = groups == in_channels > 1 and not transposed
    window = math.prod(w.shape[2:])
    each = (in_channels if transposed else out_channels) * w.shape[1] * window
    flops = float(batch * math.prod(before if transposed else after) * each)
    filter_size = (in_channels if depthwise else w.shape[1]) * window
    padded = _padded(given["padding"], given["dilation"], before, w.shape[2:])
    stride = each_of(given["stride"], dimensions)[0]
    kind = _convolution_kind(transposed, depthwise, groups)
    form = "pointwise" if window == 1 else "few_channel" if w.shape[1] < FEW_CHANNELS else "window"
    macs = {f"{name}_macs": flops * (name == form) for name in ("pointwise", "few_channel", "window")}
    features = {
        "flops": flops,
        "s_f": float(filter_size),
        "h_in_s_f": float(before[0] * filter_size),
        "c_out_s_f": float(out_channels * filter_size),
        "padded_size": float(batch * in_channels * math.prod(padded)),
        "n_c_out_s_f": float(batch * out_channels * filter_size),
    }
    facts = {
        "macs": flops,
        **macs,
        "batch": float(batch),
        "in_channels": float(in_channels),
        "out_channels": float(out_channels),
        "groups": float(groups),
        "pixels": float(math.prod(after)),
        "kernel": float(window),
        "stride": float(stride),
        "bias": float(given["bias"] is not None),
    }
    work = OpWork(kind=kind, features=features, facts=moved(call) | facts)
    return (work,) if given["bias"] is None else (work, fused_bias(y))


def _convolution_kind(transposed: bool, depthwise: bool, groups: int) -> str:
    if transposed:
        return "conv_transpose"
    if depthwise:
        return "dwconv"
    return "group_conv" if groups > 1 else "conv"


def _padded(padding: Any, dilation: Any, before: list[int], window: list[int]) -> list[int]:
    """Return the sizes of the input including its border."""
    dimensions = len(before)
    if isinstance(padding, str):
        steps = each_of(dilation, dimensions)
        border = [step * (size - 1) * (padding == "same") for step, size in zip(steps, window, strict=True)]
    else:
        border = [2 * size for size in each_of(padding, dimensions)]
    return [size + more for size, more in zip(before, border, strict=True)]


OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "self"),
    "mm": ("self", "mat2", ""),
    "matmul": ("self", "other", ""),
    "linalg_matmul": ("input", "other", ""),
    "bmm": ("self", "mat2", ""),
    "baddbmm": ("batch1", "batch2", "self"),
}
"""Argument names of matrix products: left operand, right operand, addend."""


def product(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of one or a batch of matrix products, and of the bias that it adds."""
    given = call.arguments
    names = OPERANDS[call.name]
    left, right, y = call.spec(given[names[0]]), call.spec(given[names[1]]), call.made[0]
    if left is None or right is None or not _are_matrices(left, right):
        return None
    by_rows = right.stride[-1] == 1
    if len(right.shape) == 2:
        copies, rows = 1, math.prod(left.shape[:-1])
    else:
        copies, rows = math.prod(y.shape[:-2]), left.shape[-2]
    inner, outer = left.shape[-1], y.shape[-1]
    flops = float(copies * rows * inner * outer)
    features = {
        "flops": flops,
        "n_c_in": float(copies * rows * inner),
        "n_c_out": float(copies * rows * outer),
        "c_in_c_out": float(copies * inner * outer),
    }
    facts = {
        "macs": flops,
        "copies": float(copies),
        "rows": float(rows),
        "inner": float(inner),
        "outer": float(outer),
        "by_rows": float(by_rows != (call.name == "linear")),
        "right_bytes": copies * inner * outer * float(right.itemsize),
    }
    kind = "matmul" if copies == 1 else "bmm"
    work = OpWork(kind=kind, features=features, facts=moved(call) | facts)
    added = given.get(names[2])
    return (work,) if added is None else (work, fused_bias(y))


def _are_matrices(left: TensorSpec, right: TensorSpec) -> bool:
    """Return whether both operands have rows and columns; the left one may be a single row."""
    return len(right.shape) == 2 or min(len(left.shape), len(right.shape)) >= 2


def attention(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of both products of attention and the softmax between them."""
    given = call.arguments
    query, key, value = (call.spec(given[name]) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or given["enable_gqa"]:
        return None
    heads, length, keys = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    width = query.shape[-1] + value.shape[-1]
    scores = float(heads * length * keys)
    return one(
        "attention",
        call,
        scores * width,
        macs=scores * width,
        scores=scores,
        heads=float(heads),
        length=float(length),
        keys=float(keys),
        head_width=float(width),
        masked=float(given["attn_mask"] is not None),
        causal=float(given["is_causal"]),
    )


# ------------------------------------------------------------------------------------------ pooling


def pooling(call: OpCall) -> tuple[OpWork, ...] | None:
    """Return the work of pooling; pooling that returns every element unchanged has none."""
    given = call.arguments
    x = call.spec(given["self"])
    if x is None:
        return None
    dimensions = next(int(letter) for letter in call.name if letter.isdigit())
    y = call.made[0]
    batch, channels, before = image(x, dimensions)
    after = y.shape[-dimensions:]
    if "adaptive" in call.name:
        window = [-(-size // made) for size, made in zip(before, after, strict=True)]
        steps = [size // made for size, made in zip(before, after, strict=True)]
    else:
        window = each_of(given["kernel_size"], dimensions)
        steps = each_of(given["stride"] or window, dimensions)
    if all(size == 1 for size in (*window, *steps)) and before == after:
        return ()
    flops = float(batch * channels * math.prod(after) * math.prod(window))
    features = {
        "flops": flops,
        "n_c_h_w_in": float(batch * channels * math.prod(before)),
        "n_c_h_w_out": float(batch * channels * math.prod(after)),
        "h_w_out": float(math.prod(after)),
    }
    facts = {
        "macs": flops,
        "maps": float(batch * channels),
        "pixels": float(math.prod(after)),
        "kernel": float(math.prod(window)),
        "stride": float(steps[0]),
        "whole": float(window == before),
    }
    kind = "max_pool" if "max" in call.name else "avg_pool"
    return (OpWork(kind=kind, features=features, facts=moved(call) | facts),)
