"""Hold the costs of a captured network's stages on device and server, and the bytes that cross each cut.

Here one request is one sample, however many rows it has. Seconds and bytes cover all its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from upriver.control.partition import ServerConditions
from upriver.errors import ProgramError
from upriver.latency import LatencyModel, LatencySums
from upriver.profile.latency.predictor import Predictor, measure_unknown
from upriver.profile.latency.serialization import kept
from upriver.profile.stage_timing import stage_medians
from upriver.program.capture.whole_model import CapturedModel
from upriver.program.graph.executor import Program
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    Tier,
)

log = logging.getLogger("upriver")

Measure: TypeAlias = "Literal['predict', 'measure'] | Predictor"
"""Source of the device's seconds: the models kept by ``upriver calibrate``, several runs of every stage, or
the given models."""

WAYS = ("predict", "measure")

ANY_TIME = ServerConditions(upload_bytes_per_s=1.0)
"""Placeholder while sums are made: they do not depend on the present link and load."""


def device_seconds(captured: CapturedModel, measure: Measure) -> tuple[float, ...]:
    """Return the seconds of each stage on this device.

    The seconds are predicted if ``measure`` allows it and models of this device exist. Otherwise each stage
    is measured.
    """
    program = captured.program
    predictor = measure if isinstance(measure, Predictor) else None
    if measure == "predict":
        predictor = kept(program.device)
    if predictor is not None:
        try:
            unknown = measure_unknown(program.graph, predictor, device=program.device)
            return tuple(predictor.stage_seconds(program.graph, measured=unknown))
        except ProgramError as error:  # an operator that does not run on random values
            log.info("stages are measured, as they cannot be predicted: %s", error)
    return stage_medians(program, captured.example.tensors)


def crossing_bytes(program: Program, cut: int) -> int:
    """Return the bytes that cross a cut in one request."""
    return sum(value.spec.nbytes for value in program.live(cut))


@dataclass(frozen=True, kw_only=True, slots=True)
class HandlingTimes:
    """Times of a request apart from stages, the round trip and its tensors on the link.

    Attributes:
        front_s: Fixed time on the way: before a worker has the request, and for the answer on the device.
        beside_s: Fixed time on the server apart from its stages, as each answer reports it.
        encode_s_per_byte: Packing on the device, per crossing byte.
        decode_s_per_byte: Unpacking on the server, per crossing byte.
        told_bytes: Bytes of an answer apart from its tensors, mostly the stages' seconds.
    """

    front_s: float = 0.0
    beside_s: float = 0.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    told_bytes: float = 0.0

    def fixed_s(self, download: float | None) -> float:
        """Return the fixed seconds of a request; ``download`` is the download bandwidth, if known."""
        return self.front_s + self.beside_s + (self.told_bytes / download if download is not None else 0.0)


@dataclass(frozen=True, kw_only=True)
class CutCosts:
    """Costs of a network between the device and one server.

    Attributes:
        program: The network.
        device_s: Seconds of each stage on the device.
        server_s: Seconds of each stage on the otherwise idle server.
        handling: Other times of a request.
        process: Server process that has passed the check.
        sums: The sums of all these costs, made once.

    Raises:
        ConfigError: If a number is beyond any plausible value, which a server may report.
    """

    program: Program
    device_s: Sequence[float]
    server_s: Sequence[float]
    handling: HandlingTimes = HandlingTimes()
    process: str = ""
    sums: LatencySums = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Sums are made when the server is checked, not with the first request.
        object.__setattr__(self, "sums", LatencyModel(self.profile, self.cluster(ANY_TIME)).sums)

    @cached_property
    def profile(self) -> Profile:
        """Profile for the planner: the device is the compute tier, the server the storage tier."""
        program = self.program
        rows = program.micro_batch
        return Profile(
            model="",
            freeze=program.num_stages,
            input=InputProfile(
                stored_bytes=crossing_bytes(program, 0), tensor_bytes=crossing_bytes(program, 0)
            ),
            stages=tuple(
                StageProfile(
                    name=stage.name,
                    kind=stage.kind,
                    out_bytes=crossing_bytes(program, position),
                    param_bytes=stage.param_bytes,
                    flops=rows * stage.flops,
                    peak_bytes=rows * stage.peak_bytes,
                    seconds={str(Tier.COMPUTE): (0.0, here), str(Tier.STORAGE): (0.0, there)},
                )
                for position, (stage, here, there) in enumerate(
                    zip(program.stages, self.device_s, self.server_s, strict=True), start=1
                )
            ),
        )

    def cluster(self, now: ServerConditions) -> Cluster:
        """Return the two machines and the link in their present state."""
        return Cluster(
            link=Link(
                bandwidth_bytes_per_s=now.upload_bytes_per_s,
                rtt_s=now.rtt_s,
                download_bytes_per_s=now.download_bytes_per_s,
            ),
            storage=StorageTier(
                load=now.load,
                wait_s=now.wait_s,
                micro_batch=self.program.micro_batch,
                seconds_per_byte={"decode": self.handling.decode_s_per_byte},
            ),
            compute=ComputeTier(
                micro_batch=self.program.micro_batch,
                seconds_per_byte={"encode": self.handling.encode_s_per_byte},
            ),
        )
