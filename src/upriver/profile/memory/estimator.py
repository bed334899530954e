"""Estimate peak memory of a stretch of a program, and of training the tail, before either has run.

The program's own steps, or the user's own tail with its backward and the optimizer's step, run once on
tensors without data. Every storage is watched meanwhile (see ``ledger``). Rules add the memory of operators
besides their results (see ``workspace`` and ``convolution``). No rule depends on a particular model.

An estimate covers tensors that a run makes or is given, and the workspaces of its kernels. It covers memory
that libraries keep however large the tensors are (see ``libraries``). It does not cover weights, which are
loaded before, nor memory that an allocator caches after tensors are gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from upriver.errors import ConfigError, ModelError, UpriverError
from upriver.profile.memory.convolution import FEW_SAMPLES
from upriver.profile.memory.ledger import Ledger, storages
from upriver.profile.memory.libraries import LibraryMemory
from upriver.profile.memory.linear_model import MemoryLine, high_lines, same_calls
from upriver.program.compiled_code import uncompiled
from upriver.program.eval_mode import mode, no_fast_path
from upriver.program.example_inputs import tensors_in
from upriver.program.freeze import frozen_units, keep_in_eval
from upriver.program.graph.autocast import autocast_dtype, autocasting
from upriver.program.graph.buffer_reuse import overwritable
from upriver.program.graph.executor import Program, live_values
from upriver.program.graph.schedule import ScheduledNode, Values, bind, first_line, mark_last_uses, schedule
from upriver.program.graph.schema import Graph
from upriver.program.module_state.restoration import state_kept

log = logging.getLogger("upriver")

OptimizerFor: TypeAlias = "Callable[[list[nn.Parameter]], torch.optim.Optimizer]"
Loss: TypeAlias = "Callable[[Any], torch.Tensor]"
FeaturesOf: TypeAlias = "Callable[[int], Sequence[torch.Tensor]]"


FEWEST = max(FEW_SAMPLES) + 1
"""Least number of samples of a line: below, torch chooses other kernels (see ``convolution``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of one run, weights excluded.

    Attributes:
        samples: Samples that the run processes at once.
        low_bytes: Tensors alone: no run needs less. Of training, the tensors that forward has made and saved,
            and those alive in the optimizer's step. A run with data may partly overwrite what backward adds.
        high_bytes: Upper bound with the workspaces of operators and the memory that libraries keep.
        fixed_bytes: Fixed part of a bound for any number of samples.
        growing_bytes: Part of that bound for each sample.
        reserve_bytes: Part of ``high_bytes`` that libraries keep from run to run.
    """

    samples: int
    low_bytes: int
    high_bytes: int
    fixed_bytes: int
    growing_bytes: float
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples must be >= 1, got {self.samples}")
        if not 0 <= self.low_bytes <= self.high_bytes or not 0 <= self.reserve_bytes <= self.high_bytes:
            raise ConfigError(
                "0 <= low_bytes <= high_bytes and 0 <= reserve_bytes <= high_bytes must hold, got "
                f"{self.low_bytes}, {self.high_bytes}, {self.reserve_bytes}"
            )
        line = math.ceil(self.fixed_bytes + self.growing_bytes * self.samples)
        if self.fixed_bytes < 0 or self.growing_bytes < 0 or line < self.high_bytes:
            raise ConfigError(
                "fixed_bytes + growing_bytes x samples must be >= high_bytes, both of them >= 0, got "
                f"{self.fixed_bytes}, {self.growing_bytes}, {self.high_bytes} at {self.samples}"
            )


def _check_samples(samples: object) -> None:
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ConfigError(f"samples must be a whole number >= 1, got {samples!r}")


# ------------------------------------------------------------------------------------- a stretch


def stretch_peak(program: Program, start: int, stop: int) -> MemoryEstimate:
    """Return the peak of stages [start, stop) on one micro-batch, with the tensors crossing at both ends."""
    return StretchPeaks(program.graph, program.device).of(start, stop)


def stage_peaks(program: Program) -> tuple[float, ...]:
    """Return each stage's peak bytes for one sample; times the micro-batch it is never too low.

    The largest peak of a stretch's stages is never below the stretch's own peak. It includes the input of the
    stretch, which its caller holds until the end, and the memory that libraries keep after all stages. Bytes
    that do not grow with the samples are spread over them.
    """
    return StretchPeaks(program.graph, program.device).stages()


def known_peaks(program: Program) -> tuple[float, ...]:
    """Return :func:`stage_peaks`, or the tensors alone where the stages cannot run without data."""
    try:
        return stage_peaks(program)
    except UpriverError as error:
        log.info("the memory of stages is that of their tensors alone: %s", error)
        return tuple(float(stage.peak_bytes) for stage in program.stages)


class StretchPeaks:
    """Compute the peaks of all stretches of one program; their common parts are computed once.

    Args:
        graph: A checked graph; its weights need not be loaded.
    """

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._live = live_values(graph)
        self._plan, self._over = schedule(graph), overwritable(graph)
        with self._running():
            self._fixed = _fixed_values(self._graph, self._device)
        self._known = storages(self._fixed.values())

    def of(self, start: int, stop: int) -> MemoryEstimate:
        """Return the peak of [start, stop).

        Raises:
            ConfigError: If the program has no such stretch.
        """
        last = len(self._live) - 1
        if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= last):
            raise ConfigError(f"start and stop must be 0 <= start <= stop <= {last}, got {start!r}, {stop!r}")
        ledger = self._ledger(start, stop)
        low, tensors = ledger.most_live, ledger.high
        high = tensors + ledger.kept.nbytes
        return MemoryEstimate(
            samples=self._graph.micro_batch,
            low_bytes=low,
            high_bytes=high,
            # A program is made for one micro-batch, so the part that does not grow is unknown.
            fixed_bytes=tensors + ledger.kept.most,
            growing_bytes=tensors / self._graph.micro_batch,
            reserve_bytes=ledger.kept.nbytes,
        )

    def _ledger(
        self, start: int, stop: int, kept: LibraryMemory | None = None, *, held: bool = True
    ) -> Ledger:
        """Return the ledger of running [start, stop); ``held`` if the caller keeps the stretch's input."""
        with self._running():
            values = {value.name: value.spec.empty(self._device) for value in self._live[start]}
            given, ledger = dict(values) if held else {}, Ledger(kept, self._known)
            ledger.hold(values.values())
            with ledger:
                plan = self._plan.stages[start:stop]
                for stage, nodes in zip(self._graph.stages[start:stop], plan, strict=True):
                    steps = bind(nodes, self._fixed, self._device, self._over)
                    mark_last_uses(steps, nodes, [*stage.live, *self._fixed])
                    _run(steps, values, frozenset(given))
        return ledger

    def stages(self) -> tuple[float, ...]:
        """Return each stage's peak bytes for one sample of the micro-batch; see :func:`stage_peaks`."""
        kept, stages = LibraryMemory(), range(len(self._graph.stages))
        given = [sum(value.spec.nbytes for value in live) for live in self._live]
        first = [self._ledger(k, k + 1, kept).high for k in stages]
        added = _covering(first, first, given)
        later = [
            first[k] if added[k] == first[k] else self._ledger(k, k + 1, kept, held=False).high
            for k in stages
        ]
        peaks = _covering(first, later, given)
        return tuple((peak + kept.nbytes) / self._graph.micro_batch for peak in peaks)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        autocast = autocasting(self._device, autocast_dtype(self._graph.autocast))
        with self._mode, torch.no_grad(), no_fast_path(), autocast:
            yield


def _covering(first: Sequence[int], later: Sequence[int], given: Sequence[int]) -> list[int]:
    """Return the least stage peaks whose largest one in any stretch covers that stretch.

    A stretch from ``start`` needs ``first[start]`` in its first stage, and ``given[start] + later[k]`` in a
    later stage ``k``. Where an earlier stage of the stretch needs as much anyway, nothing is added.
    """
    peaks: list[int] = []
    for stage, peak in enumerate(first):
        largest = 0
        for start in reversed(range(stage)):
            largest = max(largest, peaks[start])
            needed = given[start] + later[stage]
            peak = max(peak, needed) if needed > largest else peak
        peaks.append(peak)
    return peaks


def _fixed_values(graph: Graph, device: torch.device) -> Values:
    """Return the weights and constants of a graph, without data."""
    weights = {weight.name: weight.spec.empty(device) for weight in graph.weights}
    plan = schedule(graph)
    values: Values = {}
    steps = bind(plan.constants, weights, device)
    mark_last_uses(steps, plan.constants, [*plan.kept, *weights])
    _run(steps, values, frozenset())
    return weights | values


def _run(steps: Iterable[ScheduledNode], values: Values, borrowed: frozenset[str]) -> None:
    for step in steps:
        try:
            step.run(values, borrowed)
        except Exception as error:
            raise step.refusal(error) from error


# -------------------------------------------------------------------------------------- the tail


def tail_peak(
    model: nn.Module,
    features: Sequence[torch.Tensor],
    *,
    samples: int,
    run: Callable[[Any], Any] | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFor = torch.optim.Adam,
    features_of: FeaturesOf | None = None,
) -> MemoryEstimate:
    """Estimate the peak of one training iteration (forward, backward, step) after the first one.

    The estimate counts the features, the tensors saved for backward, the gradients of parameters and
    activations, the optimizer's state and the memory of its step. Gradients are assumed to be freed before
    each iteration (``zero_grad()`` sets them to None by default). The model runs as in training, with its
    frozen units in eval, whatever its present mode. The model is not changed.

    Forward and backward run with two numbers of samples, which shows the growth with samples. If a tail runs
    with ``samples`` only, its ``fixed_bytes`` hold the whole peak.

    Args:
        model: Model whose parameters are trained: those that require a gradient.
        features: Inputs of ``run`` for a training batch; only their form matters, so they may be on the
            ``meta`` device.
        samples: Number of samples in ``features``.
        run: From the features (the tensor itself if there is only one) to the answer; the model by default.
        loss: From the answer to a number; the mean of squares by default.
        features_of: Makes the features of another number of samples; their first dimension grows by default.

    Raises:
        ConfigError: If no parameter requires a gradient, or ``samples`` or ``features`` are not valid.
        ModelError: If the tail cannot run on tensors without data, or its answer depends on no parameter.
    """
    _check_samples(samples)
    if not features or not all(isinstance(tensor, torch.Tensor) for tensor in features):
        raise ConfigError("features must be one or more tensors")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient, so nothing is trained")

    def iteration(given: Sequence[torch.Tensor]) -> Ledger:
        with _without_data(model):
            return _iteration(model, given, parameters, run or model, loss or _mean_square)

    once = iteration(features)
    with _without_data(model):
        stepping, kept = _step(parameters, optimizer, once.kept)
    of = features_of or (lambda number: _first_dimension(features, samples, number))
    states, held = kept - _nbytes(parameters), _nbytes(features)
    high = max(states + once.high, held + stepping.high)
    lines = _lines(iteration, of, once, samples) or [MemoryLine(high, 0), MemoryLine(0, high / samples)]
    return MemoryEstimate(
        samples=samples,
        low_bytes=max(states + once.most_live_forward, held + stepping.most_live),
        high_bytes=high + once.kept.nbytes,
        fixed_bytes=math.ceil(max(stepping.high, *(states + line.fixed for line in lines))) + once.kept.most,
        growing_bytes=max(held / samples, *(line.growing for line in lines)),
        reserve_bytes=once.kept.nbytes,
    )


def _lines(
    iteration: Callable[[Sequence[torch.Tensor]], Ledger], of: FeaturesOf, given: Ledger, samples: int
) -> list[MemoryLine]:
    """Return the lines of forward and backward; empty if other numbers of samples are not comparable.

    ``given`` is the run with ``samples``. ``of`` makes the features of a number of samples.
    """
    fewest = max(samples, FEWEST)
    try:
        once = given if samples == fewest else iteration(of(fewest))
        twice = iteration(of(2 * fewest))
    except (ModelError, RuntimeError):
        return []
    if not same_calls(once.moments, twice.moments):
        return []
    return high_lines(once.moments, twice.moments, fewest)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _first_dimension(features: Sequence[torch.Tensor], samples: int, number: int) -> tuple[torch.Tensor, ...]:
    """Return features of another number of samples, without data.

    A tensor without rows for each sample keeps its shape.
    """
    made = []
    for tensor in features:
        rows = tensor.shape[0] if tensor.dim() else 0
        grows = rows > 0 and rows % samples == 0
        shape = (rows // samples * number, *tensor.shape[1:]) if grows else tensor.shape
        twin = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made.append(twin.requires_grad_(tensor.requires_grad))
    return tuple(made)


@contextlib.contextmanager
def _without_data(model: nn.Module) -> Iterator[None]:
    """Train a user's module, except its frozen units, without data, and restore the module afterwards."""
    with state_kept(model), mode(model, training=True):
        keep_in_eval(model, frozen_units(model))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), uncompiled():
            yield


def _iteration(
    model: nn.Module,
    features: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
    run: Callable[[Any], Any],
    loss: Loss,
) -> Ledger:
    """Run forward and backward; gradients stay until the end."""
    ledger = Ledger()
    device = parameters[0].device
    given = tuple(_like(tensor, device) for tensor in features)
    weights = _without_data_of([*model.parameters(), *model.buffers()])  # kept alive: torch would forget them
    ledger.ignore(weights)
    ledger.hold(given)
    try:
        with ledger:
            total = loss(run(given[0] if len(given) == 1 else given))
            ledger.backward = True
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    except Exception as error:
        raise ModelError(
            f"the tail cannot be run on tensors without data ({type(error).__name__}: {first_line(error)})"
        ) from error
    del gradients, weights
    return ledger


def _step(
    parameters: Sequence[nn.Parameter], optimizer: OptimizerFor, kept: LibraryMemory
) -> tuple[Ledger, int]:
    """Run two steps, the first of which makes the optimizer's state; also return its and gradients' bytes."""
    ledger = Ledger(kept)
    twins = [nn.Parameter(torch.empty_like(p)) for p in parameters]
    ledger.ignore(twins)
    stepper = optimizer(twins)
    _as_with_data(stepper, twins[0].device)
    with ledger:
        for twin in twins:
            twin.grad = torch.empty_like(twin)
        for _ in range(2):
            stepper.step()
    return ledger, ledger.live


def _as_with_data(stepper: torch.optim.Optimizer, device: torch.device) -> None:
    """Let an undecided optimizer step by lists, as torch's do with data on an accelerator."""
    for group in stepper.param_groups:
        if (
            device.type != "cpu"
            and "foreach" in group
            and group["foreach"] is None
            and not group.get("fused")
        ):
            group["foreach"] = True


def _without_data_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return stand-ins for these tensors during a run without data."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return [mode.from_tensor(tensor) for tensor in tensors]


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _mean_square(answer: Any) -> torch.Tensor:
    given = [tensor for tensor in tensors_in(answer) if tensor.requires_grad]
    return torch.stack([tensor.float().square().mean() for tensor in given]).sum()
