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
from tests.finetune.training import BATCH, MICRO, photos, png, run, same
from tests.program.nets import frozen_small
from tests.server.running import Running, running, wait_for
from upriver.errors import ConfigError, ObjectChanged
from upriver.features.row_form import RowBuffer
from upriver.features.shard import Shard, pack
from upriver.pipeline import Dataset

__all__ = ["proofs"]  # a fixture of this module, too

STORE = upriver.Keep(memory=0, disk=0, store=True)
CHECKED = 14
"""Rows that a job compares before it uses any."""


class Served:
    """A server, its store, and a folder of photos of one test in it."""

    def __init__(self, root: Path, server: Running, folder: str) -> None:
        self.root, self.server, self.folder = root, server, folder
        self._before = {what: self._rows(what) for what in ("found", "written")}

    def photos(self, count: int = COUNT) -> Dataset:
        return still_photos(self.root, count, folder=self.folder)

    def rows(self, what: str) -> float:
        """Return the rows found or written since the test began."""
        return self._rows(what) - self._before[what]

    def _rows(self, what: str) -> float:
        return self.server.metric("upriver_feature_rows_total", f'what="{what}"')

    def run(self, data: Dataset, *, epochs: int = 1, **options: Any) -> Any:
        with upriver.connect(self.server.url) as near:
            options = {"policy": "freeze", "keep": STORE, **options}
            losses, model, job = run(near, data, epochs=epochs, **options)
        return (losses, model), job

    def store(self, data: Dataset) -> None:
        """Run one epoch, and wait until its rows are written."""
        _, job = self.run(data)
        assert job.report.samples == {self.server.url: len(data)}
        wait_for(lambda: self.rows("written") == len(data))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Running]]:
    root = tmp_path_factory.mktemp("store")
    with running(root.as_uri()) as server:
        yield root, server.wait_ready()


@pytest.fixture
def served(shared: tuple[Path, Running], tmp_path: Path) -> Served:
    return Served(*shared, tmp_path.name)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Served]:
    """Provide a store of its own, for tests that damage it."""
    with running(tmp_path.as_uri()) as server:
        yield Served(tmp_path, server.wait_ready(), "photos")


def test_second_job_is_answered_from_the_store(served: Served) -> None:
    data = served.photos()
    served.store(data)
    forward = served.server.metric("upriver_forward_rows_sum")
    got, job = served.run(data, epochs=2, seed=8)
    assert same(got, reference(data, epochs=2, seed=8))
    assert served.rows("found") == 2 * COUNT + CHECKED
    assert served.rows("written") == COUNT
    canary = 2 * MICRO  # computed twice by a server that seems slower than the first job measured
    assert served.server.metric("upriver_forward_rows_sum") - forward <= canary
    assert job.report.samples == {served.server.url: 2 * COUNT}
    assert f"features kept near the data when this pass began: of {COUNT} samples" in job.plan.why


@pytest.mark.full
def test_rows_of_the_store_are_kept_here_too(served: Served) -> None:
    data = served.photos()
    served.store(data)
    got, job = served.run(data, epochs=3, keep=upriver.Keep(memory="64 MB", disk=0, store=True))
    assert same(got, reference(data))
    assert job.report.samples == {served.server.url: COUNT, "kept": 2 * COUNT}
    assert served.rows("found") == COUNT + CHECKED


@pytest.mark.full
def test_grown_dataset_computes_only_what_was_added(served: Served) -> None:
    served.store(served.photos())
    grown = served.photos(COUNT + 5)
    got, _ = served.run(grown)
    assert same(got, reference(grown, epochs=1))
    assert served.rows("found") == COUNT + CHECKED
    wait_for(lambda: served.rows("written") == COUNT + 5)


@pytest.mark.full
def test_replaced_object_is_an_error_as_in_the_plain_job(served: Served) -> None:
    data = served.photos()
    served.store(data)
    (served.root / served.folder / "class0" / "000.png").write_bytes(png(77))
    with pytest.raises(ObjectChanged, match=r"000\.png"):
        served.run(data)
    fresh = upriver.index(upriver.Store.open(served.root.as_uri()), served.folder, stages=STILL)
    got, _ = served.run(fresh)
    assert same(got, reference(fresh, epochs=1))
    wait_for(lambda: served.rows("written") == COUNT + 1)


