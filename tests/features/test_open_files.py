"""Check that files stay open within a limit, and never get another file's number while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upriver.features.open_files import Descriptor, OpenFiles


def number_of_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_open_files_the_last_used_ones_stay(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(4)]
    for path in paths:
        path.write_text(path.name)
    before, files = number_of_open_files(), OpenFiles(2)
    files.get(paths[0]), files.get(paths[1]), files.get(paths[0]), files.get(paths[2])
    assert [path in files for path in paths] == [True, False, True, False]
    assert number_of_open_files() == before + 2
    held = files.get(paths[3])
    files.close(paths[3])
    assert number_of_open_files() == before + 2  # the reader's own, and one more
    assert os.pread(held.number, 9, 0) == b"3"
    del held, files
    assert number_of_open_files() == before


def test_open_files_removed_file_stays_readable(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    files = OpenFiles()
    files.get(tmp_path / "a")
    (tmp_path / "a").unlink()
    assert os.pread(files.get(tmp_path / "a").number, 9, 0) == b"a"
    files.close(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        files.get(tmp_path / "a")


def test_open_files_a_link_is_not_followed_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    files = OpenFiles()
    with pytest.raises(OSError, match="symbolic links"):
        files.get(tmp_path / "link")
    assert isinstance(files.get(tmp_path / "pipe"), Descriptor)
