"""Check queries of a forward pass whose calls are written down by hand."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from upriver.program.split.dataflow import DataFlow
from upriver.program.split.forward_pass import ForwardPass
from upriver.program.split.module_trace import ModuleCall

_, LEAF = pytree.tree_flatten(torch.zeros(1))


def call(index: int, parent: int, path: str) -> ModuleCall:
    return ModuleCall(
        path=path, number=0, index=index, parent=parent, enter=index, exit=9 - index, leaves=(), form=LEAF
    )


def test_a_call_belongs_to_the_outermost_chosen_one_around_it() -> None:
    calls = [call(3, 2, "a.b.c"), call(2, 1, "a.b"), call(1, 0, "a"), call(4, 0, "d"), call(0, -1, "")]
    run = ForwardPass(calls, DataFlow(operations=(), makers={}, origins={}))
    assert run.enclosing({1, 3}) == {-1: -1, 0: -1, 1: 1, 2: 1, 3: 1, 4: -1}
    assert run.enclosing({3, 4}) == {-1: -1, 0: -1, 1: -1, 2: -1, 3: 3, 4: 4}
    assert run.enclosing({0, 2}) == {-1: -1, **dict.fromkeys(range(5), 0)}
