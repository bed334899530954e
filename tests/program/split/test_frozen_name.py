"""Check that a frozen part has one name, before and after its capture: by code, settings and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.program.nets import Small, frozen_small
from upriver.program.example_inputs import Example
from upriver.program.graph.executor import Program
from upriver.program.split import frozen_name as module
from upriver.program.split.eager_prefix import EagerPrefix
from upriver.program.split.freeze_point import EvalPlan
from upriver.program.split.frozen_name import (
    FrozenName,
    frozen_name,
    outline_digest,
    remember_trained,
    trained_by_others,
)
from upriver.program.split.split import Split, outline, split
from upriver.program.split.tail import Tail

EXAMPLE = torch.zeros(4, 3, 16, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    yield tmp_path


def outline_of(model: Small, example: torch.Tensor = EXAMPLE, **given: Any) -> Split:
    found = outline(model, example, named=True, **given)
    assert found is not None
    return found


def named(model: Small, example: torch.Tensor = EXAMPLE) -> str:
    return outline_digest(model, outline_of(model, example), example, autocast=None, granularity="module")


def captured(model: Small) -> Program:
    program = split(model, EXAMPLE).program
    assert program is not None
    return program


def test_a_frozen_part_keeps_the_name_that_it_was_first_known_by() -> None:
    program = captured(frozen_small())
    first = frozen_name(named(frozen_small()))
    assert first == FrozenName(digest=named(frozen_small()), num_stages=1)
    assert frozen_name(named(frozen_small()), program) == first
    assert frozen_name(None, program) == first
    assert frozen_name("0" * 64, program) == first  # a script that was edited since
    assert frozen_name("0" * 64) == first


@pytest.mark.full
def test_a_program_that_was_never_outlined_has_its_own_name() -> None:
    program = captured(frozen_small())
    first = frozen_name(None, program)
    assert first == FrozenName(digest=program.digest, num_stages=program.num_stages)
    assert frozen_name(named(frozen_small()), program) == first
    assert frozen_name(named(frozen_small())) == first


def test_a_name_needs_an_outline_or_a_program() -> None:
    with pytest.raises(ValueError, match="by its outline or its program"):
        frozen_name(None)


def test_heads_of_other_forms_do_not_count() -> None:
    wider = frozen_small()
    wider.head = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 9))
    assert named(wider) == named(frozen_small())


def test_head_does_not_count_and_frozen_weights_code_and_form_do() -> None:
    digests = [named(frozen_small())]
    other_head = frozen_small()
    with torch.no_grad():
        for weight in other_head.parameters():
            if weight.requires_grad:
                weight += 1
    assert named(other_head) == digests[0]
    for change in ("weight", "buffer", "setting", "form", "seed"):
        model, example = frozen_small(seed=1 if change == "seed" else 0), EXAMPLE
        frozen = [each for each in model.parameters() if not each.requires_grad]
        with torch.no_grad():
            if change == "weight":
                frozen[0].view(-1)[0] += 1e-6
            elif change == "buffer":
                next(each for name, each in model.named_buffers() if "mean" in name).add_(1e-6)
            elif change == "setting":
                model.block1.setting = 5
            elif change == "form":
                example = torch.zeros(8, 3, 16, 16)
        digests.append(named(model, example))
    assert len(set(digests)) == len(digests)


GLOBALS = {"gain": 1.0, "limit": 30.0}
"""What a forward reads and no module holds."""


class Reading(torch.nn.Module):
    def __init__(self, gain: float, table_rows: int) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(table_rows, 4), torch.nn.Linear(4, 4)
        self.gain = np.array(gain)
        with torch.no_grad():
            self.linear.weight.mul_(50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x if x.is_floating_point() else self.table(x).mean(1) * GLOBALS["gain"]
        return self.linear(values).clamp(max=GLOBALS["limit"]) * float(self.gain)


def named_reading(example: torch.Tensor, gain: float = 1.0, table_rows: int = 2) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Reading(gain, table_rows).requires_grad_(False), torch.nn.Linear(4, 2))
    found = outline(model, example, named=True)
    assert found is not None
    return outline_digest(model, found, example, autocast=None, granularity="module")


def test_what_the_forward_reads_and_no_module_holds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, ids = torch.zeros(4, 4), torch.ones(4, 3, dtype=torch.int64)
    first = named_reading(numbers), named_reading(ids)
    assert (named_reading(torch.ones(4, 4)), named_reading(ids)) == first
    assert named_reading(numbers, gain=1.25) != first[0]  # an array: values that are no tensor's
    monkeypatch.setitem(GLOBALS, "limit", 31.0)
    assert named_reading(numbers) != first[0]
    monkeypatch.setitem(GLOBALS, "gain", 1.25)
    assert named_reading(ids) != first[1]


def test_part_that_refuses_the_fixed_samples_has_no_name_before_its_capture() -> None:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    assert named_reading(ids, table_rows=1) != named_reading(ids, table_rows=1)


def test_the_outline_of_a_job_that_trains_more_is_found_in_the_trace_of_another() -> None:
    earlier, later = frozen_small("block1"), frozen_small("block3")
    assert trained_by_others(later) == []
    remember_trained(earlier, "block1")
    remember_trained(later, "block3")
    flags = [each.requires_grad for each in later.parameters()]
    found = outline_of(later, trained_by_others=trained_by_others(later))
    assert [each.requires_grad for each in later.parameters()] == flags
    [other] = found.earlier
    assert other.boundary == "block1" and set(other.reads) < set(found.reads)
    assert outline_digest(later, other, EXAMPLE, autocast=None, granularity="module") == named(earlier)
    assert found.parts == outline_of(later).parts, "the job's own outline is as without others"
    assert trained_by_others(torch.nn.Linear(3, 4)) == []


def test_an_earlier_freeze_point_gives_the_rest_of_the_frozen_part_to_the_bit() -> None:
    later, given = frozen_small("block3"), torch.randn(4, 3, 16, 16)
    remember_trained(frozen_small("block1"), "block1")
    found = outline_of(later, trained_by_others=trained_by_others(later))
    [other] = found.earlier
    assert found.eager is not None and isinstance(other.tail, Tail)
    prefix = EagerPrefix(
        later, Example.of(EXAMPLE), other.tail.values.ships, EvalPlan(modules=other.in_eval), autocast=None
    )
    wanted = found.eager.run((given,), 0, 1)
    flags = [each.training for each in later.modules()]
    got = found.eager.run_rest(other.tail, prefix.run((given,), 0, 1))
    assert all(map(torch.equal, got, wanted)) and not any(each.requires_grad for each in got)
    assert [each.training for each in later.modules()] == flags


@pytest.mark.parametrize("text", ["", "{}", '{"digest": "../x", "num_stages": 3}', "[" * 100_000])
def test_damaged_file_counts_as_missing(cache: Path, text: str) -> None:
    module._NAMES.save("0" * 64, text)
    assert frozen_name("0" * 64) == FrozenName(digest="0" * 64, num_stages=1)
