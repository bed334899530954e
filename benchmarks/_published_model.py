"""Epoch times of all splits, from the two runs that HAPI's Algorithm 1 makes before it decides.

What is taken from where, for one network over one link (a *pair*):

* **The capture of the network**: bytes that cross each cut and operations of each stage.
* **The pair's own two runs**, earliest split and freeze point, and no other run of that network: the seconds
  of an operation on the training side (from the difference of the two forward passes), what a byte costs
  there beside it (from the difference of the two iterations), what a batch costs whatever its size, what a
  byte costs on its way beyond the link's nominal rate, and what a request costs whatever its answer's size.
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

from _published_data import Pair, Run
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
"""What the answers carry beside the features of a sample: its class as int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What the capture of a network says; index ``k`` is the cut after stage ``k``, 0 the input.

    Attributes:
        out_bytes: Per sample, its label included.
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
    """All that a prediction may know of a pair: the capture, and two runs."""

    network: Network
    early: Run
    late: Run

    @classmethod
    def of(cls, network: Network, pair: Pair) -> Profiled:
        """Take the two runs, and leave the others behind."""
        early, late = pair.profiling
        return cls(network=network, early=early, late=late)

    @property
    def runs(self) -> tuple[Run, Run]:
        """The two."""
        return self.early, self.late

    def bytes(self, run: Run) -> float:
        """What crosses the link in a batch."""
        return self.network.out_bytes[run.split] * run.train_batch

    def pushed_s(self, run: Run) -> float:
        """Seconds that the stages before the split would take on the training side for a batch."""
        return self.seconds_per_flop * self.network.flops[run.split] * run.train_batch

    @property
    def seconds_per_flop(self) -> float:
        """On the training side: what the freeze point saves it, over the operations that it saves."""
        early, late = self.runs
        flops = self.network.flops[late.split] - self.network.flops[early.split]
        return (early.forward_s - late.forward_s) / (flops * late.train_batch)

    @property
    def receive_s_per_byte(self) -> float:
        """On the training side, for unpacking and copying: what iterations differ in beside the forward."""
        early, late = self.runs
        return (_unpack_s(early) - _unpack_s(late)) / (self.bytes(early) - self.bytes(late))

    @property
    def batch_s(self) -> float:
        """On the training side, of any batch: the tail, and what does not depend on the split."""
        return self.late.iteration_s - self.receive_s_per_byte * self.bytes(self.late)


def _unpack_s(run: Run) -> float:
    return run.iteration_s - run.forward_s


# ---------------------------------------------------------------------------- from the other networks


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """What holds for any network on these two machines.

    Attributes:
        storage_load: How many times longer the storage side takes for the same stages.
        batches: In an epoch.
    """

    storage_load: float
    batches: int


def fit_machines(others: Sequence[Profiled]) -> Machines:
    """Learn from the profiling runs of networks other than the one to be predicted."""
    return Machines(storage_load=_storage_load(others), batches=_batches(others))


def _storage_load(others: Sequence[Profiled]) -> float:
    """Least squares of relative errors over what a fetch takes beyond the link's nominal rate.

    Explained by bytes, by the stages pushed down, by the weights to be loaded and by a constant; none of them
    can save time.
    """
    known = [(profiled, run) for profiled in others for run in profiled.runs]
    found = _least_squares(
        [(each.bytes(run), each.pushed_s(run), each.network.param_bytes, 1.0) for each, run in known],
        [run.fetch_s - each.bytes(run) / run.bandwidth_bytes_per_s for each, run in known],
        [run.fetch_s for _, run in known],
    )
    return float(found[1])


def _batches(others: Sequence[Profiled]) -> int:
    """The most whole batches whose fetches fit into every epoch: in synchronised runs none overlap."""
    return math.floor(min(run.epoch_s / run.fetch_s for profiled in others for run in profiled.runs))


def _least_squares(
    factors: Sequence[Sequence[float]], seconds: Sequence[float], scale: Sequence[float]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Coefficients, none below 0, of the least squares of errors relative to ``scale``."""
    matrix, target, weight = np.array(factors), np.array(seconds), 1 / np.array(scale)
    size = np.abs(matrix).max(axis=0)  # bytes and seconds are 1e9 apart
    found, _ = nnls(matrix / size * weight[:, np.newaxis], target * weight)
    return np.asarray(found / size)


# ---------------------------------------------------------------------------------- the prediction


def predict(profiled: Profiled, machines: Machines) -> dict[int, float]:
    """Seconds of an epoch at each split that fits, earliest to freeze point.

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
    """The network's stages, with seconds in proportion to their operations."""
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
    """The two machines and the link at its nominal rate; a batch is one request, and nothing overlaps."""
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
    """Seconds per byte beyond the link's nominal rate, and seconds of a request: from the two fetches."""
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
