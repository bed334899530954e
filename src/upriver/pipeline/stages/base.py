"""What an input stage is, and what all of them check: fields when they are made, values when they run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError

Spec = tuple[torch.dtype, tuple[int, ...]]
"""What a value is, as far as the stages alone tell; `ANY_SIZE` stands for a size that they do not."""

ANY_SIZE = -1
"""In a shape, in place of a size that only the sample tells. Pixels have both sizes or no `Spec` at all."""

Kind = Literal["bytes", "pixels", "audio", "spectrum", "tensor", "any"]
"""What a value is between two stages; ``any`` where only the sample tells."""

Sizes = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes, one number for each sample; infinite where nothing bounds them before the sample is there."""

SCRATCH_BYTES = 2**20
"""What a stage takes beside tensors of its value's size: tables, and the blocks that it works in."""


@dataclass(frozen=True, slots=True)
class InputStage(ABC):
    """One step of the input part of a chain; immutable, and a pure function of its value and its draws.

    Attributes:
        name: What it is called in JSON and in tables.
        kind: What sort of work it does.
        takes: The kinds of values that it works on.
        gives: The kind of what comes out.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    takes: ClassVar[tuple[Kind, ...]]
    gives: ClassVar[Kind]

    @abstractmethod
    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Run the stage on one sample.

        Raises:
            SampleError: If the sample cannot pass.
        """

    @abstractmethod
    def spec(self, before: Spec | None) -> Spec | None:
        """What the stage gives, from what it takes; None where only the sample tells."""

    def given_bytes(self, taken: Sizes) -> Sizes:
        """What it gives at most for values of so many bytes; asked where `spec` leaves that open."""
        return taken

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """What it has at once at most, beside what it takes and with what it gives."""
        return 2 * taken + 4 * given + SCRATCH_BYTES

    def to_json(self) -> dict[str, Any]:
        """The stage as plain data: its name under ``stage``, and its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"stage": self.name} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
        }


# ------------------------------------------------------------------------------------------- fields


def check_int(name: str, value: object, largest: int, *, least: int = 1) -> None:
    """Check a field that is a whole number.

    Raises:
        ConfigError: If it is none, or outside ``least..largest``; the message names the field.
    """
    if type(value) is not int or not least <= value <= largest:
        raise ConfigError(f"{name} must be a whole number in {least}..{largest}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Check a field that is true or false.

    Raises:
        ConfigError: If it is neither; the message names the field.
    """
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def number(name: str, value: object) -> float:
    """A field that is a number, as a float.

    Raises:
        ConfigError: If it is none, or NaN, or infinite; the message names the field.
    """
    try:
        finite = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number that is beyond every float
        finite = False
    if not finite:
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def number_between(name: str, value: object, low: float, high: float) -> float:
    """A field that is a number in ``low..high``, as a float.

    Raises:
        ConfigError: If it is none; the message names the field.
    """
    found = number(name, value)
    if not low <= found <= high:
        raise ConfigError(f"{name} must lie in {low:g}..{high:g}, got {value!r}")
    return found


def pair(name: str, value: object) -> tuple[Any, Any]:
    """A field that is one of something, or two, given as two.

    Raises:
        ConfigError: If it is anything else; the message names the field.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name} must be one number or two, got {value!r}")
    return value[0], value[1]


def number_or_range(name: str, value: object, low: float, high: float) -> float | tuple[float, float]:
    """A field that is one number, or the smallest and the largest of several; all in ``low..high``.

    Raises:
        ConfigError: If it is neither; the message names the field.
    """
    if not isinstance(value, tuple | list):
        return number_between(name, value, low, high)
    first, last = (number_between(name, each, low, high) for each in pair(name, value))
    if first > last:
        raise ConfigError(f"{name} must be low <= high, got {value!r}")
    return first, last


# ------------------------------------------------------------------------------------------- values


def stored_bytes(value: torch.Tensor) -> memoryview:
    """The bytes of what must be a stored sample.

    Raises:
        SampleError: If it is something else.
    """
    if value.dtype is not torch.uint8 or value.dim() != 1:
        raise SampleError(f"stored bytes are uint8 of shape (n,), got {value.dtype} of {tuple(value.shape)}")
    return value.contiguous().numpy().data


def height_and_width(value: torch.Tensor) -> tuple[int, int]:
    """Of what must be pixels.

    Raises:
        SampleError: If it is something else.
    """
    if value.dtype is not torch.uint8 or value.dim() != 3 or value.shape[2] != 3 or value.numel() == 0:
        raise SampleError(
            f"pixels are uint8 of shape (height, width, 3), got {value.dtype} of {tuple(value.shape)}"
        )
    return value.shape[0], value.shape[1]
