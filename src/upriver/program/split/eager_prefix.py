"""Run the frozen part of a model as it is written, before it is captured and where it cannot be.

The user's own modules run, in eval and without gradients, up to the freeze point. A captured program gives
the same bits: a proof compares the two. So a job may begin here and go on with a program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from upriver.errors import CaptureError
from upriver.program.compiled_code import uncompiled
from upriver.program.eval_mode import no_fast_path
from upriver.program.example_inputs import Example, TensorSource, tensors_in
from upriver.program.freeze import InEval
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.devices import moment, seconds_between
from upriver.program.split.freeze_point import CrossingTensor, EvalPlan, FreezePoint
from upriver.program.split.module_trace import Trace
from upriver.program.split.tail import Tail


class _Reached(BaseException):
    """Signal that all crossing tensors exist. Not an `Exception`, so that the user's code lets it pass."""


class EagerPrefix:
    """Run a model up to its freeze point, as one stage.

    Any number of threads may call it. They take turns, since the model's modules are shared.

    Args:
        example: A micro-batch of inputs, on the model's device.
        ships: The tensors that cross the freeze point.
        in_eval: Modules that stay in eval during the job.

    Attributes:
        micro_batch: Exact number of samples in a run.
        turn: Held during a run. Hold it while the tail runs, which shares the model's modules.
    """

    num_stages = 1

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        ships: Sequence[CrossingTensor],
        in_eval: EvalPlan,
        *,
        autocast: torch.dtype | None,
    ) -> None:
        self.micro_batch = example.samples
        self.device = example.tensors[0].device
        self._model, self._example, self._autocast = model, example, autocast
        self._ships = tuple(ships)
        self._in_eval = InEval(model, in_eval.modules)
        self.turn = threading.Lock()

    @property
    def sample_form(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a sample of the first input."""
        first = self._example.tensors[0]
        return tuple(first.shape[1:]), first.dtype

    @torch.no_grad()
    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Run a micro-batch from its input to the freeze point, as :meth:`Program.run` does.

        Args:
            on_stage: Called with the position 1 and the seconds of the run.

        Raises:
            CaptureError: If the model gives no tensor that crossed the freeze point before.
        """
        given = tuple(tensor.to(self.device) for tensor in tensors)
        if start == stop:
            return given
        began = moment(self.device)
        kept = {
            ship.source: given[ship.source.leaf].clone() for ship in self._ships if ship.source.path is None
        }
        call = self._example.with_tensors(given)
        values = self._values(kept, lambda: self._model(*call.args, **call.kwargs))
        if on_stage is not None:
            on_stage(stop, seconds_between(began, moment(self.device)))
        return values

    @torch.no_grad()
    def run_rest(self, earlier: Tail, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run a micro-batch from an earlier freeze point to this one.

        Args:
            earlier: Tail of the same model after the earlier freeze point.
            tensors: The tensors that cross there.

        Raises:
            CaptureError: If the model gives no tensor that crossed the freeze point before.
        """
        given = tuple(tensor.to(self.device) for tensor in tensors)
        kept = {
            ship.source: value.clone()
            for ship, value in zip(earlier.values.ships, given, strict=True)
            if ship.source.path is None
        }
        return self._values(kept, lambda: earlier(earlier.values.one_or_all(given)))

    def _values(
        self, kept: dict[TensorSource, torch.Tensor], forward: Callable[[], object]
    ) -> tuple[torch.Tensor, ...]:
        """Return the crossing tensors of one forward pass, which ends as soon as all of them exist.

        Args:
            kept: Those that exist already.
        """
        with (
            self.turn,
            self._all_in_eval(),
            uncompiled(),
            no_fast_path(),
            autocasting(self.device, self._autocast),
            self._hooks(kept),
            contextlib.suppress(_Reached),
        ):
            forward()
        missing = [str(ship.source) for ship in self._ships if ship.source not in kept]
        if missing:
            raise CaptureError(f"the model gave no {missing[0]!r}")
        return tuple(kept[ship.source] for ship in self._ships)

    @contextlib.contextmanager
    def _hooks(self, kept: dict[TensorSource, torch.Tensor]) -> Iterator[None]:
        """Keep the results that cross, as the last hook of each module that makes one."""
        wanted: dict[str, list[CrossingTensor]] = {}
        for ship in self._ships:
            if ship.source.path is not None:
                wanted.setdefault(ship.source.path, []).append(ship)
        numbers = dict.fromkeys(wanted, -1)

        def keep(path: str, result: Any) -> None:
            numbers[path] += 1
            tensors = tensors_in(result)
            for ship in wanted[path]:
                if ship.source.number == numbers[path] and ship.source.leaf < len(tensors):
                    tensor = tensors[ship.source.leaf]
                    # A later operator may write into it. Otherwise keep its strides, which decide low bits.
                    kept[ship.source] = tensor.clone() if ship.overwritten else tensor
            if all(ship.source in kept for ship in self._ships):
                raise _Reached

        with contextlib.ExitStack() as hooks:
            for path in wanted:

                def leave(_module: nn.Module, _args: Any, result: Any, path: str = path) -> None:
                    keep(path, result)

                module = self._model.get_submodule(path)
                hooks.callback(module.register_forward_hook(leave).remove)
            yield

    @contextlib.contextmanager
    def _all_in_eval(self) -> Iterator[None]:
        """Set the flag of every module as in eval; frozen modules are switched, others get their flag back.

        A trained module is not switched: its own ``train()`` may write to its weights.
        """
        self._in_eval()
        trained = [module for module in self._model.modules() if module.training]
        compiled = [
            (m, m._compiled_call_impl) for m in self._model.modules() if m._compiled_call_impl is not None
        ]
        try:
            for module in trained:
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            yield
        finally:
            for module in trained:
                module.training = True
            for module, call in compiled:
                module._compiled_call_impl = call


def runs_alone(calls: Trace, point: FreezePoint, trained: Sequence[str]) -> bool:
    """Return whether no trained module ends its call before the freeze point is reached.

    An eager run would otherwise call such a module once more than a training step does.

    Args:
        trained: Paths of the modules that hold trainable parameters, at any depth.
    """
    paths = {ship.source.path for ship in point.ships if ship.source.path is not None}
    by_index = {call.index: call for call in calls.calls}
    last = max((by_index[index].exit for index in point.skipped if by_index[index].path in paths), default=-1)
    held = set(trained)
    return not any(call.path in held and call.exit < last for call in calls.calls)
