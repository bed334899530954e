"""Test the contract of every store, and the separation of tenants, against a real Swift."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.examples import often
from tests.pipeline.making import samples, shard
from tests.store.swift_server import CANNOT_RUN, KEYS, SCRIPT, Swift, running_swift
from tests.store.test_store import (  # noqa: F401
    read_into,
    test_a_changed_object_is_noticed,
    test_a_missing_object_is_named,
    test_a_range_is_read_into_memory,
    test_a_range_is_read_into_several_buffers,
    test_a_range_past_the_end_is_an_error_not_fewer_bytes,
    test_a_stream_becomes_one_object,
    test_a_stream_that_breaks_off_leaves_what_was_there,
    test_awkward_names_are_only_names,
    test_deleting,
    test_listing_knows_what_is_there_and_agrees_with_head,
    test_reading_into_memory_fails_as_other_reads_do,
    test_the_async_half_does_the_same,
    test_what_is_put_can_be_read_whole_and_in_ranges,
)

# The contract itself, with the fixture `store` of this module.
from tests.store.test_store_faults import opened
from upriver.engine.read import read_samples
from upriver.errors import ObjectChanged, ObjectNotFound, StoreError
from upriver.pipeline import CenterCrop, Dataset, Decode, Normalize, index
from upriver.store import Store
from upriver.store import store as store_module

pytestmark = pytest.mark.slow

BUCKET = "photos"
"""Bucket of both tenants: names of buckets are a tenant's own."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    data = tmp_path_factory.mktemp("swift")
    with running_swift(data, f"alice:{BUCKET}", f"bob:{BUCKET}", "alice:private") as running:
        yield running


@pytest.fixture
def place() -> str:
    """Return a URI under which nothing exists yet."""
    return f"s3://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture
def store(swift: Swift, place: str) -> Store:
    return Store.open(place, name="here", options=swift.options("alice"))


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.full
def test_ranges_are_exact_however_many_are_asked_for_at_once(store: Store) -> None:
    chance = random.Random(5)
    content = chance.randbytes(3_000_001)
    store.put("a", content)
    etag = store.head("a").etag
    ranges = [tuple(sorted(chance.sample(range(len(content) + 1), 2))) for _ in range(60)]
    ranges += [(0, 1), (len(content) - 1, len(content)), (0, len(content))]

    def read(bounds: tuple[int, ...]) -> bytes:
        return store.get_range("a", *bounds, etag=etag)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(read, ranges))
    assert found == [content[start:stop] for start, stop in ranges]

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(store.get_range_async("a", *each, etag=etag) for each in ranges))

    assert asyncio.run(all_of_them()) == found

    rooms = [bytearray(stop - start) for start, stop in ranges]

    async def straight() -> None:
        async with opened(store, 4) as direct:
            reads = [
                store.read_into_async("a", start, memoryview(room), etag=etag, direct=direct)
                for (start, _), room in zip(ranges, rooms, strict=True)
            ]
            await asyncio.gather(*reads)
            assert len(direct._idle) >= 4 and not direct._refusals

    asyncio.run(straight())
    assert [bytes(room) for room in rooms] == found


def test_an_object_put_in_parts_is_one_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 5 * 2**20  # the least that S3 allows for all parts but the last
    monkeypatch.setattr(store_module, "MULTIPART_BYTES", part)
    content = random.Random(6).randbytes(2 * part + 12_345)
    store.put("large", content)
    info = store.head("large")
    assert (info.size, list(store.list())) == (len(content), [info])
    assert store.get("large", etag=info.etag) == content
    for start, stop in ((part - 100, part + 100), (2 * part - 1, 2 * part + 12_345), (10, 2 * part + 10)):
        assert store.get_range("large", start, stop, etag=info.etag) == content[start:stop]
    store.put("large", content[::-1])
    with pytest.raises(ObjectChanged):
        store.get_range("large", 0, 10, etag=info.etag)


@pytest.mark.full
def test_more_objects_than_one_listing_holds(store: Store) -> None:
    names = {f"many/{number:04}" for number in range(1050)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b"."), names))
    assert {info.path for info in store.list("many")} == names


