"""Check a graph by running it on tensors without data: results of each operator, and cost of a run.

`upriver.program.graph.parser` has checked the file itself before.
Shapes and types must match the file's declarations. Strides must match too on the type of device of the
capture. One tensor, all tensors alive at once, and the operations of a micro-batch must stay under their
caps. Nothing is allocated: the tensors are torch's fake tensors, on the program's device (on the meta device
some operators give other strides).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from upriver.errors import ProgramError
from upriver.program.eval_mode import no_fast_path
from upriver.program.graph.autocast import autocast_dtype, autocasting
from upriver.program.graph.call_validator import check_arguments, check_call
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.schedule import Numbered, ScheduledNode, Values, bind, mark_last_uses, schedule
from upriver.program.graph.schema import DTYPES, Graph, Node, TensorSpec, Value, Weight

MAX_REMEMBERED = 20_000
"""Maximum of fake calls remembered. Torch keeps their results forever, in one table per process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFootprint:
    """Cost of a run of a graph, for one micro-batch.

    Attributes:
        flops: Floating-point operations of each stage: convolutions, matrix products and attention.
        work: Operations of the whole run, constants included. Other operators count their elements.
        live_bytes: Maximum of bytes alive at once, weights and constants included.
    """

    flops: tuple[float, ...]
    work: float
    live_bytes: int


def check(
    graph: Graph, *, device: str | torch.device = "cpu", caps: GraphCaps = DEFAULT_CAPS
) -> RunFootprint:
    """Run a graph without data and compare its declarations with the results of its operators.

    Raises:
        ProgramError: Naming the node that differs from its declaration, or exceeds the caps.
    """
    if FakeTensorMode.cache_info().size > MAX_REMEMBERED:
        FakeTensorMode.cache_clear()
    # No fallback kernels: they would run an operator without a shape rule on real memory.
    mode, meter = FakeTensorMode(allow_fallback_kernels=False), _Meter(caps)
    autocast = autocasting(device, autocast_dtype(graph.autocast))
    with silent(), mode, meter, torch.no_grad(), no_fast_path(), autocast:
        run = _DryRun(graph, torch.device(device), meter, caps)
        plan = schedule(graph)
        weights = {weight.name for weight in graph.weights}
        run.nodes(plan.constants, plan.kept | weights)
        flops = []
        for stage, nodes in zip(graph.stages, plan.stages, strict=True):
            before = meter.flops
            run.nodes(nodes, {*stage.live, *plan.kept, *weights})
            flops.append(meter.flops - before)
    return RunFootprint(flops=tuple(flops), work=meter.work, live_bytes=run.peak)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Stop torch from logging a page for each call that does not fit. The refusal is one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _DryRun:
    """Values without data, by name, and the bytes that they would need."""

    def __init__(self, graph: Graph, device: torch.device, meter: _Meter, caps: GraphCaps) -> None:
        self._device = device
        self._strict = device.type == graph.device
        self._meter = meter
        self._caps = caps
        self._memory = _Memory()
        self.peak = 0
        self._values: Values = {}
        given: list[Value | Weight] = [*graph.inputs, *graph.weights]
        for value in given:
            self._values[value.name] = value.spec.empty(device)
            self._memory.add(value.name, self._values[value.name])
        # A run's caller holds the inputs to its end.
        self._inputs = {value.name: self._values[value.name] for value in graph.inputs}

    def nodes(self, nodes: Sequence[Numbered], keep: Iterable[str]) -> None:
        """Run some nodes, then drop all their values except ``keep``."""
        steps = bind(nodes, {}, self._device)
        mark_last_uses(steps, nodes, keep)
        for step, (_, node) in zip(steps, nodes, strict=True):
            self._meter.begin(step.where)
            before = self._memory.nbytes
            results = self._call(step, node)
            for output, result in zip(node.outputs, results, strict=True):
                if output is not None:
                    _compare(step.where, output.spec, result, strides=self._strict)
                    self._memory.add(output.name, result)
            # A result is also among the tensors made, unless it is a view.
            self._bound(step.where, max(before + self._meter.aside, self._memory.nbytes))
            step.store(self._values, results)
            for name in step.done:
                if name not in self._inputs:
                    self._memory.drop(name)

    def _call(self, step: ScheduledNode, node: Node) -> Sequence[torch.Tensor]:
        try:
            args, kwargs = step.arguments(self._values)
            check_call(node.op, args, kwargs)
            check_arguments(node.op, args, kwargs, num_results=len(node.outputs))
            results = step.call(self._values)
        except ProgramError as error:
            raise ProgramError(f"{step.where}: {error}") from None
        except Exception as error:  # an operator may raise any error on arguments that do not fit
            raise step.refusal(error) from None
        if not isinstance(results, list | tuple):  # numbers alone may give a number
            raise ProgramError(f"{step.where}: gives a {type(results).__name__}, not a tensor")
        if len(results) != len(node.outputs):
            raise ProgramError(f"{step.where}: declares {len(node.outputs)} results, gives {len(results)}")
        return results

    def _bound(self, where: str, nbytes: int) -> None:
        self.peak = max(self.peak, nbytes)
        if nbytes > self._caps.live_bytes:
            raise ProgramError(
                f"{where}: {nbytes} bytes would be alive at once, at most {self._caps.live_bytes} are allowed"
            )


