"""Check that images are turned as Pillow's ``exif_transpose`` turns them, for any metadata."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.examples import some
from tests.pipeline.making import encoded, pixels
from upriver.pipeline.formats import orientation
from upriver.pipeline.formats.image import decode

PIXELS = pixels(4, 7)
EXIF = b"Exif\0\0"
Entry = tuple[int, int, int, bytes]
"""Tag, type, count and content."""

FORMS = {"SHORT": (3, "H"), "LONG": (4, "I"), "SBYTE": (6, "b"), "SSHORT": (8, "h"), "SLONG": (9, "i")}
FORMS |= {"FLOAT": (11, "f"), "DOUBLE": (12, "d"), "IFD": (13, "I"), "LONG8": (16, "Q")}


def tiff(order: str, *directories: Sequence[Entry], mark: bytes = b"") -> bytes:
    """Return EXIF data, one directory after another; content too large for an entry comes last."""
    out = bytearray((mark or {"<": b"II*\0", ">": b"MM\0*"}[order]) + struct.pack(order + "I", 8))
    for number, entries in enumerate(directories):
        rest, end = b"", len(out) + 2 + 12 * len(entries) + 4
        out += struct.pack(order + "H", len(entries))
        for tag, kind, count, content in entries:
            out += struct.pack(order + "HHI", tag, kind, count)
            out += content.ljust(4, b"\0") if len(content) <= 4 else struct.pack(order + "I", end + len(rest))
            rest += content if len(content) > 4 else b""
        last = number + 1 == len(directories)
        out += struct.pack(order + "I", 0 if last else end + len(rest)) + rest
    return bytes(out)


def tag(order: str, form: str, *values: float) -> Entry:
    """Return an orientation entry of one of the types."""
    if form in ("RATIONAL", "SRATIONAL"):
        kind, letter = {"RATIONAL": (5, "II"), "SRATIONAL": (10, "ii")}[form]
        return 0x0112, kind, 1, struct.pack(order + letter, *map(int, values))
    kind, letter = FORMS[form]
    numbers = values if letter in "fd" else tuple(map(int, values))
    return 0x0112, kind, len(values), struct.pack(f"{order}{len(values)}{letter}", *numbers)


def in_text(write: str) -> Callable[[bytes], bytes]:
    """Return a PNG whose EXIF data are in one of the kinds of text, as ImageMagick writes them."""

    def make(exif: bytes) -> bytes:
        info, text = PngInfo(), f"\nexif\n{len(exif) + 6:8}\n{(EXIF + exif).hex()}\n"
        if write == "iTXt":
            info.add_itxt("Raw profile type exif", text)
        else:
            info.add_text("Raw profile type exif", text, zip=write == "zTXt")
        return encoded(PIXELS, "PNG", pnginfo=info)

    return make


def late(exif: bytes) -> bytes:
    """Return a PNG with its EXIF chunk after the pixels."""
    data = encoded(PIXELS, "PNG")
    chunk = b"eXIf" + exif
    chunk = struct.pack(">I", len(exif)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return data[:-12] + chunk + data[-12:]


def mpo(exif: bytes) -> bytes:
    other = Image.fromarray(PIXELS[::-1].copy())
    return encoded(PIXELS, "MPO", exif=EXIF + exif, save_all=True, append_images=[other])


FILES: dict[str, Callable[[bytes], bytes]] = {
    "JPEG": lambda exif: encoded(PIXELS, exif=EXIF + exif),
    "JPEG, twice marked": lambda exif: encoded(PIXELS, exif=EXIF + EXIF + exif),
    "MPO": mpo,
    "PNG": lambda exif: encoded(PIXELS, "PNG", exif=exif),
    "PNG, behind the pixels": late,
    **{f"PNG, {kind}": in_text(kind) for kind in ("tEXt", "zTXt", "iTXt")},
    "WebP": lambda exif: encoded(PIXELS, "WEBP", exif=exif),
    "WebP, marked": lambda exif: encoded(PIXELS, "WEBP", exif=EXIF + exif, lossless=True),
}


def by_pillow(data: bytes) -> torch.Tensor:
    with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB")))


def ours(data: bytes) -> torch.Tensor:
    return decode(data, max_pixels=10_000, orient=True)


def check(data: bytes, *, turns: bool | None = None) -> None:
    """Compare an image with Pillow's; ``turns`` says whether its sides change places."""
    got = ours(data)
    assert torch.equal(got, by_pillow(data))
    if turns is not None:
        assert tuple(got.shape[:2]) == ((7, 4) if turns else (4, 7))


