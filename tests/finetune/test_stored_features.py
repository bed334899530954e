"""Check features that servers keep in the store: the same losses to the bit, and nothing computed twice."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upriver
from tests.finetune.test_kept_features import COUNT, STILL, proofs, reference, shards, still_photos
from tests.finetune.training import photos, png, run, same
from tests.server.running import Running, running, wait_for
from upriver.errors import ConfigError, ObjectChanged
from upriver.features.row_form import RowBuffer
from upriver.features.shard import Shard, pack
from upriver.pipeline import Dataset

__all__ = ["proofs"]  # a fixture of this module, too

STORE = upriver.Keep(memory=0, disk=0, store=True)
CHECKED = 16
"""Rows that a job compares before it uses any."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "store").mkdir()
    with running((tmp_path / "store").as_uri()) as found:
        yield found.wait_ready()


def job_of(server: Running, data: Dataset, *, epochs: int = 1, **options: Any) -> Any:
    options = {"policy": "freeze", "keep": STORE, **options}
    with upriver.connect([server.url]) as near:
        losses, model, job = run(near, data, epochs=epochs, **options)
    return (losses, model), job


def rows(server: Running, what: str) -> float:
    return server.metric("upriver_feature_rows_total", f'what="{what}"')


def stored(server: Running, data: Dataset, **options: Any) -> None:
    """Run one epoch, and wait until its rows are written."""
    before = rows(server, "written")
    _, job = job_of(server, data, **options)
    assert job.report.samples == {server.url: len(data)}
    wait_for(lambda: rows(server, "written") == before + len(data))


def test_second_job_is_answered_from_the_store(tmp_path: Path, server: Running) -> None:
    data = still_photos(tmp_path / "store")
    stored(server, data)
    forward = server.metric("upriver_forward_rows_sum")
    got, job = job_of(server, data, epochs=2, seed=8)
    assert same(got, reference(data, epochs=2, seed=8))
    assert rows(server, "found") == 2 * COUNT + CHECKED
    assert rows(server, "written") == COUNT
    assert server.metric("upriver_forward_rows_sum") - forward <= CHECKED  # the canary
    assert job.report.samples == {server.url: 2 * COUNT}
    assert f"features kept near the data: of {COUNT} samples" in job.plan.why


def test_rows_of_the_store_are_kept_here_too(tmp_path: Path, server: Running) -> None:
    data = still_photos(tmp_path / "store")
    stored(server, data)
    room = upriver.Keep(memory="64 MB", disk=0, store=True)
    got, job = job_of(server, data, epochs=3, keep=room)
    assert same(got, reference(data))
    assert job.report.samples == {server.url: COUNT, "kept": 2 * COUNT}
    assert rows(server, "found") == COUNT + CHECKED


def test_grown_dataset_computes_only_what_was_added(tmp_path: Path, server: Running) -> None:
    stored(server, still_photos(tmp_path / "store"))
    grown = still_photos(tmp_path / "store", COUNT + 5)
    got, _ = job_of(server, grown)
    assert same(got, reference(grown, epochs=1))
    assert rows(server, "found") == COUNT + CHECKED
    wait_for(lambda: rows(server, "written") == COUNT + 5)


def test_replaced_object_is_an_error_as_in_the_plain_job(tmp_path: Path, server: Running) -> None:
    data = still_photos(tmp_path / "store")
    stored(server, data)
    (tmp_path / "store" / "photos" / "class0" / "000.png").write_bytes(png(77))
    with pytest.raises(ObjectChanged, match=r"000\.png"):
        job_of(server, data)
    fresh = upriver.index(upriver.Store.open((tmp_path / "store").as_uri()), "photos", stages=STILL)
    got, _ = job_of(server, fresh)
    assert same(got, reference(fresh, epochs=1))
    wait_for(lambda: rows(server, "written") == COUNT + 1)


def test_views_are_stored_apart(tmp_path: Path, server: Running) -> None:
    data, sampling = photos(tmp_path / "store", COUNT), upriver.Sampling(views=2)
    first, _ = job_of(server, data, epochs=2, sampling=sampling)
    assert same(first, reference(data, epochs=2, sampling=sampling))
    wait_for(lambda: rows(server, "written") == 2 * COUNT)
    got, _ = job_of(server, data, epochs=4, sampling=sampling)
    assert same(got, reference(data, epochs=4, sampling=sampling))
    assert rows(server, "found") == 4 * COUNT + 2 * CHECKED


