"""Make one call of each kind from drawn numbers.

`upriver.profile.latency.benchmark_configs` gives the ranges of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upriver.profile.latency.config_sampling import MOST_ELEMENTS, MOST_MACS, Draw, Make, call_on, tensor
from upriver.profile.latency.op_calls import OpCall
from upriver.program.graph.schema import TensorSpec

# --------------------------------------------------------------------------- convolutions, products


def convolution(draw: Draw, *, groups: int = 1) -> OpCall | None:
    """Make a convolution of an image."""
    (window, stride), side = draw["window"], draw["side"]
    padding = window // 2 if draw["padded"] and stride < max(window, 2) else 0
    ins, outs = draw["in_channels"], draw["out_channels"]
    if side + 2 * padding < window or ins % groups or outs % groups:
        return None
    after = (side + 2 * padding - window) // stride + 1
    if draw["batch"] * after**2 * window**2 * outs * ins / groups > MOST_MACS:
        return None
    weights = _weights(draw, [outs, ins // groups, window, window], outs)
    given = {"input": tensor([draw["batch"], ins, side, side])}
    args = ["input", "weight", _bias_of(weights), [stride] * 2, [padding] * 2, [1, 1], groups]
    return call_on("conv2d.default", args, given, weights)


def depthwise(draw: Draw) -> OpCall | None:
    """Make a depthwise convolution: one filter for each channel."""
    channels = draw["channels"]
    return convolution({**draw, "in_channels": channels, "out_channels": channels}, groups=channels)


def group_convolution(draw: Draw) -> OpCall | None:
    """Make a convolution with channels in groups."""
    return convolution(draw, groups=draw["groups"])


def transposed(draw: Draw) -> OpCall | None:
    """Make a transposed convolution that doubles an image's sides."""
    window, side, ins, outs = draw["window"], draw["side"], draw["in_channels"], draw["out_channels"]
    if draw["batch"] * side**2 * window**2 * ins * outs > MOST_MACS:
        return None
    weights = _weights(draw, [ins, outs, window, window], outs)
    given = {"input": tensor([draw["batch"], ins, side, side])}
    args = ["input", "weight", _bias_of(weights), [2, 2], [(window - 2) // 2] * 2, [0, 0], 1, [1, 1]]
    return call_on("conv_transpose2d.input", args, given, weights)


def linear(draw: Draw) -> OpCall | None:
    """Make a linear layer."""
    rows, ins, outs = draw["rows"], draw["inner"], draw["outer"]
    if rows * ins * outs > MOST_MACS:
        return None
    weights = _weights(draw, [outs, ins], outs)
    return call_on(
        "linear.default", ["input", "weight", _bias_of(weights)], {"input": tensor([rows, ins])}, weights
    )


def _weights(draw: Draw, shape: list[int], outs: int) -> dict[str, TensorSpec]:
    return {"weight": tensor(shape)} | ({"bias": tensor([outs])} if draw["bias"] else {})


def _bias_of(weights: Mapping[str, TensorSpec]) -> str | None:
    return "bias" if "bias" in weights else None


def batched_product(draw: Draw) -> OpCall | None:
    """Make a batch of matrix products; the right operand may be transposed."""
    copies, rows, inner, outer = draw["copies"], draw["rows"], draw["inner"], draw["outer"]
    if copies * rows * inner * outer > MOST_MACS:
        return None
    right = tensor([copies, inner, outer], (0, 2, 1) if draw["turned"] else None)
    return call_on("bmm.default", ["self", "mat2"], {"self": tensor([copies, rows, inner]), "mat2": right})


def attention(draw: Draw) -> OpCall | None:
    """Make an attention of some tokens to each other."""
    heads, tokens, width = draw["heads"], draw["tokens"], draw["width"]
    if draw["batch"] * heads * tokens**2 * 2 * width > MOST_MACS:
        return None
    # A linear layer's output keeps the heads of a token together.
    spec = tensor([draw["batch"], heads, tokens, width], (0, 2, 1, 3) if draw["together"] else None)
    names = ["query", "key", "value"]
    args = [*names, None, 0.0, bool(draw["causal"])]
    return call_on("scaled_dot_product_attention.default", args, dict.fromkeys(names, spec))


# -------------------------------------------------------------------------------- pooling, and sizes


def image(draw: Draw) -> TensorSpec:
    """Return the spec of a batch of square images."""
    return tensor([draw["batch"], draw["channels"], draw["side"], draw["side"]])


def max_pool(draw: Draw) -> OpCall | None:
    """Make a max pooling over a window."""
    return call_on("max_pool2d.default", ["self", *_window(draw)], {"self": image(draw)})


def avg_pool(draw: Draw) -> OpCall | None:
    """Make an average pooling over a window, or an adaptive one to a given image size."""
    given = {"self": image(draw)}
    if draw["window"] is not None:
        return call_on("avg_pool2d.default", ["self", *_window(draw)], given) if _fits(draw) else None
    if draw["made"] > draw["side"]:
        return None
    return call_on("adaptive_avg_pool2d.default", ["self", [draw["made"]] * 2], given)


def _window(draw: Draw) -> list[list[int]]:
    return [[number] * 2 for number in draw["window"]]


def _fits(draw: Draw) -> bool:
    window, _, padding = draw["window"]
    return bool(draw["side"] + 2 * padding >= window)


def resized(op: str) -> Make:
    """Return a maker of calls that enlarge an image."""

    def make(draw: Draw) -> OpCall | None:
        size = [draw["side"] * draw["scale"]] * 2
        return call_on(op, ["self", size, *([] if "nearest" in op else [False])], {"self": image(draw)})

    return make


# ------------------------------------------------------------------------------ element by element


def form(draw: Draw) -> TensorSpec:
    """Return the spec of images, tokens, or one row of numbers for each sample."""
    if draw["form"] == "image":
        return image(draw)
    middle = [draw["tokens"]] if draw["form"] == "tokens" else []
    return tensor([draw["batch"], *middle, draw["width"]])


def unary(op: str, *more: Any) -> Make:
    """Return a maker of calls of an operator on one tensor."""

    def make(draw: Draw) -> OpCall | None:
        return call_on(op, ["self", *more], {"self": form(draw)}, in_place=bool(draw["in_place"]))

    return make


def binary(op: str) -> Make:
    """Return a maker of calls of a binary operator.

    The second operand is a tensor alike, one number for each channel, or a single number.
    """

    def make(draw: Draw) -> OpCall | None:
        x, in_place = form(draw), bool(draw["in_place"])
        if draw["other"] == "number":
            return call_on(op, ["self", 1.5], {"self": x}, in_place=in_place)
        gate = tensor(x.shape[:2] + [1] * len(x.shape[2:]))
        given = {"self": x, "other": gate if draw["other"] == "gate" else x}
        return call_on(op, ["self", "other"], given, in_place=in_place)

    return make


def bias(draw: Draw) -> OpCall | None:
    """Make an addition of one weight for each channel."""
    x = form(draw)
    channels = [x.shape[1], 1, 1] if draw["form"] == "image" else [x.shape[-1]]
    return call_on("add.Tensor", ["self", "other"], {"self": x}, {"other": tensor(channels)})


def batch_norm(draw: Draw) -> OpCall | None:
    """Make a batch norm by running statistics."""
    names = ["weight", "bias", "mean", "variance"]
    args = ["input", *names, False, 0.1, 1e-5, False]
    weights = dict.fromkeys(names, tensor([draw["channels"]]))
    return call_on("batch_norm.default", args, {"input": image(draw)}, weights)


def layer_norm(op: str) -> Make:
    """Return a maker of normalisations of tokens."""

    def make(draw: Draw) -> OpCall | None:
        names = ["weight", "bias"] if op == "layer_norm.default" else ["weight"]
        given = {"input": tensor([draw["batch"], draw["tokens"], draw["width"]])}
        weights = dict.fromkeys(names, tensor([draw["width"]]))
        return call_on(op, ["input", [draw["width"]], *names, 1e-5], given, weights)

    return make


def group_norm(draw: Draw) -> OpCall | None:
    """Make a group normalisation of images."""
    if draw["channels"] % draw["groups"]:
        return None
    weights = dict.fromkeys(["weight", "bias"], tensor([draw["channels"]]))
    args = ["input", draw["groups"], "weight", "bias", 1e-5]
    return call_on("group_norm.default", args, {"input": image(draw)}, weights)


def softmax(draw: Draw) -> OpCall | None:
    """Make a softmax of attention scores or of classes."""
    shape = [draw["batch"], draw["classes"]]
    if draw["form"] == "scores":
        shape = [draw["batch"], draw["heads"], draw["tokens"], draw["tokens"]]
    return call_on("softmax.int", ["self", -1], {"self": tensor(shape)})


def reduced(op: str) -> Make:
    """Return a maker of reductions over pixels or tokens, or over the last dimension."""

    def make(draw: Draw) -> OpCall | None:
        x = form(draw)
        dimensions = [2, 3] if len(x.shape) == 4 else [1]
        return call_on(op, ["self", dimensions if draw["pixels"] else [-1]], {"self": x})

    return make


# --------------------------------------------------------------------------------- copies, look-ups


def joined(op: str) -> Make:
    """Return a maker of calls that join several tensors into one."""

    def make(draw: Draw) -> OpCall | None:
        x = form(draw)
        names = [f"part{place}" for place in range(draw["parts"])]
        if x.numel * len(names) > MOST_ELEMENTS:
            return None
        return call_on(op, [names, draw["dim"]], dict.fromkeys(names, x))

    return make


_ORDERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "image": ((0, 1, 2, 3), (0, 2, 3, 1)),
    "tokens": ((0, 1, 2), (0, 2, 1), (1, 0, 2)),
    "rows": ((0, 1), (1, 0)),
}
"""Memory orders of the dimensions of a copy's operand, by form."""


def copy(draw: Draw) -> OpCall | None:
    """Make a copy that keeps the memory order, or makes the tensor contiguous."""
    orders = _ORDERS[draw["form"]]
    x = tensor(form(draw).shape, orders[draw["order"] % len(orders)])
    if draw["as_it_is"]:
        return call_on("clone.default", ["self"], {"self": x})
    return call_on("reshape.default", ["self", [-1]], {"self": x})


def pad(draw: Draw) -> OpCall | None:
    """Make a padding with zeros."""
    return call_on("constant_pad_nd.default", ["self", [draw["border"]] * 4, 0.0], {"self": image(draw)})


def roll(draw: Draw) -> OpCall | None:
    """Make a roll of windows, channels last."""
    x = tensor([draw["batch"], draw["side"], draw["side"], draw["channels"]])
    return call_on("roll.default", ["self", [draw["by"]] * 2, [1, 2]], {"self": x})


def flip(draw: Draw) -> OpCall | None:
    """Make a reversal of the last dimension."""
    return call_on("flip.default", ["self", [-1]], {"self": form(draw)})


def repeat(draw: Draw) -> OpCall | None:
    """Make a repetition along the first dimension."""
    x = form(draw)
    return call_on("repeat.default", ["self", [draw["times"]] + [1] * (len(x.shape) - 1)], {"self": x})


def index_select(draw: Draw) -> OpCall | None:
    """Make a selection of rows by index."""
    index = tensor([draw["tokens"]], dtype="int64")
    given = {"self": tensor([draw["table"], draw["width"]]), "index": index}
    return call_on("index_select.default", ["self", 0, "index"], given)


def embedding(draw: Draw) -> OpCall | None:
    """Make a look-up of rows in a table of weights."""
    given = {"indices": tensor([draw["batch"], draw["tokens"]], dtype="int64")}
    weights = {"weight": tensor([draw["table"], draw["width"]])}
    return call_on("embedding.default", ["weight", "indices"], given, weights)
