"""Write and read shards: immutable safetensors files that hold rows of one stretch.

A shard has four tensors: ``keys`` (16 bytes a row), ``checksums`` and ``forms`` (a number each), and
``rows``, the bytes of all rows one after the other. ``__metadata__`` holds the forms as JSON, and a checksum
of all before ``rows``. A row's checksum is seeded by stretch, form and key. So it also proves that these
belong to the row.

Rows are read by ``preadv`` and never through a mapping: a file that shrinks would kill a process that has it
mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from upriver.errors import Damaged
from upriver.features.row_form import PackedRow, Row, RowBuffer, RowForm, RowLayout, packed
from upriver.features.stretch import KEY_NBYTES, SCHEMA

BLOCK_NBYTES = 4096
"""Unit in which a file system gives room: a file takes a multiple."""

FIRST_NBYTES = 64 * 1024
"""Bytes to read at first: header and index of a thousand rows of one form."""

INDEX_NBYTES = KEY_NBYTES + 8 + 4
"""Bytes of a row in the index."""

Numbers = np.ndarray[Any, np.dtype[Any]]

_BEGIN: Final = b'{"__metadata__":{"checksum":"'
_ZEROS: Final = b"0" * 16
_LENGTH = 8
"""Bytes before the header, which hold its length."""


class OtherVersion(Exception):
    """A shard is of another version than this one reads."""


def disk_bytes(nbytes: int) -> int:
    """Return the bytes that a file takes on disk."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


