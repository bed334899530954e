"""Construct a model without the random weights that a load is about to overwrite.

Most of a plain cold start is initialisation: random numbers for weights that lie in a store. Here the
constructor runs unchanged under two modes. Fills of memory that it has allocated (``normal_``, ``zero_``, the
arithmetic that follows) are deferred. Any other read of that memory runs them first, so values computed from
weights are right. At the end, memory that the load overwrites stays as allocated. All else is filled:
buffers, tensors in attributes, weights that the state dict does not name.

:mod:`upriver.coldstart.model.deferred_init` decides which operators are deferred.
:mod:`upriver.coldstart.model.deferred_fills` decides their order and keeps the random numbers right.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from upriver.coldstart.model.deferred_fills import storage_key
from upriver.coldstart.model.deferred_init import FillWatch, is_plain, span_of
from upriver.coldstart.model.weight_barrier import pushed
from upriver.errors import ModelError
from upriver.program.compiled_code import entering


def construct(build: Callable[[], nn.Module] | str) -> nn.Module:
    """Build a model without filling the weights that its state dict names.

    Everything else equals the result of ``build()``, bit for bit from the same random state: buffers,
    attributes, ties, views, strides, and values computed from weights. Contents of parameters, and of views
    of them, are undefined until they are loaded. Parameters that ``state_dict()`` does not name are filled.

    Global state is restored, whether ``build`` returns or raises. Random generators end as if the numbers for
    skipped fills had never been drawn, so other numbers follow than after ``build()``. During the
    construction, ``torch.initial_seed()`` and saved generator states have no meaning for later use. If
    several threads construct from one generator at once, random numbers are arbitrary, as always.

    A read behind torch's back is not seen and gives undefined values: a read by another thread, or by
    ``torch.Tensor([...])`` of a list of tensors.

    Args:
        build: Function that makes the model, or a name for
            :func:`~upriver.program.models.registry.load_model`, such as ``package.module:callable`` or
            ``torchvision:NAME``. It runs in this thread.

    Raises:
        ModelError: If ``build`` returns no module, or no model has that name. Errors of ``build`` itself pass
            through.
    """
    watch = FillWatch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_truncation_seen())
        stack.callback(watch.notes.close)
        stack.enter_context(pushed(watch))
        stack.enter_context(_RawReads(watch))
        stack.enter_context(entering(watch.ignore_compile_internals))
        try:
            model = _named(build) if isinstance(build, str) else build()
            if not isinstance(model, nn.Module):
                raise ModelError(f"build_model must return a torch module, got {type(model).__name__}")
            if "_modules" not in vars(model):
                raise ModelError(
                    f"{type(model).__name__} is no module yet: it does not call super().__init__()"
                )
            state = model.state_dict()
        except BaseException:
            with watch.aside():
                watch.notes.finish()  # tensors that other objects hold, such as constants of imported modules
            raise
        with watch.aside():
            watch.notes.finish(_loaded(model, state))
    return model


def _named(name: str) -> nn.Module:
    from upriver.program.models.registry import load_model  # imports many model libraries

    return load_model(name)[0]


def _loaded(model: nn.Module, state: Mapping[str, Any]) -> frozenset[int]:
    """Return the storages that a load overwrites to the last byte: those of parameters in the state."""
    own = {_region(parameter) for parameter in model.parameters() if is_plain(parameter)}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for value in state.values():
        if not isinstance(value, torch.Tensor) or not is_plain(value) or _region(value) not in own:
            continue
        if span := span_of(value):
            spans[storage_key(value)].append(span)
            sizes[storage_key(value)] = value.untyped_storage().nbytes()
    return frozenset(key for key, found in spans.items() if _reach(found) >= sizes[key])


def _region(tensor: torch.Tensor) -> tuple[object, ...]:
    return storage_key(tensor), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _reach(spans: Sequence[tuple[int, int]]) -> int:
    """Return the end of the contiguous bytes from byte 0 on."""
    end = 0
    for start, stop in sorted(spans):
        if start > end:
            break
        end = max(end, stop)
    return end


# --------------------------------------------------------------------- what operators do not show


_METHODS = (
    "numpy tolist data_ptr untyped_storage storage _typed_storage new new_tensor share_memory_ __array__ "
    "__dlpack__ __reduce_ex__ __deepcopy__"
)


def _raw_reads() -> frozenset[Any]:
    methods = {getattr(torch.Tensor, name) for name in _METHODS.split()}
    interface: Any = torch.Tensor.__cuda_array_interface__
    return frozenset({*methods, interface.__get__, torch.tensor, torch.as_tensor, torch.asarray})


class _RawReads(TorchFunctionMode):
    """Run deferred fills before Python reads the memory, as long as fills are deferred."""

    _functions = _raw_reads()

    def __init__(self, watch: FillWatch) -> None:
        super().__init__()
        self._watch = watch
        self._is_left = False
        watch.left = self._leave

    def __exit__(self, *_raised: object) -> None:
        self._watch.left = lambda: None
        if not self._is_left:
            torch._C._pop_torch_function_stack()

    def _leave(self) -> None:
        """Leave the mode stack, or the compiler would compile this mode too. Later modes stay."""
        modes = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
        if self in modes:
            self._is_left = True
            for _ in modes[modes.index(self) :]:
                torch._C._pop_torch_function_stack()
            for mode in modes[modes.index(self) + 1 :]:
                torch._C._push_on_torch_function_stack(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._functions:
            self._watch.expose((args, kwargs))
        return func(*args, **(kwargs or {}))


_TRUNCATION = "_no_grad_trunc_normal_"
"""Function that fills for ``nn.init.trunc_normal_``, even if that was imported under another name."""

_lock = threading.Lock()

_num_watching = 0

_truncation: Callable[..., torch.Tensor] | None = None


@contextlib.contextmanager
def _truncation_seen() -> Iterator[None]:
    """Let ``nn.init.trunc_normal_`` defer its fill in watched threads. Other threads are unaffected.

    ``trunc_normal_`` redraws values outside its bounds, so it reads what it has filled. A mode that sees only
    operators could not defer it. The first of several concurrent constructions replaces the function, and the
    last one restores it. If torch has no function of that form, the fill runs at once.
    """
    global _num_watching, _truncation
    with _lock:
        found = getattr(nn.init, _TRUNCATION, None)
        if found is not None and found is not _truncate:
            expected = ["tensor", "mean", "std", "a", "b", "generator"]
            if list(inspect.signature(found).parameters) == expected:
                _truncation = found
                setattr(nn.init, _TRUNCATION, _truncate)
        _num_watching += 1
    try:
        yield
    finally:
        with _lock:
            _num_watching -= 1
            if not _num_watching and getattr(nn.init, _TRUNCATION, None) is _truncate:
                setattr(nn.init, _TRUNCATION, _truncation)


def _truncate(
    tensor: torch.Tensor, mean: Any, std: Any, a: Any, b: Any, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Run ``nn.init.trunc_normal_``, or defer it if this thread constructs a model."""
    real = _truncation
    assert real is not None
    fill = functools.partial(real, mean=mean, std=std, a=a, b=b, generator=generator)
    watch = _get_current_dispatch_mode()
    if isinstance(watch, FillWatch) and watch.truncated(tensor, (mean, std, a, b), generator, fill):
        return tensor
    return fill(tensor)
