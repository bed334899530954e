"""Run a program: a captured network of which any tier can run any range of stages, to the same bits."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from upriver.errors import ConfigError, ProgramError
from upriver.program.eval_mode import no_fast_path
from upriver.program.graph import weights_file
from upriver.program.graph.artifact_paths import digest_of
from upriver.program.graph.autocast import autocast_dtype, autocasting
from upriver.program.graph.buffer_reuse import overwritable
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.constants import Constants, names_read
from upriver.program.graph.devices import check_device, moment, moved, seconds_between
from upriver.program.graph.parser import check_weight, decode
from upriver.program.graph.schedule import Values, bind, mark_last_uses, schedule
from upriver.program.graph.schema import Graph, Value, Weight
from upriver.program.graph.validator import check
from upriver.program.graph.weights_file import FileInMemory, Stored
from upriver.text import printable

BeforeStage: TypeAlias = Callable[[int, frozenset[str]], object]
"""Called before a stage runs. Receives the stage's number, counted from 1, and the keys of the weights that
it is the first to read. Returns once these weights are in memory."""


class Step(Protocol):
    """A part of a stage: one operator, or several as one function."""

    def run(self, values: Values, borrowed: Container[str] = ()) -> None:
        """Add the step's results to the values, and drop those that are no longer needed."""

    def refusal(self, error: Exception) -> Exception:
        """Return the error to raise for one of the step."""


