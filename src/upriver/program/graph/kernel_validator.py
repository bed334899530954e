"""Check shapes and numbers that some kernels do not check.

Each rule covers a kernel that was seen to read past the end of a tensor, to return unwritten memory, or to
end the process. Tensors without data do not show this: torch's shape rules do not check either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from upriver.errors import ProgramError

Given: TypeAlias = Mapping[str, Any]
"""Arguments by name, already of the types in the signature."""

MODES = 3
"""Number of grid_sampler's interpolation modes, and of its padding modes. Any other number leaves its result
unwritten."""


def check_kernel(name: str, given: Given) -> None:
    """Refuse shapes and numbers that an operator's kernel does not check.

    Raises:
        ProgramError: Naming the argument that does not fit.
    """
    rule = _RULES.get(name)
    if rule is not None and (problem := rule(given)):
        raise ProgramError(f"{name}: {problem}")


def _batch_norm(given: Given) -> str:
    """Require one weight, bias, mean and variance for each channel, and a source of statistics."""
    if given["input"].dim() < 2:
        return "an input without channels"
    channels = given["input"].shape[1]
    for each in ("weight", "bias", "running_mean", "running_var"):
        tensor = given.get(each)
        if tensor is not None and tuple(tensor.shape) != (channels,):
            return f"{each} of shape {tuple(tensor.shape)} for {channels} channels"
    statistics = given.get("running_mean") is not None and given.get("running_var") is not None
    return "" if statistics or given.get("training") else "neither statistics nor leave to make some"


def _weight_norm(given: Given) -> str:
    v, g, dim = given["v"], given["g"], given["dim"]
    if dim not in (0, v.dim() - 1):
        return ""  # composed of operators that check themselves
    shape = [size if place == dim else 1 for place, size in enumerate(v.shape)]
    return "" if list(g.shape) == shape else f"g of shape {tuple(g.shape)}, not {tuple(shape)}"


def _attention(given: Given) -> str:
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "tensors of fewer than two dimensions"
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return f"keys of shape {tuple(key.shape)} for values of {tuple(value.shape)}"
    scores = (*query.shape[:-1], key.shape[-2])
    if mask is not None and not _broadcasts(tuple(mask.shape), scores):
        return f"a mask of shape {tuple(mask.shape)} for scores of {tuple(scores)}"
    return ""


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return 2 <= len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def _integer_product(given: Given) -> str:
    """Require signed integers, and something to add up: the result of nothing would be old memory."""
    left, right = given["self"], given["mat2"]
    if left.dtype is not torch.int8 or right.dtype is not torch.int8:
        return f"matrices of {left.dtype} and {right.dtype}, not int8"
    return "" if left.dim() == 2 and left.shape[1] else f"a matrix of shape {tuple(left.shape)}"


def _grid_sampler(given: Given) -> str:
    modes = given["interpolation_mode"], given["padding_mode"]
    return "" if all(0 <= mode < MODES for mode in modes) else f"modes {modes}, there are {MODES} of each"


def _resampling(given: Given) -> str:
    """Require scales that match the sizes. A kernel allocates memory by a wrong scale."""
    sizes = given["output_size"]
    axes = [name for name in ("scales", "scales_d", "scales_h", "scales_w") if name in given]
    scales = [given[name] for name in axes]
    if sizes is None or not any(scale is not None for scale in scales):
        return ""
    sizes = sizes if isinstance(sizes, list) else [sizes]
    before = given[next(iter(given))].shape[-len(scales) :]
    if len(sizes) != len(scales) or len(before) != len(scales):
        return f"{len(sizes)} sizes"
    for old, new, scale in zip(before, sizes, scales, strict=True):
        if scale is not None and not abs(old * scale - new) <= 1:  # NaN matches nothing
            return f"a scale of {scale} from {old} to {new}"
    return ""


_RULES: dict[str, Callable[[Given], str]] = {
    "batch_norm.default": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    "_weight_norm.default": _weight_norm,
    "scaled_dot_product_attention.default": _attention,
    "grid_sampler.default": _grid_sampler,
    "_int_mm.default": _integer_product,
}
_RULES |= {
    f"{name}.default": _resampling
    for name in (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d"),
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    )
}
