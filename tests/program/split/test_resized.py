"""Check that a program resized to another number of samples has the stages and bits of a new split."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.program.nets import frozen_small
from upriver.errors import CaptureError
from upriver.program.graph.liveness import Granularity
from upriver.program.split.resized import resized
from upriver.program.split.split import Split, split


def at(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@cache
def split_small(size: int, granularity: Granularity = "module") -> Split:
    return split(frozen_small(), at(size), granularity=granularity)


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.full
def test_it_is_the_program_of_a_split_at_that_size(granularity: Granularity) -> None:
    parts = split_small(8, granularity)
    assert parts.program is not None
    assert parts.capture_s > 0
    program = resized(frozen_small(), parts, at(2))
    assert program.micro_batch == 2
    assert [stage.name for stage in program.stages] == [stage.name for stage in parts.program.stages]
    wanted = split_small(2, granularity).program
    assert wanted is not None
    assert (program.digest, program.weights_digest) == (wanted.digest, parts.program.weights_digest)


def test_other_stages_at_that_size_are_refused() -> None:
    earlier = split(frozen_small("block1"), at(8)).program
    parts = replace(split_small(8), program=earlier)
    with pytest.raises(CaptureError, match="other stages for 2 samples"):
        resized(frozen_small(), parts, at(2))


def test_an_unsplit_model_has_none() -> None:
    parts = replace(split_small(8), program=None, why_not="nothing can be captured")
    with pytest.raises(CaptureError, match="runs unsplit: nothing can be captured"):
        resized(frozen_small(), parts, at(2))
