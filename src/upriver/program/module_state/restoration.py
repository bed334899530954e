"""A trial run leaves a model as it was: whatever its forward or backward changes is put back.

Kept are

- the values of parameters, buffers and other tensors that the model holds, bit for bit and however they are
  written, also through ``.data`` or a NumPy array of the same memory;
- which tensors and modules stand where, gradients, flags and hooks;
- attributes of modules and of what those hold, lists and counters among them;
- generators of random numbers: the model's own ones, and those that everybody shares.

Not kept is what no module holds: global variables, files, what the code of a hook remembers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from upriver.program.graph.devices import random_kept
from upriver.program.module_state.reachable import HeldTensor, ReachableObjects, Thing, shared_generators
from upriver.program.tensor_layouts import unusual


@contextlib.contextmanager
def state_kept(model: nn.Module, *, idle: Iterable[str] = ()) -> Iterator[SavedState]:
    """Leave a model, and the generators, as they were.

    To be entered before modules are put into another mode: a module may write to its weights then.

    Contexts may lie in each other. The outermost one copies all values, and compares all at its end. Those
    inside use its copies, and compare what torch, or a comparison before, says was written to. They walk
    through the model anew only where another object came to hang on it.

    Args:
        idle: Paths of modules that do not run, so that their values need not be copied.
    """
    unused = {id(t) for path in idle for t in _tensors_of(model.get_submodule(path))}
    with _all_but_values_kept(model, unused=unused) as kept:
        try:
            yield kept
        finally:
            kept.values.put_back()


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Leave a model, and the generators, as they were, in a run that writes to no value of a tensor."""
    with _all_but_values_kept(model):
        yield


@contextlib.contextmanager
def _all_but_values_kept(model: nn.Module, *, unused: Collection[int] | None = None) -> Iterator[SavedState]:
    with random_kept(), _walked(model) as held:
        tensors = [_Tensor(each.tensor) for each in held.tensors]
        used = [each.tensor for each in held.tensors if unused is not None and id(each.tensor) not in unused]
        kept = SavedState(held, tensors, _Values(used))
        for tensor in tensors:
            tensor.set_gradient_aside()
        try:
            yield kept
        finally:
            for tensor in tensors:
                tensor.put_back()
            for thing in held.changed():
                thing.put_back()


@contextlib.contextmanager
def _walked(model: nn.Module) -> Iterator[ReachableObjects]:
    """What hangs on a model; a context inside another one of the same model and thread shares its walk."""
    outer = next((held for held in reversed(_walks()) if held.model is model), None)
    held = (outer.as_now() if outer else None) or ReachableObjects(model)
    _walks().append(held)
    try:
        yield held
    finally:
        _walks().remove(held)


def _walks() -> list[ReachableObjects]:
    """Those of the contexts that this thread has open."""
    if not hasattr(_OF_THREAD, "walks"):
        _OF_THREAD.walks = []
    walks: list[ReachableObjects] = _OF_THREAD.walks
    return walks


_OF_THREAD = threading.local()


@contextlib.contextmanager
def unattended(model: nn.Module) -> Iterator[None]:
    """Let nobody act on a gradient that a backward leaves, inside of :func:`state_kept`.

    A hook behind a gradient may take an optimizer's step; ``DistributedDataParallel`` counts backwards, and
    would take this one for the first.
    """
    held: list[tuple[Any, Any]] = []
    for parameter in model.parameters():
        hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            hooks.clear()  # torch goes on with them where they are only taken off the tensor
        if parameter.requires_grad and _is_watched(parameter):
            held.append((parameter, parameter.detach().requires_grad_()))
    for each in held:
        torch._C._swap_tensor_impl(*each)  # the same values, and another node in the graph
    try:
        yield
    finally:
        for each in held:
            torch._C._swap_tensor_impl(*each)


def _is_watched(parameter: nn.Parameter) -> bool:
    """Whether somebody holds the node that adds up its gradient: torch drops one that nobody holds."""
    mark, edge_of = "upriver", torch.autograd.graph.get_gradient_edge
    node: Any = edge_of(parameter).node
    node.metadata[mark] = True
    del node
    found: Any = edge_of(parameter).node
    return found.metadata.pop(mark, None) is not None


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class SavedState:
    """What a trial run has changed; it is put back when the run is over.

    Attributes:
        values: Of all tensors.
    """

    def __init__(self, held: ReachableObjects, tensors: Sequence[_Tensor], values: _Values) -> None:
        self._held, self._tensors, self.values = held, tensors, values

    @property
    def tensors(self) -> Sequence[HeldTensor]:
        """All tensors that hung on the model."""
        return self._held.tensors

    def written(self) -> frozenset[str]:
        """Names of those that have another value by now, other memory, or another place; by whomever."""
        values = self.values.changed()
        gone = set[int]().union(*(thing.tensors_gone() for thing in self._held.changed()))
        return frozenset(
            each.name
            for each, known in zip(self._held.tensors, self._tensors, strict=True)
            if known.moved() or id(each.tensor) in gone or storage_key(each.tensor) in values
        )

    def left(self) -> list[HeldTensor]:
        """Return the tensors that hang on the model by now, and did not before."""
        if self._held.as_now() is not None:
            return []
        known = {id(each.tensor) for each in self.tensors}
        return [each for each in ReachableObjects(self._held.model).tensors if id(each.tensor) not in known]

    def counted(self) -> dict[str, str]:
        """Path of each module that counts (changes numbers, grows a list, draws) to the attribute that does.

        Asked behind a second pass of two: what the first one sets and the second one sets to the same again
        is no count.
        """
        found: dict[str, str] = {}
        for thing in self._held.changed():
            if attribute := thing.counted():
                found.setdefault(thing.owner.path, attribute)
        return found

    def draws(self) -> Draws:
        """A look at who draws random numbers that no operator of torch shows."""
        return Draws(thing for thing in self._held.things if thing.kind.random)