# ------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class PackedShard:
    """Rows that are about to be written, as views of their memory.

    Attributes:
        stretch: Digest of the stretch.
    """

    stretch: str
    keys: tuple[bytes, ...]
    rows: tuple[PackedRow, ...]

    @property
    def rows_nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        header = self._header(list(self._forms()))
        return _LENGTH + len(header) + len(self.keys) * INDEX_NBYTES + self.rows_nbytes

    def fitting(self, room: int) -> PackedShard:
        """Return the first rows, as many as fit into ``room`` bytes on disk."""
        low, high = 0, len(self.keys)
        if disk_bytes(self.nbytes) <= room:
            return self
        while low < high:
            middle = (low + high + 1) // 2
            if disk_bytes(self.first(middle).nbytes) <= room:
                low = middle
            else:
                high = middle - 1
        return self.first(low)

    def first(self, count: int) -> PackedShard:
        """Return the first rows alone."""
        if count == len(self.keys):
            return self
        return PackedShard(self.stretch, self.keys[:count], self.rows[:count])

    def write(self, path: Path) -> None:
        """Write the file over an existing one, which may have its length already.

        Raises:
            OSError: If the disk is full or gone.
        """
        pieces = self.pieces()
        first = next(pieces)
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=2**18) as file:
            file.write(first)
            file.writelines(pieces)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the shard from the first to the last."""
        seeds = {form: _form_seed(self.stretch, form) for form in self._forms()}
        pairs = zip(self.keys, self.rows, strict=True)
        sums = [_checksum(row.parts, _seed(seeds[row.form], key)) for key, row in pairs]
        yield self._head(np.array(sums, dtype="<u8"))
        for row in self.rows:
            yield from row.parts

    def _head(self, checksums: Numbers) -> bytes:
        """Return all before the rows, with its own checksum."""
        numbers = self._forms()
        forms = [numbers[row.form] for row in self.rows]
        index = b"".join((*self.keys, checksums.tobytes(), np.array(forms, dtype="<u4").tobytes()))
        header = self._header(list(numbers))
        head = len(header).to_bytes(_LENGTH, "little") + header + index
        at = _LENGTH + len(_BEGIN)
        return head[:at] + f"{xxhash.xxh3_64_intdigest(head):016x}".encode() + head[at + 16 :]

    def _forms(self) -> dict[RowForm, int]:
        """Return the forms of all rows, each with its number."""
        return {form: number for number, form in enumerate(dict.fromkeys(row.form for row in self.rows))}

    def _header(self, forms: Sequence[RowForm]) -> bytes:
        count, end, tensors = len(self.keys), 0, {}
        for name, dtype, shape, nbytes in _tensors(count, self.rows_nbytes):
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        said = {"schema": SCHEMA, "stretch": self.stretch, "forms": msgspec.json.encode(forms).decode()}
        rest = (msgspec.json.encode(said)[1:], msgspec.json.encode(tensors)[1:])
        header = b"".join((_BEGIN, _ZEROS, b'",', rest[0], b",", rest[1]))
        return header + b" " * (-len(header) % 8)


def pack(stretch: str, rows: Mapping[bytes, Row]) -> PackedShard:
    """Return rows as a shard, without a copy where they are dense.

    Raises:
        ConfigError: If a row holds a tensor that cannot be stored.
    """
    return PackedShard(stretch, tuple(rows), tuple(packed(row) for row in rows.values()))


# ------------------------------------------------------------------------------------------ reading


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    checksum: str
    schema: str
    stretch: str
    forms: str


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: _Tensor
    checksums: _Tensor
    forms: _Tensor
    rows: _Tensor
    metadata: _Metadata = msgspec.field(name="__metadata__")


class _Version(msgspec.Struct, frozen=True):
    schema: str


class _Versioned(msgspec.Struct, frozen=True):
    metadata: _Version = msgspec.field(name="__metadata__")


ReadBytes = Callable[[int, int], bytes]
"""Returns the bytes [start, stop) of a shard."""


class ShardIndex:
    """Keys, places and checksums of a shard's rows.

    Args:
        read: Reads the head of the shard, in one or two calls.
        nbytes: Bytes of the shard.
        stretch: Digest of the stretch whose rows are wanted.

    Attributes:
        keys: Keys of the rows, in order.
        rows_nbytes: Bytes of all rows.

    Raises:
        Damaged: If header or index are damaged, or the shard is cut short.
        OtherVersion: If another version wrote it.
    """

    def __init__(self, read: ReadBytes, nbytes: int, stretch: str) -> None:
        header, index, start = _read_head(read, nbytes)
        if header.metadata.stretch != stretch:
            raise Damaged(f"it holds rows of stretch {header.metadata.stretch[:80]!r}")
        count, forms = header.keys.shape[0], _decoded(header.metadata.forms, tuple[RowForm, ...])
        self.rows_nbytes = header.rows.shape[0]
        self.keys, self._checksums, self._numbers = _columns(index, count)
        self._layouts = [RowLayout(form) for form in forms]
        self._seeds = [_form_seed(stretch, form) for form in forms]
        if count and int(self._numbers.max()) >= len(forms):
            raise Damaged("a row has no form")
        sizes = np.array([layout.nbytes for layout in self._layouts], dtype=np.int64)[self._numbers]
        stops = start + np.cumsum(sizes, dtype=np.int64)
        self._starts = stops - sizes
        if (int(stops[-1]) if count else start) != start + self.rows_nbytes:
            raise Damaged("its rows have another length than was written")

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of one row, a multiple of 64."""
        return self._layouts[int(self._numbers[number])].nbytes

    def memory_nbytes_of(self, number: int) -> int:
        """Return the bytes of one row as tensors: more if there are gaps between elements."""
        return self._layouts[int(self._numbers[number])].memory_nbytes

    def start_of(self, number: int) -> int:
        """Return the place of one row's first byte in the shard."""
        return int(self._starts[number])

    def build(self, number: int, buffer: RowBuffer, start: int) -> Row:
        """Return one row whose bytes a buffer holds from ``start`` on, and check them.

        Raises:
            Damaged: If the row differs from the one that was written.
        """
        form = int(self._numbers[number])
        layout = self._layouts[form]
        seed = _seed(self._seeds[form], self.keys[number])
        found = xxhash.xxh3_64_intdigest(buffer.array[start : start + layout.nbytes].data, seed=seed)
        if found != int(self._checksums[number]):
            raise Damaged("a row has another checksum than was written")
        return layout.build(buffer, start)


