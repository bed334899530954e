"""Check image decoding: Pillow's pixels for any bytes, limits checked before work, one plain error."""

from __future__ import annotations

import io
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.pipeline.making import encoded, pixels
from upriver.pipeline import Decode, Draw, SampleError, stored_tensor

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)


def decode(data: bytes, stage: Decode | None = None) -> torch.Tensor:
    return (stage or Decode()).apply(stored_tensor(data), DRAW)


def by_pillow(data: bytes) -> torch.Tensor:
    return torch.tensor(np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")))


@pytest.mark.parametrize(
    "data",
    [
        encoded(pixels(21, 34)),
        encoded(pixels(21, 34), progressive=True, quality=50),
        encoded(Image.fromarray(pixels(21, 34)).convert("L")),
        encoded(Image.fromarray(pixels(21, 34)).convert("CMYK")),
        encoded(pixels(21, 34), "PNG"),
        encoded(Image.fromarray(pixels(21, 34)).convert("P"), "PNG"),
        encoded(Image.fromarray(pixels(21, 34)).convert("1"), "PNG"),
        encoded(Image.fromarray(pixels(21, 34)).convert("RGBA"), "PNG"),
        encoded(Image.fromarray(pixels(21, 34)).convert("LA"), "PNG"),
        encoded(pixels(21, 34), "WEBP", lossless=True),
        encoded(pixels(21, 34), "WEBP", quality=70),
        encoded(Image.fromarray(pixels(21, 34)).convert("RGBA"), "WEBP"),
    ],
    ids=[
        *("jpeg", "progressive", "grey", "cmyk", "png", "palette", "bilevel", "rgba", "la"),
        *("webp-lossless", "webp", "webp-alpha"),
    ],
)
def test_pixels_are_those_of_pillow(data: bytes) -> None:
    got = decode(data)
    assert got.dtype is torch.uint8
    assert got.is_contiguous()
    assert torch.equal(got, by_pillow(data))


def test_a_palette_with_transparency_gives_its_colours_without_a_warning() -> None:
    image = Image.fromarray(pixels(8, 9)).convert("P", palette=Image.Palette.ADAPTIVE)
    data = encoded(image, "PNG", transparency=bytes(range(256)))
    assert torch.equal(decode(data), torch.tensor(np.asarray(image.convert("RGB"))))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010F] = "a camera"
    data = encoded(pixels(10, 16), form, exif=exif)
    assert torch.equal(decode(data), by_pillow(data))
    assert tuple(decode(data).shape[:2]) == ((10, 16) if orientation <= 4 else (16, 10))
    assert tuple(decode(data, Decode(orient=False)).shape[:2]) == (10, 16)


def tiff(order: str, entries: int, *, tag: int = 0x0112, kind: int = 3, value: int = 6) -> bytes:
    mark = b"II*\x00" if order == "<" else b"MM\x00*"
    return mark + struct.pack(order + "IHHHIHH", 8, entries, tag, kind, 1, value, 0)


@pytest.mark.parametrize(
    ("exif", "turned"),
    [
        (tiff("<", 1), True),
        (tiff(">", 1), True),
        (tiff("<", 1, kind=2), False),
        (tiff("<", 1, tag=0x0113), False),
        (tiff("<", 1, value=99), False),
        (tiff("<", 60000, tag=0x0113), False),
        (tiff("<", 1)[:15], False),
        (b"II*\x00\xff\xff\xff\xff", False),
        (b"nonsense", False),
        (b"", False),
    ],
)
def test_damaged_exif_is_upright_and_silent(exif: bytes, turned: bool) -> None:
    data = encoded(pixels(10, 16), exif=b"Exif\x00\x00" + exif)
    assert tuple(decode(data).shape[:2]) == ((16, 10) if turned else (10, 16))


def test_the_cap_comes_before_decoding() -> None:
    data = encoded(pixels(40, 50))
    data = data[: data.index(b"\xff\xda")]  # the header is whole, the pixels are absent
    with pytest.raises(SampleError, match=r"50 x 40 = 2000 pixels; at most 1999 are allowed"):
        decode(data, Decode(max_pixels=1999))
    with pytest.raises(SampleError, match="not a whole image"):
        decode(data, Decode(max_pixels=2000))


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def webp_header(kind: bytes, body: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


BOMBS = {
    "png": png_header(100_000, 100_000),
    "vp8x": webp_header(b"VP8X", bytes(4) + (16383).to_bytes(3, "little") * 2 + bytes(20)),
    "vp8l": webp_header(b"VP8L", b"\x2f" + (16383 | 16383 << 14).to_bytes(4, "little") + bytes(20)),
    "vp8": webp_header(b"VP8 ", bytes(6) + struct.pack("<HH", 16383, 16383) + bytes(20)),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_with_no_warning(bomb: bytes) -> None:
    with pytest.raises(SampleError, match="at most 67108864 are allowed"):
        decode(bomb)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "PPM", "BMP"])
def test_wherever_it_is_cut_off_it_is_a_sample_error(form: str) -> None:
    data = encoded(pixels(40, 50), form)
    for length in [*range(0, 64), *range(64, len(data) - 20, 97)]:
        with pytest.raises(SampleError):
            decode(data[:length])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "PPM", "BMP"])
def test_leniency_set_elsewhere_changes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many training scripts set it: a truncated image would decode there and fail on a server."""
    data = encoded(pixels(40, 50), form)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(SampleError, match="not a whole image"):
        decode(data[: len(data) * 3 // 4])


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "PPM", "BMP"])
def test_damage_gives_pixels_or_a_sample_error_and_nothing_else(form: str) -> None:
    rng = np.random.default_rng(3)
    data = np.frombuffer(encoded(pixels(30, 30), form, exif=tiff("<", 1)), dtype=np.uint8)
    for _ in range(200):
        damaged = data.copy()
        damaged[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
        try:
            assert decode(damaged.tobytes()).shape[2] == 3
        except SampleError as exc:
            assert "\n" not in exc.reason


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"GIF89a....", "not a JPEG, PNG, WebP, BMP or PPM"),
        (b"%!PS-Adobe-3.0 EPSF", "not a JPEG, PNG, WebP, BMP or PPM"),
        (encoded(pixels(4, 4), "TIFF"), "not a JPEG, PNG, WebP, BMP or PPM"),
        (encoded(Image.fromarray(np.zeros((4, 4), dtype=np.uint16)), "PNG"), "8 bits a channel"),
    ],
)
def test_other_formats_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(SampleError, match=problem):
        decode(data)


def test_compressed_text_in_a_png_does_not_swell() -> None:
    info = PngInfo()
    info.add_text("comment", "a" * 100_000_000, zip=True)
    with pytest.raises(SampleError, match="not a whole image"):
        decode(encoded(pixels(4, 4), "PNG", pnginfo=info))


def test_threads_get_the_same_pixels() -> None:
    data, got = encoded(pixels(64, 64)), []

    def work() -> None:
        for _ in range(20):
            got.append(decode(data))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 80
    assert all(torch.equal(each, got[0]) for each in got)
