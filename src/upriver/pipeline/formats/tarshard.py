"""Find the samples of a WebDataset shard from its headers alone.

A shard is a tar file in which the members of one sample are adjacent and share a key: everything before the
first dot of the base name (``train/000123.jpg``, ``train/000123.cls``). Headers are read with ranged GETs.
The content between them is skipped, unless members are so small that reading on costs less than another
request.
"""

from __future__ import annotations

import codecs
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from upriver.errors import DatasetError
from upriver.pipeline import left_out
from upriver.pipeline.left_out import FORMAT_OF, Tally
from upriver.store import ObjectInfo, Store

FIRST_WINDOW_BYTES = 16 * 2**10
"""Smallest read, which a disk reads anyway.

Two headers with PAX extensions and a small member fit (about 6 KiB).
"""

LAST_WINDOW_BYTES = 4 * 2**20
"""Largest read, reached when members are so small that every read continues the last."""

MAX_HEADER_BYTES = 2**20
"""Cap on one extended header, whose size the archive itself claims."""

MAX_CLS_BYTES = 64
"""Cap on a ``.cls`` member, which holds one integer."""

_BLOCK = 512
_MAX_HOPS = 40  # as in Linux, where links lead to links

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_NO_FILES = (b"V", b"D")  # GNU's volume label, and the names in a directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A member of a shard that may belong to a sample: bytes [start, stop) of the object.

    Attributes:
        extension: Everything after the first dot of the base name, in lower case.
        start: First byte of its content, or of the linked content for a link.
        reason: Reason why its content cannot be read, one of `left_out.REASONS`; empty if it can.
        text: Content of a ``.cls`` member of allowed size.
    """

    key: str
    extension: str
    start: int = 0
    stop: int = 0
    reason: str = ""
    why_not: str = ""
    text: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A header: content [start, stop) of the object, or a link to ``target``, or the reason for neither."""

    name: str
    start: int = 0
    stop: int = 0
    target: str | None = None
    reason: str = ""
    why_not: str = ""


class RangedReader(io.RawIOBase):
    """An object as a file that only moves forward, read in windows under If-Match.

    The window doubles while every read continues the last, and starts small again after a jump.
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
        """Return True; seeking is possible, though only forward."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move forward; a header that leads backwards would form a cycle."""
        if whence != io.SEEK_SET or offset < self._position:
            raise tarfile.ReadError(f"a header leads from byte {self._position} to {offset}")
        self._position = offset
        self._on_bytes(min(offset, self._info.size))
        return offset

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the object."""
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self._position}")
        data = self.at(self._position, self._position + size)
        self._position += len(data)
        return data

    def at(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), up to the end of the object, without moving."""
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


def members(reader: RangedReader, info: ObjectInfo, tally: Tally) -> list[Member]:
    """Return the members of a shard that may belong to samples, in order.

    Archives after the end mark of the first are read, too. A hard or symbolic link stands for its target's
    content. Directories, clutter and descriptions such as a README are left out.

    Args:
        tally: Counts hidden files that may be samples.

    Raises:
        DatasetError: If the object is no tar file, or is truncated or damaged.
    """
    packed = next((kind for magic, kind in _PACKED.items() if reader.at(0, 6).startswith(magic)), None)
    if packed is not None:
        why_not = f"shard {info.path!r} is compressed ({packed}); samples can only be read from a plain .tar"
        tally.add("compressed", info.path, why_not)
        return []
    tree, entries = _Tree(), []
    texts: dict[int, bytes] = {}
    for header in _headers(reader, info):
        entry = _entry(header, info, tree)
        if entry is None:
            continue
        if entry.target is None and not entry.reason and _split(entry.name)[1] == "cls":
            texts[entry.start] = _class_text(reader, entry.start, entry.stop)  # while its window is in memory
        if _may_be_of_a_sample(entry, info, tally):
            entries.append(entry)
    return [_member(entry, tree, reader, texts) for entry in entries]


def _headers(reader: RangedReader, info: ObjectInfo) -> Iterator[tarfile.TarInfo]:
    """Yield all headers of an object that holds one archive, or several in a row."""
    begin: int | None = 0
    try:
        while begin is not None:
            reader.seek(begin)
            with tarfile.open(fileobj=reader, mode="r:") as archive:
                yield from archive
                end = archive.offset
            _check_end(reader, info, end, begin)
            begin = _next_archive(reader, info, end)
    except (tarfile.TarError, ValueError, RecursionError) as exc:
        raise DatasetError(f"shard {info.path!r} is not a whole tar file: {exc}") from None


def _check_end(reader: RangedReader, info: ObjectInfo, end: int, begin: int) -> None:
    """Check that an archive ends with a block of zeros; the tarfile module stops at any unreadable header."""
    if reader.at(end, end + _BLOCK) == bytes(_BLOCK):
        return
    if end == begin:
        raise DatasetError(f"shard {info.path!r}: what follows its end mark at byte {end} is no tar archive")
    raise DatasetError(f"shard {info.path!r} is truncated or damaged: no end mark at byte {end}")


def _next_archive(reader: RangedReader, info: ObjectInfo, end: int) -> int | None:
    """Return the position of the next archive after an end mark; None if only zeros follow."""
    for start in range(end, info.size, FIRST_WINDOW_BYTES):
        part = reader.at(start, start + FIRST_WINDOW_BYTES)
        rest = part.lstrip(b"\0")
        if rest:
            return (start + len(part) - len(rest)) // _BLOCK * _BLOCK
    return None


