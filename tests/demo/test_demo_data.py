"""Test the demo's data set: sizes, balance, disjoint tiles, and the same bytes from the same seed."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from upriver.cache import cache_folder
from upriver.demo import data as demo
from upriver.errors import ConfigError, DatasetError, StoreError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo.DemoData, list[tuple[int, int]]]:
    calls: list[tuple[int, int]] = []
    found = demo.demo_data(
        num_train=21,
        num_heldout=10,
        cache=tmp_path_factory.mktemp("cache"),
        on_progress=lambda done, total: calls.append((done, total)),
    )
    return found, calls


def members(folder: Path) -> dict[str, bytes]:
    """Return every file in the shards of a folder, by name."""
    files: dict[str, bytes] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for info in tar:
                body = tar.extractfile(info)
                assert body is not None
                files[info.name] = body.read()
    return files


@pytest.mark.full
def test_images_are_what_a_camera_would_store(made: tuple[demo.DemoData, list[tuple[int, int]]]) -> None:
    data, calls = made
    assert calls == [(done, 31) for done in range(1, 32)]
    for part, number in (("train", 21), ("heldout", 10)):
        images = {name: body for name, body in members(data.root / part).items() if name.endswith(".jpg")}
        assert len(images) == number
        for body in images.values():
            assert len(body) in demo.STORED_BYTES
            with Image.open(io.BytesIO(body)) as image:
                assert (image.format, image.size) == ("JPEG", (demo.WIDTH, demo.HEIGHT))


def test_classes_are_balanced_and_named(made: tuple[demo.DemoData, list[tuple[int, int]]]) -> None:
    data, _ = made
    assert len(data.classes) >= 8
    for part in ("train", "heldout"):
        assert (data.root / part / "classes.txt").read_text().splitlines() == list(data.classes)
        files = members(data.root / part)
        counts = Counter(int(body) for name, body in files.items() if name.endswith(".cls"))
        assert set(counts) == set(range(len(data.classes)))
        assert max(counts.values()) - min(counts.values()) <= 1
    first = next(body for name, body in members(data.root / "train").items() if name == "000000.cls")
    assert data.classes[int(first)] == demo.SCENES[0][0]


def test_training_and_heldout_crops_share_no_pixel() -> None:
    def tiles(part: str) -> set[tuple[int, int]]:
        return {shot.tile for shot in demo._shots(part, 100, seed=0)}

    assert not tiles("train") & tiles("heldout")
    assert tiles("heldout") == demo.HELDOUT_TILES
    # Every pixel of the photograph holds its tile's number, so a tile must hold its own number only.
    numbered = Image.new("L", (640, 427))
    for row in range(demo.ROWS):
        for column in range(demo.COLUMNS):
            box = (
                round(column * 640 / demo.COLUMNS),
                round(row * 427 / demo.ROWS),
                round((column + 1) * 640 / demo.COLUMNS),
                round((row + 1) * 427 / demo.ROWS),
            )
            numbered.paste(10 * row + column, box)
    for row, column in tiles("train") | tiles("heldout"):
        assert demo._tile(numbered, (row, column)).getextrema() == (10 * row + column,) * 2


@pytest.mark.full
def test_same_seed_same_bytes_and_the_cache_is_used(
    made: tuple[demo.DemoData, list[tuple[int, int]]], tmp_path: Path
) -> None:
    data, _ = made
    again = demo.demo_data(num_train=21, num_heldout=10, cache=tmp_path)
    assert members(again.root / "train") == members(data.root / "train")
    other = demo.demo_data(num_train=21, num_heldout=10, seed=1, cache=tmp_path)
    assert members(other.root / "train").keys() == members(data.root / "train").keys()
    assert members(other.root / "train") != members(data.root / "train")

    marker = data.root / "marker"
    marker.touch()
    calls: list[int] = []
    demo.demo_data(
        num_train=21,
        num_heldout=10,
        cache=data.root.parent,
        on_progress=lambda done, total: calls.append(done),
    )
    assert marker.exists()
    assert not calls


def test_interrupted_generation_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.demo_data(num_train=10, num_heldout=10, cache=tmp_path, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="num_heldout must be at least 10"):
        demo.demo_data(num_train=21, num_heldout=3, cache=tmp_path)
    monkeypatch.setattr(demo, "SCENES", (*demo.SCENES, ("nothing", "skimage/data/nothing.png")))
    with pytest.raises(DatasetError, match=r"nothing\.png is missing"):
        demo.demo_data(num_train=21, num_heldout=21, cache=tmp_path)


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPRIVER_CACHE", "own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("UPRIVER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "upriver"


def test_a_folder_that_can_keep_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=f"cannot be kept in {cache} "):
            demo.demo_data(num_train=10, num_heldout=10, cache=cache)


def _cut_short(root: Path) -> None:
    os.truncate(root / "train" / "0000.tar", 1000)


def _flipped(root: Path) -> None:
    with (root / "heldout" / "0000.tar").open("r+b") as file:
        file.seek(600)
        byte = file.read(1)
        file.seek(600)
        file.write(bytes([byte[0] ^ 1]))


def _endless(root: Path) -> None:
    os.truncate(root / "train" / "0000.tar", 1 << 40)


def _instead(make: Callable[[Path], object], name: str = "") -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a shard cut short": _cut_short,
    "a bit of a shard": _flipped,
    "a shard of a terabyte": _endless,
    "a shard gone": lambda root: (root / "train" / "0000.tar").unlink(),
    "one shard more": lambda root: (root / "train" / "0001.tar").write_bytes(b"more"),
    "no classes": lambda root: (root / "train" / "classes.txt").unlink(),
    "no part": lambda root: shutil.rmtree(root / "heldout"),
    "no digest": lambda root: (root / "content.sha256").unlink(),
    "a pipe for the digest": _instead(os.mkfifo, "content.sha256"),
    "a pipe for a shard": _instead(os.mkfifo, "train/0000.tar"),
    "a pipe for a part": _instead(os.mkfifo, "train"),
    "a pipe": _instead(os.mkfifo),
    "a file": _instead(Path.touch),
    "an empty folder": _instead(Path.mkdir),
    "a dangling link": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _instead(lambda path: path.symlink_to(path.name)),
    "a link to an endless device": _instead(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.timeout(120)  # a read from a pipe would wait for ever
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_images_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(demo, "_take", lambda shot: str(shot).encode())
    first = demo.demo_data(num_train=10, num_heldout=10, cache=tmp_path)
    before = {part: members(first.root / part) for part in demo.PARTS}
    DAMAGE[damage](first.root)
    again = demo.demo_data(num_train=10, num_heldout=10, cache=tmp_path)
    assert again == first and list(tmp_path.iterdir()) == [first.root]
    assert {part: members(first.root / part) for part in demo.PARTS} == before


def test_images_that_do_not_fit_on_a_disk_leave_nothing_there(small_disk: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot be kept in {small_disk} .No space left on device"):
        demo.demo_data(num_train=10, num_heldout=10, cache=small_disk)
    assert not list(small_disk.iterdir())
