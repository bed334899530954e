"""A program: a captured network that any tier can run, any stretch of it, to the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from upriver.errors import ProgramError
from upriver.program import weights as weights_file
from upriver.program.graph import (
    Graph,
    Node,
    Stage,
    Value,
    Weight,
    decode,
    decode_argument,
    digest_of,
    references,
)
from upriver.program.operators import check_call, resolve
from upriver.program.trace import no_fast_path


class _Step:
    """One node, ready to run: operator looked up, and what nobody needs afterwards."""

    __slots__ = ("args", "done", "kwargs", "names", "operator", "where")

    def __init__(self, index: int, node: Node) -> None:
        self.operator = resolve(node.op)
        check_call(node.op, node.args, node.kwargs)
        self.args = node.args
        self.kwargs = node.kwargs
        self.names = [output.name if output is not None else None for output in node.outputs]
        self.done: tuple[str, ...] = ()
        self.where = f"node {index} ({node.op})"

    def run(self, values: dict[str, torch.Tensor], device: torch.device) -> None:
        args = decode_argument(self.args, values, device)
        kwargs = {key: decode_argument(value, values, device) for key, value in self.kwargs.items()}
        results = self.operator(*args, **kwargs)
        if len(self.names) == 1 and isinstance(results, torch.Tensor):
            results = (results,)
        for name, result in zip(self.names, results, strict=True):
            if name is not None:
                values[name] = result
        for name in self.done:
            del values[name]


class Program:
    """A captured network: graph and weights, on one device.

    Attributes:
        graph: The graph file.
        graph_bytes: Its bytes; their SHA-256 is the program's digest.
        weights_bytes: The weights file.
        stages: Model stages; position ``k`` lies right after ``stages[k - 1]``.
    """

    def __init__(
        self, graph: Graph, weights: bytes | memoryview | torch.Tensor, *, device: str | torch.device = "cpu"
    ) -> None:
        """Bind a checked graph to its weights file.

        Args:
            weights: The file; kept, not copied, so it must not change. On a CPU the stages read it in place.

        Raises:
            ProgramError: If weights are missing or of another form than the graph says.
        """
        self.graph = graph
        self.graph_bytes = graph.encode()
        self.digest = digest_of(self.graph_bytes)
        self.device = torch.device(device)
        self._file = _as_tensor(weights)
        self._weights = _bind(graph.weights, weights_file.decode(self._file), self.device)
        self._steps = [_Step(index, node) for index, node in enumerate(graph.nodes)]
        self._starts = [0, *(stage.stop for stage in graph.stages)]
        self._live = _live_values(graph)
        self._mark_last_uses()

    @classmethod
    def from_bytes(
        cls,
        graph: bytes | memoryview,
        weights: bytes | memoryview | torch.Tensor,
        *,
        device: str | torch.device = "cpu",
        digest: str | None = None,
    ) -> Program:
        """Read a program from anyone: caps, digests, operators and shapes are checked before it runs.

        Raises:
            ProgramError: If anything is not as it says.
        """
        if digest is not None and digest_of(graph) != digest:
            raise ProgramError(f"graph.json has digest {digest_of(graph)}, not {digest}")
        parsed = decode(graph)
        file = _as_tensor(weights)
        found = digest_of(file.numpy().data)
        if found != parsed.weights_digest:
            raise ProgramError(
                f"the weights file has digest {found}, the graph names {parsed.weights_digest}"
            )
        program = cls(parsed, file, device=device)
        program._check_shapes()
        return program

    @property
    def weights_bytes(self) -> memoryview:
        """The weights file, without a copy."""
        return self._file.numpy().data

    @property
    def weights_digest(self) -> str:
        """SHA-256 of the weights file."""
        return self.graph.weights_digest

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights kept in memory."""
        return self._file.numel()

    @property
    def micro_batch(self) -> int:
        """Samples a run takes, no more and no fewer."""
        return self.graph.micro_batch

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The model stages."""
        return tuple(self.graph.stages)

    @property
    def num_stages(self) -> int:
        """How many there are: the largest position."""
        return len(self.graph.stages)

    def live(self, position: int) -> list[Value]:
        """The tensors that cross a cut at ``position``, in the order of :meth:`run`."""
        return self._live[position]

    @torch.no_grad()
    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run stages [start, stop) on one micro-batch.

        Args:
            tensors: What is live at ``start``, each for a full micro-batch.
            on_stage: Told the position after each stage and the seconds it took.

        Returns:
            What is live at ``stop``.

        Raises:
            ProgramError: If the stretch or the tensors are not the program's.
        """
        if not 0 <= start <= stop <= self.num_stages:
            raise ProgramError(f"stages [{start}, {stop}) lie outside 0..{self.num_stages}")
        values = self._take(tensors, start) | self._weights
        with no_fast_path():
            for position in range(start + 1, stop + 1):
                began = time.perf_counter()
                self._run_stage(position, values)
                if on_stage is not None:
                    self._synchronize()
                    on_stage(position, time.perf_counter() - began)
        return tuple(values[value.name] for value in self.live(stop))

    def _take(self, tensors: Sequence[torch.Tensor], start: int) -> dict[str, torch.Tensor]:
        live = self.live(start)
        if len(tensors) != len(live):
            raise ProgramError(f"cut {start} is crossed by {len(live)} tensors, got {len(tensors)}")
        for value, tensor in zip(live, tensors, strict=True):
            wanted = (value.spec.dtype, tuple(value.spec.shape))
            got = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if wanted != got:
                raise ProgramError(
                    f"cut {start} takes {wanted[0]} of shape {wanted[1]}, got {got[0]} of {got[1]}"
                )
        return {value.name: tensor.to(self.device) for value, tensor in zip(live, tensors, strict=True)}

    def _run_stage(self, position: int, values: dict[str, torch.Tensor]) -> None:
        for step in self._steps[self._starts[position - 1] : self._starts[position]]:
            step.run(values, self.device)

    def _mark_last_uses(self) -> None:
        """Let each step drop what its stage needs no longer and what does not cross the cut after it.

        So a stage never sees more than another tier would have sent it.
        """
        weights = set(self._weights)
        for first, last, stage in zip(self._starts, self._starts[1:], self.graph.stages, strict=False):
            needed = set(stage.live) | weights
            for index in range(last - 1, first - 1, -1):
                node = self.graph.nodes[index]
                touched = set(references([node.args, node.kwargs]))
                touched |= {output.name for output in node.outputs if output is not None}
                self._steps[index].done = tuple(sorted(touched - needed))
                needed |= touched

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_shapes(self) -> None:
        """Run the graph without data and compare every declared shape with what the operators say."""
        with FakeTensorMode() as mode:
            self._propagate_shapes(mode)

    def _propagate_shapes(self, mode: FakeTensorMode) -> None:
        values = _shapes_of(self, mode)
        for index, step in enumerate(self._steps):
            try:
                step.run(values, self.device)
            except ProgramError:
                raise
            except Exception as error:  # an operator raises whatever it likes on arguments that do not fit it
                raise ProgramError(f"{step.where}: {str(error).strip().splitlines()[0]}") from None
            for output in self.graph.nodes[index].outputs:
                if output is None or output.name in step.done:
                    continue
                made = values[output.name]
                if list(made.shape) != output.spec.shape or str(made.dtype) != f"torch.{output.spec.dtype}":
                    raise ProgramError(
                        f"{step.where}: declares {output.spec.shape}, gives {list(made.shape)}"
                    )


