"""The samples of a WebDataset shard, from its headers alone.

A shard is a tar file in which the members of one sample stand together and share a key: everything before the
first dot of the base name (``train/000123.jpg``, ``train/000123.cls``). Headers are read with ranged GETs;
what lies between them is skipped, unless members are so small that reading on is cheaper than asking again.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from upriver.errors import DatasetError
from upriver.store import ObjectInfo, Store

FIRST_WINDOW_BYTES = 16 * 2**10
"""Smallest read: two headers with PAX extensions and a small member (about 6 KiB) fit, and a disk reads as
much."""

LAST_WINDOW_BYTES = 4 * 2**20
"""Largest read, reached where members are so small that every read leads to the next."""

MAX_HEADER_BYTES = 2**20
"""Cap on one extended header, whose size the archive itself claims."""

MAX_CLS_BYTES = 64
"""A class is one integer; more is a mistake."""

_BLOCK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One regular file of a shard: bytes [start, stop) of the object."""

    key: str
    extension: str
    start: int
    stop: int


class RangedReader(io.RawIOBase):
    """An object as a file that only moves forward, read in windows under If-Match.

    The window doubles while every read leads to the next, and starts small again after a jump.
    """

    def __init__(self, store: Store, info: ObjectInfo, on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._store = store
        self._info = info
        self._on_bytes = on_bytes
        self._position = 0
        self._window_bytes = FIRST_WINDOW_BYTES
        self._window = b""
        self._window_start = 0

    def seekable(self) -> bool:
        """Always, though only forward."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move forward; a header that leads backwards would lead round in a circle."""
        if whence != io.SEEK_SET or offset < self._position:
            raise tarfile.ReadError(f"a header leads from byte {self._position} to {offset}")
        self._position = offset
        self._on_bytes(min(offset, self._info.size))
        return offset

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` bytes, fewer only at the end of the object."""
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self._position}")
        data = self.at(self._position, self._position + size)
        self._position += len(data)
        return data

    def at(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), as far as the object has them; does not move."""
        stop = min(stop, self._info.size)
        if start >= stop:
            return b""
        window_stop = self._window_start + len(self._window)
        if not self._window_start <= start or stop > window_stop:
            near = 0 <= start - self._window_start <= len(self._window) + self._window_bytes
            self._window_bytes = (
                min(2 * self._window_bytes, LAST_WINDOW_BYTES) if near else FIRST_WINDOW_BYTES
            )
            end = min(max(stop, start + self._window_bytes), self._info.size)
            self._window = self._store.get_range(self._info.path, start, end, etag=self._info.etag)
            self._window_start = start
        return self._window[start - self._window_start : stop - self._window_start]


def members(reader: RangedReader, info: ObjectInfo) -> Iterator[Member]:
    """The regular files of a shard, in order; directories and hidden files left out.

    Raises:
        DatasetError: If the object is no tar file, is truncated, or holds a sparse file.
    """
    try:
        with tarfile.open(fileobj=reader, mode="r:") as archive:
            for entry in archive:
                if entry.issparse():
                    raise DatasetError(f"shard {info.path!r}: sparse member {entry.name!r} is not supported")
                if entry.isreg() and not _is_hidden(entry.name):
                    yield _member(entry, info)
            _check_end(reader, info, archive.offset)
    except (tarfile.TarError, ValueError, RecursionError) as exc:
        raise DatasetError(f"shard {info.path!r} is not a whole tar file: {exc}") from None


def read_class(reader: RangedReader, info: ObjectInfo, member: Member) -> int:
    """The integer in a ``.cls`` member.

    Raises:
        DatasetError: If it is none, or negative.
    """
    size = member.stop - member.start
    text = reader.at(member.start, member.stop).strip() if size <= MAX_CLS_BYTES else b""
    if not text.isdigit() or len(text) > 18:
        raise DatasetError(
            f"shard {info.path!r}, sample {member.key!r}: .cls must hold a whole number >= 0, got {text!r}"
        )
    return int(text)


def _member(entry: tarfile.TarInfo, info: ObjectInfo) -> Member:
    stop = entry.offset_data + entry.size
    if entry.size < 0 or stop > info.size:
        where = f"member {entry.name!r} ends at byte {stop} of {info.size}"
        raise DatasetError(f"shard {info.path!r} is truncated: {where}")
    directory, _, base = entry.name.rpartition("/")
    stem, _, extension = base.partition(".")
    key = f"{directory}/{stem}" if directory else stem
    return Member(key=key, extension=extension.lower(), start=entry.offset_data, stop=stop)


def _is_hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith((".", "__"))


def _check_end(reader: RangedReader, info: ObjectInfo, end: int) -> None:
    """The tarfile module takes any unreadable header for the end; only a block of zeros is one."""
    if reader.at(end, end + _BLOCK) != bytes(_BLOCK):
        raise DatasetError(f"shard {info.path!r} is truncated or damaged: no end mark at byte {end}")
