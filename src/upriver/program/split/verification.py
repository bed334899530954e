"""Prove, before a job starts, that prefix and tail give the whole model's results to the bit.

The proof compares bits, on random micro-batches and on one whose last rows are padding:

- the results, and the gradients that ``backward()`` leaves in each parameter, for the whole model and for the
  model cut at the freeze point;
- the tensors that cross each cut of the program, computed in one run and from tensors sent over a wire at the
  previous cut;
- the features of some samples while the other rows change. A feature that changes with its neighbours shows
  that the model mixes samples.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from upriver.errors import CaptureError
from upriver.program.eval_mode import calls_in_eval, no_fast_path
from upriver.program.example_inputs import Example, TensorSource, random_like, tensors_in
from upriver.program.freeze import keep_in_eval, switch
from upriver.program.graph.alignment import through_cuts
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.devices import seed
from upriver.program.graph.executor import Program
from upriver.program.module_state.restoration import SavedState, state_kept, unattended
from upriver.program.split.eager_prefix import EagerPrefix
from upriver.program.split.freeze_point import CrossingTensor, EvalPlan
from upriver.program.split.tail import Tail
from upriver.program.tensor_layouts import dense_parts, same_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Results of one training step.

    Attributes:
        gradients: Name of each parameter, frozen ones too, mapped to its gradient after ``backward()``.
        crossing: For each tensor that crosses the freeze point, whether it required a gradient.
        values: The crossing tensors as the whole model made them; None if it did not make all of them.
        left: Values written to the model's tensors, and new tensor attributes, by name.
    """

    answers: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    crossing: tuple[bool, ...]
    values: tuple[torch.Tensor, ...] | None
    left: dict[str, list[torch.Tensor]]


class Refuted(CaptureError):
    """The parts of a split do not give what the whole model gives."""


class Proof:
    """Comparisons of one program, all on the same inputs.

    Three micro-batches suffice: a random one, one that shares its first rows, and one that shares most rows
    with the second and is zero in the others, as padding leaves them.
    """

    def __init__(self, program: Program, example: Example, *, seed: int = 0) -> None:
        """Make the inputs.

        Args:
            example: A micro-batch. Its integers are shuffled, not drawn, since they may be indices.
        """
        generator = torch.Generator().manual_seed(seed)
        first, other = (random_like(example, generator) for _ in range(2))
        size = program.micro_batch
        self.program = program
        self._kept = size // 2
        self._unpadded = size - max(1, size // 4)
        self._first = first
        self._second = _changed_from(self._kept, first, other)
        self._padded = _changed_from(self._unpadded, self._second)
        self._values: tuple[torch.Tensor, ...] = ()

    def cuts(self) -> None:
        """Compare each stage on tensors in memory with the same stage on tensors that were sent.

        Together with the proof of the whole prefix, this proves each of its cuts.

        Raises:
            CaptureError: Naming the first cut that changes a bit.
        """
        self._values = through_cuts(self.program, self._first)

    def split(
        self, model: nn.Module, tail: Tail, in_eval: EvalPlan, *, autocast: torch.dtype | None = None
    ) -> None:
        """Compare the model cut at the freeze point with the whole model. Call :meth:`cuts` first.

        Raises:
            CaptureError: Naming the difference.
        """
        program, first = self.program, self._values
        second, padded = (
            program.run(each.tensors, 0, program.num_stages) for each in (self._second, self._padded)
        )
        if program.micro_batch > 1:
            _same_rows(tail, ((second, first, self._kept), (padded, second, self._unpadded)))
        for training, example, values in ((True, self._first, first), (False, self._second, second)):
            # One sample is too few for a BatchNorm in training.
            training = training and program.micro_batch > 1
            step = _Step(model, tail, training=training, autocast=autocast)
            whole = _whole(step, model, example, in_eval)
            tail.with_gradient[training] = whole.crossing
            _same_answers(step, tail, in_eval, whole, values)


def check_tail(
    model: nn.Module,
    tail: Tail,
    in_eval: EvalPlan,
    prefix: EagerPrefix,
    example: Example,
    *,
    autocast: torch.dtype | None = None,
) -> None:
    """Compare the model cut at the freeze point with the whole model, on a few random samples.

    This finds a tail that reads more than crosses, and a frozen part that mixes samples, whatever the size of
    a micro-batch. It records which crossing tensors require a gradient. The tail runs on what crossed in the
    whole model, so that the frozen part alone runs once.

    Raises:
        CaptureError: Naming the difference.
    """
    generator = torch.Generator().manual_seed(0)
    for training, count in ((True, _TRIED), (False, 1)):
        given = random_like(example.resized(count), generator)
        step = _Step(model, tail, training=training, autocast=autocast)
        whole = _whole(step, model, given, in_eval)
        tail.with_gradient[training] = whole.crossing
        values = whole.values or prefix.run(given.tensors, 0, prefix.num_stages)
        if count > 1:
            changed = prefix.run(_changed_from(1, given).tensors, 0, prefix.num_stages)
            _same_rows(tail, ((changed, values, 1),))
        _same_answers(step, tail, in_eval, whole, values)


_TRIED = 2
"""Samples for the comparison before a program exists: with one, a BatchNorm could not train."""


def _whole(step: _Step, model: nn.Module, example: Example, in_eval: EvalPlan) -> StepResult:
    """Take a step with the whole model on copies of an example, as the model may write into its inputs.

    Raises:
        CaptureError: If the model does not run on it.
    """
    fresh = example.with_tensors([tensor.clone() for tensor in example.tensors])
    try:
        return step.taken(model, fresh.args, fresh.kwargs, in_eval)
    except CaptureError:
        raise
    except Exception as error:  # the user's forward, on values not from the user
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CaptureError(f"the model does not run on random values: {reason}") from error


def _same_rows(
    tail: Tail, compared: Sequence[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], int]]
) -> None:
    """Compare the first rows of features whose other rows differ.

    Raises:
        CaptureError: If they differ.
    """
    for changed, before, rows in compared:
        a, b = (tail.values.select(values, range(rows)) for values in (changed, before))
        if not all(same_bits(x, y) for x, y in zip(a, b, strict=True)):
            raise Refuted(
                "samples influence each other in the frozen part: the answer for one row depends on others"
            )


