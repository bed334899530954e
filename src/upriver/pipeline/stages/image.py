"""Stages of images: decoding, sizes that are fixed, and the ways to the tensor that a model takes.

Resizing and cropping follow torchvision's transforms on PIL images, so that a model sees here what it saw
when it was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats import image
from upriver.pipeline.formats.image import MAX_PIXELS, PIXEL_CEILING
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

MAX_SIDE = 16384
"""Longest side to resize or crop to; the longest a WebP image can have, rounded up."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Channel means of ImageNet's training images, as torchvision's weights expect them."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Channel standard deviations that go with :data:`IMAGENET_MEAN`."""


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a size, which for a square is one number."""
    return (size, size) if isinstance(size, int) else size


def checked_size(name: str, value: object) -> int | tuple[int, int]:
    """A field that is one side or two.

    Raises:
        ConfigError: If it is neither, or a side is too long; the message names the field.
    """
    size = value if isinstance(value, int) else pair(name, value)
    for side in sides(size):
        check_int(name, side, MAX_SIDE)
    return size


@dataclass(frozen=True, slots=True)
class Decode(InputStage):
    """JPEG, PNG, WebP, BMP, PPM, PGM or PBM to RGB pixels.

    Attributes:
        max_pixels: Cap on width times height, checked before decoding.
        orient: Turn the image as the camera's EXIF orientation says.
    """

    name = "decode"
    kind = "decode"
    takes = ("bytes",)
    gives = "pixels"

    max_pixels: int = MAX_PIXELS
    orient: bool = True

    def __post_init__(self) -> None:
        check_int("decode.max_pixels", self.max_pixels, PIXEL_CEILING)
        check_bool("decode.orient", self.orient)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Stored bytes to uint8 (height, width, 3)."""
        return image.decode(stored_bytes(value), max_pixels=self.max_pixels, orient=self.orient)

    def spec(self, before: Spec | None) -> Spec | None:
        """Unknown: images have any size."""
        return None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Unknown: a small file may be a large image."""
        return np.full_like(taken, np.inf)


@dataclass(frozen=True, slots=True)
class Resize(InputStage):
    """Resize by the bilinear filter, averaging when it shrinks.

    Attributes:
        size: The shorter side to be, or (height, width).
    """

    name = "resize"
    kind = "resize"
    takes = ("pixels",)
    gives = "pixels"

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_size("resize.size", self.size))

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the size asked for."""
        height, width = self._target(*height_and_width(value))
        if height * width > MAX_PIXELS:
            raise SampleError(
                f"resizing {tuple(value.shape[:2])} to {(height, width)} gives more than {MAX_PIXELS} pixels"
            )
        return image.resize(value, height, width)

    def spec(self, before: Spec | None) -> Spec | None:
        """Known for (height, width), or where the size before is known."""
        if isinstance(self.size, int) and before is None:
            return None
        height, width = self._target(*before[1][:2]) if before else sides(self.size)
        return torch.uint8, (height, width, 3)

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Unknown: a sliver grows more than a square."""
        return np.full_like(taken, np.inf)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        if height <= width:
            return self.size, int(self.size * width / height)
        return int(self.size * height / width), self.size


@dataclass(frozen=True, slots=True)
class CenterCrop(InputStage):
    """The middle of the image; a smaller image is padded with black, as torchvision does.

    Attributes:
        size: One side of a square, or (height, width).
    """

    name = "center_crop"
    kind = "crop"
    takes = ("pixels",)
    gives = "pixels"

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_size("center_crop.size", self.size))

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the size asked for."""
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
        # Halves are rounded to even, as torchvision rounds them.
        top, side = round((has_height - height) / 2.0), round((has_width - width) / 2.0)
        return value[top : top + height, side : side + width].contiguous()

    def spec(self, before: Spec | None) -> Spec | None:
        """The size asked for."""
        return torch.uint8, (*sides(self.size), 3)


@dataclass(frozen=True, slots=True)
class Normalize(InputStage):
    """Pixels to what networks take: ``(x / 255 - mean) / std``, in that order, channels first.

    Attributes:
        mean: Of red, green, blue; ImageNet's by default.
        std: Of red, green, blue; ImageNet's by default.
    """

    name = "normalize"
    kind = "normalize"
    takes = ("pixels",)
    gives = "tensor"

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
        """uint8 (height, width, 3) to contiguous float32 (3, height, width)."""
        mean, std = (
            torch.tensor(each, dtype=torch.float32, device="cpu").view(3, 1, 1)
            for each in (self.mean, self.std)
        )
        return planes(value).div_(255).sub_(mean).div_(std)

    def spec(self, before: Spec | None) -> Spec | None:
        """Channels first, where the size before is known."""
        return (torch.float32, (3, *before[1][:2])) if before else None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Four bytes for one."""
        return 4 * taken


@dataclass(frozen=True, slots=True)
class ToFloat(InputStage):
    """Pixels to ``x / 255``, channels first, held to a range.

    Attributes:
        low: Smallest value that comes out.
        high: Largest value that comes out.
    """

    name = "to_float"
    kind = "normalize"
    takes = ("pixels",)
    gives = "tensor"

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for field in ("low", "high"):
            object.__setattr__(self, field, number_between(f"to_float.{field}", getattr(self, field), 0, 1))
        if not self.low < self.high:
            raise ConfigError(f"to_float.low must be < to_float.high, got {self.low} and {self.high}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """uint8 (height, width, 3) to contiguous float32 (3, height, width)."""
        return planes(value).div_(255).clamp_(self.low, self.high)

    def spec(self, before: Spec | None) -> Spec | None:
        """Channels first, where the size before is known."""
        return (torch.float32, (3, *before[1][:2])) if before else None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Four bytes for one."""
        return 4 * taken


def planes(value: torch.Tensor) -> torch.Tensor:
    """Pixels as fresh, contiguous float32 (3, height, width), 0 to 255.

    Raises:
        SampleError: If they are no pixels.
    """
    height_and_width(value)
    return value.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
