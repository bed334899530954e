"""Profiles are measured once: what a job measured is kept, and the next one like it starts from there.

A profile is named by everything that it depends on: the program, the dataset (what is stored, and the stages
before the model), the micro-batch, and for each tier the machine, its device, threads, versions and flags.
Each is two files as ``upriver plan --profile P --cluster C`` reads them, in the folder where proofs are
remembered, too. Losing one costs the seconds of a new measurement; so does one that cannot be read, which the
next job replaces. The machines may be busier today than they were then: `slowdown` and `as_of_today` bring a
profile up to the one micro-batch that every job runs anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import upriver
from upriver.cache import Cache
from upriver.profile.serialization import (
    CLUSTER_SCHEMA,
    PROFILE_SCHEMA,
    cluster_from_json,
    cluster_to_json,
    profile_from_json,
    profile_to_json,
)
from upriver.types import Cluster, Profile, StageProfile, Tier, Timings

_PROFILES = Cache("profiles", max_files=2 * 256)
"""Some hundred kB each for a network of a thousand stages."""

MAX_AGE_S = 30 * 86_400.0
"""A month: machines change in ways that no version tells, and measuring once a month costs nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierIdentity:
    """What decides the speed of a tier.

    Attributes:
        host: The machine's name; a server's without its port, which is another one each time for some.
        device: Where model stages run.
        threads: Of each process that computes.
        workers: Processes that compute.
        versions: The fingerprint there.
    """

    host: str
    device: str
    threads: int
    versions: Mapping[str, str]
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileKey:
    """What a profile is of: all that it depends on."""

    program: str
    dataset: str
    micro_batch: int
    storage: TierIdentity
    compute: TierIdentity

    @property
    def digest(self) -> str:
        """Names the profile."""
        facts = [upriver.__version__, PROFILE_SCHEMA, CLUSTER_SCHEMA, asdict(self)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedProfile:
    """What an earlier job measured.

    Attributes:
        cluster: Its link and its memory are those of then.
    """

    profile: Profile
    cluster: Cluster


def load_profile(
    key: ProfileKey, *, stages: Sequence[str], input_stages: Sequence[str]
) -> CachedProfile | None:
    """The profile that was kept, or None where there is none that can be used.

    Args:
        stages: Names of the model stages it must have.
        input_stages: Names of the stages before the model, likewise.
    """
    profile = _PROFILES.load(f"{key.digest}.profile", profile_from_json, max_age_s=MAX_AGE_S)
    cluster = _PROFILES.load(f"{key.digest}.cluster", cluster_from_json, max_age_s=MAX_AGE_S)
    if profile is None or cluster is None:
        return None
    fits = (
        [stage.name for stage in profile.stages] == list(stages)
        and [stage.name for stage in profile.input_stages] == list(input_stages)
        and profile.freeze == len(profile.stages)
        and all({Tier.STORAGE, Tier.COMPUTE} <= stage.seconds.keys() for stage in profile.stages)
        and cluster.storage.micro_batch == key.micro_batch
    )
    return CachedProfile(profile=profile, cluster=cluster) if fits else None


def save_profile(key: ProfileKey, profile: Profile, cluster: Cluster) -> None:
    """Keep what was measured. A folder that cannot be written is no error: the next job measures again."""
    _PROFILES.save(f"{key.digest}.profile", profile_to_json(profile) + "\n")
    _PROFILES.save(f"{key.digest}.cluster", cluster_to_json(cluster) + "\n")


def slowdown(profile: Profile, tier: Tier, timings: Sequence[Timings], *, samples: int) -> float:
    """How many times as long as kept a tier takes now for the frozen stages, by the fastest of some runs.

    The fastest, since the first run pays for lazy set-up, and other work makes runs slow, never fast.

    Args:
        timings: Of at least one micro-batch, run up to the freeze point.
        samples: In each of them.
    """
    lines = {position: profile.stage(position).seconds for position in _frozen(profile)}
    kept = sum(line[tier][0] + line[tier][1] * samples for line in lines.values() if tier in line)
    seen = min(sum(timing.stages.get(position, 0.0) for position in lines) for timing in timings)
    return seen / kept if kept > 0 else 1.0


def as_of_today(profile: Profile, factors: Mapping[Tier, float]) -> Profile:
    """The same profile on tiers that take so many times as long for every frozen stage."""

    def scaled(stage: StageProfile) -> StageProfile:
        today = {
            key: (stage.seconds[key][0] * factor, stage.seconds[key][1] * factor)
            for tier, factor in factors.items()
            for key in (str(tier), f"{tier}.cpu")
            if key in stage.seconds
        }
        return replace(stage, seconds={**stage.seconds, **today})

    return replace(
        profile,
        stages=tuple(map(scaled, profile.stages)),
        input_stages=tuple(map(scaled, profile.input_stages)),
    )


def _frozen(profile: Profile) -> range:
    """Positions of the stages that run before the freeze point, input stages among them."""
    return range(profile.unsplit + 1, profile.freeze + 1)