def _changed_from(first: int, given: Example, other: Example | None = None) -> Example:
    """Return `given` with the rows from ``first`` on taken from `other`, or zero, as padding leaves them."""
    changed = []
    for number, mine in enumerate(given.tensors):
        tensor = mine
        if given.holds_samples(mine):
            tensor = torch.empty_like(mine).copy_(mine)
            tensor[first:] = 0 if other is None else other.tensors[number][first:]
        changed.append(tensor)
    return given.with_tensors(changed)


def _same_answers(
    step: _Step, tail: Tail, in_eval: EvalPlan, whole: StepResult, values: tuple[torch.Tensor, ...]
) -> None:
    kept = [value.clone() for value in values]
    cut = f"the model cut after {tail.boundary!r}"
    try:
        features = tail.values.one_or_all(values)
        # The tail does not make calls of the prefix, so no single call needs eval.
        split = step.taken(tail, (features,), {}, EvalPlan(modules=in_eval.modules))
    except CaptureError:
        raise
    except Exception as error:  # the user's forward, on a model without its prefix
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Refuted(f"{cut} does not run: {reason}") from error
    pairs = zip(whole.answers, split.answers, strict=False)
    if len(whole.answers) != len(split.answers) or not all(same_bits(a, b) for a, b in pairs):
        raise Refuted(f"{cut} gives another answer than the whole one")
    for name in {**whole.gradients, **split.gradients}:
        gradient, other = whole.gradients.get(name), split.gradients.get(name)
        if (gradient is None) != (other is None):
            raise Refuted(
                f"{cut} gives {'no' if other is None else 'a'} gradient of {name!r}, unlike it whole"
            )
        if gradient is not None and not same_bits(gradient, other):
            raise Refuted(f"{cut} gives another gradient of {name!r}")
    for name, tensors in split.left.items():
        others = whole.left.get(name, [])
        if len(tensors) != len(others) or not all(map(same_bits, others, tensors)):
            raise Refuted(f"{cut} leaves another value in {name!r}")
    if not all(same_bits(a, b) for a, b in zip(kept, values, strict=True)):
        raise Refuted(f"{cut} writes into what it was given")


