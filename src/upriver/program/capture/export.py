"""Record a model's forward pass with ``torch.export``: the wrapper, the hooks, and the early exit.

The wrapper calls the user's model as the example does, and returns the requested tensors. These are leaves of
module results or of the model's result. The forward pass ends as soon as all of them exist. So later code,
such as control flow that depends on data, need not be captured.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from upriver._threads.forks import ForkSafeLock
from upriver.errors import CaptureError
from upriver.program.eval_mode import in_eval, no_fast_path
from upriver.program.example_inputs import Example, TensorSource, tensors_in
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.devices import seed
from upriver.program.module_state.restoration import state_kept

ROOT = "model"
"""Name of the user's model in the wrapper, and first part of each path that export records."""

CAPTURED = 1
"""Seed of all generators while a model is recorded. A proof uses another seed. So it finds a number that
Python drew and that is a constant in the graph."""

_TORCH_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""Loggers that write pages if a model cannot be captured. Each has a level of its own."""


class _Left(BaseException):
    """Signal that all requested tensors exist.

    Not an `Exception`, so that no ``except Exception`` catches it.
    """


@dataclass(slots=True)
class ExportNotes:
    """Facts recorded next to the graph. Not plain attributes, because export restores those of a module.

    Attributes:
        entered: Module calls that have begun and not ended: the current position of a pass.
        num_answers: Number of tensors in the model's result.
    """

    entered: list[str] = field(default_factory=list)
    num_answers: int = 0


class Observed(nn.Module):
    """Wrap the user's model to return the tensors that ``sources`` name, then its own result if requested.

    The tensors of caches in the result come last. They are not outputs of a program. But no cut may lie after
    an operator that makes one of them.
    """

    def __init__(
        self, model: nn.Module, example: Example, sources: Sequence[TensorSource], *, whole: bool
    ) -> None:
        """Prepare a pass.

        Args:
            whole: True if the model's result follows. Otherwise the pass ends with the last source.
        """
        super().__init__()
        self.model = model
        self.example = example
        self.sources = tuple(sources)
        self.whole = whole
        self.notes = ExportNotes()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the requested tensors, computed from the example's tensors."""
        call = self.example.with_tensors(inputs)
        # Copies, since in-place code could change the tensors later. The copies are removed from the graph.
        kept = {source: inputs[source.leaf].clone() for source in self.sources if source.path is None}
        tracer = get_proxy_mode()
        stack = tracer.tracer.module_stack if tracer is not None else {}
        depth = len(stack)
        answer = None
        with self._hooks(kept):
            try:
                answer = self.model(*call.args, **call.kwargs)
            except _Left:
                # The tracer records entry into each module. After an exception it misses the exit.
                while len(stack) > depth:
                    stack.popitem()
        missing = [str(source) for source in self.sources if source not in kept]
        if missing:
            raise CaptureError(f"the model gave no {missing[0]!r}")
        given = [*(kept[source] for source in self.sources), *(self._answers(answer) if self.whole else ())]
        # Copy again: export fails on a result that comes straight out of a region with another grad mode or
        # autocast.
        return tuple(tensor.clone() for tensor in given)

    def _answers(self, answer: Any) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(answer, is_leaf=is_cache)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise CaptureError(f"the model's answer, a {type(answer).__name__}, holds no tensor")
        self.notes.num_answers = len(tensors)
        return tensors + [tensor for leaf in leaves if is_cache(leaf) for tensor in _held_by(leaf)]

    @contextlib.contextmanager
    def _hooks(self, kept: dict[TensorSource, torch.Tensor]) -> Iterator[None]:
        wanted: dict[str, list[TensorSource]] = {}
        for source in self.sources:
            if source.path is not None:
                wanted.setdefault(source.path, []).append(source)
        numbers = dict.fromkeys(wanted, -1)
        entered = self.notes.entered = []

        def keep(path: str, result: Any) -> None:
            numbers[path] += 1
            tensors = tensors_in(result)
            for source in wanted[path]:
                if source.number == numbers[path] and source.leaf < len(tensors):
                    kept[source] = tensors[source.leaf].clone()
            if not self.whole and len(kept) == len(set(self.sources)):
                raise _Left

        with contextlib.ExitStack() as hooks:
            for path, module in self.model.named_modules():
                hooks.callback(
                    module.register_forward_pre_hook(
                        lambda _module, _args, path=path: entered.append(path), prepend=True
                    ).remove
                )

                def leave(_module: nn.Module, _args: Any, result: Any, path: str = path) -> None:
                    entered.pop()
                    if path in wanted:
                        keep(path, result)

                # Our hooks run last on exit, after the user's own hooks have changed the result.
                hooks.callback(module.register_forward_hook(leave).remove)
            yield


