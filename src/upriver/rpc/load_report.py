"""How slow the machines are today: beside what an earlier job has kept, and by others' work there."""

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
from upriver.program import Program
from upriver.protocol import Info
from upriver.rpc.client import ServerClient
from upriver.types import Tier, Timings

log = logging.getLogger("upriver")

UNCHANGED = 1.25
"""A tier within so many times what was kept, either way, counts as unchanged: one run tells no more."""

NOTABLE = 1.5
"""From so many times as slow on, a plan says so."""


def notes(factors: Mapping[Tier, float], wait: float) -> list[str]:
    """What of it a plan says.

    Args:
        factors: Of tiers that have changed, how many times as long they take as was kept.
        wait: As :func:`waiting` gives it.
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
    """How many times as long work takes where it is done in turn with others'.

    Args:
        waits: What one more micro-batch would have waited, as told a few times.
        micro_batch_s: What one of this job takes.
        in_flight: How many of them wait for a worker themselves.
    """
    if not waits or micro_batch_s <= 0:
        return 1.0
    return 1 + median(waits) / (in_flight * micro_batch_s)


def busy_s(timings: Timings) -> float:
    """For how long a micro-batch kept a worker busy."""
    return sum(
        seconds for phase, seconds in timings.phases.items() if phase not in ("receive", "queue", "weights")
    )


def expected_waits(server: ServerClient) -> list[float]:
    """What one more micro-batch would wait for a worker; nothing where the server does not say."""
    try:
        return [server.load().expected_wait_s]
    except UpriverError as error:
        log.debug("%s does not tell its load: %s", server.url, error)
        return []


def profile_key(dataset: str, program: Program, server: ServerClient, info: Info) -> ProfileKey:
    """What names the profile of a program on this machine and a server.

    Args:
        dataset: Digest of what it runs on; empty where inputs come one by one.
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
