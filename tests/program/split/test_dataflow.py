"""Test how a recorded tensor is told from its later versions."""

from __future__ import annotations

import torch

from upriver.program.split.dataflow import Recorder


def test_a_view_made_after_a_write_is_no_later_version_of_itself() -> None:
    tensor = torch.rand(4)
    recorder, same = Recorder([], [tensor]), tensor.data  # another object, which no operator made
    with recorder:
        held = same + 1
        held.add_(1)
        view = held.view(2, 2)
        view.sum()
        view.add_(1)
        view.sum()
    add, write, made, first, again, second = recorder.flow().operations
    assert [each.name for each in (add, write, made)] == ["aten::add", "aten::add_", "aten::view"]
    assert add.reads == (recorder.value(tensor),)
    assert [each.writer for each in (*write.reads, *made.reads)] == [-1, 1]
    assert [each.writer for each in (*first.reads, *again.reads, *second.reads)] == [-1, -1, 4]
