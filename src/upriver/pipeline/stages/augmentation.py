"""Define stages that change an image at random: crops, flips, colours, and RandAugment.

Each does what torchvision's transform of that name does to a PIL image. It gives the same pixels for the same
random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats import image
from upriver.pipeline.formats.image import Change
from upriver.pipeline.stages.base import (
    SCRATCH_BYTES,
    InputStage,
    Sizes,
    check_int,
    height_and_width,
    number,
    number_between,
    number_or_range,
    pair,
)
from upriver.pipeline.stages.image import MAX_SIDE, SizedStage, sides

CROP_TRIES = 10
"""Tries of a random crop before the centre is taken, as in torchvision."""

MAX_FACTOR = 64.0
"""Largest factor of a colour: everything but black is white long before."""

MAX_OPS = 16
"""Maximum operations in a row; recipes of RandAugment have two or three."""

MAX_BINS = 1024
"""Finest scale of magnitudes; the usual one has 31."""

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "saturation", "contrast", "sharpness"),
    *("posterize", "solarize", "auto_contrast", "equalize"),
)
"""Operations of RandAugment, in torchvision's order; torchvision's Color is ``saturation`` here."""

STRONGEST = {
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150.0 / 331.0,
    "translate_y": 150.0 / 331.0,
    "rotate": 30.0,
    "brightness": 0.9,
    "saturation": 0.9,
    "contrast": 0.9,
    "sharpness": 0.9,
}
"""Signed operations, with the amount of the last bin.