class Draws:
    """Notices that random numbers are drawn: Python's, NumPy's, or those of generators that a model has.

    Args:
        own: The latter.
    """

    def __init__(self, own: Iterable[Thing]) -> None:
        self._shared = shared_generators()
        self._generators = [*self._shared, *own]
        self._before = [thing.before for thing in self._generators]
        self.made()

    def made(self) -> str:
        """Whose numbers were drawn since the last look; empty if nobody's."""
        before, self._before = self._before, [thing.now() for thing in self._generators]
        for thing, old, new in zip(self._generators, before, self._before, strict=True):
            if not thing.kind.same(old, new):
                name = thing.owner.attribute
                return name if thing in self._shared else f"random numbers of its attribute {name!r}"
        return ""


# ------------------------------------------------------------------------------------------- tensors


class _Tensor:
    """What a tensor is beside its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.kind = tensor, type(tensor)
        self.leaf = tensor.is_leaf
        self.wanted = tensor.requires_grad
        self.grad = tensor.grad if self.leaf else None
        self.place = tensor.data if _has_place(tensor) else None
        self.hooks = [(name, hooks, _copied(hooks)) for name, hooks in _hooks_of(tensor)]

    def set_gradient_aside(self) -> None:
        """So that nothing is added to it."""
        if self.grad is not None:
            self.tensor.grad = None

    def moved(self) -> bool:
        """Whether it has other memory, or another form."""
        return self.place is not None and not self.tensor.is_set_to(self.place)

    def put_back(self) -> None:
        """Make it what it was."""
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


def _hooks_of(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Hooks on its gradient: called before it is added, and after."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [(name, getattr(tensor, name)) for name in names] if tensor.is_leaf else []


def _copied(hooks: Any) -> Any:
    return None if hooks is None else dict(hooks)


@dataclass(slots=True, eq=False)
class _Copy:
    """What lay in a storage.

    Attributes:
        storage: Where it lay.
        data: A copy, as bytes.
        suspect: Whether it was found to be written to: it may be again, without a word to torch.
        users: Contexts that use it.
    """

    storage: torch.UntypedStorage
    data: torch.Tensor
    suspect: bool = False
    users: int = 0

    def changed(self) -> bool:
        """Whether something else lies there now."""
        there = self.storage
        changed = there.nbytes() != self.data.nbytes or not _same_bytes(_as_bytes(there), self.data)
        self.suspect = self.suspect or changed
        return changed

    def put_back(self) -> None:
        """Write it again."""
        if self.changed():
            if self.storage.nbytes() != self.data.nbytes:
                self.storage.resize_(self.data.nbytes)
            _as_bytes(self.storage).copy_(self.data)


class _Values:
    """The values of some tensors.

    Every storage is copied once, for all contexts that are open.
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
        """Keys of the storages in which something else lies now; every one is looked at."""
        return {key for key, copy in self._copies.items() if copy.changed()}

    def put_back(self) -> None:
        """Write what lay there, and let go of the copies."""
        touched = {key for tensor, version, key in self._versions if tensor._version != version}
        for key, copy in self._copies.items():
            if key in self._own or copy.suspect or key in touched:
                copy.put_back()
            with _LOCK:
                copy.users -= 1
                if not copy.users and _OPEN.get(key) is copy:
                    del _OPEN[key]


_OPEN: dict[int, _Copy] = {}
"""Copies that some context uses, by storage: all that lies in the model of a job is copied once."""

_LOCK = threading.Lock()


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tells the memory of a tensor from any other; None where it has none of its own, or none at all."""
    if unusual(tensor) or is_lazy(tensor) or tensor.device.type == "meta":
        return None  # those that are made of others are held with these
    storage = tensor.untyped_storage()
    return int(storage._cdata) if storage.nbytes() and storage.data_ptr() else None


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_of(storage: torch.UntypedStorage) -> torch.Tensor:
    data = _as_bytes(storage)
    try:
        return data.clone()
    except torch.OutOfMemoryError:  # of an accelerator
        return data.cpu()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type != "cpu" or b.device.type != "cpu":
        return torch.equal(a, b.to(a.device))
    form = torch.int64 if a.nbytes % 8 == 0 else torch.uint8
    return np.array_equal(a.view(form).numpy(), b.view(form).numpy())  # ten times as fast as torch.equal
