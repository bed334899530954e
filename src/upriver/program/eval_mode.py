"""Run a model in eval mode, and without the fused kernels that eval mode allows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from upriver.program.freeze import switch


@contextlib.contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Switch every module to eval mode, and restore its mode afterwards."""
    with mode(model, training=False):
        yield


@contextlib.contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch every module to training or eval mode, and restore its mode afterwards."""
    before = {module: module.training for module in model.modules()}
    switch(model, training=training)
    try:
        yield
    finally:
        switch(model, training=before[model])  # some modules drop state cached in eval
        for module, was in before.items():
            module.training = was


@contextlib.contextmanager
def calls_in_eval(model: nn.Module, calls: Mapping[str, Collection[int]]) -> Iterator[None]:
    """Switch modules to eval mode for some of their calls, by number."""
    with contextlib.ExitStack() as stack:
        for path, numbers in calls.items():
            module = model.get_submodule(path)
            stack.callback(setattr, module, "training", module.training)
            stack.callback(module.register_forward_pre_hook(_Switch(numbers, module.training)).remove)
        yield


class _Switch:
    """Hook that switches a module to eval mode for some of its calls."""

    def __init__(self, numbers: Collection[int], training: bool) -> None:
        self.numbers, self.training, self.next = numbers, training, 0

    def __call__(self, module: nn.Module, _args: Any) -> None:
        for inner in module.modules():
            inner.training = self.training and self.next not in self.numbers
        self.next += 1


_lock = threading.Lock()

_num_inside, _was_enabled = 0, True


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch off the fused transformer path. Eager eval uses it, and a captured graph does not.

    The switch is one flag for all threads of a process, so the last thread that leaves restores it.
    """
    global _num_inside, _was_enabled
    with _lock:
        if not _num_inside:
            _was_enabled = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                torch.backends.mha.set_fastpath_enabled(_was_enabled)
