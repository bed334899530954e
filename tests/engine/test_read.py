"""Check reads: the right bytes in the right order, in few GETs, and only of the indexed object."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.engine import read
from upriver.engine.read import plan_gets, read_samples, read_samples_async
from upriver.errors import ConfigError, ObjectChanged, ObjectNotFound, StoreError
from upriver.pipeline import Dataset, SampleRef, imagenet_eval, index
from upriver.store import Store

Reader = Callable[[Dataset, list[int]], list[memoryview]]


async def read_async(dataset: Dataset, ids: list[int]) -> list[memoryview]:
    return await read_samples_async(dataset.store, dataset.locate(ids))


READERS = {"sync": read_samples, "async": lambda dataset, ids: asyncio.run(read_async(dataset, ids))}


class CountingStore(Store):
    """A real store that counts its ranged GETs and those that run at once."""

    gets: list[tuple[str, int, int, str | None]]
    running = most_running = 0
    lock: threading.Lock

    @classmethod
    def at(cls, uri: str) -> CountingStore:
        store = cls.open(uri)
        store.__class__ = cls
        store.gets, store.lock = [], threading.Lock()
        return store

    def _enter(self, get: tuple[str, int, int, str | None]) -> None:
        with self.lock:
            self.gets.append(get)
            self.running += 1
            self.most_running = max(self.most_running, self.running)

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        self._enter((path, start, stop, etag))
        data = super().get_range(path, start, stop, etag=etag)
        with self.lock:
            self.running -= 1
        return data

    async def get_range_async(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        self._enter((path, start, stop, etag))
        data = await super().get_range_async(path, start, stop, etag=etag)
        with self.lock:
            self.running -= 1
        return data


def body(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size + number.to_bytes(4, "big")


def write_shard(path: Path, numbers: range, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for number in numbers:
            for name, data in ((f"{number:04d}.cls", b"0"), (f"{number:04d}.jpg", body(number, size))):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mtime = 0.5  # fractional: every member gets a PAX extension, the widest gap possible
                archive.addfile(entry, io.BytesIO(data))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    for shard in range(3):
        write_shard(tmp_path / f"{shard}.tar", range(20 * shard, 20 * shard + 20), 10_000)
    return index(CountingStore.at(tmp_path.as_uri()), stages=imagenet_eval())


def gets_of(dataset: Dataset) -> list[tuple[str, int, int, str | None]]:
    assert isinstance(dataset.store, CountingStore)
    return dataset.store.gets


@pytest.fixture(params=READERS.values(), ids=READERS.keys())
def reader(request: pytest.FixtureRequest) -> Reader:
    chosen: Reader = request.param
    return chosen


@pytest.mark.parametrize(
    "ids", [[], [7], list(range(60)), [59, 0, 30, 30, 0, 1], list(range(59, -1, -1)), [5] * 10]
)
def test_bytes_come_in_the_order_asked_for(dataset: Dataset, reader: Reader, ids: list[int]) -> None:
    assert [bytes(view) for view in reader(dataset, ids)] == [body(number, 10_000) for number in ids]


def test_neighbours_share_a_get(dataset: Dataset, reader: Reader) -> None:
    gets_of(dataset).clear()
    reader(dataset, list(range(16)))
    assert len(gets_of(dataset)) == 1
    ((_, start, stop, etag),) = gets_of(dataset)
    refs = dataset.locate(range(16))
    assert (start, stop, etag) == (refs[0].start, refs[-1].stop, refs[0].etag)


def test_one_get_a_shard_and_one_a_run(dataset: Dataset, reader: Reader) -> None:
    gets_of(dataset).clear()
    reader(dataset, list(range(60)))
    assert sorted(get[0] for get in gets_of(dataset)) == ["0.tar", "1.tar", "2.tar"]
    gets_of(dataset).clear()
    reader(dataset, [0, 1, 5, 6, 12, 40, 41])  # the bytes between 1 and 5 are more than the gap
    assert len(gets_of(dataset)) == 4
    wanted = sum(ref.stop - ref.start for ref in dataset.locate([0, 1, 5, 6, 12, 40, 41]))
    assert sum(stop - start for _, start, stop, _ in gets_of(dataset)) <= wanted + 3 * read.GAP_BYTES


def test_a_get_has_a_longest_length(
    dataset: Dataset, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_GET_BYTES", 70_000)
    gets_of(dataset).clear()
    views = reader(dataset, list(range(20)))
    assert [bytes(view) for view in views] == [body(number, 10_000) for number in range(20)]
    assert len(gets_of(dataset)) == 4
    assert max(stop - start for _, start, stop, _ in gets_of(dataset)) <= 70_000
    monkeypatch.setattr(read, "MAX_GET_BYTES", 10)  # a sample larger than that is a GET of its own
    assert bytes(reader(dataset, [3])[0]) == body(3, 10_000)


def test_only_so_many_gets_run_at_once(
    dataset: Dataset, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(CountingStore):
        def _enter(self, get: tuple[str, int, int, str | None]) -> None:
            super()._enter(get)
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.01)  # long enough for the others to begin, if allowed

    monkeypatch.setattr(read, "CONCURRENCY", 3)
    dataset.store.__class__ = Slow
    ids = list(range(0, 60, 3))
    if reader is read_samples:
        read_samples(dataset, ids, at_once=3)
    else:
        reader(dataset, ids)
    assert isinstance(dataset.store, CountingStore)
    assert 1 < dataset.store.most_running <= 3


def test_views_look_into_what_was_fetched(dataset: Dataset, reader: Reader) -> None:
    views = reader(dataset, [0, 1])
    assert views[0].obj is views[1].obj
    assert all(view.readonly for view in views)


@settings(deadline=None, max_examples=examples(200))
@given(
    spans=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40_000), st.integers(0, 9_000)), max_size=30
    )
)
def test_every_sample_lies_in_exactly_one_get(spans: list[tuple[str, int, int]]) -> None:
    refs = [SampleRef(object=name, etag="e", start=start, stop=start + size) for name, start, size in spans]
    gets = plan_gets(refs)
    placed = [at for get in gets for at, _, _ in get.members]
    assert sorted(placed) == list(range(len(refs)))
    for get in gets:
        for at, start, stop in get.members:
            assert (refs[at].object, refs[at].start, refs[at].stop) == (get.object, start, stop)
            assert get.start <= start <= stop <= get.stop
    for one, two in pairwise(gets):
        assert one.object != two.object or two.start - one.stop > read.GAP_BYTES


# -------------------------------------------------------------------------------------------- failures


def test_a_changed_object_is_named(dataset: Dataset, reader: Reader, tmp_path: Path) -> None:
    write_shard(tmp_path / "1.tar", range(20, 41), 10_000)
    reader(dataset, [0, 59])
    with pytest.raises(ObjectChanged, match=r"'1\.tar' in store 'default'"):
        reader(dataset, [0, 25, 59])


def test_a_missing_object_is_named(dataset: Dataset, reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "2.tar").unlink()
    with pytest.raises(ObjectNotFound, match=r"'2\.tar' in store 'default'"):
        reader(dataset, [0, 59])


def test_a_short_object_is_no_shorter_sample(dataset: Dataset, reader: Reader) -> None:
    """A store without If-Match returns an object that was cut off: only the length shows it."""

    class Forgetful(CountingStore):
        def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
            return super().get_range(path, start, stop)

        async def get_range_async(
            self, path: str, start: int, stop: int, *, etag: str | None = None
        ) -> bytes:
            return await super().get_range_async(path, start, stop)

    dataset.store.__class__ = Forgetful
    ref = dataset.locate([5])[0]
    dataset.store.put("0.tar", dataset.store.get("0.tar")[: ref.stop - 1])
    with pytest.raises(StoreError, match=r"'0\.tar' in store 'default' ended early"):
        reader(dataset, [5])


def test_ids_that_are_no_rows(dataset: Dataset, reader: Reader) -> None:
    with pytest.raises(ConfigError, match=r"0\.\.59, got 60"):
        reader(dataset, [0, 60])


def test_a_cancelled_read_leaves_nothing_running(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CONCURRENCY", 1)
    monkeypatch.setattr(read, "IN_A_ROW", 0)
    gate, started = asyncio.Event(), []

    class Waiting(CountingStore):
        async def get_range_async(
            self, path: str, start: int, stop: int, *, etag: str | None = None
        ) -> bytes:
            started.append(path)
            await gate.wait()
            return b""

    dataset.store.__class__ = Waiting

    async def run() -> None:
        task = asyncio.ensure_future(read_async(dataset, [0, 30, 59]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert started == ["0.tar"]


def test_after_an_error_nothing_is_left_running(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "IN_A_ROW", 0)
    gate = asyncio.Event()

    class Waiting(CountingStore):
        async def get_range_async(
            self, path: str, start: int, stop: int, *, etag: str | None = None
        ) -> bytes:
            if path == "1.tar":
                raise StoreError("no luck")
            await gate.wait()
            return b""

    dataset.store.__class__ = Waiting

    async def run() -> None:
        with pytest.raises(StoreError, match="no luck"):
            await read_async(dataset, [0, 30, 59])
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


@pytest.mark.parametrize(("small", "threads"), [(1 << 20, 1), (0, 3)])
def test_a_few_small_files_are_read_by_one_thread(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, small: int, threads: int
) -> None:
    monkeypatch.setattr(read, "SMALL_BYTES", small)
    submitted: list[object] = []
    to_thread = asyncio.to_thread

    async def counted(work: Callable[..., object], *args: object, **more: object) -> object:
        submitted.append(work)
        return await to_thread(work, *args, **more)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    ids = [0, 30, 59]
    assert asyncio.run(read_async(dataset, ids)) == read_samples(dataset, ids)
    assert len(submitted) == threads
