"""Make the demo's data: crops of real photographs, stored as a camera would store them.

The model answers: *which scene is this?* The class of a crop is its photograph. The photographs are part of
the scikit-image and scikit-learn packages. Nothing is downloaded.

A photograph is divided into six tiles. Training crops come from four of them and held-out crops from the
other two, with a gap between. So no pixel is in both sets, and the held-out accuracy is meaningful. Crops of
one tile overlap each other, as frames of one camera would. Each crop is enlarged to about one megapixel,
slightly varied as by another exposure, and given sensor noise. It is stored as JPEG of 200 to 400 KB: about
0.1 s of a 20 Mbit/s link.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, islice, product
from pathlib import Path

import numpy as np
from PIL import Image

from upriver.cache import cache_folder
from upriver.errors import ConfigError, DatasetError, StoreError
from upriver.files import place_folder

VERSION = 1
"""Version in the cache's name. Increase it with any change that changes the files."""

SCENES = (
    ("astronaut", "skimage/data/astronaut.png"),
    ("bricks", "skimage/data/brick.png"),
    ("cat", "skimage/data/chelsea.png"),
    ("coffee", "skimage/data/coffee.png"),
    ("flower", "sklearn/datasets/images/flower.jpg"),
    ("galaxies", "skimage/data/hubble_deep_field.jpg"),
    ("grass", "skimage/data/grass.png"),
    ("retina", "skimage/data/retina.jpg"),
    ("rocket", "skimage/data/rocket.jpg"),
    ("tissue", "skimage/data/ihc.png"),
)
"""Class name and photograph, inside the installed packages."""

WIDTH, HEIGHT = 1152, 864
"""One megapixel at 4:3, a camera's smallest usual setting."""

STORED_BYTES = range(200_000, 400_001)
"""Sizes of a stored image: those of a camera for a megapixel."""

WANTED_BYTES = range(320_000, 390_001)
"""Preferred sizes: a camera's "fine" setting. Steps of the JPEG quality are smaller than this range."""

MEAN_PIXEL = 140.0
"""Target of a camera's automatic exposure in a bright view, of 255."""

NOISE = (3.0, 6.0)
"""Standard deviation of the sensor noise, of 255: a small camera indoors."""

COLUMNS, ROWS = 3, 2
"""Tiles of a photograph: small enough that both sets see each kind of content, large enough to show it."""

HELDOUT_TILES = frozenset({(0, 2), (1, 0)})
"""(row, column) of the held-out tiles, two opposite corners."""

FIRST_QUALITY = 95
"""First JPEG quality to try. With it most crops are within ``WANTED_BYTES``."""

GAP_PIXELS = 4
"""Margin of a tile, so that no resampling filter mixes pixels of one set into the other."""

SHARD_IMAGES = 48
"""Images in a tar shard, about 14 MB."""

PARTS = ("train", "heldout")

DIGEST = "content.sha256"
"""File with the digest of all content, which reveals damage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoData:
    """Location of the demo's images.

    Attributes:
        root: Folder with the subfolders ``train`` and ``heldout``, each with tar shards and ``classes.txt``.
    """

    root: Path
    num_train: int
    num_heldout: int
    classes: tuple[str, ...]


def demo_data(
    *,
    num_train: int = 256,
    num_heldout: int = 60,
    seed: int = 0,
    cache: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DemoData:
    """Make the data set, or find an existing undamaged one.

    Args:
        num_train: Number of training images. Classes take turns, so their counts differ by at most one.
        num_heldout: Number of held-out images, likewise.
        seed: Seed of every crop, exposure and noise.
        cache: Folder of the data set; the user's cache by default.
        on_progress: Function of the number of finished images and of all images.

    Raises:
        ConfigError: If a number is below one image for each class.
        DatasetError: If a photograph is missing from the installed packages.
        StoreError: If the folder cannot be written.
    """
    for name, number in (("num_train", num_train), ("num_heldout", num_heldout)):
        if number < len(SCENES):
            raise ConfigError(f"{name} must be at least {len(SCENES)}, one for each scene, got {number}")
    data = DemoData(
        root=(cache or cache_folder()).absolute() / f"demo-v{VERSION}-{num_train}-{num_heldout}-{seed}",
        num_train=num_train,
        num_heldout=num_heldout,
        classes=tuple(sorted(name for name, _ in SCENES)),
    )
    try:
        if not _is_whole(data.root):
            _make(data, seed=seed, on_progress=on_progress or (lambda done, total: None))
    except OSError as error:
        raise StoreError(
            f"images cannot be kept in {data.root.parent} ({error.strerror or error})"
        ) from error
    return data


# ------------------------------------------------------------------------------------------- one image


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shot:
    """Image to make: its photograph, its tile, and its random seed."""

    number: int
    scene: str
    path: str
    tile: tuple[int, int]
    seed: tuple[int, ...]


@lru_cache(maxsize=len(SCENES))
def _photograph(path: str) -> Image.Image:
    """Read a photograph from an installed package, without importing the package."""
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package)
    file = Path((spec and spec.origin) or "").parent / inside
    if not file.is_file():
        raise DatasetError(f"the demo's photograph {path} is missing: pip install 'upriver[demo]'")
    with Image.open(file) as image:
        return image.convert("RGB")


def _tile(image: Image.Image, tile: tuple[int, int]) -> Image.Image:
    """Return one tile of a photograph. Tiles share no pixel."""
    row, column = tile
    width, height = image.width / COLUMNS, image.height / ROWS
    left, top = round(column * width) + GAP_PIXELS, round(row * height) + GAP_PIXELS
    right, bottom = round((column + 1) * width) - GAP_PIXELS, round((row + 1) * height) - GAP_PIXELS
    return image.crop((left, top, right, bottom))


def _crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return a 4:3 crop of random size and position, enlarged to the camera's size."""
    largest = min(image.width / 4, image.height / 3)
    unit = largest * rng.uniform(0.7, 1.0)
    width, height = 4 * unit, 3 * unit
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    return image.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=box)


