"""Check profiles and clusters as files: a strict round trip."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from tests.planning import alexnet, clusters, profiles
from upriver.errors import ConfigError
from upriver.profile import cluster_from_json, cluster_to_json, profile_from_json, profile_to_json
from upriver.types import Cluster, ComputeTier, Link, Profile, StorageTier, TailProfile

PROFILE: dict[str, Any] = {
    "schema": "upriver.profile/1",
    "model": "alexnet",
    "freeze": 1,
    "input": {"stored_bytes": 131000, "tensor_bytes": 602112},
    "stages": [
        {
            "name": "features.0",
            "kind": "conv",
            "out_bytes": 774400,
            "param_bytes": 93440,
            "flops": 141000000,
            "seconds": {"storage": [0.0001, 0.0004], "compute": [0.0001, 0.0004]},
            "peak_bytes": 1376512,
        }
    ],
    "tail": {"seconds": [0.001, 0.0005], "param_bytes": 150000000, "peak_bytes": 65536},
}
CLUSTER: dict[str, Any] = {
    "schema": "upriver.cluster/1",
    "link": {"bandwidth_bytes_per_s": 125000000, "rtt_s": 0.0005},
    "storage": {
        "memory_bytes": 16000000000,
        "concurrency": 4,
        "micro_batch": 16,
        "load": 1.0,
        "seconds_per_byte": {"encode": 1e-9},
    },
    "compute": {"memory_bytes": 16000000000, "seconds_per_byte": {"decode": 1e-9}},
}
GONE = object()


def label(value: object) -> str:
    """Return a label of a test's argument, the same in every process."""
    return str(getattr(value, "__name__", value))[:40]


def changed(document: dict[str, Any], path: str, value: object) -> str:
    """Return the document as JSON with one entry set, or removed when ``value`` is GONE."""
    copy = json.loads(json.dumps(document))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    place = copy
    for part in parents:
        place = place[part]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return json.dumps(copy)


@given(profile=profiles())
def test_a_profile_survives_its_file(profile: Profile) -> None:
    assert profile_from_json(profile_to_json(profile)) == profile


@given(cluster=clusters())
def test_a_cluster_survives_its_file(cluster: Cluster) -> None:
    text = cluster_to_json(cluster)
    again = cluster_from_json(text)
    assert cluster_to_json(again) == text
    assert (again.link, again.stream, again.compute.micro_batch, again.storage.memory_bytes) == (
        cluster.link,
        cluster.stream,
        cluster.compute.micro_batch,
        cluster.storage.memory_bytes,
    )
    for ours, theirs in ((again.storage, cluster.storage), (again.compute, cluster.compute)):
        assert {k: v for k, v in ours.seconds_per_byte.items() if v} == {
            k: v for k, v in theirs.seconds_per_byte.items() if v
        }


def test_the_documented_files_are_read() -> None:
    profile, cluster = profile_from_json(json.dumps(PROFILE)), cluster_from_json(json.dumps(CLUSTER))
    assert (profile.model, profile.freeze, profile.unsplit) == ("alexnet", 1, 0)
    assert profile.stage(1).seconds["compute"] == (0.0001, 0.0004)
    assert profile.tail.seconds == (0.001, 0.0005)
    assert cluster.link == Link(bandwidth_bytes_per_s=125e6, rtt_s=0.0005)
    assert (cluster.storage.reuse_model, cluster.storage.request_samples) == (True, 128)
    assert (cluster.stream, cluster.compute.micro_batch) == ("micro_batch", None)


def test_optional_fields_are_read() -> None:
    input_stage = {
        **PROFILE["stages"][0],
        "name": "decode",
        "seconds": {"storage.cpu": [0, 1], "compute": [0, 2]},
    }
    text = json.dumps({**PROFILE, "input_stages": [input_stage], "model_load_s": {"storage": 0.5}})
    profile = profile_from_json(text)
    assert profile.unsplit == -1 and profile.model_load_s == {"storage": 0.5}
    storage = {**CLUSTER["storage"], "reuse_model": False, "request_samples": 64}
    storage["seconds_per_byte"] = {"encode": 1e-9, "read": 2e-9, "move": 3e-9}
    compute = {**CLUSTER["compute"], "micro_batch": 8, "memory_bytes": None}
    cluster = cluster_from_json(
        json.dumps({**CLUSTER, "storage": storage, "compute": compute, "stream": "request"})
    )
    assert (cluster.storage.reuse_model, cluster.storage.request_samples, cluster.stream) == (
        False,
        64,
        "request",
    )
    assert cluster.storage.seconds_per_byte["read"] == 2e-9
    assert cluster.compute.micro_batch == 8 and math.isinf(cluster.compute.memory_bytes)