class Program:
    """Captured network: graph and weights, on one device.

    Attributes:
        graph_bytes: Its bytes. Their SHA-256 is the program's digest.
        micro_batch: Exact number of samples in a run.
        stages: Model stages. Position ``k`` lies right after ``stages[k - 1]``.
        before_stage: The given callback, until its owner removes it.
    """

    def __init__(
        self,
        graph: Graph,
        weights: bytes | memoryview | torch.Tensor | Stored,
        *,
        device: str | torch.device = "cpu",
        caps: GraphCaps = DEFAULT_CAPS,
        before_stage: BeforeStage | None = None,
    ) -> None:
        """Bind a checked graph to its weights file, and compute the values that depend on no input.

        Args:
            weights: The file, or the tensors that it would hold. They are not copied, so they must not
                change. The stages read them in place if they are on the program's device.
            before_stage: Pass it if weights are still loading. Then each stage is bound, and its constants
                are computed, when it first runs. The weights must be on the program's device. Weights that
                only stages which never run read may be missing.

        Raises:
            ConfigError: If torch cannot compute on the device.
            ProgramError: If weights are missing or differ in form from the graph.
        """
        self.graph = graph
        self.graph_bytes = graph.encode()
        self.digest = digest_of(self.graph_bytes)
        self.weights_digest, self.micro_batch = graph.weights_digest, graph.micro_batch
        self.stages, self.num_stages = tuple(graph.stages), len(graph.stages)
        self.device = check_device(device)
        self.before_stage = before_stage
        self._file = weights if isinstance(weights, Stored) else FileInMemory(_as_tensor(weights, caps), caps)
        self._autocast = autocast_dtype(graph.autocast)
        self._live = live_values(graph)
        self._plan, self._over = schedule(graph), overwritable(graph)
        self._declared = {weight.name: weight for weight in graph.weights}
        self._weights: Values = {}
        self._constants = Constants(self._plan)
        self._stages: list[Sequence[Step] | None] = [None] * len(graph.stages)
        self._binding = threading.Lock()
        if before_stage is None:
            self._bind_all()

    @classmethod
    def from_bytes(
        cls,
        graph: bytes | memoryview,
        weights: bytes | memoryview | torch.Tensor,
        *,
        device: str | torch.device = "cpu",
        digest: str | None = None,
        caps: GraphCaps = DEFAULT_CAPS,
        before_stage: BeforeStage | None = None,
    ) -> Program:
        """Read an untrusted program. Caps, digests, operators and shapes are checked before it runs.

        Args:
            digest: Expected digest of the graph, if known.
            before_stage: As for the constructor. Then the weights file, after its header, is still being
                filled. The code that fills it checks it against its digest.

        Raises:
            ConfigError: If torch cannot compute on the device.
            ProgramError: If any check fails.
        """
        device = check_device(device)
        if digest is not None and digest_of(graph) != digest:
            raise ProgramError(f"graph.json has digest {digest_of(graph)}, not {digest}")
        parsed = decode(graph, caps)
        file = _as_tensor(weights, caps)
        if before_stage is None and (found := digest_of(file.numpy().data)) != parsed.weights_digest:
            raise ProgramError(
                f"the weights file has digest {found}, the graph names {parsed.weights_digest}"
            )
        stored = FileInMemory(file, caps)
        for weight in parsed.weights:
            check_weight(weight, stored.tensors.get(weight.key))
        check(parsed, device=device, caps=caps)
        return cls(parsed, stored, device=device, caps=caps, before_stage=before_stage)

    @property
    def sample_form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a sample of the first input."""
        spec = self.graph.inputs[0].spec
        return tuple(spec.shape[1:]), getattr(torch, spec.dtype)

    @property
    def weights_bytes(self) -> memoryview:
        """The weights file. Encoded anew at each access if the program holds the tensors themselves."""
        return memoryview(self._file.encode())

    @property
    def weight_tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors by key, in the order of the weights file."""
        return self._file.tensors

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights in memory."""
        return self._file.nbytes

    @property
    def fixed_values(self) -> Mapping[str, torch.Tensor]:
        """Weights and constants that stages read, by name."""
        return self._weights | self._constants.values

    def replace_stages(self, steps: Mapping[int, Sequence[Step]]) -> Mapping[int, Sequence[Step]]:
        """Run other steps in some stages from now on, by position after the stage; return the former ones."""
        before = {position: self._bind_stage(position) for position in steps}
        for position, each in steps.items():
            self._stages[position - 1] = each
        return before

    def live(self, position: int) -> list[Value]:
        """Return the tensors that cross a cut at ``position``, in the order of :meth:`run`."""
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
            tensors: Tensors live at ``start``, each for a full micro-batch.
            on_stage: Called with the position after each stage and the stage's seconds. While weights are
                still loading to an accelerator, it is called for all stages at the end.

        Returns:
            Tensors live at ``stop``.

        Raises:
            ConfigError: If an argument is of another type.
            ProgramError: If the stages or the tensors do not fit the program.
        """
        start, stop = _position("start", start), _position("stop", stop)
        if not 0 <= start <= stop <= self.num_stages:
            raise ProgramError(f"stages [{start}, {stop}) lie outside 0..{self.num_stages}")
        values = self._take(tensors, start)
        borrowed = frozenset(values)
        with no_fast_path(), autocasting(self.device, self._autocast):
            # While weights load, those of the next stage are copied to an accelerator during its computation.
            laps = _StageClock(on_stage, self.device, at_the_end=self.before_stage is not None)
            for position in range(start + 1, stop + 1):
                steps = self._ready(position)
                laps.begin()
                self._run_stage(steps, values, borrowed)
                laps.end(position)
            laps.tell()
        # Copy a constant: the caller may write into its result.
        fixed = self._constants.values
        names = [value.name for value in self.live(stop)]
        return tuple(values[name] if name in values else fixed[name].clone() for name in names)

    def _run_stage(self, steps: Sequence[Step], values: Values, borrowed: Container[str]) -> None:
        for step in steps:
            try:
                step.run(values, borrowed)
            except Exception as error:
                raise step.refusal(error) from error

    def _take(self, tensors: Sequence[torch.Tensor], start: int) -> Values:
        live = self.live(start)
        for one in tensors if isinstance(tensors, Sequence) else (None,):
            if not isinstance(one, torch.Tensor) or one.is_meta:
                raise ConfigError(
                    "tensors must be a sequence of tensors with values, one for each that crosses the cut, "
                    f"as in run([x], 0, stop); got {printable(repr(tensors), 60)} of type "
                    f"{type(tensors).__name__}"
                )
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

    # --------------------------------------------------------------------------------------- binding

    def _ready(self, position: int) -> Sequence[Step]:
        """Return the steps of a stage that is about to run, after its weights are in memory."""
        steps = self._stages[position - 1]
        if (before_stage := self.before_stage) is not None:
            before_stage(position, self._unread(position) if steps is None else frozenset())
        return self._bind_stage(position) if steps is None else steps

    def _unread(self, position: int) -> frozenset[str]:
        """Return keys of the weights that a stage, or its constants, are the first to read."""
        names = self._names(position)
        with self._binding:
            names |= names_read(self._constants.before(names))
            return frozenset(weight.key for weight in self._unbound(names))

    @torch.no_grad()
    def _bind_all(self) -> None:
        self._bind_weights(self._declared)
        with no_fast_path(), autocasting(self.device, self._autocast):
            self._constants.compute(self._plan.constants, self._weights, self.device)
        for position in range(1, self.num_stages + 1):
            self._bind_stage(position)

    def _bind_stage(self, position: int) -> Sequence[Step]:
        """Return the steps of a stage.

        Each drops the values that the stage no longer needs and does not ship.

        So a stage never sees more than another tier would have sent it.
        """
        names, nodes = self._names(position), self._plan.stages[position - 1]
        with self._binding:
            bound = self._stages[position - 1]
            if bound is not None:  # bound by another thread meanwhile
                return bound
            first = self._constants.before(names)
            self._bind_weights(names | names_read(first))
            self._constants.compute(first, self._weights, self.device)
            known = (self._weights, self._constants.values)
            fixed = {name: some[name] for name in names for some in known if name in some}
            steps = bind(nodes, fixed, self.device, self._over)
            mark_last_uses(steps, nodes, [*self.graph.stages[position - 1].live, *fixed])
            self._stages[position - 1] = steps
        return steps

    def _names(self, position: int) -> set[str]:
        """Return names of all values that a stage reads or ships."""
        return names_read(self._plan.stages[position - 1]).union(self.graph.stages[position - 1].live)

    def _unbound(self, names: Iterable[str]) -> list[Weight]:
        """Return the weights among these names that no bound stage reads."""
        return [
            self._declared[name] for name in names if name in self._declared and name not in self._weights
        ]

    def _bind_weights(self, names: Iterable[str]) -> None:
        there: dict[str, torch.Tensor] = {}
        bound: Values = {}
        for weight in self._unbound(names):
            check_weight(weight, self._file.tensors.get(weight.key))
            if weight.key not in there:  # once, even with several names
                there[weight.key] = moved(self._file.tensors[weight.key].reshape(-1), self.device)
            bound[weight.name] = there[weight.key].as_strided(weight.spec.shape, weight.spec.stride)
        self._weights |= bound


