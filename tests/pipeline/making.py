"""Images, shards and folders to test with."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A smooth picture with some noise: neither flat nor incompressible."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)


def encoded(array: np.ndarray[Any, Any] | Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    """An image file; Pillow's options pass through."""
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    """A ``.npy`` file."""
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def shard(members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar file with these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def samples(count: int, *, first: int = 0, classes: int = 3, side: int = 24) -> list[tuple[str, bytes]]:
    """Members of a shard: a JPEG and its class for each sample."""
    members = []
    for number in range(first, first + count):
        members.append((f"{number:06d}.cls", str(number % classes).encode()))
        members.append((f"{number:06d}.jpg", encoded(pixels(side, side + number % 5, seed=number))))
    return members


def write(root: Path, files: dict[str, bytes]) -> str:
    """Write files under a directory; gives its URI."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root.as_uri()