class Shard(ShardIndex):
    """A shard on disk that can be read: its index in memory, its rows in the file.

    Raises:
        Damaged: If header or index are damaged, or the file is cut short.
        OtherVersion: If another version wrote it.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path, file: int, stretch: str) -> None:
        super().__init__(partial(_pread, file), os.fstat(file).st_size, stretch)
        self.path = path

    def read(self, file: int, number: int, buffer: RowBuffer, start: int) -> Row:
        """Read one row into memory from ``start`` on, and check it there.

        Raises:
            Damaged: If the row differs from the one that was written, or the file is cut short.
            OSError: If the file cannot be read.
        """
        _fill(file, buffer.array[start : start + self.nbytes_of(number)], self.start_of(number))
        return self.build(number, buffer, start)


def _read_head(read: ReadBytes, nbytes: int) -> tuple[_Header, bytes, int]:
    """Return header and index, checked, and the place of the first row."""
    data = read(0, min(nbytes, FIRST_NBYTES))
    length = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    text = _upto(read, data, length, nbytes)[_LENGTH:]
    version = _decoded(text, _Versioned).metadata.schema
    if version != SCHEMA:
        raise OtherVersion(f"its schema is {version[:80]!r}; this version reads {SCHEMA!r}")
    header: _Header = _decoded(text, _Header)
    count = max(0, header.keys.shape[0] if header.keys.shape else 0)
    start = length + count * INDEX_NBYTES
    head = _upto(read, data, start, nbytes)
    _check_sum(head)
    said = [(name, each.dtype, list(each.shape)) for name in _NAMES for each in [getattr(header, name)]]
    if said != [tensor[:3] for tensor in _tensors(count, nbytes - start)]:
        raise Damaged("it has another length than was written")
    return header, head[length:], start


def _upto(read: ReadBytes, data: bytes, stop: int, nbytes: int) -> bytes:
    """Return the first bytes of a shard, of which some have been read."""
    if not _LENGTH <= stop <= nbytes:
        raise Damaged("it is cut short")
    if stop > len(data):
        data += read(len(data), stop)
    return data[:stop]


def _pread(file: int, start: int, stop: int) -> bytes:
    data = np.empty(stop - start, dtype=np.uint8)
    _fill(file, data, start)
    return data.tobytes()


def _check_sum(whole: bytes) -> None:
    at = _LENGTH + len(_BEGIN)
    blank = xxhash.xxh3_64_intdigest(whole[:at] + _ZEROS + whole[at + 16 :])
    if whole[_LENGTH:at] != _BEGIN or whole[at : at + 16] != f"{blank:016x}".encode():
        raise Damaged("its index has another checksum than was written")


def _decoded(data: bytes | str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"its header is damaged: {error}") from None


def _columns(index: bytes, count: int) -> tuple[list[bytes], Numbers, Numbers]:
    """Return keys, checksums and numbers of forms."""
    stop = count * KEY_NBYTES
    keys = [index[start : start + KEY_NBYTES] for start in range(0, stop, KEY_NBYTES)]
    return (
        keys,
        np.frombuffer(index, "<u8", count, stop),
        np.frombuffer(index, "<u4", count, stop + 8 * count),
    )


_NAMES = ("keys", "checksums", "forms", "rows")


def _tensors(count: int, rows_nbytes: int) -> list[tuple[str, str, list[int], int]]:
    """Return name, type, shape and bytes of a shard's tensors, in order."""
    shapes = ([count, KEY_NBYTES], [count], [count], [rows_nbytes])
    sizes = (count * KEY_NBYTES, count * 8, count * 4, rows_nbytes)
    return list(zip(_NAMES, ("U8", "U64", "U32", "U8"), shapes, sizes, strict=True))


def _fill(file: int, target: Numbers, start: int) -> None:
    """Read until the memory is full.

    Raises:
        Damaged: If the file ends before.
    """
    while len(target):
        count = os.preadv(file, [target.data], start)
        if count == 0:
            raise Damaged("it is cut short")
        target, start = target[count:], start + count


def _form_seed(stretch: str, form: RowForm) -> int:
    return xxhash.xxh3_64_intdigest(stretch.encode() + msgspec.json.encode(form))


def _seed(form_seed: int, key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key, seed=form_seed)


def _checksum(parts: Sequence[memoryview], seed: int) -> int:
    digest = xxhash.xxh3_64(seed=seed)
    for part in parts:
        digest.update(part)
    return digest.intdigest()
