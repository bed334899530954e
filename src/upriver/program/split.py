"""A model in two: a proven program for the frozen part, and the user's own tail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from upriver.errors import CaptureError
from upriver.program import freeze
from upriver.program.capture import capture
from upriver.program.program import Program
from upriver.program.proof import prove
from upriver.program.tail import Tail
from upriver.program.trace import finished_before, trace


class Whole(nn.Module):
    """A model that runs unsplit: the tail is all of it. Owns no parameters, like :class:`Tail`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = (model,)

    def forward(self, inputs: torch.Tensor) -> object:
        """The model's answer."""
        return self._model[0](inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What a model was cut into.

    Attributes:
        program: The frozen prefix; None when the model runs unsplit.
        tail: Runs what is left, from the value at the freeze point (or from the input).
        in_eval: Modules that stay in eval whatever ``model.train()`` says.
        prefix_units: Frozen units that run in the program.
        boundary: The module that ends the prefix; empty when unsplit.
        why_not: Why the model runs unsplit; empty when it does not.
    """

    program: Program | None
    tail: nn.Module
    in_eval: tuple[str, ...]
    prefix_units: tuple[str, ...] = ()
    boundary: str = ""
    why_not: str = ""

    @property
    def freeze(self) -> int:
        """The freeze point: the largest cut that training allows."""
        return 0 if self.program is None else self.program.num_stages


def split(
    model: nn.Module, example: torch.Tensor, *, on_progress: Callable[[str], None] | None = None
) -> Split:
    """Find the freeze point of a model, capture what lies before it, and prove the cut.

    Args:
        model: The user's model; its parameters, buffers and flags are left as they are.
        example: One micro-batch of input, samples in dimension 0, on the model's device.
        on_progress: Told what is being done.

    Raises:
        ModelError: If nothing or everything is frozen, or a module that would be skipped has hooks.
    """
    tell = on_progress or (lambda text: None)
    freeze.check_trainable(model)
    try:
        tell("tracing the model")
        calls = trace(model, (example,))
        point = freeze.find(model, calls)
        if point.boundary is None:
            raise CaptureError(point.why_not)
        in_eval = freeze.eval_modules(model, calls, point.boundary)
        tail = Tail(model, point.boundary, calls)
        tell(f"capturing it up to {point.boundary}")
        program = capture(model, (example,), boundary=point.boundary, calls=calls)
        tell("proving that prefix and tail give what the whole model gives")
        prove(model, program, tail, in_eval)
    except CaptureError as error:
        return Split(
            program=None, tail=Whole(model), in_eval=tuple(freeze.frozen_units(model)), why_not=str(error)
        )
    early = finished_before(calls, point.boundary)
    return Split(
        program=program,
        tail=tail,
        in_eval=tuple(in_eval),
        prefix_units=tuple(unit for unit in freeze.frozen_units(model) if unit in early),
        boundary=point.boundary,
    )
