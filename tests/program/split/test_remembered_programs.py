"""Check that an outline names the program that it becomes: by code, settings and frozen weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.program.nets import Small, frozen_small
from upriver.program.split import remembered_programs
from upriver.program.split.remembered_programs import outline_digest, remember_program, remembered_program
from upriver.program.split.split import outline, split

EXAMPLE = torch.zeros(4, 3, 16, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    yield tmp_path


def named(model: Small, example: torch.Tensor = EXAMPLE) -> str:
    found = outline(model, example)
    assert found is not None
    return outline_digest(model, found, example, autocast=None, granularity="module")


def test_program_is_known_after_it_was_remembered() -> None:
    model = frozen_small()
    captured = split(model, EXAMPLE)
    assert captured.program is not None
    digest = named(model)
    assert remembered_program(digest) is None
    remember_program(digest, captured.program)
    found = remembered_program(named(frozen_small()))
    assert found is not None
    assert (found.digest, found.num_stages) == (captured.program.digest, captured.program.num_stages)


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


@pytest.mark.parametrize("text", ["", "{}", '{"digest": "../x", "num_stages": 3}', "[" * 100_000])
def test_damaged_file_counts_as_missing(cache: Path, text: str) -> None:
    remembered_programs._REMEMBERED.save("0" * 64, text)
    assert remembered_program("0" * 64) is None
