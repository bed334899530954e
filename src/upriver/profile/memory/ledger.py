"""Count bytes of tensors alive at once while code runs: every storage is watched from start to end.

The code may run on tensors without data. A tensor then lives for the usual reasons: a name in Python, or a
node of autograd's graph that has saved it. So lifetimes need no rules: they happen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.profile.memory.convolution import NOTHING, Workspace
from upriver.profile.memory.libraries import LibraryMemory
from upriver.profile.memory.workspace import tensors_of, workspace
from upriver.program.compiled_code import under
from upriver.program.tensor_layouts import storages_of


class LedgerCall(NamedTuple):
    """One call of an operator.

    Attributes:
        live: Bytes of tensors alive, including its results.
        backward: Whether autograd called it: with data autograd adds up gradients in place where it can.
    """

    name: str
    live: int
    taken: Workspace
    backward: bool


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the storages that operators make, as long as they live.

    Attributes:
        live: Bytes alive now.
        moments: Each call so far.
        backward: Whether autograd runs; the caller sets it.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: LibraryMemory | None = None, known: Container[int] = ()) -> None:
        """Start with no storages.

        Args:
            kept: Continues an earlier count of the memory that libraries keep.
            known: Storages never to count, as named by :func:`storages`.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self.live = 0
        self.moments: list[LedgerCall] = []
        self.kept = kept or LibraryMemory()
        self.backward = False
        self._watched: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}

    @property
    def high(self) -> int:
        """Largest number of bytes at once so far, workspaces included."""
        return max((moment.live + moment.taken.nbytes for moment in self.moments), default=0)

    @property
    def most_live(self) -> int:
        """Largest number of bytes of tensors at once so far."""
        return max((moment.live for moment in self.moments), default=0)

    @property
    def most_live_forward(self) -> int:
        """Largest number of bytes of tensors at once before autograd ran."""
        return max((moment.live for moment in self.moments if not moment.backward), default=0)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._add(tensor, counted=True)
        self.moments.append(LedgerCall("", self.live, NOTHING, False))

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count these tensors: weights, which exist before and after."""
        for tensor in tensors:
            self._add(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # its functions' operators are seen one by one
            args, kwargs = under(self, (args, kwargs))
            given = func(*args, **kwargs)
            for tensor in tensors_of(given):
                self._add(tensor, counted=True)
            return given
        given = func(*args, **kwargs)
        if func.namespace == "prim":  # such as asking a tensor for its device
            return given
        results = list(tensors_of(given))
        for tensor in results:
            self._add(tensor, counted=True)
        taken = workspace(func, args, kwargs, results)
        name = func._schema.name.partition("::")[2]
        self.kept.note(name, args, list(tensors_of([args, list(kwargs.values())])))
        self.moments.append(LedgerCall(name, self.live, taken, self.backward))
        return given

    def _add(self, tensor: torch.Tensor, *, counted: bool) -> None:
        for storage in storages_of(tensor):
            key = storage._cdata
            if key in self._watched or key in self._known:
                continue
            nbytes = storage.nbytes() if counted else 0
            self.live += nbytes
            self._watched[key] = weakref.ref(storage, functools.partial(self._gone, key, nbytes))

    def _gone(self, key: int, nbytes: int, _reference: object) -> None:
        del self._watched[key]
        self.live -= nbytes


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return names of the storages of tensors, valid as long as the tensors live."""
    return frozenset(storage._cdata for tensor in tensors for storage in storages_of(tensor))
