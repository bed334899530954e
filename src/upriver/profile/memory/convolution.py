"""Bound a convolution's memory besides its arguments and results, phase by phase.

On a CPU oneDNN computes most convolutions, in layouts of its own. It copies the input, the weights and the
output into blocks of channels and the output back, one phase after the other. All other kernels unfold the
input into a matrix. The memory of each phase was read off the allocations and the log of oneDNN 3.12 under
torch 2.13. Where kernels differ, the largest counts. On other devices the libraries choose their workspace at
run time. There a copy of both sides and of the weights stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

BLOCK = 16
"""Multiple that oneDNN pads channels to: 16 with AVX-512, 8 below."""

FEW_CHANNELS = 3
"""Largest number of channels of an input that oneDNN reads without copying: the pixels of an image."""

WIDE_KERNEL = 14
"""Kernel width from which oneDNN unfolds to compute gradients of weights; its own kernels are narrower."""

NAMELESS = "???"
"""Name of oneDNN's transposed convolution, the only CPU library without a name for it in torch's Python."""

THREAD_BYTES = 64 << 10
"""Memory per thread of a kernel that keeps little."""

FEW_SAMPLES = (1, 15)
"""Sample counts up to which torch may choose other kernels than oneDNN's: one small sample, or fewer than 16
samples of a pointwise convolution on a single thread."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes besides arguments and results.

    Attributes:
        growing: Upper bound of the bytes that grow with the number of samples.
        fixed: Upper bound of the other bytes.
        at_once: Both together, where they are not held at the same time; None where they are.
        few: All bytes with so few samples that torch chooses another kernel; 0 if it never does.
    """

    growing: int = 0
    fixed: int = 0
    at_once: int | None = None
    few: int = 0

    @property
    def nbytes(self) -> int:
        """Largest number of bytes at one time."""
        return self.growing + self.fixed if self.at_once is None else self.at_once


NOTHING = Workspace()

Phase: TypeAlias = "tuple[int, int]"
"""Bytes held at one time beyond the final results: growing, fixed; negative before the results exist."""


def largest(phases: Iterable[Phase]) -> Workspace:
    """Return the workspace of phases that run one after the other."""
    phases = list(phases)
    return Workspace(
        growing=max(0, *(growing for growing, _ in phases)),
        fixed=max(0, *(fixed for _, fixed in phases)),
        at_once=max(0, *(growing + fixed for growing, fixed in phases)),
    )


def convolution(args: Sequence[Any], results: Sequence[torch.Tensor]) -> Workspace:
    """Return the workspace of ``aten.convolution``.

    A transposed convolution is the gradient of the input of the convolution that it transposes: the same
    kernels, with the sides swapped.
    """
    x, w, bias, stride, padding, dilation, transposed, output_padding, groups = args
    backend = _backend(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
    sides = (results[0], x) if transposed else (x, results[0])
    sizes = _Sizes.of(sides[0], sides[1], w, stride=stride, groups=groups, backend=backend)
    copied = _copied(results[0], x)
    taken = largest((copied + g, f) for g, f in (sizes.to_input() if transposed else sizes.to_output()))
    call = (w, bias, stride, padding, dilation, transposed, output_padding, groups)
    return replace(taken, few=_with_few(sizes, copied, x, *call))


def convolution_backward(args: Sequence[Any], results: Sequence[torch.Tensor]) -> Workspace:
    """Return the workspace of ``aten.convolution_backward``: the input's gradient, then the weights'."""
    grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted = args
    bias = x.new_empty(bias_sizes) if bias_sizes and wanted[2] else None
    backend = _backend(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
    sides = (grad, x) if transposed else (x, grad)
    sizes = _Sizes.of(sides[0], sides[1], w, stride=stride, groups=groups, backend=backend)
    phases: list[Phase] = [(0, 0)]
    if wanted[0]:
        before = w.nbytes * wanted[1]  # the gradient of the weights does not exist yet
        first = sizes.to_output() if transposed else sizes.to_input()
        phases += [(growing, fixed - before) for growing, fixed in first]
    if wanted[1]:
        phases += [(growing, fixed - w.nbytes) for growing, fixed in sizes.to_weights()]
    copied = _copied(x, grad, x)
    taken = largest((copied + growing, fixed) for growing, fixed in phases)
    call = (w, bias, stride, padding, dilation, transposed, output_padding, groups)
    return replace(taken, few=_with_few(sizes, copied, x, *call))


def _with_few(sizes: _Sizes, copied: int, x: torch.Tensor, *call: Any) -> int:
    """Return the largest bytes with so few samples that torch chooses another kernel."""
    if not sizes.onednn and sizes.samples > max(FEW_SAMPLES):
        return 0  # oneDNN computes it with no number of samples
    growing, fixed = sizes.elsewhere
    others = [n for n in FEW_SAMPLES if "Mkldnn" not in _backend(x.new_empty(n, *x.shape[1:]), *call)]
    return math.ceil((growing + copied) * max(others) / sizes.samples) + fixed if others else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Byte sizes in a convolution from ``x`` to ``y``, or back, with weights ``w``.

    The sizes ``x_blocked``, ``y_blocked`` and ``w_blocked`` are those in blocks of channels.

    Attributes:
        unfolded: Size of the matrix that one sample of the input unfolds to.
        bordered: Size of one sample of the output with a border.
        onednn: Whether oneDNN computes the convolution.
        reorders: Whether oneDNN changes layouts: not where channels already lie innermost.
        few: Whether the input has so few channels that oneDNN reads it without copying.
        strided: Whether windows lie apart.
        gathers: Whether a kernel gathers its input from each sample.
        unfolds: Whether the gradient of the weights is that of a matrix product.
        widened: Size of a sum in single precision relative to a weight.
    """

    x: int
    y: int
    w: int
    x_blocked: int
    y_blocked: int
    w_blocked: int
    unfolded: int
    bordered: int
    samples: int
    onednn: bool
    reorders: bool
    few: bool
    strided: bool
    gathers: bool
    unfolds: bool
    widened: int

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        y: torch.Tensor,
        w: torch.Tensor,
        *,
        stride: Sequence[int],
        groups: int,
        backend: str,
    ) -> _Sizes:
        rows, columns = w.shape[:2]
        kernel, spots = math.prod(w.shape[2:]), math.prod(y.shape[2:])
        samples = max(1, math.prod(x.shape[:1]))
        strided = any(step > 1 for step in stride)
        odd = groups > 1 and columns > 1 and (columns % BLOCK > 0 or rows // groups % BLOCK > 0)
        wide = max(w.shape[2:], default=1) >= WIDE_KERNEL
        pads = groups == 1
        return cls(
            x=x.nbytes,
            y=y.nbytes,
            w=w.nbytes,
            x_blocked=x.nbytes // max(1, x.shape[1]) * _padded(x.shape[1]),
            y_blocked=y.nbytes // max(1, y.shape[1]) * _padded(y.shape[1]),
            w_blocked=_padded(rows) * (_padded(columns) if pads else columns) * kernel * w.itemsize,
            unfolded=columns * groups * kernel * spots * x.itemsize,
            bordered=int((1 + (w.shape[-1] + 2) / max(1, y.shape[-1])) * y.nbytes) // samples,
            samples=samples,
            onednn="Mkldnn" in backend,
            reorders=_is_plain(y),
            few=pads and columns <= FEW_CHANNELS,
            strided=strided,
            gathers=(kernel == 1 and strided) or odd,
            unfolds=odd or wide,
            widened=max(1, 4 // w.itemsize),
        )

    @property
    def kept(self) -> int:
        """Bytes of all threads."""
        return torch.get_num_threads() * (self.unfolded * self.gathers + THREAD_BYTES)

    @property
    def elsewhere(self) -> Phase:
        """Bytes in other libraries: the unfolded input, and room for what oneDNN would reorder."""
        growing = self.samples * self.unfolded + self.x_blocked + self.y_blocked
        return growing, 2 * self.w_blocked + torch.get_num_threads() * THREAD_BYTES

    def to_output(self) -> list[Phase]:
        """Return the phases to the output: reorder input, weights and output, then the output back."""
        if not self.onednn:
            return [self.elsewhere]
        if not self.reorders:
            return [(0, 2 * self.w_blocked + self.kept)]
        given = 0 if self.few else self.x_blocked
        return [(given + self.y_blocked - self.y, self.w_blocked + self.kept), (self.y_blocked, 0)]

    def to_input(self) -> list[Phase]:
        """Return the phases to the input; the result of strided kernels is copied once more."""
        if not self.onednn:
            return [self.elsewhere]
        fixed = self.w_blocked * (BLOCK if self.few else 1) + self.kept
        fixed += torch.get_num_threads() * self.bordered * self.strided
        if not self.reorders:
            return [(0, fixed + self.w_blocked)]
        return [
            (self.y_blocked + self.x_blocked - self.x, fixed),
            (self.x_blocked * (2 if self.strided else 1), 0),
        ]

    def to_weights(self) -> list[Phase]:
        """Return the phases to the weights: both sides reordered, and the result once for each thread."""
        if not self.onednn:
            return [self.elsewhere]
        threads = torch.get_num_threads()
        fixed = self.w_blocked * threads * self.widened + self.kept
        if self.unfolds:
            fixed += threads * (4 * self.w + self.unfolded)
        if not self.reorders:
            return [(0, fixed + 2 * self.w_blocked)]
        given = 0 if self.few else self.x_blocked
        return [(given + self.y_blocked, fixed), (0, self.w_blocked + self.w)]


def _padded(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether channels do not lie innermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    innermost = tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    return tensor.is_contiguous() or not innermost


def _copied(like: torch.Tensor, *given: torch.Tensor) -> int:
    """Return the bytes of tensors whose memory layout differs from the result's."""
    plain = _is_plain(like)
    return sum(
        tensor.nbytes for tensor in given if (not tensor.is_contiguous() if plain else _is_plain(tensor))
    )


def _backend(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> str:
    """Return the name of the library that torch would choose."""
    stride, padding, dilation, transposed, output_padding, groups = rest
    chosen = torch._C._select_conv_backend(
        x,
        w,
        bias=bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
    )
    name = str(chosen)
    return "MkldnnTranspose" if name.endswith(NAMELESS) else name
