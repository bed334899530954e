"""A program: a captured network that any tier can run, any stretch of it, to the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from upriver.errors import ProgramError
from upriver.program import weights as weights_file
from upriver.program.graph import Graph, Stage, Value, Weight, decode, digest_of
from upriver.program.operators import check_call
from upriver.program.precision import autocast_dtype, autocasting
from upriver.program.steps import Step, Values, bind, mark_last_uses, schedule
from upriver.program.trace import no_fast_path


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
        """Bind a checked graph to its weights file, and compute what no input has a part in.

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
        self._autocast = autocast_dtype(graph.autocast)
        self._live = _live_values(graph)
        self._weights = _bind(graph.weights, weights_file.decode(self._file), self.device)
        self._constants = self._run_constants()
        self._stages = self._bind_stages()

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
        _check_shapes(parsed, torch.device(device))
        return cls(parsed, file, device=device)

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
        """Run stages [start, stop) on one micro-batch, under the program's autocast and no other.

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
        values = self._take(tensors, start)
        with no_fast_path(), autocasting(self.device, self._autocast):
            for position in range(start + 1, stop + 1):
                began = time.perf_counter()
                for step in self._stages[position - 1]:
                    step.run(values)
                if on_stage is not None:
                    self._synchronize()
                    on_stage(position, time.perf_counter() - began)
        return tuple(self._result(value.name, values) for value in self.live(stop))

    def _take(self, tensors: Sequence[torch.Tensor], start: int) -> Values:
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

    def _result(self, name: str, values: Values) -> torch.Tensor:
        # A constant is copied: the caller may write into what it gets.
        return values[name] if name in values else self._constants[name].clone()

    @torch.no_grad()
    def _run_constants(self) -> Values:
        """What no input has a part in, as far as a stage reads it or it is an output."""
        plan = schedule(self.graph)
        values: Values = {}
        steps = bind(plan.constants, self._weights, self.device)
        mark_last_uses(steps, plan.constants, plan.kept)
        with no_fast_path(), autocasting(self.device, self._autocast):
            for step in steps:
                step.run(values)
        return values

    def _bind_stages(self) -> list[list[Step]]:
        """The steps of each stage; each drops what its stage needs no longer and does not ship.

        So a stage never sees more than another tier would have sent it.
        """
        fixed = self._weights | self._constants
        bound = []
        for stage, nodes in zip(self.graph.stages, schedule(self.graph).stages, strict=True):
            steps = bind(nodes, fixed, self.device)
            mark_last_uses(steps, nodes, [*stage.live, *fixed])
            bound.append(steps)
        return bound

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _check_shapes(graph: Graph, device: torch.device) -> None:
    """Run the graph without data and compare every declared shape with what the operators say."""
    with (
        FakeTensorMode() as mode,
        torch.no_grad(),
        no_fast_path(),
        autocasting(device, autocast_dtype(graph.autocast)),
    ):
        values = _shapes_of(graph, mode, device)
        for index, node in enumerate(graph.nodes):
            check_call(node.op, node.args, node.kwargs)
            step = Step(index, node, {}, device)
            try:
                step.run(values)
            except ProgramError:
                raise
            except Exception as error:  # an operator raises whatever it likes on arguments that do not fit it
                raise ProgramError(f"{step.where}: {[*str(error).strip().splitlines(), ''][0]}") from None
            for output in node.outputs:
                if output is None:
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


def _bind(weights: Sequence[Weight], file: dict[str, torch.Tensor], device: torch.device) -> Values:
    bound: Values = {}
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


def _shapes_of(graph: Graph, mode: FakeTensorMode, device: torch.device) -> Values:
    """Inputs and weights without memory; not on the meta device, where some operators give other strides."""
    with mode:
        values = {value.name: value.spec.empty(device) for value in graph.inputs}
        return values | {weight.name: weight.spec.empty(device) for weight in graph.weights}


def _live_values(graph: Graph) -> list[list[Value]]:
    """What crosses the cut at each position."""
    made = {output.name: output for node in graph.nodes for output in node.outputs if output is not None}
    made |= {value.name: value for value in graph.inputs}
    return [list(graph.inputs), *([made[name] for name in stage.live] for stage in graph.stages)]


def count_flops(program: Program) -> list[float]:
    """Floating-point operations of each stage for a micro-batch, as torch counts them."""
    graph = program.graph
    mode = FakeTensorMode()
    values = _shapes_of(graph, mode, program.device)
    plan = schedule(graph)
    counts: list[float] = []
    with mode, torch.no_grad(), no_fast_path(), autocasting(program.device, autocast_dtype(graph.autocast)):
        for step in bind(plan.constants, {}, program.device):
            step.run(values)
        for nodes in plan.stages:
            with FlopCounterMode(display=False) as counter:
                for step in bind(nodes, {}, program.device):
                    step.run(values)
            counts.append(float(counter.get_total_flops()))
    return counts
