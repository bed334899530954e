"""Restore a model after a trial run: undo each change that its forward or backward pass makes.

These are restored:

- the values of parameters, buffers and other tensors that the model holds, bit for bit. Writes through
  ``.data`` or a NumPy array of the same memory count too;
- the identities of tensors and modules, gradients, flags and hooks;
- attributes of modules and of the objects that modules hold, including lists and counters;
- random number generators, both the model's own and the shared ones.

State outside modules is not restored: global variables, files, and state inside a hook's code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from upriver.program.eval_mode import mode, no_fast_path
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.devices import random_kept
from upriver.program.module_state.reachable import (
    HeldTensor,
    MutableObject,
    ReachableObjects,
    shared_generators,
)
from upriver.program.tensor_layouts import unusual


@contextlib.contextmanager
def state_kept(model: nn.Module, *, idle: Iterable[str] = (), values: bool = True) -> Iterator[SavedState]:
    """Restore a model and the random number generators on exit.

    Enter the context before a switch of mode: a module may write to its weights during the switch.

    Contexts may be nested. The outermost context copies all values, and compares all of them on exit. An
    inner context reuses these copies. It compares only tensors that torch's version counters or an earlier
    comparison report as written. It walks the model again only if the model now reaches a new object.

    Args:
        idle: Paths of modules that do not run. Their values are not copied.
        values: False for a run that writes no values of tensors. None are copied.
    """
    modules = [model.get_submodule(path) for path in idle]
    unused = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}
    with random_kept(), _walked(model) as held:
        tensors = [_Tensor(each.tensor) for each in held.tensors]
        used = [each.tensor for each in held.tensors if values and id(each.tensor) not in unused]
        kept = SavedState(held, tensors, _Values(used))
        for tensor in tensors:
            if tensor.grad is not None:  # else a backward pass would add to it
                tensor.tensor.grad = None
        try:
            try:
                yield kept
            finally:
                kept.values.put_back()
        finally:
            for tensor in tensors:
                tensor.put_back()
            for thing in held.changed():
                thing.put_back()


@contextlib.contextmanager
def trial(
    model: nn.Module, device: torch.device, autocast: torch.dtype | None, *, training: bool = False
) -> Iterator[SavedState]:
    """Prepare a trial run in one mode: without gradients and fused paths, as :func:`state_kept`."""
    with (
        torch.no_grad(),
        state_kept(model) as kept,
        mode(model, training=training),
        no_fast_path(),
        autocasting(device, autocast),
    ):
        yield kept


@contextlib.contextmanager
def _walked(model: nn.Module) -> Iterator[ReachableObjects]:
    """Yield the objects reachable from a model. A context nested in the same thread reuses the outer walk."""
    outer = next((held for held in reversed(_THREAD.walks) if held.model is model), None)
    held = (outer.as_now() if outer else None) or ReachableObjects(model)
    _THREAD.walks.append(held)
    try:
        yield held
    finally:
        _THREAD.walks.remove(held)


class _Thread(threading.local):
    """Walks of the contexts that a thread has open."""

    def __init__(self) -> None:
        self.walks: list[ReachableObjects] = []


_THREAD = _Thread()


@contextlib.contextmanager
def unattended(model: nn.Module) -> Iterator[None]:
    """Disable everything that acts on the gradients of a backward pass. Use inside :func:`state_kept`.

    A hook on a gradient may run an optimizer step. ``DistributedDataParallel`` counts backward passes, and
    would count the trial as its first.
    """
    held: list[tuple[Any, Any]] = []
    for parameter in model.parameters():
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            hooks.clear()  # torch still calls hooks that are only detached from the tensor
        if parameter.requires_grad and _is_watched(parameter):
            held.append((parameter, parameter.detach().requires_grad_()))
    for each in held:
        torch._C._swap_tensor_impl(*each)  # same values, new node in the graph
    try:
        yield
    finally:
        for each in held:
            torch._C._swap_tensor_impl(*each)


def _is_watched(parameter: nn.Parameter) -> bool:
    """Return whether something holds the parameter's gradient accumulator. Torch drops an unheld one."""
    mark, edge_of = "upriver", torch.autograd.graph.get_gradient_edge
    node: Any = edge_of(parameter).node
    node.metadata[mark] = True
    del node
    found: Any = edge_of(parameter).node
    return found.metadata.pop(mark, None) is not None


class SavedState:
    """State of a model before a trial run, for comparison and restoration."""

    def __init__(self, held: ReachableObjects, tensors: Sequence[_Tensor], values: _Values) -> None:
        self._held, self._tensors, self.values = held, tensors, values

    @property
    def tensors(self) -> Sequence[HeldTensor]:
        """All tensors reachable from the model before the run."""
        return self._held.tensors

    def written(self) -> frozenset[str]:
        """Return names of the tensors whose value, memory or owner changed, regardless of the writer."""
        values = self.values.changed()
        gone = set[int]().union(*(thing.tensors_gone() for thing in self._held.changed()))
        return frozenset(
            each.name
            for each, known in zip(self._held.tensors, self._tensors, strict=True)
            if known.moved() or id(each.tensor) in gone or storage_key(each.tensor) in values
        )

    def left(self) -> list[HeldTensor]:
        """Return the tensors that the model reaches now and did not reach before."""
        if self._held.as_now() is not None:
            return []
        known = {id(each.tensor) for each in self.tensors}
        return [each for each in ReachableObjects(self._held.model).tensors if id(each.tensor) not in known]

    def counted(self) -> dict[str, str]:
        """Return the path of each module that counts, mapped to its counting attribute.

        A module counts if it changes numbers, grows a list, or draws random numbers. Call this after the
        second of two passes: an attribute that both passes set to the same value does not count.
        """
        found: dict[str, str] = {}
        for thing in self._held.changed():
            if attribute := thing.counted():
                found.setdefault(thing.owner.path, attribute)
        return found

    def draws(self) -> DrawDetector:
        """Return a detector of random draws that no torch operator shows."""
        return DrawDetector(thing for thing in self._held.things if thing.kind.random)


