"""Check that constructors of arbitrary instructions compute the bits of plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tests.coldstart.same import globals_now
from upriver.coldstart.model import deferred_init
from upriver.coldstart.model.construction import construct

_SHAPE = (4, 6)

_INSTRUCTIONS = (
    "new_normal new_random new_zeros new_filled normal uniform zero fill mul add clamp erf trunc row_normal "
    "column copy copy_row copy_transposed clone double deepcopy add_tensor norm_into seed save restore draw "
    "sum numpy own drop data"
)


class _Program:
    """A constructor of arbitrary instructions, whose every result must equal plain torch's."""

    def __init__(self, steps: list[tuple[str, int, int, float]], *, read: bool) -> None:
        self.steps = steps
        self.read = read

    def __call__(self) -> nn.Module:
        self.net = nn.Module()
        self.tensors = [torch.empty(_SHAPE).normal_()]
        self.states = [torch.get_rng_state()]
        self.own = torch.Generator().manual_seed(11)
        self.values: list[Any] = []
        with torch.no_grad():
            for name, i, j, x in self.steps:
                self._step(name, i, j, x)
        for number, tensor in enumerate(self.tensors):
            if number % 2:
                self.net.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=False))
            else:
                self.net.register_buffer(f"b{number}", tensor, persistent=False)
        if self.read:
            self.values += [(tensor * 1).tolist() for tensor in self.tensors]
        self.net.values = self.values
        self.tensors = []
        return self.net

    def _step(self, name: str, i: int, j: int, x: float) -> None:
        tensors = self.tensors
        t, u = tensors[i % len(tensors)], tensors[j % len(tensors)]
        match name:
            case "new_normal":
                tensors.append(torch.empty(_SHAPE).normal_(x))
            case "new_random":
                tensors.append(torch.randn(_SHAPE) if i % 2 else torch.rand(_SHAPE))
            case "new_zeros":
                tensors.append(torch.zeros(_SHAPE))
            case "new_filled":
                tensors.append(torch.empty_like(t).fill_(x))
            case "normal":
                t.normal_(x)
            case "uniform":
                t.uniform_(-1, 1)
            case "zero":
                t.zero_()
            case "fill":
                number = torch.tensor(x)
                t.fill_(number)
                number.add_(1)
            case "mul":
                t.mul_(x)
            case "add":
                t.add_(x, alpha=2)
            case "clamp":
                t.clamp_(max=x)
            case "erf":
                t.erf_()
            case "trunc":
                nn.init.trunc_normal_(t, std=0.5 + i, a=-1.0, b=1.0)
            case "row_normal":
                t[j % 4].normal_()
            case "column":
                t[:, j % 6] = x
            case "copy":
                t.copy_(u)
            case "copy_row":
                t[i % 4].copy_(u[j % 4])
            case "copy_transposed":
                t.view(6, 4).copy_(u.t() if u is not t else u.t() * 1)
            case "clone":
                tensors.append(t.clone())
            case "double":
                tensors.append(t.to(torch.float64).to(torch.float32))
            case "deepcopy":
                tensors.append(copy.deepcopy(nn.Parameter(t, requires_grad=False)).data)
            case "add_tensor":
                t.add_(u)
            case "norm_into":
                t.mul_(u.abs().max() * 0.1)
            case "seed":
                torch.manual_seed(i)
            case "save":
                self.states.append(torch.get_rng_state())
            case "restore":
                torch.set_rng_state(self.states[i % len(self.states)])
            case "draw":
                self.values.append(torch.randperm(6).tolist())
            case "sum":
                self.values.append(t.sum().item())
            case "numpy":
                self.values.append(t.numpy().tolist())
            case "own":
                t.normal_(generator=self.own)
            case "drop":
                if len(tensors) > 1:
                    del tensors[i % len(tensors)]
            case "data":
                t.data = u.clone()
            case _:
                raise AssertionError(name)


def _same(one: Any, other: Any) -> bool:
    """Return whether both are equal to the bit; two absent values are equal."""
    return repr(one) == repr(other)


_X = 0.25
"""An arbitrary number."""


# The source of a copy changes afterwards: by an operator, by a copy, by a deferred fill.
@example(steps=[("clone", 0, 0, _X), ("add_tensor", 0, 0, _X), ("sum", 1, 0, _X)], read=False)
@example(
    steps=[("clone", 0, 0, _X), ("new_zeros", 0, 0, _X), ("copy", 0, 2, _X), ("sum", 1, 0, _X)], read=False
)
@example(
    steps=[
        ("new_filled", 0, 0, _X),
        ("clone", 1, 0, _X),
        ("fill", 1, 0, 3.0),
        ("sum", 1, 0, _X),
        ("sum", 2, 0, _X),
    ],
    read=False,
)
# A buffer is the copy of a parameter that no other code reads.
@example(steps=[("new_normal", 0, 0, _X), ("clone", 1, 0, _X)], read=False)
# Part of a deferred fill is overwritten.
@example(steps=[("new_zeros", 0, 0, _X), ("copy_row", 0, 1, _X), ("sum", 0, 0, _X)], read=False)
# A state from before some fills is restored after others.
@example(
    steps=[
        ("normal", 0, 0, _X),
        ("save", 0, 0, _X),
        ("normal", 0, 0, _X),
        ("draw", 0, 0, _X),
        ("restore", 1, 0, _X),
        ("draw", 0, 0, _X),
    ],
    read=True,
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(_INSTRUCTIONS.split()),
            st.integers(0, 7),
            st.integers(0, 7),
            st.sampled_from([-1.5, 0.0, 0.25, 3.0]),
        ),
        max_size=40,
    ),
    read=st.booleans(),
)
def test_any_constructor(steps: list[tuple[str, int, int, float]], read: bool) -> None:
    program = _Program(steps, read=read)
    state, before = torch.get_rng_state(), globals_now()
    small, deferred_init._SMALL_BYTES = deferred_init._SMALL_BYTES, 0
    try:
        torch.manual_seed(1)
        plain = program()
        torch.manual_seed(1)
        made = construct(program)
    finally:
        torch.set_rng_state(state)
        deferred_init._SMALL_BYTES = small
    assert globals_now() == before
    assert _same(made.values, plain.values)
    for (name, buffer), (plain_name, expected) in zip(
        made.named_buffers(), plain.named_buffers(), strict=True
    ):
        assert name == plain_name
        assert _same(buffer.tolist(), expected.tolist()), name
    assert made.state_dict().keys() == plain.state_dict().keys()
