"""What reads a weight waits for it, and for nothing else.

A dispatch mode sees every operator of a thread with all its arguments, whether a module was called for it or
not, and below what PyTorch fuses: fused kernels are operators, too. Before one runs, the storages of its
tensors are looked up, and those that are not there yet are waited for. Storages, since views and ties have no
name.

Not seen, and so not guarded: memory that is read past the dispatcher (``tensor.numpy()``, ``tolist()``,
``data_ptr()`` of a weight, inside ``forward``), and threads that ``forward`` begins of its own, but for what
they ask the root module for (:mod:`upriver.coldstart.model.lazy_module`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo import guards

# Its own `with` keeps flags of the whole process, which two threads in a model at once would leave wrong.
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
"""Whether code that torch.compile has kept is to see a thread's modes; before torch 2.10 it always does."""


class Gate:
    """Which tensors must be there for an operator's arguments.

    Args:
        arrivals: Of the tensors.
        hurry: Told which one is waited for.

    Attributes:
        arrivals: As given.
        touched: Tensors in the order in which something first read them, and when, in seconds of
            ``time.monotonic``.
    """

    def __init__(self, arrivals: Arrivals, hurry: Callable[[int], object]) -> None:
        self.arrivals = arrivals
        self.touched: dict[int, float] = {}
        self._hurry = hurry
        self._held: dict[int, tuple[int, ...]] = {}

    def hold(self, tensor: torch.Tensor, index: int) -> None:
        """Whoever reads the storage of this tensor waits for that number, from now on.

        The storage must live as long as the gate.
        """
        key = _key(tensor)
        if key is not None:
            self._held[key] = (*self._held.get(key, ()), index)

    def enter(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Until whatever an operator is given is there.

        Raises:
            UpriverError: If some of it does not come.
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
        """Operators of this thread wait for what they read, and compiled code for everything."""
        caches = torch.is_autocast_cache_enabled()
        # Autocast makes what it caches under a lock that all models share: nobody should wait in there. With
        # gradients it goes on, since those of a weight that is cast once are added up in the lower type.
        torch.set_autocast_cache_enabled(caches and torch.is_grad_enabled())
        mode = _Waits(self, caches)  # until it is popped: some versions of torch pop what nobody holds
        _push_mode(mode)
        _tell_compiled_code(True)  # it reads weights past operators, and is not run where it sees a mode
        try:
            with entering(mode.lets_compile):
                yield
        finally:
            _pop_mode()
            _tell_of_modes()
            torch.set_autocast_cache_enabled(caches)


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Wait in one thread for what operators read. Making a view reads nothing, so it does not wait.

    Args:
        gate: What operators pass.
        caches: Whether autocast caches where no weight is waited for.
    """

    supports_higher_order_operators = True

    def __init__(self, gate: Gate, caches: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gate, self._caches = gate, caches
        self._is_idle = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Refuse a wrapper: see :func:`~upriver.program.compiled_code.as_written`."""
        return False

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is waited for any more."""
        return self._is_idle

    def lets_compile(self) -> bool:
        """Wait for all, and tell whether it came; else operators of the code as written raise."""
        try:
            return self.ignore_compile_internals()
        except UpriverError:  # the compiler leaves its settings changed where this raises
            return False

    @as_written
    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Let code be compiled, and run, under this mode: once all that it may read is there.

        The compiler asks before it looks at a function. Where it is not let, it marks the function never to
        be compiled again, for all models of the process.

        Raises:
            UpriverError: If something does not come.
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
        """Wait, then call an operator."""
        kwargs = kwargs or {}
        if runs_functions(func):
            self._gate.arrivals.wait_for_all()
        elif not only_views(func):
            self._gate.enter(args, kwargs)
        return func(*args, **kwargs)


def _tell_of_modes() -> None:
    """Tell compiled code whether it is to see the modes of this thread."""
    _tell_compiled_code(not all(_is_idle(mode) for mode in _get_current_dispatch_mode_stack()))


def _is_idle(mode: TorchDispatchMode) -> bool:
    return mode.is_idle if isinstance(mode, _Waits) else mode.ignore_compile_internals()


def only_views(func: Any) -> bool:
    """Whether an operator makes views of what it is given, and never copies.

    By their signatures ``to``, ``contiguous``, ``reshape`` make views. They are made of other operators,
    and a mode sees those; but under ``torch.inference_mode()`` it sees none of them, only the whole.
    """
    return getattr(func, "is_view", False) and not _is_composite(func)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _keys(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """Of every storage among an operator's arguments, which are tensors, numbers, and lists of them."""
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and (key := _key(each)) is not None:
                yield key


def _key(tensor: torch.Tensor) -> int | None:
    """Of a tensor's storage; None where it has none, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
