"""What a model's modules do in one forward pass: who is called, in which order, with what shapes.

The pass is run at two batch sizes; a dimension that differs between them grows with the batch, which is how a
later stage can say what shape a skipped module would have given for any number of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError, ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of one module.

    Attributes:
        path: Name of the module in ``named_modules()`` (its first name, if it has several).
        number: 0 for the module's first call, 1 for its second.
        enter: Index of the event at which it began, in the order of all events.
        exit: Index of the event at which it ended.
        result: What it returned, tensors as :class:`Shape`.
        overwritten: Whether something wrote into its result in place afterwards.
    """

    path: str
    number: int
    enter: int
    exit: int
    result: Any
    overwritten: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A tensor whose dimensions may grow with the number of samples: ``size = base + slope * samples``."""

    dtype: torch.dtype
    base: tuple[int, ...]
    slope: tuple[int, ...]

    def at(self, samples: int) -> tuple[int, ...]:
        """The shape for so many samples."""
        return tuple(b + s * samples for b, s in zip(self.base, self.slope, strict=True))

    def samples_of(self, shape: Sequence[int]) -> int:
        """How many samples a tensor of this shape holds.

        Raises:
            CaptureError: If no dimension grows with the batch.
        """
        for size, base, slope in zip(shape, self.base, self.slope, strict=True):
            if slope:
                return (size - base) // slope
        raise CaptureError(f"a tensor of shape {tuple(shape)} does not depend on the number of samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """All calls of one pass, in the order in which they ended, and the shapes of the inputs."""

    calls: tuple[Call, ...]
    inputs: tuple[Any, ...]

    def of(self, path: str) -> list[Call]:
        """The calls of one module."""
        return [call for call in self.calls if call.path == path]


@contextlib.contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Put every module into eval, and back afterwards."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch off the fused transformer path, which eager eval takes and a captured graph does not."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def trace(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Trace:
    """Run ``model`` in eval on 2 and on 3 samples and write down its calls.

    Args:
        inputs: Example inputs with the samples in dimension 0; only their form matters.

    Raises:
        CaptureError: If the two passes call different modules.
        ModelError: If the model cannot be called with such an input.
    """
    two, three = (tuple(_resize(x, count) for x in inputs) for count in (2, 3))
    with torch.no_grad(), torch.random.fork_rng(devices=[]), in_eval(model), no_fast_path():
        first, second = _record(model, two), _record(model, three)
    if [call.path for call in first] != [call.path for call in second]:
        raise CaptureError("the model calls different modules for 2 and for 3 samples")
    calls = tuple(_merge(a, b) for a, b in zip(first, second, strict=True))
    return Trace(calls=calls, inputs=tuple(_shape(a, b) for a, b in zip(two, three, strict=True)))


def _resize(example: torch.Tensor, count: int) -> torch.Tensor:
    repeats = -(-count // max(1, example.shape[0]))
    return torch.cat([example] * repeats)[:count]


def _record(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[Call]:
    calls: list[Call] = []
    versions: list[tuple[torch.Tensor | None, int]] = []
    open_calls: list[int] = []
    numbers: dict[str, int] = {}
    events = 0

    def enter(_module: nn.Module, _args: Any) -> None:
        nonlocal events
        open_calls.append(events)
        events += 1

    def leave(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            nonlocal events
            number = numbers.get(path, 0)
            numbers[path] = number + 1
            calls.append(
                Call(path=path, number=number, enter=open_calls.pop(), exit=events, result=_detached(result))
            )
            versions.append((result, result._version) if isinstance(result, torch.Tensor) else (None, 0))
            events += 1

        return hook

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            # Ours run first on the way in and last on the way out, around whatever hooks the user has.
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave(path)).remove)
        try:
            model(*inputs)
        except Exception as error:  # whatever the user's forward raises
            given = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in inputs)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ModelError(f"the model cannot be called with {given}: {reason}") from error
    return [
        replace(call, overwritten=tensor is not None and tensor._version != version)
        for call, (tensor, version) in zip(calls, versions, strict=True)
    ]


def _detached(result: Any) -> Any:
    # Shapes are all that is needed; keeping the tensors would keep every activation alive.
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), result)


def _merge(a: Call, b: Call) -> Call:
    leaves_a, spec_a = pytree.tree_flatten(a.result)
    leaves_b, spec_b = pytree.tree_flatten(b.result)
    if spec_a != spec_b:
        raise CaptureError(f"module {a.path!r} returns different structures for 2 and for 3 samples")
    leaves = [
        _shape(x, y) if isinstance(x, torch.Tensor) else x for x, y in zip(leaves_a, leaves_b, strict=True)
    ]
    return replace(a, result=pytree.tree_unflatten(leaves, spec_a))


def _shape(two: torch.Tensor, three: torch.Tensor) -> Shape:
    slope = tuple(int(b) - int(a) for a, b in zip(two.shape, three.shape, strict=True))
    base = tuple(int(a) - 2 * s for a, s in zip(two.shape, slope, strict=True))
    return Shape(dtype=two.dtype, base=base, slope=slope)


def finished_before(calls: Trace, boundary: str) -> set[str]:
    """Paths of the modules that were called only before ``boundary`` ended, itself among them."""
    end = calls.of(boundary)[0].exit
    early = {call.path for call in calls.calls if call.exit <= end}
    return early - {call.path for call in calls.calls if call.exit > end}


def parameters_of(model: nn.Module) -> Mapping[str, nn.Module]:
    """Path to module, for modules that hold parameters of their own."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
