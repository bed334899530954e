"""Define input stages, and their common checks: fields at construction, values at run time."""

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
"""Type and shape of a value as the stages determine them; `ANY_SIZE` stands for an undetermined size."""

ANY_SIZE = -1
"""Placeholder in a shape for a size that depends on the sample. Pixels have both sizes or no `Spec`."""

Kind = Literal["bytes", "pixels", "audio", "spectrum", "tensor", "any"]
"""Kind of a value between two stages; ``any`` if it depends on the sample."""

Sizes = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes, one number for each sample; infinite if nothing bounds them before the sample is read."""

SCRATCH_BYTES = 2**20
"""Memory of a stage besides tensors of its value's size: tables, and working blocks."""


@dataclass(frozen=True, slots=True)
class InputStage(ABC):
    """One step of a chain's input part: immutable, and a pure function of its value and random numbers.

    Attributes:
        name: Name in JSON and in tables.
        kind: Category of the stage's work.
        draws: Whether the result depends on the random numbers. A stage that does not say counts as random:
            its results are then never kept for another epoch.
        threaded: Whether the result's low bits may depend on PyTorch's number of threads.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    takes: ClassVar[tuple[Kind, ...]]
    gives: ClassVar[Kind]
    draws: ClassVar[bool] = True
    threaded: ClassVar[bool] = False

    @abstractmethod
    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Run the stage on one sample.

        Raises:
            SampleError: If the sample cannot pass.
        """

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the result's spec, by default the input's; None if it depends on the sample."""
        return before

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return the maximum bytes of results for inputs of these bytes, where `spec` leaves them open."""
        return taken

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return the peak memory in bytes, without the input and with the result."""
        return 2 * taken + 4 * given + SCRATCH_BYTES

    def to_json(self) -> dict[str, Any]:
        """Return the stage as plain data: its name under ``stage``, and its fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"stage": self.name} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
        }


# ------------------------------------------------------------------------------------------- fields


def check_int(name: str, value: object, largest: int, *, least: int = 1) -> None:
    """Check a field that is a whole number.

    Raises:
        ConfigError: If it is not, or lies outside ``least..largest``; the message names the field.
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
    """Return a field that is a number, as a float.

    Raises:
        ConfigError: If it is not a number, or is NaN or infinite; the message names the field.
    """
    try:
        finite = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        finite = False
    if not finite:
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def number_between(name: str, value: object, low: float, high: float) -> float:
    """Return a field that is a number in ``low..high``, as a float.

    Raises:
        ConfigError: If it is not; the message names the field.
    """
    found = number(name, value)
    if not low <= found <= high:
        raise ConfigError(f"{name} must lie in {low:g}..{high:g}, got {value!r}")
    return found


def pair(name: str, value: object) -> tuple[Any, Any]:
    """Return a field that may be one value or two, given as two.

    Raises:
        ConfigError: If it is not two values; the message names the field.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name} must be one number or two, got {value!r}")
    return value[0], value[1]


def number_or_range(name: str, value: object, low: float, high: float) -> float | tuple[float, float]:
    """Return a field that is one number, or a smallest and a largest number; all in ``low..high``.

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
    """Return the bytes of a value that must be a stored sample.

    Raises:
        SampleError: If the value is not a stored sample.
    """
    if value.dtype is not torch.uint8 or value.dim() != 1:
        raise SampleError(f"stored bytes are uint8 of shape (n,), got {value.dtype} of {tuple(value.shape)}")
    return value.contiguous().numpy().data


def height_and_width(value: torch.Tensor) -> tuple[int, int]:
    """Return height and width of a value that must be pixels.

    Raises:
        SampleError: If the value is not pixels.
    """
    if value.dtype is not torch.uint8 or value.dim() != 3 or value.shape[2] != 3 or value.numel() == 0:
        raise SampleError(
            f"pixels are uint8 of shape (height, width, 3), got {value.dtype} of {tuple(value.shape)}"
        )
    return value.shape[0], value.shape[1]