def is_cache(value: Any) -> bool:
    """Return whether this is a cache of keys and values, of any library."""
    return type(value).__name__.endswith("Cache")


def _held_by(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors among an object's attributes, and those nested in them."""
    if isinstance(value, torch.Tensor) or depth == 0:
        return [value] if isinstance(value, torch.Tensor) else []
    inner: list[Any] = []
    if isinstance(value, list | tuple):
        inner = list(value)
    elif hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    return [tensor for item in inner for tensor in _held_by(item, depth - 1)]


def export(
    model: nn.Module,
    example: Example,
    sources: Sequence[TensorSource],
    *,
    whole: bool,
    autocast: torch.dtype | None = None,
) -> tuple[torch.export.ExportedProgram, ExportNotes]:
    """Record the path to ``sources`` (and to the model's result), in eval, functional, with its casts.

    The casts that autocast makes become operators of the graph, since the decompositions run under autocast
    too. So the graph gives the same bits with autocast off.

    Other threads may compute meanwhile and get their usual bits. They must not use ``model``: while torch
    records, its parameters hold no values. Only one pass records at a time, since torch's recording is not
    thread-safe.

    Raises:
        CaptureError: If torch cannot record it. The message says why.
    """
    wrapper = Observed(model, example, sources, whole=whole)
    tensors = _distinct(example.tensors)
    with (
        _ONE_AT_A_TIME,
        torch.no_grad(),
        state_kept(model),
        _quiet(),
        _backends_kept(),
        in_eval(wrapper),
        no_fast_path(),
        autocasting(tensors[0].device, autocast),
    ):
        seed(CAPTURED)
        try:
            exported: torch.export.ExportedProgram = torch.export.export(wrapper, tensors, strict=False)
            _prepare(exported)
            exported = exported.run_decompositions({})
            _pass_on_in_dropouts(exported)
        except CaptureError:
            raise
        except Exception as error:  # export raises any error of the user's code or its own
            entered = wrapper.notes.entered
            inside = entered[-1] if entered else ""
            raise CaptureError(_reason(error, entered), module=inside or None) from error
    return exported, wrapper.notes


_MARKED = {"memory_format": torch.preserve_format}
"""Mark of the copies that stand for a Dropout. The user's code makes copies without it."""


def _prepare(exported: torch.export.ExportedProgram) -> None:
    """Mark inactive Dropouts, and forbid cuDNN, before operators are decomposed.

    A decomposed Dropout would be a copy without a mark. The decomposition of an operator depends on this
    process's cuDNN setting, and a program must not depend on where it was recorded.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for fx in module.graph.nodes:
                if fx.target is torch.ops.aten.clone.default and fx.kwargs == _MARKED:
                    fx.kwargs = {}
                elif fx.target is torch.ops.aten.dropout.default and fx.args[2] is False:
                    fx.target, fx.args, fx.kwargs = torch.ops.aten.clone.default, fx.args[:1], _MARKED
                elif isinstance(fx.target, torch._ops.OpOverload):
                    _forbid_cudnn(fx, fx.target._schema.arguments)
            module.recompile()


def _pass_on_in_dropouts(exported: torch.export.ExportedProgram) -> None:
    """Make each Dropout return its input, as the user's model does in eval.

    A copy would cost memory. It may have other strides and another alignment, and so other low bits.
    """
    marked = [
        fx
        for fx in exported.graph.nodes
        if fx.target is torch.ops.aten.clone.default and fx.kwargs == _MARKED
    ]
    for fx in marked:
        fx.target, fx.kwargs = torch.ops.aten.alias.default, {}
    if any(fx.meta["val"].stride() != fx.args[0].meta["val"].stride() for fx in marked):
        given = [fx.meta["val"] for fx in exported.graph.nodes if fx.op == "placeholder"]
        FakeTensorProp(exported.graph_module, detect_fake_mode(given)).propagate_dont_convert_inputs(*given)


_CUDNN = ("cudnn_enabled", "cudnn_enable")
"""Names of the operator argument that allows or forbids cuDNN."""


def _forbid_cudnn(fx: torch.fx.Node, arguments: Sequence[Any]) -> None:
    for index, argument in enumerate(arguments):
        if argument.name in _CUDNN:
            defaults = [other.default_value for other in arguments[len(fx.args) : index]]
            fx.args = (*fx.args[:index], *defaults, False, *fx.args[index + 1 :])


def _distinct(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return detached inputs, with a copy where a tensor repeats: it counts as two inputs."""
    seen: set[int] = set()
    given = []
    for tensor in tensors:
        given.append(tensor.detach().clone() if id(tensor) in seen else tensor.detach())
        seen.add(id(tensor))
    return tuple(given)


def _reason(error: Exception, entered: Sequence[str]) -> str:
    if operator := _operator_that_runs_functions(error):
        return f"the model calls {operator}, which is no ATen operator"
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    where = f" in module {entered[-1]!r}" if entered and entered[-1] else ""
    if "data-dependent" in str(error).lower() or type(error).__name__.startswith("GuardOnDataDependent"):
        return f"torch.export could not capture the model: control flow depends on data{where}: {reason}"
    return f"torch.export could not capture the model{where}: {reason}"


def _operator_that_runs_functions(error: Exception) -> str:
    """Return the operator, such as ``torch.cond``, whose functions torch failed to compile. Empty if none.

    The operator compiles its functions even during recording, and fails on any hook of a module that they
    call.
    """
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("torch._higher_order_ops."):
                return frame.f_code.co_name
    return ""


_ONE_AT_A_TIME = ForkSafeLock()
"""Held while torch records: torch changes and restores flags, filters and tables of the whole process."""


class _Thread(threading.local):
    """State of the recording thread only."""

    recording = False


_THREAD = _Thread()


@contextlib.contextmanager
def _backends_kept() -> Iterator[None]:
    """Let torch record without switching oneDNN, NNPACK and cuDNN off, as it does for all threads.

    Otherwise another kernel would compute a convolution of another thread, with other low bits. The recording
    is the same, because operators are chosen before kernels are.
    """
    tracing = importlib.import_module("torch.export._trace")  # imported late, to keep startup short
    backends_off = tracing._ignore_backend_decomps

    def elsewhere() -> Any:
        return contextlib.nullcontext() if _THREAD.recording else backends_off()

    tracing._ignore_backend_decomps = elsewhere  # type: ignore[attr-defined]
    _THREAD.recording = True
    try:
        yield
    finally:
        _THREAD.recording = False
        tracing._ignore_backend_decomps = backends_off  # type: ignore[attr-defined]


class _Muted:
    """Drop the text that one thread writes to a stream, and pass on that of other threads."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text, or only report that it was written."""
        if threading.get_ident() == self._thread or self._stream is None:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's own warnings, logs and printed graphs. The user gets one line with the reason."""
    loggers = [logging.getLogger(name) for name in ("torch", *_TORCH_LOGGERS)]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(cast("TextIO", _Muted(sys.stdout))),
        contextlib.redirect_stderr(cast("TextIO", _Muted(sys.stderr))),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
