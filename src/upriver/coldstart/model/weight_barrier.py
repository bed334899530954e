"""Make each operator wait for the weights that it reads, and for no others.

A dispatch mode sees every operator of a thread with all its arguments, inside or outside a module's call. It
works below PyTorch's fusion: fused kernels are operators, too. Before an operator runs, the mode looks up the
storages of its tensors and waits for those that have not arrived. It uses storages because views and ties
have no name.

Two kinds of reads are unseen and unguarded. One is memory read past the dispatcher (``tensor.numpy()``,
``tolist()``, ``data_ptr()`` of a weight, inside ``forward``). The other are threads that ``forward`` starts,
except for their access to the root module (:mod:`upriver.coldstart.model.lazy_module`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo import guards
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from upriver.coldstart.model.arrivals import Arrivals
from upriver.errors import UpriverError
from upriver.program.compiled_code import as_written, entering, runs_functions, seen

_tell_compiled_code = getattr(guards, "set_is_in_mode_without_ignore_compile_internals", lambda _is: None)
"""Tell code that torch.compile has cached whether to see a thread's modes; before torch 2.10 it always
does."""


@contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Push a dispatch mode in this thread.

    The mode's own ``with`` stores flags of the whole process, which two threads in a model would corrupt.
    """
    _push_mode(mode)  # referenced until popped: some torch versions pop modes without a reference
    try:
        yield
    finally:
        _pop_mode()


class WeightBarrier:
    """Map operator arguments to the tensors that must have arrived.

    Attributes:
        touched: Tensors in the order of their first read, and its time in seconds of ``time.monotonic``.
    """

    def __init__(self, arrivals: Arrivals, hurry: Callable[[int], object]) -> None:
        self.arrivals = arrivals
        self.touched: dict[int, float] = {}
        self._hurry = hurry
        self._held: dict[int, tuple[int, ...]] = {}

    def hold(self, tensor: torch.Tensor, index: int) -> None:
        """Make reads of this tensor's storage wait for the numbered tensor from now on.

        The storage must live as long as the gate.
        """
        key = _key(tensor)
        if key is not None:
            self._held[key] = (*self._held.get(key, ()), index)

    def enter(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Wait until all tensors among an operator's arguments have arrived.

        Raises:
            UpriverError: If the load fails.
        """
        for key in _keys(args, kwargs):
            indices = self._held.get(key)
            if indices is not None:
                for index in indices:
                    if index not in self.touched:
                        self.touched[index] = time.monotonic()
                self.arrivals.wait(indices, self._hurry)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make operators of this thread wait for what they read, and compiled code for all weights."""
        caches = torch.is_autocast_cache_enabled()
        # Autocast fills its cache under a lock that all models share, so no thread should wait there. With
        # gradients the cache stays on: gradients of a weight that is cast once are summed in the lower type.
        torch.set_autocast_cache_enabled(caches and torch.is_grad_enabled())
        mode = _Waits(self, caches)
        try:
            with pushed(mode), entering(mode.lets_compile):
                _tell_compiled_code(True)  # it reads weights unseen, and does not run where it sees a mode
                yield
        finally:
            _tell_of_modes()
            torch.set_autocast_cache_enabled(caches)


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make operators of one thread wait for what they read. Views read nothing and do not wait.

    Args:
        caches: True if autocast caches when no operator waits.
    """

    supports_higher_order_operators = True

    def __init__(self, gate: WeightBarrier, caches: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gate, self._caches = gate, caches
        self._is_idle = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Refuse a wrapper: see :func:`~upriver.program.compiled_code.as_written`."""
        return False

    @property
    def is_idle(self) -> bool:
        """True if no operator waits any more."""
        return self._is_idle

    def lets_compile(self) -> bool:
        """Wait for all weights. Return False if they failed: then operators of the uncompiled code raise."""
        try:
            return self.ignore_compile_internals()
        except UpriverError:  # the compiler leaves its settings changed if this raises
            return False

    @as_written
    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let code be compiled and run under this mode, after all weights have arrived.

        The compiler asks before it inspects a function. After a refusal it would never compile the function
        again, for any model of the process.

        Raises:
            UpriverError: If the load fails.
        """
        if not self._is_idle:
            seen()
            self._gate.arrivals.wait_for_all()
            self._is_idle = True
            torch.set_autocast_cache_enabled(self._caches)
            _tell_of_modes()
        return True

    @as_written
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for an operator's arguments, then run it."""
        kwargs = kwargs or {}
        if runs_functions(func):
            self._gate.arrivals.wait_for_all()
        elif not only_views(func):
            self._gate.enter(args, kwargs)
        return func(*args, **kwargs)


def _tell_of_modes() -> None:
    """Tell compiled code whether to see the modes of this thread."""
    _tell_compiled_code(not all(_is_idle(mode) for mode in _get_current_dispatch_mode_stack()))


def _is_idle(mode: TorchDispatchMode) -> bool:
    return mode.is_idle if isinstance(mode, _Waits) else mode.ignore_compile_internals()


def only_views(func: Any) -> bool:
    """Return True if an operator makes views of its arguments and never copies.

    By their signatures ``to``, ``contiguous`` and ``reshape`` make views. They consist of other operators,
    which a mode sees. Under ``torch.inference_mode()`` it sees only the whole.
    """
    return getattr(func, "is_view", False) and not _is_composite(func)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return True if an operator consists of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _keys(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """Yield the keys of the storages among an operator's arguments: tensors, numbers, and lists of them."""
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and (key := _key(each)) is not None:
                yield key


def _key(tensor: torch.Tensor) -> int | None:
    """Return the key of a tensor's storage; None for a tensor without one, such as a sparse tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