The amount is a slope, a share of a side, degrees, or an addend to the factor 1.
"""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(SizedStage):
    """Resize a random part of the image: the usual augmentation when training on ImageNet.

    The part is chosen as in torchvision: area, then aspect ratio, up to ten tries, then the centre.

    Attributes:
        scale: Smallest and largest share of the area.
        ratio: Smallest and largest width over height.
    """

    name = "random_resized_crop"
    kind = "augment"

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        SizedStage.__post_init__(self)
        for field, largest in (("scale", 1.0), ("ratio", 1000.0)):
            given = pair(f"random_resized_crop.{field}", getattr(self, field))
            numbers = tuple(number(f"random_resized_crop.{field}", each) for each in given)
            object.__setattr__(self, field, numbers)
            if not 0 < numbers[0] <= numbers[1] <= largest:
                raise ConfigError(
                    f"random_resized_crop.{field} must be 0 < low <= high <= {largest:g}, got {given}"
                )

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the requested size."""
        top, left, height, width = self._box(*height_and_width(value), draw)
        return image.resize(value[top : top + height, left : left + width], *sides(self.size)).contiguous()

    def _box(self, has_height: int, has_width: int, draw: Draw) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the part to keep."""
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
class RandomCrop(SizedStage):
    """Take a part of the image, at any place with equal probability.

    Attributes:
        padding: Black pixels added around the image first, on each side.
    """

    name = "random_crop"
    kind = "augment"

    padding: int = 0

    def __post_init__(self) -> None:
        SizedStage.__post_init__(self)
        check_int("random_crop.padding", self.padding, MAX_SIDE, least=0)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the requested size."""
        height, width = sides(self.size)
        has_height, has_width = height_and_width(value)
        free = [has + 2 * self.padding - side for has, side in ((has_height, height), (has_width, width))]
        if min(free) < 0:
            raise SampleError(
                f"a crop of {height} x {width} pixels does not fit into {has_height} x {has_width} with "
                f"{self.padding} on each side"
            )
        top, left = (
            int(uniform * (room + 1)) - self.padding
            for uniform, room in zip(draw.uniforms(2), free, strict=True)
        )
        image.check_limit(width, height)
        out = torch.zeros((height, width, 3), dtype=torch.uint8, device="cpu")
        part = value[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
        above, before = max(-top, 0), max(-left, 0)
        out[above : above + part.shape[0], before : before + part.shape[1]] = part
        return out


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(InputStage):
    """Swap left and right for some samples.

    Attributes:
        p: Share of the samples that are flipped.
    """

    name = "random_horizontal_flip"
    kind = "augment"
    takes = ("pixels",)
    gives = "pixels"

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", number_between("random_horizontal_flip.p", self.p, 0, 1))

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the same size."""
        height_and_width(value)
        return value.flip(1) if draw.uniforms(1)[0] < self.p else value


@dataclass(frozen=True, slots=True)
class ColorJitter(InputStage):
    """Change brightness, contrast, saturation and hue by random factors, in random order.

    A number ``x`` stands for the factors ``1 - x`` (0 at least) to ``1 + x``, and for hue ``-x`` to ``x``, in
    units of the whole circle. Two numbers are the smallest and the largest. A property with 0 is left alone.

    Attributes:
        brightness: Factor; 0 gives black, 1 the image.
        contrast: Factor; 0 gives the image's mean grey, 1 the image.
        saturation: Factor; 0 gives greys, 1 the image.
        hue: -0.5 to 0.5.
    """

    name = "color_jitter"
    kind = "augment"
    takes = ("pixels",)
    gives = "pixels"

    brightness: float | tuple[float, float] = 0.0
    contrast: float | tuple[float, float] = 0.0
    saturation: float | tuple[float, float] = 0.0
    hue: float | tuple[float, float] = 0.0

    def __post_init__(self) -> None:
        for field in ("brightness", "contrast", "saturation"):
            value = number_or_range(f"color_jitter.{field}", getattr(self, field), 0, MAX_FACTOR)
            object.__setattr__(self, field, value)
        least = -0.5 if isinstance(self.hue, tuple | list) else 0
        object.__setattr__(self, "hue", number_or_range("color_jitter.hue", self.hue, least, 0.5))

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the same size."""
        height_and_width(value)
        return image.change(value, self._changes(draw))

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return Pillow's peak memory."""
        return _changing_bytes(taken)

    def _changes(self, draw: Draw) -> list[Change]:
        """Return the changes. Unused properties draw, too, so that one setting does not affect another."""
        ranges = {
            "brightness": _around(1.0, self.brightness),
            "contrast": _around(1.0, self.contrast),
            "saturation": _around(1.0, self.saturation),
            "hue": _around(0.0, self.hue),
        }
        uniforms = draw.uniforms(2 * len(ranges))
        order = sorted(range(len(ranges)), key=uniforms.__getitem__)
        names = list(ranges)
        changes = []
        for at in order:
            low, high = ranges[names[at]]
            nothing = 0.0 if names[at] == "hue" else 1.0
            if not low == high == nothing:
                changes.append((names[at], low + (high - low) * uniforms[len(ranges) + at]))
        return changes


@dataclass(frozen=True, slots=True)
class RandAugment(InputStage):
    """Apply some operations in a row, each drawn from the same table (Cubuk et al., NeurIPS 2020).

    Operations and magnitudes are torchvision's: nearest neighbour, black outside the image, and a random sign
    where one makes sense.

    Attributes:
        magnitude: Strength of the operations: a bin, counted from 0.
        num_magnitude_bins: Number of bins from no effect to the strongest.
    """

    name = "rand_augment"
    kind = "augment"
    takes = ("pixels",)
    gives = "pixels"

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    def __post_init__(self) -> None:
        check_int("rand_augment.num_ops", self.num_ops, MAX_OPS)
        check_int("rand_augment.num_magnitude_bins", self.num_magnitude_bins, MAX_BINS, least=2)
        check_int("rand_augment.magnitude", self.magnitude, self.num_magnitude_bins - 1, least=0)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return pixels of the same size."""
        height, width = height_and_width(value)
        uniforms = draw.uniforms(2 * self.num_ops)
        changes = []
        for for_name, for_sign in zip(uniforms[::2], uniforms[1::2], strict=True):
            name = OPERATIONS[int(for_name * len(OPERATIONS))]
            if name != "identity":
                changes.append((name, self.amount(name, -1 if for_sign >= 0.5 else 1, height, width)))
        return image.change(value, changes)

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return Pillow's peak memory."""
        return _changing_bytes(taken)

    def amount(self, name: str, sign: int, height: int, width: int) -> float:
        """Return the amount of an operation, for `upriver.pipeline.formats.image.change`."""
        bins, at = self.num_magnitude_bins, self.magnitude
        if name == "posterize":
            return float(
                8
                - (torch.arange(bins, dtype=torch.float32, device="cpu") / ((bins - 1) / 4)).round().int()[at]
            )
        if name == "solarize":
            return _at(255.0, 0.0, bins, at)
        if name not in STRONGEST:
            return 0.0
        side = {"translate_x": width, "translate_y": height}.get(name, 1)
        magnitude = sign * _at(0.0, STRONGEST[name] * side, bins, at)
        return 1.0 + magnitude if name in image.FACTORS else magnitude


def _changing_bytes(taken: Sizes) -> Sizes:
    """Return Pillow's peak memory besides an input of these bytes, three for each pixel."""
    return (image.CHANGING - 3) * taken / 3 + SCRATCH_BYTES


def _at(first: float, last: float, bins: int, at: int) -> float:
    """Return a bin's amount in single precision, as in torchvision: rounding affects some pixels."""
    return float(torch.linspace(first, last, bins, dtype=torch.float32, device="cpu")[at])


def _around(centre: float, value: float | tuple[float, float]) -> tuple[float, float]:
    """Return the smallest and largest amount; one number is the distance of both from the centre."""
    if isinstance(value, tuple):
        return value
    least = centre - value
    return (max(least, 0.0) if centre else least), centre + value
