"""Capture an `nn.Module`, or its frozen first part, as a program.

A graph is made for one shape of the inputs. Inference passes one sample at a time and training sixteen; texts
and sounds vary in length. Values that depend only on weights (position tables, casts of weights under
autocast) are part of the graph. They are computed once, when a program is bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from upriver.errors import CaptureError, ConfigError, ProgramError
from upriver.program.capture.lowering import Recording, record
from upriver.program.example_inputs import Example, Inputs, TensorSource
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import ActivationMemory, Boundary, Granularity, boundaries
from upriver.program.graph.operators import fingerprints
from upriver.program.graph.parser import decode
from upriver.program.graph.schema import SCHEMA, Graph, Stage
from upriver.program.graph.validator import check
from upriver.program.graph.weights_file import WeightsFile


def capture(
    model: nn.Module,
    example: Inputs,
    *,
    outputs: Sequence[TensorSource] | None = None,
    first: Sequence[TensorSource] = (),
    autocast: torch.dtype | None = None,
    granularity: Granularity = "module",
) -> Program:
    """Capture a model in eval, for the micro-batch of ``example``. Leave the model unchanged.

    Args:
        example: Inputs of the model, samples in dimension 0, as many as a micro-batch holds.
        outputs: Outputs of the program, in this order: results of module calls, or inputs. Operators after
            the last of them are not captured. None captures the whole model, and outputs every tensor of its
            result once.
        first: Tensors whose operators run before all others. A stage ends right after them.

    Raises:
        CaptureError: If the model cannot be captured. The message says why.
        ConfigError: If a model cannot be called with ``example``.
    """
    return capture_buckets(
        model, [example], outputs=outputs, first=first, autocast=autocast, granularity=granularity
    )[0]


def capture_buckets(
    model: nn.Module,
    examples: Sequence[Inputs],
    *,
    outputs: Sequence[TensorSource] | None = None,
    first: Sequence[TensorSource] = (),
    autocast: torch.dtype | None = None,
    granularity: Granularity = "module",
) -> tuple[Program, ...]:
    """Capture a model for several shapes of input, one program each, as :func:`capture` does for one.

    All programs name the same weights file, and share its tensors in memory.

    Raises:
        CaptureError: If the model cannot be captured, or its weights differ between shapes.
        ConfigError: If there is no example, or two have the same shapes.
    """
    given = [Example.of(example) for example in examples]
    _check_distinct(given)
    whole = model if outputs is None else None
    recordings = [
        checked(record(model, each, outputs=outputs, first=first, autocast=autocast), whole=whole)
        for each in given
    ]
    tensors: dict[str, torch.Tensor] = {}
    for recording in recordings:
        for key, tensor in recording.tensors.items():
            _check_same(key, tensors.setdefault(key, tensor), tensor)
    weights = WeightsFile(tensors)
    programs = []
    for recording, each in zip(recordings, given, strict=True):
        device = each.tensors[0].device
        graph = graph_of(
            recording,
            model,
            weights.digest,
            device=device,
            granularity=granularity,
            name=name_of(outputs),
            chained=bool(first),
        )
        programs.append(bound(graph, weights, device))
    return tuple(programs)


def _check_distinct(examples: Sequence[Example]) -> None:
    if not examples:
        raise ConfigError("shape buckets need at least one example, got none")
    seen: set[str] = set()
    for example in examples:
        form = example.describe()
        if form in seen:
            raise ConfigError(f"two shape buckets take {form}; each shape is captured once")
        seen.add(form)


def _check_same(key: str, known: torch.Tensor, tensor: torch.Tensor) -> None:
    if known is tensor:
        return
    alike = known.dtype == tensor.dtype and known.shape == tensor.shape and known.stride() == tensor.stride()
    if not alike or not torch.equal(known, tensor):
        raise CaptureError(f"{key!r} is not the same for all shapes, so they cannot share a weights file")


def bound(graph: Graph, weights: WeightsFile, device: torch.device) -> Program:
    """Check a graph as strictly as a foreign one, and return a program of it and its weights.

    Raises:
        CaptureError: If the check fails. The error then shows here, not on a server.
    """
    try:
        check(decode(graph.encode()), device=device)
        return Program(graph, weights, device=device)
    except ProgramError as error:
        raise CaptureError(f"no reader would take the program: {error}") from error


def checked(recording: Recording, *, whole: nn.Module | None = None) -> Recording:
    """Return the recording if a program can be made from it.

    Args:
        whole: The model, if the whole model was recorded.

    Raises:
        CaptureError: Naming the first operator that no program may hold, or if there is no operator.
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
        raise CaptureError("no operator runs before the requested tensors")
    return recording


def name_of(outputs: Sequence[TensorSource] | None) -> str:
    """Return the name of the last stage if all outputs come from one module. Empty otherwise."""
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
    """Return the graph of a recording.

    Args:
        name: Name of the last stage. Empty for the module that ends there.
        chained: True if a stage ends after the operators that run first.
    """
    chain = recording.chain
    cuts = boundaries(chain, granularity=granularity, also=(recording.first,) if chained else ())
    return Graph(
        schema=SCHEMA,
        micro_batch=recording.micro_batch,
        device=torch.device(device).type,
        autocast=None,  # the casts are in the graph
        operators=fingerprints(node.op for node in chain.nodes),
        weights_digest=weights_digest,
        inputs=list(chain.inputs),
        weights=list(recording.weights),
        nodes=list(chain.nodes),
        stages=_stages(recording, cuts, model, name),
    )


def _stages(recording: Recording, cuts: Sequence[Boundary], model: nn.Module, name: str) -> list[Stage]:
    memory = ActivationMemory(recording.chain, recording.sizes)
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
                param_bytes=sum(weights_read(recording, start, cut.stop).values()),
                flops=sum(recording.flops[start : cut.stop]) / recording.micro_batch,
                peak_bytes=memory.peak(start, cut.stop) / recording.micro_batch,
            )
        )
        start = cut.stop
    return stages


def weights_read(recording: Recording, start: int, stop: int) -> dict[str, int]:
    """Return key and bytes of each weight that nodes [start, stop) read, tied weights once."""
    names = {name for node in recording.chain.nodes[start:stop] for name in node.reads()}
    return {weight.key: weight.spec.nbytes for weight in recording.weights if weight.name in names}
