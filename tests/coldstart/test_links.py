"""What is remembered of the way to a store is that of all that lies behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from upriver.coldstart.links import UNKNOWN_BYTES_PER_S, keep, last_known
from upriver.store import Store

MANY = 1 << 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))


def at(uri: str, endpoint: str) -> Store:
    options = {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret"}
    return Store.open(uri, options=options)


def known(store: Store) -> float:
    return last_known(store).bandwidth_bytes_per_s


def test_folders_of_one_bucket_share_what_is_known_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(at("s3://bucket/models/birds", "http://here:1"), nbytes=MANY, bandwidth_bytes_per_s=3e6)
    assert known(at("s3://bucket/models/fish", "http://here:1")) == 3e6
    assert known(at("s3://bucket", "http://here:1")) == 3e6
    assert known(at("s3://bucket/models/birds", "http://there:1")) == UNKNOWN_BYTES_PER_S
    assert known(at("s3://other/models/birds", "http://here:1")) == UNKNOWN_BYTES_PER_S
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:1")
    assert known(Store.open("s3://bucket/models/fish")) == 3e6
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://there:1")
    assert known(Store.open("s3://bucket/models/fish")) == UNKNOWN_BYTES_PER_S


def test_folders_of_one_disk_share_what_is_known_of_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    keep(Store.open(one.as_uri()), nbytes=MANY, bandwidth_bytes_per_s=3e6)
    gone = Store.open(other.as_uri())
    assert known(gone) == 3e6
    assert known(Store.open("memory://links")) == UNKNOWN_BYTES_PER_S
    other.rmdir()
    assert known(gone) == UNKNOWN_BYTES_PER_S
    keep(gone, nbytes=MANY, bandwidth_bytes_per_s=4e6)
    assert known(Store.open(one.as_uri())) == 3e6
