"""In which order a model reads its weights: what is published in that order can be used while it arrives.

The model is called once, in eval, and every operator's arguments are looked at: the weights among them count
as touched, in the order in which that happens first. A weight is known by the memory that it lies in, so it
does not matter under which of its names, through which view, or by which module it is read. Making a view
reads nothing, so it does not count; to give one back does, after all else.

What operators do is counted on the way, with the weight that was touched last until then: that is what they
would have had to wait for. What runs before the first one waits for none.

The call is made on tensors without data, which takes no memory and hardly any time. A model that has to see
values on its way, or uses an operator that torch cannot do without data, is called in earnest.
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
from upriver.program.module_state.restoration import attributes_kept, state_kept
from upriver.store import Store
from upriver.text import error_text
from upriver.types import require_type

log = logging.getLogger(__name__)

_Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_CONSTANTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})
"""What ``torch.tensor`` calls; torch keeps the values of those, so that a model may look at them."""

_PICKS = frozenset(
    {
        torch.ops.aten.embedding,
        torch.ops.aten.gather,
        torch.ops.aten.index,
        torch.ops.aten.index_select,
    }
)
"""Read of a table no more than what they give."""

_VIEWS = frozenset({torch.ops.aten._unsafe_view})
"""Whose signatures do not say that they are."""


def recorded(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[str]:
    """The names of a model's state dict, in the order of :func:`counted`."""
    return list(counted(model, args, kwargs))


def counted(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Execution]:
    """The names of a model's state dict, in the order in which a call of it touches them first.

    The model is left as it was, and so are the arguments and what random numbers come next. The fused
    transformer path is off meanwhile, for all threads: it takes a layer's weights all at once.

    Args:
        model: Whatever mode it is in, it is called in eval, without gradients.
        args: What it is called with; where tensors without data will do, only their form matters.
        kwargs: The same, by name.

    Returns:
        All names, each with what runs from then until the next one is touched; those that are never touched
        come last, in the order of the state dict.

    Raises:
        ModelError: If the model cannot be called like that, or has weights that have no shape yet.
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
    """Write a model's weights, in the order in which a call of it touches them.

    Args:
        model: Nothing in it may change meanwhile.
        store: Where to.
        path: The object's name; it ends in ``.safetensors``.
        args: What the model is called with, as for :func:`counted`; the first question that it will be asked
            is best, since it is that one whose seconds are predicted.
        kwargs: The same, by name.

    Raises:
        ModelError: If the order cannot be recorded.
        ProgramError: If there is anything but tensors in the state dict, or one that cannot be written.
        ConfigError: This and what else :func:`~upriver.coldstart.format.manifest.publish` raises.
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
    """What a call on tensors without data touches; nothing of the model is written to.

    Raises:
        Exception: If it needs data.
    """
    weights, given = _Weights(state), _copied(call)
    with (
        silent(),
        attributes_kept(model),
        FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True) as mode,
    ):
        # Kept until the end: torch would make others for the same weights if these were gone.
        twins = [mode.from_tensor(tensor) for tensor in state.values()]
        for tensor, twin in zip(state.values(), twins, strict=True):
            weights.stand_in(tensor, twin)
        args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        touched = _TouchedWithoutData(weights, mode)
        with touched:
            touched.give(model(*args, **kwargs))
    return touched.names


def with_data(model: nn.Module, state: Mapping[str, torch.Tensor], call: _Call) -> dict[str, Execution]:
    """What a call in earnest touches; whatever it writes to is put back.

    Raises:
        ModelError: If the call fails.
    """
    touched = _Touched(_Weights(state))
    args, kwargs = _copied(call)
    with state_kept(model):
        try:
            with touched:
                touched.give(model(*args, **kwargs))
        except Exception as error:  # whatever the user's forward raises
            raise ModelError(
                f"the order of weights cannot be recorded, as the model cannot be called: {error_text(error)}"
            ) from error
    return touched.names


def _copied(call: _Call) -> _Call:
    """A call into whose arguments the model may write."""
    try:
        return copy.deepcopy(call)
    except Exception:  # a tensor in the middle of a graph, or anything else that says no
        copied: _Call = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), call)
        return copied


# ---------------------------------------------------------------------------------- who lies where


class _Weights:
    """Which names lie in which bytes of which storage."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._stands_for: dict[int, int] = {}
        self._at: dict[int, list[tuple[range, str]]] = {}
        for name, tensor in state.items():
            storage = self.storage(tensor)
            if storage is not None:
                self._at.setdefault(storage, []).append((_bytes(tensor), name))

    def stand_in(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Take the storage of ``twin`` for that of ``tensor``."""
        storage, other = self.storage(tensor), self.storage(twin)
        if storage is not None and other is not None:
            self._stands_for[other] = storage

    def storage(self, tensor: torch.Tensor) -> int | None:
        """The storage that a tensor lies in; None for a kind of tensor that has none of its own."""
        try:
            storage = int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse ones, wrappers around other tensors
            return None
        return self._stands_for.get(storage, storage)

    def within(self, tensor: torch.Tensor) -> Iterable[str]:
        """Names of the weights that share bytes with a tensor, in the order of the state dict."""
        storage = self.storage(tensor)
        places = self._at.get(storage, []) if storage is not None else []
        own = _bytes(tensor) if places else range(0)
        return [name for place, name in places if place.start < own.stop and own.start < place.stop]


def _bytes(tensor: torch.Tensor) -> range:
    """From a tensor's first byte in its storage to its last; an empty one has none."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = last + 1 if tensor.numel() else first
    return range(first * tensor.itemsize, end * tensor.itemsize)


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator.

    Attributes:
        names: Of the weights among their arguments so far, in the order of their first time, each with what
            has run since then, until the next one's.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: _Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, Execution] = {}
        self.weights = weights
        self._last: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and note what it touched and did."""
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if isinstance(func, HigherOrderOperator):
            args, kwargs = under(self, (args, kwargs))
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "prim":  # asks a tensor for its device, say
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
        """Count the weights in a call's answer: somebody will read them."""
        for tensor in tensors_in(answer):
            self._touch(self.weights.within(tensor))

    def _touch(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names[name] = NOTHING
                self._last = name


def _executed(func: Any, args: Any, kwargs: Any, result: Any) -> Execution:
    """What an operator does; nothing where its tensors are of a kind that cannot be counted."""
    try:
        if func._overloadpacket in _VIEWS:
            return NOTHING
        made = tensors_in(result)
        read = made if func._overloadpacket in _PICKS else tensors_in((args, kwargs))
        moved_bytes = sum(_nbytes(tensor) for tensor in (*read, *made))
        return Execution(int(flops_of_call(func, args, kwargs, result)), moved_bytes)
    except Exception:  # whatever torch's formulas, or a tensor that somebody made up, say to being looked at
        return NOTHING


def _nbytes(tensor: torch.Tensor) -> int:
    """What is moved if all of it is read or written: an element that is repeated lies in memory once."""
    return min(tensor.numel() * tensor.itemsize, len(_bytes(tensor)))


class _TouchedWithoutData(_Touched):  # type: ignore[no-untyped-call]
    """Gives every tensor with data a stand-in without: torch itself computes what has only such arguments."""

    def __init__(self, weights: _Weights, mode: FakeTensorMode) -> None:
        super().__init__(weights)
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator on tensors without data."""
        if func not in _CONSTANTS:
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._stand_in, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)