def test_the_largest_numbers_survive_their_files() -> None:
    cluster = Cluster(
        link=Link(bandwidth_bytes_per_s=10**15, rtt_s=10**9),
        storage=StorageTier(memory_bytes=10**18, concurrency=10**9, micro_batch=10**9, load=10**9),
        compute=ComputeTier(memory_bytes=math.inf, micro_batch=None, concurrency=10**9),
    )
    assert cluster_to_json(cluster_from_json(cluster_to_json(cluster))) == cluster_to_json(cluster)
    profile = alexnet(storage_s=10**9, stored_bytes=10**18)
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e19, 10**400, "1", None, [], True])
def test_what_no_file_may_hold_no_noun_may_hold(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tail\.param_bytes must be a finite number >= 0 and <= 1e\+18"):
        TailProfile(param_bytes=value)
    with pytest.raises(ConfigError, match=r"link\.rtt_s must be a finite number >= 0 and <= 1e\+09"):
        Link(bandwidth_bytes_per_s=1, rtt_s=math.inf if value == 1e19 else value)
    with pytest.raises(ConfigError, match=r"storage\.seconds_per_byte\.read must be"):
        StorageTier(seconds_per_byte={"read": value})


REQUIRED = [
    (PROFILE, profile_from_json, path)
    for path in [
        *("schema", "model", "freeze", "input", "stages", "tail", "input/stored_bytes", "input/tensor_bytes"),
        *(f"stages/0/{field}" for field in PROFILE["stages"][0]),
        *("stages/0/seconds/storage", "stages/0/seconds/compute"),
        *(f"tail/{field}" for field in PROFILE["tail"]),
    ]
] + [
    (CLUSTER, cluster_from_json, path)
    for path in [
        *("schema", "link", "storage", "compute", "link/bandwidth_bytes_per_s", "link/rtt_s"),
        *(f"storage/{field}" for field in CLUSTER["storage"]),
        *("storage/seconds_per_byte/encode", "compute/memory_bytes", "compute/seconds_per_byte/decode"),
    ]
]


@pytest.mark.parametrize(("document", "read", "path"), REQUIRED, ids=label)
def test_a_missing_field_is_named(document: dict[str, Any], read: Callable[[str], object], path: str) -> None:
    with pytest.raises(ConfigError, match=path.split("/")[-1]):
        read(changed(document, path, GONE))


WRONG = [
    (PROFILE, profile_from_json, path, value)
    for path, value in [
        *(("colour", 1), ("input/colour", 1), ("stages/0/colour", 1), ("tail/colour", 1)),
        *(
            ("stages/0/seconds/gpu", [0, 1]),
            ("stages/0/seconds/storage", [1]),
            ("schema", "upriver.profile/2"),
        ),
        *(("stages/0/flops", math.nan), ("stages/0/peak_bytes", -1), ("stages/0/out_bytes", math.inf)),
        *(("stages/0/param_bytes", "big"), ("stages/0/seconds/storage", [math.nan, 0.0])),
        *(
            ("stages/0/seconds/compute", [0.0, -1e-9]),
            ("input/stored_bytes", -1),
            ("tail/peak_bytes", math.nan),
        ),
        *(
            ("tail/seconds", [0.0, math.nan]),
            ("freeze", -1),
            ("freeze", 2),
            ("freeze", 0.5),
            ("freeze", True),
        ),
        *(("model_load_s", {"storage": -1}), ("model_load_s", {"moon": 1})),
        *(("stages/0/peak_bytes", 1e308), ("stages/0/flops", 10**400), ("tail/param_bytes", 1.1e18)),
        *(("tail/seconds", [0, 1.1e9]), ("model_load_s", {"storage": 1e10}), ("freeze", 10**400)),
    ]
] + [
    (CLUSTER, cluster_from_json, path, value)
    for path, value in [
        *(("colour", 1), ("link/colour", 1), ("storage/colour", 1), ("compute/colour", 1)),
        *(("storage/seconds_per_byte/colour", 1), ("stream", "river"), ("schema", "upriver.profile/1")),
        *(("link/bandwidth_bytes_per_s", math.nan), ("link/bandwidth_bytes_per_s", 0), ("link/rtt_s", -1)),
        *(("storage/concurrency", 0), ("storage/micro_batch", 0), ("storage/load", math.nan)),
        *(("storage/load", 0), ("storage/memory_bytes", -1), ("compute/memory_bytes", math.nan)),
        *(("storage/seconds_per_byte/encode", math.nan), ("compute/seconds_per_byte/decode", -1)),
        *(("compute/micro_batch", 0), ("storage/request_samples", 0), ("storage/reuse_model", 1)),
        *(("link/bandwidth_bytes_per_s", 1.1e15), ("link/rtt_s", 1e308), ("storage/load", 1e10)),
        *(("storage/memory_bytes", math.inf), ("compute/memory_bytes", 1e19), ("link/rtt_s", 10**400)),
        *(("storage/concurrency", 10**400), ("compute/micro_batch", 10**9 + 1), ("link/rtt_s", None)),
    ]
]


@pytest.mark.parametrize(("document", "read", "path", "value"), WRONG, ids=label)
def test_a_wrong_value_or_unknown_field_is_named(
    document: dict[str, Any], read: Callable[[str], object], path: str, value: object
) -> None:
    allowed = {
        "stages/0/seconds/gpu": "gpu",
        "stages/0/seconds/storage": "seconds",
        "model_load_s": "model_load_s",
    }
    field = allowed.get(path, path.split("/")[-1])
    with pytest.raises(ConfigError) as caught:
        read(changed(document, path, value))
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff", '{"schema": "upriver.profile/1"'])
def test_what_is_no_such_document_is_refused(text: str | bytes) -> None:
    for read, schema in ((profile_from_json, "profile"), (cluster_from_json, "cluster")):
        with pytest.raises(ConfigError, match=f"not a valid upriver.{schema}/1 file"):
            read(text)


def test_a_file_holds_every_field_of_the_schema() -> None:
    document = json.loads(profile_to_json(alexnet()))
    assert set(document) == set(PROFILE)
    assert set(document["stages"][0]) == set(PROFILE["stages"][0])
    assert len(document["stages"]) == 21