class DrawDetector:
    """Detect draws of random numbers: Python's, NumPy's, or those of the model's own generators."""

    def __init__(self, own: Iterable[MutableObject]) -> None:
        self._shared = shared_generators()
        self._generators = [*self._shared, *own]
        self._before = [thing.before for thing in self._generators]
        self.made()

    def made(self) -> str:
        """Return the generator that drew since the last call, in words. Empty if none drew."""
        before, self._before = self._before, [thing.now() for thing in self._generators]
        for thing, old, new in zip(self._generators, before, self._before, strict=True):
            if not thing.kind.same(old, new):
                name = thing.owner.attribute
                return name if thing in self._shared else f"random numbers of its attribute {name!r}"
        return ""


# ------------------------------------------------------------------------------------------- tensors


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Tensor:
    """Properties of a tensor other than its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.kind = tensor, type(tensor)
        self.leaf = tensor.is_leaf
        self.wanted = tensor.requires_grad
        self.grad = tensor.grad if self.leaf else None
        self.place = tensor.data if _has_place(tensor) else None
        held = [(name, getattr(tensor, name)) for name in _GRADIENT_HOOKS if self.leaf]
        self.hooks = [(name, hooks, None if hooks is None else dict(hooks)) for name, hooks in held]

    def moved(self) -> bool:
        """Return whether the tensor has other memory or another shape or layout."""
        return self.place is not None and not self.tensor.is_set_to(self.place)

    def put_back(self) -> None:
        tensor = self.tensor
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        if self.place is not None and self.moved():
            tensor.data = self.place
        if not self.leaf:
            return
        if tensor.requires_grad != self.wanted:
            tensor.requires_grad_(self.wanted)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad
        for name, hooks, items in self.hooks:
            now = getattr(tensor, name)
            if now is not hooks:
                now.clear()
                setattr(tensor, name, hooks)
            if items is not None and hooks != items:
                hooks.clear()
                hooks.update(items)


def _has_place(tensor: torch.Tensor) -> bool:
    plain = not unusual(tensor) and not is_lazy(tensor)
    return plain and not tensor.is_meta and not tensor.is_inference()


@dataclass(slots=True, eq=False)
class _Copy:
    """Copy of a storage's bytes.

    Attributes:
        suspect: True once a comparison found a write. Torch may report no later write either.
        users: Number of contexts that use the copy.
    """

    storage: torch.UntypedStorage
    data: torch.Tensor
    suspect: bool = False
    users: int = 0

    def changed(self) -> bool:
        there = self.storage
        changed = there.nbytes() != self.data.nbytes or not _same_bytes(_as_bytes(there), self.data)
        self.suspect = self.suspect or changed
        return changed

    def put_back(self) -> None:
        if self.changed():
            if self.storage.nbytes() != self.data.nbytes:
                self.storage.resize_(self.data.nbytes)
            _as_bytes(self.storage).copy_(self.data)


class _Values:
    """Values of some tensors.

    All open contexts share one copy of each storage.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies: dict[int, _Copy] = {}
        self._own: set[int] = set()
        self._versions: list[tuple[torch.Tensor, int, int]] = []
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None:
                self._add(key, tensor.untyped_storage())
                if not tensor.is_inference():
                    self._versions.append((tensor, tensor._version, key))

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._copies:
            return
        with _LOCK:
            known = _OPEN.get(key)
            if known is None or (known.suspect and known.changed()):
                known = _Copy(storage, _copy_of(storage))
                self._own.add(key)
                _OPEN.setdefault(key, known)
            known.users += 1
            self._copies[key] = known

    def changed(self) -> set[int]:
        """Return keys of the storages that hold other bytes now. Compare every storage."""
        return {key for key, copy in self._copies.items() if copy.changed()}

    def put_back(self) -> None:
        """Restore the bytes, and release the copies."""
        touched = {key for tensor, version, key in self._versions if tensor._version != version}
        for key, copy in self._copies.items():
            if key in self._own or copy.suspect or key in touched:
                copy.put_back()
            with _LOCK:
                copy.users -= 1
                if not copy.users and _OPEN.get(key) is copy:
                    del _OPEN[key]


_OPEN: dict[int, _Copy] = {}
"""Copies in use, by storage key: the storages of a job's model are copied once."""

_LOCK = threading.Lock()


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a key that identifies a tensor's storage. None if the tensor has no storage of its own."""
    if unusual(tensor) or is_lazy(tensor) or tensor.device.type == "meta":
        return None  # a wrapper's inner tensors have keys of their own
    storage = tensor.untyped_storage()
    return int(storage._cdata) if storage.nbytes() and storage.data_ptr() else None


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    data = _as_bytes(storage)
    try:
        return data.clone()
    except torch.OutOfMemoryError:  # on an accelerator
        return data.cpu()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type != "cpu" or b.device.type != "cpu":
        return torch.equal(a, b.to(a.device))
    form = torch.int64 if a.nbytes % 8 == 0 else torch.uint8
    return np.array_equal(a.view(form).numpy(), b.view(form).numpy())  # ten times as fast as torch.equal
