"""Make the stored photographs of benchmarks: soft patches and grain, at the mean size of a published set."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

JPEG_BYTES = 110_000
"""Mean size of an image in HAPI (2022)."""

PIXELS = (500, 375)
"""Width and height of a stored image: the mean of ImageNet's."""

CLASSES = 10


def jpeg(rng: np.random.Generator, *, scale: int = 1) -> bytes:
    """Return a picture of soft patches and grain, at the quality that brings it nearest to its size."""
    width, height = (round(side * math.sqrt(scale)) for side in PIXELS)
    patches = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
    grain = rng.normal(0, 12, (height, width, 1)) + rng.normal(0, 4, (height, width, 3))
    picture = Image.fromarray(np.clip(np.asarray(patches) + grain, 0, 255).astype(np.uint8))
    wanted, low, high = JPEG_BYTES * scale, 30, 98
    while low < high:  # finds the first quality that reaches the size
        middle = (low + high) // 2
        low, high = (low, middle) if len(_encoded(picture, middle)) >= wanted else (middle + 1, high)
    tried = [_encoded(picture, quality) for quality in (low - 1, low)]
    return min(tried, key=lambda data: abs(len(data) - wanted))


def write_photographs(folder: Path, samples: int, *, scale: int = 1) -> None:
    """Write stored photographs in class folders. They are always the same."""
    for number in range(samples):
        place = folder / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        image = jpeg(np.random.default_rng([number, scale]), scale=scale)
        (place / f"{number:05}.jpg").write_bytes(image)


def _encoded(picture: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()
