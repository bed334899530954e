"""Record the order in which a model reads its weights, so that published weights can be used as they arrive.

The model is called once, in eval mode, and the arguments of every operator are inspected. A weight counts as
touched when an operator first reads it. Weights are identified by their memory, so the alias, view or module
that reads them does not matter. Making a view reads nothing and does not count. A weight that the model
returns counts after all others.

The work of operators is counted with the weight touched last: they would have waited for that weight.
Operators before the first weight wait for none.

The call uses tensors without data, which takes no memory and hardly any time. A model that needs values, or
an operator that torch cannot run without data, is called with data.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.coldstart.format.manifest import Manifest, check_dense, publish
from upriver.coldstart.roofline import NOTHING, Execution
from upriver.errors import ModelError, ProgramError
from upriver.program.compiled_code import uncompiled, under
from upriver.program.eval_mode import in_eval, no_fast_path
from upriver.program.example_inputs import tensors_in
from upriver.program.graph.devices import random_kept
from upriver.program.graph.validator import flops_of_call, silent
from upriver.program.module_state.restoration import state_kept
from upriver.store import Store
from upriver.text import error_text
from upriver.types import require_type

log = logging.getLogger(__name__)

_Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_CONSTANTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})
"""Operators behind ``torch.tensor``. Torch keeps their values, so that a model may read them."""

_PICKS = frozenset(
    {
        torch.ops.aten.embedding,
        torch.ops.aten.gather,
        torch.ops.aten.index,
        torch.ops.aten.index_select,
    }
)
"""Operators that read no more of a table than they return."""

_VIEWS = frozenset({torch.ops.aten._unsafe_view})
"""Views whose signatures do not mark them as views."""


def counted(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Execution]:
    """Return the names of a model's state dict, in the order in which a call first touches them.

    Model, arguments and the random state are left unchanged. The fused transformer path is off during the
    call, for all threads, because it reads all weights of a layer at once.

    Args:
        model: Model in any mode. It is called in eval mode, without gradients.
        args: Positional arguments of the call. Where tensors without data suffice, only their form matters.

    Returns:
        All names, each with the work until the next one is touched. Names that are never touched come last,
        in the order of the state dict.

    Raises:
        ModelError: If the model cannot be called with these arguments, or a weight has no shape yet.
    """
    whole = model.state_dict(keep_vars=True)
    state = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
    for name, tensor in state.items():
        if is_lazy(tensor):
            raise ModelError(f"weight {name!r} has no shape yet: call the model once before")
    with (
        torch.no_grad(),
        random_kept(),
        in_eval(model),
        no_fast_path(),
        uncompiled(),
    ):
        call = (args, dict(kwargs or {}))
        try:
            touched = without_data(model, state, call)
        except Exception as error:
            log.info("the model is called with data, as it cannot be without: %s", error_text(error))
            touched = with_data(model, state, call)
    return touched | {name: NOTHING for name in whole if name not in touched}


def publish_model(
    model: nn.Module,
    store: Store,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a model's weights, in the order in which a call touches them.

    Args:
        path: Name of the object; it ends in ``.safetensors``.
        args: Positional arguments of the call, as for :func:`counted`. Best is the first request after a
            load, because its seconds are predicted.

    Raises:
        ModelError: If the order cannot be recorded.
        ProgramError: If the state dict holds anything but tensors, or a tensor that cannot be written.
        ConfigError: If an argument is invalid. Other errors as in
            :func:`~upriver.coldstart.format.manifest.publish`.
    """
    require_type("model", model, nn.Module, "whose weights are to be published")
    require_type("store", store, Store, "Store.open(URI)")
    require_type("path", path, str, "models/NAME.safetensors")
    require_type("args", args, tuple, "what the model is called with, as in (images,)")
    if kwargs is not None:
        require_type("kwargs", kwargs, Mapping, "the same by name")  # type: ignore[type-abstract]
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ProgramError(
                f"{name!r} in the state dict is a {type(value).__name__}; only tensors can be published"
            )
        check_dense(name, value)
    execution = counted(model, args, kwargs)
    return publish({name: state[name] for name in execution}, store, path, execution=execution)


def without_data(model: nn.Module, state: Mapping[str, torch.Tensor], call: _Call) -> dict[str, Execution]:
    """Record the weights that a call on tensors without data touches. The model is not written to.

    Raises:
        Exception: If the call needs data.
    """
    weights, given = _Weights(state), _copied(call)
    with (
        silent(),
        state_kept(model, values=False),
        FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True) as mode,
    ):
        # Keep the twins until the end: torch would make others for the same weights if these were freed.
        twins = [mode.from_tensor(tensor) for tensor in state.values()]
        for tensor, twin in zip(state.values(), twins, strict=True):
            weights.stand_in(tensor, twin)
        args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        touched = _TouchedWithoutData(weights, mode)
        with touched:
            touched.give(model(*args, **kwargs))
    return touched.names


