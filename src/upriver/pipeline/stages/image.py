"""Define stages of images: decoding, fixed sizes, and conversions to the model's input tensor.

Resizing and cropping follow torchvision's transforms on PIL images, so that a model gets the same input as in
training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats import image
from upriver.pipeline.formats.image import MAX_PIXELS
from upriver.pipeline.stages.base import (
    InputStage,
    Sizes,
    Spec,
    check_bool,
    check_int,
    height_and_width,
    number,
    number_between,
    pair,
    stored_bytes,
)
from upriver.types import PIXEL_CEILING

MAX_SIDE = 16384
"""Longest side to resize or crop to; the longest of a WebP image, rounded up."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Channel means of ImageNet's training images, as torchvision's weights expect them."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Channel standard deviations that go with :data:`IMAGENET_MEAN`."""


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a size; one number is a square."""
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True, slots=True)
class SizedStage(InputStage):
    """Stage whose pixels have one size for all samples.

    Attributes:
        size: One side of a square, or (height, width).
    """

    takes = ("pixels",)
    gives = "pixels"

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        name = f"{self.name}.size"
        size = self.size if isinstance(self.size, int) else pair(name, self.size)
        for side in sides(size):
            check_int(name, side, MAX_SIDE)
        object.__setattr__(self, "size", size)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the requested size."""
        return torch.uint8, (*sides(self.size), 3)


@dataclass(frozen=True, slots=True)
class Decode(InputStage):
    """Decode JPEG, PNG, WebP, BMP, PPM, PGM or PBM to RGB pixels.

    Attributes:
        max_pixels: Cap on width times height, checked before decoding.
        orient: Whether to turn the image by the camera's EXIF orientation.
    """

    name = "decode"
    kind = "decode"
    takes = ("bytes",)
    gives = "pixels"
    draws = False

    max_pixels: int = MAX_PIXELS
    orient: bool = True

    def __post_init__(self) -> None:
        check_int("decode.max_pixels", self.max_pixels, PIXEL_CEILING)
        check_bool("decode.orient", self.orient)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return the pixels of stored bytes, uint8 (height, width, 3)."""
        return image.decode(stored_bytes(value), max_pixels=self.max_pixels, orient=self.orient)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return None: images have any size."""
        return None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return infinity: a small file may be a large image."""
        return np.full_like(taken, np.inf)


@dataclass(frozen=True, slots=True)
class Resize(SizedStage):
    """Resize with the bilinear filter, which averages when it shrinks.

    Attributes:
        size: Length of the shorter side, or (height, width).
    """

    name = "resize"
    kind = "resize"
    draws = False

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the requested size."""
        height, width = self._target(*height_and_width(value))
        if height * width > MAX_PIXELS:
            raise SampleError(
                f"resizing {tuple(value.shape[:2])} to {(height, width)} gives more than {MAX_PIXELS} pixels"
            )
        return image.resize(value, height, width)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the size if it is (height, width) or the input's size is known."""
        if isinstance(self.size, int) and before is None:
            return None
        height, width = self._target(*before[1][:2]) if before else sides(self.size)
        return torch.uint8, (height, width, 3)

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return infinity: a sliver grows more than a square."""
        return np.full_like(taken, np.inf)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        if height <= width:
            return self.size, int(self.size * width / height)
        return int(self.size * height / width), self.size


@dataclass(frozen=True, slots=True)
class CenterCrop(SizedStage):
    """Crop the middle of the image; a smaller image is padded with black, as in torchvision."""

    name = "center_crop"
    kind = "crop"
    draws = False

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the requested size."""
        height, width = sides(self.size)
        has_height, has_width = height_and_width(value)
        above, left = max(height - has_height, 0) // 2, max(width - has_width, 0) // 2
        if has_height < height or has_width < width:
            image.check_limit(max(width, has_width), max(height, has_height))
            padded = torch.zeros(
                (max(height, has_height), max(width, has_width), 3), dtype=torch.uint8, device="cpu"
            )
            padded[above : above + has_height, left : left + has_width] = value
            value, has_height, has_width = padded, padded.shape[0], padded.shape[1]
        # Halves are rounded to even, as in torchvision.
        top, side = round((has_height - height) / 2.0), round((has_width - width) / 2.0)
        return value[top : top + height, side : side + width].contiguous()


@dataclass(frozen=True, slots=True)
class PlanesStage(InputStage):
    """Stage that converts pixels to float32, channels first."""

    kind = "normalize"
    takes = ("pixels",)
    gives = "tensor"
    draws = False

    def spec(self, before: Spec | None) -> Spec | None:
        """Return channels first, if the input's size is known."""
        return (torch.float32, (3, *before[1][:2])) if before else None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return four bytes for each."""
        return 4 * taken


@dataclass(frozen=True, slots=True)
class Normalize(PlanesStage):
    """Convert pixels to a network's input: ``(x / 255 - mean) / std``, in that order, channels first."""

    name = "normalize"

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            values = getattr(self, field)
            if not isinstance(values, tuple | list) or len(values) != 3:
                raise ConfigError(f"normalize.{field} must be three numbers, got {values!r}")
            object.__setattr__(self, field, tuple(number(f"normalize.{field}", each) for each in values))
        if min(self.std) <= 0:
            raise ConfigError(f"normalize.std must be > 0, got {self.std}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return contiguous float32 (3, height, width) for uint8 (height, width, 3)."""
        mean, std = (
            torch.tensor(each, dtype=torch.float32, device="cpu").view(3, 1, 1)
            for each in (self.mean, self.std)
        )
        return planes(value).div_(255).sub_(mean).div_(std)


@dataclass(frozen=True, slots=True)
class ToFloat(PlanesStage):
    """Convert pixels to ``x / 255``, channels first, clamped to ``low..high``."""

    name = "to_float"

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for field in ("low", "high"):
            object.__setattr__(self, field, number_between(f"to_float.{field}", getattr(self, field), 0, 1))
        if not self.low < self.high:
            raise ConfigError(f"to_float.low must be < to_float.high, got {self.low} and {self.high}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return contiguous float32 (3, height, width) for uint8 (height, width, 3)."""
        return planes(value).div_(255).clamp_(self.low, self.high)


def planes(value: torch.Tensor) -> torch.Tensor:
    """Return pixels as fresh, contiguous float32 (3, height, width), 0 to 255.

    Raises:
        SampleError: If the value is not pixels.
    """
    height_and_width(value)
    return value.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
