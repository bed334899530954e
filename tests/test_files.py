"""Test files that outlast a process: their place, their replacement, and their owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import fill
from upriver import files
from upriver.cli import output
from upriver.cli.train.checkpoint import save_tensors
from upriver.errors import ConfigError, StoreError
from upriver.store import Store

# ----------------------------------------------------------------------------------------- replacing


Write = Callable[[Path, bytes], None]


def put(path: Path, data: bytes) -> None:
    Store.open(path.parent.as_uri()).put(path.name, data)


def stream(path: Path, data: bytes) -> None:
    Store.open(path.parent.as_uri()).put_stream(path.name, [data[:1], data[1:]])


def put_from_loop(path: Path, data: bytes) -> None:
    asyncio.run(Store.open(path.parent.as_uri()).put_async(path.name, data))


def private(path: Path, data: bytes) -> None:
    with files.replacing(path, private=True) as new:
        new.write_bytes(data)


def tensors(path: Path, data: bytes) -> None:
    save_tensors(path, {"a": torch.frombuffer(bytearray(data), dtype=torch.uint8)})


WRITES: list[Write] = [put, stream, put_from_loop, private, output.write_whole, tensors]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_file_and_its_folder_are_synced_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    done: list[tuple[str, bool]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(("folder" if place.is_dir() else "file", (tmp_path / "a").exists()))
        fsync(handle)

    def replaced(source: Path, target: Path) -> None:
        done.append(("rename", (tmp_path / "a").exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write(tmp_path / "a", b"content")
    assert done == [("file", False), ("rename", False), ("folder", True)]
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("there", [True, False], ids=["old", "new"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    small_disk: Path, write: Write, there: bool
) -> None:
    path = small_disk / "a"
    if there:
        write(path, b"content")
    before = {left.name: left.read_bytes() for left in small_disk.iterdir()}
    filler = fill(small_disk, leave=64 * 1024)
    with pytest.raises((OSError, StoreError), match="No space left on device"):
        write(path, bytes(128 * 1024))
    filler.unlink()
    assert {left.name: left.read_bytes() for left in small_disk.iterdir()} == before
    write(path, bytes(128 * 1024))


def test_a_folder_that_was_made_for_an_object_that_does_not_fit_is_removed(small_disk: Path) -> None:
    store = Store.open(small_disk.as_uri())
    store.put("kept/a", b"1")
    with pytest.raises(StoreError, match=r"cannot write 'kept/new/b' .*: No space left on device"):
        store.put("kept/new/b", bytes(2 << 20))
    assert [path.relative_to(small_disk).as_posix() for path in small_disk.rglob("*")] == ["kept", "kept/a"]


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    for name, mode in (("old", 0o640), ("new", None)):
        path = tmp_path / name
        if mode is not None:
            path.touch()
            path.chmod(mode)
        with files.replacing(path) as new:
            new.write_text("content")
        (tmp_path / "usual").touch()
        assert path.stat().st_mode == (0o100640 if mode else (tmp_path / "usual").stat().st_mode)


# --------------------------------------------------------------------------------------------- owners


OWNER = """
import sys, time
from pathlib import Path
from upriver.files import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


def owner_of(path: Path) -> subprocess.Popen[str]:
    """Start a process that owns an output."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "owned\n"
    return process


def test_an_output_has_one_owner_and_a_killed_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with owner_of(tmp_path / "out") as process:
        for name in ("out", "link"):
            with (
                pytest.raises(ConfigError, match=rf"^process {process.pid} on \S+ is writing to .*/out"),
                files.owned(tmp_path / name),
            ):
                pass
        with files.owned(tmp_path / "other"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / ".out.lock").exists()
    with files.owned(tmp_path / "link"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["link"]


def test_an_owner_on_a_full_disk_is_one_without_a_name(small_disk: Path) -> None:
    fill(small_disk)
    with (
        files.owned(small_disk / "out"),
        pytest.raises(ConfigError, match="another process is writing to"),
        files.owned(small_disk / "out"),
    ):
        pass


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out[1]"
    kept = ["out[1]", ".out[1].lock", "out1", ".out[1].more-12345678#1", ".out1-12345678#1"]
    for name in kept:
        (tmp_path / name).touch()
    with pytest.raises(RuntimeError, match="stop"), files.replacing(path) as new:
        os.link(new, tmp_path / f"{new.name}0")
        raise RuntimeError("stop")
    assert len(os.listdir(tmp_path)) == len(kept) + 1
    files.remove_unfinished(path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


@pytest.mark.parametrize("status", ["Name:\tpython\nUmask:\t0027\n", "Name:\tpython\n", None])
def test_permissions_are_less_the_mask_also_where_the_kernel_does_not_tell_it(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "status"
    if status is not None:
        told.write_text(status)
    monkeypatch.setattr(files, "STATUS", told)
    before = os.umask(0o027)
    try:
        with files.replacing(tmp_path / "made") as new:
            new.write_bytes(b"made")
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
