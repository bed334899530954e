"""Read the sizes inside a Parquet file from its page headers, on which decoding depends.

The footer only claims how much a file holds. Each page's own header gives the number of its values and of its
decompressed bytes, at which the decoder stops. The headers are Thrift structs in the compact protocol, as in
``parquet.thrift`` of apache/parquet-format. Pages of kinds and encodings that upriver does not write are
refused: some of them unpack a few bytes to many values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import DatasetError

MAX_FOOTER_BYTES = 2**20
"""Cap on the footer: 32 row groups of six columns, with statistics of 4 KiB each, need less."""

MAX_FOOTER_ITEMS = 64
"""Cap on each list in the footer; 2**25 rows make 32 row groups, and other lists are shorter."""

MAX_PAGES = 2**14
"""Cap on a column's pages; 2**25 rows make some 1,700 of 20,000 values, as Arrow writes them."""

_MAX_HEADER_BYTES = 2**16
_DATA, _DICTIONARY = 0, 2
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_ENCODINGS = {
    _DATA: (_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY),
    _DICTIONARY: (_PLAIN, _PLAIN_DICTIONARY),
}
_TRUE, _FALSE, _INT32, _INT64, _BINARY, _STRUCT = 1, 2, 5, 6, 8, 12

_Kinds = Mapping[int, "int | _Kinds"]
_STATISTICS: _Kinds = {
    **dict.fromkeys((1, 2, 5, 6), _BINARY),
    **dict.fromkeys((3, 4), _INT64),
    **dict.fromkeys((7, 8), _TRUE),
}
_DATA_HEADER: _Kinds = {**dict.fromkeys((1, 2, 3, 4), _INT32), 5: _STATISTICS}
_DICTIONARY_HEADER: _Kinds = {1: _INT32, 2: _INT32, 3: _TRUE}
_HEADER: _Kinds = {**dict.fromkeys((1, 2, 3, 4), _INT32), 5: _DATA_HEADER, 7: _DICTIONARY_HEADER}


@dataclass(slots=True)
class ColumnPages:
    """Total sizes of a column's pages.

    Attributes:
        value_bytes: Uncompressed bytes of pages that hold values, not indices into a dictionary.
        values: Maximum number of values in those pages.
        largest_bytes: Uncompressed bytes of the largest page.
    """

    value_bytes: int = 0
    values: int = 0
    largest_bytes: int = 0
    pages: int = 0


def read_footer(data: bytes, **options: object) -> pq.ParquetFile:
    """Open a Parquet file whose footer is short.

    Raises:
        DatasetError: If the footer is longer than `MAX_FOOTER_BYTES`.
        pa.ArrowException: If the file is no Parquet file, or a list in its footer is too long.
    """
    (footer_bytes,) = struct.unpack("<I", data[-8:-4]) if len(data) >= 12 else (0,)
    if footer_bytes > MAX_FOOTER_BYTES:
        raise _wrong(f"its footer has {footer_bytes} bytes; at most {MAX_FOOTER_BYTES} are allowed")
    return pq.ParquetFile(
        pa.BufferReader(data),
        pre_buffer=False,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_ITEMS,
        **options,
    )


def count_pages(data: bytes, file: pq.FileMetaData) -> list[ColumnPages]:
    """Walk every page header of each column, and check that the footer agrees.

    Raises:
        DatasetError: If footer and pages differ, or upriver does not write such pages.
    """
    found = [ColumnPages() for _ in range(file.num_columns)]
    for group_number in range(file.num_row_groups):
        group = file.row_group(group_number)
        for number, pages in enumerate(found):
            column = group.column(number)
            if column.num_values != group.num_rows:
                raise _wrong(f"a column has {column.num_values} values in {group.num_rows} rows")
            _count_column(data, column, pages)
    return found


def _count_column(data: bytes, column: pq.ColumnChunkMetaData, found: ColumnPages) -> None:
    first, dictionary = column.data_page_offset, column.dictionary_page_offset
    at = first if dictionary is None or not 0 < dictionary < first else dictionary
    stop = at + column.total_compressed_size
    if not 4 <= at <= stop <= len(data):
        raise _wrong("a column lies outside the file")
    is_text, left = column.physical_type == "BYTE_ARRAY", column.num_values
    while at < stop:
        found.pages += 1
        if found.pages > MAX_PAGES:
            raise _wrong(f"a column has more than {MAX_PAGES} pages")
        reader = _Compact(data, at, min(stop, at + _MAX_HEADER_BYTES))
        header = reader.struct(_HEADER)
        unpacked, stored = _number(header, 2), _number(header, 3)
        at = reader.at + stored
        if at > stop:
            raise _wrong("a page lies outside its column")
        values, encoding = _values(header)
        if _number(header, 1) == _DATA:
            left -= values
        elif values * (4 if is_text else 8) > unpacked:
            raise _wrong("a dictionary has fewer values than it says")
        found.largest_bytes = max(found.largest_bytes, unpacked)
        if _number(header, 1) == _DICTIONARY or encoding == _PLAIN:
            found.value_bytes += unpacked
            found.values += min(values, unpacked // 4)
    if left:
        raise _wrong("its pages hold another number of values than its footer says")


def _values(header: Mapping[int, object]) -> tuple[int, int]:
    """Return the number of values of a page, and their encoding."""
    kind = _number(header, 1)
    inner = header.get({_DATA: 5, _DICTIONARY: 7}.get(kind, 0))
    if not isinstance(inner, dict) or len(header.keys() & {5, 7}) != 1:
        raise _wrong(f"it has a page of kind {kind}")
    encoding, levels = _number(inner, 2), {_RLE}
    if kind == _DATA:
        levels = {_number(inner, 3), _number(inner, 4)}
    if encoding not in _ENCODINGS[kind] or levels != {_RLE}:
        raise _wrong(f"it has a page of encoding {encoding}")
    return _number(inner, 1), encoding


def _number(fields: Mapping[int, object], number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise _wrong("it has a page without a size")
    return value


def _wrong(problem: str) -> DatasetError:
    return DatasetError(f"index.parquet cannot be read: {problem}")


class _Compact:
    """Reader of Thrift structs of known fields."""

    def __init__(self, data: bytes, at: int, stop: int) -> None:
        self._data, self.at, self._stop = data, at, stop

    def struct(self, kinds: _Kinds) -> dict[int, object]:
        """Return the fields of a struct by their numbers, which must increase: no field appears twice."""
        fields: dict[int, object] = {}
        last = 0
        while (head := self._byte()) != 0:
            number, kind = last + (head >> 4), head & 15
            if number == last:
                number = self._signed()
            wanted = kinds.get(number)
            is_kind = kind == (_STRUCT if isinstance(wanted, Mapping) else wanted)
            if number <= last or not (is_kind or (wanted == _TRUE and kind == _FALSE)):
                raise _wrong("a page's header has a field that is not known")
            fields[number], last = self._value(kind, wanted), number
        return fields

    def _value(self, kind: int, wanted: int | _Kinds | None) -> object:
        if isinstance(wanted, Mapping):
            return self.struct(wanted)
        if kind == _BINARY:
            self._skip(self._varint())
            return None
        return self._signed() if kind in (_INT32, _INT64) else kind == _TRUE

    def _signed(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise _wrong("a page's header has a number without an end")

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.at - 1]

    def _skip(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > self._stop:
            raise _wrong("a page's header has no end")
