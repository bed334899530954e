"""Read the orientation of an image file, by the rules of ``PIL.ImageOps.exif_transpose``.

The tag is read here, since Pillow warns of damaged EXIF data, and no warning filter of this process may
change a sample. The sources, in this order:

1. The first tag 0x0112 of the first directory (IFD0) in EXIF data, of any numeric type. Its first number
   counts. EXIF data are in the APP1 segments of JPEG and MPO, in the chunk ``eXIf`` of PNG or else its text
   ``Raw profile type exif``, and in the chunk ``EXIF`` of WebP.
2. Without such a tag, ``tiff:Orientation`` in XMP.

Other directories, such as that of a thumbnail, do not count. Damaged data are ignored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

UPRIGHT = 1

_TAG = 0x0112
_BYTE_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}  # two of them as Pillow accepts
_FORMS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q"}
_RATIONALS = {5: "II", 10: "ii"}
_NO_NUMBERS = (1, 2, 7)  # BYTE, which Pillow reads as bytes, ASCII and UNDEFINED
_SIZES = {
    **{kind: struct.calcsize(f"={form}") for kind, form in {**_FORMS, **_RATIONALS}.items()},
    **dict.fromkeys(_NO_NUMBERS, 1),
}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(info: Mapping[Any, Any]) -> float:
    """Find an image's orientation.

    Returns:
        1 to 8 as in EXIF, `UPRIGHT` if the file has no orientation, or any other number in the file.
    """
    found = _in_exif(_exif(info))
    return _in_xmp(info) if found is None else found


def _exif(info: Mapping[Any, Any]) -> bytes:
    exif = info.get("exif")
    if exif is None and "Raw profile type exif" in info:
        try:
            exif = bytes.fromhex("".join(str(info["Raw profile type exif"]).split("\n")[3:]))
        except ValueError:
            exif = None
    return re.sub(rb"^(Exif\0\0){1,2}", b"", exif) if isinstance(exif, bytes) else b""


def _in_xmp(info: Mapping[Any, Any]) -> int:
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
    found = _XMP.search(xmp.encode(errors="replace") if isinstance(xmp, str) else xmp)
    return int(found[1]) if found else UPRIGHT


def _in_exif(tiff: bytes) -> float | None:
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return None
    for tag, kind, data in _entries(tiff, order):
        if tag == _TAG:
            return _number(data, kind, order)
    return None


def _entries(tiff: bytes, order: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield tag, type and content of the first directory's entries, up to the first that is cut off."""
    outside = 0
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for at in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count, start = struct.unpack_from(order + "HHII", tiff, at)
            size = count * _SIZES.get(kind, 0)
            if size > 4:
                outside += size
                if outside > len(tiff):
                    continue
                if start + size > len(tiff):
                    return
            else:
                start = at + 8
            if size:
                yield tag, kind, tiff[start : start + size]
    except struct.error:
        return


def _number(data: bytes, kind: int, order: str) -> float:
    """Return the first number of an entry; 0, which is no orientation, if it holds none."""
    if kind in _RATIONALS:
        above, below = struct.unpack_from(order + _RATIONALS[kind], data)
        return above / below if below else 0
    return struct.unpack_from(order + _FORMS[kind], data)[0] if kind in _FORMS else 0
