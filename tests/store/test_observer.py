"""Check that an observer sees each read of a store, whichever method reads, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.s3_server import S3Server
from upriver.errors import ObjectChanged, ObjectNotFound
from upriver.store import Store
from upriver.store.store import OBSERVED_BYTES

BODY = bytes(range(256)) * 2048


class Recorder:
    """Record each read: its object and bounds, what has come, and whether it has ended."""

    piece_bytes = 100_000

    def __init__(self) -> None:
        self.reads: list[tuple[str, int | None, int | None]] = []
        self.came: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.under_way = 0

    @contextmanager
    def reading(
        self, store: Store, path: str, start: int | None, stop: int | None
    ) -> Iterator[Callable[[int], None]]:
        def came(num_bytes: int) -> None:
            self.came.append(num_bytes)
            self.threads.add(threading.current_thread())

        self.reads.append((f"{store.name}/{path}", start, stop))
        self.under_way += 1
        try:
            yield came
        finally:
            self.under_way -= 1


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with S3Server() as server:
        options = {"endpoint": server.url, "region": "none", "anonymous": "true"}
        uris = {"file": tmp_path.as_uri(), "memory": f"memory://{tmp_path.name}", "s3": "s3://bucket"}
        found = Store.open(uris[request.param], name="it", options=options if request.param == "s3" else None)
        if request.param == "s3":
            server.objects["bucket/a"] = BODY
        else:
            found.put("a", BODY)
        yield found


def into(store: Store, start: int, size: int, *, looped: bool = False) -> bytes:
    room = bytearray(size)
    if looped:
        asyncio.run(store.read_into_async("a", start, memoryview(room)))
    else:
        store.read_into("a", start, memoryview(room))
    return bytes(room)


READS: dict[str, tuple[Callable[[Store], bytes], int | None, int | None]] = {
    "get": (lambda store: store.get("a"), None, None),
    "get_async": (lambda store: asyncio.run(store.get_async("a")), None, None),
    "get_range": (lambda store: store.get_range("a", 5, 300_005), 5, 300_005),
    "get_range_async": (lambda store: asyncio.run(store.get_range_async("a", 5, 300_005)), 5, 300_005),
    "read_into": (lambda store: into(store, 5, 300_000), 5, 300_005),
    "read_into_async": (lambda store: into(store, 5, 300_000, looped=True), 5, 300_005),
}


@pytest.mark.parametrize("how", READS)
def test_a_read_is_seen_from_its_answer_to_its_last_byte(store: Store, how: str) -> None:
    recorder = Recorder()
    read, start, stop = READS[how]
    assert read(store.observed_by(recorder)) == read(store) == BODY[start:stop]
    assert recorder.reads == [("it/a", start, stop)] and recorder.under_way == 0
    first, *pieces = recorder.came
    assert first == 0 and all(pieces) and sum(pieces) == len(BODY[start:stop])
    if how.startswith("read_into") and store.is_local:
        assert len(pieces) == 3, "pieces are no larger than the observer wants them"
    if how.endswith("async"):
        assert threading.main_thread() not in recorder.threads, "an observer may block"


def test_an_object_that_comes_over_a_network_is_seen_piece_by_piece(tmp_path: Path) -> None:
    with S3Server() as server:
        server.objects["bucket/a"] = BODY
        options = {"endpoint": server.url, "region": "none", "anonymous": "true"}
        recorder = Recorder()
        assert Store.open("s3://bucket", options=options).observed_by(recorder).get("a") == BODY
    assert len(recorder.came) > 3 and all(piece >= OBSERVED_BYTES for piece in recorder.came[1:-1])


def test_a_read_that_fails_ends_for_its_observer(store: Store) -> None:
    recorder = Recorder()
    observed = store.observed_by(recorder)
    with pytest.raises(ObjectNotFound, match="missing"):
        observed.get("missing")
    with pytest.raises(ObjectChanged):
        observed.get_range("a", 0, 5, etag='"another"')
    assert recorder.under_way == 0 and sum(recorder.came) == 0
    assert recorder.reads == [("it/missing", None, None), ("it/a", 0, 5)]


def test_sizes_listings_and_writes_are_no_reads(store: Store) -> None:
    recorder = Recorder()
    observed = store.observed_by(recorder)
    observed.put("b", b"1")
    assert observed.head("b").size == 1 and observed.exists("a")
    assert {info.path for info in observed.list()} == {"a", "b"}
    assert observed.get_range("a", 3, 3) == b""
    observed.delete("b")
    assert recorder.reads == []


def test_an_observed_store_is_the_same_store_otherwise(store: Store) -> None:
    class Own(type(store)):  # type: ignore[misc]
        """A store with a method of its own."""

    own = Own(store._backend, name=store.name, uri=store.uri, root=store._root)
    observed = own.observed_by(Recorder())
    assert type(observed) is Own and own.observer is None
    assert (observed.name, observed.uri, observed.is_far) == (store.name, store.uri, store.is_far)
