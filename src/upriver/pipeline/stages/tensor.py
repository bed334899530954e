"""Define stages of tensors: read a stored tensor, and scale one to mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats import audio, tensorfile
from upriver.pipeline.stages.base import InputStage, Sizes, Spec, number_between, stored_bytes

LEAST_EPS, MOST_EPS = 1e-12, 1.0
"""Range of the term that keeps a constant sample from a division by zero, in single precision as well."""


@dataclass(frozen=True, slots=True)
class LoadTensor(InputStage):
    """Read a stored tensor unchanged.

    Attributes:
        format: ``npy`` (never with pickle) or ``safetensors``.
    """

    name = "load_tensor"
    kind = "decode"
    takes = ("bytes",)
    gives = "any"
    draws = False

    format: Literal["npy", "safetensors"] = "npy"

    def __post_init__(self) -> None:
        if self.format not in ("npy", "safetensors"):
            raise ConfigError(f"load_tensor.format must be 'npy' or 'safetensors', got {self.format!r}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return the stored tensor of the stored bytes."""
        read = tensorfile.read_npy if self.format == "npy" else tensorfile.read_safetensors
        return read(stored_bytes(value))

    def spec(self, before: Spec | None) -> Spec | None:
        """Return None: only the sample's own header determines it."""
        return None


@dataclass(frozen=True, slots=True)
class Standardize(InputStage):
    """Compute ``(x - mean) / (std + eps)`` over the whole sample; a constant one becomes zeros.

    Attributes:
        eps: Added to the standard deviation, which is that of the sample, not an estimate from it.
    """

    name = "standardize"
    kind = "normalize"
    takes = ("audio", "tensor")
    gives = "tensor"
    draws = False

    eps: float = 1e-8

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", number_between("standardize.eps", self.eps, LEAST_EPS, MOST_EPS))

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return contiguous float32 of the same shape for floating-point numbers."""
        if not value.is_floating_point() or value.numel() == 0:
            raise SampleError(
                f"to standardize takes floating-point numbers, got {value.dtype} of {tuple(value.shape)}"
            )
        return audio.standardize(value.to(torch.float32), self.eps)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return float32 of the same shape."""
        return (torch.float32, before[1]) if before else None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return twice the input's bytes, for half precision."""
        return 2 * taken