def _as_tensor(data: bytes | memoryview | torch.Tensor) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data
    view = memoryview(data)
    if view.nbytes == 0:
        raise ProgramError("the weights file is empty")
    # Copied into the allocator's own memory: a bytes object lies on a 16-byte boundary, and alignment decides
    # low bits.
    tensor = torch.empty(view.nbytes, dtype=torch.uint8)
    tensor.numpy().data[:] = view.cast("B")
    return tensor


def _bind(
    weights: Sequence[Weight], file: dict[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    bound: dict[str, torch.Tensor] = {}
    for weight in weights:
        stored = file.get(weight.key)
        spec = weight.spec
        if stored is None:
            raise ProgramError(f"the weights file has no {weight.key!r}")
        if (
            str(stored.dtype) != f"torch.{spec.dtype}"
            or stored.numel() != spec.numel
            or spec.span != spec.numel
        ):
            raise ProgramError(
                f"weight {weight.key!r} is {stored.dtype} {tuple(stored.shape)}, the graph says {spec}"
            )
        bound[weight.name] = stored.reshape(-1).to(device).as_strided(spec.shape, spec.stride)
    return bound


def _shapes_of(program: Program, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Inputs and weights without memory; not on the meta device, where some operators give other strides."""
    with mode:
        values: dict[str, torch.Tensor] = {v.name: v.spec.empty(program.device) for v in program.graph.inputs}
        return values | {weight.name: weight.spec.empty(program.device) for weight in program.graph.weights}


def _live_values(graph: Graph) -> list[list[Value]]:
    """What crosses the cut at each position."""
    made = {output.name: output for node in graph.nodes for output in node.outputs if output is not None}
    made |= {value.name: value for value in graph.inputs}
    return [list(graph.inputs), *([made[name] for name in stage.live] for stage in graph.stages)]


def count_flops(program: Program) -> list[float]:
    """Floating-point operations of each stage for a micro-batch, as torch counts them."""
    mode = FakeTensorMode()
    values = _shapes_of(program, mode)
    counts: list[float] = []
    starts = program._starts
    for first, last in pairwise(starts):
        with mode, FlopCounterMode(display=False) as counter, torch.no_grad(), no_fast_path():
            for step in program._steps[first:last]:
                step.run(values, program.device)
        counts.append(float(counter.get_total_flops()))
    return counts
