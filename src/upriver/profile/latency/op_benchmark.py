"""Time one operator alone, in repeated runs on random tensors, as it would run in a program.

The operator runs as the step of a program and finds caches in the same state. Its input was just written. Its
weights and code were last used before other operators ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from upriver.errors import ProgramError
from upriver.profile.latency.op_calls import OpCall
from upriver.program.eval_mode import no_fast_path
from upriver.program.graph.devices import check_device
from upriver.program.graph.schedule import ScheduledNode, Values, first_line
from upriver.program.graph.schema import DTYPES, reference

POOL_BYTES = 96 << 20
"""Size of the random numbers that tensors are cut from: larger than the caches of most machines."""

MOST_SETS = 64
"""Largest number of sets of weights that runs use in turn."""

ALIGNMENT = 64
"""Alignment in bytes of torch's own tensors."""

GROWN_BYTES = 31 << 20
"""Size of a tensor allocated and freed at the start. The C library requests new memory for tensors larger
than any freed before, up to 32 MiB, and each new page costs time. A program has freed larger tensors after
its first run."""

EVICTED_BYTES = 32 << 20
"""Bytes read between two runs, for the weights of other operators in a program. They evict an operator's
input and even its code from caches, which makes short operators at least twice as slow."""

QUEUED_RUNS = 32
"""Runs queued at a time on an accelerator: in a program it does not wait between operators either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Limits on the runs that time an operator.

    Attributes:
        runs: Number of runs. The lower quartile counts: other work makes some runs slow, and none fast.
        most_s: Total time after which three runs are enough.
    """

    runs: int = 5
    most_s: float = 0.05


class OpBenchmark:
    """Time operators on a device, one at a time."""

    def __init__(self, device: str | torch.device = "cpu", *, seed: int = 0) -> None:
        """Draw the numbers that all tensors are made of.

        Raises:
            ConfigError: If torch cannot compute on the device.
        """
        self.device = check_device(device)
        self._pool = _random(POOL_BYTES // 4, seed).to(self.device)
        self._next = 0
        if self.device.type == "cpu":
            torch.empty(GROWN_BYTES, dtype=torch.uint8, device="cpu").zero_()

    @torch.no_grad()
    def seconds(self, call: OpCall, timing: Timing | None = None) -> float:
        """Return the seconds of a call on an otherwise idle machine.

        Raises:
            ProgramError: If the operator refuses random tensors of these forms.
        """
        with no_fast_path():
            try:
                return self._seconds(call, timing or Timing())
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # an operator may raise any exception
                raise ProgramError(f"{call.node.op} cannot be timed alone: {first_line(error)}") from error

    def _seconds(self, call: OpCall, timing: Timing) -> float:
        operands = {name: self._numbers(call, name).clone() for name in call.read if name not in call.fixed}
        values = {name: _formed(call, name, numbers) for name, numbers in operands.items()}
        steps = cycle(self._steps(call))
        for _ in range(2):  # compiles kernels and allocates memory
            next(steps).run(values)
        taken: list[float] = []
        while len(taken) < 3 or (len(taken) < timing.runs and sum(taken) < timing.most_s):
            self._stretch(EVICTED_BYTES // 4).sum()
            for numbers in operands.values():
                if numbers.is_floating_point():
                    numbers.copy_(self._stretch(numbers.numel()))
            taken.append(self._spent(steps, values))
        return sorted(taken)[len(taken) // 4]

    def _spent(self, steps: Iterator[ScheduledNode], values: Values) -> float:
        runs = 1 if self.device.type == "cpu" else QUEUED_RUNS
        self._synchronize()
        began = time.perf_counter()
        for _ in range(runs):
            next(steps).run(values)
        self._synchronize()
        return (time.perf_counter() - began) / runs

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _steps(self, call: OpCall) -> list[ScheduledNode]:
        """Return the operator bound to each of its sets of weights."""
        names = [name for name in call.read if name in call.fixed]
        nbytes = sum(call.specs[name].nbytes for name in names)
        sets = min(max(1, POOL_BYTES // max(nbytes, 1)), MOST_SETS) if names else 1
        over = reference(call.node.args[0]) if call.in_place else None
        found = []
        for _ in range(sets):
            weights = {name: _formed(call, name, self._numbers(call, name)) for name in names}
            step = ScheduledNode(0, call.node, weights, self.device, over)
            step.done = tuple(output.name for output in call.node.outputs if output is not None)
            found.append(step)
        return found

    def _numbers(self, call: OpCall, name: str) -> torch.Tensor:
        """Return the numbers of a tensor: random ones, or integers that are valid indices."""
        spec = call.specs[name]
        dtype, count = DTYPES[spec.dtype], max(1, spec.span)
        if dtype.is_floating_point:
            return self._stretch(count).to(dtype)
        generator = torch.Generator().manual_seed(0)
        below = 2 if spec.dtype == "bool" else _places(call, name)
        return torch.randint(0, below, (count,), generator=generator, device="cpu").to(self.device, dtype)

    def _stretch(self, count: int) -> torch.Tensor:
        """Return the next random numbers of the pool; repeated if the pool is too small."""
        if count > len(self._pool):
            return self._pool.repeat(-(-count // len(self._pool)))[:count]
        if self._next + count > len(self._pool):
            self._next = 0
        start = self._next
        self._next += -(-count * 4 // ALIGNMENT) * ALIGNMENT // 4
        return self._pool[start : start + count]


def _formed(call: OpCall, name: str, numbers: torch.Tensor) -> torch.Tensor:
    spec = call.specs[name]
    return numbers.as_strided(spec.shape, spec.stride)


def _random(count: int, seed: int) -> torch.Tensor:
    """Return numbers of either sign with magnitudes from 0.5 to 1.5: no kernel is slow at these."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu").add_(0.5)
    signs = torch.randint(0, 2, (count,), dtype=torch.float32, generator=generator, device="cpu")
    return numbers.mul_(signs.mul_(2).sub_(1))


_TABLES = {"embedding": "weight", "index_select": "self"}
"""Operators that select by index, and the argument that they select from."""


def _places(call: OpCall, name: str) -> int:
    """Return the upper bound, exclusive, of the integers of a tensor."""
    arguments = call.arguments
    table = call.spec(arguments[_TABLES[call.name]]) if call.name in _TABLES else None
    if table is None or reference(arguments.get("indices", arguments.get("index"))) != name:
        return 1
    return max(1, table.shape[int(arguments.get("dim", 0))])
