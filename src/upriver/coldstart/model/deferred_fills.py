"""Fills of tensors that were put off, and the random numbers that they would have drawn.

A fill is put off as a note: what is to be called, and on which view of which storage. Notes are run when
somebody needs what they write, in an order that gives the bits that there would be had none been put off:

- Those of one storage run in the order in which they were taken.
- A note that draws random numbers runs after all that draw from the same generator before it. A generator
  that is behind is given a state of its own for each note, a token, so that whatever a user's code does with
  states (seed anew, save one and put it back) is understood: the token says which notes are missing from it.
- A note that copies runs before what it copies changes.

So a tensor that is computed from random weights is the one that plain construction computes, as is every
random number that anything but a note draws. Storages are not kept alive: where one is gone, its constant
fills are forgotten, and its random ones run on memory that is thrown away.
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
    """Names the storage of a tensor as long as somebody refers to it, weakly or not."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageView:
    """A view of a storage that it does not keep alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """Where a strided tensor lies."""
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
        """Of the storage, as :func:`storage_key` names it."""
        key: int = self.storage.cdata
        return key

    @property
    def is_gone(self) -> bool:
        """Whether nobody has the storage any more."""
        gone: bool = self.storage.expired()  # type: ignore[no-untyped-call]
        return gone

    def open(self) -> torch.Tensor | None:
        """The view, whatever became of the tensor; nothing where the storage is gone."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.key)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """Memory of the same form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that does not keep it alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


@dataclass(eq=False, kw_only=True, slots=True)
class GeneratorPosition:
    """Where a generator would be, had no fill been put off.

    Attributes:
        generator: Which one.
        state: Its state then, once it is known.
        before: The moment before the note drew; known ones that no note led to have none.
        note: What draws in between.
    """

    generator: torch.Generator
    state: torch.Tensor | None = None
    before: GeneratorPosition | None = None
    note: Note | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class Note:
    """One call that was put off.

    Attributes:
        place: What it writes.
        call: Writes it.
        source: Of a copy: what is copied. It keeps that storage alive.
        moment: Of a random fill: where its generator is after it.
        is_lost: Whether nobody will see what it writes.
        is_done: Whether it has run, or need not.
    """

    place: StorageView
    call: Callable[[torch.Tensor], object]
    source: torch.Tensor | None = None
    moment: GeneratorPosition | None = None
    is_lost: bool = False
    is_done: bool = False


class DeferredFills:
    """All calls put off during one construction."""

    def __init__(self) -> None:
        self._order: deque[Note] = deque()
        self._of: dict[int, list[Note]] = {}  # those that write into a storage
        self._reader: dict[int, Note] = {}  # the last one that copies from it
        self._draws = _Draws()

    # ------------------------------------------------------------------------------------- taking

    def fill(
        self,
        target: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        generator: torch.Generator | None = None,
    ) -> None:
        """Put off a call that reads nothing but the target.

        Args:
            target: What it writes.
            call: Takes the target, or another tensor of its form.
            generator: What it draws from.
        """
        note = Note(place=StorageView.of(target), call=call)
        if generator is not None:
            note.moment = self._draws.put_off(generator, note)
        self._take(note)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put off a copy between two storages."""
        alias = torch.empty(0, dtype=source.dtype, device=source.device)
        alias.set_(source.untyped_storage(), source.storage_offset(), source.size(), source.stride())
        note = Note(place=StorageView.of(target), call=lambda into: into.copy_(alias), source=alias)
        self._take(note)
        self._reader[storage_key(alias)] = note

    def _take(self, note: Note) -> None:
        self._order.append(note)
        self._of.setdefault(note.place.key, []).append(note)

    # ------------------------------------------------------------------------------------ running

    def is_behind(self, key: int) -> bool:
        """Whether a storage is not yet what it should be."""
        return key in self._of

    def settle(self, key: int, *, written: bool = False) -> None:
        """Make a storage what it should be by now.

        Args:
            key: Which one.
            written: Whether something will write into it: what copies from it runs before.
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
        """Forget what a storage should be, as all of it is about to be written."""
        reader = self._reader.get(key)
        if reader is not None:
            self._run_through(reader)
        for note in tuple(self._of.get(key, ())):
            self._lose(note)

    def catch_up(self, generator: torch.Generator | None = None) -> None:
        """Bring generators to where they should be, as somebody is about to draw from one.

        Args:
            generator: One of the user's own, beside those that notes draw from.
        """
        for behind in self._draws.behind(generator):
            moment = self._draws.missing(behind)
            if moment is not None and moment.note is not None:
                self._run_through(moment.note)
                assert moment.state is not None
                behind.set_state(moment.state)

    def settle_all(self) -> None:
        """Run everything."""
        self.catch_up()
        while self._order:
            self._run(self._order.popleft())

    def finish(self, free: Container[int] = ()) -> None:
        """Run what somebody may still see, but for some storages.

        Args:
            free: Those that may hold anything.
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
        """Put generators where they are with nothing drawn that has not been drawn."""
        self._draws.close()
        self._order.clear()
        self._of.clear()
        self._reader.clear()

    def _run_through(self, last: Note) -> None:
        """Run a note, and all that were taken before it."""
        while not last.is_done:
            self._run(self._order.popleft())

    def _run(self, note: Note) -> None:
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

    def _lose(self, note: Note) -> None:
        """Nobody will see what it writes; what it draws counts nevertheless."""
        if note.is_done:
            return
        self._off(note)
        note.is_lost = True
        if note.moment is None:
            note.source, note.call, note.is_done = None, _nothing, True

    def _off(self, note: Note) -> None:
        if note.is_lost:
            return
        own = self._of[note.place.key]
        own.remove(note)
        if not own:
            del self._of[note.place.key]


def _nothing(_target: torch.Tensor) -> None:
    """What is left of a call that nobody needs: it holds no tensor."""


@contextlib.contextmanager
def _with_data() -> Iterator[None]:
    """Compute in earnest, also where a constructor captures a model: on tensors without data."""
    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


@contextlib.contextmanager
def _at(moment: GeneratorPosition | None) -> Iterator[None]:
    """While a note runs, its generator is where it should be then; afterwards where it was."""
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
    """Generators that are behind, and how far."""

    def __init__(self) -> None:
        self._moments: dict[int, GeneratorPosition] = {}  # by token
        self._generators: dict[int, torch.Generator] = {}
        # No seed that a user would take, and another one in each construction.
        self._tokens = itertools.count(secrets.randbits(62))

    def put_off(self, generator: torch.Generator, note: Note) -> GeneratorPosition:
        """Have a generator stand where it would be after a note, but for having drawn."""
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
        """Where a generator should be, if it is behind."""
        return self._moments.get(generator.initial_seed())

    def behind(self, generator: torch.Generator | None) -> list[torch.Generator]:
        """Those that may be behind."""
        own = [] if generator is None or id(generator) in self._generators else [generator]
        return [*self._generators.values(), *own]

    def close(self) -> None:
        """Give each its own last state."""
        for generator in self._generators.values():
            moment = self.missing(generator)
            while moment is not None and moment.state is None:
                moment = moment.before
            if moment is not None and moment.state is not None:
                generator.set_state(moment.state)
