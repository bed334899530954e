"""Check that a load requests a small model in one go, and imports only the modules it uses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save
from torch import nn

from tests.examples import some
from tests.store.s3_server import S3Server
from upriver.coldstart import load_model, publish_model
from upriver.coldstart import load_program as cold_programs
from upriver.coldstart.fetch import strategy
from upriver.coldstart.fetch.strategy import RequestPlan, plan_requests
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, find
from upriver.coldstart.grouping import grouping_cache, groups
from upriver.coldstart.grouping.groups import GROUPINGS, SMALL_BYTES, is_whole
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.load_model import begin
from upriver.program.capture.prefix import capture
from upriver.store import Store


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 4)).eval()


X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def connected(server: S3Server) -> Store:
    options = {"endpoint": server.url, "access_key_id": "a", "secret_access_key": "b", "max_retries": "0"}
    return Store.open("s3://bucket/p", options=options)


def asked(server: S3Server) -> list[tuple[str, str]]:
    """Return the method and ending of each request, in order; also the range of a one-byte request."""
    return [
        (method, path.partition("?")[0].rpartition("/")[2].partition(".")[2] + " 1" * (which == "bytes=0-0"))
        for method, path, which in server.requests
    ]


def loaded(store: Store, **options: object) -> torch.Tensor:
    model, handle = begin(build, "net", store=store, **options)  # type: ignore[arg-type]
    answer: torch.Tensor = model(X)
    assert handle.wait(60)
    return answer


ONE_GO = {("GET", "manifest.json"), ("GET", "safetensors")}
"""Requests in any order; the object's first bytes are the whole object."""

PROBE, LOOK = ("GET", "safetensors 1"), ("GET", "groupings.json")


def test_a_small_model_is_asked_for_in_one_go(server: S3Server) -> None:
    store = connected(server)
    publish_model(build(), store, "net.safetensors", (X,))
    server.requests.clear()
    assert torch.equal(loaded(store), build()(X))
    assert set(asked(server)) == ONE_GO and len(server.requests) == 2
    assert grouping_cache.kept(find(store, "net")) == {}


@pytest.mark.parametrize("grouping_name", ["pisel", "layer_by_layer"])
def test_whoever_names_another_grouping_gets_it(grouping_name: str, server: S3Server) -> None:
    store = connected(server)
    publish_model(build(), store, "net.safetensors", (X,))
    server.requests.clear()
    assert torch.equal(loaded(store, grouping=grouping_name), build()(X))
    assert PROBE in asked(server) and LOOK in asked(server)
    assert all(name.startswith(grouping_name) for name in grouping_cache.kept(find(store, "net")))


@pytest.mark.parametrize("large", ["model", "request"])
def test_a_larger_one_is_grouped_for_the_link(
    large: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = StreamLimits()
    if large == "model":
        monkeypatch.setattr(groups, "SMALL_BYTES", 1000)
    else:
        limits = StreamLimits(request_bytes=64 * 1024)
    store = connected(server)
    publish_model(build(), store, "net.safetensors", (X,))
    for loads in range(2):
        server.requests.clear()
        assert torch.equal(loaded(store, limits=limits), build()(X))
        assert PROBE not in asked(server) and LOOK in asked(server)
        assert loads or ("PUT", "groupings.json") in asked(server)
    assert grouping_cache.kept(find(store, "net"))


@pytest.mark.parametrize("grouping_name", some(1, GROUPINGS))
def test_a_group_of_more_than_may_be_in_flight_comes_in_parts(
    grouping_name: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 300), nn.Linear(300, 1500), nn.Linear(1500, 4))

    # The link carries 1 MB during one latency: two layers reach that together, the second has 1.8 MB.
    far = StoreLink(latency_s=0.01, bandwidth_bytes_per_s=1e8)
    monkeypatch.setattr(strategy.link_cache, "link_to", lambda *_: far)
    store, limits = connected(server), StreamLimits(request_bytes=64 << 10, in_flight_bytes=128 << 10)
    publish_model(wide(), store, "net.safetensors", (X,))
    model, handle = begin(wide, "net", store=store, grouping=grouping_name, limits=limits)
    assert torch.equal(model(X), wide()(X))
    assert handle.wait(60)


def _each_alone(source: WeightSource, *options: Any) -> RequestPlan:
    alone = [range(number, number + 1) for number in range(len(source.tensors))]
    return replace(plan_requests(source, *options), groups=alone, groupings={})