def with_data(model: nn.Module, state: Mapping[str, torch.Tensor], call: _Call) -> dict[str, Execution]:
    """Record the weights that a call with data touches. State that the call writes is restored.

    Raises:
        ModelError: If the call fails.
    """
    touched = _Touched(_Weights(state))
    args, kwargs = _copied(call)
    with state_kept(model):
        try:
            with touched:
                touched.give(model(*args, **kwargs))
        except Exception as error:  # any error of the user's forward
            raise ModelError(
                f"the order of weights cannot be recorded, as the model cannot be called: {error_text(error)}"
            ) from error
    return touched.names


def _copied(call: _Call) -> _Call:
    """Return a call with copied arguments, into which the model may write."""
    try:
        return copy.deepcopy(call)
    except Exception:  # a tensor in the middle of a graph, or another object that cannot be copied
        copied: _Call = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), call)
        return copied


# ---------------------------------------------------------------------------------- who lies where


class _Weights:
    """Map the bytes of storages to the names of weights."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._stands_for: dict[int, int] = {}
        self._at: dict[int, list[tuple[range, str]]] = {}
        for name, tensor in state.items():
            storage = self.storage(tensor)
            if storage is not None:
                self._at.setdefault(storage, []).append((_bytes(tensor), name))

    def stand_in(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Let the storage of ``twin`` stand for that of ``tensor``."""
        storage, other = self.storage(tensor), self.storage(twin)
        if storage is not None and other is not None:
            self._stands_for[other] = storage

    def storage(self, tensor: torch.Tensor) -> int | None:
        """Return the storage of a tensor, or None for a kind of tensor without one."""
        try:
            storage = int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors, wrappers around other tensors
            return None
        return self._stands_for.get(storage, storage)

    def within(self, tensor: torch.Tensor) -> Iterable[str]:
        """Return the names of weights that share bytes with a tensor, in the order of the state dict."""
        storage = self.storage(tensor)
        places = self._at.get(storage, []) if storage is not None else []
        own = _bytes(tensor) if places else range(0)
        return [name for place, name in places if place.start < own.stop and own.start < place.stop]


def _bytes(tensor: torch.Tensor) -> range:
    """Return the range from a tensor's first byte in its storage to its last; empty for an empty tensor."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = last + 1 if tensor.numel() else first
    return range(first * tensor.itemsize, end * tensor.itemsize)


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the weights that operators read.

    Attributes:
        names: Touched weights in the order of their first use, each with the work until the next one.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: _Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, Execution] = {}
        self.weights = weights
        self._last: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record the weights it touched and its work."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if isinstance(func, HigherOrderOperator):
            args, kwargs = under(self, (args, kwargs))
        result = func(*args, **kwargs)
        if (
            getattr(func, "namespace", "") == "prim"
        ):  # these operators ask a tensor for its device, for example
            return result
        views = tensors_in(result) if getattr(func, "is_view", False) else []  # by its signature
        only_viewed = {self.weights.storage(view) for view in views}
        for tensor in given:
            if self.weights.storage(tensor) not in only_viewed:
                self._touch(self.weights.within(tensor))
        if not views and self._last is not None:
            self.names[self._last] = self.names[self._last].plus(_executed(func, args, kwargs, result))
        return result

    def give(self, answer: Any) -> None:
        """Count the weights in the result of a call, which the caller will read."""
        for tensor in tensors_in(answer):
            self._touch(self.weights.within(tensor))

    def _touch(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names[name] = NOTHING
                self._last = name


def _executed(func: Any, args: Any, kwargs: Any, result: Any) -> Execution:
    """Return the work of an operator, or `NOTHING` for tensors that cannot be counted."""
    try:
        if func._overloadpacket in _VIEWS:
            return NOTHING
        made = tensors_in(result)
        read = made if func._overloadpacket in _PICKS else tensors_in((args, kwargs))
        moved_bytes = sum(_nbytes(tensor) for tensor in (*read, *made))
        return Execution(int(flops_of_call(func, args, kwargs, result)), moved_bytes)
    except Exception:  # any error of torch's formulas, or of a user's tensor class
        return NOTHING


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that move if the whole tensor is read or written. A repeated element counts once."""
    return min(tensor.numel() * tensor.itemsize, len(_bytes(tensor)))


class _TouchedWithoutData(_Touched):  # type: ignore[no-untyped-call]
    """Replace each tensor with data by one without, so that torch computes no values."""

    def __init__(self, weights: _Weights, mode: FakeTensorMode) -> None:
        super().__init__(weights)
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without data."""
        if func not in _CONSTANTS:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._stand_in, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
