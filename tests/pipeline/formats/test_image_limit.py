"""Check that a process may set a smaller image limit than a dataset, and asks for memory before decoding."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.pipeline.making import encoded, pixels
from upriver.errors import ConfigError, Overloaded, TooLarge
from upriver.pipeline import Decode, Draw, RandomResizedCrop, SampleError, stored_tensor
from upriver.pipeline.formats import image
from upriver.protocol import DEFAULT_CAPS

TURNED = Image.Exif()
TURNED[0x0112] = 6

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
    """Return a PNG of grey pixels that states this size and holds little else."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + end


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "PPM", "BMP"])
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
    """Opening the file would decompress the chunks between that one and the pixels."""
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


# ------------------------------------------------------------------------------------------- memory


@pytest.fixture
def asked() -> Iterator[list[int]]:
    """Yield the list of byte counts that decoding asked for."""
    told: list[int] = []
    with image.asking(told.append):
        yield told


def test_it_is_asked_for_memory_before_an_image_is_taken(asked: list[int]) -> None:
    for form in ("JPEG", "PNG", "WEBP"):
        decode(encoded(pixels(40, 50), form))
    jpeg, png, webp, again = asked
    value = torch.from_numpy(pixels(40, 50))
    assert again <= jpeg == png < webp
    image.change(value, [("hue", 0.1), ("equalize", 0.0)])
    image.resize(value, 40, 50)  # nothing to do
    image.change(value, [])
    assert len(asked) == 5 and asked[4] >= 40 * 50 * 3
    image.resize(value, 400, 500)
    assert len(asked) == 6 and asked[5] >= 400 * 500 * 3


def test_nothing_is_decoded_where_there_is_no_room() -> None:
    def refuse(nbytes: int) -> None:
        raise Overloaded("none")

    with image.asking(refuse):
        for form in ("JPEG", "PNG", "WEBP"):
            with pytest.raises(Overloaded):
                decode(encoded(pixels(40, 50), form))
    assert decode(encoded(pixels(40, 50), "PNG")).shape == (40, 50, 3)


MEASURED = """
import os, sys
from upriver.pipeline.formats import image

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

data = open(sys.argv[1], "rb").read()
small = open(sys.argv[2], "rb").read()

def make(data, changes):
    value = image.decode(data, max_pixels=1 << 28, orient=True)
    for name in changes:
        value = image.change(value, [(name, 4.0 if name == "posterize" else 0.5)])

def measure(changes):
    make(small, changes)  # after which all code that it takes has been read
    asked = []
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    with image.asking(asked.append):
        make(data, changes)
    print(max(asked), status("VmHWM") - before, flush=True)

for changes in ([], sys.argv[3:]):
    if (child := os.fork()) == 0:  # the memory of one that is done is not there for the next
        measure(changes)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        pytest.param("JPEG", "RGB", {}, marks=pytest.mark.full),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0, "exif": TURNED}),
        pytest.param("JPEG", "CMYK", {"exif": TURNED}, marks=pytest.mark.full),
        pytest.param("PNG", "RGBA", {"compress_level": 1, "exif": TURNED}, marks=pytest.mark.full),
        pytest.param("PNG", "P", {"compress_level": 1, "exif": TURNED}, marks=pytest.mark.full),
        pytest.param("WEBP", "RGB", {"method": 0}, marks=pytest.mark.full),
        pytest.param("WEBP", "RGBA", {"method": 0, "exif": TURNED}, marks=pytest.mark.full),
        pytest.param(
            "WEBP",
            "RGB",
            {"method": 0, "lossless": True, "quality": 0, "exif": TURNED},
            marks=pytest.mark.full,
        ),
    ],
)
def test_no_image_takes_more_than_was_asked_for(
    tmp_path: Path, form: str, mode: str, options: dict[str, Any]
) -> None:
    noise = Image.fromarray(pixels(250, 400)).resize((4000, 2500)).convert(mode)
    noise.save(tmp_path / "large", form, **options)
    noise.resize((8, 8)).save(tmp_path / "small", form)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path / "large", tmp_path / "small", *image.CHANGES],
        capture_output=True,
        text=True,
        check=True,
    )
    alone, with_changes = (map(int, line.split()) for line in done.stdout.splitlines())
    for asked, took in (alone, with_changes):
        assert 0 < took <= asked
