"""Convert one recorded operator to a node of a graph, with its problem and its cost."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import FlopCounterMode

from upriver.errors import ProgramError
from upriver.program.capture.export import ROOT
from upriver.program.eval_mode import no_fast_path
from upriver.program.graph.call_validator import check_call
from upriver.program.graph.liveness import Place, is_heavy
from upriver.program.graph.operators import ALLOWED
from upriver.program.graph.schema import Node, TensorSpec, Value, encode_argument

_READERS = ("item.default", "_local_scalar_dense.default")
"""Operators that convert a tensor to a Python number."""


def merge_parts(graph: torch.fx.Graph) -> None:
    """Give each part of a result with several parts a single name."""
    for fx in graph.nodes:
        parts: dict[Any, torch.fx.Node] = {}
        for user in list(fx.users):
            if user.target is operator.getitem:
                first = parts.setdefault(user.args[1], user)
                if first is not user:
                    user.replace_all_uses_with(first)


def is_operator(fx: torch.fx.Node) -> bool:
    """Return whether a node calls an operator. A node that only names a part of a result does not."""
    return fx.op == "call_function" and fx.target is not operator.getitem


def place_of(fx: torch.fx.Node) -> Place:
    """Return the module calls that an operator ran in."""
    stack = fx.meta.get("nn_module_stack") or {}
    return tuple(
        (call, path.removeprefix(f"{ROOT}."))
        for call, (path, _type) in stack.items()
        if path.startswith(f"{ROOT}.")
    )


def where(place: Place) -> str:
    """Return the innermost module of a place, for a message."""
    return f"module {place[-1][1]!r}" if place else "the model"


def node_of(fx: torch.fx.Node, needed: set[torch.fx.Node]) -> tuple[Node, str]:
    """Return an operator call as data, and why no program may hold it (empty if one may)."""
    name, why_not = _operator(fx)
    outputs: list[Value | None] = []
    try:
        outputs = _results(fx, needed)
        node = Node(
            op=name,
            args=[encode_argument(argument) for argument in fx.args],
            kwargs={key: encode_argument(value) for key, value in sorted(fx.kwargs.items())},
            outputs=outputs,
        )
        if not why_not:
            check_call(name, node.args, node.kwargs)
        return node, why_not
    except ProgramError as error:
        why_not = why_not or f"calls operator {name}: {error}"
    reads: list[Any] = [{"tensor": argument.name} for argument in fx.all_input_nodes]
    return Node(op=name, args=reads, kwargs={}, outputs=outputs or _unknown_results(fx, needed)), why_not


def _operator(fx: torch.fx.Node) -> tuple[str, str]:
    if not isinstance(fx.target, torch._ops.OpOverload):
        name = getattr(fx.target, "__name__", str(fx.target))
        return name, f"calls {name}, which is no ATen operator"
    name = f"{fx.target._schema.name.removeprefix('aten::')}.{fx.target._overloadname}"
    if fx.target.namespace == "aten" and name in ALLOWED:
        return name, ""
    if name in _READERS:
        return name, f"reads a number out of a tensor (operator {name}), so what it does depends on data"
    if torch.Tag.nondeterministic_seeded in fx.target.tags and not is_heavy(name):
        return name, f"calls operator {name}, which is random"
    return name, f"calls operator {name}, which no program may hold"


def _results(fx: torch.fx.Node, needed: set[torch.fx.Node]) -> list[Value | None]:
    value = fx.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [Value(name=fx.name, spec=_spec(value))]
    if not isinstance(value, list | tuple):
        raise ProgramError(f"gives a {type(value).__name__}, which is no tensor")
    outputs: list[Value | None] = [None] * len(value)
    for user in fx.users:
        if user not in needed:
            continue
        if user.target is not operator.getitem:
            raise ProgramError("gives a list that is read as a whole")
        outputs[int(user.args[1])] = Value(name=user.name, spec=_spec(user.meta["val"]))  # type: ignore[arg-type]
    return outputs


def _unknown_results(fx: torch.fx.Node, needed: set[torch.fx.Node]) -> list[Value | None]:
    """Return placeholders for results that no program can hold, so that other nodes can read them."""
    parts = [user for user in fx.users if user.target is operator.getitem and user in needed]
    nothing = TensorSpec(dtype="uint8", shape=[0], stride=[1])
    return [Value(name=part.name, spec=nothing) for part in parts or [fx]]


def _spec(value: object) -> TensorSpec:
    if not isinstance(value, torch.Tensor):
        raise ProgramError(f"gives a {type(value).__name__}, which is no tensor")
    if value.layout is not torch.strided:
        raise ProgramError(f"gives a tensor of layout {value.layout}, which is not dense")
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        raise ProgramError("gives a tensor whose size depends on data")
    return TensorSpec.of(value)


def flops_of(fx: torch.fx.Node) -> float:
    """Return the floating-point operations of one call, as torch counts them, from shapes alone."""
    if not isinstance(fx.target, torch._ops.OpOverload) or not is_heavy(fx.target._opname):
        return 0.0
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.node.map_arg((fx.args, dict(fx.kwargs)), lambda read: read.meta["val"])
    if fx.target is torch.ops.aten.scaled_dot_product_attention.default:
        return _attention_flops(*args[:3])
    mode = detect_fake_mode([read.meta["val"] for read in fx.all_input_nodes])
    if mode is None:
        return 0.0
    with mode, FlopCounterMode(display=False) as counter, torch.no_grad(), no_fast_path():
        fx.target(*args, **kwargs)
    return float(counter.get_total_flops())


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Return the operations of attention's two matrix products, regardless of the kernel."""
    *batch, length, width = query.shape
    return 2.0 * math.prod(batch) * length * key.shape[-2] * (width + value.shape[-1])
