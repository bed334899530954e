"""Control code compiled by torch.compile, and operators that run functions, under a dispatch mode.

A dispatch mode sees operators one by one. Compiled code reads memory without them. Operators such as
``torch.cond`` run their functions with the mode off. Code that the compiler has met under a mode is never
compiled again, for every model of the process. So this module asks a callback before a thread enters such
code. The callback may choose to run the code uncompiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from upriver._threads.forks import ForkSafeLock
from upriver.program.example_inputs import tensors_in

Entering: TypeAlias = "Callable[[], bool]"
"""Called before a thread enters compiled code. Returns True to run the compiled code, False to run the
original."""


Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """Exclude a function and its callees from torch.compile, even if its caller is compiled.

    PyTorch's own wrapper for this imports the compiler, which would delay a cold start. It also records its
    call in one place for all threads, while another thread exports a model.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True  # nor is it inlined
    return function


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.asked: list[Entering] = []


_THREAD = _Thread()

_lock = ForkSafeLock()

_num_inside = 0

_callback: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def entering(ask: Entering) -> Iterator[None]:
    """Call `ask` before this thread enters compiled code, outermost context first.

    All such code is entered through one function of the compiler. The first of several threads patches it,
    and the last one restores it. A compiler imported later is not patched unless :func:`seen` is called.
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
    """Patch the compiler if it is imported."""
    global _callback
    with _lock:
        module: Any = sys.modules.get("torch._dynamo.eval_frame")
        found = getattr(module, "_callback_from_stance", None)
        if _num_inside and found is not None and found is not _asking:
            _callback, module._callback_from_stance = found, _asking


def _asking(callback: Any) -> Any:
    """Return the function that compiles in this thread from now on. None for no compilation."""
    real = _callback
    assert real is not None
    if callback is not None and not all([ask() for ask in tuple(_THREAD.asked)]):
        callback = None
    return real(callback)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run functions given to torch.compile uncompiled, in this thread only.

    So a trial run shows each operator. Nothing is compiled for its shapes: otherwise the compiler would treat
    sizes as variable.
    """
    importlib.import_module("torch._dynamo")
    # A started count belongs to an outer function. Torch then ignores what an inner function compiled.
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
    """Enter compiled code without asking, as if no mode watched."""
    asked, _THREAD.asked = _THREAD.asked, []
    try:
        yield
    finally:
        _THREAD.asked = asked


_KERNELS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


@functools.cache
def runs_functions(func: Any) -> bool:
    """Return whether an operator runs Python functions: its arguments or its own implementation.

    A mode does not see what these read. Operators of the ``prims`` namespace are torch's own Python code.
    """
    if isinstance(func, HigherOrderOperator):
        return True
    name, known = func.name().replace("::", "/"), getattr(torch.library, "_impls", ())
    return func.namespace != "prims" and any(f"{name}/{key}" in known for key in _KERNELS)


def under(mode: Any, given: Any) -> Any:
    """Return an operator's arguments, with functions among them wrapped to run under a mode."""
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
    """Return the tensors among an operator's arguments, and those held by functions and modules there."""
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
            captured = [value for _, value in closure_of(leaf)]
            held += held_by([captured, leaf.__defaults__, leaf.__kwdefaults__], within)
    return held


def closure_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each variable of enclosing scopes that a function reads and that is set."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield name, value
