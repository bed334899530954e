"""Peak memory of a stretch of a program, and of training the tail, before either has run.

The very steps of the program, or the user's own tail with its backward and the optimizer's step, run once on
tensors without data while every storage is watched (see ``ledger``); rules add what operators take beside
their results (see ``workspace`` and ``convolution``). Nothing is known of any model.

What an estimate covers: tensors that a run makes or is given, the workspaces of its kernels, and what
libraries keep however large the tensors are (see ``libraries``). What it does not: weights, which are loaded
before, and what an allocator keeps for later after tensors are gone.
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
from upriver.profile.memory.lines import MemoryLine, high_lines, same_calls
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
"""A line in the number of samples is taken from here on: below, kernels are others (see ``convolution``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of one run, weights not counted.

    Attributes:
        samples: How many samples the run takes at once.
        low_bytes: Tensors alone: no run takes less. Of training, those that forward has made and saved, and
            those alive in the optimizer's step: what backward adds, a run with data may partly write over.
        high_bytes: With all that operators may take beside them, and what libraries keep.
        fixed_bytes: With ``growing_bytes`` for each sample a bound at any number of samples.
        growing_bytes: The same.
        reserve_bytes: How much of ``high_bytes`` libraries keep, run after run.
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
    """Peak of running stages [start, stop) on one micro-batch, what crosses at both ends included.

    Raises:
        ConfigError: If the program has no such stretch.
    """
    return StretchPeaks(program.graph, program.device).of(start, stop)


def stage_peaks(program: Program) -> tuple[float, ...]:
    """Peak bytes of each stage for one sample, of which the micro-batch's multiple is never under.

    The largest of a stretch's stages is never under the stretch's own peak: counted in are what the stretch
    was given, which whoever runs it holds until its end, and what libraries keep after all stages. What does
    not grow with the samples is spread over them.
    """
    return StretchPeaks(program.graph, program.device).stages()


def known_peaks(program: Program) -> tuple[float, ...]:
    """:func:`stage_peaks`; where the stages cannot run without data, what is alive of their tensors alone."""
    try:
        return stage_peaks(program)
    except UpriverError as error:
        log.info("the memory of stages is that of their tensors alone: %s", error)
        return tuple(float(stage.peak_bytes) for stage in program.stages)


class StretchPeaks:
    """The peaks of all stretches of one program; what they have in common is worked out once.

    Args:
        graph: A checked one; its weights need not be there.
        device: Where the program is to run.
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
        """The peak of [start, stop).

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
            # A program is made for one micro-batch, so what of it does not grow is not known.
            fixed_bytes=tensors + ledger.kept.most,
            growing_bytes=tensors / self._graph.micro_batch,
            reserve_bytes=ledger.kept.nbytes,
        )

    def _ledger(
        self, start: int, stop: int, kept: LibraryMemory | None = None, *, held: bool = True
    ) -> Ledger:
        """What running [start, stop) makes and takes; ``held`` if whoever runs it holds what it is given."""
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
        """Peak bytes of each stage for one sample of the micro-batch; see :func:`stage_peaks`."""
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
    """The least that stages can be said to take for the largest of a stretch to cover the stretch.

    A stretch from ``start`` takes ``first[start]`` in its first stage, and ``given[start] + later[k]`` in
    stage ``k`` behind it. Where an earlier stage of the stretch takes as much anyway, nothing is added.
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
    """Weights and constants of a graph, without data."""
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
    """Peak of one iteration of training: forward, backward and step, as in every iteration but the first.

    Counted are the features, what backward has saved, gradients of parameters and of activations on their
    way, the optimizer's state and what its step takes. Gradients are taken to be gone when an iteration
    begins (``zero_grad()`` sets them to None unless told otherwise). The model runs as it trains, its frozen
    units in eval, whatever mode it is in; nothing of it is changed.

    Forward and backward run with two numbers of samples, so that what grows with them is known. A tail that
    runs with ``samples`` only has ``fixed_bytes`` that are all of it.

    Args:
        model: Whose parameters are trained: those that require a gradient.
        features: What ``run`` takes, of a training batch; only their form matters, so they may be on the
            ``meta`` device.
        samples: How many samples that is.
        run: From the features (the one tensor where there is one) to the answer; the model itself by default.
        loss: From the answer to a number; the mean of squares by default.
        optimizer: Makes the optimizer.
        features_of: Makes the features of another number of samples; their first dimension grows by default.

    Raises:
        ConfigError: If no parameter requires a gradient, or ``samples`` or ``features`` are none.
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
    """Of forward and backward; none if runs with other numbers of samples cannot be compared.

    Args:
        given: The run with ``samples``.
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
    """The same for another number of samples, without data; what has no rows for each of them stays."""
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
    """Train a user's module, but for its frozen units, on tensors without data and leave it as it was."""
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
    """Forward and backward; gradients stay until the end."""
    ledger = Ledger()
    device = parameters[0].device
    given = tuple(_like(tensor, device) for tensor in features)
    weights = _without_data_of([*model.parameters(), *model.buffers()])  # kept: torch forgets them otherwise
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
    """Two steps, the first of which makes the optimizer's state; with the bytes of gradients and state."""
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
    """Let an optimizer that was not told how step by lists, as torch's do with data on an accelerator."""
    for group in stepper.param_groups:
        if (
            device.type != "cpu"
            and "foreach" in group
            and group["foreach"] is None
            and not group.get("fused")
        ):
            group["foreach"] = True


def _without_data_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What stands in for these while a run has no data."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return [mode.from_tensor(tensor) for tensor in tensors]


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _mean_square(answer: Any) -> torch.Tensor:
    given = [tensor for tensor in tensors_in(answer) if tensor.requires_grad]
    return torch.stack([tensor.float().square().mean() for tensor in given]).sum()
