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
    """Put every module into eval, and back afterwards."""
    with mode(model, training=False):
        yield


@contextlib.contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put every module into training or evaluation mode, and back afterwards."""
    before = {module: module.training for module in model.modules()}
    switch(model, training=training)
    try:
        yield
    finally:
        switch(model, training=before[model])  # some modules drop what they kept in eval
        for module, was in before.items():
            module.training = was


@contextlib.contextmanager
def calls_in_eval(model: nn.Module, calls: Mapping[str, Collection[int]]) -> Iterator[None]:
    """Put modules into eval for some of their calls, by number, and for these only."""
    with contextlib.ExitStack() as stack:
        for path, numbers in calls.items():
            module = model.get_submodule(path)
            stack.callback(setattr, module, "training", module.training)
            stack.callback(module.register_forward_pre_hook(_Switch(numbers, module.training)).remove)
        yield


class _Switch:
    """A hook that puts a module into eval for some of its calls."""

    def __init__(self, numbers: Collection[int], training: bool) -> None:
        self.numbers, self.training, self.next = numbers, training, 0

    def __call__(self, module: nn.Module, _args: Any) -> None:
        for inner in module.modules():
            inner.training = self.training and self.next not in self.numbers
        self.next += 1


class _FastPath:
    """Whether torch takes the fused transformer path is one flag for all threads of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def enter(self) -> None:
        """One more thread wants it off."""
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def leave(self) -> None:
        """It is as it was when no thread wants it off any more."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.mha.set_fastpath_enabled(self._before)


_FAST_PATH = _FastPath()


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch off the fused transformer path, which eager eval takes and a captured graph does not."""
    _FAST_PATH.enter()
    try:
        yield
    finally:
        _FAST_PATH.leave()
