"""Bytes of tensors alive at once while code runs: every storage is watched from its making to its end.

The code may run on tensors without data. What keeps a tensor alive is then the same as ever: a name in
Python, a node of autograd's graph that has saved it. So nothing has to be said about lifetimes: they
happen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.profile.workspace import tensors_of, workspace


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operators make, as long as they live.

    Attributes:
        live: Bytes alive now.
        low: Most bytes of tensors alive at once so far.
        high: The same with what operators take beside them.
        fixed: Most bytes that one operator takes whatever the number of samples.
        summing: Whether autograd runs: it adds up gradients in place where it can, but not without data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.low = self.high = self.fixed = 0
        self.summing = False
        self._watched: dict[int, weakref.ref[torch.UntypedStorage] | None] = {}

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._add(tensor, counted=True)
        self._note(0)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count these: weights, which are there before and after."""
        for tensor in tensors:
            self._add(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call an operator; count what it made and what it took."""
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        if func.namespace == "prim":  # asks a tensor for its device, say
            return given
        results = list(tensors_of(given))
        for tensor in results:
            self._add(tensor, counted=True)
        taken = workspace(func, args, kwargs, results)
        self.fixed = max(self.fixed, taken.fixed)
        self._note(taken.nbytes, sums=self.summing and func is torch.ops.aten.add.Tensor)
        return given

    def _add(self, tensor: torch.Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._watched:
            return
        nbytes = storage.nbytes() if counted else 0
        self.live += nbytes
        self._watched[key] = weakref.ref(storage, functools.partial(self._gone, key, nbytes))

    def _gone(self, key: int, nbytes: int, _reference: object) -> None:
        del self._watched[key]
        self.live -= nbytes

    def _note(self, taken: int, *, sums: bool = False) -> None:
        if not sums:
            self.low = max(self.low, self.live)
        self.high = max(self.high, self.live + taken)
