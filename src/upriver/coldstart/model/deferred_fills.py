"""Keep deferred fills of tensors, and the random numbers that they would have drawn.

A deferred fill is a note: the call, and the view of a storage that it writes. Notes run in the order in which
they were taken, up to the last one that a reader needs, so each sees what it would have seen undeferred. A
note that draws random numbers gives its generator a seed of its own, a token. User code may then reseed, save
and restore states: the token tells which notes are missing.

So a tensor computed from random weights equals that of plain construction, as does every random number
outside notes. Notes do not keep storages alive. If a storage is gone, its constant fills are forgotten, and
its random fills run on scratch memory.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, valid while a strong or weak reference to the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def weak(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class StorageView:
    """View of a storage that does not keep the storage alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weak(tensor)
        self.key: int = self._storage.cdata
        self._dtype, self._device = tensor.dtype, tensor.device
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    @property
    def is_gone(self) -> bool:
        """True if the storage was freed."""
        gone: bool = self._storage.expired()  # type: ignore[no-untyped-call]
        return gone

    def open(self) -> torch.Tensor | None:
        """Return the view as a tensor, even if the original tensor is gone; None if the storage is gone."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.key)
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return empty.set_(storage, self._offset, self._size, self._stride)

    def scratch(self) -> torch.Tensor:
        """Return new memory of the same form."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


@dataclass(eq=False, kw_only=True, slots=True)
class DeferredCall:
    """One deferred call.

    Attributes:
        call: Function of that view, and for a copy of the source.
        source: For a copy, its source. The note keeps that storage alive.
        generator: For a random fill, its generator.
        token: Seed that stands for the generator's state after a random fill.
        is_lost: True if nothing will read what the call writes.
    """

    place: StorageView
    call: Callable[..., object]
    source: torch.Tensor | None = None
    generator: torch.Generator | None = None
    token: int = 0
    is_lost: bool = False


class DeferredFills:
    """All deferred calls of one construction."""

    def __init__(self) -> None:
        self._notes: deque[DeferredCall] = deque()
        self._written: Counter[int] = Counter()  # notes by the storage that they write
        self._copied: Counter[int] = Counter()  # notes by the storage that they copy from
        self._generators: dict[int, torch.Generator] = {}
        # Start at a number that no user would choose as a seed, and another one in each construction.
        self._tokens = itertools.count(secrets.randbits(62))
        self._before: dict[int, torch.Tensor | int] = {}  # by token: the state, or token, before the note
        self._after: dict[int, torch.Tensor] = {}  # by token: the state after the note, once it has run

    # ------------------------------------------------------------------------------------- taking

    def fill(
        self,
        target: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        generator: torch.Generator | None = None,
    ) -> None:
        """Defer a call that reads nothing but its target.

        Args:
            call: Function of the target, or of another tensor of its form.
            generator: Generator that the call draws from.
        """
        note = DeferredCall(place=StorageView(target), call=call, generator=generator)
        if generator is not None:
            note.token, seed = next(self._tokens), generator.initial_seed()
            self._before[note.token] = seed if seed in self._before else generator.get_state()
            self._generators[id(generator)] = generator
            generator.manual_seed(note.token)
        self._take(note)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Defer a copy between two storages."""
        alias = torch.empty(0, dtype=source.dtype, device=source.device)
        alias.set_(source.untyped_storage(), source.storage_offset(), source.size(), source.stride())
        self._take(DeferredCall(place=StorageView(target), call=torch.Tensor.copy_, source=alias))
        self._copied[storage_key(alias)] += 1

    def _take(self, note: DeferredCall) -> None:
        self._notes.append(note)
        self._written[note.place.key] += 1

    # ------------------------------------------------------------------------------------ running

    def is_behind(self, key: int) -> bool:
        """Return True if a storage has notes that have not run."""
        return self._written[key] > 0

    def settle(self, key: int, *, written: bool = False) -> None:
        """Run the notes that a storage needs.

        Args:
            written: True if an operator will write the storage. Copies from it run first then.
        """
        while self._written[key] or (written and self._copied[key]):
            self._run_next()

    def replace(self, key: int) -> None:
        """Drop the notes of a storage that is about to be overwritten as a whole."""
        while self._copied[key]:
            self._run_next()
        if self._written[key]:
            for note in self._notes:
                if note.place.key == key:
                    self._lose(note)

    def catch_up(self, generator: torch.Generator | None = None) -> None:
        """Bring generators to their right positions before a draw."""
        given = {} if generator is None else {id(generator): generator}
        for behind in (self._generators | given).values():
            token = behind.initial_seed()
            if token in self._before:
                while token not in self._after:
                    self._run_next()
                behind.set_state(self._after[token])

    def settle_all(self) -> None:
        """Run all notes."""
        while self._notes:
            self._run_next()
        self.catch_up()

    def finish(self, free: Container[int] = ()) -> None:
        """Run the notes whose results may still be read, except for some storages."""
        wanted: set[int] = set()
        is_drawn = False
        needed: list[DeferredCall] = []
        for note in reversed(self._notes):
            key = note.place.key
            if key not in wanted and (key in free or note.place.is_gone):
                self._lose(note)
            if note.source is not None and not note.is_lost:
                wanted.add(storage_key(note.source))
            if not note.is_lost or (is_drawn and note.generator is not None):
                needed.append(note)
            is_drawn = is_drawn or (note.generator is not None and not note.is_lost)
        for note in reversed(needed):
            self._run(note)

    def close(self) -> None:
        """Set generators to their positions after the draws that have run."""
        for generator in self._generators.values():
            state: torch.Tensor | int = generator.initial_seed()
            while isinstance(state, int) and state in self._before:
                state = self._after.get(state, self._before[state])
            if isinstance(state, torch.Tensor):
                generator.set_state(state)
        self._notes.clear()

    def _run_next(self) -> None:
        self._run(self._notes.popleft())

    def _run(self, note: DeferredCall) -> None:
        is_lost, source = note.is_lost, note.source
        self._lose(note)
        with torch.no_grad(), _with_data():
            target = None if is_lost else note.place.open()
            if target is None and note.generator is not None:
                target = note.place.scratch()
            if target is None:
                return
            with self._drawing(note):
                note.call(target) if source is None else note.call(target, source)

    def _lose(self, note: DeferredCall) -> None:
        """Drop a note whose result nothing will read. Its random draws still count."""
        if note.is_lost:
            return
        note.is_lost = True
        self._written[note.place.key] -= 1
        if note.source is not None:
            self._copied[storage_key(note.source)] -= 1
            note.source = None

    @contextlib.contextmanager
    def _drawing(self, note: DeferredCall) -> Iterator[None]:
        """Set a note's generator to its position for it, and restore it afterwards."""
        if (generator := note.generator) is None:
            yield
            return
        before, now = self._before[note.token], generator.get_state()
        generator.set_state(self._after[before] if isinstance(before, int) else before)
        try:
            yield
        finally:
            self._after[note.token] = generator.get_state()
            generator.set_state(now)


@contextlib.contextmanager
def _with_data() -> Iterator[None]:
    """Compute with data, even if a constructor captures a model on tensors without data."""
    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)
