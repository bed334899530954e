"""Define the input part of a chain: stages in order, any range of which can run anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch

from upriver.errors import ConfigError, DatasetError
from upriver.pipeline.draw import Draw
from upriver.pipeline.stages.base import ANY_SIZE, InputStage, Kind, Sizes, Spec
from upriver.pipeline.stages.registry import in_place_of, stage_from_json

MAX_STAGES = 64
"""Cap on the stages read from a store, beyond any useful chain."""


@dataclass(frozen=True, slots=True)
class InputChain:
    """Stages that turn a stored sample into the model's input.

    With ``m`` stages the stored bytes are at position ``-m`` and the finished sample at 0. The stage at index
    ``i`` ends at ``i + 1 - m``.

    Attributes:
        stages: Stages in order; the first reads the stored bytes.

    Raises:
        ConfigError: If a stage cannot read the previous stage's output.
    """

    stages: tuple[InputStage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not 1 <= len(self.stages) <= MAX_STAGES:
            raise ConfigError(f"an input chain has 1..{MAX_STAGES} stages, got {len(self.stages)}")
        given: Kind = "bytes"
        for index, stage in enumerate(self.stages):
            if not isinstance(stage, InputStage):
                raise ConfigError(
                    f"stage {index} must be an input stage, got {type(stage).__name__}: {in_place_of(stage)}"
                )
            fits = "bytes" not in stage.takes if given == "any" else given in stage.takes
            if not fits:
                takes = " or ".join(stage.takes)
                raise ConfigError(f"stage {index} ({stage.name}) takes {takes}, but gets {given}")
            given = stage.gives

    @property
    def start(self) -> int:
        """Return the position of the stored bytes."""
        return -len(self.stages)

    @property
    def first_draw(self) -> int | None:
        """Return the position before the first stage that draws random numbers; None if none draws.

        Up to there a sample is the same in every epoch.
        """
        drawing = (index for index, stage in enumerate(self.stages) if stage.draws)
        return next((self.start + index for index in drawing), None)

    def stage_at(self, position: int) -> InputStage:
        """Return the stage that ends at ``position``."""
        if not self.start < position <= 0:
            raise ConfigError(f"input stages end at positions {self.start + 1}..0, got {position}")
        return self.stages[position - 1]

    def run(
        self,
        value: torch.Tensor,
        *,
        sample: int,
        epoch: int,
        seed: int,
        start: int,
        stop: int,
        seconds: dict[int, float] | None = None,
    ) -> torch.Tensor:
        """Run the stages from one position to another on one sample.

        The result does not depend on how the range is divided or where its parts run.

        Args:
            value: The sample at position ``start``; never changed.
            seconds: If given, each stage's seconds are added at the position at which it ends.

        Raises:
            SampleError: If the sample cannot pass a stage.
            ConfigError: If the positions are not ``self.start <= start <= stop <= 0``.
        """
        if not self.start <= start <= stop <= 0:
            raise ConfigError(f"positions must be {self.start} <= start <= stop <= 0, got {start} to {stop}")
        for index in range(start - self.start, stop - self.start):
            began = time.perf_counter()
            draw = Draw(seed=seed, epoch=epoch, sample=sample, stage=index)
            value = self.stages[index].apply(value, draw)
            if seconds is not None:
                position = self.start + index + 1
                seconds[position] = seconds.get(position, 0.0) + time.perf_counter() - began
        return value

    def output_spec(self) -> Spec | None:
        """Return type and shape of a finished sample, or None if they depend on the sample."""
        spec: Spec | None = None
        for stage in self.stages:
            spec = stage.spec(spec)
        return spec if _is_whole(spec) else None

    def most_bytes(self, stored: Sizes, stop: int, *, start: int | None = None) -> tuple[Sizes, Sizes]:
        """Return bounds on the memory of samples, before any is read.

        Args:
            stored: Bytes of each sample at ``start``.

        Returns:
            Bytes of each sample at ``stop``, infinite if only the sample determines them; and the peak bytes
            of a stage on the way, including its input and output. The peak leaves out images of unknown size,
            for which each worker reserves memory itself.
        """
        spec: Spec | None = None
        taken, most = stored, np.zeros_like(stored)
        first = 0 if start is None else start - self.start
        for stage in self.stages[first : stop - self.start]:
            spec = stage.spec(spec)
            given = np.full_like(stored, _nbytes(spec)) if _is_whole(spec) else stage.given_bytes(taken)
            known = np.where(np.isfinite(taken), taken, 0)
            working = known + stage.working_bytes(known, given)
            most = np.maximum(most, np.where(np.isfinite(working), working, 0))
            taken = given
        return taken, most

    def to_json(self) -> list[dict[str, Any]]:
        """Return the chain as plain data."""
        return [stage.to_json() for stage in self.stages]

    @classmethod
    def from_json(cls, data: object) -> InputChain:
        """Read a chain back, strictly.

        Raises:
            DatasetError: If a stage or field is unknown, or a field is missing.
            ConfigError: If a value is not allowed, or stages do not fit together.
        """
        if not isinstance(data, Sequence) or isinstance(data, str) or len(data) > MAX_STAGES:
            raise DatasetError(f"the input stages must be a list of at most {MAX_STAGES}")
        return cls(tuple(stage_from_json(stage) for stage in data))


def _is_whole(spec: Spec | None) -> TypeGuard[Spec]:
    """Return whether the spec leaves nothing to the sample."""
    return spec is not None and ANY_SIZE not in spec[1]


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def stored_tensor(blob: bytes | memoryview) -> torch.Tensor:
    """Return a stored sample as a chain's initial value: a fresh uint8 tensor of shape (n,)."""
    out = torch.empty(len(blob), dtype=torch.uint8, device="cpu")
    out.numpy()[...] = np.frombuffer(blob, dtype=np.uint8)
    return out