def _compare(where: str, spec: TensorSpec, made: torch.Tensor, *, strides: bool) -> None:
    if (
        not isinstance(made, torch.Tensor)
        or made.dtype != DTYPES[spec.dtype]
        or list(made.shape) != spec.shape
    ):
        got = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise ProgramError(f"{where}: declares {spec.dtype} {spec.shape}, gives {got}")
    # Strides are meaningless in a dimension of one element and in an empty tensor.
    steps = zip(spec.shape, spec.stride, made.stride(), strict=True)
    if strides and spec.numel and any(size > 1 and declared != step for size, declared, step in steps):
        raise ProgramError(f"{where}: declares strides {spec.stride}, gives {list(made.stride())}")


class _Memory:
    """Bytes of the storages of named values. A view adds none."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._storage_of: dict[str, int] = {}
        self._users: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # constant and unique while the value exists
        self._storage_of[name] = key
        self._users[key] += 1
        if self._users[key] == 1:
            self._nbytes[key] = storage.nbytes()
            self.nbytes += self._nbytes[key]

    def drop(self, name: str) -> None:
        key = self._storage_of.pop(name)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.nbytes -= self._nbytes.pop(key)


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations and memory of the operators that really run. A composite counts as its parts.

    Attributes:
        flops: Operations of convolutions, matrix products and attention so far.
        work: Operations of all operators so far.
        aside: Bytes of all tensors that the current node makes, including intermediate ones.
    """

    def __init__(self, caps: GraphCaps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._caps = caps
        self._where = ""
        self.flops = 0.0
        self.work = 0.0
        self.aside = 0

    def begin(self, where: str) -> None:
        self._where = where
        self.aside = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "aten" and not func.is_view:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        made = list(_tensors(result))
        for tensor in made:
            nbytes = tensor.numel() * tensor.itemsize
            self.aside += nbytes
            if nbytes > self._caps.tensor_bytes:
                raise ProgramError(
                    f"makes a tensor of {nbytes} bytes, at most {self._caps.tensor_bytes} are allowed"
                )
        flops = flops_of_call(func, args, kwargs, result)
        self.flops += flops
        elements = max((tensor.numel() for tensor in [*made, *_tensors(args)]), default=0)
        self.work += max(flops, elements * _window(func, args))
        if self.work > self._caps.flops:
            raise ProgramError(f"a micro-batch takes more than the {self._caps.flops:.3g} operations allowed")


def flops_of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return floating-point operations of a convolution, matrix product or attention; else zero."""
    if func._overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        shapes = [tensor.shape for tensor in args[:3]]
        return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if func._overloadpacket is torch.ops.aten._int_mm:
        rows, inner = args[0].shape
        return float(2 * rows * inner * args[1].shape[1])
    count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


_POOLS = {
    torch.ops.aten.max_pool2d_with_indices: 2,
    torch.ops.aten.max_pool3d_with_indices: 3,
    torch.ops.aten.avg_pool2d: 2,
    torch.ops.aten.avg_pool3d: 3,
}
"""Operators that read a window for each element, with its number of dimensions."""


def _window(func: Any, args: Sequence[Any]) -> int:
    """Return the number of elements read for each one made."""
    dimensions = _POOLS.get(func._overloadpacket)
    if dimensions is None:
        return 1
    sizes = [args[1]] if isinstance(args[1], int) else list(args[1])
    return int(math.prod(sizes)) if len(sizes) > 1 else int(sizes[0]) ** dimensions


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
