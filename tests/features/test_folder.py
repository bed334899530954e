"""Check the rows of one stretch on disk: right or missing, whatever happens to files and processes."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import fill
from tests.features.keeping import (
    PLENTY,
    STRETCH,
    assert_kept,
    assert_same,
    child,
    key,
    opened,
    result_of,
    row,
    rows,
    shards,
    stretch,
)
from upriver import files
from upriver.features import DiskFeatures, folder, shard
from upriver.features.shard import PackedShard, Shard

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture


def unfinished(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if "#" in path.name]


def written(root: Path) -> list[int]:
    """Return the number of rows of each shard."""
    return [int(path.name.split("-")[1]) for path in shards(root)]


def flip(path: Path, at: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(bytes([byte ^ 16]))


# ------------------------------------------------------------------------------------ reading, writing


def test_folder_gives_what_was_appended_in_this_job_and_the_next(tmp_path: Path) -> None:
    wanted = rows(range(10))
    kept = opened(tmp_path)
    assert kept.keys == set() and kept.row_bytes == 0 and kept.read([key(1)]) == [None]
    assert kept.append(rows(range(4))) and kept.append(rows(range(2, 10)))
    assert_kept(kept, wanted)
    assert kept.row_bytes == 320
    assert len(shards(tmp_path)) == 2
    later = opened(tmp_path)
    assert_kept(later, wanted)
    asked = [key(7), key(99), key(0), key(7)]
    found = later.read(asked)
    assert found[1] is None
    for at in (0, 2, 3):
        assert_same(found[at], wanted[asked[at]])
    assert opened(tmp_path, 4).keys == set()


def test_folder_rows_do_not_overlap_also_those_of_one_key(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(2)))
    one, other = kept.read([key(0), key(0)])
    assert one is not None and other is not None
    one[0].zero_()
    assert_same(other, row(0))
    assert_kept(kept, rows(range(2)))


def test_folder_append_of_what_is_there_writes_nothing(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    assert kept.append({}) and not shards(tmp_path)
    assert kept.append(rows(range(3))) and kept.append(rows(range(3)))
    assert len(shards(tmp_path)) == 1


def test_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        opened(tmp_path / "new" / "root").append(rows(range(1)))
    finally:
        os.umask(before)
    root = tmp_path / "new" / "root"
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    names = sorted(path.name for path in (root / STRETCH.digest).iterdir())
    assert [names[0], names[2]] == [".lock", "stretch.json"] and names[1].startswith("rows-1-")


def test_folder_says_of_what_stretch_it_is(tmp_path: Path) -> None:
    opened(tmp_path, saved_s=0.5).append(rows(range(1)))
    path = tmp_path / STRETCH.digest / "stretch.json"
    wanted = {"schema": "upriver.features/1", "saved_s": 0.5, "about": "", "stretch": STRETCH.to_json()}
    assert json.loads(path.read_text()) == wanted
    opened(tmp_path, saved_s=0.25)
    assert json.loads(path.read_text()) == wanted | {"saved_s": 0.25}
    path.unlink()
    opened(tmp_path, saved_s=0.5)
    assert json.loads(path.read_text()) == wanted


def test_folder_is_not_created_before_there_are_rows(tmp_path: Path) -> None:
    kept = opened(tmp_path / "root")
    kept.read([key(0)]), kept.refresh(), kept.empty()
    assert not (tmp_path / "root").exists()


def test_folder_empty_removes_all_rows_and_takes_new_ones(tmp_path: Path) -> None:
    kept, other = opened(tmp_path), opened(tmp_path)
    kept.append(rows(range(3)))
    other.refresh()
    other.empty()
    assert other.keys == set() and not shards(tmp_path)
    kept.refresh()
    assert other.append(rows(range(2)))
    assert_kept(other, rows(range(2)))


def test_folder_refresh_finds_what_another_job_has_written(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path)
    writer.append(rows(range(3)))
    assert reader.keys == set()
    reader.refresh()
    assert_kept(reader, rows(range(3)))


# ------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("at", [0, 20, 400, -1, -700])
def test_folder_damaged_shard_is_dropped_with_one_warning_and_written_again(
    tmp_path: Path, caplog: Log, at: int
) -> None:
    opened(tmp_path).append(rows(range(5)))
    kept = opened(tmp_path)
    kept.append(rows(range(5, 10)))
    damaged, whole = sorted(shards(tmp_path), key=lambda path: path.stat().st_mtime_ns)
    flip(damaged, at)
    reader = opened(tmp_path)
    found = reader.read(list(rows(range(10))))
    for number, each in enumerate(found):
        if each is not None:
            assert_same(each, row(number))
    assert None in found[:5] and None not in found[5:]
    assert reader.keys == rows(range(5, 10)).keys()
    assert shards(tmp_path) == [whole]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{damaged} is damaged, and its rows are lost" in caplog.text
    assert reader.append(rows(range(10)))
    assert_kept(reader, rows(range(10)))


@pytest.mark.parametrize("length", [0, 5, 500, -1])
def test_folder_shard_cut_while_it_is_open_gives_no_wrong_row(
    tmp_path: Path, caplog: Log, length: int
) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(5)))
    (path,) = shards(tmp_path)
    os.truncate(path, length if length >= 0 else path.stat().st_size + length)
    found = kept.read([key(n) for n in range(5)])
    assert None in found
    for number, each in enumerate(found):
        assert each is None or assert_same(each, row(number)) is None
    assert kept.keys == set() and not path.exists()
    assert len(caplog.records) == 1


def test_folder_shard_of_another_stretch_is_not_taken(tmp_path: Path, caplog: Log) -> None:
    opened(tmp_path, 4).append(rows(range(2)))
    opened(tmp_path, 3).append(rows(range(5, 6)))
    (moved,) = shards(tmp_path / stretch(4).digest)
    moved.rename(tmp_path / stretch(3).digest / moved.name)
    assert_kept(opened(tmp_path, 3), rows(range(5, 6)))
    assert f"it holds rows of stretch '{stretch(4).digest}'" in caplog.text


def test_folder_of_another_version_counts_as_missing_and_says_so(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shard, "SCHEMA", "upriver.features/2")
        kept = opened(tmp_path)
        kept.append(rows(range(2)))
        assert_kept(kept, rows(range(2)))
    other = shards(tmp_path)
    assert opened(tmp_path).keys == set()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{other[0]} counts as missing: its schema is 'upriver.features/2'; this version reads "
        "'upriver.features/1'"
    )
    again = opened(tmp_path)
    assert again.append(rows(range(2)))
    assert_kept(again, rows(range(2)))
    assert other[0].exists()


def test_folder_foreign_names_are_left_alone(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(2)))
    foreign = [
        kept.path / name for name in ("rows-1.safetensors", "notes", ".notes-1#2", "rows-1-xyz.safetensors")
    ]
    for path in foreign:
        path.write_text("mine")
    (kept.path / f"rows-1-{'0' * 16}.safetensors").mkdir()
    again = opened(tmp_path)
    assert_kept(again, rows(range(2)))
    assert again.append(rows(range(3)))
    again.empty()
    assert all(path.read_text() == "mine" for path in foreign)


def test_folder_that_vanishes_during_reads_costs_rows_only(tmp_path: Path, caplog: Log) -> None:
    kept = opened(tmp_path / "root")
    kept.append(rows(range(3)))
    kept.append(rows(range(3, 6)))
    stop, faults = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                for number, each in enumerate(kept.read([key(n) for n in range(6)])):
                    assert each is None or assert_same(each, row(number)) is None
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    shutil.rmtree(tmp_path / "root")
    for path in list(kept._shards):
        kept._files.close(path)  # as where others have been opened since
    kept.read([key(0), key(5)])
    stop.set()
    thread.join()
    assert not faults and kept.keys == set() and not caplog.records
    assert kept.append(rows(range(2)))
    assert_kept(kept, rows(range(2)))
    assert_kept(opened(tmp_path / "root"), rows(range(2)))


def test_folder_removed_shard_stays_readable_where_it_is_open(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(3)))
    reader = opened(tmp_path)
    shards(tmp_path)[0].unlink()
    assert_kept(reader, rows(range(3)))


def test_folder_that_cannot_be_read_warns_once(tmp_path: Path, caplog: Log, monkeypatch: Patch) -> None:
    opened(tmp_path).append(rows(range(3)))

    def failing(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("upriver.features.open_files.opened", failing)
        kept = opened(tmp_path)
        assert kept.keys == set()
        kept.refresh()
    assert len(caplog.records) == 1 and "cannot be read, and its rows are lost" in caplog.text
    assert len(shards(tmp_path)) == 1
    kept.refresh()
    assert_kept(kept, rows(range(3)))


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_folder_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: Log, mode: int) -> None:
    opened(tmp_path).append(rows(range(3)))
    (tmp_path / STRETCH.digest).chmod(mode)
    kept = opened(tmp_path)
    assert kept.keys == set() and not kept.append(rows(range(4)))
    assert len(caplog.records) == 1 and "that no other may write to" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_not_used(tmp_path: Path, caplog: Log) -> None:
    opened(tmp_path).append(rows(range(3)))
    os.chown(tmp_path / STRETCH.digest, 12345, 12345)
    assert opened(tmp_path).keys == set()
    assert "it must be a folder of this user" in caplog.text


def test_folder_that_is_a_link_is_not_used(tmp_path: Path, caplog: Log) -> None:
    opened(tmp_path / "a").append(rows(range(3)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / STRETCH.digest).symlink_to(tmp_path / "a" / STRETCH.digest)
    kept = opened(tmp_path / "b")
    assert kept.keys == set() and not kept.append(rows(range(4)))
    assert "is not used" in caplog.text


def test_folder_without_a_cache_keeps_nothing_and_says_nothing(caplog: Log) -> None:
    kept = opened(Path(os.devnull) / "features")
    assert not kept.append(rows(range(2))) and kept.keys == set()
    assert not caplog.records


def test_folder_row_that_has_no_form_is_said_once(tmp_path: Path, caplog: Log) -> None:
    kept = opened(tmp_path)
    odd = {key(0): (torch.zeros(3).to(torch.float8_e4m3fn),)}
    assert not kept.append(odd) and not kept.append(odd)
    assert len(caplog.records) == 1 and "dtype torch.float8_e4m3fn cannot be kept" in caplog.text
    assert not shards(tmp_path)


# ---------------------------------------------------------------------------------- disks that fail


def test_folder_on_a_full_disk_goes_on_with_one_warning(small_disk: Path, caplog: Log) -> None:
    kept = opened(small_disk)
    assert kept.append(rows(range(10), 4096))
    fill(small_disk, leave=64 * 1024)
    assert not kept.append(rows(range(10, 60), 4096))
    assert not kept.append(rows(range(10, 60), 4096))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"no more rows are kept in {kept.path}: OSError: [Errno 28] No space left" in caplog.text
    assert_kept(kept, rows(range(10), 4096))
    assert_kept(opened(small_disk), rows(range(10), 4096))
    assert not unfinished(small_disk)


def test_folder_on_a_disk_that_is_full_from_the_start_keeps_nothing(small_disk: Path, caplog: Log) -> None:
    fill(small_disk)
    kept = opened(small_disk)
    assert not kept.append(rows(range(10)))
    assert kept.keys == set() and len(caplog.records) == 1


@pytest.mark.parametrize("call", ["truncate", "replace", "fsync"])
def test_folder_on_a_disk_that_fails_in_mid_write_leaves_nothing(
    tmp_path: Path, monkeypatch: Patch, caplog: Log, call: str
) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(2)))

    def failing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert not kept.append(rows(range(2, 4)))
    assert not kept.append(rows(range(2, 4)))  # it said that no more rows are kept
    assert not unfinished(tmp_path) and len(shards(tmp_path)) == 1
    assert len(caplog.records) == 1
    assert_kept(kept, rows(range(2)))


def test_folder_on_a_slow_disk_is_given_up_with_figures(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    kept = opened(tmp_path, saved_s=1.0)
    write = PackedShard.write
    passed = [0.0]
    monkeypatch.setattr(folder.time, "monotonic", lambda: 1000.0 + passed[0])

    def slow(self: PackedShard, path: Path) -> None:
        passed[0] += 15.0
        write(self, path)

    assert kept.append(rows(range(100)))
    monkeypatch.setattr(PackedShard, "write", slow)
    assert kept.append(rows(range(100, 101)))  # 15 s, but rows of 101 s
    assert kept.append(rows(range(101, 102))) and kept.append(rows(range(102, 103)))
    assert not caplog.records
    fast = opened(tmp_path, 4, saved_s=0.01)
    assert fast.append(rows(range(5)))
    assert not caplog.records  # the job itself may have been stopped meanwhile
    assert fast.append(rows(range(5, 10)))
    assert not fast.append(rows(range(10, 15)))
    (record,) = caplog.records
    assert "the disk is slow; writing 5 rows took 15 s, and computing them 0.05 s" in record.getMessage()
    assert_kept(fast, rows(range(10)))


def test_folder_from_which_reading_is_slow_loses_its_rows_and_says_so_with_figures(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    kept, passed, read = opened(tmp_path, saved_s=1.0), [0.0], Shard.read
    assert kept.append(rows(range(5)))
    monkeypatch.setattr(folder.time, "monotonic", lambda: 1000.0 + passed[0])

    def slow(self: Shard, *given: Any) -> Any:
        passed[0] += 3.0
        return read(self, *given)

    monkeypatch.setattr(Shard, "read", slow)
    keys = list(rows(range(5)))
    assert None not in kept.read(keys)  # the job itself may have been stopped for 15 s
    assert None not in kept.read(keys[:3])  # 9 s may be an accident
    assert not caplog.records
    assert None not in kept.read(keys[3:])
    assert "reading 5 rows took 15 s, and computing them 5 s" in caplog.text
    assert kept.read(keys) == [None] * 5
    kept.refresh()
    assert not kept.keys
    assert not kept.append(rows(range(5, 6)))
    assert len(opened(tmp_path, saved_s=1.0).keys) == 5  # they are there for a job to which they are worth it


def test_disk_is_not_judged_while_nobody_knows_what_a_row_saves(tmp_path: Path, monkeypatch: Patch) -> None:
    kept, passed, write = opened(tmp_path, saved_s=0.0), [0.0], PackedShard.write
    monkeypatch.setattr(folder.time, "monotonic", lambda: 1000.0 + passed[0])

    def slow(self: PackedShard, path: Path) -> None:
        passed[0] += 15.0
        write(self, path)

    monkeypatch.setattr(PackedShard, "write", slow)
    assert kept.append(rows(range(1)))
    kept.saved_s = 1.0
    assert kept.append(rows(range(1, 2)))
    assert opened(tmp_path, saved_s=0.0).keys == kept.keys
    assert DiskFeatures(tmp_path, budget_bytes=1 << 30).entries()[0].saved_s == 0.0
    opened(tmp_path, saved_s=1.0)
    opened(tmp_path, saved_s=0.0)
    assert DiskFeatures(tmp_path, budget_bytes=1 << 30).entries()[0].saved_s == 1.0
    assert not kept.append(rows(range(2, 3)))


# ------------------------------------------------------------------------------------ other processes


def test_folder_jobs_write_in_turns_and_read_what_the_others_wrote(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.append(rows(range(2)))
    assert other.append(rows(range(4)))
    assert one.append(rows(range(6)))
    assert written(tmp_path) == [2, 2, 2]
    one.refresh(), other.refresh()
    assert_kept(one, rows(range(6)))
    assert_kept(other, rows(range(6)))


def test_folder_has_a_row_of_each_shard_of_others_to_prove(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.append(rows(range(3))) and one.append(rows(range(3, 5)))
    assert not one.unproven(one.keys) and not one.has_others
    other.refresh()
    assert other.has_others
    everything = list(rows(range(8)))
    assert other.unproven(everything) == [everything[:3], everything[3:5]]
    assert other.unproven(everything[1:2]) == [everything[1:2]]
    other.prove(everything[4:5])
    assert other.unproven(everything) == [everything[:3]]
    other.prove(everything[1:2])
    assert not other.unproven(everything)
    assert one.append(rows(range(6)))
    other.refresh()
    assert other.unproven(everything) == [everything[5:6]]


def test_folder_row_in_two_shards_is_lost_with_the_one_that_it_is_read_from(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    assert kept.append(rows(range(2)))
    [first] = shards(tmp_path)
    twin = tmp_path / "twin"
    opened(twin).append(rows(range(3)))
    [second] = shards(twin)
    shutil.copy(second, first.parent)
    kept.refresh()
    assert_kept(kept, rows(range(3)))
    assert kept.unproven(list(rows(range(3)))) == [list(rows([2]))]
    kept.empty()
    assert not kept.keys


def test_folder_processes_that_write_at_once_lose_no_row_and_write_none_twice(tmp_path: Path) -> None:
    def write(number: int) -> None:
        kept = opened(tmp_path)
        for first in range(0, 40, 4):
            assert kept.append(rows(range(first, first + 4 + number)))

    with ExitStack() as stack:
        pids = [stack.enter_context(child(partial(write, number))) for number in range(3)]
        assert [result_of(pid) for pid in pids] == [0, 0, 0]
    assert_kept(opened(tmp_path), rows(range(42)))
    assert sum(written(tmp_path)) == 42


def test_folder_waits_for_a_writer_and_goes_on_when_it_is_killed(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    caplog.set_level(logging.INFO, "upriver")
    monkeypatch.setattr(folder, "TURN_S", 0.2)
    waited, own = list[float](), folder.StretchFolder._own

    def noted(self: folder.StretchFolder, *, within_s: float) -> bool:
        waited.append(within_s)
        return own(self, within_s=within_s)

    ready, told = os.pipe()
    opened(tmp_path).append(rows(range(1)))

    def write() -> None:
        def stuck(path: Path) -> None:
            os.write(told, b"1")
            time.sleep(600)

        monkeypatch.setattr(files, "sync", stuck)
        opened(tmp_path).append(rows(range(3)))

    with child(write) as pid:
        os.read(ready, 1)
        kept = opened(tmp_path)
        assert_kept(kept, rows(range(1)))
        monkeypatch.setattr(folder.StretchFolder, "_own", noted)
        assert not kept.append(rows(range(5))) and not kept.append(rows(range(5)))
        (record,) = caplog.records
        assert record.getMessage() == f"another job has written to {kept.path} for 0.2 s: rows are left out"
        os.kill(pid, signal.SIGKILL)
        assert result_of(pid) == -signal.SIGKILL
        assert kept.append(rows(range(5))) and kept.append(rows(range(6)))
        assert waited == [0.2, 0.0, 0.0, 0.2]  # a job that is stopped keeps another waiting for one shard
        assert_kept(kept, rows(range(6)))
    os.close(ready), os.close(told)


def test_folder_fork_of_a_writer_does_not_hold_its_lock(tmp_path: Path, monkeypatch: Patch) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(2)))
    sync = files.sync
    with ExitStack() as forks:

        def forking(path: Path) -> None:
            forks.enter_context(child(lambda: time.sleep(600)))
            sync(path)

        monkeypatch.setattr(files, "sync", forking)
        assert kept.append(rows(range(3)))
        monkeypatch.setattr(files, "sync", sync)
        other = opened(tmp_path)
        assert other.append(rows(range(4)))
        assert_kept(other, rows(range(4)))


def dying(where: str) -> Callable[[PackedShard, Path], None]:
    """Return a write that is killed at some point."""
    write = PackedShard.write

    def killed(self: PackedShard, path: Path) -> None:
        if where == "half":
            write(self, path)
            size = path.stat().st_size
            os.truncate(path, size // 2)
            os.truncate(path, size)
        elif where == "whole":
            write(self, path)
        os.kill(os.getpid(), signal.SIGKILL)

    return killed


@pytest.mark.parametrize("where", ["reserved", "half", "whole", "before the folder's sync"])
def test_folder_killed_writer_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: Patch, caplog: Log, where: str
) -> None:
    first = opened(tmp_path)
    first.append(rows(range(3)))

    def work() -> None:
        kept = opened(tmp_path)
        if where == "before the folder's sync":
            monkeypatch.setattr(
                files, "sync", lambda path: path.is_dir() and os.kill(os.getpid(), signal.SIGKILL)
            )
        else:
            monkeypatch.setattr(PackedShard, "write", dying(where))
        kept.append(rows(range(3, 6)))

    with child(work) as pid:
        assert result_of(pid) == -signal.SIGKILL
    written = where == "before the folder's sync"
    wanted = rows(range(6)) if written else rows(range(3))
    assert len(unfinished(tmp_path)) == (0 if written else 1)
    reader = opened(tmp_path)
    assert_kept(reader, wanted)
    assert reader.append(rows(range(10, 12)))
    assert not unfinished(tmp_path)
    assert_kept(reader, wanted | rows(range(10, 12)))
    assert not caplog.records


WRITER = """
import sys
from pathlib import Path
import torch
from tests.features.keeping import key, opened
kept = opened(Path(sys.argv[1]))
for number in range(10**6):
    assert kept.append({key(number): (torch.full((1 << 20,), number),)})
