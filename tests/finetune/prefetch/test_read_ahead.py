"""Check what is read while a model is traced: used once, never in place of other samples, and dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upriver
from tests.finetune.moving import AtStep
from tests.finetune.training import photos, run, same
from upriver.engine.read import read_samples
from upriver.errors import StoreError
from upriver.finetune import session
from upriver.finetune.prefetch import local_source, read_ahead
from upriver.finetune.prefetch.read_ahead import ReadAhead
from upriver.pipeline import Dataset

IDS = [(0, 1), (2, 3), (4, 5)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("store"), 40)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Return the micro-batches that are read ahead, as a list that grows."""
    found = list[tuple[int, ...]]()

    def noted(dataset: Dataset, ids: tuple[int, ...]) -> Any:
        found.append(ids)
        return read_samples(dataset, ids)

    monkeypatch.setattr(read_ahead, "read_samples", noted)
    yield found


def ended(ahead: ReadAhead) -> bool:
    ahead._thread.join(60)
    return not ahead._thread.is_alive()


def test_micro_batches_are_read_in_order_and_each_is_taken_once(
    data: Dataset, asked: list[tuple[int, ...]]
) -> None:
    ahead = ReadAhead(data, IDS, after_s=0.0)
    assert ended(ahead)
    assert asked == IDS
    assert ahead.take(data, IDS[1]) == read_samples(data, IDS[1])
    assert ahead.take(data, IDS[1]) is None
    assert ahead.take(data, (0, 2)) is None
    other = data.with_stages(
        (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
    )
    assert ahead.take(other, IDS[0]) is None and not ahead.begun(other)
    assert ahead.begun(data) == [IDS[0], IDS[2]]
    assert ahead.take(data, IDS[0]) == read_samples(data, IDS[0])
    ahead.close()
    assert ahead.take(data, IDS[2]) is None


def test_some_samples_of_a_micro_batch_are_taken_in_any_order(data: Dataset) -> None:
    ahead = ReadAhead(data, [(0, 1, 2), (3, 4, 5)], after_s=0.0)
    assert ended(ahead)
    assert ahead.take(data, (2, 0)) == read_samples(data, (2, 0))
    assert ahead.take(data, (1,)) is None
    assert ahead.take(data, (5, 4, 3)) == read_samples(data, (5, 4, 3))


def test_rows_of_others_are_checked_by_what_was_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    stages = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
    data = photos(tmp_path / "store", 40).with_stages(stages)
    room, read = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept"), list[object]()

    def noted(dataset: Dataset, ids: object, **given: Any) -> Any:
        read.append(ids)
        return read_samples(dataset, ids, **given)

    monkeypatch.setattr(local_source, "read_samples", noted)
    with upriver.connect() as near:
        first, model, _ = run(near, data, epochs=1, keep=room)
        read.clear()
        asked.clear()
        second, other, job = run(near, data, epochs=1, keep=room)
    assert same((second, other), (first, model))
    assert job.report.samples == {"kept": 40} and len(asked) >= 2
    assert not read, "nothing is read besides"


def test_nothing_is_read_before_the_trace_has_taken_long_enough(
    data: Dataset, asked: list[tuple[int, ...]]
) -> None:
    ahead = ReadAhead(data, IDS, after_s=1e6)
    assert ahead.take(data, IDS[0]) is None
    ahead.close()
    assert ended(ahead)
    assert not asked


def test_first_use_ends_the_reading_and_waits_for_what_is_on_its_way(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(dataset: Dataset, ids: tuple[int, ...]) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read_samples(dataset, ids)

    monkeypatch.setattr(read_ahead, "read_samples", held)
    ahead = ReadAhead(data, IDS, after_s=0.0)
    assert begun.wait(60)
    threading.Timer(0.05, go_on.set).start()
    assert ahead.take(data, IDS[0]) == read_samples(data, IDS[0])
    assert ended(ahead)
    assert ahead.take(data, IDS[1]) is None


def test_store_that_fails_is_asked_again_by_the_loader(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(dataset: Dataset, ids: tuple[int, ...]) -> Any:
        raise StoreError("it is away")

    monkeypatch.setattr(read_ahead, "read_samples", failing)
    ahead = ReadAhead(data, IDS, after_s=0.0)
    assert ended(ahead)
    assert ahead.take(data, IDS[0]) is None


@pytest.mark.full
def test_job_that_begins_at_once_uses_what_was_read_and_trains_the_same(
    data: Dataset, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Preparation", AtStep)
    monkeypatch.setattr(AtStep, "asked_before", 1000)
    taken, take = list[bool](), ReadAhead.take

    def noted(self: ReadAhead, dataset: Dataset, ids: tuple[int, ...]) -> Any:
        found = take(self, dataset, ids)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(ReadAhead, "take", noted)
    at_once = upriver.Splitting(in_background=True)
    with upriver.connect(server_threads=1) as near:
        losses, model, job = run(near, data, epochs=2, splitting=at_once)
    assert asked
    assert taken.count(True) >= 1
    with upriver.connect(server_threads=1) as near:
        wanted, trained, _ = run(near, data, epochs=2, policy="nosplit")
    assert same((losses, model), (wanted, trained))
    assert job.report.samples == {"local": 2 * len(data)}