def _expose(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Vary the exposure: brightness, contrast, colour balance, sensor noise."""
    pixels = np.asarray(image, dtype=np.float32)
    mean = pixels.mean(dtype=np.float32)
    # Automatic exposure keeps a bright sky from saturating; dark areas stay dark.
    gain = np.clip(MEAN_PIXEL / mean, 0.5, 1.0) * rng.uniform(0.85, 1.15) * rng.uniform(0.95, 1.05, size=3)
    contrast = rng.uniform(0.85, 1.15)
    varied = ((pixels - mean) * np.float32(contrast) + mean) * gain.astype(np.float32)
    varied += rng.standard_normal(varied.shape, dtype=np.float32) * np.float32(rng.uniform(*NOISE))
    return Image.fromarray(np.clip(varied, 0, 255).astype(np.uint8))


def _encode(image: Image.Image) -> bytes:
    """Return a JPEG with a size in ``WANTED_BYTES``, by binary search over the quality."""
    low, high, quality = 1, 100, FIRST_QUALITY
    found = b""
    while low <= high:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        size = buffer.tell()
        if size in STORED_BYTES:
            found = buffer.getvalue()
        if size in WANTED_BYTES:
            break
        low, high = (quality + 1, high) if size < WANTED_BYTES.start else (low, quality - 1)
        quality = (low + high) // 2
    if not found:
        raise DatasetError(f"no JPEG quality gives {STORED_BYTES.start} to {STORED_BYTES.stop - 1} bytes")
    return found


def _take(shot: _Shot) -> bytes:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(shot.seed)))
    return _encode(_expose(_crop(_tile(_photograph(shot.path), shot.tile), rng), rng))


# --------------------------------------------------------------------------------------------- shards


def _shots(part: str, number: int, *, seed: int) -> Iterator[_Shot]:
    """Yield the images to make, in stored order: classes take turns, and so do the tiles of each."""
    grid = product(range(ROWS), range(COLUMNS))
    tiles = [tile for tile in grid if (tile in HELDOUT_TILES) == (part == "heldout")]
    for index in range(number):
        scene, path = SCENES[index % len(SCENES)]
        yield _Shot(
            number=index,
            scene=scene,
            path=path,
            tile=tiles[index // len(SCENES) % len(tiles)],
            seed=(VERSION, seed, int(part == "train"), index),
        )


def _make(data: DemoData, *, seed: int, on_progress: Callable[[int, int], None]) -> None:
    """Write all shards to a temporary folder, and rename it to its final name in one step."""
    data.root.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=data.root.parent, prefix=f".{data.root.name}-"))
    parts = dict(zip(PARTS, (data.num_train, data.num_heldout), strict=True))
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        before = 0
        for part, number in parts.items():
            shots = list(_shots(part, number, seed=seed))
            made = zip(shots, pool.map(_take, shots), strict=True)
            for done in _write_shards(unfinished / part, made, classes=data.classes):
                on_progress(before + done, sum(parts.values()))
            before += number
        (unfinished / DIGEST).write_text(_content_digest(unfinished), encoding="ascii")
        try:
            _remove_damaged(data.root)
            place_folder(unfinished, data.root)
        except OSError:
            if not _is_whole(data.root):  # else another process was faster, with the same content
                raise
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(root: Path) -> bool:
    """Return True if a folder holds a complete data set."""
    try:
        # A foreign link or pipe is not followed or awaited.
        kept = (root / DIGEST).read_text(encoding="ascii") if _is_plain(root / DIGEST, 64) else ""
        return kept == _content_digest(root)
    except (OSError, ValueError):
        return False


def _content_digest(root: Path) -> str:
    """Return the digest of names and bytes of all files in the two parts.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file does not belong to the demo.
    """
    folded = hashlib.sha256()
    for path in sorted(path for part in PARTS for path in (root / part).iterdir()):
        if not _is_plain(path, SHARD_IMAGES * 2 * STORED_BYTES.stop):
            raise ValueError(f"{path} is no file of the demo")
        folded.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\0".encode())
        folded.update(path.read_bytes())
    return folded.hexdigest()


def _is_plain(path: Path, most_bytes: int) -> bool:
    """Return True if a path is a regular file of at most `most_bytes`."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size <= most_bytes


def _remove_damaged(root: Path) -> None:
    """Remove a damaged data set, unless another process has replaced it.

    Raises:
        OSError: If it cannot be removed.
    """
    if _is_whole(root):
        return
    if root.is_dir() and not root.is_symlink():
        shutil.rmtree(root)
    else:
        root.unlink(missing_ok=True)


def _write_shards(
    folder: Path, made: Iterable[tuple[_Shot, bytes]], *, classes: tuple[str, ...]
) -> Iterator[int]:
    """Write WebDataset shards (``key.jpg`` and ``key.cls``), and yield the number of images so far."""
    folder.mkdir()
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    images = enumerate(made, start=1)
    for shard in count():
        first = next(images, None)
        if first is None:
            return
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for done, (shot, data) in chain([first], islice(images, SHARD_IMAGES - 1)):
                _add(tar, f"{shot.number:06d}.jpg", data)
                _add(tar, f"{shot.number:06d}.cls", str(classes.index(shot.scene)).encode())
                yield done


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with fixed times and owners, so that the same seed gives the same shard."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
