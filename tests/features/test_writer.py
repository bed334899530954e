"""Check that rows reach the disk in the background, whatever shares a buffer with them."""

from __future__ import annotations

from pathlib import Path

from tests.features.keeping import assert_kept, key, opened, row, rows
from upriver.features.writer import FeatureWriter


def test_writer_same_key_in_two_stretches_reaches_both(tmp_path: Path) -> None:
    folders = [opened(tmp_path, number) for number in (1, 2)]
    wanted = [rows(range(5)), {key(number): row(number + 100) for number in range(5)}]
    writer = FeatureWriter(1 << 20)
    for folder, given in zip(folders, wanted, strict=True):
        for name, each in given.items():
            assert writer.put(folder, name, each)
        assert writer.waiting(folder) == given.keys()
    writer.flush(wait=True)
    for folder, given in zip(folders, wanted, strict=True):
        assert_kept(folder, given)
        assert writer.waiting(folder) == set()
    writer.close()


def test_writer_that_is_closed_writes_what_it_took_and_takes_no_more(tmp_path: Path) -> None:
    folder, writer = opened(tmp_path), FeatureWriter(1 << 20)
    assert writer.put(folder, key(1), row(1))
    writer.close()
    assert_kept(folder, {key(1): row(1)})
    assert not writer.put(folder, key(2), row(2))


def test_writer_rows_larger_than_a_shard_are_written_one_by_one(tmp_path: Path) -> None:
    folder, writer = opened(tmp_path), FeatureWriter(100)
    wanted = rows(range(4), 4096)
    for name, each in wanted.items():
        assert writer.put(folder, name, each, wait=True)
    writer.close()
    assert_kept(folder, wanted)
