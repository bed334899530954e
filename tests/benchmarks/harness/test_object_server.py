"""Test a directory as a bucket: the same store over HTTP and through the file system."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.harness.object_server import ObjectServer
from tests.finetune.training import STAGES, images
from upriver.errors import ObjectChanged, ObjectNotFound, StoreError
from upriver.pipeline import index
from upriver.store import ObjectInfo, Store


@contextmanager
def serving(root: Path, **slow: float) -> Iterator[ObjectServer]:
    with ObjectServer(root, bucket="store", host="127.0.0.1", port=0, **slow) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def behind(server: ObjectServer) -> Store:
    return Store.open("s3://store", options={"endpoint": server.url, "region": "none", "anonymous": "true"})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def far(server: ObjectServer) -> Store:
    return behind(server)


@pytest.fixture
def near(server: ObjectServer) -> Store:
    return server.store


def said(info: ObjectInfo) -> ObjectInfo:
    """Return the times in whole seconds, as HTTP gives them."""
    return replace(info, modified_s=int(info.modified_s))


def test_both_ways_see_the_same_objects(near: Store, far: Store) -> None:
    far.put("a/one & two.bin", b"0123456789")
    near.put("a/b/three", b"")
    near.put("ab", b"x")
    for prefix in ("", "a", "a/b", "none"):
        listed, seen = (
            sorted(map(said, store.list(prefix)), key=lambda info: info.path) for store in (far, near)
        )
        assert listed == seen
    assert len(list(far.list(""))) == 3
    for name, content in (("a/one & two.bin", b"0123456789"), ("a/b/three", b"")):
        assert said(far.head(name)) == said(near.head(name))
        assert far.get(name, etag=near.head(name).etag) == near.get(name) == content
    assert far.get_range("a/one & two.bin", 2, 5) == b"234"
    far.delete("ab")
    assert not near.exists("ab")
    assert not far.exists("ab")


def test_a_changed_object_is_refused_both_ways(near: Store, far: Store) -> None:
    near.put("a", b"before")
    etag = far.head("a").etag
    assert near.get_range("a", 0, 3, etag=etag) == b"bef"
    far.put("a", b"after!")
    for store in (near, far):
        with pytest.raises(ObjectChanged):
            store.get_range("a", 0, 3, etag=etag)


def test_what_is_not_there_or_not_allowed(tmp_path: Path, server: ObjectServer, far: Store) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to("/etc")
    for name in ("none", "folder"):
        with pytest.raises(ObjectNotFound):
            far.get(name)
    with pytest.raises(StoreError):
        far.get("out/hostname")
    far.put("short", b"123")
    with pytest.raises(StoreError):
        far.get_range("short", 5, 9)
    for target in ("/other/short", "/store/../short", "/store//short"):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        connection.request("GET", target)
        assert connection.getresponse().status in (400, 404)
        connection.close()


def test_many_reads_go_over_one_connection(server: ObjectServer, near: Store) -> None:
    near.put("a", b"0123456789")
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    for headers, status, body in (
        ({}, 200, b"0123456789"),
        ({"Range": "bytes=7-"}, 206, b"789"),
        ({"Range": "bytes=0-99"}, 206, b"0123456789"),
        ({"Range": "bytes=10-"}, 416, b""),
        ({"If-Match": '"other"'}, 412, b""),
        ({"If-Match": "*"}, 200, b"0123456789"),
    ):
        connection.request("GET", "/store/a", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, body)
    connection.close()


def test_a_dataset_is_the_same_dataset_both_ways(tmp_path: Path, far: Store) -> None:
    near = images(tmp_path, 12)
    assert index(far, "photos", stages=STAGES).digest == index(near, "photos", stages=STAGES).digest


def test_a_connection_that_is_held_to_a_rate_gets_the_same_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    with serving(tmp_path, latency_s=0.001, connection_bytes_per_s=1e7) as server:
        server.store.put("a", content)
        assert behind(server).get("a") == content
        assert behind(server).get_range("a", 7, 200_001) == content[7:200_001]