@pytest.mark.full
def test_views_are_stored_apart(served: Served) -> None:
    data, sampling = photos(served.root, folder=served.folder), upriver.Sampling(views=2)
    first, _ = served.run(data, epochs=2, sampling=sampling)
    assert same(first, reference(data, epochs=2, sampling=sampling))
    wait_for(lambda: served.rows("written") == 2 * COUNT)
    got, _ = served.run(data, epochs=4, sampling=sampling)
    assert same(got, reference(data, epochs=4, sampling=sampling))
    assert served.rows("found") == 4 * COUNT + 2 * CHECKED


@pytest.mark.full
def test_random_stages_without_views_are_not_stored(served: Served) -> None:
    data = photos(served.root, folder=served.folder)
    got, _ = served.run(data, epochs=2)
    assert same(got, reference(data, epochs=2))
    assert served.rows("written") == 0


@pytest.mark.full
def test_evaluation_is_answered_from_the_store(served: Served) -> None:
    data, held = served.photos(), still_photos(served.root, 20, folder=f"{served.folder}-held")

    def mean(outputs: Any, targets: Any) -> Any:
        return outputs.mean()

    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "freeze", "seed": 7}
    with upriver.connect(served.server.url) as near:
        with near.finetune(frozen_small(), data, **options) as plain:
            wanted = plain.evaluate(held, mean)
        with near.finetune(frozen_small(), data, **options, keep=STORE) as job:
            assert job.evaluate(held, mean) == wanted
            wait_for(lambda: served.rows("written") == 20)
            assert job.evaluate(held, mean) == wanted
    assert served.rows("found") == 20 + CHECKED


@pytest.mark.full
def test_wrong_rows_are_found_and_removed(alone: Served, caplog: pytest.LogCaptureFixture) -> None:
    data = alone.photos()
    alone.store(data)
    for path in shards(alone.root / ".upriver" / "features"):
        forge(path)
    with running(alone.root.as_uri()) as server:
        other = Served(alone.root, server.wait_ready(), "photos")
        with caplog.at_level(logging.WARNING, logger="upriver"):
            got, _ = other.run(data)
        assert same(got, reference(data, epochs=1))
        assert "features near the data differ" in caplog.text
        wait_for(lambda: other.rows("written") == COUNT)
        again, _ = other.run(data)
        assert same(again, got)
        assert other.rows("found") == COUNT + 2 * CHECKED


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
@pytest.mark.full
def test_damaged_rows_change_no_bit(alone: Served, how: str) -> None:
    data = alone.photos()
    alone.store(data)
    for path in shards(alone.root / ".upriver" / "features"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 0xFF
        path.write_bytes(content if how == "flipped" else content[: len(content) // 2])
    got, _ = alone.run(data, epochs=2)
    assert same(got, reference(data, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (1, 2, 3))])
@pytest.mark.full
def test_server_that_is_killed_while_it_writes_leaves_only_right_rows(alone: Served, moment: int) -> None:
    data, kept = alone.photos(), alone.root / ".upriver"
    alone.run(data)
    looks = (  # the note of the upload, the folder, the unfinished file, the shard
        lambda: list((kept / "uploads").glob("*")),
        lambda: (kept / "features").exists(),
        lambda: list((kept / "features").rglob("*rows*")),
        lambda: shards(kept / "features"),
    )
    wait_for(lambda: looks[moment]() or shards(kept / "features"))  # all may be written already
    alone.server.process.send_signal(signal.SIGKILL)
    alone.server.process.wait()
    with running(alone.root.as_uri()) as server:
        got, _ = Served(alone.root, server.wait_ready(), "photos").run(data, epochs=2)
        assert same(got, reference(data, epochs=2))


@pytest.mark.full
def test_full_storage_changes_no_bit(tmp_path: Path) -> None:
    with running(tmp_path.as_uri(), stored_bytes=200_000) as server:
        served = Served(tmp_path, server.wait_ready(), "photos")
        data = served.photos()
        got, _ = served.run(data, epochs=2)
        assert same(got, reference(data, epochs=2))
        assert served.rows("written") == 0


def test_store_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="store must be True or False, got 'yes'"):
        upriver.Keep(store="yes")  # type: ignore[arg-type]
