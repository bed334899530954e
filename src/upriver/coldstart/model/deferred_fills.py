"""Keep deferred fills of tensors, and the random numbers that they would have drawn.

A deferred fill is a note: the call, and the view of a storage that it writes. Notes run when an operator
needs what they write. Their order gives the same bits as if no fill had been deferred:

- Notes of one storage run in the order in which they were taken.
- A note that draws random numbers runs after all earlier draws from the same generator. Each such note gives
  the generator a state of its own, a token. User code may then reseed, save and restore states: the token
  tells which notes are missing.
- A note that copies runs before its source changes.

So a tensor computed from random weights equals that of plain construction, as does every random number
outside notes. Notes do not keep storages alive. If a storage is gone, its constant fills are forgotten, and
its random fills run on scratch memory.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, valid while a strong or weak reference to the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageView:
    """View of a storage that does not keep the storage alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Return the view of a strided tensor."""
        return cls(
            storage=weak(tensor),
            dtype=tensor.dtype,
            device=tensor.device,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @property
    def key(self) -> int:
        """Key of the storage, as :func:`storage_key` returns it."""
        key: int = self.storage.cdata
        return key

    @property
    def is_gone(self) -> bool:
        """True if the storage was freed."""
        gone: bool = self.storage.expired()  # type: ignore[no-untyped-call]
        return gone

    def open(self) -> torch.Tensor | None:
        """Return the view as a tensor, even if the original tensor is gone; None if the storage is gone."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.key)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """Return new memory of the same form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass(eq=False, kw_only=True, slots=True)
class GeneratorPosition:
    """Position of a generator, as if no fill had been deferred.

    Attributes:
        generator: The generator.
        state: Its state at this position, once known.
        before: Position before the note drew; None for a known position that no note led to.
        note: Note that draws between the two.
    """

    generator: torch.Generator
    state: torch.Tensor | None = None
    before: GeneratorPosition | None = None
    note: DeferredCall | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class DeferredCall:
    """One deferred call.

    Attributes:
        place: View that the call writes.
        call: Function that writes it.
        source: For a copy, its source. The note keeps that storage alive.
        moment: For a random fill, the generator's position after it.
        is_lost: True if nothing will read what the call writes.
        is_done: True if the call has run, or need not run.
    """

    place: StorageView
    call: Callable[[torch.Tensor], object]
    source: torch.Tensor | None = None
    moment: GeneratorPosition | None = None
    is_lost: bool = False
    is_done: bool = False


