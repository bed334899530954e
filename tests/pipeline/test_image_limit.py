"""A process may take smaller images than a dataset's stages allow, and then says so before it decodes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import pytest
import torch

from upriver.errors import ConfigError, TooLarge
from upriver.pipeline import Decode, Draw, RandomResizedCrop, SampleError, image, stored_tensor
from upriver.protocol import DEFAULT_CAPS

from .making import encoded, pixels

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)


@pytest.fixture(autouse=True)
def no_limit_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(image, "_limit", image._limit)
    yield


def decode(data: bytes) -> torch.Tensor:
    return Decode().apply(stored_tensor(data), DRAW)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A PNG of grey pixels that says it has this size, and little besides."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + end


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_beyond_the_limit_is_refused_and_is_no_bad_sample(form: str) -> None:
    data = encoded(pixels(40, 50), form)
    image.limit_pixels(40 * 50)
    assert decode(data).shape == (40, 50, 3)
    image.limit_pixels(40 * 50 - 1)
    with pytest.raises(TooLarge, match="50 x 40 = 2000 pixels; this server takes at most 1999"):
        decode(data)


def test_a_stages_own_cap_still_makes_a_bad_sample() -> None:
    image.limit_pixels(1_000)
    with pytest.raises(SampleError, match="at most 67108864 are allowed"):
        decode(png(50_000, 50_000))


def test_nothing_is_resized_to_more_than_the_limit() -> None:
    image.limit_pixels(100 * 100)
    value = torch.zeros(20, 20, 3, dtype=torch.uint8)
    assert RandomResizedCrop(100).apply(value, DRAW).shape == (100, 100, 3)
    with pytest.raises(TooLarge, match="101 x 101"):
        RandomResizedCrop(101).apply(value, DRAW)


def test_a_png_is_refused_by_its_first_chunk_alone() -> None:
    """What lies between that and the pixels is unpacked when the file is opened."""
    text = chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(900_000)))
    data = png(50_000, 50_000, *[text] * 8)
    for length in (24, 100, len(data)):
        with pytest.raises(SampleError, match="50000 x 50000 = 2500000000 pixels; at most 67108864"):
            decode(data[:length])


def test_a_second_header_does_not_hide_the_size() -> None:
    again = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0))
    with pytest.raises(SampleError, match="at most 67108864 are allowed"):
        decode(png(4, 4, again))


def test_a_file_whose_first_chunk_is_another_is_refused() -> None:
    data = png(4, 4)
    with pytest.raises(SampleError, match="not the first chunk"):
        decode(data[:8] + chunk(b"tEXt", b"a\0b") + data[8:])


@pytest.mark.parametrize(("width", "height"), [(1, 1 << 20), (1 << 20, 1)])
def test_a_side_is_bounded_whatever_the_other_is(width: int, height: int) -> None:
    with pytest.raises(SampleError, match="a side may have 65536"):
        decode(png(width, height))


@pytest.mark.parametrize("pixels", [0, -1, 1 << 40, 1.5, True, None])
def test_a_limit_that_cannot_be_meant(pixels: object) -> None:
    with pytest.raises(ConfigError, match="pixels must be a whole number"):
        image.limit_pixels(pixels)  # type: ignore[arg-type]


def test_by_default_a_server_takes_what_stages_allow() -> None:
    assert DEFAULT_CAPS.pixels == image.MAX_PIXELS == Decode().max_pixels
