"""Predict the seconds of every node and stage of a network on a device before it has run there.

`upriver calibrate` makes a `Predictor` for a device once. An operator without a model (of an unknown kind, or
of a type other than float32) is measured by itself. It never counts as free.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch

from upriver.engine.fingerprint import fingerprint
from upriver.errors import ConfigError
from upriver.profile.latency.op_benchmark import OpBenchmark, Timing
from upriver.profile.latency.op_calls import OpCall, calls
from upriver.profile.latency.op_kinds import OpWork, Side, works_of
from upriver.profile.latency.regression import OwnModel, PaperModel, nnls_fit
from upriver.profile.profile_cache import TierIdentity
from upriver.program.graph.devices import check_device
from upriver.program.graph.schema import Graph

__all__ = [
    "MODELS",
    "KindError",
    "ModelName",
    "OwnModel",
    "PaperModel",
    "Predictor",
    "measure_unknown",
    "nnls_fit",
    "place_of",
]

ModelName: TypeAlias = Literal["ours", "edge", "device"]
"""Our model, or LoADPart's with the features of one of its columns."""

MODELS: tuple[ModelName, ...] = get_args(ModelName)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindError:
    """Error of a model on configurations of a kind that it was not fitted to.

    Attributes:
        count: Number of configurations.
        rmse_us: Root of the mean squared error, in microseconds.
        mape_percent: Mean absolute error relative to the measurement, in percent.
        count_long: Number of configurations of 50 microseconds or more.
        mape_long_percent: ``mape_percent`` of these; None where there are none.
    """

    kind: str
    model: ModelName
    count: int
    rmse_us: float
    mape_percent: float
    count_long: int
    mape_long_percent: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """The latency models of one device.

    Attributes:
        place: The device; the models hold for no other.
        fitted_at: Time of the fit, in ISO 8601.
        configurations: Number of configurations that the models were fitted to.
        papers: LoADPart's models.
        errors: Errors of each model and kind on held-out configurations.
    """

    place: TierIdentity
    fitted_at: str
    configurations: int
    papers: Mapping[Side, PaperModel]
    ours: OwnModel
    errors: tuple[KindError, ...] = ()

    def work_seconds(self, works: Sequence[OpWork], model: ModelName = "ours") -> list[float | None]:
        """Return the seconds of each work; None where its kind has no model.

        Raises:
            ConfigError: If there is no such model.
        """
        if model not in MODELS:
            raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
        return self.ours.seconds(works) if model == "ours" else self.papers[model].seconds(works)

    def node_seconds(self, graph: Graph, model: ModelName = "ours") -> list[float | None]:
        """Return the seconds of each node: 0 for views and constants, None for nodes to be measured."""
        return self._seconds(list(calls(graph)), model)

    def stage_seconds(
        self, graph: Graph, *, measured: Mapping[str, float] | None = None, model: ModelName = "ours"
    ) -> list[float]:
        """Return the seconds of each stage: the sum over its nodes.

        Args:
            measured: Seconds from `measure_unknown` of the nodes without a model.

        Raises:
            ConfigError: If ``measured`` lacks a node; the message names the operator.
        """
        measured = measured or {}
        every = list(calls(graph))
        nodes = self._seconds(every, model)
        for index, (call, seconds) in enumerate(zip(every, nodes, strict=True)):
            if seconds is None and call is not None:
                nodes[index] = found = measured.get(call.signature)
                if found is None:
                    raise ConfigError(
                        f"no latency model for operator {call.node.op!r} (node {index}); measure it with "
                        "upriver.profile.latency.predictor.measure_unknown"
                    )
        stops = [0, *(stage.stop for stage in graph.stages)]
        return [sum(seconds or 0.0 for seconds in nodes[start:stop]) for start, stop in pairwise(stops)]

    def unknown(self, graph: Graph, model: ModelName = "ours") -> dict[str, OpCall]:
        """Return the calls of nodes without a model, by signature."""
        every = list(calls(graph))
        nodes = self._seconds(every, model)
        return {
            call.signature: call
            for call, seconds in zip(every, nodes, strict=True)
            if call is not None and seconds is None
        }

    def _seconds(self, every: Sequence[OpCall | None], model: ModelName) -> list[float | None]:
        """Return the seconds of each call: the sum over its works."""
        parts = [() if call is None else works_of(call) for call in every]
        each = iter(self.work_seconds([work for works in parts for work in works], model))
        found: list[float | None] = []
        for works in parts:
            seconds = [next(each) for _ in works]
            known = [second for second in seconds if second is not None]
            found.append(sum(known) if len(known) == len(seconds) else None)
        return found


def measure_unknown(
    graph: Graph,
    predictor: Predictor,
    *,
    device: str | torch.device = "cpu",
    model: ModelName = "ours",
    timing: Timing | None = None,
) -> dict[str, float]:
    """Measure each node without a model, alone, on random inputs; return the seconds by signature.

    Raises:
        ConfigError: If torch cannot compute on the device.
        ProgramError: If an operator refuses random inputs of its forms.
    """
    unknown = predictor.unknown(graph, model)
    if not unknown:
        return {}
    bench = OpBenchmark(device)
    return {signature: bench.seconds(call, timing) for signature, call in unknown.items()}


def place_of(device: str | torch.device = "cpu") -> TierIdentity:
    """Return the identity of this machine, with this process's number of compute threads."""
    found = check_device(device)
    return TierIdentity(
        host=platform.node(),
        device=str(found),
        threads=torch.get_num_threads(),
        versions=fingerprint(found),
    )
