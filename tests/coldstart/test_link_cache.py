"""Check that a remembered link estimate of a store applies to all objects of that store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from upriver.coldstart.fetch import concurrency
from upriver.coldstart.format.access_order import publish_model
from upriver.coldstart.link_cache import UNKNOWN, StoreLink, keep, last_known
from upriver.coldstart.load_model import begin
from upriver.store import Store

MANY = 1 << 30
THREE = StoreLink(latency_s=0.0, bandwidth_bytes_per_s=3e6, requests=4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))


def at(uri: str, endpoint: str) -> Store:
    options = {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret"}
    return Store.open(uri, options=options)


def test_folders_of_one_bucket_share_what_is_known_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(at("s3://bucket/models/birds", "http://here:1"), THREE, nbytes=MANY)
    assert last_known(at("s3://bucket/models/fish", "http://here:1")) == THREE
    assert last_known(at("s3://bucket", "http://here:1")) == THREE
    assert last_known(at("s3://bucket/models/birds", "http://there:1")) == UNKNOWN
    assert last_known(at("s3://other/models/birds", "http://here:1")) == UNKNOWN
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:1")
    assert last_known(Store.open("s3://bucket/models/fish")) == THREE
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://there:1")
    assert last_known(Store.open("s3://bucket/models/fish")) == UNKNOWN


def test_folders_of_one_disk_share_what_is_known_of_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    keep(Store.open(one.as_uri()), THREE, nbytes=MANY)
    gone = Store.open(other.as_uri())
    assert last_known(gone) == THREE
    assert last_known(Store.open("memory://links")) == UNKNOWN
    other.rmdir()
    assert last_known(gone) == UNKNOWN
    keep(gone, replace(THREE, bandwidth_bytes_per_s=4e6), nbytes=MANY)
    assert last_known(Store.open(one.as_uri())) == THREE


@pytest.mark.parametrize(
    "damage",
    [
        {"schema": "upriver.store-link/1"},
        {"bandwidth_bytes_per_s": 0.0},
        {"bandwidth_bytes_per_s": "3"},
        {"requests": 0},
        {"requests": -4},
        {"requests": 4.0},
        {"requests": True},
        {"requests": None},
        {"requests": "4"},
    ],
)
def test_what_is_not_as_it_is_written_is_not_used(tmp_path: Path, damage: dict[str, object]) -> None:
    store = Store.open(tmp_path.as_uri())
    keep(store, THREE, nbytes=MANY)
    assert last_known(store) == THREE
    (file,) = (tmp_path / "cache" / "links").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert last_known(store) == UNKNOWN
    keep(store, THREE, nbytes=MANY)
    assert last_known(store) == THREE


def test_a_load_begins_with_what_the_last_one_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(640, 640, bias=False) for _ in range(3)))

    monkeypatch.setattr(concurrency, "TRIAL_BUSY_S", float("inf"))
    store, x = Store.open(tmp_path.as_uri()), torch.ones(1, 640)
    publish_model(build(), store, "net.safetensors", (x,))
    for requests, begins in ((1, 1), (4, 2), (100, 8)):
        keep(store, replace(THREE, requests=requests), nbytes=MANY)
        model, handle = begin(build, "net", store=store)
        assert model(x).shape == (1, 640)
        assert handle.wait(60)
        assert handle._stream._flow.wanted == begins
        assert last_known(store).requests == requests
