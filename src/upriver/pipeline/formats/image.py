"""Decode, resize and change images: every use of Pillow.

Each format is opened by its own class rather than through ``Image.open``. No other format can be opened, and
no warning or leniency set elsewhere in the process changes a sample. The same bytes give the same pixels
wherever Pillow and its libraries are the same; the fingerprint covers them.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.WebPImagePlugin import WebPImageFile

from upriver.errors import ConfigError, TooLarge, UpriverError
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats.orientation import orientation_of
from upriver.types import PIXEL_CEILING

MAX_PIXELS = 64 * 2**20
"""Default cap: above full-frame cameras (61 megapixels), below Pillow's own warning (89 megapixels)."""

MAX_IMAGE_SIDE = 2**16
"""Longest side of a stored image: the limit of JPEG, rounded up.

Pillow keeps a pointer for each row. A PNG with one pixel in each row would need several times the memory of
its pixels.
"""

Change = tuple[str, float]
"""Name of a change in `CHANGES`, and its amount."""

_limit = sys.maxsize
"""Set by `limit_pixels` for this process; until then only the stages' own caps apply."""

_STRIP_PIXELS = 1 << 16

_DECODING = 12
_DECODING_WEBP = 20
_DECODING_PPM = 20
_RESIZING = 8
"""Peak bytes a pixel, including the input pixels and any output pixels.

Measured on images of 24 megapixels, progressive and rotated ones included, and rounded up.
"""

CHANGING = 28
"""Peak bytes a pixel of `change`, including input and output.

Measured in the same way. It needs 2 more in one run of five.
"""

_ask: Callable[[int], None] | None = None
"""Set by `asking`, for this process alone."""

_EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_TURNS: dict[float, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PPM_KINDS = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Second byte of a file: bits, grey or RGB, as text or as bytes."""

_NO_MEMORY = ("can't allocate memory", "out of memory error")
"""Parts of out-of-memory messages of PyTorch and Pillow, in errors other than `MemoryError`."""


class _WholeFile(ImageFile.ImageFile):
    """An image that must be whole, whatever ``ImageFile.LOAD_TRUNCATED_IMAGES`` says in this process."""

    def load_read(self, read_bytes: int) -> bytes:
        return _whole(self.fp.read(read_bytes) if self.fp else b"")


class _Jpeg(_WholeFile, JpegImageFile):
    """A JPEG. Its EXIF data are not read for its resolution: damaged ones would make Pillow warn."""

    def _read_dpi_from_exif(self) -> None:
        pass


class _Png(PngImageFile):
    def load_read(self, read_bytes: int) -> bytes:
        try:
            return _whole(super().load_read(read_bytes))
        except (IndexError, struct.error):  # a chunk's header is cut off
            return _whole(b"")


class _Ppm(_WholeFile, PpmImageFile):
    """A PPM, PGM or PBM."""


class _Bmp(_WholeFile, BmpImageFile):
    """A BMP."""


def _whole(data: bytes) -> bytes:
    if not data:  # Pillow reads only while the picture is not complete
        raise OSError("image file is truncated")
    return data


def limit_pixels(pixels: int) -> None:
    """Refuse larger images in this process from now on, stored or resized, whatever a stage allows.

    The publisher of a dataset sets a stage's cap. The operator of a server sets this limit in its workers
    before their first sample. A larger image is no bad sample, as another server may accept it: `TooLarge` is
    raised, which skips nothing.

    Raises:
        ConfigError: If ``pixels`` is not a whole number in 1..`PIXEL_CEILING`.
    """
    global _limit
    if type(pixels) is not int or not 1 <= pixels <= PIXEL_CEILING:
        raise ConfigError(f"pixels must be a whole number in 1..{PIXEL_CEILING}, got {pixels!r}")
    _limit = pixels


@contextmanager
def asking(room: Callable[[int], None]) -> Iterator[None]:
    """Ask for memory inside the context before an image is decoded, changed or enlarged.

    Args:
        room: Called with the peak bytes of the operation, including its input and output; raises if they are
            not available. Each call replaces the previous one's request.
    """
    global _ask
    before, _ask = _ask, room
    try:
        yield
    finally:
        _ask = before


def _make_room(nbytes: int) -> None:
    if _ask is not None:
        _ask(nbytes)


def decode(data: bytes | memoryview, *, max_pixels: int, orient: bool) -> torch.Tensor:
    """Decode a JPEG, PNG, WebP (its first frame), BMP, PPM, PGM or PBM into RGB.

    Args:
        max_pixels: Cap on width times height, checked before anything is decoded.
        orient: Whether to turn the image as its metadata say, as ``ImageOps.exif_transpose`` does.

    Returns:
        uint8 of shape (height, width, 3).

    Raises:
        SampleError: If the data are no such image, have too many pixels, or are truncated or corrupt.
        TooLarge: If the image has more pixels than this process accepts (`limit_pixels`).
        Overloaded: If there is no memory for the image (`asking`).
        MemoryError: If memory is exhausted. The sample is not at fault, and must not be skipped for it.
    """
    try:
        image = _open(data, max_pixels)
        _check_size(image.width, image.height, max_pixels)
        _make_room(image.width * image.height * (_DECODING_PPM if isinstance(image, _Ppm) else _DECODING))
        if image.mode not in _EIGHT_BIT:
            raise SampleError(f"pixels of mode {image.mode!r}; 8 bits a channel are supported")
        image.load()  # a PNG's metadata may come last, and are complete only now
        turn = _TURNS.get(orientation_of(image.info)) if orient else None
        image.info.pop("transparency", None)  # dropped anyway, and Pillow warns when it drops some
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        del image
        return to_tensor(rgb if turn is None else rgb.transpose(turn))
    except (UpriverError, MemoryError):
        raise
    except Exception as exc:  # Pillow raises nearly anything on crafted bytes
        if any(words in str(exc) for words in _NO_MEMORY):
            raise MemoryError(str(exc).split("\n", 1)[0]) from None
        raise SampleError(f"not a whole image: {exc or type(exc).__name__}".split("\n", 1)[0]) from None


def resize(value: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 (height, width, 3) pixels with Pillow's bilinear filter, which averages when it shrinks.

    Raises:
        TooLarge: If the result has more pixels than this process allows (`limit_pixels`).
    """
    check_limit(width, height)
    if value.shape[:2] == (height, width):
        return value
    _make_room((value.shape[0] * (value.shape[1] + width) + height * width) * _RESIZING)
    image = Image.fromarray(value.contiguous().numpy())
    return to_tensor(image.resize((width, height), Image.Resampling.BILINEAR))


def change(value: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """Apply changes to uint8 (height, width, 3) pixels one after another, each by its amount.

    Geometric changes use nearest neighbour, and black outside the image. The pixels equal those of
    torchvision's functions for PIL images.
    """
    if not changes:
        return value
    _make_room(value.shape[0] * value.shape[1] * CHANGING)
    image = Image.fromarray(value.contiguous().numpy())
    for name, amount in changes:
        image = CHANGES[name](image, amount)
    return to_tensor(image)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Convert an RGB image to a fresh uint8 tensor of shape (height, width, 3)."""
    out = torch.empty((image.height, image.width, 3), dtype=torch.uint8, device="cpu")
    rows, pixels = max(1, _STRIP_PIXELS // image.width), out.numpy()
    for top in range(0, image.height, rows):  # Pillow makes two copies of the requested part
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return out


def _open(data: bytes | memoryview, max_pixels: int) -> ImageFile.ImageFile:
    head = bytes(data[:30])
    if head.startswith(b"\xff\xd8\xff"):
        return _Jpeg(io.BytesIO(data))
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_size(*_png_size(head), max_pixels)  # opening a PNG already unpacks its texts, up to 64 MB
        return _Png(io.BytesIO(data))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        width, height = _webp_size(head)
        _check_size(width, height, max_pixels)
        _make_room(width * height * _DECODING_WEBP)  # opening a WebP already allocates its canvas
        return WebPImageFile(io.BytesIO(data))
    if head.startswith(b"BM"):
        return _Bmp(io.BytesIO(data))
    if head[:1] == b"P" and head[1:2] in _PPM_KINDS and head[2:3].isspace():
        return _Ppm(io.BytesIO(data))
    what = f"starts with {head[:8]!r}" if head else "is empty"
    raise SampleError(f"not a JPEG, PNG, WebP, BMP or PPM image: it {what}")


def _png_size(head: bytes) -> tuple[int, int]:
    """Return width and height from the first chunk of a PNG file (PNG specification, section 11.2.1)."""
    if len(head) < 24 or head[12:16] != b"IHDR":
        raise SampleError("not a whole image: the PNG header is cut off, or is not the first chunk")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _webp_size(head: bytes) -> tuple[int, int]:
    """Return width and height from the first chunk of a WebP file (RFC 9649, sections 2.5 to 2.7)."""
    if len(head) < 30:
        raise SampleError("not a whole image: the WebP header is cut off")
    chunk = head[12:16]
    if chunk == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", head[26:30])
    return width & 0x3FFF, height & 0x3FFF


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise SampleError(f"{width} x {height} = {width * height} pixels; at most {max_pixels} are allowed")
    if max(width, height) > MAX_IMAGE_SIDE:
        raise SampleError(f"{width} x {height} pixels; a side may have {MAX_IMAGE_SIDE}")
    check_limit(width, height)


def check_limit(width: int, height: int) -> None:
    """Check that this process accepts images of this size.

    Raises:
        TooLarge: If it does not (`limit_pixels`).
    """
    if width * height > _limit:
        raise TooLarge(
            f"an image of {width} x {height} = {width * height} pixels; this server takes at most {_limit}"
        )


# ------------------------------------------------------------------------------------------ changes

FACTORS: dict[str, Callable[[Image.Image], ImageEnhance._Enhance]] = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}
"""Changes by a factor: 1 gives the image itself, 0 an image without the named property."""


def _by_factor(name: str) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: FACTORS[name](image).enhance(factor)


def _turn_hue(image: Image.Image, share: float) -> Image.Image:
    """Move hues by a share of their circle, in Pillow's 256 steps."""
    hue, saturation, lightness = image.convert("HSV").split()
    steps = int(share * 255)
    turned = hue.point([(step + steps) % 256 for step in range(256)])
    return Image.merge("HSV", (turned, saturation, lightness)).convert("RGB")


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Set each pixel (x, y) to the one at (ax + by + c, dx + ey + f), for a matrix a to f."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=(0, 0, 0)
    )


def _shear_x(image: Image.Image, slope: float) -> Image.Image:
    return _affine(image, 1.0, math.tan(_angle(slope)), 0.0, 0.0, 1.0, 0.0)


def _shear_y(image: Image.Image, slope: float) -> Image.Image:
    # Not the tangent: its last bit may differ, and torchvision divides.
    return _affine(image, 1.0, 0.0, 0.0, math.sin(_angle(slope)) / math.cos(_angle(slope)), 1.0, 0.0)


def _angle(slope: float) -> float:
    """Convert a slope to radians by way of degrees, whose rounding torchvision shares."""
    return math.radians(math.degrees(math.atan(slope)))


CHANGES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    **{name: _by_factor(name) for name in FACTORS},
    "hue": _turn_hue,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": lambda image, pixels: _affine(image, 1.0, 0.0, -int(pixels), 0.0, 1.0, 0.0),
    "translate_y": lambda image, pixels: _affine(image, 1.0, 0.0, 0.0, 0.0, 1.0, -int(pixels)),
    "rotate": lambda image, degrees: image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=(0, 0, 0)),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "auto_contrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
"""Every change of an image, by name.

The amount is a factor, a share of the circle, a slope, pixels, degrees, bits to keep, a threshold, or unused.
"""