def _as_tensor(data: bytes | memoryview | torch.Tensor, caps: GraphCaps) -> torch.Tensor:
    nbytes = data.nbytes if isinstance(data, torch.Tensor) else memoryview(data).nbytes
    if not 0 < nbytes <= caps.weights_bytes:
        raise ProgramError(f"a weights file has 1..{caps.weights_bytes} bytes, got {nbytes}")
    if isinstance(data, torch.Tensor):
        return data
    view = memoryview(data).cast("B")
    if not view.readonly:
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        if tensor.data_ptr() % weights_file.ALIGNMENT == 0:
            return tensor  # a mapped file, say: its pages stay shared with other readers
    # Copy into the allocator's own memory: a bytes object lies on a 16-byte boundary, and alignment decides
    # low bits.
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    tensor.numpy().data[:] = view
    return tensor


def live_values(graph: Graph) -> list[list[Value]]:
    """Return the tensors that cross the cut at each position, in the order of :meth:`Program.run`."""
    made = {value.name: value for node in graph.nodes for value in node.made}
    made |= {value.name: value for value in graph.inputs}
    return [list(graph.inputs), *([made[name] for name in stage.live] for stage in graph.stages)]


def _position(name: str, value: object) -> int:
    """Return a position as an int. NumPy integers are allowed."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, a cut's position, got {value!r}") from None


class _StageClock:
    """Report the seconds of each stage when it is over.

    Args:
        tell: Called with the position after each stage and the stage's seconds. None for no report.
        at_the_end: On an accelerator, report all stages at the end instead of waiting for each.
    """

    def __init__(
        self, tell: Callable[[int, float], None] | None, device: torch.device, *, at_the_end: bool
    ) -> None:
        self._tell, self._device = tell, device
        self._at_the_end = at_the_end and device.type == "cuda"
        self._began: Any = None
        self._laps: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Record the start of a stage."""
        if self._tell is not None:
            self._began = moment(self._device)

    def end(self, position: int) -> None:
        """Record the end of a stage, after all its operators were called."""
        if self._tell is not None:
            self._laps.append((position, self._began, moment(self._device)))
            if not self._at_the_end:
                self.tell()

    def tell(self) -> None:
        """Report the stages not reported yet. Wait until they are over."""
        while self._tell is not None and self._laps:
            position, began, ended = self._laps.pop(0)
            self._tell(position, seconds_between(began, ended))