class _Step:
    """Training step without the optimizer step. The model is restored afterwards."""

    def __init__(self, model: nn.Module, tail: Tail, *, training: bool, autocast: torch.dtype | None) -> None:
        self._model, self._tail = model, tail
        self._training, self._autocast = training, autocast

    def taken(self, run: nn.Module, args: Sequence[object], kwargs: object, in_eval: EvalPlan) -> StepResult:
        """Run the step with the model or with its tail.

        Raises:
            CaptureError: If the result depends on no trainable parameter.
        """
        model = self._model
        device = next(p for p in model.parameters() if p.requires_grad).device
        with state_kept(model) as kept, no_fast_path(), torch.enable_grad():
            for training in (True, self._training):  # some modules drop cached state on a switch
                switch(model, training=training)
            keep_in_eval(model, list(in_eval.modules))
            seed(0)
            ships = self._tail.values.ships
            with (
                calls_in_eval(model, in_eval.calls),
                _Crossing(model, ships, tensors_in((args, kwargs))) as crossing,
                unattended(model),
            ):
                with autocasting(device, self._autocast):
                    returned = tensors_in(run(*args, **dict(kwargs)))  # type: ignore[call-overload]
                answers = [part for tensor in returned for part in dense_parts(tensor)]
                self._loss(answers, whole=run is model).backward()
                gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            left = _left(kept)
        return StepResult(
            answers=[t.detach() for t in answers],
            gradients=gradients,
            crossing=crossing.with_gradient(),
            values=crossing.values(),
            left=left,
        )

    def _loss(self, answers: Sequence[torch.Tensor], *, whole: bool) -> Any:
        # Squares, so that a gradient depends on the values. Scaled, to stay finite in half precision.
        terms = [(t.float() / 16).square().mean() for t in answers if t.requires_grad]
        if not terms and whole:
            raise CaptureError("the model's answer does not depend on its trainable parameters")
        if not terms:
            raise CaptureError(
                f"the model cut after {self._tail.boundary!r} gives an answer without a gradient"
            )
        return torch.stack(terms).sum()


def _left(kept: SavedState) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    written = kept.written()
    for each in (*(each for each in kept.tensors if each.name in written), *kept.left()):
        found.setdefault(each.name, []).append(each.tensor.detach().clone())
    return found


class _Crossing(contextlib.ExitStack):
    """Record, during a run of the whole model, the crossing tensors, and which of them require a gradient.

    Results of frozen layers do not, unless a hook on them requests it. Activation checkpointing needs such a
    hook: otherwise trained layers after it get no gradient.
    """

    def __init__(
        self, model: nn.Module, ships: Sequence[CrossingTensor], given: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._ships = {ship.source: ship for ship in ships}
        self._found: dict[TensorSource, tuple[bool, torch.Tensor]] = {}
        for source in self._ships:
            if source.path is None and source.leaf < len(given):
                self._found[source] = False, given[source.leaf].clone()
        for path in {source.path for source in self._ships if source.path is not None}:
            # Our hook runs last, after the user's own hooks have changed the result.
            self.callback(model.get_submodule(path).register_forward_hook(self._look(path)).remove)

    def with_gradient(self) -> tuple[bool, ...]:
        return tuple(source in self._found and self._found[source][0] for source in self._ships)

    def values(self) -> tuple[torch.Tensor, ...] | None:
        if self._found.keys() != self._ships.keys():
            return None
        return tuple(self._found[source][1] for source in self._ships)

    def _look(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        numbers = itertools.count()

        def look(_module: nn.Module, _args: Any, result: Any) -> None:
            number = next(numbers)
            for leaf, tensor in enumerate(tensors_in(result)):
                source = TensorSource(path=path, number=number, leaf=leaf)
                if source in self._ships:
                    value = tensor.detach()
                    # A later operator may write into it.
                    kept = value.clone() if self._ships[source].overwritten else value
                    self._found[source] = tensor.requires_grad, kept

        return look
