"""Peak memory of a stretch of a program, and of training the tail, before either has run.

The very steps of the program, or the user's own tail with its backward and the optimizer's step, run once on
tensors without data while every storage is watched (see ``ledger``); rules add what operators take beside
their results (see ``workspace`` and ``convolution``). Nothing is known of any model.

What an estimate covers: tensors that a run makes or is given, the workspaces of its kernels, and a reserve
for what libraries keep however large the tensors are. What it does not: weights, which are loaded before,
and what an allocator keeps for later after tensors are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from upriver.errors import ConfigError, ModelError
from upriver.profile.ledger import Ledger
from upriver.program.example import tensors_in
from upriver.program.graph import Graph
from upriver.program.precision import autocast_dtype, autocasting
from upriver.program.program import Program
from upriver.program.reuse import overwritable
from upriver.program.steps import Step, Values, bind, first_line, mark_last_uses, schedule
from upriver.program.trace import no_fast_path, state_kept

OptimizerFor: TypeAlias = "Callable[[list[nn.Parameter]], torch.optim.Optimizer]"
Loss: TypeAlias = "Callable[[Any], torch.Tensor]"


RESERVE_BYTES = 4 << 20
"""In every high end: kernels that libraries generate, packing buffers of matrix products, pages half used.

They do not depend on the tensors' sizes; ``benchmarks/memory_model.py`` shows what a process has taken beside
them."""

TRAINING_RESERVE_BYTES = 16 << 20
"""The same for training, which uses more kernels: 14 MB were seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak bytes of one run, weights not counted.

    Attributes:
        samples: How many samples the run takes at once.
        low_bytes: Tensors alone: no run takes less.
        high_bytes: With all that operators may take beside them.
        fixed_bytes: A bound of the part of ``high_bytes`` that does not grow with the samples.
    """

    samples: int
    low_bytes: int
    high_bytes: int
    fixed_bytes: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"samples must be >= 1, got {self.samples}")
        if not 0 <= self.low_bytes <= self.high_bytes or not 0 <= self.fixed_bytes <= self.high_bytes:
            raise ConfigError(
                "0 <= low_bytes <= high_bytes and 0 <= fixed_bytes <= high_bytes must hold, got "
                f"{self.low_bytes}, {self.high_bytes}, {self.fixed_bytes}"
            )

    @property
    def growing_bytes(self) -> float:
        """What one more sample adds to ``high_bytes``, at most."""
        return (self.high_bytes - self.fixed_bytes) / self.samples

    def scaled(self, samples: int) -> MemoryEstimate:
        """The same run with another number of samples.

        Each moment of a run takes ``f + g x samples`` bytes. With fewer samples no moment takes more than
        ``fixed_bytes`` and its share of the rest; with more, than its share of all.

        Raises:
            ConfigError: If ``samples`` is not a whole number from 1 on.
        """
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
            raise ConfigError(f"samples must be a whole number >= 1, got {samples!r}")
        share = samples / self.samples
        fixed = self.fixed_bytes if share <= 1 else int(self.fixed_bytes * share)
        high = int(fixed + self.growing_bytes * samples) + 1
        low = max(0, int((self.low_bytes - self.fixed_bytes) * share)) if share < 1 else self.low_bytes
        return MemoryEstimate(
            samples=samples,
            low_bytes=self.low_bytes if share == 1 else low,
            high_bytes=self.high_bytes if share == 1 else high,
            fixed_bytes=fixed,
        )


# ------------------------------------------------------------------------------------- a stretch


def stretch_peak(program: Program, start: int, stop: int) -> MemoryEstimate:
    """Peak of running stages [start, stop) on one micro-batch, what crosses at both ends included.

    Raises:
        ConfigError: If the program has no such stretch.
    """
    return StretchPeaks(program).of(start, stop)


class StretchPeaks:
    """The peaks of all stretches of one program; what they have in common is worked out once."""

    def __init__(self, program: Program) -> None:
        self._graph, self._device = program.graph, program.device
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._live = [program.live(position) for position in range(program.num_stages + 1)]
        with self._running():
            self._fixed = _fixed_values(self._graph, self._device)

    def of(self, start: int, stop: int) -> MemoryEstimate:
        """The peak of [start, stop).

        Raises:
            ConfigError: If the program has no such stretch.
        """
        last = len(self._live) - 1
        if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop <= last):
            raise ConfigError(f"start and stop must be 0 <= start <= stop <= {last}, got {start!r}, {stop!r}")
        over = overwritable(self._graph)
        with self._running():
            given = {value.name: value.spec.empty(self._device) for value in self._live[start]}
            values, ledger = dict(given), Ledger()
            ledger.ignore(self._fixed.values())
            ledger.hold(given.values())
            with ledger:
                plan = schedule(self._graph).stages[start:stop]
                for stage, nodes in zip(self._graph.stages[start:stop], plan, strict=True):
                    steps = bind(nodes, self._fixed, self._device, over)
                    mark_last_uses(steps, nodes, [*stage.live, *self._fixed])
                    _run(steps, values, frozenset(given))
        return _estimate(ledger, self._graph.micro_batch)

    def stages(self) -> tuple[MemoryEstimate, ...]:
        """The peak of each stage by itself."""
        return tuple(self.of(position, position + 1) for position in range(len(self._live) - 1))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        autocast = autocasting(self._device, autocast_dtype(self._graph.autocast))
        with self._mode, torch.no_grad(), no_fast_path(), autocast:
            yield


def _fixed_values(graph: Graph, device: torch.device) -> Values:
    """Weights and constants of a graph, without data."""
    weights = {weight.name: weight.spec.empty(device) for weight in graph.weights}
    plan = schedule(graph)
    values: Values = {}
    steps = bind(plan.constants, weights, device)
    mark_last_uses(steps, plan.constants, [*plan.kept, *weights])
    _run(steps, values, frozenset())
    return weights | values


def _run(steps: Iterable[Step], values: Values, borrowed: frozenset[str]) -> None:
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
) -> MemoryEstimate:
    """Peak of one iteration of training: forward, backward and step, as in every iteration but the first.

    Counted are the features, what backward has saved, gradients of parameters and of activations on their
    way, the optimizer's state and what its step takes. Gradients are taken to be gone when an iteration
    begins (``zero_grad()`` sets them to None unless told otherwise). Nothing of the model is changed.

    Args:
        model: Whose parameters are trained: those that require a gradient.
        features: What ``run`` takes, of a training batch; only their form matters, so they may be on the
            ``meta`` device.
        samples: How many samples that is.
        run: From the features (the one tensor where there is one) to the answer; the model itself by default.
        loss: From the answer to a number; the mean of squares by default.
        optimizer: Makes the optimizer.

    Raises:
        ConfigError: If no parameter requires a gradient, or ``samples`` or ``features`` are none.
        ModelError: If the tail cannot run on tensors without data, or its answer depends on no parameter.
    """
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ConfigError(f"samples must be a whole number >= 1, got {samples!r}")
    if not features or not all(isinstance(tensor, torch.Tensor) for tensor in features):
        raise ConfigError("features must be one or more tensors")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameter that requires a gradient, so nothing is trained")
    with _without_data(model):
        stepping, kept = _step(parameters, optimizer)
        iteration = _iteration(model, features, parameters, run or model, loss or _mean_square)
    gradients = sum(p.nbytes for p in parameters)
    states = kept - gradients
    held = sum(tensor.nbytes for tensor in features)  # by whoever trains, through the step too
    high = max(states + iteration.high, held + stepping.high) + TRAINING_RESERVE_BYTES
    return MemoryEstimate(
        samples=samples,
        low_bytes=max(states + iteration.low, held + stepping.low),
        high_bytes=high,
        fixed_bytes=min(
            high, max(states + gradients + iteration.fixed, stepping.high) + TRAINING_RESERVE_BYTES
        ),
    )


@contextlib.contextmanager
def _without_data(model: nn.Module) -> Iterator[None]:
    """Run a user's module on tensors without data and leave it as it was."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with state_kept(model), torch.random.fork_rng(devices=[]), mode, torch.enable_grad():
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
            ledger.summing = True
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    except Exception as error:
        raise ModelError(
            f"the tail cannot be run on tensors without data ({type(error).__name__}: {first_line(error)})"
        ) from error
    del gradients, weights
    return ledger


def _step(parameters: Sequence[nn.Parameter], optimizer: OptimizerFor) -> tuple[Ledger, int]:
    """Two steps, the first of which makes the optimizer's state; with the bytes of gradients and state."""
    ledger = Ledger()
    twins = [nn.Parameter(torch.empty_like(p)) for p in parameters]
    ledger.ignore(twins)
    stepper = optimizer(twins)
    with ledger:
        for twin in twins:
            twin.grad = torch.empty_like(twin)
        for _ in range(2):
            stepper.step()
    return ledger, ledger.live


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


def _estimate(ledger: Ledger, samples: int) -> MemoryEstimate:
    return MemoryEstimate(
        samples=samples,
        low_bytes=ledger.low,
        high_bytes=ledger.high + RESERVE_BYTES,
        fixed_bytes=min(ledger.fixed, ledger.high) + RESERVE_BYTES,
    )
