"""Classify operator calls for the latency models: their kinds, and the numbers that their seconds follow.

The kinds, their floating-point operations (Table I) and their features (Table II) come from Liu, Zheng, Li,
Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading", ICDCS 2022. A bias
that a convolution or a linear layer adds is a work of its own. Operators without a row in the paper go by the
size of their result, like the paper's element-wise kinds.

Symbols
    N, C_in, C_out, H, W         samples, channels, height and width of input and output
    K_H, K_W                     the window
    s_f = C_in K_H K_W           ``s_f``: size of one filter; with groups, C_in is that of a group
    FLOPs                        ``flops``; a product and its sum count as one

Departures
    - A depthwise convolution with several filters a channel has operations for each filter; its ``s_f``
      covers all channels, as the text defines it.
    - A convolution of one or three dimensions uses its first one as height.
    - A number added to every element of a channel is a bias wherever it comes from.
    - Batches of matrix products, convolutions in groups and transposed ones are kinds of their own: other
      kernels compute them.
    - Types other than float32 also make kinds of their own.

Every work also has ``facts``: the inputs of our own model (`upriver.profile.latency.regression`).
"""

from __future__ import annotations

from dataclasses import replace

from upriver.profile.latency.compute_ops import OPERANDS, attention, convolution, pooling, product
from upriver.profile.latency.memory_ops import (
    added,
    bordered,
    by_last,
    converted,
    copied,
    embedding,
    grouped,
    interpolation,
    joined,
    normalised,
    nothing,
    on_each,
    picked,
    reduction,
    reshaped,
    softmax,
)
from upriver.profile.latency.op_calls import OpCall, calls
from upriver.profile.latency.op_features import (
    SIDES,
    UNKNOWN,
    Maker,
    OpWork,
    Side,
    family_of,
    features_of,
    moved,
)
from upriver.program.graph.schema import Graph
from upriver.program.models.loadpart_nodes import gives_view

__all__ = ["SIDES", "UNKNOWN", "OpWork", "Side", "family_of", "features_of", "works", "works_of"]


def works(graph: Graph) -> tuple[tuple[OpWork, ...], ...]:
    """Return the works of each node; empty for views and for nodes that run once, when a program is bound."""
    return tuple(() if call is None else works_of(call) for call in calls(graph))


def works_of(call: OpCall) -> tuple[OpWork, ...]:
    """Return the works of one call; one of the unknown kind where no model covers the call."""
    maker = _MAKERS.get(call.node.op) or _MAKERS.get(call.name)
    if maker is None and gives_view(call.node.op):
        return ()
    found = maker(call) if maker is not None else None
    if found is None:
        return (OpWork(kind=f"{UNKNOWN}.{call.node.op}", features={}, facts=moved(call)),)
    dtype = _computes_in(call)
    if dtype == "float32":
        return found
    return tuple(replace(work, kind=f"{work.kind}.{dtype}") for work in found)


def _computes_in(call: OpCall) -> str:
    """Return the type of the first floating-point tensor, or of the first tensor if there is none."""
    types = [spec.dtype for spec in (*(call.specs[name] for name in call.read), *call.made)]
    return next((dtype for dtype in types if "float" in dtype), types[0])


# ------------------------------------------------------------------------------------- who is who

_VIEWS = ("meshgrid", "broadcast_tensors", "unsafe_split")
"""Views whose signatures do not mark them as views."""

_ACTIVATIONS = (
    "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu selu softplus mish "
    "log_sigmoid prelu relu6 celu hardshrink softshrink threshold"
)
_ELEMENTWISE = (
    "sub mul div pow neg abs exp log sqrt rsqrt reciprocal addcmul addcdiv log1p log2 expm1 remainder "
    "floor_divide nan_to_num isnan isinf sin cos erf sign floor round clamp clamp_min clamp_max maximum "
    "minimum where masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not exp2 log10 tan asin acos atan atan2 sinh cosh asinh acosh atanh erfc erfinv ceil trunc frac "
    "square sgn logaddexp fmod lerp logical_xor bitwise_xor isfinite logit float_power"
)
_ALSO_CALLED = {
    "rsub": "sub",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "absolute": "abs",
    "negative": "neg",
    "clip": "clamp",
    "arctan": "atan",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "max.other": "maximum",
    "min.other": "minimum",
}

_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(_VIEWS, nothing),
    **{name: on_each(f"activation.{name}") for name in _ACTIVATIONS.split()},
    **{name: on_each(f"elementwise.{name}") for name in _ELEMENTWISE.split()},
    **{name: on_each(f"elementwise.{usual}") for name, usual in _ALSO_CALLED.items()},
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution),
    **dict.fromkeys(OPERANDS, product),
    **{
        f"{kind}_pool{dimensions}d{suffix}": pooling
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_adaptive_avg")
        for dimensions in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
    "scaled_dot_product_attention": attention,
    "add": added,
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training"), grouped("batch_norm")),
    "layer_norm": normalised("layer_norm"),
    "rms_norm": normalised("rms_norm"),
    "group_norm": grouped("group_norm"),
    "instance_norm": grouped("instance_norm"),
    "_native_batch_norm_legit": grouped("instance_norm"),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), softmax),
    **{name: reduction(f"reduction.{name}") for name in ("mean", "sum", "amax", "amin", "var", "std")},
    "max.dim": reduction("reduction.max"),
    "min.dim": reduction("reduction.min"),
    "embedding": embedding,
    **dict.fromkeys(("clone", "lift_fresh_copy", "_to_copy"), copied),
    **dict.fromkeys(("reshape", "flatten", "ravel", "reshape_as"), reshaped),
    **dict.fromkeys(("contiguous", "to", "type_as"), converted),
    **dict.fromkeys(("cat", "concat", "concatenate"), joined("copy.cat")),
    "stack": joined("copy.stack"),
    **dict.fromkeys(("pad", "constant_pad_nd"), bordered),
    **{name: by_last(f"copy.{name}") for name in ("roll", "flip", "repeat")},
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), by_last("copy.shuffle")),
    "index_select": picked,
    **dict.fromkeys(
        ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d"),
        interpolation("nearest"),
    ),
    **dict.fromkeys(
        ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), interpolation("bilinear")
    ),
    "upsample_bicubic2d": interpolation("bicubic"),
}
"""Makers by operator name, or by the name of one overload, which goes first. Operators not listed here are
unknown."""