def test_random_stages_without_views_are_not_stored(tmp_path: Path, server: Running) -> None:
    data = photos(tmp_path / "store", COUNT)
    got, _ = job_of(server, data, epochs=2)
    assert same(got, reference(data, epochs=2))
    assert rows(server, "written") == 0


def test_wrong_rows_are_found_and_removed(
    tmp_path: Path, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    data = still_photos(tmp_path / "store")
    stored(server, data)
    for path in shards(tmp_path / "store" / ".upriver" / "features"):
        forge(path)
    with running((tmp_path / "store").as_uri()) as other:
        with caplog.at_level(logging.WARNING, logger="upriver"):
            got, _ = job_of(other, data)
        assert same(got, reference(data, epochs=1))
        assert "features near the data differ" in caplog.text
        wait_for(lambda: rows(other, "written") == COUNT)
        again, _ = job_of(other, data)
        assert same(again, got)
        assert rows(other, "found") >= COUNT + CHECKED


def forge(path: Path) -> None:
    """Add one to every value of a shard, with checksums that are right."""
    stretch = path.parent.name
    file = os.open(path, os.O_RDONLY)
    try:
        shard, made = Shard(path, file, stretch), {}
        for number, key in enumerate(shard.keys):
            buffer = RowBuffer(shard.nbytes_of(number))
            made[key] = tuple(value + 1 for value in shard.read(file, number, buffer, 0))
    finally:
        os.close(file)
    path.write_bytes(b"".join(pack(stretch, made).pieces()))


@pytest.mark.parametrize("how", ["flipped", pytest.param("truncated", marks=pytest.mark.full)])
def test_damaged_rows_change_no_bit(tmp_path: Path, server: Running, how: str) -> None:
    data = still_photos(tmp_path / "store")
    stored(server, data)
    for path in shards(tmp_path / "store" / ".upriver" / "features"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 0xFF
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    got, _ = job_of(server, data, epochs=2)
    assert same(got, reference(data, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2, 3))])
def test_server_that_is_killed_while_it_writes_leaves_only_right_rows(
    tmp_path: Path, server: Running, moment: int
) -> None:
    data, root = still_photos(tmp_path / "store"), tmp_path / "store"
    job_of(server, data)
    seen = (  # the note of the upload, the folder, the unfinished file, the shard
        lambda: list((root / ".upriver" / "uploads").glob("*")),
        lambda: (root / ".upriver" / "features").exists(),
        lambda: list((root / ".upriver" / "features").rglob("*rows*")),
        lambda: shards(root / ".upriver" / "features"),
    )[moment]
    wait_for(seen)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    with running(root.as_uri()) as other:
        got, _ = job_of(other, data, epochs=2)
        assert same(got, reference(data, epochs=2))


def test_evaluation_is_answered_from_the_store(tmp_path: Path, server: Running) -> None:
    data, held = still_photos(tmp_path / "store"), still_photos(tmp_path / "store", 20, folder="held")

    def mean(outputs: Any, targets: Any) -> Any:
        return outputs.mean()

    stored(server, held)
    with upriver.connect([server.url]) as near:
        from tests.program.nets import frozen_small

        options: dict[str, Any] = {"batch_size": 12, "micro_batch": 8, "policy": "freeze", "seed": 7}
        with near.finetune(frozen_small(), data, **options) as plain:
            wanted = plain.evaluate(held, mean)
        with near.finetune(frozen_small(), data, **options, keep=STORE) as job:
            assert [job.evaluate(held, mean) for _ in range(2)] == [wanted] * 2
    assert rows(server, "found") == 40 + CHECKED


def test_full_storage_changes_no_bit(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    with running((tmp_path / "store").as_uri(), stored_bytes=200_000) as server:
        got, _ = job_of(server, data, epochs=2)
        assert same(got, reference(data, epochs=2))


def test_store_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="store must be True or False, got 'yes'"):
        upriver.Keep(store="yes")  # type: ignore[arg-type]
