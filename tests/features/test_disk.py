"""Check the stretches under one root: never above the budget, and the least useful rows go first."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.examples import examples
from tests.features.keeping import (
    PLENTY,
    assert_kept,
    assert_same,
    child,
    disk_usage,
    key,
    opened,
    result_of,
    row,
    rows,
    shards,
    stretch,
)
from upriver import files
from upriver.errors import ConfigError
from upriver.features import DiskFeatures, StretchFolder, disk
from upriver.features.disk import FeatureFolder, disk_room
from upriver.features.shard import PackedShard

SHARD = 10 * (4096 + 64) + 4096
"""Bytes of a shard of ten rows of 4096, rounded up, and of all that it may need beside."""


def fill(kept: StretchFolder, first: int, count: int = 10) -> bool:
    """Append rows of 4 kB as one shard."""
    return kept.append(rows(range(first, first + count), 4096))


def used_long_ago(kept: StretchFolder, seconds: float) -> None:
    """Set the time of the last use; a negative number is a time to come."""
    then = time.time() - seconds
    os.utime(kept.path / "stretch.json", (then, then))


def test_disk_less_useful_stretch_gives_way_shard_by_shard_from_the_oldest(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=5 * SHARD)
    low, high = features.open(stretch(1), saved_s=1.0), features.open(stretch(2), saved_s=2.0)
    for number in range(3):
        assert fill(low, 10 * number)
    assert fill(high, 0) and fill(high, 10)
    low.refresh()
    assert low.keys == {key(n) for n in range(10, 30)}
    assert fill(high, 20)
    low.refresh()
    assert low.keys == {key(n) for n in range(20, 30)}
    assert_kept(high, rows(range(30), 4096))
    assert features.used_bytes <= 5 * SHARD


def test_disk_less_useful_rows_are_not_written_where_all_are_more_useful(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=3 * SHARD)
    high, low = features.open(stretch(1), saved_s=2.0), features.open(stretch(2), saved_s=1.0)
    assert fill(high, 0) and fill(high, 10)
    assert not fill(low, 0, 20)
    assert_kept(high, rows(range(20), 4096))
    assert len(low.keys) < 10


def test_disk_seconds_count_for_each_byte(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=3 * SHARD)
    small, large = features.open(stretch(1), saved_s=1.0), features.open(stretch(2), saved_s=3.0)
    assert fill(small, 0) and fill(small, 10)
    assert not large.append(rows(range(2), 32768))  # three times the seconds for eight times the bytes
    assert_kept(small, rows(range(20), 4096))


@pytest.mark.parametrize("saved_s", [1.0, 1.1])
def test_disk_equally_useful_rows_stay_so_that_rounds_find_them(tmp_path: Path, saved_s: float) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=3 * SHARD)
    one, other = features.open(stretch(1), saved_s=1.0), features.open(stretch(2), saved_s=saved_s)
    assert fill(one, 0) and fill(one, 10)
    for _ in range(3):
        fill(other, 0, 20)
        fill(one, 20)
        assert_kept(one, rows(range(20), 4096))


@pytest.mark.parametrize("ago", [25 * 3600.0, 10 * 365 * 86400.0, -25 * 3600.0, -10 * 365 * 86400.0])
def test_disk_stretch_that_no_job_uses_gives_way_to_any(tmp_path: Path, ago: float) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=3 * SHARD)
    old, new = features.open(stretch(1), saved_s=100.0), features.open(stretch(2), saved_s=1.0)
    assert fill(old, 0) and fill(old, 10)
    used_long_ago(old, ago)
    assert fill(new, 0, 20)
    assert_kept(new, rows(range(20), 4096))
    assert len(shards(old.path)) <= 1


def test_disk_of_unused_stretches_the_less_useful_goes_first(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=4 * SHARD)
    folders = [
        features.open(stretch(number), saved_s=saved) for number, saved in ((1, 3.0), (2, 2.0), (3, 4.0))
    ]
    for each in folders:
        assert fill(each, 0)
        used_long_ago(each, 10**6)
    assert fill(features.open(stretch(4), saved_s=0.1), 0)
    assert [bool(shards(each.path)) for each in folders] == [True, False, True]


def test_disk_equal_stretches_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=4 * SHARD)
    folders = [features.open(stretch(number), saved_s=1.0) for number in range(3)]
    for each, ago in zip(folders, (100, 300, 200), strict=True):
        assert fill(each, 0)
        used_long_ago(each, ago)
    assert fill(features.open(stretch(4), saved_s=9.0), 0)
    assert [bool(shards(each.path)) for each in folders] == [True, False, True]


@pytest.mark.parametrize("jump", [-20 * 365 * 86400.0, 20 * 365 * 86400.0])
def test_disk_clock_that_jumps_changes_the_order_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=4 * SHARD)
    one, other = features.open(stretch(1), saved_s=1.0), features.open(stretch(2), saved_s=1.0)
    assert fill(one, 0) and fill(one, 10)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    fill(other, 0)
    fill(other, 10)
    fill(one, 20)
    assert features.used_bytes <= 4 * SHARD
    for kept in (one, other):
        kept.refresh()
        for number, each in enumerate(kept.read([key(n) for n in range(30)])):
            assert each is None or assert_same(each, row(number, 4096)) is None
    assert [entry.rows for entry in features.entries()] != []


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(0, 8 * SHARD),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 60), st.integers(1, 25), st.sampled_from([64, 4096, 40_000])
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_disk_is_never_above_the_budget(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    steps: list[tuple[int, int, int, int]],
) -> None:
    """Look at each moment at which files grow: before a shard has its name, and afterwards."""
    root = tmp_path_factory.mktemp("kept")
    features = DiskFeatures(root, budget_bytes=budget)
    folders = [features.open(stretch(number), saved_s=1.0 + number) for number in range(4)]
    monkeypatch.setattr(files, "sync", lambda path: measure())

    def measure() -> None:
        assert disk_usage(root) <= budget
        assert features.used_bytes <= budget

    for number, first, count, nbytes in steps:
        new = rows(range(first, first + count), nbytes)
        whole = folders[number].append(new)
        measure()
        assert not whole or new.keys() <= folders[number].keys
        for each in folders:
            each.refresh()  # the shards of one may have given way to those of another
            for found in each.read(sorted(each.keys)):
                assert found is not None
    again = DiskFeatures(root, budget_bytes=budget // 2)
    again.open(stretch(0), saved_s=1.0)
    assert again.used_bytes <= budget // 2


def test_disk_processes_that_write_at_once_share_the_budget(tmp_path: Path) -> None:
    budget = 12 * SHARD
    most, stop = [0], threading.Event()
    features = DiskFeatures(tmp_path, budget_bytes=budget)

    def measure() -> None:
        while not stop.wait(0.003):
            with features.locked():  # else files may move from one folder to the other during a look
                most[0] = max(most[0], disk_usage(tmp_path), features.used_bytes)

    def write(number: int) -> None:
        kept = opened(tmp_path, number, budget=budget, saved_s=1.0 + number % 2)
        for first in range(0, 120, 10):
            fill(kept, first)
            for at, each in enumerate(kept.read([key(n) for n in range(first, first + 10)])):
                assert each is None or assert_same(each, row(first + at, 4096)) is None

    thread = threading.Thread(target=measure)
    with child(lambda: write(1)) as one, child(lambda: write(2)) as other:
        thread.start()
        assert result_of(one) == result_of(other) == 0
        stop.set()
        thread.join()
    assert most[0] <= budget
    assert budget // 2 < disk_usage(tmp_path) <= budget
    found = [entry for entry in features.entries() if entry.rows]
    assert found[0].num_bytes <= budget


def test_disk_what_a_killed_job_has_reserved_counts_until_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 3 * SHARD

    def work() -> None:
        monkeypatch.setattr(PackedShard, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        fill(opened(tmp_path, 1, budget=budget), 0, 20)

    with child(work) as pid:
        assert result_of(pid) == -signal.SIGKILL
    features = DiskFeatures(tmp_path, budget_bytes=budget)
    assert features.used_bytes > 2 * (SHARD - 4096)
    kept = features.open(stretch(2), saved_s=1.0)
    assert fill(kept, 0, 20)
    assert_kept(kept, rows(range(20), 4096))
    assert not (tmp_path / stretch(1).digest).exists()
    assert features.used_bytes <= budget


def test_disk_smaller_budget_shrinks_what_is_there(tmp_path: Path) -> None:
    low, high = opened(tmp_path, 1, saved_s=1.0), opened(tmp_path, 2, saved_s=2.0)
    for number in range(3):
        assert fill(low, 10 * number) and fill(high, 10 * number)
    features = DiskFeatures(tmp_path, budget_bytes=4 * SHARD)
    kept = features.open(stretch(1), saved_s=1.0)
    assert features.used_bytes <= 4 * SHARD
    assert kept.keys < rows(range(30)).keys()
    assert all(found is not None for found in kept.read(list(kept.keys)))
    assert_kept(opened(tmp_path, 2, saved_s=2.0), rows(range(30), 4096))


def test_disk_entries_tell_what_is_kept(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=PLENTY)
    assert features.entries() == [] and features.used_bytes == 0
    one = features.open(stretch(1), saved_s=1.0, about="Net up to layer3")
    other = features.open(stretch(2), saved_s=0.5)
    assert fill(one, 0) and fill(one, 10) and other.append(rows(range(3)))
    used_long_ago(one, 5000)
    first, second = features.entries()
    assert second == FeatureFolder(
        digest=stretch(1).digest,
        cut=1,
        program="a" * 64,
        about="Net up to layer3",
        rows=20,
        num_bytes=second.num_bytes,
        saved_s=1.0,
        last_used_s=second.last_used_s,
    )
    assert abs(time.time() - 5000 - second.last_used_s) < 100
    assert (first.digest, first.cut, first.rows, first.saved_s) == (stretch(2).digest, 2, 3, 0.5)
    assert first.about == ""
    assert first.num_bytes + second.num_bytes == features.used_bytes
    assert 80_000 < second.num_bytes < 2 * SHARD + 3 * 4096


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "upriver.features/2", "saved_s": 9, "stretch": {"cut": 5}}', '{"schema": 1}'],
)
def test_disk_stretch_file_that_says_nothing_leaves_the_rows_and_gives_way_first(
    tmp_path: Path, text: str
) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=3 * SHARD)
    strange, new = features.open(stretch(1), saved_s=9.0), features.open(stretch(2), saved_s=0.1)
    assert fill(strange, 0) and fill(strange, 10)
    (strange.path / "stretch.json").write_text(text)
    (entry,) = features.entries()
    assert (entry.cut, entry.program, entry.saved_s, entry.rows) == (None, None, 0.0, 20)
    assert fill(new, 0)


def test_disk_collect_by_age_size_and_neither(tmp_path: Path) -> None:
    features = DiskFeatures(tmp_path, budget_bytes=PLENTY)
    assert features.collect() == 0
    folders = [features.open(stretch(number), saved_s=1.0 + number) for number in range(4)]
    for each, ago in zip(folders, (10, 10, 8000, 20), strict=True):
        assert fill(each, 0)
        used_long_ago(each, ago)
    (tmp_path / "notes.txt").write_text("mine")
    before = features.used_bytes
    assert features.collect() == 0
    assert features.collect(older_than_s=7200) == before // 4 == before - features.used_bytes
    assert not folders[2].path.exists()
    assert features.collect(at_most=before // 4) == before // 2
    assert [each.path.exists() for each in folders] == [False, False, False, True]
    assert_kept(opened(tmp_path, 3), rows(range(10), 4096))
    assert features.collect(at_most=0) == before // 4
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".lock", "notes.txt"]


def test_disk_collect_does_not_disturb_a_writer(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    assert fill(kept, 0)
    DiskFeatures(tmp_path, budget_bytes=PLENTY).collect(at_most=0)
    assert fill(kept, 10)
    assert kept.keys >= rows(range(10, 20)).keys()


def test_disk_foreign_files_and_folders_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(bytes(100_000))
    (tmp_path / ("f" * 64)).write_bytes(bytes(100_000))
    (tmp_path / ("e" * 64)).mkdir()
    (tmp_path / ("e" * 64) / "mine").write_bytes(bytes(100_000))
    features = DiskFeatures(tmp_path, budget_bytes=2 * SHARD)
    assert features.used_bytes <= 4096
    assert fill(features.open(stretch(1), saved_s=1.0), 0)
    features.collect(at_most=0, older_than_s=-1)
    assert (tmp_path / "photos" / "a.jpg").exists() and (tmp_path / ("e" * 64) / "mine").exists()
    assert (tmp_path / ("f" * 64)).exists()


def test_disk_root_that_cannot_be_created_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    features = DiskFeatures(tmp_path / "file" / "root", budget_bytes=PLENTY)
    kept = features.open(stretch(1), saved_s=1.0)
    assert not fill(kept, 0) and not fill(kept, 0)
    assert features.used_bytes == 0 and features.entries() == [] and features.collect(at_most=0) == 0
    assert len(caplog.records) == 1 and "no rows are kept in" in caplog.text


def test_disk_root_that_another_process_holds_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.0)
    held = files.try_lock(tmp_path / ".lock")
    assert held is not None
    try:
        assert not fill(opened(tmp_path), 0)
    finally:
        os.close(held)
    assert len(caplog.records) == 1 and "another process has locked" in caplog.text
    assert fill(opened(tmp_path), 0)


def test_disk_lock_of_the_root_is_free_although_a_fork_has_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.5)
    features, held = DiskFeatures(tmp_path, budget_bytes=PLENTY), list[object]()
    with features.locked():
        forked = child(lambda: time.sleep(600))
        held.append(forked.__enter__())
    try:
        assert fill(opened(tmp_path), 0)
    finally:
        forked.__exit__(None, None, None)


@pytest.mark.parametrize("saved_s", [-1.0, float("nan"), float("inf")])
def test_disk_open_with_seconds_that_are_none_is_refused(tmp_path: Path, saved_s: float) -> None:
    with pytest.raises(ConfigError, match="saved_s must be a finite number >= 0"):
        DiskFeatures(tmp_path, budget_bytes=PLENTY).open(stretch(1), saved_s=saved_s)


def test_disk_room_counts_what_is_kept_already(tmp_path: Path) -> None:
    before = disk_room(tmp_path / "root")
    kept = opened(tmp_path / "root")
    assert kept.append(rows(range(1), 1 << 22))
    assert before > 0
    assert disk_room(tmp_path / "root") - disk_room(tmp_path) >= 1 << 21


def test_disk_many_random_jobs_read_only_right_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of several stretches and budgets come and go, and shards are damaged between."""
    monkeypatch.setattr(files, "sync", lambda path: None)
    chances = random.Random(5)
    for _ in range(30):
        features = DiskFeatures(tmp_path, budget_bytes=chances.randrange(9 * SHARD))
        for number in chances.sample(range(4), 2):
            kept = features.open(stretch(number), saved_s=1.0 + number)
            fill(kept, 10 * chances.randrange(6))
            for at, each in enumerate(kept.read([key(n) for n in range(60)])):
                assert each is None or assert_same(each, row(at, 4096)) is None
            assert features.used_bytes <= features.budget_bytes
        for path in shards(tmp_path)[:1]:
            with path.open("r+b") as file:
                file.seek(chances.randrange(path.stat().st_size))
                file.write(b"x")