def _entry(header: tarfile.TarInfo, info: ObjectInfo, tree: _Tree) -> _Entry | None:
    """Return the entry of a header; None for a directory or a description of the archive."""
    name, shown = header.name, f"{header.name!r}"
    if header.isdir() or header.type in _NO_FILES:
        return None
    if any("\ud800" <= char <= "\udfff" for char in name):
        why_not = f"the name of member {shown} is not UTF-8"
        return _Entry(name.encode(errors="backslashreplace").decode(), reason="name", why_not=why_not)
    if header.issparse():
        return _Entry(name, reason="sparse", why_not=f"sparse member {shown} is not supported")
    if header.isreg():
        stop = header.offset_data + header.size
        if header.size < 0 or stop > info.size:
            where = f"member {shown} ends at byte {stop} of {info.size}"
            raise DatasetError(f"shard {info.path!r} is truncated: {where}")
        tree.add_file(name, header.offset_data, stop)
        return _Entry(name, header.offset_data, stop)
    if header.issym():
        tree.add_link(name, header.linkname)
        return _Entry(name, target=header.linkname)
    if header.islnk():
        found = tree.add_hard_link(name, header.linkname)
        if found is None:
            why_not = f"member {shown} is a hard link to {header.linkname!r}, which is not before it"
            return _Entry(name, reason="link", why_not=why_not)
        return _Entry(name, *found) if isinstance(found, tuple) else _Entry(name, target=found)
    why_not = f"member {shown} is neither a file nor a link (type {header.type!r})"
    return _Entry(name, reason="special", why_not=why_not)


class _Tree:
    """Files and symbolic links of an archive by their paths, as after unpacking it in order."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}

    def add_file(self, name: str, start: int, stop: int) -> None:
        path = _plain(name)
        self._links.pop(path, None)
        self._files[path] = (start, stop)

    def add_link(self, name: str, target: str) -> None:
        path = _plain(name)
        self._files.pop(path, None)
        self._links[path] = target

    def add_hard_link(self, name: str, target: str) -> tuple[int, int] | str | None:
        """Add a hard link; return its target's bytes, or the text of a target that is a symbolic link.

        The target must come earlier; None if it does not.
        """
        path = _plain(target)
        found = self._files.get(path) or self._links.get(path)
        if isinstance(found, tuple):
            self.add_file(name, *found)
        elif found is not None:
            self.add_link(name, found)
        return found

    def follow(self, name: str) -> tuple[int, int] | None:
        """Return the bytes of the file at a path; None if it leads outside, in a cycle or nowhere."""
        todo, done, hops = _plain(name).split("/")[::-1], list[str](), 0
        while todo:
            part = todo.pop()
            if part == "..":
                if not done:
                    return None
                done.pop()
            elif part not in ("", "."):
                done.append(part)
                target = self._links.get("/".join(done))
                if target is not None:
                    hops += 1
                    if hops > _MAX_HOPS or target.startswith("/"):
                        return None
                    done.pop()
                    todo += target.split("/")[::-1]
        return self._files.get("/".join(done))


def _plain(name: str) -> str:
    """Return a member's path as other members refer to it."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _may_be_of_a_sample(entry: _Entry, info: ObjectInfo, tally: Tally) -> bool:
    name = _plain(entry.name)
    _, extension = _split(name)
    is_known = extension in FORMAT_OF or extension == "cls"
    if left_out.is_clutter(name):
        return False
    if left_out.is_hidden(name):
        if name.lower().rpartition(".")[2] in FORMAT_OF:
            why_not = f"shard {info.path!r}: member {entry.name!r} is hidden by a dot"
            tally.add("hidden", f"{info.path}: {entry.name}", why_not)
        return False
    stem = name.rpartition("/")[2].partition(".")[0]
    is_meta = stem.startswith("__") and (stem.endswith("__") or left_out.is_companion(name))
    return is_known or not (is_meta or left_out.is_description(name))


def _member(entry: _Entry, tree: _Tree, reader: RangedReader, texts: dict[int, bytes]) -> Member:
    key, extension = _split(entry.name)
    start, stop = entry.start, entry.stop
    if entry.reason:
        return Member(key=key, extension=extension, reason=entry.reason, why_not=entry.why_not)
    if entry.target is not None:
        found = tree.follow(entry.name)
        if found is None:
            why_not = f"member {entry.name!r} is a symbolic link to {entry.target!r}, no file of this shard"
            return Member(key=key, extension=extension, reason="link", why_not=why_not)
        start, stop = found
    text = None
    if extension == "cls":
        text = texts[start] if start in texts else _class_text(reader, start, stop)
    return Member(key=key, extension=extension, start=start, stop=stop, text=text)


def read_class(info: ObjectInfo, member: Member) -> int:
    """Return the integer in a ``.cls`` member, ignoring a byte order mark and blanks at its ends.

    Raises:
        DatasetError: If the content is not an integer, is negative, or is longer than `MAX_CLS_BYTES`.
    """
    text = (member.text or b"").removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n\f\v\0")
    if not text.isdigit() or len(text) > 18:
        num_bytes = member.stop - member.start
        got = repr(text) if num_bytes <= MAX_CLS_BYTES else f"{num_bytes} bytes"
        raise DatasetError(
            f"shard {info.path!r}, sample {member.key!r}: .cls must hold a whole number >= 0, got {got}"
        )
    return int(text)


def _class_text(reader: RangedReader, start: int, stop: int) -> bytes:
    return reader.at(start, stop) if stop - start <= MAX_CLS_BYTES else b""


def _split(name: str) -> tuple[str, str]:
    """Return key and extension of a member: its path up to the first dot of the base name, and the rest."""
    directory, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{directory}{slash}{stem}", extension.lower()
