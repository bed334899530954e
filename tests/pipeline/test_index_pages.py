"""Check the pages of an index against their own headers, whatever the footer states."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.making import of_one_value
from upriver.errors import DatasetError
from upriver.pipeline.index_pages import MAX_FOOTER_BYTES, MAX_FOOTER_ITEMS, count_pages
from upriver.pipeline.manifest import (
    MAX_ROWS,
    SCHEMA,
    IndexFile,
    IndexManifest,
    decode_index,
    decode_manifest,
    encode_index,
    encode_manifest,
)

ROWS = 500


def table(rows: int = ROWS, **columns: Any) -> pa.Table:
    numbers = np.arange(rows)
    names = [f"folder/{number:05d}.npy" for number in numbers]
    usual = {"object": names, "etag": [f'"{number}"' for number in numbers], "start": numbers}
    return pa.table(usual | {"stop": numbers + 9, "target": numbers % 3, "name": names} | columns)


def written(content: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(content, sink, **options)
    return sink.getvalue()


def manifest_of(data: bytes, count: int = ROWS) -> IndexManifest:
    index = IndexFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    return IndexManifest(
        schema=SCHEMA,
        layout="folders",
        format="npy",
        count=count,
        classes=("a", "b", "c"),
        index=index,
        stages=[],
    )


def admitted(data: bytes, count: int = ROWS) -> tuple[pa.Table, int]:
    asked: list[int] = []
    found = decode_index(data, manifest_of(data, count), asked.append)
    (nbytes,) = asked
    return found, nbytes


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_dictionary": False}])
def test_an_index_of_any_writer_is_read_as_it_was_written(options: dict[str, Any]) -> None:
    found, nbytes = admitted(written(table(), **options))
    assert found.to_pydict() == table().to_pydict()
    assert nbytes > found.nbytes


def test_a_few_bytes_that_stand_for_many_rows_are_admitted_as_those_rows() -> None:
    data = of_one_value(1 << 20)
    assert len(data) < 1 << 16
    found, nbytes = admitted(data, 1 << 20)
    assert nbytes > 36 << 20 > len(data)
    assert found.nbytes <= nbytes


def test_rows_beyond_the_cap_are_refused_before_the_index_is_read() -> None:
    chain = encode_manifest(manifest_of(b"never read", MAX_ROWS + 1))
    with pytest.raises(DatasetError, match=f"an index has at most {MAX_ROWS} rows, got {MAX_ROWS + 1}"):
        decode_manifest(chain, hashlib.sha256(chain).hexdigest())


def test_nothing_is_decoded_that_was_not_admitted() -> None:
    data, before = of_one_value(1 << 20), pa.total_allocated_bytes()

    def refuse(nbytes: int) -> None:
        assert pa.total_allocated_bytes() - before < 1 << 20
        raise MemoryError(nbytes)

    with pytest.raises(MemoryError):
        decode_index(data, manifest_of(data, 1 << 20), refuse)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"use_dictionary": False, "column_encoding": {"name": "DELTA_BYTE_ARRAY"}}, "a page of encoding 7"),
        (
            {"use_dictionary": False, "column_encoding": {"start": "DELTA_BINARY_PACKED"}},
            "a page of encoding 5",
        ),
        ({"data_page_version": "2.0"}, "that is not known"),
        ({"row_group_size": 1}, "limit"),
    ],
)
def test_pages_that_upriver_does_not_write_are_refused(options: dict[str, Any], problem: str) -> None:
    """The first case decompresses one byte to as many as its neighbour has."""
    data = written(table(), **options)
    with pytest.raises(DatasetError, match=f"cannot be read.*{problem}"):
        admitted(data)


def test_a_long_footer_is_refused() -> None:
    data = written(table().replace_schema_metadata({"a": "x" * MAX_FOOTER_BYTES}))
    with pytest.raises(DatasetError, match=rf"its footer has \d+ bytes; at most {MAX_FOOTER_BYTES}"):
        admitted(data)
    assert MAX_ROWS <= MAX_FOOTER_ITEMS << 20  # rows in a row group, as Arrow writes them


def test_the_walk_finds_every_page() -> None:
    data = written(
        table(), use_dictionary=False, compression="none", data_page_size=1000, write_batch_size=10
    )
    pages = count_pages(data, pq.ParquetFile(io.BytesIO(data)).metadata)
    text = sum(len(name.encode()) + 4 for name in table()["name"].to_pylist())
    assert [each.values for each in pages] == [ROWS] * 6
    assert pages[5].value_bytes == text + 6 * pages[5].pages  # and the null rows, six bytes a page
    assert all(each.pages > 3 and each.largest_bytes < 2000 for each in pages)


def patched(size: int) -> bytes:
    """Return an index whose first dictionary page states another decompressed size."""
    data = written(table(), compression="zstd")
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    at = column.dictionary_page_offset
    head = data[at : at + 8]
    assert head[:2] == b"\x15\x04" and head[2] == 0x15  # page type 2, then the uncompressed size
    width = next(number for number in range(1, 6) if head[2 + number] < 128)
    number, varint = size << 1, bytearray()
    for _ in range(width - 1):
        varint.append(number & 127 | 128)
        number >>= 7
    varint.append(number)
    assert number < 128, "the patch has as many bytes as what it replaces"
    return data[: at + 3] + bytes(varint) + data[at + 3 + width :]


def test_what_a_page_says_of_itself_counts_and_not_what_the_footer_says() -> None:
    """The decoder allocates as much memory for a page as the page's header states."""
    found, usual = admitted(patched(ROWS * (4 + len("folder/00000.npy"))))
    assert found.to_pydict() == table().to_pydict()
    said: list[int] = []
    lie = patched((1 << 20) - 1)
    with pytest.raises(DatasetError, match="cannot be read"):
        decode_index(lie, manifest_of(lie), said.append)
    assert said[0] - usual > 1 << 20


@given(at=st.integers(0, 1 << 30), byte=st.integers(0, 255))
def test_whatever_is_changed_is_refused_or_takes_no_more_than_was_admitted(at: int, byte: int) -> None:
    good = encode_index(table(50))
    at %= len(good)
    data = good[:at] + bytes([byte]) + good[at + 1 :]
    asked: list[int] = []
    before = pa.total_allocated_bytes()
    try:
        found = decode_index(data, manifest_of(data, 50), asked.append)
    except DatasetError:
        return
    assert found.num_rows == 50
    assert pa.total_allocated_bytes() - before <= asked[0] < 1 << 20
