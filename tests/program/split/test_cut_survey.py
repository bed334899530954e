"""Check that the survey lists every cut of a model with its cost, or the reason why it is no cut."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.examples import some
from tests.program.nets import CallCount, Small
from upriver._torchvision import ensure_torchvision
from upriver.errors import ConfigError, ModelError
from upriver.program.capture.prefix import capture
from upriver.program.split.cut_survey import Survey, survey

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x, dim=-1).abs()


class Branch(nn.Module):
    """Branch on data after a residual block and past a value that is read later."""

    def __init__(self, before: bool = True) -> None:
        super().__init__()
        self.before = before
        self.first = nn.Linear(6, 6)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.before:
            x = x * 2 if x.sum() > 0 else x
        x = self.first(x)
        y = self.second(x)
        if y.sum() > 0:
            y = y * 2
        return self.head(x + y)


def legal(found: Survey) -> list[bool]:
    return [row.legal for row in found.rows]


def test_rows_say_what_a_program_says() -> None:
    torch.manual_seed(0)
    model = Small()
    x = torch.randn(4, 3, 16, 16)
    found, program = survey(model, x), capture(model, x)
    assert [row.after for row in found.rows] == ["input", *(stage.name for stage in program.stages)]
    assert [row.cut for row in found.rows] == list(range(program.num_stages + 1))
    assert found.rows[0].bytes_per_sample == 3 * 16 * 16 * 4
    assert [row.bytes_per_sample for row in found.rows[1:]] == [stage.out_bytes for stage in program.stages]
    assert [row.tensors for row in found.rows] == [1] * len(found.rows)
    assert found.rows[-1].flops_before == sum(stage.flops for stage in program.stages)
    assert found.rows[-1].param_bytes_before == sum(stage.param_bytes for stage in program.stages)
    assert all(legal(found))
    assert (found.captured_by, found.why) == ("torch.export", "")


def test_a_tied_weight_is_counted_once() -> None:
    first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    found = survey(nn.Sequential(first, nn.ReLU(), second), X)
    assert [row.param_bytes_before for row in found.rows] == [0, 144, 144, 144]


@pytest.mark.parametrize(
    ("layer", "why"),
    some(
        2,
        [
            (CallCount(), "changes buffer 'calls' of module '2'"),
            (Noise(), "module '2' calls operator randn_like.default, which is random"),
            (Fourier(), "module '2' calls operator fft_rfft.default, which no program may hold"),
            (nn.Dropout(0.5).eval(), ""),
        ],
    ),
)
def test_no_cut_behind_an_operator_that_no_program_may_hold(layer: nn.Module, why: str) -> None:
    width = 4 if isinstance(layer, Fourier) else 6
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), layer, nn.Linear(width, 6), nn.ReLU())
    found = survey(model, X)
    assert [row.after for row in found.rows] == ["input", "0", "1", "2", "3", "4"]
    assert legal(found) == [True, True, True, *[not why] * 3]
    assert all(re.search(re.escape(why), row.why_not) for row in found.rows[3:])
    assert all(row.why_not == "" for row in found.rows[:3])


def test_a_stateful_module_on_both_sides_of_a_cut_is_said_to_be() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.counting = CallCount()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.counting(self.layer(self.counting(self.layer(x)))))

    found = survey(Twice(), X)
    both = "called on both sides"
    assert legal(found) == [True, True, False, False, False, False]
    assert [both in row.why_not for row in found.rows] == [False, False, True, True, False, False]


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_cuts_before_control_flow_on_data_are_shown(granularity: str) -> None:
    found = survey(Branch(), X, granularity="op" if granularity == "op" else "module")
    names = [row.after.partition(":")[0] for row in found.rows]
    assert names == ["input", "first", "second.0", "second.1", "second", "output"]
    assert legal(found) == [True] * 5 + [False]
    assert [row.tensors for row in found.rows] == [1, 1, 2, 2, 2, 1]  # x is read again after the branch
    assert "control flow depends on data" in found.rows[-1].why_not
    assert found.why == found.rows[-1].why_not
    assert found.captured_by == "torch.export, up to 'second'"
    assert found.rows[-1].bytes_per_sample == 8


def test_a_model_that_cannot_be_captured_at_all_has_its_input_and_the_reason() -> None:
    model = Branch(before=False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    found = survey(model, X)
    assert [(row.after, row.legal) for row in found.rows] == [("input", True), ("output", False)]
    assert "control flow depends on data" in found.why
    assert found.captured_by == "nothing"
    assert [row.bytes_per_sample for row in found.rows] == [24, 8]
    assert flags == [parameter.requires_grad for parameter in model.parameters()]


def test_inputs_that_the_model_does_not_take_are_an_error() -> None:
    with pytest.raises(ModelError, match="cannot be called with float32"):
        survey(nn.Linear(5, 6), X)


def test_no_cut_behind_the_freeze_point() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    found = survey(model, X, freeze_to="1")
    assert legal(found) == [True, True, True, False, False]
    assert "lies after the freeze point '1'" in found.rows[3].why_not


class Towers(nn.Module):
    """Two towers, of which the second to run may be frozen alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(x), self.right(y)], 1))


@pytest.mark.full
def test_what_the_last_frozen_module_needs_comes_first() -> None:
    in_order = survey(Towers(), (X, X.clone()))
    assert [row.after for row in in_order.rows] == ["input", "left.0", "left.1", "right.0", "right.1", "head"]
    chained = survey(Towers(), (X, X.clone()), freeze_to="right")
    assert [row.after for row in chained.rows] == ["input", "right.0", "right.1", "left.0", "left.1", "head"]
    assert legal(chained) == [True, True, True, False, False, False]
    assert [row.tensors for row in chained.rows] == [2, 2, 2, 2, 2, 1]


def test_the_freeze_point_inside_the_part_that_can_be_captured() -> None:
    found = survey(Branch(), X, freeze_to="second.0")
    assert legal(found) == [True, True, True, False, False, False]
    assert "freeze point" in found.rows[3].why_not
    assert "control flow" in found.rows[5].why_not


def test_a_freeze_point_that_is_never_reached_is_an_error() -> None:
    model = Towers()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="'unused' is not called"):
        survey(model, (X, X.clone()), freeze_to="unused")


@pytest.mark.full
def test_a_cache_that_layers_share_allows_no_cut_behind_the_first() -> None:
    ensure_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2Model(config)
    tokens = torch.arange(8).reshape(2, 4)
    found = survey(model, {"input_ids": tokens, "use_cache": True})
    assert legal(found)[:2] == [True, True]
    refused = [row for row in found.rows if not row.legal]
    assert len(refused) >= 3
    assert all("use_cache=False" in row.why_not for row in refused)
    assert all(legal(survey(model, {"input_ids": tokens, "use_cache": False})))
