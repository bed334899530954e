"""Cache profiles: the next job like an earlier one starts from the earlier measurement.

The key of a profile holds all its dependencies. They are the program, the dataset (the stored samples, and
the stages before the model) and the micro-batch. For each tier they are the machine, its device, threads,
versions and flags. Each profile is two files in the format of ``upriver plan --profile P --cluster C``, in
the folder that also holds remembered proofs. A lost or unreadable file costs the seconds of a new
measurement; the next job replaces it. The machines may be busier now: `slowdown` and `as_of_today` adjust a
profile to the one micro-batch that every job runs anyway.
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
"""Size: some hundred kB each for a network of a thousand stages."""

MAX_AGE_S = 30 * 86_400.0
"""A month: machines change in ways that no version shows, and a monthly measurement costs nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierIdentity:
    """Facts that decide the speed of a tier.

    Attributes:
        host: The machine's name; a server's without its port, which for some servers changes each time.
        device: Device of the model stages.
        threads: Threads of each computing process.
        versions: The tier's fingerprint.
        workers: Number of computing processes.
    """

    host: str
    device: str
    threads: int
    versions: Mapping[str, str]
    workers: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileKey:
    """Everything that a profile depends on."""

    program: str
    dataset: str
    micro_batch: int
    storage: TierIdentity
    compute: TierIdentity

    @property
    def digest(self) -> str:
        """Name of the profile: a SHA-256."""
        facts = [upriver.__version__, PROFILE_SCHEMA, CLUSTER_SCHEMA, asdict(self)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedProfile:
    """The measurement of an earlier job.

    Attributes:
        cluster: The cluster, with link and memory as they were then.
    """

    profile: Profile
    cluster: Cluster


def load_profile(
    key: ProfileKey, *, stages: Sequence[str], input_stages: Sequence[str]
) -> CachedProfile | None:
    """Return the cached profile with stages of these names, or None where there is no usable one."""
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
    """Save a measurement. An unwritable folder is no error: the next job measures again."""
    _PROFILES.save(f"{key.digest}.profile", profile_to_json(profile) + "\n")
    _PROFILES.save(f"{key.digest}.cluster", cluster_to_json(cluster) + "\n")


def slowdown(profile: Profile, tier: Tier, timings: Sequence[Timings], *, samples: int) -> float:
    """Return the present slowdown of a tier's frozen stages against the profile, by the fastest run.

    The fastest run counts: the first one pays for lazy set-up, and other work makes runs slow, never fast.

    Args:
        timings: Timings of at least one micro-batch, run up to the freeze point.
        samples: Samples in each micro-batch.
    """
    lines = {position: profile.stage(position).seconds for position in _frozen(profile)}
    kept = sum(line[tier][0] + line[tier][1] * samples for line in lines.values() if tier in line)
    seen = min(sum(timing.stages.get(position, 0.0) for position in lines) for timing in timings)
    return seen / kept if kept > 0 else 1.0


def as_of_today(profile: Profile, factors: Mapping[Tier, float]) -> Profile:
    """Return the profile with the seconds of every frozen stage multiplied by its tier's factor."""

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
    """Return the positions of the stages before the freeze point, input stages included."""
    return range(profile.unsplit + 1, profile.freeze + 1)
