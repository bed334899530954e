"""Read and write profiles and clusters as JSON: ``upriver.profile/1`` and ``upriver.cluster/1``.

Reading is strict. An unknown or missing field, a value of the wrong kind, or a number that is negative, NaN,
infinite or implausibly large is an error that names the field. This module checks the shape; the types
themselves check their values. Unstated memory is ``null``.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from upriver.errors import ConfigError
from upriver.types import MOST_BYTES, Cluster, Profile

_Shape = TypeVar("_Shape", bound="_Strict")
_Noun = TypeVar("_Noun")

PROFILE_SCHEMA = "upriver.profile/1"
CLUSTER_SCHEMA = "upriver.cluster/1"

MOST_DIGITS = 100
"""Digits of a whole number that are read: a longer number is too large whatever the other digits are."""

_Memory: TypeAlias = Annotated[float, msgspec.Meta(le=MOST_BYTES)] | None
"""Unstated memory is null in a file, and infinite in the cluster."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A JSON object with exactly the declared fields."""


class _Input(_Strict):
    stored_bytes: float
    tensor_bytes: float


class _Stage(_Strict):
    name: str
    kind: str
    out_bytes: float
    param_bytes: float
    flops: float
    seconds: dict[Literal["storage", "storage.cpu", "compute", "compute.cpu"], tuple[float, float]]
    peak_bytes: float


class _Tail(_Strict):
    seconds: tuple[float, float]
    param_bytes: float
    peak_bytes: float


class _Profile(_Strict):
    schema: Literal["upriver.profile/1"]
    model: str
    freeze: int
    input: _Input
    stages: list[_Stage]
    tail: _Tail
    input_stages: list[_Stage] = []
    model_load_s: dict[Literal["storage", "compute"], float] = {}


class _Link(_Strict):
    bandwidth_bytes_per_s: float
    rtt_s: float
    download_bytes_per_s: float | None = None


class _StorageRates(_Strict):
    encode: float
    read: float = 0.0
    move: float = 0.0
    decode: float = 0.0


class _ComputeRates(_Strict):
    decode: float
    move: float = 0.0
    encode: float = 0.0


class _Storage(_Strict):
    memory_bytes: _Memory
    concurrency: int
    micro_batch: int
    load: float
    seconds_per_byte: _StorageRates
    reuse_model: bool = True
    request_samples: int = 128
    wait_s: float = 0.0


class _Compute(_Strict):
    memory_bytes: _Memory
    seconds_per_byte: _ComputeRates
    micro_batch: int | None = None
    concurrency: int = 1


class _Cluster(_Strict):
    schema: Literal["upriver.cluster/1"]
    link: _Link
    storage: _Storage
    compute: _Compute
    stream: Literal["micro_batch", "request", "synchronous"] = "micro_batch"


def profile_from_json(text: str | bytes) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: If the text is not such a profile; the message names the field.
    """
    file = _read(text, _Profile, PROFILE_SCHEMA)
    inputs = [(stage, ("cpu",)) for stage in file.input_stages]
    for stage, elsewhere in inputs + [(stage, ()) for stage in file.stages[: max(file.freeze, 0)]]:
        _require_seconds(stage, elsewhere)
    return _noun(msgspec.to_builtins(file), Profile, PROFILE_SCHEMA)


def profile_to_json(profile: Profile) -> str:
    """Write a profile; `profile_from_json` returns an equal one."""
    return _write({"schema": PROFILE_SCHEMA, **msgspec.to_builtins(profile)}, _Profile)


def cluster_from_json(text: str | bytes) -> Cluster:
    """Read a cluster.

    Raises:
        ConfigError: If the text is not such a cluster; the message names the field.
    """
    fields = msgspec.to_builtins(_read(text, _Cluster, CLUSTER_SCHEMA))
    for tier in (fields["storage"], fields["compute"]):
        if tier["memory_bytes"] is None:
            tier["memory_bytes"] = math.inf
    return _noun(fields, Cluster, CLUSTER_SCHEMA)


def cluster_to_json(cluster: Cluster) -> str:
    """Write a cluster; `cluster_from_json` returns an equal one, except for rates of 0."""
    fields = {"schema": CLUSTER_SCHEMA, **msgspec.to_builtins(cluster)}
    for tier, required in (("storage", "encode"), ("compute", "decode")):
        fields[tier]["seconds_per_byte"].setdefault(required, 0.0)
        if fields[tier]["memory_bytes"] == math.inf:
            fields[tier]["memory_bytes"] = None
    return _write(fields, _Cluster)


def _require_seconds(stage: _Stage, elsewhere: tuple[str, ...]) -> None:
    for tier in ("storage", "compute"):
        if not {tier, *(f"{tier}.{part}" for part in elsewhere)} & set(stage.seconds):
            missing = f"stages[{stage.name}].seconds.{tier} is missing"
            raise ConfigError(f"not a valid {PROFILE_SCHEMA} file: {missing}")


def _read(text: str | bytes, shape: type[_Shape], schema: str) -> _Shape:
    try:
        # The standard parser lets a NaN through, so that the error can name its field.
        return msgspec.convert(json.loads(text, parse_int=_whole), shape)
    except ValueError as error:
        raise ConfigError(f"not a valid {schema} file: {error}") from None


def _whole(digits: str) -> int:
    """Return a whole number, cut to the first digits where Python would refuse to read it."""
    return int(digits[:MOST_DIGITS])


def _noun(fields: Any, noun: type[_Noun], schema: str) -> _Noun:
    try:
        return msgspec.convert(fields, noun)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a valid {schema} file: {error}") from None


def _write(fields: Any, shape: type[_Strict]) -> str:
    return msgspec.json.format(msgspec.json.encode(msgspec.convert(fields, shape)), indent=2).decode()
