"""Record the module calls of one forward pass: their order, inputs and shapes.

The pass runs at two batch sizes. A dimension that differs between them grows with the batch. So the shape of
a skipped module's result is known for any number of samples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError, ModelError
from upriver.program.compiled_code import as_ever, entering, uncompiled
from upriver.program.example_inputs import Example, TensorSource, tensors_in
from upriver.program.freeze import check_initialized, keep_in_eval
from upriver.program.module_state.attribute_reads import AttributeReads
from upriver.program.module_state.attributes import attributes_of
from upriver.program.module_state.restoration import SavedState, state_kept, trial
from upriver.program.split.dataflow import DataFlow, Recorder, TensorVersion, opaque_in
from upriver.program.tensor_layouts import unusual


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCall:
    """One call of one module.

    Attributes:
        path: Name of the module in ``named_modules()`` (its first name, if it has several).
        index: Index of this call among all calls, in the order in which they began. 0 is the model itself.
        enter: Index of the event at which it began, in the order of all events.
        exit: Index of the event at which it ended.
        leaves: Its result, flattened, with tensors as :class:`Shape`.
        form: Structure of the result. Only tensors may fill it: a class may inspect its fields.
        values: The tensors of its result, in order, as they were when it ended.
        opaque: Reason why no stub can return its result, such as the type of a part. Usually empty.
        overwritten_in: Calls in which an operator wrote into its result in place afterwards. A write that no
            operator shows counts as the model's own.
    """

    path: str
    number: int
    index: int
    parent: int
    enter: int
    exit: int
    leaves: tuple[Any, ...]
    form: pytree.TreeSpec
    values: tuple[TensorVersion, ...] = ()
    opaque: str = ""
    overwritten_in: frozenset[int] = frozenset()

    @property
    def overwritten(self) -> bool:
        """True if an operator wrote into its result in place afterwards."""
        return bool(self.overwritten_in)

    def sources(self) -> list[TensorSource]:
        """Return the names of the tensors in the call's result."""
        return [
            TensorSource(path=self.path, number=self.number, leaf=leaf) for leaf in range(len(self.values))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shape of a tensor whose dimensions may grow with the batch: ``size = base + slope * samples``."""

    dtype: torch.dtype
    base: tuple[int, ...]
    slope: tuple[int, ...]

    def at(self, samples: int) -> tuple[int, ...]:
        """Return the shape for a number of samples."""
        return tuple(b + s * samples for b, s in zip(self.base, self.slope, strict=True))

    def num_bytes(self, samples: int) -> int:
        """Return the bytes of the tensor for a number of samples."""
        return math.prod(self.at(samples)) * self.dtype.itemsize

    @property
    def batched(self) -> bool:
        """True if any dimension grows with the number of samples."""
        return any(self.slope)

    @property
    def dim(self) -> int:
        """The dimension that holds the samples.

        Raises:
            CaptureError: If several or no dimensions grow, or the dimension holds more than the samples.
        """
        growing = [d for d, slope in enumerate(self.slope) if slope]
        if len(growing) != 1 or self.base[growing[0]] != 0 or self.slope[growing[0]] < 1:
            raise CaptureError(f"a tensor of shape {self} does not hold its samples in one dimension")
        return growing[0]

    def samples_of(self, shape: Sequence[int]) -> int:
        """Return the number of samples in a tensor of this shape.

        Raises:
            CaptureError: If no dimension grows with the batch.
        """
        for size, base, slope in zip(shape, self.base, self.slope, strict=True):
            if slope:
                return (size - base) // slope
        raise CaptureError(f"a tensor of shape {tuple(shape)} does not depend on the number of samples")

    def __str__(self) -> str:
        sizes = []
        for base, slope in zip(self.base, self.slope, strict=True):
            grown = "n" if slope == 1 else f"{slope}n"
            sizes.append(str(base) if not slope else f"{grown}+{base}" if base else grown)
        return f"({', '.join(sizes)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Calls of one pass in the order in which they ended, shapes of the inputs, and the data flow.

    Attributes:
        counting: Modules that keep state from one pass to the next, with the attribute that holds it. The
            state is a number that changes, a list that grows, or a tensor that is read and replaced.
    """

    calls: tuple[ModuleCall, ...]
    inputs: tuple[Shape, ...]
    example: Example
    flow: DataFlow
    counting: Mapping[str, str] = field(default_factory=dict)
    reads: AttributeReads = field(default_factory=AttributeReads)

    def of(self, path: str) -> list[ModuleCall]:
        """Return the calls of one module."""
        return [call for call in self.calls if call.path == path]

    @property
    def whole(self) -> ModuleCall:
        """The call of the model itself."""
        return self.calls[-1]


def trace(model: nn.Module, example: Example, *, autocast: torch.dtype | None = None) -> Trace:
    """Run ``model`` in eval on 2 and on 3 samples and record its calls.

    Args:
        example: Inputs. Only shapes and types of tensors matter, and the constants between them.

    Raises:
        CaptureError: If the two passes call different modules, or the model runs but cannot be watched.
        ModelError: If the model cannot be called with such an input, or a parameter is not initialized yet.
    """
    check_initialized(model)
    two, three, reads = example.resized(2), example.resized(3), AttributeReads()
    with trial(model, example.tensors[0].device, autocast) as kept, uncompiled():
        first, flow = _watch(model, two, example, kept)
        with state_kept(model) as between:
            second, again = _watch(model, three, example, between, reads)
            counting = between.counted() | again.carried()
            behind = attributes_of(reads, model)
    reads.written = behind.moved()
    if [call.path for call in first] != [call.path for call in second]:
        raise CaptureError("the model calls different modules for 2 and for 3 samples")
    return Trace(
        calls=tuple(_merge(a, b) for a, b in zip(first, second, strict=True)),
        inputs=tuple(_shape(a, b) for a, b in zip(two.tensors, three.tensors, strict=True)),
        example=two,
        flow=flow,
        counting=counting,
        reads=reads,
    )


def watch_training(
    model: nn.Module, example: Example, in_eval: Sequence[str], *, autocast: torch.dtype | None = None
) -> tuple[list[ModuleCall], DataFlow]:
    """Return the calls and the data flow of one pass in training mode. Leave the model unchanged.

    Raises:
        ModelError: If the model cannot be called with such an input in training.
    """
    with trial(model, example.tensors[0].device, autocast, training=True) as kept, uncompiled():
        keep_in_eval(model, list(in_eval))
        return _watch(model, example, example, kept)


def written_in_training(
    model: nn.Module, example: Example, *, autocast: torch.dtype | None
) -> frozenset[str]:
    """Return names of the tensors that a forward pass in training changes. Empty if the pass fails."""
    call = example.with_tensors([tensor.clone() for tensor in example.tensors])
    with (
        trial(model, call.tensors[0].device, autocast, training=True) as kept,
        contextlib.suppress(Exception),  # any error of the user's forward
    ):
        model(*call.args, **call.kwargs)
        return kept.written()
    return frozenset()


def _watch(
    model: nn.Module, example: Example, given: Example, kept: SavedState, reads: AttributeReads | None = None
) -> tuple[list[ModuleCall], DataFlow]:
    run = _Pass(model, example, given, kept)
    with contextlib.nullcontext() if reads is None else reads.noting(run.where):
        run.run()
    return run.calls, run.recorder.flow(changed=kept.written(), left=kept.left())


class _Pass:
    """One forward pass, watched by hooks on every module.

    Args:
        given: The user's inputs, which may hold another number of samples.
    """

    def __init__(self, model: nn.Module, example: Example, given: Example, kept: SavedState) -> None:
        self.model = model
        self.example, self.given = example, given
        self.calls: list[ModuleCall] = []
        self.recorder = Recorder(kept.tensors, example.tensors)
        self._draws = kept.draws()
        self._open: list[tuple[int, int]] = []  # index, event
        self._numbers: dict[str, int] = {}
        self._begun = 0
        self._events = 0
        self._results: list[list[tuple[torch.Tensor, int, int]]] = []
        self._inside: dict[str, str] = {}  # modules called by an operator's functions, and its name

    def run(self) -> None:
        """Run the pass.

        Raises:
            CaptureError: If the model runs only when not watched.
            ModelError: With the error of the user's forward.
        """
        try:
            self._watched()
        except CaptureError:
            raise
        except Exception as error:  # any error of the user's forward or of the watching code
            raise self._failed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        self.calls = [
            replace(
                call,
                overwritten_in=frozenset[int]().union(*(self._overwritten_in(*each) for each in kept)),
                opaque=self._inside.get(call.path, call.opaque),
            )
            for call, kept in zip(self.calls, self._results, strict=True)
        ]
        self._results.clear()

    def _overwritten_in(self, result: torch.Tensor, version: int, since: int) -> frozenset[int]:
        """Return the calls that wrote into a result after so many operations, when it had that version."""
        if result._version == version:
            return frozenset()
        return self.recorder.calls_that_wrote(result, since=since) or frozenset({0})

    def _watched(self) -> None:
        with contextlib.ExitStack() as stack:
            for path, module in self.model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    where = f"module {path!r}" if path else "the model"
                    raise CaptureError(f"{where} is TorchScript, which cannot be watched while it runs")
                # Our hooks run first on entry and last on exit, around the user's hooks.
                stack.callback(module.register_forward_pre_hook(self._enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave(path)).remove)
            with self.recorder, entering(self.recorder.enter_compiled):
                self.model(*self.example.args, **self.example.kwargs)

    def where(self) -> tuple[int, int]:
        return (self._open[-1][0] if self._open else -1), self._events

    def _failed(self, reason: str) -> CaptureError | ModelError:
        """Return the error to raise. Run the model unwatched to find out whose fault it is."""
        if self._runs(self.example):
            return CaptureError(f"the model cannot be watched while it runs: {reason}")
        with torch.enable_grad():
            if self._runs(self.example):  # its forward differentiates
                return CaptureError(f"the model cannot be watched without gradients: {reason}")
        if self._runs(self.given):
            return CaptureError(f"the model does not run on {self.example.samples} samples: {reason}")
        return ModelError(f"the model cannot be called with {self.example.describe()}: {reason}")

    def _runs(self, example: Example) -> bool:
        call = example.resized(example.samples)  # copies, as the model may write into them
        try:
            with as_ever():
                self.model(*call.args, **call.kwargs)
        except Exception:  # any error of the user's forward
            return False
        return True

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        self._look_for_draws()
        if self.recorder.running:  # see `_note`
            return
        self._open.append((self._begun, self._events))
        self.recorder.call = self._begun
        self._begun += 1
        self._events += 1

    def _leave(self, path: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: Any, result: Any) -> Any:
            passed_on = isinstance(result, torch.Tensor) and any(
                result is given for given in tensors_in(args)
            )
            if passed_on:
                # A Dropout in eval returns its input. A view gives the result a number of its own, so that
                # readers of the two can be told apart.
                result = result.view_as(result)
            self._note(path, result)
            return result if passed_on else None

        return hook

    def _look_for_draws(self) -> None:
        """Record random draws since the last event. The innermost open call made them."""
        if self._open and (whose := self._draws.made()):
            self.recorder.draw(whose)

    def _note(self, path: str, result: Any) -> None:
        self._look_for_draws()
        if self.recorder.running:  # such calls can neither be told apart nor be skipped
            self._inside[path] = self.recorder.running
            return
        index, enter = self._open.pop()
        number = self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        parent = self._open[-1][0] if self._open else -1
        self.recorder.call = max(parent, 0)
        leaves, form = pytree.tree_flatten(result)
        tensors, opaque = tensors_in(result), opaque_in(result)
        if any(map(is_functorch_wrapped_tensor, tensors)):  # such tensors exist only inside functorch
            tensors = []
        self.calls.append(
            ModuleCall(
                path=path,
                number=number,
                index=index,
                parent=parent,
                enter=enter,
                exit=self._events,
                leaves=tuple(_form(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
                form=form,
                values=tuple(self.recorder.value(tensor) for tensor in tensors),
                opaque=opaque,
            )
        )
        since = self.recorder.num_operations
        known = (tensor for tensor in tensors if not tensor.is_inference())
        self._results.append([(tensor, tensor._version, since) for tensor in known])
        self._events += 1


@dataclass(frozen=True, slots=True)
class _Form:
    dtype: torch.dtype
    shape: tuple[int, ...]


def _form(tensor: torch.Tensor) -> _Form | str:
    """Return type and shape of a tensor. To keep the tensor would keep every activation alive."""
    return unusual(tensor) or _Form(tensor.dtype, tuple(tensor.shape))


def _merge(a: ModuleCall, b: ModuleCall) -> ModuleCall:
    if a.form != b.form:
        raise CaptureError(f"module {a.path!r} returns different structures for 2 and for 3 samples")
    leaves: list[Any] = []
    opaque = a.opaque or b.opaque
    for x, y in zip(a.leaves, b.leaves, strict=True):
        if isinstance(x, _Form) and isinstance(y, _Form):
            leaves.append(_shape(x, y))
            continue
        if not opaque and not (x is y or x == y):
            opaque = "number that depends on the batch"
        leaves.append(x)
    return replace(a, leaves=tuple(leaves), opaque=opaque)


def _shape(two: _Form | torch.Tensor, three: _Form | torch.Tensor) -> Shape:
    if len(two.shape) != len(three.shape):
        raise CaptureError("a tensor has another number of dimensions for 2 than for 3 samples")
    slope = tuple(int(b) - int(a) for a, b in zip(two.shape, three.shape, strict=True))
    base = tuple(int(a) - 2 * s for a, s in zip(two.shape, slope, strict=True))
    return Shape(dtype=two.dtype, base=base, slope=slope)