@pytest.mark.parametrize("kind", some(1, ["model", "program"]))
def test_ours_asks_for_groups_that_follow_each_other_together_and_the_others_do_not(
    kind: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, program = connected(server), capture(build(), (X,))
    publish_model(build(), store, "net.safetensors", (X,))
    cold_programs.publish(program, store)
    monkeypatch.setattr(cold_programs if kind == "program" else load_model, "plan_requests", _each_alone)
    num_reads = {}
    for name in GROUPINGS:
        server.requests.clear()
        if kind == "model":
            assert torch.equal(loaded(store, grouping=name), build()(X))
        else:
            cold = cold_programs.open(store=store, digest=program.digest, grouping=name)
            assert torch.equal(cold.run((X,), 0, cold.num_stages)[0], build()(X))
            coming = cold_programs.arriving(cold)
            assert coming is None or coming.wait(60)
        num_reads[name] = asked(server).count(("GET", "safetensors"))
    assert num_reads == {"upriver": 1, "pisel": 6, "layer_by_layer": 6}


def test_several_files_are_no_single_request(server: S3Server) -> None:
    store, index = connected(server), {}
    for number, (name, value) in enumerate(build().state_dict().items()):
        path = f"net/model-{number}.safetensors"
        store.put(path, save({name: value}))
        index[name] = path.rpartition("/")[2]
    store.put("net/model.safetensors.index.json", msgspec.json.encode({"weight_map": index}))
    server.requests.clear()
    assert torch.equal(loaded(store), build()(X))
    assert PROBE in asked(server)


def test_a_small_program_is_asked_for_in_one_go(server: S3Server) -> None:
    store, program = connected(server), capture(build(), (X,))
    cold_programs.publish(program, store)
    server.requests.clear()
    cold = cold_programs.open(store=store, digest=program.digest)
    assert torch.equal(cold.run((X,), 0, cold.num_stages)[0], build()(X))
    coming = cold_programs.arriving(cold)
    assert coming is None or coming.wait(60)
    assert asked(server)[0] == ("GET", "json")
    assert set(asked(server)[1:]) == ONE_GO and len(server.requests) == 3


def test_what_is_small() -> None:
    assert is_whole("upriver", SMALL_BYTES, 1 << 30) and not is_whole("upriver", SMALL_BYTES + 1, 1 << 30)
    assert is_whole("upriver", 100, 100) and not is_whole("upriver", 101, 100)
    assert [name for name in GROUPINGS if is_whole(name, 0, 100)] == ["upriver"]
    assert StreamLimits().request_bytes >= SMALL_BYTES


# ----------------------------------------------------------------------------------------- imports

LOAD = """
import sys, torch, upriver
from torch import nn
model = upriver.coldstart.load(lambda: nn.Linear(8, 4), sys.argv[1])
answer = model(torch.ones(1, 8))
handle = upriver.coldstart.loading(model)
assert handle is None or handle.wait(60)
print(*sorted(name for name in sys.modules if name.startswith("upriver.")))
assert upriver.coldstart.open.__name__ == "open"
"""

NOT_NEEDED = (
    "upriver.coldstart.incoming_weights",
    "upriver.coldstart.format.access_order",
    "upriver.coldstart.load_program",
    "upriver.pipeline",
    "upriver.program.graph.validator",
    "upriver.program.models.registry",
    "upriver.program.graph.executor",
    "upriver.program.split.module_trace",
)


def test_a_load_needs_the_package_alone_and_imports_nothing_that_runs_or_records_a_model(
    tmp_path: Path,
) -> None:
    publish_model(nn.Linear(8, 4), Store.open(tmp_path.as_uri()), "net.safetensors", (torch.ones(1, 8),))
    uri = f"{tmp_path.as_uri()}/net"
    found = subprocess.run([sys.executable, "-c", LOAD, uri], capture_output=True, text=True, check=True)
    names = set(found.stdout.split())
    assert "upriver.coldstart.fetch.weight_stream" in names
    assert not names.intersection(NOT_NEEDED)


def test_what_a_package_offers_is_there_all_the_same() -> None:
    import upriver.coldstart

    for name in upriver.coldstart.__all__:
        assert getattr(upriver.coldstart, name).__module__.startswith("upriver.")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = upriver.coldstart.nothing
