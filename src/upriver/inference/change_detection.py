"""Notices what changes of a model after it was captured: servers have what it was."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import xxhash
from torch import nn

from upriver.errors import FrozenChanged
from upriver.program.freeze import fold
from upriver.program.graph.weights_file import storage_order
from upriver.program.module_state.attributes import Attributes
from upriver.program.module_state.structure import Modules
from upriver.program.tensor_layouts import unusual

PIECE_BYTES, MOST_TENSORS = 64 * 1024, 32
"""Compared with each request, of at most so many tensors: some 10 us, 25 us where all of these are small.
Where all weights were written to, any piece shows it."""

Piece: TypeAlias = "tuple[str, torch.Tensor, int]"
"""Name of a tensor, some of its bytes, and what they are to be."""


Place: TypeAlias = "tuple[int, torch.dtype, torch.Size]"
"""Tell where a tensor lies, and in which form."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One that is looked at.

    Attributes:
        name: In the model.
        tensor: It.
        version: It had this before its values were looked at.
        digest: Of these.
        read: Whether programs read it, so that other values would be other answers.
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
    """Tensors, how often each was written to, and which of them are parts of one module."""

    entries: tuple[_Tensor, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    versions: Sequence[int] = field(default_factory=list)
    states: tuple[frozenset[int], ...] = ()

    def beside(self, moved: frozenset[int]) -> set[int]:
        """Those that programs read among these and among all that lies in one module with one of these."""
        found = moved.union(*(state for state in self.states if not state.isdisjoint(moved)))
        return {at for at in found if self.entries[at].read}


class _Held:
    """Parameters and buffers that modules have, some 40 us for the 320 of a ResNet-50."""

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
        # Another type or device for a whole model puts other values into the same parameter.
        return list(map(torch.Tensor.data_ptr, self._placed)) != self._pointers

    def look(self, read: Mapping[Place, int]) -> None:
        """Remember what there is now.

        Args:
            read: Digest of each tensor that programs read.
        """
        self._were = [
            {name: None if tensor is None else _Was(tensor, read) for name, tensor in each.items()}
            for each in self._dicts
        ]
        self._seen = [tensor for each in self._dicts for tensor in each.values()]
        self._placed = [tensor for tensor in self._seen if tensor is not None and _is_plain(tensor)]
        self._pointers = [tensor.data_ptr() for tensor in self._placed]

    def others(self) -> Iterator[tuple[str, _Was | None, torch.Tensor | None]]:
        """Name, what was there, and what is there now."""
        for path, were, now in zip(self._paths, self._were, self._dicts, strict=True):
            for name in were | now:
                was, tensor = were.get(name), now.get(name)
                if was is None and tensor is None and name in were:
                    continue
                if was is None or tensor is None or _Was(tensor, {}).place != was.place:
                    yield f"{path}.{name}".removeprefix("."), was, tensor


class _Was:
    """A parameter or buffer as it was: where, in which form, and its digest where programs read it."""

    def __init__(self, tensor: torch.Tensor, read: Mapping[Place, int]) -> None:
        self.tensor = tensor  # so that no other one has its identity
        where = _place(tensor) if _is_plain(tensor) else None
        self.place = (id(tensor), where)
        shape = () if unusual(tensor) else tensor.shape  # nested ones have none
        self.form = (tensor.dtype, tensor.device, shape, tensor.stride() if where else ())
        self.digest = read.get(where) if where else None


class Unchanged:
    """Weights that programs share with the user's model, and its modules. Thread-safe.

    In-place changes move a tensor's version, which is looked at with each request: some 20 us for the 320
    tensors of a ResNet-50. A batch norm in training moves that of its counter only, which no program reads:
    where anything of a module was written to, the values of all that programs read of it are compared. Writes
    through ``.data`` and by fused optimizers move none: for these the values of some are compared with each
    request, of others each time, and of all when the next form of call is captured. A tensor that
    comes in the place of another one with the same values is no change. Modules that are replaced, hooks that
    come or go, and attributes that the forward has read and that have other values are an error, but for the
    time of a capture, which has hooks of its own.

    Args:
        model: Whose modules are looked at; none without it.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules = None if model is None else Modules(model.named_modules())
        self._held = None if model is None else _Held(model)
        self._attributes: Attributes | None = None
        self._captures = 0  # odd while one is under way
        self._lock = threading.Lock()
        self._digests: dict[str, int] = {}
        self._seen = _Seen()
        self._pieces: tuple[tuple[Piece, ...], ...] = ()
        self._at = 0

    def forked(self) -> None:
        """In a child of this process: nobody there holds the lock, or captures."""
        self._lock = threading.Lock()
        self._captures += self._captures % 2

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While the model is captured anew, one form at a time.

        Raises:
            FrozenChanged: If its modules, hooks or attributes are others.
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
        attributes: Attributes | None = None,
    ) -> None:
        """They count from here on, beside those that do.

        Args:
            weights: Name to tensor.
            states: For each module of the model all that it has, by name (`module_states`).
            attributes: What the forward has read.

        Raises:
            FrozenChanged: If one has other values than what had its name before.
        """
        with self._lock:
            known = {(entry.name, entry.tensor.data_ptr()) for entry in self._seen.entries if entry.read}
            new_versions = {
                name: tensor._version
                for name, tensor in weights.items()
                if (name, tensor.data_ptr()) not in known and not tensor.is_inference()  # has no version
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
        random.Random(0).shuffle(pieces)  # large weights have many
        self._pieces = (*self._pieces, *_together(pieces))
        self._seen = _with(self._seen, new)

    def check(self) -> None:
        """Whether they are as they were.

        Raises:
            FrozenChanged: If one has other values; the same ones written once more are no change. Or if the
                model has other modules, hooks, or values of attributes.
        """
        self._check_model()
        seen = self._seen
        if _versions(seen.tensors) != seen.versions:
            with self._lock:
                self._look()
        if self._pieces:
            for name, piece, digest in self._pieces[at := self._at]:
                if _fold(piece) != digest:
                    raise _changed(name)  # and so does the next one
            self._at = (at + 1) % len(self._pieces)

    def _check_model(self) -> None:
        before = self._captures
        if self._modules is None or before % 2:
            return
        try:
            changed = self._modules.changed or (self._attributes.changed if self._attributes else "")
            changed = changed or self._replaced()
        except Exception:  # a capture that begins meanwhile puts tensors without values there
            if before == self._captures:
                raise
            return
        if changed and before == self._captures:
            raise FrozenChanged(f"{changed} {_CHANGED}")

    def _replaced(self) -> str:
        """The first tensor with other values than that in whose place it is, where programs read this."""
        if self._held is None or not self._held.changed:
            return ""
        with self._lock:
            known = self._read()
            new: list[_Tensor] = []
            for name, was, now in self._held.others():
                if was is None or was.digest is None:  # read by no program: attributes tell if that changes
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
            # A counter moves before its statistics do: as long as it is another one, each request compares.
            if not seen.entries[at].read and seen.entries[at].changed:
                versions[at] = seen.versions[at]
        self._seen = replace(seen, versions=versions)


def module_states(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """For each module the parameters and buffers that are its own, not its children's, by name."""
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
    """The same, and what lies in one module with something that programs read."""
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
    """Whether it has a version, and values that can be looked at; what programs read always has."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_inference():
        return False
    return not (unusual(tensor) or tensor.is_meta) and tensor.numel() > 0


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its bytes where it has them in main memory: to look at others takes as long as a small request."""
    if not tensor.is_cpu or not tensor.numel():
        return ()
    flat = storage_order(tensor.detach()).reshape(-1).view(torch.uint8)
    return torch.split(flat, PIECE_BYTES)


def _together(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Those that are compared with one request, in the order in which they come."""
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