@pytest.mark.parametrize("order", some(1, ["<", ">"]))
@pytest.mark.parametrize("file", FILES)
def test_orientation_in_every_place_type_and_byte_order_is_pillows(file: str, order: str) -> None:
    camera = (0x010F, 2, 9, b"a camera\0")
    for value in (*range(10), 255):
        for form in FORMS:
            if form != "SBYTE" or value < 128:
                check(FILES[file](tiff(order, [camera, tag(order, form, value)])), turns=value in range(5, 9))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("entries", "turns"),
    [
        ([("SHORT", 6, 1)], True),
        ([("SHORT", 1, 6)], False),
        ([("SHORT", 6, 1, 1)], True),
        ([("LONG", 6, 3)], True),
        ([("RATIONAL", 6, 1)], True),
        ([("RATIONAL", 12, 2)], True),
        ([("RATIONAL", 13, 2)], False),
        ([("RATIONAL", 6, 0)], False),
        ([("SRATIONAL", -6, -1)], True),
        ([("FLOAT", 6.5)], False),
        ([("DOUBLE", float("nan"))], False),
        ([("SSHORT", -6)], False),
        ([("SHORT", 6), ("SHORT", 1)], True),
        ([("SHORT", 1), ("SHORT", 6)], False),
        ([("SHORT",), ("SHORT", 6)], True),
    ],
)
def test_orientation_of_unusual_numbers_is_pillows(order: str, entries: Any, turns: bool) -> None:
    exif = tiff(order, [tag(order, *entry) for entry in entries])
    check(FILES["JPEG"](exif), turns=turns)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "entry",
    [
        (0x0112, 1, 1, b"\6"),
        (0x0112, 2, 2, b"6\0"),
        (0x0112, 7, 1, b"\6"),
        (0x0112, 99, 1, b"\0\6"),
        (0x0112, 0, 1, b"\6\0"),
    ],
)
def test_orientation_that_is_no_number_is_upright(order: str, entry: Entry) -> None:
    check(FILES["JPEG"](tiff(order, [entry])), turns=False)


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_of_a_thumbnail_does_not_count(order: str) -> None:
    six, one = tag(order, "SHORT", 6), tag(order, "SHORT", 1)
    for file in FILES.values():
        check(file(tiff(order, [(0x010F, 2, 2, b"a\0")], [six])), turns=False)
        check(file(tiff(order, [six], [one])), turns=True)


@pytest.mark.parametrize(("order", "mark"), [("<", b"II\0*"), (">", b"MM*\0")])
def test_orientation_behind_a_mark_that_pillow_takes_counts(order: str, mark: bytes) -> None:
    check(FILES["JPEG"](tiff(order, [tag(order, "SHORT", 8)], mark=mark)), turns=True)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description %s/></rdf:RDF></x:xmpmeta>'


def with_xmp(form: str, said: bytes, exif: bytes = b"") -> bytes:
    xmp = XMP % said
    if form == "PNG":
        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
        return encoded(PIXELS, "PNG", pnginfo=info, exif=exif)
    return encoded(PIXELS, form, xmp=xmp, exif=EXIF + exif if exif else b"")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_xmp_counts_where_exif_has_none(form: str) -> None:
    other = tiff("<", [(0x010F, 2, 2, b"a\0")])
    for value in range(10):
        for said in (b'tiff:Orientation="%d"', b"><tiff:Orientation>%d</tiff:Orientation><a"):
            for exif in (b"", other):
                check(with_xmp(form, said % value, exif), turns=value in range(5, 9))
        for said in (b"tiff:Orientation='6'", b'exif:Orientation="6"', b'tiff:Orientation=" 6"'):
            check(with_xmp(form, said), turns=False)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_exif_counts_before_xmp(form: str) -> None:
    for value, turns in ((1, False), (0, False), (9, False), (8, True)):
        exif = tiff(">", [tag(">", "SHORT", value)])
        check(with_xmp(form, b'tiff:Orientation="6"', exif), turns=turns)
    byte = tiff("<", [(0x0112, 1, 1, b"\6")])
    check(with_xmp(form, b'tiff:Orientation="6"', byte), turns=False)


@pytest.mark.parametrize(
    "exif",
    [
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"nonsense",
        b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0",
        tiff("<", [tag("<", "SHORT", 6)])[:15],
    ],
)
def test_exif_that_pillow_refuses_or_cannot_read_is_upright_and_silent(exif: bytes) -> None:
    assert tuple(ours(FILES["JPEG"](exif)).shape[:2]) == (4, 7)
    assert tuple(ours(FILES["PNG, tEXt"](exif)).shape[:2]) == (4, 7)


def test_text_that_is_no_exif_is_upright() -> None:
    for text in ("", "\nexif\n", "\nexif\n 9\nnot hex", "exif"):
        info = PngInfo()
        info.add_text("Raw profile type exif", text)
        assert tuple(ours(encoded(PIXELS, "PNG", pnginfo=info)).shape[:2]) == (4, 7)


def test_orientation_of_damaged_exif_is_pillows() -> None:
    rng = random.Random(0)
    sound = tiff(
        "<",
        [
            (0x010F, 2, 9, b"a camera\0"),
            (0x0110, 3, 5, bytes(10)),
            tag("<", "SHORT", 6),
            (0x011A, 5, 1, bytes(8)),
        ],
    )
    compared = 0
    for _ in range(3000):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(4, len(damaged))] = rng.choice(
                (0, 1, 2, 3, 4, 6, 12, 255, rng.randrange(256))
            )
        image = Image.new("RGB", (1, 1))
        image.info["exif"] = EXIF + damaged
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                theirs = image.getexif().get(0x0112, 1)
            except Exception:  # Pillow has no answer
                continue
        mine = orientation.orientation_of(image.info)
        turns = {number for number in (theirs, mine) if isinstance(number, int | float) and 2 <= number <= 8}
        assert len(turns) == 0 or mine == theirs, bytes(damaged).hex()
        compared += 1
    assert compared > 2000
