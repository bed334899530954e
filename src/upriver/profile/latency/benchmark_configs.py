"""Define the measured configurations of each kind: ranges as real networks use them, fixed beforehand.

Each number is drawn independently and uniformly from its listed values. A span is drawn uniformly in its
logarithm, since spans cover orders of magnitude. A draw that no network would make (too much work, larger
tensors, indivisible channels) is repeated. Seeds are fixed, so every machine measures the same
configurations.

Channels, sides, windows, widths and lengths are those of AlexNet, VGG, ResNet, SqueezeNet, Xception,
MobileNet, EfficientNet, DenseNet, ConvNeXt, ViT, Swin, BERT and GPT-2 at their published sizes.
"""

from __future__ import annotations

import random

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from upriver.errors import ConfigError
from upriver.profile.latency import config_calls
from upriver.profile.latency.config_sampling import Choices, Range, Span
from upriver.profile.latency.op_calls import OpCall
from upriver.profile.latency.op_kinds import works_of
from upriver.program.eval_mode import no_fast_path
from upriver.types import require_finite

SEED = 2022

_TRIES = 400
"""Largest number of draws for each requested configuration."""

_BATCHES = (1, 1, 1, 1, 2, 4, 8)
_CHANNELS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 728, 1024, 2048, Span(8, 2048, 8))
_SIDES = (7, 14, 28, 56, 112, 224, Span(4, 230))
_WIDTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 4096, Span(16, 4096, 8))
_TOKENS = (16, 49, 64, 128, 196, 197, 256, 384, 512, Span(4, 1024))
_HEADS = (3, 4, 6, 8, 12, 16)
_EITHER = (0, 1)

_IMAGES: Choices = {"batch": _BATCHES, "channels": _CHANNELS, "side": _SIDES}

_FORMS: Choices = {
    **_IMAGES,
    "tokens": _TOKENS,
    "width": _WIDTHS,
    "form": ("image", "image", "tokens", "rows"),
    "in_place": (0,),
}

_POINTS = ((1, 1), (1, 1), (1, 1), (1, 2))
_WINDOWS = ((3, 1), (3, 1), (3, 1), (3, 2))

_CONVOLUTIONS: Choices = {
    "batch": _BATCHES,
    "in_channels": (3, 3, 3, 3, *_CHANNELS, *_CHANNELS),
    "out_channels": _CHANNELS,
    "side": _SIDES,
    "window": (*_POINTS, *_WINDOWS, (5, 1), (7, 2), (11, 4), (4, 4), (16, 16)),
    "padded": (1, 1, 1, 0),
    "bias": _EITHER,
}

_HEAVY: dict[str, Range] = {
    "conv": Range(count=480, choices=_CONVOLUTIONS, make=config_calls.convolution),
    "dwconv": Range(
        count=200,
        choices={
            **_IMAGES,
            "window": (*_WINDOWS, (5, 1), (5, 2), (7, 1)),
            "padded": (1, 1, 1, 0),
            "bias": _EITHER,
        },
        make=config_calls.depthwise,
    ),
    "group_conv": Range(
        count=120,
        choices={**_CONVOLUTIONS, "groups": (2, 4, 8, 16, 32), "window": ((1, 1), *_WINDOWS)},
        make=config_calls.group_convolution,
    ),
    "conv_transpose": Range(
        count=80,
        choices={**_CONVOLUTIONS, "window": (2, 2, 4), "side": (7, 14, 28, 56)},
        make=config_calls.transposed,
    ),
    "matmul": Range(
        count=360,
        choices={
            "rows": (1, 1, 1, 2, 4, 8, *_TOKENS),
            "inner": (9216, 25088, *_WIDTHS),
            "outer": (10, 1000, *_WIDTHS),
            "bias": _EITHER,
        },
        make=config_calls.linear,
    ),
    "bmm": Range(
        count=120,
        choices={
            "copies": (3, 4, 6, 8, 12, 16, 24, 32, 48, 96),
            "rows": _TOKENS,
            "inner": (32, 64, 80, 128, *_TOKENS),
            "outer": (32, 64, 80, 128, *_TOKENS),
            "turned": _EITHER,
        },
        make=config_calls.batched_product,
    ),
    "attention": Range(
        count=120,
        choices={
            "batch": _BATCHES,
            "heads": _HEADS,
            "tokens": _TOKENS,
            "width": (32, 64, 64, 80, 128),
            "causal": (0, 0, 1),
            "together": (0, 1, 1),
        },
        make=config_calls.attention,
    ),
    "max_pool": Range(
        count=160,
        choices={**_IMAGES, "window": ((2, 2, 0), (3, 2, 0), (3, 2, 1), (3, 1, 1))},
        make=config_calls.max_pool,
    ),
    "avg_pool": Range(
        count=160,
        choices={
            **_IMAGES,
            "window": ((2, 2, 0), (3, 1, 1), (3, 2, 1), (7, 1, 0), None, None),
            "made": (1, 1, 1, 6, 7),
        },
        make=config_calls.avg_pool,
    ),
}

