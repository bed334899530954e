"""The operators a program may hold: dense, deterministic, free of side effects, and nothing else.

A name here is ``<operator>.<overload>`` in the ``aten`` namespace. What is left out on purpose: anything that
makes views of memory it was not given (``as_strided``, ``set_``, ``resize_``), anything random, in-place,
sparse or quantised, anything whose output size depends on data, and every custom operator.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from upriver.errors import ProgramError

_OVERLOADS: dict[str, str] = {
    # convolution, matrix products, attention
    "conv1d": "default padding",
    "conv2d": "default padding",
    "conv3d": "default padding",
    "conv_transpose1d": "default",
    "conv_transpose2d": "input",
    "linear": "default",
    "matmul": "default",
    "mm": "default",
    "bmm": "default",
    "addmm": "default",
    "baddbmm": "default",
    "einsum": "default",
    "scaled_dot_product_attention": "default",
    # normalisation in eval
    "_native_batch_norm_legit_no_training": "default",
    "layer_norm": "default",
    "group_norm": "default",
    "rms_norm": "default",
    "instance_norm": "default",
    "_weight_norm": "default",
    # activations
    "relu": "default",
    "gelu": "default",
    "silu": "default",
    "sigmoid": "default",
    "tanh": "default",
    "hardswish": "default",
    "hardsigmoid": "default",
    "hardtanh": "default",
    "leaky_relu": "default",
    "elu": "default",
    "selu": "default",
    "softplus": "default",
    "mish": "default",
    "log_sigmoid": "default",
    "prelu": "default",
    "glu": "default",
    "relu6": "default",
    "softmax": "int",
    "log_softmax": "int",
    # pooling and resampling
    "max_pool1d": "default",
    "max_pool2d": "default",
    "max_pool3d": "default",
    "avg_pool1d": "default",
    "avg_pool2d": "default",
    "avg_pool3d": "default",
    "adaptive_avg_pool1d": "default",
    "adaptive_avg_pool2d": "default",
    "adaptive_avg_pool3d": "default",
    "adaptive_max_pool2d": "default",
    "upsample_nearest2d": "default vec",
    "upsample_bilinear2d": "default vec",
    "upsample_bicubic2d": "default vec",
    "pixel_shuffle": "default",
    "pixel_unshuffle": "default",
    "pad": "default",
    "constant_pad_nd": "default",
    # elementwise
    "add": "Tensor Scalar",
    "sub": "Tensor Scalar",
    "rsub": "Tensor Scalar",
    "mul": "Tensor Scalar",
    "div": "Tensor Scalar Tensor_mode Scalar_mode",
    "pow": "Tensor_Scalar Tensor_Tensor Scalar",
    "neg": "default",
    "abs": "default",
    "exp": "default",
    "log": "default",
    "sqrt": "default",
    "rsqrt": "default",
    "reciprocal": "default",
    "sin": "default",
    "cos": "default",
    "erf": "default",
    "sign": "default",
    "floor": "default",
    "ceil": "default",
    "round": "default",
    "clamp": "default Tensor",
    "clamp_min": "default",
    "clamp_max": "default",
    "maximum": "default",
    "minimum": "default",
    "max": "default other",
    "min": "default other",
    "where": "self ScalarOther ScalarSelf",
    "masked_fill": "Scalar Tensor",
    "eq": "Tensor Scalar",
    "ne": "Tensor Scalar",
    "lt": "Tensor Scalar",
    "le": "Tensor Scalar",
    "gt": "Tensor Scalar",
    "ge": "Tensor Scalar",
    "logical_and": "default",
    "logical_or": "default",
    "logical_not": "default",
    "bitwise_and": "Tensor Scalar",
    "bitwise_or": "Tensor Scalar",
    "__and__": "Tensor Scalar",
    "__or__": "Tensor Scalar",
    "bitwise_not": "default",
    # reductions
    "mean": "default dim",
    "sum": "default dim_IntList",
    "amax": "default",
    "amin": "default",
    "argmax": "default",
    "var": "correction dim",
    "var_mean": "correction",
    "cumsum": "default",
    "linalg_vector_norm": "default",
    "any": "default dim",
    "all": "default dim",
    # shape
    "view": "default",
    "_unsafe_view": "default",
    "reshape": "default",
    "flatten": "using_ints",
    "unflatten": "int",
    "permute": "default",
    "transpose": "int",
    "t": "default",
    "unsqueeze": "default",
    "squeeze": "default dim dims",
    "expand": "default",
    "expand_as": "default",
    "repeat": "default",
    "cat": "default",
    "stack": "default",
    "split": "Tensor",
    "split_with_sizes": "default",
    "chunk": "default",
    "unbind": "int",
    "select": "int",
    "slice": "Tensor",
    "narrow": "default",
    "roll": "default",
    "flip": "default",
    "index": "Tensor",
    "index_select": "default",
    "gather": "default",
    "embedding": "default",
    "tril": "default",
    "triu": "default",
    "clone": "default",
    "contiguous": "default",
    "alias": "default",
    "detach": "default",
    "lift_fresh_copy": "default",
    "to": "dtype dtype_layout",
    "_to_copy": "default",
    "type_as": "default",
    # constants of a fixed size
    "arange": "default start start_step",
    "full": "default",
    "full_like": "default",
    "zeros": "default",
    "zeros_like": "default",
    "zero": "default",
    "eye": "default",
    "ones": "default",
    "ones_like": "default",
    "scalar_tensor": "default",
    "new_zeros": "default",
    "new_ones": "default",
    "new_full": "default",
    "fill": "Scalar Tensor",
    "slice_scatter": "default",
    "select_scatter": "default",
}

ALLOWED: frozenset[str] = frozenset(
    f"{name}.{overload}" for name, overloads in _OVERLOADS.items() for overload in overloads.split()
)
"""Every operator a program may hold."""


def check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that would make an allowed operator random: attention with dropout is the only one.

    Raises:
        ProgramError: If it would.
    """
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    if name == "scaled_dot_product_attention.default" and dropout != 0.0:
        raise ProgramError(f"{name} with dropout_p={dropout!r}: a program holds nothing random")


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Each operator with a short hash of its signature in this version of torch, by name.

    Raises:
        ProgramError: If one is not allowed, or not known here.
    """
    return {name: _fingerprint(name) for name in sorted(set(names))}


@functools.cache
def _fingerprint(name: str) -> str:
    return hashlib.sha256(str(resolve(name)._schema).encode()).hexdigest()[:16]


def resolve(name: str) -> Any:
    """The operator called ``name``.

    Raises:
        ProgramError: If it is not in the allow-list, or this version of torch has none of that name.
    """
    if name not in ALLOWED:
        raise ProgramError(f"operator {name!r} is not allowed in a program")
    operator, _, overload = name.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, operator), overload)
    except AttributeError:
        raise ProgramError(f"operator {name!r} is not known to torch {torch.__version__}") from None
