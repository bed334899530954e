"""Capture a whole model as one program that can be cut after any operator, and rebuild its result.

The program is proven before use, on the example and on random values of the same shapes. Every cut must leave
the bits of later values unchanged. The program's result must equal the model's result in eval. If a cut
between operators changes bits, stages end with modules only. If such a cut changes bits too, there is a
single stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError
from upriver.program.capture.export import is_cache
from upriver.program.capture.lowering import Recording, record
from upriver.program.capture.prefix import bound, checked, graph_of
from upriver.program.example_inputs import Example, Inputs, random_like
from upriver.program.freeze import check_initialized
from upriver.program.graph.alignment import through_cuts
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import GRANULARITIES, Granularity
from upriver.program.graph.weights_file import WeightsFile
from upriver.program.module_state.attribute_reads import AttributeReads
from upriver.program.module_state.attributes import AttributeSnapshot, attributes_of
from upriver.program.module_state.restoration import state_kept, trial
from upriver.program.tensor_layouts import refusing, same_bits

Constant: TypeAlias = "bool | int | float | str | None"
"""Non-tensor values that a result may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedModel:
    """A model, captured for one form of inputs.

    Attributes:
        reference: Outputs of the program for `example`.
        places: For each tensor of a result, in order, its index among the program's outputs.
        returned: Result of the model itself for `example`.
        weights: The model's own tensors that the program reads, by key in the weights file.
        attributes: Other attributes that the model's forward read.
    """

    program: Program
    example: Example = field(repr=False)
    reference: tuple[torch.Tensor, ...] = field(repr=False)
    places: tuple[int, ...]
    returned: ModelAnswer = field(repr=False)
    granularity: Granularity
    weights: Mapping[str, torch.Tensor] = field(repr=False)
    attributes: AttributeSnapshot = field(repr=False)
    autocast: torch.dtype | None = None

    def answer(self, given: Sequence[torch.Tensor]) -> Any:
        """Return the model's result, built from the outputs of its program."""
        return self.returned.with_tensors([given[place] for place in self.places])


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Result of a model, flattened."""

    leaves: tuple[torch.Tensor | Constant, ...]
    form: pytree.TreeSpec

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among its leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def constants(self) -> list[Constant]:
        """The leaves that are not tensors."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result rebuilt with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.form)


@refusing("the model cannot be captured")
def capture_whole(model: nn.Module, inputs: Inputs, *, autocast: torch.dtype | None = None) -> CapturedModel:
    """Capture a model in eval and prove every cut. Leave the model unchanged.

    Args:
        model: The user's model. Its parameters are not copied, so they must not change.

    Raises:
        CaptureError: If it cannot be captured, or its program gives other bits. The message says why.
        ModelError: If a parameter is not initialized yet.
        ConfigError: If a model cannot be called with ``inputs``.
    """
    example = Example.of(inputs)
    check_initialized(model)
    reads = AttributeReads()
    answer = _answer_of(model, example, autocast, reads)  # first, to find out whether the model runs
    recording = checked(record(model, example, autocast=autocast), whole=model)
    random = random_like(example, torch.Generator().manual_seed(0))
    try:
        compared = [(example, answer), (random, _answer_of(model, random, autocast))]
    except CaptureError:  # it rejects random values: only the example is compared
        compared = [(example, answer)]
    places = tuple(recording.chain.outputs.index(name) for name in recording.answers)
    program, reference, granularity = _proven(recording, model, places, compared)
    return CapturedModel(
        program=program,
        example=example,
        reference=reference,
        places=places,
        returned=answer,
        granularity=granularity,
        weights=recording.tensors,
        attributes=attributes_of(reads, model),
        autocast=autocast,
    )


def _proven(
    recording: Recording,
    model: nn.Module,
    places: Sequence[int],
    compared: Sequence[tuple[Example, ModelAnswer]],
) -> tuple[Program, tuple[torch.Tensor, ...], Granularity]:
    """Return the finest program whose cuts all hold, its outputs for the first example, and its cuts."""
    weights, device = WeightsFile(recording.tensors), compared[0][0].tensors[0].device
    for granularity in GRANULARITIES:
        graph = graph_of(recording, model, weights.digest, device=device, granularity=granularity)
        program = bound(graph, weights, device)
        try:
            given = [through_cuts(program, example) for example, _ in compared]
            break
        except CaptureError:
            if granularity == GRANULARITIES[-1]:
                raise
    for (_, answer), tensors in zip(compared, given, strict=True):
        _check_alike(compared[0][1], answer, [tensors[place] for place in places])
    return program, given[0], granularity


def _check_alike(first: ModelAnswer, answer: ModelAnswer, given: Sequence[torch.Tensor]) -> None:
    """Raise :class:`CaptureError` unless the program gave the model's result.

    The structure and the constants of the result must not depend on input values.
    """
    wanted = answer.tensors
    if (first.form, first.constants) != (answer.form, answer.constants):
        raise CaptureError(
            "the form of the model's answer, or a constant in it, depends on the values of its input"
        )
    if len(wanted) != len(given) or not all(same_bits(a, b) for a, b in zip(wanted, given, strict=True)):
        raise CaptureError("the captured model gives another answer than the model itself")


def _answer_of(
    model: nn.Module, example: Example, autocast: torch.dtype | None, reads: AttributeReads | None = None
) -> ModelAnswer:
    """Return the model's result in eval. Leave the model and the example unchanged.

    Args:
        reads: Records the attributes that the model reads. The model then runs a second time, and must not
            count.

    Raises:
        CaptureError: If it does not run, returns a value that no program can give, or counts.
    """
    with trial(model, example.tensors[0].device, autocast):
        answer = _run(model, example)
        if reads is not None:
            with state_kept(model) as between:
                with reads.noting():
                    _run(model, example)
                _check_counts_nothing(between.counted())
                behind = attributes_of(reads, model)
    if reads is not None:
        reads.written = behind.moved()
    leaves, form = pytree.tree_flatten(answer)
    for leaf in leaves:
        if is_cache(leaf):
            raise CaptureError(
                f"the model's answer holds a {type(leaf).__name__}, a cache of keys and values: switch it "
                "off (use_cache=False, in the model's configuration or among its inputs)"
            )
        if not isinstance(leaf, torch.Tensor | bool | int | float | str | None):
            raise CaptureError(
                f"the model's answer holds a {type(leaf).__name__}; it may hold tensors, numbers and words, "
                "in tuples, lists, dicts and classes that torch.utils._pytree knows"
            )
    return ModelAnswer(tuple(leaves), form)


def _run(model: nn.Module, example: Example) -> Any:
    call = example.with_tensors([tensor.clone() for tensor in example.tensors])
    try:
        return model(*call.args, **call.kwargs)
    except Exception as error:  # any error of the user's forward
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CaptureError(f"the model does not run: {reason}") from error


def _check_counts_nothing(counting: Mapping[str, str]) -> None:
    for path, name in counting.items():
        what = f"attribute {name!r} of module {path!r}" if path else f"its attribute {name!r}"
        raise CaptureError(f"the model changes {what} while it runs")
