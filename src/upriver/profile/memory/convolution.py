"""What a convolution takes beside its arguments and results: an upper bound, phase by phase.

On a CPU oneDNN computes most of them, in layouts of its own: it copies the input, the weights and the
output into blocks of channels and the output back, one phase after the other. All other kernels unfold the
input into a matrix. What each phase holds was read off the allocations and the log of oneDNN 3.12 under
torch 2.13; where kernels differ, the largest counts. On other devices the libraries choose their workspace
at run time: there a copy of both sides and of the weights stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

BLOCK = 16
"""oneDNN pads channels to its block: 16 with AVX-512, 8 below."""

FEW_CHANNELS = 3
"""With no more than these oneDNN reads an input as it is: the pixels of an image."""

WIDE_KERNEL = 14
"""oneDNN's own kernels for gradients of weights are narrower; wider ones are unfolded."""

NAMELESS = "???"
"""The name of oneDNN's transposed convolution, the one library on a CPU that torch has none for in Python."""

THREAD_BYTES = 64 << 10
"""What a kernel keeps for each thread, where it keeps little."""

FEW_SAMPLES = (1, 15)
"""Up to so many torch may leave a convolution to other kernels than oneDNN's: one small sample, and fewer
than 16 samples of a pointwise one on a single thread."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes beside arguments and results.

    Attributes:
        growing: What grows with the number of samples, at most.
        fixed: What does not, at most.
        at_once: The two together, where they are not held at one time; None where they are.
        few: All that it takes with so few samples that torch chooses another kernel; 0 if it never does.
    """

    growing: int = 0
    fixed: int = 0
    at_once: int | None = None
    few: int = 0

    @property
    def nbytes(self) -> int:
        """Most bytes at one time."""
        return self.growing + self.fixed if self.at_once is None else self.at_once


NOTHING = Workspace()

Phase: TypeAlias = "tuple[int, int]"
"""What is held at one time beyond the final results: growing, fixed; below zero before they are there."""


def largest(phases: Iterable[Phase]) -> Workspace:
    """What the phases take, one after the other."""
    phases = list(phases)
    return Workspace(
        growing=max(0, *(growing for growing, _ in phases)),
        fixed=max(0, *(fixed for _, fixed in phases)),
        at_once=max(0, *(growing + fixed for growing, fixed in phases)),
    )


def convolution(args: Sequence[Any], results: Sequence[torch.Tensor]) -> Workspace:
    """Of ``aten.convolution``.

    A transposed one is the gradient of the input of the convolution that it transposes: the same kernels,
    with the sides swapped.
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
    """Of ``aten.convolution_backward``: the gradient of the input, then that of the weights."""
    grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted = args
    bias = x.new_empty(bias_sizes) if bias_sizes and wanted[2] else None
    backend = _backend(x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
    sides = (grad, x) if transposed else (x, grad)
    sizes = _Sizes.of(sides[0], sides[1], w, stride=stride, groups=groups, backend=backend)
    phases: list[Phase] = [(0, 0)]
    if wanted[0]:
        before = w.nbytes * wanted[1]  # the gradient of the weights is not there yet
        first = sizes.to_output() if transposed else sizes.to_input()
        phases += [(growing, fixed - before) for growing, fixed in first]
    if wanted[1]:
        phases += [(growing, fixed - w.nbytes) for growing, fixed in sizes.to_weights()]
    copied = _copied(x, grad, x)
    taken = largest((copied + growing, fixed) for growing, fixed in phases)
    call = (w, bias, stride, padding, dilation, transposed, output_padding, groups)
    return replace(taken, few=_with_few(sizes, copied, x, *call))


def _with_few(sizes: _Sizes, copied: int, x: torch.Tensor, *call: Any) -> int:
    """Bytes with as many samples as leave the convolution to another kernel, at most."""
    if not sizes.onednn and sizes.samples > max(FEW_SAMPLES):
        return 0  # no number of samples makes oneDNN's of it
    growing, fixed = sizes.elsewhere
    others = [n for n in FEW_SAMPLES if "Mkldnn" not in _backend(x.new_empty(n, *x.shape[1:]), *call)]
    return math.ceil((growing + copied) * max(others) / sizes.samples) + fixed if others else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Bytes that play a part in a convolution from ``x`` to ``y``, or back.

    Attributes:
        x: The input.
        y: The output.
        w: The weights.
        x_blocked: The input in blocks of channels.
        y_blocked: The output likewise.
        w_blocked: The weights likewise.
        unfolded: The matrix that one sample of the input unfolds to.
        bordered: One sample of the output with a border.
        samples: How many there are.
        onednn: Whether oneDNN computes it.
        reorders: Whether it has to change layouts: not where channels already lie innermost.
        few: Whether the input has so few channels that it is read as it is.
        strided: Whether windows lie apart.
        gathers: Whether a kernel gathers what it reads of each sample.
        unfolds: Whether the gradient of the weights is one of a matrix product.
        widened: How much larger a sum in single precision is than the weights.
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
        """Work them out."""
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
        """Of all threads."""
        return torch.get_num_threads() * (self.unfolded * self.gathers + THREAD_BYTES)

    @property
    def elsewhere(self) -> Phase:
        """Of other libraries: the unfolded input, and room for what oneDNN would reorder."""
        growing = self.samples * self.unfolded + self.x_blocked + self.y_blocked
        return growing, 2 * self.w_blocked + torch.get_num_threads() * THREAD_BYTES

    def to_output(self) -> list[Phase]:
        """Input, weights and output reordered; then the output again as torch has it."""
        if not self.onednn:
            return [self.elsewhere]
        if not self.reorders:
            return [(0, 2 * self.w_blocked + self.kept)]
        given = 0 if self.few else self.x_blocked
        return [(given + self.y_blocked - self.y, self.w_blocked + self.kept), (self.y_blocked, 0)]

    def to_input(self) -> list[Phase]:
        """The way back; what strided kernels give is copied once more on the way to torch's layout."""
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
        """Both sides reordered, and the result once for each thread."""
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
    """Channels do not lie innermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    innermost = tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    return tensor.is_contiguous() or not innermost


def _copied(like: torch.Tensor, *given: torch.Tensor) -> int:
    """Bytes of what does not lie in memory like the result does."""
    plain = _is_plain(like)
    return sum(
        tensor.nbytes for tensor in given if (not tensor.is_contiguous() if plain else _is_plain(tensor))
    )


def _backend(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> str:
    """The library that torch would choose, by name."""
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
