"""The input stages: what turns one stored sample into the tensor a model takes.

A value is uint8 of shape (n,) as stored, uint8 (height, width, 3) as pixels, float32 (3, height, width) once
normalised. Resizing and cropping follow torchvision's transforms on PIL images, so that a model sees here
what it saw when it was trained.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import image, tensorfile
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.image import MAX_PIXELS, PIXEL_CEILING

Spec = tuple[torch.dtype, tuple[int, ...]]
"""What a value is, as far as the stages alone tell."""

MAX_SIDE = 16384
"""Longest side to resize or crop to; the longest a WebP image can have, rounded up."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Channel means of ImageNet's training images, as torchvision's weights expect them."""

IMAGENET_STD = (0.229, 0.224, 0.225)
"""Channel standard deviations that go with :data:`IMAGENET_MEAN`."""

CROP_TRIES = 10
"""Tries of a random crop before the centre is taken, as in torchvision."""


@dataclass(frozen=True, slots=True)
class InputStage(ABC):
    """One step of the input part of a chain; immutable, and a pure function of its value and its draws.

    Attributes:
        name: What it is called in JSON and in tables.
        kind: What sort of work it does.
        takes: ``bytes`` or ``pixels``.
        gives: ``pixels``, ``tensor``, or ``any`` where only the sample tells.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    takes: ClassVar[Literal["bytes", "pixels"]]
    gives: ClassVar[Literal["pixels", "tensor", "any"]]

    @abstractmethod
    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Run the stage on one sample.

        Raises:
            SampleError: If the sample cannot pass.
        """

    @abstractmethod
    def spec(self, before: Spec | None) -> Spec | None:
        """What the stage gives, from what it takes; None where only the sample tells."""

    def to_json(self) -> dict[str, Any]:
        """The stage as plain data: its name under ``stage``, and its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"stage": self.name} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Decode(InputStage):
    """JPEG, PNG or WebP to RGB pixels.

    Attributes:
        max_pixels: Cap on width times height, checked before decoding.
        orient: Turn the image as the camera's EXIF orientation says.
    """

    name = "decode"
    kind = "decode"
    takes = "bytes"
    gives = "pixels"

    max_pixels: int = MAX_PIXELS
    orient: bool = True

    def __post_init__(self) -> None:
        _check_int("decode.max_pixels", self.max_pixels, PIXEL_CEILING)
        if type(self.orient) is not bool:
            raise ConfigError(f"decode.orient must be true or false, got {self.orient!r}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Stored bytes to uint8 (height, width, 3)."""
        return image.decode(_stored(value), max_pixels=self.max_pixels, orient=self.orient)

    def spec(self, before: Spec | None) -> Spec | None:
        """Unknown: images have any size."""
        return None


