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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        seeds = {form: _form_seed(self.stretch, form) for form in self._forms()}
        pairs = zip(self.keys, self.rows, strict=True)
        sums = [_checksum(row.parts, _seed(seeds[row.form], key)) for key, row in pairs]
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=2**18) as file:
            file.write(self._head(np.array(sums, dtype="<u8")))
            for row in self.rows:
                for part in row.parts:
                    file.write(part)

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


class Shard:
    """A shard that can be read: its index in memory, its rows in the file.

    Attributes:
        keys: Keys of the rows, in order.
        rows_nbytes: Bytes of all rows.

    Raises:
        Damaged: If header or index are damaged, or the file is cut short.
        OtherVersion: If another version wrote it.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path, file: int, stretch: str) -> None:
        header, index, start = _read_head(file)
        if header.metadata.stretch != stretch:
            raise Damaged(f"it holds rows of stretch {header.metadata.stretch[:80]!r}")
        count, forms = header.keys.shape[0], _decoded(header.metadata.forms, tuple[RowForm, ...])
        self.path, self.rows_nbytes = path, header.rows.shape[0]
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

    def read(self, file: int, number: int, buffer: RowBuffer, start: int) -> Row:
        """Read one row into memory from ``start`` on, and check it there.

        Raises:
            Damaged: If the row differs from the one that was written, or the file is cut short.
            OSError: If the file cannot be read.
        """
        form = int(self._numbers[number])
        layout = self._layouts[form]
        target = buffer.array[start : start + layout.nbytes]
        _fill(file, target, int(self._starts[number]))
        seed = _seed(self._seeds[form], self.keys[number])
        if xxhash.xxh3_64_intdigest(target.data, seed=seed) != int(self._checksums[number]):
            raise Damaged("a row has another checksum than was written")
        return layout.build(buffer, start)


def _read_head(file: int) -> tuple[_Header, bytes, int]:
    """Return header and index, checked, and the place of the first row."""
    size = os.fstat(file).st_size
    data = os.pread(file, FIRST_NBYTES, 0)
    length = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    text = _upto(file, data, length, size)[_LENGTH:]
    version = _decoded(text, _Versioned).metadata.schema
    if version != SCHEMA:
        raise OtherVersion(f"its schema is {version[:80]!r}; this version reads {SCHEMA!r}")
    header: _Header = _decoded(text, _Header)
    count = max(0, header.keys.shape[0] if header.keys.shape else 0)
    start = length + count * INDEX_NBYTES
    head = _upto(file, data, start, size)
    _check_sum(head)
    said = [(name, each.dtype, list(each.shape)) for name in _NAMES for each in [getattr(header, name)]]
    if said != [tensor[:3] for tensor in _tensors(count, size - start)]:
        raise Damaged("it has another length than was written")
    return header, head[length:], start


def _upto(file: int, data: bytes, stop: int, size: int) -> bytes:
    """Return the first bytes of a file, of which some have been read."""
    if not _LENGTH <= stop <= size:
        raise Damaged("it is cut short")
    if stop > len(data):
        rest = np.empty(stop - len(data), dtype=np.uint8)
        _fill(file, rest, len(data))
        data += rest.tobytes()
    return data[:stop]


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
