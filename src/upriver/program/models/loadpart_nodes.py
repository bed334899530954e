"""Number a network's computation nodes as LoADPart does, with the tensors that cross the cut after each.

Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
ICDCS 2022, sections III-B, III-D and V. The paper counts the nodes of MindSpore's graphs:

    - From 1, in execution order. 0 stands for the input. With a cut at the last node all nodes run on the
      device.
    - The bias of a convolution or of a linear layer is a node of its own. So is a flatten.
    - A concatenation is two nodes: in MindSpore one node makes a tuple of its inputs, and the next one joins
      them. The paper does not say so, but only then its numbers of SqueezeNet (5, 39, and 99 at the end) are
      right.
    - These are not nodes: other views, a Dropout in eval, a pooling that keeps the size, and constants.

A graph here holds a convolution and its bias as one operator. A cut between the two exists only in the
paper's numbering, and is never run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from upriver.program.capture.lowering import Recording, record
from upriver.program.example_inputs import Example, Inputs
from upriver.program.graph.call_validator import operator_of
from upriver.program.graph.liveness import MANY, Chain, lifetimes_of, live_at
from upriver.program.graph.schema import Node, reference

_TUPLE = "tuple"

_CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)
_JOINING = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"})
_RESHAPING = frozenset({"view", "_unsafe_view", "reshape", "flatten"})

_KINDS = {
    **dict.fromkeys(_CONVOLUTIONS, "conv"),
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv"), "matmul"),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div"), "element-wise"),
    **dict.fromkeys(
        (
            *("relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "gelu", "silu", "mish", "softplus"),
            *("sigmoid", "hardsigmoid", "log_sigmoid", "hardswish", "tanh", "hardtanh"),
            *("softmax", "_softmax", "log_softmax", "_log_softmax"),
        ),
        "activation",
    ),
}
"""The paper's kind of an operator (Table I), where no part of the operator's name gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperNode:
    """One node, and the cut after it.

    Attributes:
        number: The paper's ``p``. 0 is the input.
        kind: The paper's kind if it has one (Table I), else the operator's name.
        name: The module that it runs in. Its kind outside of all modules.
        cut_bytes: Bytes that cross the cut, per sample.
    """

    number: int
    kind: str
    name: str
    cut_bytes: float
    tensors: int
    runnable: bool


def paper_nodes(
    model: nn.Module, example: Inputs, *, autocast: torch.dtype | None = None
) -> tuple[PaperNode, ...]:
    """Return a model's numbered nodes in eval, the input first. Leave the model unchanged.

    Raises:
        CaptureError: If torch cannot record the whole model.
    """
    recording = record(model, Example.of(example), autocast=autocast)
    inputs = recording.chain.inputs
    before_all = PaperNode(
        number=0,
        kind="input",
        name="input",
        cut_bytes=sum(value.spec.nbytes for value in inputs) / recording.micro_batch,
        tensors=len(inputs),
        runnable=True,
    )
    return (before_all, *_numbered(recording))


def _numbered(recording: Recording) -> Iterator[PaperNode]:
    chain = recording.chain
    lifetimes, fixed = lifetimes_of(chain)
    steps = _steps(chain, fixed)
    live = live_at(lifetimes, {step.stop for step in steps})
    first_problem = min(recording.problems, default=len(chain.nodes))
    for number, step in enumerate(steps, start=1):
        crossing = live[step.stop]
        yield PaperNode(
            number=number,
            kind=step.kind,
            name=step.name,
            cut_bytes=sum(recording.sizes[value] for value in crossing) / recording.micro_batch,
            tensors=len(crossing),
            runnable=step.whole and step.stop <= first_problem and len(crossing) <= MANY,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Node of the paper, located in a chain of operators.

    Attributes:
        stop: Number of operators that have run at the cut after it.
        whole: False if that cut would lie inside the last of them: before a bias. The tensor that crosses
            there has the size of the one that crosses after the bias.
    """

    kind: str
    name: str
    stop: int
    whole: bool


def _steps(chain: Chain, fixed: frozenset[str]) -> list[_Step]:
    shapes = {value.name: value.spec.shape for value in chain.inputs}
    steps: list[_Step] = []
    for index, (node, place) in enumerate(zip(chain.nodes, chain.places, strict=True)):
        made = {value.name: value.spec.shape for value in node.made}
        shapes |= made
        kinds = () if fixed.issuperset(made) else _kinds(node, shapes)
        for kind in kinds:
            steps.append(
                _Step(
                    kind=kind,
                    name=place[-1][1] if place else kind,
                    stop=index if kind == _TUPLE else index + 1,
                    whole=kind in (_TUPLE, kinds[-1]),
                )
            )
    if steps:  # operators after the last node are not nodes; at its cut the result exists
        steps[-1] = replace(steps[-1], stop=len(chain.nodes))
    return steps


# ------------------------------------------------------------------------------------------ kinds


def _kinds(node: Node, shapes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the paper's nodes for an operator, in order. Empty for an operator without a node.

    Args:
        shapes: Shapes of all values that it reads and makes, except weights.
    """
    name = node.op.partition(".")[0]
    before: Sequence[int] = shapes.get(next(node.reads(), ""), ())
    after: Sequence[int] = next((shapes[value.name] for value in node.made), ())
    if name in _RESHAPING and len(before) > 2 and after == [before[0], math.prod(before[1:])]:
        return ("flatten",)
    if gives_view(node.op) or ("adaptive" in name and after == before):
        return ()
    if name in _JOINING:
        return (_TUPLE, "concat")
    kind = _kind(node, name, before)
    return (kind, "bias") if _has_bias(node, name) else (kind,)


def _kind(node: Node, name: str, before: Sequence[int]) -> str:
    if name in _CONVOLUTIONS:
        groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
        return "depthwise conv" if groups > 1 and before[1:2] == [groups] else "conv"
    for part, kind in (("pool", "pooling"), ("batch_norm", "batch norm")):
        if part in name:
            return kind
    return _KINDS.get(name, name)


def _has_bias(node: Node, name: str) -> bool:
    if name != "linear" and name not in _CONVOLUTIONS:
        return name == "addmm"  # its first argument is a linear layer's bias
    return reference(node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) is not None


def gives_view(op: str) -> bool:
    """Return whether an operator's signature says that it returns the memory of an argument."""
    if op == "_unsafe_view.default":
        return True
    try:
        results = operator_of(op)._schema.returns
    except AttributeError:
        return False  # not an operator of torch
    return any(result.alias_info is not None for result in results)