# ------------------------------------------------------------------------------------------ datasets


def indexed(store: Store) -> Dataset:
    for number in range(3):
        store.put(f"data/{number}.tar", shard(samples(6, first=6 * number)))
    return index(store, "data", stages=(Decode(), CenterCrop(16), Normalize()))


def test_a_dataset_is_indexed_published_and_read(store: Store) -> None:
    dataset = indexed(store)
    dataset.publish()
    again = Dataset.open(store, dataset.digest)
    assert len(again) == 18
    ids = list(range(17, -1, -1))
    refs = again.locate(ids)
    whole = {name: store.get(name) for name in {ref.object for ref in refs}}
    assert [bytes(view) for view in read_samples(again, ids)] == [
        whole[ref.object][ref.start : ref.stop] for ref in refs
    ]


def test_a_shard_that_changed_since_is_a_typed_error(store: Store) -> None:
    dataset = indexed(store)
    untouched = [bytes(view) for view in read_samples(dataset, range(6))]
    store.put("data/1.tar", shard(samples(6, first=100)))
    with pytest.raises(ObjectChanged, match=r"'data/1\.tar' in store 'here'.*index again"):
        read_samples(dataset, range(18))
    assert [bytes(view) for view in read_samples(dataset, range(6))] == untouched


def test_a_shard_that_is_gone_is_a_typed_error(store: Store) -> None:
    dataset = indexed(store)
    store.delete("data/2.tar")
    with pytest.raises(ObjectNotFound, match=r"'data/2\.tar' in store 'here'"):
        read_samples(dataset, range(18))
    store.delete("data/2.tar")  # a second delete: no error for a missing object


# ------------------------------------------------------------------------------------------- tenants


def test_each_tenant_reads_what_is_its_own(swift: Swift, place: str) -> None:
    for account in KEYS:
        swift.store(account, place).put("who", account.encode())
    for account in KEYS:
        assert swift.store(account, place).get("who") == account.encode()
    swift.store("alice", place).delete("who")
    assert not swift.store("alice", place).exists("who")
    assert swift.store("bob", place).get("who") == b"bob"


def test_another_tenants_bucket_is_none(swift: Swift) -> None:
    swift.store("alice", "s3://private").put("diary", b"mine")
    stranger = swift.store("bob", "s3://private")
    uses: list[Callable[[], object]] = [
        lambda: stranger.get("diary"),
        lambda: stranger.head("diary"),
        lambda: stranger.get_range("diary", 0, 2),
        lambda: list(stranger.list()),
        lambda: stranger.put("diary", b"yours"),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="store 'bob'"):
            use()
    assert swift.store("alice", "s3://private").get("diary") == b"mine"


def test_a_bucket_that_is_not_there_is_said_to_be_missing(swift: Swift) -> None:
    with pytest.raises(StoreError, match=r"cannot list '' in store 'bob'.*no such bucket"):
        list(swift.store("bob", "s3://private").list())


@pytest.mark.parametrize("wrong", ["secret_access_key", "access_key_id"])
def test_a_wrong_key_is_a_store_error_that_repeats_no_key(swift: Swift, place: str, wrong: str) -> None:
    swift.store("alice", place).put("a", b"1")
    store = swift.store("alice", place, **{wrong: "alice:another+key"})
    uses: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.put("a", b"2"),
        lambda: list(store.list()),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=r"store 'alice'.*refuses these credentials") as caught:
            use()
        assert not isinstance(caught.value, ObjectNotFound)
        for secret in (KEYS["alice"], "alice:another+key", "alice%3Aanother", "alice:reader"):
            assert secret not in str(caught.value)
    assert swift.store("alice", place).get("a") == b"1"


# -------------------------------------------------------------------------------------------- faults


