"""Predict the time of one request at every cut, as `upriver.cost` does for an epoch; pure.

A device has an input and wants a result. It runs the stages before the cut. The tensors at the cut go up to a
server, which runs the rest, and the result comes down. Nothing overlaps, so the times of a request add up:

=========  ========================================  ==================================================
tier       phase                                     seconds
=========  ========================================  ==================================================
compute    the device: stages before the cut         measured or predicted
compute    encode what crosses                       ``encode`` x what crosses the cut
network    send it                                   what crosses the cut / bandwidth, and a round trip
storage    the server: wait for others               ``wait_s``
storage    decode, move what crossed                 (``decode`` + ``move``) x what crosses the cut
storage    stages after the cut                      measured or predicted, x ``load``
storage    move, encode the result                   (``move`` + ``encode``) x the result
network    fetch it                                  the result / download bandwidth, if one is given
compute    decode the result                         ``decode`` x the result
=========  ========================================  ==================================================

After the last stage there is no request: only the device's own time counts. LoADPart's problem (1) is the
same with only the stages, the upload and the download (`paper_s`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from upriver.cost import Array, after, before
from upriver.errors import ConfigError
from upriver.text import bytes_text
from upriver.types import (
    Cluster,
    ComputeTier,
    Cost,
    CutRow,
    Profile,
    Route,
    Segment,
    StageProfile,
    StorageTier,
    Tier,
)

ALL_SENT = "(input)"
"""Table entry instead of a stage for the first cut, which lies after no stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySums:
    """Sums that are equal for all requests, computed once for a model and two machines.

    Attributes:
        device_s: Seconds of the stages before each cut on the device; the last is all of them.
        server_s: Seconds of the stages after each cut on an idle server; the last is 0.
        sent_bytes: Bytes that cross each cut; at the last one those of the result.
        handling_s: Seconds of packing and unpacking at each cut, on both sides; 0 at the last one.
    """

    device_s: Array
    server_s: Array
    sent_bytes: Array
    handling_s: Array

    def __post_init__(self) -> None:
        lengths = {len(self.device_s), len(self.server_s), len(self.sent_bytes), len(self.handling_s)}
        if len(lengths) != 1 or not len(self.device_s):
            raise ConfigError(f"sums have a number for each cut, got {sorted(lengths)} of them")

    def paper_s(self, *, upload: float, download: float | None = None, load: float | Array = 1.0) -> Array:
        """Return problem (1) of LoADPart at every cut: the stages, the upload and the download.

        Args:
            upload: Bytes per second, above 0.
            download: Bytes per second; None for a free download, as in the paper's own system.
            load: Factor on the server's seconds; an array has one for each cut.
        """
        total = self.device_s + self.sent_bytes / upload + load * self.server_s
        if download is not None:
            total += self.sent_bytes[-1] / download
        total[-1] = self.device_s[-1]
        return total

    def request_s(
        self,
        *,
        upload: float,
        download: float | None = None,
        load: float | Array = 1.0,
        rtt_s: float = 0.0,
        wait_s: float = 0.0,
    ) -> Array:
        """Return the seconds of a whole request at every cut.

        They add a round trip, the wait for other requests and packing to `paper_s`.
        """
        total = self.paper_s(upload=upload, download=download, load=load) + self.handling_s
        total[:-1] += rtt_s + wait_s
        return total


def last_of_least(seconds: Array) -> int:
    """Return the index of the least value, the last one of equals: that keeps work on the device."""
    return len(seconds) - 1 - int(seconds[::-1].argmin())


