"""Hold the inputs of ``upriver plan``: a profile, a cluster and a workload, from files or measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from upriver.cost import CostModel
from upriver.errors import ConfigError
from upriver.latency import LatencyModel
from upriver.profile import cluster_from_json, metrics_from_json, profile_from_json
from upriver.profile.throughput import Candidate, Metrics
from upriver.text import bytes_text, printable, rate_text
from upriver.types import Cluster, CutRow, Profile, StageProfile, Workload

_Noun = TypeVar("_Noun")

NAME_LENGTH = 200
"""Characters of a file's name for a stage or model that are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """Inputs of a plan.

    Attributes:
        notes: Remarks on the origin of the numbers.
    """

    profile: Profile
    cluster: Cluster
    workload: Workload
    notes: tuple[str, ...] = ()

    def at(self, bandwidth_bytes_per_s: float) -> PlanQuestion:
        """Return the same question at another bandwidth of the link."""
        link = replace(self.cluster.link, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        return replace(self, cluster=replace(self.cluster, link=link))

    def check_finite(self, *, of_request: bool = False) -> None:
        """Check that predicted times are finite: allowed numbers can multiply to more than a float holds.

        Args:
            of_request: Whether the plan is for one request, not for an epoch.
        """
        with np.errstate(all="ignore"):
            for row in self._rows(of_request):
                if not all(map(math.isfinite, astuple(row.cost))):
                    raise ConfigError(
                        f"the predicted times of cut {row.cut} are more than a number can hold; look at the "
                        "profile's seconds and bytes, the cluster's rates and the number of samples"
                    )

    def _rows(self, of_request: bool) -> Sequence[CutRow]:
        if not of_request:
            return CostModel(self.profile, self.cluster, self.workload).table()
        model = LatencyModel(self.profile, self.cluster)
        return model.table(model.request_s)

    def request_facts(self) -> dict[str, str]:
        """Return the inputs that count for one request as a few lines for people, by name."""
        profile, server, link = self.profile, self.cluster.storage, self.cluster.link
        down = link.download_bytes_per_s
        answer = "answers are free to fetch" if down is None else f"{rate_text(down)} down"
        return {
            "model": f"{profile.model}: {len(profile.stages)} stages",
            "input": bytes_text(profile.input.stored_bytes),
            "link": f"{rate_text(link.bandwidth_bytes_per_s)} up, {answer}, "
            f"round trip {1e3 * link.rtt_s:g} ms",
            "server": f"{_memory(server.memory_bytes)}, load {server.load:g}, "
            f"{1e3 * server.wait_s:g} ms until a request runs",
            "device": _memory(self.cluster.compute.memory_bytes),
        }

    def facts(self) -> dict[str, str]:
        """Return all inputs as a few lines for people, by name."""
        profile, workload = self.profile, self.workload
        storage, compute, link = self.cluster.storage, self.cluster.compute, self.cluster.link
        requests = "request" if storage.concurrency == 1 else "requests"
        at_once = compute.micro_batch
        return {
            "model": f"{profile.model}: {len(profile.stages)} stages, the first {profile.freeze} frozen",
            "samples": f"{workload.num_samples} an epoch, in training batches of {workload.batch_size}, "
            f"{bytes_text(profile.input.stored_bytes)} each as stored",
            "link": f"{rate_text(link.bandwidth_bytes_per_s)}, round trip {1e3 * link.rtt_s:g} ms",
            "storage": f"{_memory(storage.memory_bytes)}, {storage.concurrency} {requests} at once, "
            f"micro-batches of {storage.micro_batch}, load {storage.load:g}",
            "compute": f"{_memory(compute.memory_bytes)}"
            + (f", micro-batches of {at_once}" if at_once else ", frozen stages on whole training batches"),
        }


def _memory(num_bytes: float) -> str:
    return "memory not stated" if math.isinf(num_bytes) else f"{bytes_text(num_bytes)} of memory"


def read_profile(path: Path) -> Profile:
    """Read a profile from a file; control characters in names become ``?``.

    Raises:
        ConfigError: If the file cannot be read or is no profile; the message names the file and the field.
    """
    profile = _read(path, profile_from_json)
    return replace(
        profile,
        model=printable(profile.model, NAME_LENGTH),
        stages=_named(profile.stages),
        input_stages=_named(profile.input_stages),
    )


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a file.

    Raises:
        ConfigError: If the file cannot be read or is no cluster; the message names the file and the field.
    """
    return _read(path, cluster_from_json)


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of an input pipeline from a file; control characters in names become ``?``.

    Raises:
        ConfigError: If the file cannot be read or holds no such metrics; the message names the file and the
            field.
    """
    metrics = _read(path, metrics_from_json)
    return replace(metrics, candidates=tuple(map(_shown, metrics.candidates)))


def _shown(candidate: Candidate) -> Candidate:
    return replace(candidate, name=printable(candidate.name, NAME_LENGTH))


def _named(stages: Iterable[StageProfile]) -> tuple[StageProfile, ...]:
    return tuple(replace(stage, name=printable(stage.name, NAME_LENGTH)) for stage in stages)


def _read(path: Path, parse: Callable[[bytes], _Noun]) -> _Noun:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {printable(' '.join(str(error).split()), 500)}") from error
