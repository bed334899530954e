"""nn.Module to Program: the user's model, or its frozen first part, as a graph of operators.

The graph is made for one micro-batch size. What depends on nothing but weights (position tables, casts of
weights under autocast) is part of it and is computed once, when a program is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from upriver.errors import CaptureError, ProgramError
from upriver.program.capture.lowering import Recording, record
from upriver.program.example_inputs import Example, Inputs, TensorSource, tensors_in
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import ActivationMemory, Boundary, Chain, Granularity, boundaries
from upriver.program.graph.operators import fingerprints
from upriver.program.graph.parser import decode
from upriver.program.graph.schema import SCHEMA, Graph, Stage, references
from upriver.program.graph.validator import check
from upriver.program.graph.weights_file import WeightsFile

__all__ = ["capture", "tensors_in"]


def capture(
    model: nn.Module,
    example: Inputs,
    *,
    outputs: Sequence[TensorSource] | None = None,
    first: Sequence[TensorSource] = (),
    autocast: torch.dtype | None = None,
    granularity: Granularity = "module",
) -> Program:
    """Capture a model in eval, for the micro-batch of ``example``; the model is left as it was.

    Args:
        model: The user's model.
        example: What it is called with, samples in dimension 0, as many as a micro-batch holds.
        outputs: What the program gives, in this order: what some module calls returned, or inputs. Nothing
            that runs after the last of them is captured. None takes the whole model and gives every tensor of
            its answer, each once.
        first: What these need runs before all else, and a stage ends right behind it.
        autocast: Type that autocast computes in; the casts become part of the graph.
        granularity: Whether stages end with modules, with operators, or only at the end.

    Raises:
        CaptureError: If the model cannot be captured; the message says why.
        ConfigError: If ``example`` is nothing that a model can be called with.
    """
    given = Example.of(example)
    recording = record(model, given, outputs=outputs, first=first, autocast=autocast)
    recording = checked(recording, whole=model if outputs is None else None)
    weights = WeightsFile(recording.tensors)
    device = given.tensors[0].device
    graph = graph_of(
        recording,
        model,
        weights.digest,
        device=device,
        granularity=granularity,
        name=name_of(outputs),
        chained=bool(first),
    )
    return bound(graph, weights, device)


def bound(graph: Graph, weights: WeightsFile, device: torch.device) -> Program:
    """A program of a graph made here and its weights, once the graph has passed for a stranger's.

    Raises:
        CaptureError: If it does not: found here, and not by the server that it would be sent to.
    """
    try:
        check(decode(graph.encode()), device=device)
        return Program(graph, weights, device=device)
    except ProgramError as error:
        raise CaptureError(f"no reader would take the program: {error}") from error


def checked(recording: Recording, *, whole: nn.Module | None = None) -> Recording:
    """A recording that a program can be made of.

    Args:
        whole: The model, where all of it was recorded.

    Raises:
        CaptureError: Naming the first operator that no program may hold.
    """
    if recording.problems:
        first = min(recording.problems)
        place = recording.chain.places[first]
        raise CaptureError(recording.problems[first], module=place[-1][1] if place else None)
    if not recording.chain.nodes and whole is not None:
        raise CaptureError(
            f"the model ({type(whole).__name__}) runs no operator on its inputs, so there is nothing to "
            "offload"
        )
    if not recording.chain.nodes:
        raise CaptureError("nothing runs before the tensors that were asked for")
    return recording


def name_of(outputs: Sequence[TensorSource] | None) -> str:
    """What the last stage is called, where one module's answer is what a program gives."""
    paths = {source.path for source in outputs or () if source.path is not None}
    return paths.pop() if len(paths) == 1 else ""


def graph_of(
    recording: Recording,
    model: nn.Module,
    weights_digest: str,
    *,
    device: str | torch.device = "cpu",
    granularity: Granularity = "module",
    name: str = "",
    chained: bool = False,
) -> Graph:
    """The graph file of a recording.

    Args:
        device: That it was recorded on.
        name: Of the last stage; empty for the module that ends there.
        chained: Whether a stage ends behind what was to run first.
    """
    chain = recording.chain
    cuts = boundaries(chain, granularity=granularity, also=(recording.first,) if chained else ())
    return Graph(
        schema=SCHEMA,
        micro_batch=recording.micro_batch,
        device=torch.device(device).type,
        autocast=None,  # the casts stand in the graph
        operators=fingerprints(node.op for node in chain.nodes),
        weights_digest=weights_digest,
        inputs=list(chain.inputs),
        weights=list(recording.weights),
        nodes=list(chain.nodes),
        stages=_stages(recording, cuts, model, name),
    )


def _stages(recording: Recording, cuts: Sequence[Boundary], model: nn.Module, name: str) -> list[Stage]:
    memory = ActivationMemory(recording.chain, recording.sizes)
    weights = {weight.name: (weight.key, weight.spec.nbytes) for weight in recording.weights}
    kinds = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    stages = []
    start = 0
    for cut in cuts:
        last = cut.stop == len(recording.chain.nodes)
        called = name if last and name else cut.name
        stages.append(
            Stage(
                name=called,
                kind=kinds.get(called.partition(": ")[0], "output"),
                stop=cut.stop,
                live=list(cut.live),
                out_bytes=sum(recording.sizes[value] for value in cut.live) / recording.micro_batch,
                param_bytes=sum(_weights_read(recording.chain, start, cut.stop, weights).values()),
                flops=sum(recording.flops[start : cut.stop]) / recording.micro_batch,
                peak_bytes=memory.peak(start, cut.stop) / recording.micro_batch,
            )
        )
        start = cut.stop
    return stages


def _weights_read(
    chain: Chain, start: int, stop: int, weights: Mapping[str, tuple[str, int]]
) -> dict[str, int]:
    """Key and bytes of each weight that nodes [start, stop) read; a tied one once."""
    read = (name for node in chain.nodes[start:stop] for name in references([node.args, node.kwargs]))
    return dict(weights[name] for name in read if name in weights)
