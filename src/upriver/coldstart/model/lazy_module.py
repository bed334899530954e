"""A model whose weights are on their way, as its user sees it: the same object, guarded until they are there.

While it loads its class is a subclass of its own, made for it. A call runs under the barrier
(:mod:`upriver.coldstart.model.weight_barrier`), and gives back only what is there; whatever else is asked of
it, such as ``model.encode_image(...)``, ``model.layer1``, ``state_dict()`` or ``to()``, waits until
everything is there. Then the class is the model's own again, and nothing of this is left.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

from torch import nn

from upriver.coldstart.model.weight_barrier import Gate
from upriver.program.example_inputs import tensors_in

FREE = frozenset({"__class__", "__doc__", "__module__"})
"""What is asked for before anything is known of it."""

AT_ONCE = frozenset({"eval", "train", "requires_grad_"})
"""Methods that people call between loading and the first answer, and that read no weights; where a model has
its own that does, it waits for what it reads."""


class Guard:
    """Keeps a model from being read before its time.

    Args:
        model: Whose class is changed from now on.
        gate: What its operators pass.
        after_call: Told when a call of the model is over.
    """

    def __init__(
        self, model: nn.Module, gate: Gate, *, after_call: Callable[[], object] = lambda: None
    ) -> None:
        self._gate, self._after_call = gate, after_call
        self._inside = threading.local()
        self._kind = type(model)
        self._model = weakref.ref(model)
        object.__setattr__(model, "__class__", _guarded(model, self))

    @property
    def inside(self) -> bool:
        """Whether this thread is in a call of the model's, where operators wait for what they read."""
        return getattr(self._inside, "now", False)

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the model's.

        Raises:
            UpriverError: If a weight that it reads, or any, does not come.
        """
        if self.inside or self._gate.arrivals.complete:
            yield
            return
        if (error := self._gate.arrivals.error) is not None:
            raise error
        self._inside.now = True
        try:
            with self._gate.guarded():
                yield
        finally:
            self._inside.now = False
        self._after_call()

    def given(self, answer: Any) -> Any:
        """What a call gives back, when all tensors in it are there: whoever reads them is past the barrier.

        Raises:
            UpriverError: If one does not come.
        """
        self._gate.enter(tensors_in(answer), {})
        return answer

    def wait(self) -> None:
        """For everything, unless this thread is in a call.

        Raises:
            UpriverError: If it does not come.
        """
        if not self.inside:
            self._gate.arrivals.wait_for_all()

    def release(self) -> None:
        """The model is as any other."""
        model = self._model()
        if model is not None:
            object.__setattr__(model, "__class__", self._kind)


def _guarded(model: nn.Module, guard: Guard) -> type[nn.Module]:
    """A subclass for one model."""
    kind = type(model)

    # Never `super()`: by the time that a wait is over the object may be of its own class again.
    class Guarded(kind):  # type: ignore[valid-type, misc]
        _upriver_guard: ClassVar[Guard] = guard

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


def _called(method: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    @wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with guard.call():
            return method(*args, **kwargs)

    return within


def guard_of(model: nn.Module) -> Guard | None:
    """Of a model that is still loading."""
    found: Guard | None = vars(type(model)).get("_upriver_guard")
    return found
