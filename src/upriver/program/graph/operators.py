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
from upriver.program.graph.call_validator import operator_of

_OPERATORS = """
    # convolution, matrix products, attention
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_transpose1d
    conv_transpose2d.input linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention
    conv_transpose3d.input _int_mm mv dot outer addmv linalg_matmul inner batch_norm cosine_similarity
    # normalisation in eval
    _native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats layer_norm group_norm
    rms_norm instance_norm _weight_norm
    # activations
    relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu selu softplus mish
    log_sigmoid prelu glu relu6 softmax.int log_softmax.int
    # pooling and resampling
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d
    upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d
    upsample_bicubic2d.vec pixel_shuffle pixel_unshuffle pad im2col col2im constant_pad_nd
    max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices adaptive_max_pool1d
    adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d
    upsample_nearest1d.vec upsample_nearest3d upsample_nearest3d.vec upsample_linear1d
    upsample_linear1d.vec upsample_trilinear3d upsample_trilinear3d.vec _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec
    _upsample_nearest_exact2d _upsample_nearest_exact2d.vec grid_sampler channel_shuffle
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d unfold
    # elementwise
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
    multiply.Tensor multiply.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar neg abs exp log sqrt rsqrt reciprocal addcmul addcdiv
    log1p log2 expm1 remainder.Tensor remainder.Scalar floor_divide floor_divide.Scalar nan_to_num isnan
    isinf sin cos erf sign floor round round.decimals clamp clamp.Tensor clamp_min clamp_min.Tensor
    clamp_max clamp_max.Tensor maximum minimum max max.other max.dim min min.other min.dim where.self
    where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor eq.Tensor
    eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor
    ge.Scalar logical_and logical_or logical_not bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor
    bitwise_or.Scalar __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar bitwise_not celu
    hardshrink softshrink threshold exp2 log10 tan asin acos atan atan2 sinh cosh asinh acosh atanh erfc
    erfinv ceil trunc frac square sgn logaddexp fmod.Tensor fmod.Scalar true_divide.Tensor lerp.Scalar
    lerp.Tensor logical_xor bitwise_xor.Tensor bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor_Scalar __xor__.Tensor __xor__.Scalar isfinite clip clip.Tensor _softmax
    _log_softmax logsumexp logit positive absolute negative divide.Tensor divide.Scalar subtract.Tensor
    subtract.Scalar arctan float_power.Tensor_Scalar
    # reductions
    mean mean.dim sum sum.dim_IntList amax amin argmax var.correction var.dim var var_mean.correction
    var_mean.dim cumsum linalg_vector_norm any any.dim any.dims all all.dim all.dims argmin prod
    prod.dim_int std.correction std.dim std std_mean.correction norm.ScalarOpt_dim norm.Scalar
    norm.ScalarOpt_dim_dtype cumprod topk sort sort.stable argsort argsort.stable aminmax
    count_nonzero.dim_IntList count_nonzero
    # shape
    view _unsafe_view reshape flatten.using_ints unflatten.int permute transpose.int t unsqueeze squeeze
    squeeze.dim squeeze.dims expand expand_as repeat cat stack split.Tensor split.sizes split_with_sizes
    chunk unbind.int select.int slice.Tensor narrow roll flip index.Tensor index_select gather embedding
    tril triu clone contiguous alias detach lift_fresh_copy to.dtype to.dtype_layout to.other _to_copy
    type_as movedim.int movedim.intlist moveaxis.int moveaxis.intlist swapaxes swapdims ravel view_as
    reshape_as unsafe_split.Tensor tensor_split.sections tensor_split.indices hsplit.int tile
    repeat_interleave.self_int meshgrid.indexing broadcast_to broadcast_tensors diagonal diag_embed
    rot90 concat concatenate hstack vstack dstack take_along_dim masked_scatter scatter.value index_put
    searchsorted.Tensor bucketize.Tensor fliplr flipud adjoint mT lift_fresh diagonal_scatter
    column_stack take
    # constants of a fixed size
    arange arange.start arange.start_step full full_like zeros zeros_like zero ones ones_like
    scalar_tensor new_zeros new_ones new_full fill.Scalar fill.Tensor tril_indices triu_indices eye
    eye.m linspace slice_scatter copy diff select_scatter
"""
"""Names by purpose. One without an overload stands for its overload ``default``."""

ALLOWED: frozenset[str] = frozenset(
    name if "." in name else f"{name}.default"
    for line in _OPERATORS.splitlines()
    for name in line.partition("#")[0].split()
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
        return operator_of(name)
    except AttributeError:
        raise ProgramError(f"operator {name!r} is not known to torch {torch.__version__}") from None