class LatencyModel:
    """Latency model of all cuts of one (profile, cluster), for one sample.

    The device is the compute tier, the server the storage tier. Unlike in training, any cut may be used, also
    past the freeze point.

    Attributes:
        cuts: Positions, from the start of the chain to its end.
    """

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        """Prepare the model. The seconds of stages are read on first use."""
        self.profile, self.cluster = profile, cluster
        self.cuts = range(profile.unsplit, len(profile.stages) + 1)
        self._chain = (*profile.input_stages, *profile.stages)

    @cached_property
    def sums(self) -> LatencySums:
        """Sums over the stages, and the bytes that cross.

        Raises:
            ConfigError: If a stage has no seconds for one of the two tiers.
        """
        sent = np.array([self.profile.input.stored_bytes, *(stage.out_bytes for stage in self._chain)])
        device, server = self.cluster.compute, self.cluster.storage
        up = _rate(device, "encode") + _rate(server, "decode") + _rate(server, "move")
        down = _rate(server, "move") + _rate(server, "encode") + _rate(device, "decode")
        handling = up * sent + down * sent[-1]
        handling[-1] = 0.0
        return LatencySums(
            device_s=before(self._seconds(Tier.COMPUTE)),
            server_s=after(self._seconds(Tier.STORAGE)),
            sent_bytes=sent,
            handling_s=handling,
        )

    @cached_property
    def paper_s(self) -> Array:
        """Seconds of a request at each cut, as LoADPart counts them."""
        link = self.cluster.link
        return self.sums.paper_s(
            upload=link.bandwidth_bytes_per_s,
            download=link.download_bytes_per_s,
            load=self.cluster.storage.load,
        )

    @cached_property
    def request_s(self) -> Array:
        """Seconds of a whole request at each cut."""
        link, server = self.cluster.link, self.cluster.storage
        return self.sums.request_s(
            upload=link.bandwidth_bytes_per_s,
            download=link.download_bytes_per_s,
            load=server.load,
            rtt_s=link.rtt_s,
            wait_s=server.wait_s,
        )

    def _seconds(self, tier: Tier) -> Array:
        return np.array([_stage_seconds(stage, tier) for stage in self._chain], dtype=np.float64)

    # --------------------------------------------------------------------------------------- memory

    @cached_property
    def needs(self) -> dict[Tier, Array]:
        """Bytes that each side needs at every cut: parameters, and the largest stage's activations."""
        params = np.array([stage.param_bytes for stage in self._chain])
        peaks = np.array([stage.peak_bytes for stage in self._chain])
        most = np.maximum.accumulate
        return {
            Tier.COMPUTE: before(params) + np.append(0.0, most(peaks)),
            Tier.STORAGE: after(params) + np.append(most(peaks[::-1])[::-1], 0.0),
        }

    @cached_property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Mask of the cuts that fit both sides' memory."""
        return np.asarray(np.all([need <= self._has(tier) for tier, need in self.needs.items()], axis=0))

    def why_not(self, cut: int) -> str:
        """Return which memory is too small at ``cut`` and by how many bytes; empty if all fits."""
        needs = {tier: float(need[cut - self.cuts.start]) for tier, need in self.needs.items()}
        return "; ".join(
            f"{tier} memory is short by {math.ceil(need - self._has(tier))} bytes "
            f"(needs {bytes_text(need)}, has {bytes_text(self._has(tier))})"
            for tier, need in needs.items()
            if need > self._has(tier)
        )

    def shortfall(self, cut: int) -> float:
        """Return the bytes that both sides lack at ``cut``."""
        index = cut - self.cuts.start
        return sum(max(0.0, float(need[index]) - self._has(tier)) for tier, need in self.needs.items())

    def _has(self, tier: Tier) -> float:
        return (self.cluster.storage if tier is Tier.STORAGE else self.cluster.compute).memory_bytes

    # ---------------------------------------------------------------------------------------- table

    def route(self, cut: int) -> Route:
        """Return the route that runs the stages before ``cut`` on the device and the rest on the server.

        Either part may be empty.
        """
        return Route(
            segments=(
                Segment(tier=Tier.COMPUTE, start=self.cuts.start, stop=cut),
                Segment(tier=Tier.STORAGE, start=cut, stop=self.cuts[-1]),
            )
        )

    def costs(self, seconds: Array) -> tuple[Cost, ...]:
        """Return the seconds for which each cut keeps each resource busy.

        Args:
            seconds: Seconds of a request at each cut: `paper_s` or `request_s`.
        """
        sums, link, server = self.sums, self.cluster.link, self.cluster.storage
        answer = float(sums.sent_bytes[-1])
        network = sums.sent_bytes / link.bandwidth_bytes_per_s
        sent = sums.sent_bytes.copy()
        if link.download_bytes_per_s is not None:
            network, sent = network + answer / link.download_bytes_per_s, sent + answer
        network[-1] = sent[-1] = 0.0
        there = server.load * sums.server_s
        beside = seconds - sums.device_s - network - there  # the further terms of `request_s`
        there = there + np.maximum(0.0, beside)
        columns = (seconds, there, network, sums.device_s, sent)
        names = ("epoch_s", "storage_s", "network_s", "compute_s", "bytes")
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(Cost(**dict(zip(names, row, strict=True))) for row in rows)

    def table(self, seconds: Array) -> Sequence[CutRow]:
        """Return one row for each cut, in the order of the chain."""
        rows = []
        for cut, cost in zip(self.cuts, self.costs(seconds), strict=True):
            why_not = self.why_not(cut)
            rows.append(
                CutRow(
                    cut=cut,
                    name=self.profile.stage(cut).name if cut > self.cuts.start else ALL_SENT,
                    feasible=not why_not,
                    why_not=why_not,
                    bytes_per_sample=self.profile.cut_bytes(cut),
                    cost=cost,
                )
            )
        return tuple(rows)


def _rate(tier: StorageTier | ComputeTier, phase: str) -> float:
    return tier.seconds_per_byte.get(phase, 0.0)


def _stage_seconds(stage: StageProfile, tier: Tier) -> float:
    """Return the seconds of one sample, on the tier's CPUs if these are separate and run the stage."""
    for resource in (f"{tier}.cpu", tier):
        if resource in stage.seconds:
            return sum(stage.seconds[resource])
    known = ", ".join(stage.seconds) or "nothing"
    raise ConfigError(f"stages[{stage.name}].seconds.{tier} is missing (known: {known})")
