"""Guard a model while its weights arrive, without a change of the object that its user holds.

During the load the model's class is a subclass made for it. A call runs under the barrier
(:mod:`upriver.coldstart.model.weight_barrier`) and returns only tensors that have arrived. Any other access,
such as ``model.encode_image(...)``, ``model.layer1``, ``state_dict()`` or ``to()``, waits until all weights
have arrived. Then the model gets its own class back, and no trace of the guard remains.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from upriver.coldstart.model.weight_barrier import WeightBarrier
from upriver.program.example_inputs import tensors_in

FREE = frozenset({"__class__", "__doc__", "__module__"})
"""Attributes that are read before anything is known about the object."""

AT_ONCE = frozenset({"eval", "train", "requires_grad_"})
"""Methods that users call between the load and the first result and that read no weights. If a model
overrides one and reads weights there, it waits for these."""


class WeightGuard:
    """Prevent reads of a model's weights before they arrive."""

    def __init__(
        self, model: nn.Module, gate: WeightBarrier, *, after_call: Callable[[], object] = lambda: None
    ) -> None:
        self._gate, self._after_call = gate, after_call
        self._inside = threading.local()
        self._kind = type(model)
        self._model = weakref.ref(model)
        object.__setattr__(model, "__class__", _guarded(model, self))

    @property
    def inside(self) -> bool:
        """True if this thread is in a call of the model, where operators wait for what they read."""
        return getattr(self._inside, "now", False)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call of the model under the barrier.

        Raises:
            UpriverError: If the load fails.
        """
        if self.inside or self._gate.arrivals.complete:
            yield
            return
        self._gate.arrivals.check()
        self._inside.now = True
        try:
            with self._gate.guarded():
                yield
        finally:
            self._inside.now = False
        self._after_call()

    def given(self, answer: Any) -> Any:
        """Return the result of a call after all tensors in it have arrived. Its reader is past the barrier.

        Raises:
            UpriverError: If a tensor does not arrive.
        """
        self._gate.enter(tensors_in(answer), {})
        return answer

    def wait(self) -> None:
        """Wait for all weights, unless this thread is in a call.

        Raises:
            UpriverError: If the load fails.
        """
        if not self.inside:
            self._gate.arrivals.wait_for_all()

    def release(self) -> None:
        """Give the model its own class back."""
        model = self._model()
        if model is not None:
            object.__setattr__(model, "__class__", self._kind)


def _guarded(model: nn.Module, guard: WeightGuard) -> type[nn.Module]:
    """Return a subclass of the model's class for this model alone."""
    kind = type(model)

    # Never `super()`: after a wait the object may be of its own class again.
    class Guarded(kind):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with guard.call():
                return guard.given(kind.__call__(self, *args, **kwargs))

        def __getattribute__(self, name: str) -> Any:
            if name in AT_ONCE and not guard.inside:
                return _called(kind.__getattribute__(self, name), guard)
            if name not in FREE:
                guard.wait()
            return kind.__getattribute__(self, name)

    Guarded.__name__, Guarded.__qualname__ = kind.__name__, kind.__qualname__
    Guarded.__module__, Guarded.__doc__ = kind.__module__, kind.__doc__
    return Guarded


def _called(method: Callable[..., Any], guard: WeightGuard) -> Callable[..., Any]:
    @wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with guard.call():
            return method(*args, **kwargs)

    return within
