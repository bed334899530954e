"""Compare the machines' present speed with a cached profile, and estimate delays by other jobs' work."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from statistics import median
from urllib.parse import urlsplit

import torch

from upriver.engine.fingerprint import fingerprint
from upriver.errors import UpriverError
from upriver.profile.profile_cache import (
    ProfileKey,
    TierIdentity,
)
from upriver.program.graph.executor import Program
from upriver.protocol import Info
from upriver.rpc.client import ServerClient
from upriver.types import Tier, Timings

log = logging.getLogger("upriver")

UNCHANGED = 1.25
"""Factor, either way, within which a tier counts as unchanged since it was cached: one run shows no more."""

NOTABLE = 1.5
"""Factor from which on a plan notes the slowdown."""


def notes(factors: Mapping[Tier, float], wait: float) -> list[str]:
    """Return a plan's notes on slow machines.

    Args:
        factors: For tiers that have changed, their present time over the cached one.
        wait: The result of :func:`waiting`.
    """
    found = [
        f"the {tier} tier takes {by:.1f} times as long as when its profile was measured"
        for tier, by in factors.items()
        if by >= NOTABLE
    ]
    if wait >= NOTABLE:
        found.append(f"others' work makes micro-batches take {wait:.1f} times as long on the servers")
    return found


def waiting(waits: Sequence[float], micro_batch_s: float, *, in_flight: int) -> float:
    """Return how many times as long work takes when it queues with other jobs' work.

    Args:
        waits: Seconds that one more micro-batch would have waited, from a few responses.
        micro_batch_s: Seconds of one of this job's micro-batches.
        in_flight: Number of this job's micro-batches that wait for a worker.
    """
    if not waits or micro_batch_s <= 0:
        return 1.0
    return 1 + median(waits) / (in_flight * micro_batch_s)


def busy_s(timings: Timings) -> float:
    """Return the seconds for which a micro-batch kept a worker busy."""
    return sum(
        seconds for phase, seconds in timings.phases.items() if phase not in ("receive", "queue", "weights")
    )


def expected_waits(server: ServerClient) -> list[float]:
    """Return the seconds that one more micro-batch would wait for a worker; empty if unknown."""
    try:
        return [server.load().expected_wait_s]
    except UpriverError as error:
        log.debug("%s does not tell its load: %s", server.url, error)
        return []


def profile_key(dataset: str, program: Program, server: ServerClient, info: Info) -> ProfileKey:
    """Return the key of a program's profile on this machine and a server.

    Args:
        dataset: Digest of the dataset that it runs on; empty if inputs come one by one.
    """
    return ProfileKey(
        program=program.digest,
        dataset=dataset,
        micro_batch=program.micro_batch,
        storage=TierIdentity(
            host=urlsplit(server.url).hostname or "",
            device=info.device,
            threads=info.threads,
            workers=info.workers,
            versions={**info.fingerprint, "upriver": info.version},
        ),
        compute=TierIdentity(
            host=platform.node(),
            device=str(program.device),
            threads=torch.get_num_threads(),
            versions=fingerprint(program.device),
        ),
    )
