"""Code that torch.compile makes, and operators that run functions, in a thread that a mode of ours watches.

A dispatch mode sees operators one by one. Compiled code reads memory without them, and operators such as
``torch.cond`` run the functions that they are given with the mode switched off. Worse, the compiler never
compiles again what it has met under a mode: for every model of the process, and for good. So a thread is told
before it enters such code, and may run it as it is written.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from upriver.program.example_inputs import tensors_in

Entering: TypeAlias = "Callable[[], bool]"
"""Asked before a thread enters compiled code; whether that is to run, and not what was compiled."""


Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """Keep torch.compile from a function, and from whatever it calls, where its caller is compiled.

    PyTorch's own wrapper for that imports the compiler, which a cold start would wait for, and notes in one
    place for all threads that it was called while another thread exports a model.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True  # nor is it inlined
    return function


class _Thread(threading.local):
    """What holds for one thread, and for no other one."""

    def __init__(self) -> None:
        self.asked: list[Entering] = []


_THREAD = _Thread()

_lock = threading.Lock()


def _forked() -> None:
    """In a child of this process: nobody there holds the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

_num_inside = 0

_callback: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def entering(ask: Entering) -> Iterator[None]:
    """Ask before this thread enters compiled code, from outermost to innermost.

    All such code is entered by way of one function of the compiler's. The first of several threads changes
    it, the last one changes it back. A compiler that is imported later is not changed, unless :func:`seen`
    is called.
    """
    global _num_inside
    with _lock:
        _num_inside += 1
    seen()
    _THREAD.asked.append(ask)
    try:
        yield
    finally:
        _THREAD.asked.remove(ask)
        with _lock:
            _num_inside -= 1
            module: Any = sys.modules.get("torch._dynamo.eval_frame")
            if not _num_inside and getattr(module, "_callback_from_stance", None) is _asking:
                module._callback_from_stance = _callback


def seen() -> None:
    """Change the compiler, where it is imported by now."""
    global _callback
    with _lock:
        module: Any = sys.modules.get("torch._dynamo.eval_frame")
        found = getattr(module, "_callback_from_stance", None)
        if _num_inside and found is not None and found is not _asking:
            _callback, module._callback_from_stance = found, _asking


def _asking(callback: Any) -> Any:
    """What compiles in this thread from now on; None for nothing."""
    real = _callback
    assert real is not None
    if callback is not None and not all([ask() for ask in tuple(_THREAD.asked)]):
        callback = None
    return real(callback)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run what torch.compile was told of as it is written, in this thread alone.

    A trial run shows each operator then. Nothing is compiled for its shapes, which would make the compiler
    take sizes for variable.
    """
    importlib.import_module("torch._dynamo")
    # A count that has begun is an outer function's: torch then does not ask what an inner one compiled.
    count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda _count: 0)
    compiling, counted = eval_frame.set_eval_frame(None), count(0)
    try:
        with entering(lambda: False):
            yield
    finally:
        count(counted)
        eval_frame.set_eval_frame(compiling)


@contextlib.contextmanager
def as_ever() -> Iterator[None]:
    """Enter compiled code unasked, as where nobody watches."""
    asked, _THREAD.asked = _THREAD.asked, []
    try:
        yield
    finally:
        _THREAD.asked = asked


_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


@functools.cache
def runs_functions(func: Any) -> bool:
    """Whether an operator runs Python functions: those that it is given, or those that it is made of.

    A mode does not see what these read. Operators of the ``prims`` namespace are torch's own in Python.
    """
    if isinstance(func, HigherOrderOperator):
        return True
    name, known = func.name().replace("::", "/"), getattr(torch.library, "_impls", ())
    return func.namespace != "prims" and any(f"{name}/{key}" in known for key in _KERNELS)


def under(mode: Any, given: Any) -> Any:
    """An operator's arguments, where the functions among them run under a mode."""
    return pytree.tree_map_only((FunctionType, MethodType, functools.partial), _under(mode), given)


def _under(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        return run

    return changed


def held_by(given: Any, _within: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, and those that functions and modules among them hold."""
    held = tensors_in(given)
    for leaf in pytree.tree_leaves(given):
        if id(leaf) in _within:
            continue
        within = _within | {id(leaf)}
        if isinstance(leaf, torch.nn.Module):
            held += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, functools.partial):
            held += held_by([leaf.func, leaf.args, leaf.keywords], within)
        elif isinstance(leaf, MethodType):
            held += held_by([leaf.__self__, leaf.__func__], within)
        elif isinstance(leaf, FunctionType):
            cells = [cell.cell_contents for cell in leaf.__closure__ or () if _is_set(cell)]
            held += held_by([cells, leaf.__defaults__, leaf.__kwdefaults__], within)
    return held


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