class DeferredFills:
    """All deferred calls of one construction."""

    def __init__(self) -> None:
        self._order: deque[DeferredCall] = deque()
        self._of: dict[int, list[DeferredCall]] = {}  # notes by the storage that they write
        self._reader: dict[int, DeferredCall] = {}  # last note that copies from a storage
        self._draws = _Draws()

    # ------------------------------------------------------------------------------------- taking

    def fill(
        self,
        target: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        generator: torch.Generator | None = None,
    ) -> None:
        """Defer a call that reads nothing but its target.

        Args:
            target: Tensor that the call writes.
            call: Function of the target, or of another tensor of its form.
            generator: Generator that the call draws from.
        """
        note = DeferredCall(place=StorageView.of(target), call=call)
        if generator is not None:
            note.moment = self._draws.put_off(generator, note)
        self._take(note)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Defer a copy between two storages."""
        alias = torch.empty(0, dtype=source.dtype, device=source.device)
        alias.set_(source.untyped_storage(), source.storage_offset(), source.size(), source.stride())
        note = DeferredCall(place=StorageView.of(target), call=lambda into: into.copy_(alias), source=alias)
        self._take(note)
        self._reader[storage_key(alias)] = note

    def _take(self, note: DeferredCall) -> None:
        self._order.append(note)
        self._of.setdefault(note.place.key, []).append(note)

    # ------------------------------------------------------------------------------------ running

    def is_behind(self, key: int) -> bool:
        """Return True if a storage has notes that have not run."""
        return key in self._of

    def settle(self, key: int, *, written: bool = False) -> None:
        """Run the notes that a storage needs.

        Args:
            key: Key of the storage.
            written: True if an operator will write the storage. Copies from it run first then.
        """
        reader = self._reader.get(key)
        if reader is not None and reader.is_done:
            reader = None
        if own := self._of.get(key):
            if reader is None and not any(note.moment or note.source is not None for note in own):
                for note in tuple(own):
                    self._run(note)
            else:
                self._run_through(own[-1])
        if written and reader is not None:
            self._run_through(reader)

    def replace(self, key: int) -> None:
        """Drop the notes of a storage that is about to be overwritten as a whole."""
        reader = self._reader.get(key)
        if reader is not None:
            self._run_through(reader)
        for note in tuple(self._of.get(key, ())):
            self._lose(note)

    def catch_up(self, generator: torch.Generator | None = None) -> None:
        """Bring generators to their right positions before a draw.

        Args:
            generator: Generator of the user, besides those that notes draw from.
        """
        for behind in self._draws.behind(generator):
            moment = self._draws.missing(behind)
            if moment is not None and moment.note is not None:
                self._run_through(moment.note)
                assert moment.state is not None
                behind.set_state(moment.state)

    def settle_all(self) -> None:
        """Run all notes."""
        self.catch_up()
        while self._order:
            self._run(self._order.popleft())

    def finish(self, free: Container[int] = ()) -> None:
        """Run the notes whose results may still be read, except for some storages.

        Args:
            free: Storages that may hold anything.
        """
        wanted: set[int] = set()
        for note in reversed(self._order):
            key = note.place.key
            if key not in wanted and (key in free or note.place.is_gone):
                self._lose(note)
            elif note.source is not None and not note.is_done:
                wanted.add(storage_key(note.source))
        for key in tuple(self._of):
            if key not in free:
                self.settle(key)

    def close(self) -> None:
        """Set generators to their positions after the draws that have run."""
        self._draws.close()
        self._order.clear()
        self._of.clear()
        self._reader.clear()

    def _run_through(self, last: DeferredCall) -> None:
        """Run a note and all earlier ones."""
        while not last.is_done:
            self._run(self._order.popleft())

    def _run(self, note: DeferredCall) -> None:
        if note.is_done:
            return
        self._off(note)
        note.is_done = True
        with torch.no_grad(), _with_data():
            target = None if note.is_lost else note.place.open()
            if target is None and note.moment is not None:
                target = note.place.scratch()
            if target is not None:
                with _at(note.moment):
                    note.call(target)
        note.source, note.call = None, _nothing

    def _lose(self, note: DeferredCall) -> None:
        """Drop a note whose result nothing will read. Its random draws still count."""
        if note.is_done:
            return
        self._off(note)
        note.is_lost = True
        if note.moment is None:
            note.source, note.call, note.is_done = None, _nothing, True

    def _off(self, note: DeferredCall) -> None:
        if note.is_lost:
            return
        own = self._of[note.place.key]
        own.remove(note)
        if not own:
            del self._of[note.place.key]


def _nothing(_target: torch.Tensor) -> None:
    """Replace the call of a note that is not needed, without holding a tensor."""


@contextlib.contextmanager
def _with_data() -> Iterator[None]:
    """Compute with data, even if a constructor captures a model on tensors without data."""
    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


@contextlib.contextmanager
def _at(moment: GeneratorPosition | None) -> Iterator[None]:
    """Set a generator to its position for a note, and restore it afterwards."""
    if moment is None:
        yield
        return
    assert moment.before is not None and moment.before.state is not None
    now = moment.generator.get_state()
    moment.generator.set_state(moment.before.state)
    try:
        yield
    finally:
        moment.state = moment.generator.get_state()
        moment.generator.set_state(now)


class _Draws:
    """Generators that are behind, and their positions."""

    def __init__(self) -> None:
        self._moments: dict[int, GeneratorPosition] = {}  # by token
        self._generators: dict[int, torch.Generator] = {}
        # Start at a number that no user would choose as a seed, and another one in each construction.
        self._tokens = itertools.count(secrets.randbits(62))

    def put_off(self, generator: torch.Generator, note: DeferredCall) -> GeneratorPosition:
        """Move a generator to its position after a note, without drawing."""
        before = self.missing(generator)
        if before is None:
            before = GeneratorPosition(generator=generator, state=generator.get_state())
        moment = GeneratorPosition(generator=generator, before=before, note=note)
        token = next(self._tokens)
        self._moments[token] = moment
        self._generators[id(generator)] = generator
        generator.manual_seed(token)
        return moment

    def missing(self, generator: torch.Generator) -> GeneratorPosition | None:
        """Return the right position of a generator that is behind, else None."""
        return self._moments.get(generator.initial_seed())

    def behind(self, generator: torch.Generator | None) -> list[torch.Generator]:
        """Return the generators that may be behind."""
        own = [] if generator is None or id(generator) in self._generators else [generator]
        return [*self._generators.values(), *own]

    def close(self) -> None:
        """Set each generator to its last known state."""
        for generator in self._generators.values():
            moment = self.missing(generator)
            while moment is not None and moment.state is None:
                moment = moment.before
            if moment is not None and moment.state is not None:
                generator.set_state(moment.state)