@dataclass(frozen=True, slots=True)
class LoadTensor(InputStage):
    """A stored tensor as it is.

    Attributes:
        format: ``npy`` (never with pickle) or ``safetensors``.
    """

    name = "load_tensor"
    kind = "decode"
    takes = "bytes"
    gives = "any"

    format: Literal["npy", "safetensors"] = "npy"

    def __post_init__(self) -> None:
        if self.format not in ("npy", "safetensors"):
            raise ConfigError(f"load_tensor.format must be 'npy' or 'safetensors', got {self.format!r}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Stored bytes to the stored tensor."""
        read = tensorfile.read_npy if self.format == "npy" else tensorfile.read_safetensors
        return read(_stored(value))

    def spec(self, before: Spec | None) -> Spec | None:
        """Unknown: the sample's own header tells."""
        return None


@dataclass(frozen=True, slots=True)
class Resize(InputStage):
    """Resize by the bilinear filter, averaging when it shrinks.

    Attributes:
        size: The shorter side to be, or (height, width).
    """

    name = "resize"
    kind = "resize"
    takes = "pixels"
    gives = "pixels"

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", _pair("resize.size", self.size))
        for side in _sides(self.size):
            _check_int("resize.size", side, MAX_SIDE)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the size asked for."""
        height, width = self._target(*_pixels(value))
        if height * width > MAX_PIXELS:
            raise SampleError(
                f"resizing {tuple(value.shape[:2])} to {(height, width)} gives more than {MAX_PIXELS} pixels"
            )
        return image.resize(value, height, width)

    def spec(self, before: Spec | None) -> Spec | None:
        """Known for (height, width), or where the size before is known."""
        if isinstance(self.size, int) and before is None:
            return None
        height, width = self._target(*before[1][:2]) if before else _sides(self.size)
        return torch.uint8, (height, width, 3)

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
    takes = "pixels"
    gives = "pixels"

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", _pair("center_crop.size", self.size))
        for side in _sides(self.size):
            _check_int("center_crop.size", side, MAX_SIDE)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the size asked for."""
        height, width = _sides(self.size)
        has_height, has_width = _pixels(value)
        above, left = max(height - has_height, 0) // 2, max(width - has_width, 0) // 2
        if has_height < height or has_width < width:
            image.check_limit(max(width, has_width), max(height, has_height))
            padded = torch.zeros((max(height, has_height), max(width, has_width), 3), dtype=torch.uint8)
            padded[above : above + has_height, left : left + has_width] = value
            value, has_height, has_width = padded, padded.shape[0], padded.shape[1]
        # Halves are rounded to even, as torchvision rounds them.
        top, side = round((has_height - height) / 2.0), round((has_width - width) / 2.0)
        return value[top : top + height, side : side + width].contiguous()

    def spec(self, before: Spec | None) -> Spec | None:
        """The size asked for."""
        return torch.uint8, (*_sides(self.size), 3)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(InputStage):
    """A random part of the image, resized: the usual augmentation when training on ImageNet.

    The part is chosen as torchvision chooses it (area, then aspect ratio, up to ten tries, then the centre).

    Attributes:
        size: One side of a square, or (height, width).
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width over height.
    """

    name = "random_resized_crop"
    kind = "augment"
    takes = "pixels"
    gives = "pixels"

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", _pair("random_resized_crop.size", self.size))
        for side in _sides(self.size):
            _check_int("random_resized_crop.size", side, MAX_SIDE)
        for field, largest in (("scale", 1.0), ("ratio", 1000.0)):
            pair = _pair(f"random_resized_crop.{field}", getattr(self, field))
            numbers = tuple(_number(f"random_resized_crop.{field}", number) for number in pair)
            object.__setattr__(self, field, numbers)
            if not 0 < numbers[0] <= numbers[1] <= largest:
                raise ConfigError(
                    f"random_resized_crop.{field} must be 0 < low <= high <= {largest:g}, got {pair}"
                )

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the size asked for."""
        top, left, height, width = self._box(*_pixels(value), draw)
        return image.resize(value[top : top + height, left : left + width], *_sides(self.size)).contiguous()

    def spec(self, before: Spec | None) -> Spec | None:
        """The size asked for."""
        return torch.uint8, (*_sides(self.size), 3)

    def _box(self, has_height: int, has_width: int, draw: Draw) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part to keep."""
        uniforms = draw.uniforms(4 * CROP_TRIES)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for at in range(0, len(uniforms), 4):
            for_area, for_ratio, for_top, for_left = uniforms[at : at + 4]
            area = has_height * has_width * (self.scale[0] + (self.scale[1] - self.scale[0]) * for_area)
            ratio = math.exp(low + (high - low) * for_ratio)
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= has_width and 0 < height <= has_height:
                top = int(for_top * (has_height - height + 1))
                return top, int(for_left * (has_width - width + 1)), height, width
        return self._middle(has_height, has_width)

    def _middle(self, has_height: int, has_width: int) -> tuple[int, int, int, int]:
        height, width = has_height, has_width
        if has_width / has_height < self.ratio[0]:
            height = max(1, round(width / self.ratio[0]))
        elif has_width / has_height > self.ratio[1]:
            width = max(1, round(height * self.ratio[1]))
        return (has_height - height) // 2, (has_width - width) // 2, height, width


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(InputStage):
    """Left and right swapped for some samples.

    Attributes:
        p: The share of samples that are flipped.
    """

    name = "random_horizontal_flip"
    kind = "augment"
    takes = "pixels"
    gives = "pixels"

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", _number("random_horizontal_flip.p", self.p))
        if not 0 <= self.p <= 1:
            raise ConfigError(f"random_horizontal_flip.p must lie in 0..1, got {self.p}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Pixels to pixels of the same size."""
        _pixels(value)
        return value.flip(1) if draw.uniforms(1)[0] < self.p else value

    def spec(self, before: Spec | None) -> Spec | None:
        """What it takes."""
        return before


@dataclass(frozen=True, slots=True)
class Normalize(InputStage):
    """Pixels to what networks take: ``(x / 255 - mean) / std``, in that order, channels first.

    Attributes:
        mean: Of red, green, blue; ImageNet's by default.
        std: Of red, green, blue; ImageNet's by default.
    """

    name = "normalize"
    kind = "normalize"
    takes = "pixels"
    gives = "tensor"

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            values = getattr(self, field)
            if not isinstance(values, tuple | list) or len(values) != 3:
                raise ConfigError(f"normalize.{field} must be three numbers, got {values!r}")
            object.__setattr__(self, field, tuple(_number(f"normalize.{field}", each) for each in values))
        if min(self.std) <= 0:
            raise ConfigError(f"normalize.std must be > 0, got {self.std}")

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """uint8 (height, width, 3) to contiguous float32 (3, height, width)."""
        _pixels(value)
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        planes = value.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return planes.div_(255).sub_(mean).div_(std)

    def spec(self, before: Spec | None) -> Spec | None:
        """Channels first, where the size before is known."""
        return (torch.float32, (3, *before[1][:2])) if before else None


STAGES: dict[str, type[InputStage]] = {
    stage.name: stage
    for stage in (Decode, LoadTensor, Resize, CenterCrop, RandomResizedCrop, RandomHorizontalFlip, Normalize)
}
"""Every stage by its name. A chain names stages, so nothing outside this table can be asked for."""


def stage_from_json(data: object) -> InputStage:
    """Read a stage back, strictly.

    Raises:
        DatasetError: If the stage is unknown, or a field is unknown or missing.
        ConfigError: If a field's value is not allowed.
    """
    if not isinstance(data, dict) or not isinstance(data.get("stage"), str):
        known = ", ".join(STAGES)
        raise DatasetError(
            f"an input stage is an object with a name under 'stage' ({known}), got {str(data)[:200]}"
        )
    cls = STAGES.get(data["stage"])
    if cls is None:
        raise DatasetError(f"unknown input stage {data['stage'][:100]!r}; known: {', '.join(STAGES)}")
    allowed = [field.name for field in fields(cls)]
    values = {name: value for name, value in data.items() if name != "stage"}
    for name in sorted(set(values) ^ set(allowed)):
        problem = "has no field" if name in values else "lacks the field"
        raise DatasetError(f"input stage {cls.name!r} {problem} {name!r}; fields: {', '.join(allowed)}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def imagenet_train(size: int = 224) -> tuple[InputStage, ...]:
    """The usual augmentation for training on ImageNet: random crop, flip, normalise."""
    return Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize()


def imagenet_eval(size: int = 224, resize: int = 256) -> tuple[InputStage, ...]:
    """The usual way to evaluate on ImageNet: resize the shorter side, take the middle, normalise."""
    return Decode(), Resize(resize), CenterCrop(size), Normalize()


def _stored(value: torch.Tensor) -> memoryview:
    if value.dtype is not torch.uint8 or value.dim() != 1:
        raise SampleError(f"stored bytes are uint8 of shape (n,), got {value.dtype} of {tuple(value.shape)}")
    return value.contiguous().numpy().data


def _pixels(value: torch.Tensor) -> tuple[int, int]:
    """Height and width of what must be pixels."""
    if value.dtype is not torch.uint8 or value.dim() != 3 or value.shape[2] != 3 or value.numel() == 0:
        raise SampleError(
            f"pixels are uint8 of shape (height, width, 3), got {value.dtype} of {tuple(value.shape)}"
        )
    return value.shape[0], value.shape[1]


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_int(name: str, value: object, largest: int) -> None:
    if type(value) is not int or not 1 <= value <= largest:
        raise ConfigError(f"{name} must be a whole number in 1..{largest}, got {value!r}")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _pair(name: str, value: object) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name} must be one number or two, got {value!r}")
    return value[0], value[1]
