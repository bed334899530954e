"""Bound the bytes of operators besides their arguments and results, by rules.

Kernels copy operands that are not contiguous, cast those of another type, keep buffers for each thread, and
some make further copies. The rules follow the allocations of torch 2.13's kernels on a CPU. An operator
without a rule is assumed to need its results once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from upriver.profile.memory.convolution import NOTHING, Workspace, convolution, convolution_backward
from upriver.profile.memory.libraries import PRODUCTS

NUMBER = 64
"""Bytes of a Python number among the operands, which becomes a tensor or two."""

SPLIT = ((768, 256), (192, 64), (0, 32))
"""Query lengths with the number of rows that attention processes at once from that length on."""

KEYS = 512
"""Rows of keys that attention processes at once."""


Tensors: TypeAlias = Sequence[torch.Tensor]
Rule: TypeAlias = "Callable[[Sequence[Any], Tensors], Workspace]"
"""Function from an operator's positional arguments and results to its workspace."""


def workspace(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Tensors) -> Workspace:
    """Return an upper bound of one call's memory besides its arguments and its results.

    Args:
        func: The operator, an ``OpOverload`` that the dispatcher has reached.
        results: The tensors that it returned; tensors without data are enough.
    """
    name = func._schema.name.partition("::")[2]
    rule = _RULES.get(name)
    if rule is not None:
        return rule(args, results)
    if func.is_view or name in _WITHOUT:
        return NOTHING
    given = list(tensors_of([args, list(kwargs.values())]))
    if torch.Tag.pointwise in func.tags or name in _ITERATED or name.startswith("_foreach_"):
        return Workspace(_casts(name, given), NUMBER)
    if name in PRODUCTS:
        return Workspace(sum(t.nbytes for t in given if not _fits_blas(t)) + _low_precision(given))
    copies = sum(t.nbytes for t in given if not t.is_contiguous())
    return Workspace(copies if name in _KNOWN else copies + sum(t.nbytes for t in results))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


# ------------------------------------------------------------------------------ rules for many


_WITHOUT_NAMES = """
    alias_copy arange bernoulli_ clone contiguous copy copy_ detach empty empty_like empty_permuted
    empty_strided eye fill_ full full_like lift_fresh linspace new_empty new_empty_strided new_full new_ones
    new_zeros ones ones_like random_ normal_ uniform_ _reshape_alias _unsafe_view rand_like randn_like
    scalar_tensor set_ resize_ zero_ zeros zeros_like _local_scalar_dense
"""
_WITHOUT = frozenset(_WITHOUT_NAMES.split())
"""Operators that fill their result, or make none."""

_ITERATED_NAMES = """
    _to_copy sum mean amax amin any all cumsum native_dropout native_dropout_backward bernoulli
    _prelu_kernel_backward
"""
_ITERATED = frozenset(_ITERATED_NAMES.split())
"""Operators that iterate over operands of any strides, like the element-wise ones."""

_KNOWN_NAMES = """
    adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool2d avg_pool2d_backward
    cat constant_pad_nd embedding embedding_dense_backward gather glu glu_backward index index_select
    max_pool2d_with_indices max_pool2d_with_indices_backward native_group_norm native_layer_norm
    nll_loss_forward nll_loss_backward select_backward slice_backward stack _softmax _softmax_backward_data
    _log_softmax _log_softmax_backward_data tril triu max min argmax argmin
"""
_KNOWN = frozenset(_KNOWN_NAMES.split())
"""Operators whose kernels copy non-contiguous operands and need nothing else."""


def _casts(name: str, given: Tensors) -> int:
    """Return the bytes that an element-wise kernel casts: operands of other types than the computed one."""
    if name in ("where", "masked_fill", "masked_fill_", "_to_copy", "copy_"):
        given = [tensor for tensor in given if tensor.dtype != torch.bool]
    if name == "_to_copy" or len({tensor.dtype for tensor in given}) < 2:
        return 0
    common = given[0].dtype
    for tensor in given:
        common = torch.promote_types(common, tensor.dtype)
    return sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common)


def _fits_blas(tensor: torch.Tensor) -> bool:
    """Return whether the last two dimensions lie in memory by rows or by columns."""
    if tensor.dim() < 2:
        return True
    (rows, columns), (down, across) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    by_columns = down == 1 and across >= max(1, rows)
    return by_rows or by_columns or tensor.numel() < 2


def _low_precision(given: Tensors) -> int:
    """Return the bytes that oneDNN reorders: both sides of a matrix product of half precision."""
    return sum(tensor.nbytes for tensor in given if tensor.itemsize < 4 and tensor.is_floating_point())


# -------------------------------------------------------------------------- operators of their own


def _batch_norm(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of a batch norm, which keeps its statistics twice."""
    channels = args[0].shape[1] if args[0].dim() > 1 else 1
    return Workspace(_copies(args[:1]), 4 * channels * 8)


def _batch_norm_backward(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of a batch norm's backward: one more tensor of the input's size."""
    channels = args[1].shape[1]
    return Workspace(_copies(args[:2]) + args[1].nbytes, 4 * channels * 8)


def _layer_norm_backward(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of a layer norm's backward: weight and bias gradients for each thread."""
    normalized = 1
    for size in args[2]:
        normalized *= size
    return Workspace(_copies(args[:2]), 2 * torch.get_num_threads() * normalized * 4)


def _group_norm_backward(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of a group norm's backward: two sums for each sample and channel."""
    return Workspace(_copies(args[:2]) + 2 * args[1].shape[0] * args[1].shape[1] * 8)


def _attention(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of attention: scores of a query piece and a key piece, for each thread."""
    return Workspace(_half_copies(args[:3]), _pieces(args[0], args[1]))


def _attention_backward(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of attention's backward: forward's twice, and a copied gradient.

    The gradient is copied if its layout differs from the output's.
    """
    grad, query, key = args[:3]
    return Workspace(grad.nbytes + 2 * _half_copies(args[:4]), 2 * _pieces(query, key))


def _pieces(query: torch.Tensor, key: torch.Tensor) -> int:
    rows = min(next(piece for length, piece in SPLIT if query.shape[-2] >= length), query.shape[-2])
    keys, features = min(KEYS, key.shape[-2]), query.shape[-1]
    return torch.get_num_threads() * rows * (keys + 2 + 2 * features) * 8


def _half_copies(given: Sequence[Any]) -> int:
    """Return the packed copies of half-precision operands, which are multiplied in single precision."""
    return sum(tensor.nbytes for tensor in tensors_of(given) if tensor.itemsize < 4)


def _safe_softmax(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of a safe softmax, which finds fully masked rows element by element."""
    return Workspace(_copies(args[:1]) + results[0].numel() + results[0].nbytes)


def _upsample(args: Sequence[Any], results: Tensors) -> Workspace:
    """Return the workspace of an upsampling: to a layout with channels innermost and back."""
    return Workspace(args[0].nbytes + results[0].nbytes)


def _copies(given: Sequence[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(given) if not tensor.is_contiguous())


_RULES: Mapping[str, Rule] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_safe_softmax": _safe_softmax,
    "upsample_bilinear2d": _upsample,
    "upsample_bicubic2d": _upsample,
    "upsample_nearest2d": _upsample,
    "upsample_trilinear3d": _upsample,
}
