"""Predict epoch times of all splits from the two runs that HAPI's Algorithm 1 makes before it decides.

Sources of the figures, for one network over one link (a *pair*):

* **The capture of the network**: bytes that cross each cut and operations of each stage.
* **The pair's own two runs**, earliest split and freeze point, and no other run of that network. They give
  five figures: the seconds of an operation on the training side (from the difference of the two forward
  passes), the additional cost of a byte there (from the difference of the two iterations), the constant
  cost of a batch, the cost of a byte on its way beyond the link's nominal rate, and the constant cost of a
  request.
* **The profiling runs of the other networks**, over both links: how many times longer the storage side takes
  for the same stages, and how many batches an epoch has. The first is a property of the two machines, the
  second of the program that was run on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from benchmarks.published_runs.runs import Pair, Run
from upriver.cost import CostModel
from upriver.errors import ConfigError
from upriver.program.models.registry import load_model
from upriver.program.split.cut_survey import survey
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    TailProfile,
    Tier,
    Workload,
)

LABEL_BYTES = 8
"""Bytes that the answers carry in addition to the features of a sample: its class as int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Capture of a network. Index ``k`` is the cut after stage ``k``, and 0 the input.

    Attributes:
        out_bytes: Bytes per sample, with its label.
        flops: Operations before the cut, per sample.
        param_bytes: Weights of the whole network.
    """

    names: tuple[str, ...]
    out_bytes: tuple[float, ...]
    flops: tuple[float, ...]
    param_bytes: float


def capture(name: str) -> Network:
    """Capture one of torchvision's networks as a user would, and list its cuts."""
    model, inputs = load_model(f"torchvision:{name}")
    rows = survey(model, inputs.example(2)).rows
    return Network(
        names=tuple(row.after for row in rows),
        out_bytes=tuple(row.bytes_per_sample + LABEL_BYTES for row in rows),
        flops=tuple(row.flops_before for row in rows),
        param_bytes=rows[-1].param_bytes_before,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """The inputs of a prediction for a pair: the capture, and two runs."""

    network: Network
    early: Run
    late: Run

    @classmethod
    def of(cls, network: Network, pair: Pair) -> Profiled:
        """Select the two profiling runs of the pair, and leave the others out."""
        early, late = pair.profiling
        return cls(network=network, early=early, late=late)

    @property
    def runs(self) -> tuple[Run, Run]:
        """Return the two runs."""
        return self.early, self.late

    def bytes(self, run: Run) -> float:
        """Return the bytes that cross the link in a batch."""
        return self.network.out_bytes[run.split] * run.train_batch

    def pushed_s(self, run: Run) -> float:
        """Return the seconds of the stages before the split on the training side, for a batch."""
        return self.seconds_per_flop * self.network.flops[run.split] * run.train_batch

    @property
    def seconds_per_flop(self) -> float:
        """Return the seconds of an operation on the training side.

        The freeze point saves this side some seconds and some operations. The result is their quotient.
        """
        early, late = self.runs
        flops = self.network.flops[late.split] - self.network.flops[early.split]
        return (early.forward_s - late.forward_s) / (flops * late.train_batch)

    @property
    def receive_s_per_byte(self) -> float:
        """Return the seconds per byte on the training side for unpacking and copying.

        Iterations differ by this cost in addition to the forward pass.
        """
        early, late = self.runs
        return (_unpack_s(early) - _unpack_s(late)) / (self.bytes(early) - self.bytes(late))

    @property
    def batch_s(self) -> float:
        """Return the constant seconds of a batch on the training side.

        They cover the tail and everything else that no split changes.
        """
        return self.late.iteration_s - self.receive_s_per_byte * self.bytes(self.late)


def _unpack_s(run: Run) -> float:
    return run.iteration_s - run.forward_s


# ---------------------------------------------------------------------------- from the other networks


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Figures that hold for any network on these two machines.

    Attributes:
        storage_load: How many times longer the storage side takes for the same stages.
        batches: Batches of an epoch.
    """

    storage_load: float
    batches: int


def fit_machines(others: Sequence[Profiled]) -> Machines:
    """Fit the figures to the profiling runs of the networks that are not predicted."""
    return Machines(storage_load=_storage_load(others), batches=_batches(others))


def _storage_load(others: Sequence[Profiled]) -> float:
    """Return the storage load, by least squares of relative errors over fetch times beyond the nominal rate.

    The regressors are bytes, the stages pushed down, the weights to load and a constant. None of them can
    save time.
    """
    known = [(profiled, run) for profiled in others for run in profiled.runs]
    found = _least_squares(
        [(each.bytes(run), each.pushed_s(run), each.network.param_bytes, 1.0) for each, run in known],
        [run.fetch_s - each.bytes(run) / run.bandwidth_bytes_per_s for each, run in known],
        [run.fetch_s for _, run in known],
    )
    return float(found[1])


def _batches(others: Sequence[Profiled]) -> int:
    """Return the most whole batches whose fetches fit into every epoch.

    Synchronised runs overlap no fetches.
    """
    return math.floor(min(run.epoch_s / run.fetch_s for profiled in others for run in profiled.runs))


def _least_squares(
    factors: Sequence[Sequence[float]], seconds: Sequence[float], scale: Sequence[float]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return non-negative coefficients that minimise the squared errors relative to ``scale``."""
    matrix, target, weight = np.array(factors), np.array(seconds), 1 / np.array(scale)
    size = np.abs(matrix).max(axis=0)  # bytes and seconds are 1e9 apart
    found, _ = nnls(matrix / size * weight[:, np.newaxis], target * weight)
    return np.asarray(found / size)


# ---------------------------------------------------------------------------------- the prediction


def predict(profiled: Profiled, machines: Machines) -> dict[int, float]:
    """Predict the seconds of an epoch at each split that fits, earliest to freeze point.

    Raises:
        ConfigError: If the two runs say that more bytes or more stages take less time.
    """
    workload = Workload(
        batch_size=profiled.late.train_batch, num_samples=machines.batches * profiled.late.train_batch
    )
    model = CostModel(profile_of(profiled, machines), cluster_of(profiled, machines), workload)
    splits = range(profiled.early.split, profiled.late.split + 1)
    return {split: model.evaluate(split).epoch_s for split in splits}


def profile_of(profiled: Profiled, machines: Machines) -> Profile:
    """Return the network's stages, with seconds in proportion to their operations."""
    network, per_flop = profiled.network, profiled.seconds_per_flop
    if per_flop <= 0:
        raise ConfigError(f"forward_s must fall from split {profiled.early.split} to {profiled.late.split}")
    _, request_s = _answers(profiled, machines)
    return Profile(
        model=profiled.late.model,
        freeze=profiled.late.split,
        input=InputProfile(stored_bytes=network.out_bytes[0], tensor_bytes=network.out_bytes[0]),
        stages=tuple(
            StageProfile(
                name=network.names[cut],
                kind="model",
                out_bytes=network.out_bytes[cut],
                flops=(flops := network.flops[cut] - network.flops[cut - 1]),
                seconds={tier: (0.0, flops * per_flop) for tier in (Tier.STORAGE, Tier.COMPUTE)},
            )
            for cut in range(1, profiled.late.split + 1)
        ),
        tail=TailProfile(seconds=(profiled.batch_s, 0.0)),
        model_load_s={Tier.STORAGE: request_s},
    )


def cluster_of(profiled: Profiled, machines: Machines) -> Cluster:
    """Return the two machines and the link at its nominal rate.

    A batch is one request, and nothing overlaps.
    """
    per_byte, _ = _answers(profiled, machines)
    return Cluster(
        link=Link(bandwidth_bytes_per_s=profiled.late.bandwidth_bytes_per_s),
        storage=StorageTier(
            load=machines.storage_load,
            seconds_per_byte={"encode": per_byte},
            reuse_model=False,
            request_samples=profiled.late.train_batch,
        ),
        compute=ComputeTier(seconds_per_byte={"decode": profiled.receive_s_per_byte}),
        stream="synchronous",
    )


def _answers(profiled: Profiled, machines: Machines) -> tuple[float, float]:
    """Return the seconds per byte beyond the link's nominal rate and per request, from the two fetches."""
    runs = profiled.runs
    beyond = [
        run.fetch_s
        - profiled.bytes(run) / run.bandwidth_bytes_per_s
        - machines.storage_load * profiled.pushed_s(run)
        for run in runs
    ]
    found = _least_squares(
        [(profiled.bytes(run), 1.0) for run in runs], beyond, [run.fetch_s for run in runs]
    )
    return float(found[0]), float(found[1])