_EACH: dict[str, Range] = {
    "bias": Range(count=240, choices=_FORMS, make=config_calls.bias),
    "batch_norm": Range(count=240, choices=_IMAGES, make=config_calls.batch_norm),
    "elementwise.add": Range(
        count=320,
        choices={**_FORMS, "in_place": _EITHER, "other": ("same",) * 6 + ("gate", "number")},
        make=config_calls.binary("add.Tensor"),
    ),
    "elementwise.mul": Range(
        count=160,
        choices={**_FORMS, "in_place": _EITHER, "other": ("same", "same", "gate", "gate", "number")},
        make=config_calls.binary("mul.Tensor"),
    ),
    **{
        f"elementwise.{name}": Range(
            count=80,
            choices={**_FORMS, "other": ("same", "same", "gate", "number")},
            make=config_calls.binary(f"{name}.Tensor"),
        )
        for name in ("sub", "div")
    },
    **{
        f"elementwise.{name}": Range(count=40, choices=_FORMS, make=config_calls.unary(f"{name}.default"))
        for name in ("exp", "neg", "sqrt", "rsqrt", "sin", "cos", "abs")
    },
    "elementwise.pow": Range(count=40, choices=_FORMS, make=config_calls.unary("pow.Tensor_Scalar", 2)),
    "elementwise.clamp": Range(count=40, choices=_FORMS, make=config_calls.unary("clamp.default", 0.0, 6.0)),
    "activation.relu": Range(
        count=200, choices={**_FORMS, "in_place": _EITHER}, make=config_calls.unary("relu.default")
    ),
    **{
        f"activation.{name}": Range(
            count=80, choices={**_FORMS, "in_place": _EITHER}, make=config_calls.unary(f"{name}.default")
        )
        for name in ("silu", "hardswish", "hardtanh")
    },
    **{
        f"activation.{name}": Range(count=60, choices=_FORMS, make=config_calls.unary(f"{name}.default"))
        for name in ("gelu", "sigmoid", "tanh", "hardsigmoid", "leaky_relu", "elu", "softplus", "mish")
    },
}

_ROWS: dict[str, Range] = {
    **{
        f"{name}_norm": Range(
            count=100,
            choices={"batch": _BATCHES, "tokens": (*_TOKENS, 784, 3136), "width": _WIDTHS},
            make=config_calls.layer_norm(f"{name}_norm.default"),
        )
        for name in ("layer", "rms")
    },
    "group_norm": Range(
        count=80, choices={**_IMAGES, "groups": (1, 8, 16, 32)}, make=config_calls.group_norm
    ),
    "softmax": Range(
        count=100,
        choices={
            "batch": _BATCHES,
            "heads": _HEADS,
            "tokens": _TOKENS,
            "classes": (10, 1000, 21841, 30522),
            "form": ("scores", "scores", "scores", "classes"),
        },
        make=config_calls.softmax,
    ),
    **{
        f"reduction.{name}": Range(
            count=60, choices={**_FORMS, "pixels": (0, 1, 1)}, make=config_calls.reduced(f"{name}.{overload}")
        )
        for name, overload in (("mean", "dim"), ("sum", "dim_IntList"), ("amax", "default"))
    },
    "embedding": Range(
        count=60,
        choices={
            "batch": _BATCHES,
            "tokens": _TOKENS,
            "table": (512, 1024, 30522, 50257),
            "width": (128, 256, 384, 512, 768, 1024),
        },
        make=config_calls.embedding,
    ),
}

_COPIES: dict[str, Range] = {
    "copy.cat": Range(
        count=120,
        choices={**_FORMS, "parts": (2, 2, 2, 3, 4), "dim": (1, 1, 1, -1)},
        make=config_calls.joined("cat.default"),
    ),
    "copy.stack": Range(
        count=40,
        choices={**_FORMS, "parts": (2, 3, 4), "dim": (0, 1, -1)},
        make=config_calls.joined("stack.default"),
    ),
    "copy.clone": Range(
        count=160,
        choices={**_FORMS, "order": (0, 1, 2, 3, 4, 5), "as_it_is": (0, 0, 1)},
        make=config_calls.copy,
    ),
    "copy.pad": Range(count=60, choices={**_IMAGES, "border": (1, 2, 3)}, make=config_calls.pad),
    "copy.roll": Range(
        count=60,
        choices={**_IMAGES, "channels": _WIDTHS, "side": (7, 14, 28, 56), "by": (-3, 3)},
        make=config_calls.roll,
    ),
    "copy.flip": Range(count=40, choices=_FORMS, make=config_calls.flip),
    "copy.repeat": Range(count=40, choices={**_FORMS, "times": (2, 3, 4)}, make=config_calls.repeat),
    "copy.index_select": Range(
        count=40,
        choices={"table": (49, 169, 197, 512, 1024), "width": _WIDTHS, "tokens": (16, 49, 196, 2401)},
        make=config_calls.index_select,
    ),
    **{
        f"interpolation.{name}": Range(
            count=60,
            choices={**_IMAGES, "scale": (2, 2, 4)},
            make=config_calls.resized(f"upsample_{name}2d.default"),
        )
        for name in ("nearest", "bilinear", "bicubic")
    },
}

RANGES: dict[str, Range] = {**_HEAVY, **_EACH, **_ROWS, **_COPIES}
"""The measured configurations, by kind."""


def sample(kind: str, count: int | None = None, seed: int = SEED) -> list[OpCall]:
    """Draw distinct calls of one kind; fewer than requested where no more exist.

    Args:
        count: Number of calls; the count of the kind's range if None.

    Raises:
        ConfigError: If the kind has no range, or ``count`` is below 1.
    """
    if kind not in RANGES:
        raise ConfigError(f"kind must be one of {', '.join(RANGES)}, got {kind!r}")
    stated = RANGES[kind]
    count = stated.count if count is None else count
    require_finite("count", count, at_least=1)
    chance = random.Random(f"{kind} {seed}")
    found: dict[str, OpCall] = {}
    with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad(), no_fast_path():
        for _ in range(_TRIES * count):
            call = stated.draw(chance)
            if call is not None and any(work.kind == kind for work in works_of(call)[:1]):
                found.setdefault(call.signature, call)
            if len(found) == count:
                break
    return list(found.values())
