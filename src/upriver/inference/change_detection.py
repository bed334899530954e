"""Detect changes to a model after its capture: servers hold the captured state."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import xxhash
from torch import nn

from upriver._threads.forks import ForkSafeLock
from upriver.errors import FrozenChanged
from upriver.program.freeze import fold
from upriver.program.graph.weights_file import storage_order
from upriver.program.module_state.attributes import AttributeSnapshot
from upriver.program.module_state.structure import ModuleStructure
from upriver.program.tensor_layouts import unusual

PIECE_BYTES, MOST_TENSORS = 64 * 1024, 32
"""Bytes and tensors compared with each request: about 10 us, or 25 us where all these tensors are small. If
all weights were written to, any piece shows it."""

Piece: TypeAlias = "tuple[str, torch.Tensor, int]"
"""Name of a tensor, a piece of its bytes, and the piece's expected digest."""


Place: TypeAlias = "tuple[int, torch.dtype, torch.Size]"
"""Address, dtype and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A watched tensor.

    Attributes:
        version: Its version before its values were read.
        read: Whether programs read it, so that other values change answers.
    """

    name: str
    tensor: torch.Tensor
    version: int
    digest: int
    read: bool

    @property
    def changed(self) -> bool:
        return fold(self.tensor) != self.digest


@dataclass(frozen=True, slots=True)
class _Seen:
    """The watched tensors, their versions, and the groups of them that belong to one module."""

    entries: tuple[_Tensor, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    versions: Sequence[int] = field(default_factory=list)
    states: tuple[frozenset[int], ...] = ()

    def beside(self, moved: frozenset[int]) -> set[int]:
        """Return the tensors that programs read among ``moved`` and in the modules of ``moved``."""
        found = moved.union(*(state for state in self.states if not state.isdisjoint(moved)))
        return {at for at in found if self.entries[at].read}


class _Held:
    """Parameters and buffers of the modules; a look at the 320 of a ResNet-50 takes about 40 us."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = [path for path, _ in model.named_modules() for _ in range(2)]
        modules = list(model.modules())
        self._dicts = [each for module in modules for each in (module._parameters, module._buffers)]
        self.look({})

    @property
    def changed(self) -> bool:
        now = list(itertools.chain.from_iterable(map(operator.methodcaller("values"), self._dicts)))
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            return True
        # A new type or device for a whole model puts other values into the same parameter.
        return list(map(torch.Tensor.data_ptr, self._placed)) != self._pointers

    def look(self, read: Mapping[Place, int]) -> None:
        """Remember the present parameters and buffers, and the digests of those that programs read."""
        self._were = [
            {name: None if tensor is None else _Was(tensor, read) for name, tensor in each.items()}
            for each in self._dicts
        ]
        self._seen = [tensor for each in self._dicts for tensor in each.values()]
        self._placed = [tensor for tensor in self._seen if tensor is not None and _is_plain(tensor)]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]

    def others(self) -> Iterator[tuple[str, _Was | None, torch.Tensor | None]]:
        """Yield the name, the former and the present tensor of each entry that was replaced."""
        for path, were, now in zip(self._paths, self._were, self._dicts, strict=True):
            for name in were | now:
                was, tensor = were.get(name), now.get(name)
                if was is None and tensor is None and name in were:
                    continue
                if was is None or tensor is None or _Was(tensor, {}).place != was.place:
                    yield f"{path}.{name}".removeprefix("."), was, tensor


class _Was:
    """A parameter or buffer as it was: its place, its form, and its digest where programs read it."""

    def __init__(self, tensor: torch.Tensor, read: Mapping[Place, int]) -> None:
        self.tensor = tensor  # keeps its identity unique
        where = _place(tensor) if _is_plain(tensor) else None
        self.place = (id(tensor), where)
        shape = () if unusual(tensor) else tensor.shape  # nested tensors have no shape
        self.form = (tensor.dtype, tensor.device, shape, tensor.stride() if where else ())
        self.digest = read.get(where) if where else None


class ChangeDetector:
    """Watch the weights that programs share with the user's model, and the model's modules. Thread-safe.

    An in-place change raises a tensor's version. Each request compares the versions: about 20 us for the 320
    tensors of a ResNet-50. A batch norm in training raises only the version of its counter, which no program
    reads. So a write to any tensor of a module makes the next request compare all values that programs read
    in it.

    Writes through ``.data`` and by fused optimizers raise no version. For these, each request compares the
    values of some tensors in turn. The capture of the next form compares all values.

    A tensor that replaces one with the same values is no change. Replaced modules, hooks added or removed,
    and other values of attributes that the forward read are errors. They are ignored during a capture, which
    has hooks of its own.

    Args:
        model: Model whose modules are watched; None watches no modules.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules = None if model is None else ModuleStructure(model.named_modules())
        self._held = None if model is None else _Held(model)
        self._attributes: AttributeSnapshot | None = None
        self._captures = 0  # odd during a capture
        self._lock = ForkSafeLock()
        self._digests: dict[str, int] = {}
        self._seen = _Seen()
        self._pieces: tuple[tuple[Piece, ...], ...] = ()
        self._at = 0

    def forked(self) -> None:
        """Reset in a forked child, where no thread captures."""
        self._captures += self._captures % 2

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Mark a new capture of the model; one form is captured at a time.

        Raises:
            FrozenChanged: If modules, hooks or attributes changed.
        """
        self._check_model()
        self._captures += 1
        try:
            yield
        finally:
            self._captures += 1

    def watch(
        self,
        weights: Mapping[str, torch.Tensor],
        states: Iterable[Mapping[str, torch.Tensor]] = (),
        attributes: AttributeSnapshot | None = None,
    ) -> None:
        """Watch further weights from here on.

        Args:
            weights: Tensors by name.
            states: All own tensors of each module of the model, by name (`module_states`).
            attributes: Attributes that the forward read.

        Raises:
            FrozenChanged: If a weight has other values than an earlier one of the same name.
        """
        with self._lock:
            known = {(entry.name, entry.tensor.data_ptr()) for entry in self._seen.entries if entry.read}
            new_versions = {
                name: tensor._version
                for name, tensor in weights.items()
                if (name, tensor.data_ptr()) not in known and not tensor.is_inference()  # no version
            }
            digests = {name: fold(tensor) for name, tensor in weights.items()}
            for name in digests.keys() & self._digests.keys():
                if digests[name] != self._digests[name]:
                    raise _changed(name)
            self._digests |= digests
            new = [
                _Tensor(name, weights[name], version, digests[name], read=True)
                for name, version in new_versions.items()
            ]
            self._take_in(new)
            self._seen = _with_states(self._seen, states)
            if self._held is not None:
                self._held.look(self._read())
            if attributes is not None:
                self._attributes = attributes.joined(self._attributes)

    def _take_in(self, new: Sequence[_Tensor]) -> None:
        pieces = [(each.name, piece, _fold(piece)) for each in new for piece in _pieces(each.tensor)]
        random.Random(0).shuffle(pieces)  # large weights have many pieces
        self._pieces = (*self._pieces, *_together(pieces))
        self._seen = _with(self._seen, new)

    def check(self) -> None:
        """Check that weights, modules, hooks and attributes are unchanged.

        Raises:
            FrozenChanged: If a weight has other values, or the model has other modules, hooks or values of
                attributes. A write of the same values is no change.
        """
        self._check_model()
        seen = self._seen
        if _versions(seen.tensors) != seen.versions:
            with self._lock:
                self._look()
        if self._pieces:
            for name, piece, digest in self._pieces[at := self._at]:
                if _fold(piece) != digest:
                    raise _changed(name)  # the next request raises too
            self._at = (at + 1) % len(self._pieces)

    def _check_model(self) -> None:
        before = self._captures
        if self._modules is None or before % 2:
            return
        try:
            changed = self._modules.changed or (self._attributes.changed if self._attributes else "")
            changed = changed or self._replaced()
        except Exception:  # a capture that begins meanwhile puts tensors without values into the model
            if before == self._captures:
                raise
            return
        if changed and before == self._captures:
            raise FrozenChanged(f"{changed} {_CHANGED}")

    def _replaced(self) -> str:
        """Return the first replaced tensor with other values, where programs read the replaced one."""
        if self._held is None or not self._held.changed:
            return ""
        with self._lock:
            known = self._read()
            new: list[_Tensor] = []
            for name, was, now in self._held.others():
                if was is None or was.digest is None:  # read by no program
                    continue
                if now is None:
                    return repr(name)
                version = 0 if now.is_inference() else now._version
                if _Was(now, {}).form != was.form or fold(now) != was.digest:
                    return repr(name)
                if _place(now) not in known and not now.is_inference():
                    new.append(_Tensor(name, now, version, was.digest, read=True))
            self._take_in(new)
            self._held.look(self._read())
        return ""

    def _read(self) -> dict[Place, int]:
        return {_place(entry.tensor): entry.digest for entry in self._seen.entries if entry.read}

    def _look(self) -> None:
        seen = self._seen
        versions = _versions(seen.tensors)
        moved = frozenset(at for at, now in enumerate(versions) if now != seen.versions[at])
        for at in sorted(seen.beside(moved)):
            if seen.entries[at].changed:
                raise _changed(seen.entries[at].name)
        for at in moved:
            # A counter moves before its statistics do. While the counter differs, each request compares.
            if not seen.entries[at].read and seen.entries[at].changed:
                versions[at] = seen.versions[at]
        self._seen = replace(seen, versions=versions)


def module_states(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return the own parameters and buffers of each module, without its children's, by name."""
    states = []
    for path, module in model.named_modules():
        own = (module.named_parameters(path, recurse=False), module.named_buffers(path, recurse=False))
        states.append(dict(itertools.chain(*own)))
    return states


def _with(seen: _Seen, new: Sequence[_Tensor]) -> _Seen:
    return _Seen(
        (*seen.entries, *new),
        (*seen.tensors, *(each.tensor for each in new)),
        [*seen.versions, *(each.version for each in new)],
        seen.states,
    )


def _with_states(seen: _Seen, states: Iterable[Mapping[str, torch.Tensor]]) -> _Seen:
    """Add the other tensors of each module that has a tensor read by programs."""
    places: dict[int, set[int]] = {}
    for at, entry in enumerate(seen.entries):
        places.setdefault(entry.tensor.data_ptr(), set()).add(at)
    for state in states:
        own = {name: tensor for name, tensor in state.items() if _is_plain(tensor)}
        found = {at for tensor in own.values() for at in places.get(tensor.data_ptr(), ())}
        if not any(seen.entries[at].read for at in found):
            continue
        beside = [
            _Tensor(name, tensor, tensor._version, fold(tensor), read=False)
            for name, tensor in own.items()
            if tensor.data_ptr() not in places
        ]
        for at, entry in enumerate(beside, len(seen.entries)):
            places[entry.tensor.data_ptr()] = {at}
            found.add(at)
        seen = _with(seen, beside)
        if frozenset(found) not in seen.states:
            seen = replace(seen, states=(*seen.states, frozenset(found)))
    return seen


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a version and readable values; tensors that programs read always do."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_inference():
        return False
    return not (unusual(tensor) or tensor.is_meta) and tensor.numel() > 0


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the bytes of a tensor in main memory; reading other devices takes as long as a small request."""
    if not tensor.is_cpu or not tensor.numel():
        return ()
    flat = storage_order(tensor.detach()).reshape(-1).view(torch.uint8)
    return torch.split(flat, PIECE_BYTES)


def _together(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Group the pieces that one request compares, in their given order."""
    found: list[tuple[Piece, ...]] = []
    room = 0
    for piece in pieces:
        num_bytes = piece[1].numel()
        if num_bytes > room or len(found[-1]) == MOST_TENSORS:
            found.append(())
            room = PIECE_BYTES
        found[-1] += (piece,)
        room -= num_bytes
    return found


def _fold(piece: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(piece.numpy().data)


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


_CHANGED = (
    "changed after the model had been captured, and servers have what it was; make another one with "
    "upriver.offload()"
)


def _changed(name: str) -> FrozenChanged:
    return FrozenChanged(f"{name!r} {_CHANGED}")