"""


def test_folder_process_killed_at_any_moment_leaves_whole_rows(tmp_path: Path, caplog: Log) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        chances = random.Random(os.getpid())
        while len(shards(tmp_path)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(chances.random() / 20)
        process.kill()
    finally:
        process.kill()
        process.wait()
    kept = opened(tmp_path)
    numbers = sorted(int.from_bytes(each, "big") for each in kept.keys)
    assert numbers == list(range(len(numbers))) and len(numbers) >= 2
    for number, found in zip(numbers, kept.read([key(n) for n in numbers]), strict=True):
        assert_same(found, (torch.full((1 << 20,), number),))
    assert kept.append(rows(range(10**6, 10**6 + 2)))
    assert not unfinished(tmp_path) and not caplog.records


# ------------------------------------------------------------------------------------------ threads


def test_folder_threads_read_append_and_empty_at_once(tmp_path: Path, caplog: Log) -> None:
    kept = opened(tmp_path)
    stop, faults = threading.Event(), list[BaseException]()

    def repeat(work: Callable[[random.Random], object], seed: int) -> threading.Thread:
        def loop() -> None:
            chances = random.Random(seed)
            try:
                while not stop.is_set():
                    work(chances)
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def read(chances: random.Random) -> None:
        numbers = [chances.randrange(40) for _ in range(8)]
        for number, each in zip(numbers, kept.read([key(n) for n in numbers]), strict=True):
            assert each is None or assert_same(each, row(number)) is None

    def look(chances: random.Random) -> None:
        assert all(int.from_bytes(each, "big") < 40 for each in kept.keys)
        kept.refresh()

    threads = [repeat(read, 1), repeat(read, 2), repeat(look, 3)]
    for number in range(20):
        assert kept.append(rows(range(2 * number, 2 * number + 2)))
        if number % 7 == 6:
            kept.empty()
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    assert_kept(kept, rows(range(28, 40)))
    assert not caplog.records


def test_folder_notes_its_use_but_not_at_each_read(tmp_path: Path, monkeypatch: Patch) -> None:
    kept = opened(tmp_path)
    kept.append(rows(range(2)))
    path = kept.path / "stretch.json"
    passed = [0.0]
    monkeypatch.setattr(folder.time, "monotonic", lambda: 1000.0 + passed[0])
    kept._used_at_s = folder.time.monotonic()
    os.utime(path, (1000, 1000))
    kept.read([key(0)])
    assert path.stat().st_mtime == 1000
    passed[0] = folder.USED_EVERY_S
    kept.read([key(0)])
    assert abs(path.stat().st_mtime - time.time()) < 100


def test_folder_budget_smaller_than_a_row_keeps_nothing(tmp_path: Path, caplog: Log) -> None:
    for budget in (0, 1, 4096, 20_000):
        disk = DiskFeatures(tmp_path / str(budget), budget_bytes=budget)
        kept = disk.open(STRETCH, saved_s=1.0)
        assert not kept.append({key(0): row(0, 1 << 16)})
        assert disk.used_bytes == 0 and kept.keys == set()
    assert not caplog.records  # it is no fault, and said in the log at its own level
    caplog.set_level(logging.INFO)
    assert not opened(tmp_path / "a", budget=9000).append(rows(range(3)))
    assert "the budget has no room for more rows" in caplog.text


def test_folder_takes_as_many_rows_as_there_is_room_for(tmp_path: Path) -> None:
    disk = DiskFeatures(tmp_path, budget_bytes=100_000)
    kept = disk.open(STRETCH, saved_s=1.0)
    assert not kept.append(rows(range(100), 4096))
    assert 10 < len(kept.keys) < 25
    assert_kept(kept, rows(range(len(kept.keys)), 4096))
    assert disk.used_bytes <= 100_000
    assert not kept.append(rows(range(100), 4096))
    assert disk.used_bytes <= 100_000


def test_folder_unwanted_shards_give_way_to_new_rows_of_the_stretch(tmp_path: Path) -> None:
    kept = opened(tmp_path, budget=150_000)
    assert kept.append(rows(range(10), 4096)) and kept.append(rows(range(10, 20), 4096))
    assert not kept.append(rows(range(30, 50), 4096))
    partly = kept.keys - rows(range(20)).keys()
    kept.want(rows(range(10, 60)).keys())
    assert kept.append(rows(range(50, 58), 4096))
    assert kept.keys == {*rows(range(10, 20)), *partly, *rows(range(50, 58))}
    kept.want(None)
    assert not kept.append(rows(range(60, 90), 4096))
    assert PLENTY > 150_000