def test_a_storage_node_that_hangs_is_given_up_and_comes_back(swift: Swift, place: str) -> None:
    content = random.Random(7).randbytes(100_000)
    patient = swift.store("alice", place)
    patient.put("a", content)
    etag = patient.head("a").etag
    hasty = swift.store("alice", place, read_timeout_s="0.5", max_retries="2")
    os.kill(swift.pids["object"], signal.SIGSTOP)
    try:
        with pytest.raises(StoreError, match=r"cannot read 'a' in store 'alice'") as caught:
            hasty.get_range("a", 1000, 2000, etag=etag)
        assert not isinstance(caught.value, ObjectChanged | ObjectNotFound)
    finally:
        os.kill(swift.pids["object"], signal.SIGCONT)
    assert patient.get_range("a", 1000, 2000, etag=etag) == content[1000:2000]


def test_reads_go_on_after_a_storage_node_hung(swift: Swift, place: str) -> None:
    content = random.Random(8).randbytes(100_000)
    store = swift.store("alice", place, read_timeout_s="1", max_retries="40")
    swift.store("alice", place).put("a", content)
    before = _connections(swift.pids["proxy"], swift.pids["object"])
    os.kill(swift.pids["object"], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get_range, "a", 5, 99_000)
        try:
            _wait(lambda: _connections(swift.pids["proxy"], swift.pids["object"]) > before)
        finally:
            os.kill(swift.pids["object"], signal.SIGCONT)
        assert reading.result() == content[5:99_000]


# ----------------------------------------------------------------------------------------- life cycle


@pytest.mark.parametrize("user", ["alice=top-secret", "alice:a_b=top-secret", "alice:reader=top-secret;"])
def test_a_user_that_is_none_is_told_without_the_key(tmp_path: Path, user: str) -> None:
    done = swift_command("start", str(tmp_path), "--user", user)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: --user must be ACCOUNT:USER=KEY")
    assert "top-secret" not in done.stderr


def test_a_folder_without_swift_is_said_to_have_none(tmp_path: Path) -> None:
    for arguments in (("start", str(tmp_path), "--user", "alice:reader=key"), ("check", str(tmp_path))):
        done = swift_command(*arguments)
        assert (done.returncode, done.stdout) == (CANNOT_RUN, "")
        assert (
            done.stderr
            == f"error: Swift is not installed in {tmp_path}: run `scripts/swift install {tmp_path}`\n"
        )


def swift_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("how", often(["stdin", "SIGTERM", "SIGKILL"], "SIGKILL"))
def test_nothing_of_it_is_left(tmp_path: Path, how: str) -> None:
    with running_swift(tmp_path, f"alice:{BUCKET}") as swift:
        swift.store("alice", f"s3://{BUCKET}").put("a", b"1")
        assert set(swift.pids) == {"memcached", "account", "container", "object", "proxy"}
        assert swift.process.stdin is not None
        if how == "stdin":
            swift.process.stdin.close()
        else:
            swift.process.send_signal(getattr(signal, how))
        assert swift.process.wait() == (-signal.SIGKILL if how == "SIGKILL" else 0)
        _wait(lambda: not any(map(_lives, swift.pids.values())))
        address = urlsplit(swift.endpoint)
        with socket.socket() as client:
            assert client.connect_ex((address.hostname, address.port)) != 0


@pytest.mark.full
def test_objects_are_there_again_after_a_restart(tmp_path: Path) -> None:
    with running_swift(tmp_path, f"alice:{BUCKET}") as swift:
        swift.store("alice", f"s3://{BUCKET}").put("a", b"kept")
        before = swift.store("alice", f"s3://{BUCKET}").head("a")
    with running_swift(tmp_path, f"alice:{BUCKET}") as swift:
        store = swift.store("alice", f"s3://{BUCKET}")
        assert store.head("a") == before
        assert store.get("a", etag=before.etag) == b"kept"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _connections(client: int, server: int) -> int:
    """Return how many connections a process has to the port on which another one listens."""
    ports = {each.laddr.port for each in _sockets(server) if each.status == psutil.CONN_LISTEN}
    open_ones = [each for each in _sockets(client) if each.status == psutil.CONN_ESTABLISHED]
    return sum(each.raddr.port in ports for each in open_ones)


def _sockets(pid: int) -> list[Any]:
    return list(psutil.Process(pid).net_connections("tcp"))


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)
