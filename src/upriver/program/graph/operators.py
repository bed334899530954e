"""List the operators that a program may hold: dense, deterministic and free of side effects.

A name here is ``<operator>.<overload>`` in the ``aten`` namespace. These operators are left out on purpose:

- operators that make views of memory outside their inputs (``as_strided``, ``set_``, ``resize_``);
- random, in-place, sparse and quantised operators;
- operators whose output size depends on data;
- all custom operators.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch

from upriver.errors import ProgramError
from upriver.program.graph.call_validator import check_call, operator_of

__all__ = ["ALLOWED", "check_call", "check_fingerprints", "fingerprints", "resolve"]

_operator_of = functools.cache(operator_of)

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
    "conv_transpose3d": "input",
    "mv": "default",
    "dot": "default",
    "outer": "default",
    "addmv": "default",
    "linalg_matmul": "default",
    "inner": "default",
    "batch_norm": "default",
    "cosine_similarity": "default",
    # normalisation in eval
    "_native_batch_norm_legit_no_training": "default",
    "_native_batch_norm_legit": "no_stats",
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
    "im2col": "default",
    "col2im": "default",
    "constant_pad_nd": "default",
    "max_pool2d_with_indices": "default",
    "max_pool3d_with_indices": "default",
    "max_pool1d_with_indices": "default",
    "adaptive_max_pool1d": "default",
    "adaptive_max_pool3d": "default",
    "_adaptive_avg_pool2d": "default",
    "_adaptive_avg_pool3d": "default",
    "upsample_nearest1d": "default vec",
    "upsample_nearest3d": "default vec",
    "upsample_linear1d": "default vec",
    "upsample_trilinear3d": "default vec",
    "_upsample_bilinear2d_aa": "default vec",
    "_upsample_bicubic2d_aa": "default vec",
    "_upsample_nearest_exact2d": "default vec",
    "grid_sampler": "default",
    "channel_shuffle": "default",
    "reflection_pad1d": "default",
    "reflection_pad2d": "default",
    "reflection_pad3d": "default",
    "replication_pad1d": "default",
    "replication_pad2d": "default",
    "replication_pad3d": "default",
    "unfold": "default",
    # elementwise
    "add": "Tensor Scalar",
    "sub": "Tensor Scalar",
    "rsub": "Tensor Scalar",
    "mul": "Tensor Scalar",
    "multiply": "Tensor Scalar",
    "div": "Tensor Scalar Tensor_mode Scalar_mode",
    "pow": "Tensor_Scalar Tensor_Tensor Scalar",
    "neg": "default",
    "abs": "default",
    "exp": "default",
    "log": "default",
    "sqrt": "default",
    "rsqrt": "default",
    "reciprocal": "default",
    "addcmul": "default",
    "addcdiv": "default",
    "log1p": "default",
    "log2": "default",
    "expm1": "default",
    "remainder": "Tensor Scalar",
    "floor_divide": "default Scalar",
    "nan_to_num": "default",
    "isnan": "default",
    "isinf": "default",
    "sin": "default",
    "cos": "default",
    "erf": "default",
    "sign": "default",
    "floor": "default",
    "round": "default decimals",
    "clamp": "default Tensor",
    "clamp_min": "default Tensor",
    "clamp_max": "default Tensor",
    "maximum": "default",
    "minimum": "default",
    "max": "default other dim",
    "min": "default other dim",
    "where": "self ScalarOther ScalarSelf Scalar",
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
    "celu": "default",
    "hardshrink": "default",
    "softshrink": "default",
    "threshold": "default",
    "exp2": "default",
    "log10": "default",
    "tan": "default",
    "asin": "default",
    "acos": "default",
    "atan": "default",
    "atan2": "default",
    "sinh": "default",
    "cosh": "default",
    "asinh": "default",
    "acosh": "default",
    "atanh": "default",
    "erfc": "default",
    "erfinv": "default",
    "ceil": "default",
    "trunc": "default",
    "frac": "default",
    "square": "default",
    "sgn": "default",
    "logaddexp": "default",
    "fmod": "Tensor Scalar",
    "true_divide": "Tensor",
    "lerp": "Scalar Tensor",
    "logical_xor": "default",
    "bitwise_xor": "Tensor Scalar",
    "bitwise_left_shift": "Tensor_Scalar",
    "bitwise_right_shift": "Tensor_Scalar",
    "__xor__": "Tensor Scalar",
    "isfinite": "default",
    "clip": "default Tensor",
    "_softmax": "default",
    "_log_softmax": "default",
    "logsumexp": "default",
    "logit": "default",
    "positive": "default",
    "absolute": "default",
    "negative": "default",
    "divide": "Tensor Scalar",
    "subtract": "Tensor Scalar",
    "arctan": "default",
    "float_power": "Tensor_Scalar",
    # reductions
    "mean": "default dim",
    "sum": "default dim_IntList",
    "amax": "default",
    "amin": "default",
    "argmax": "default",
    "var": "correction dim default",
    "var_mean": "correction dim",
    "cumsum": "default",
    "linalg_vector_norm": "default",
    "any": "default dim dims",
    "all": "default dim dims",
    "argmin": "default",
    "prod": "default dim_int",
    "std": "correction dim default",
    "std_mean": "correction",
    "norm": "ScalarOpt_dim Scalar ScalarOpt_dim_dtype",
    "cumprod": "default",
    "topk": "default",
    "sort": "default stable",
    "argsort": "default stable",
    "aminmax": "default",
    "count_nonzero": "dim_IntList default",
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
    "split": "Tensor sizes",
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
    "to": "dtype dtype_layout other",
    "_to_copy": "default",
    "type_as": "default",
    "movedim": "int intlist",
    "moveaxis": "int intlist",
    "swapaxes": "default",
    "swapdims": "default",
    "ravel": "default",
    "view_as": "default",
    "reshape_as": "default",
    "unsafe_split": "Tensor",
    "tensor_split": "sections indices",
    "hsplit": "int",
    "tile": "default",
    "repeat_interleave": "self_int",
    "meshgrid": "indexing",
    "broadcast_to": "default",
    "broadcast_tensors": "default",
    "diagonal": "default",
    "diag_embed": "default",
    "rot90": "default",
    "concat": "default",
    "concatenate": "default",
    "hstack": "default",
    "vstack": "default",
    "dstack": "default",
    "take_along_dim": "default",
    "masked_scatter": "default",
    "scatter": "value",
    "index_put": "default",
    "searchsorted": "Tensor",
    "bucketize": "Tensor",
    "fliplr": "default",
    "flipud": "default",
    "adjoint": "default",
    "mT": "default",
    "lift_fresh": "default",
    "diagonal_scatter": "default",
    "column_stack": "default",
    "take": "default",
    # constants of a fixed size
    "arange": "default start start_step",
    "full": "default",
    "full_like": "default",
    "zeros": "default",
    "zeros_like": "default",
    "zero": "default",
    "ones": "default",
    "ones_like": "default",
    "scalar_tensor": "default",
    "new_zeros": "default",
    "new_ones": "default",
    "new_full": "default",
    "fill": "Scalar Tensor",
    "tril_indices": "default",
    "triu_indices": "default",
    "eye": "default m",
    "linspace": "default",
    "slice_scatter": "default",
    "copy": "default",
    "diff": "default",
    "select_scatter": "default",
}

ALLOWED: frozenset[str] = frozenset(
    f"{name}.{overload}" for name, overloads in _OVERLOADS.items() for overload in overloads.split()
)
"""Every operator that a program may hold."""


def check_fingerprints(declared: Mapping[str, str], used: Set[str]) -> None:
    """Refuse a program whose operators differ from those of this torch version.

    Raises:
        ProgramError: Naming the first operator that is not allowed, unknown, of another signature here, used
            but not declared, or declared but not used.
    """
    known = fingerprints(used)
    for name in sorted(used ^ declared.keys()):
        what = "is used and not" if name in used else "is not used and yet"
        raise ProgramError(f"operator {name[:80]!r} {what} among the graph's operators")
    for name, fingerprint in known.items():
        if declared[name] != fingerprint:
            raise ProgramError(
                f"operator {name!r} has another signature in torch {torch.__version__} ({fingerprint}) than "
                f"where the program was captured ({declared[name][:16]})"
            )


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Return a short hash of each operator's signature in this version of torch, by name.

    Raises:
        ProgramError: If an operator is not allowed, or unknown here.
    """
    return {name: _fingerprint(name) for name in sorted(set(names))}


@functools.cache
def _fingerprint(name: str) -> str:
    return hashlib.sha256(str(resolve(name)._schema).encode()).hexdigest()[:16]


def resolve(name: str) -> Any:
    """Return the operator called ``name``.

    Raises:
        ProgramError: If it is not in the allow-list, or unknown to this version of torch.
    """
    if name not in ALLOWED:
        raise ProgramError(f"operator {name[:80]!r} is not allowed in a program")
    try:
        return _operator_of(name)
    except AttributeError:
        raise ProgramError(f"operator {name!r} is not known to torch {torch.__version__}") from None
