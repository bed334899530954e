"""Read and write the two files of a dataset: ``index.parquet``, one row a sample, and ``chain.json``.

A dataset's own digest is the SHA-256 of ``chain.json``, so it covers the index, the classes and the input
stages. All data read from a store are checked against the digest, and against caps, before use.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import DatasetError
from upriver.pipeline.chain import InputChain
from upriver.pipeline.index_pages import ColumnPages, count_pages, read_footer
from upriver.pipeline.left_out import LeftOut
from upriver.program.graph.artifact_paths import DIGEST, digest_of

SCHEMA = "upriver.dataset/1"
LAYOUTS = ("webdataset", "folders")
FORMATS = ("image", "wav", "npy", "safetensors")

MAX_CHAIN_BYTES = 2**26
"""Cap on ``chain.json``; a million class names of 60 bytes fit."""

MAX_INDEX_BYTES = 2**30
"""Cap on ``index.parquet``; at about 30 bytes a row some 30 million samples fit."""

MAX_ROWS = 2**25
"""Cap on the rows of an index: 33 million samples."""

MAX_OPENING_BYTES = 2**33
"""Cap on the memory for opening an index."""

MAX_CHAIN_VALUES = 2**21
"""Cap on the values in ``chain.json``: a million class names, each with a comma in it."""

_CHAIN_VALUE_BYTES = 128
"""Maximum memory of a value of ``chain.json``, measured on lists, objects and strings of one character."""

_ROW_BYTES = 44
"""Memory of a row in an open index, without its text: four numbers of 8 bytes, three of 4."""

_TEXT_BYTES, _TEXT_COPIES = 160, 3
"""Memory of a string while its column is decoded, and copies of its bytes; measured on distinct names."""

MAX_SAMPLE_BYTES = 2**28
"""Cap on one stored sample: an image at the default pixel cap, uncompressed, fits."""

_TEXT_COLUMNS = ["object", "etag", "name"]
_COLUMNS = pa.schema(
    [
        pa.field(name, pa.string() if name in _TEXT_COLUMNS else pa.int64(), nullable=False)
        for name in ("object", "etag", "start", "stop", "target", "name")
    ]
)


class IndexFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Digest and size of ``index.parquet``, in ``chain.json``."""

    sha256: str
    bytes: int


class IndexManifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """Content of ``chain.json``.

    Attributes:
        layout: ``webdataset`` or ``folders``.
        format: ``image``, ``wav``, ``npy`` or ``safetensors``.
        classes: Names of the targets 0, 1, …
        left_out: Possible samples that were not indexed, by reason; absent if there are none.
    """

    schema: str
    layout: str
    format: str
    count: int
    classes: tuple[str, ...]
    index: IndexFile
    stages: list[dict[str, Any]]
    left_out: dict[str, LeftOut] = {}

    def chain(self) -> InputChain:
        """Return the input chain, checked."""
        return InputChain.from_json(self.stages)


def encode_manifest(manifest: IndexManifest) -> bytes:
    """Return the bytes of ``chain.json``, with sorted keys, so that equal content has an equal digest."""
    return msgspec.json.encode(manifest, order="sorted")


def decode_manifest(data: bytes, digest: str) -> IndexManifest:
    """Read ``chain.json`` strictly.

    Raises:
        DatasetError: If the digest differs, or a field is unknown, missing or invalid.
    """
    if digest_of(data) != digest:
        raise DatasetError(f"chain.json of dataset {digest} is damaged: its SHA-256 is another one")
    if (values := _most_values(data)) > MAX_CHAIN_VALUES:
        raise DatasetError(
            f"chain.json of dataset {digest} has some {values} values; at most {MAX_CHAIN_VALUES} may be"
        )
    try:
        manifest = msgspec.json.decode(data, type=IndexManifest)
    # msgspec raises its own errors and, on some text, Python's.
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise DatasetError(f"chain.json of dataset {digest}: {exc}") from None
    problem = _why_not(manifest)
    if problem:
        raise DatasetError(f"chain.json of dataset {digest}: {problem}")
    return manifest


def chain_nbytes(data: bytes) -> int:
    """Return the maximum memory of decoding ``chain.json``, including its own bytes."""
    return len(data) + _CHAIN_VALUE_BYTES * min(_most_values(data), MAX_CHAIN_VALUES)


def _most_values(data: bytes) -> int:
    """Return a bound on the values in a JSON text, from the characters that precede a value."""
    return 1 + sum(map(data.count, (b",", b"[", b"{")))


def _why_not(manifest: IndexManifest) -> str:
    for what, allowed in (("schema", (SCHEMA,)), ("layout", LAYOUTS), ("format", FORMATS)):
        if getattr(manifest, what) not in allowed:
            return f"{what} must be {' or '.join(allowed)}, got {getattr(manifest, what)[:100]!r}"
    if manifest.count < 1:
        return f"count must be at least 1, got {manifest.count}"
    if manifest.count > MAX_ROWS:
        return f"an index has at most {MAX_ROWS} rows, got {manifest.count}"
    if not 0 < manifest.index.bytes <= MAX_INDEX_BYTES:
        return f"index.bytes must lie in 1..{MAX_INDEX_BYTES}, got {manifest.index.bytes}"
    return ""


def check_digest(digest: str) -> str:
    """Check and return a digest, as it names a directory in a store.

    Raises:
        DatasetError: If it is not 64 hexadecimal digits in lower case.
    """
    if not DIGEST.fullmatch(digest):
        raise DatasetError(f"a dataset's digest is 64 hexadecimal digits, got {digest[:100]!r}")
    return digest


def encode_index(table: pa.Table) -> bytes:
    """Return the bytes of ``index.parquet``."""
    sink = io.BytesIO()
    pq.write_table(table.cast(_COLUMNS), sink, compression="zstd", use_dictionary=["object", "etag"])
    return sink.getvalue()


def decode_index(
    data: bytes, manifest: IndexManifest, admit: Callable[[int], None] | None = None
) -> pa.Table:
    """Read ``index.parquet`` strictly.

    Text columns are returned dictionary-encoded: a few bytes that stand for many rows stay a few bytes.

    Args:
        admit: Called with the maximum bytes for opening the index, before any of it is decoded.

    Raises:
        DatasetError: If the file is not the one that ``chain.json`` names, a column or value is invalid, or
            opening needs more memory than `MAX_OPENING_BYTES`.
        Exception: If ``admit`` raises it; nothing is decoded then.
    """
    if len(data) != manifest.index.bytes or digest_of(data) != manifest.index.sha256:
        raise DatasetError("index.parquet is damaged: its size or SHA-256 is not the one in chain.json")
    try:
        footer = read_footer(data)
        _check_columns(footer, manifest)
        nbytes = len(data) + _decoded_bytes(count_pages(data, footer.metadata), manifest.count)
        if nbytes > MAX_OPENING_BYTES:
            raise DatasetError(
                f"index.parquet of {manifest.count} rows takes {nbytes} bytes of memory to open; at most "
                f"{MAX_OPENING_BYTES} are allowed"
            )
        if admit is not None:
            admit(nbytes)
        table = _decode(data)
    except (pa.ArrowException, OSError) as exc:
        raise DatasetError(f"index.parquet cannot be read: {exc}".split("\n", 1)[0]) from None
    _check_rows(table, manifest)
    return table


def _decoded_bytes(columns: Sequence[ColumnPages], rows: int) -> int:
    """Return the maximum memory of decoding, one column after another."""
    working = max(
        each.largest_bytes + _TEXT_COPIES * each.value_bytes + _TEXT_BYTES * each.values + 2 * 8 * rows
        for each in columns
    )
    return _ROW_BYTES * rows + sum(each.value_bytes for each in columns) + working


def _decode(data: bytes) -> pa.Table:
    """Read one column at a time: Arrow frees a table of strings when the last column is read."""
    columns: dict[str, pa.Array] = {}
    for name in _COLUMNS.names:
        reader = read_footer(data, read_dictionary=_TEXT_COLUMNS)
        # By this thread alone. Arrow's threads release ``data`` a moment after they have answered, which
        # aborts a process that ends meanwhile: see docs/decisions/0002-store-and-dataset.md.
        columns[name] = reader.read(columns=[name], use_threads=False)[name].combine_chunks()
    return pa.table(columns)


def _check_columns(reader: pq.ParquetFile, manifest: IndexManifest) -> None:
    stored = reader.metadata
    if stored.num_rows != manifest.count:
        raise DatasetError(f"index.parquet has {stored.num_rows} rows, chain.json counts {manifest.count}")
    rows = sum(stored.row_group(index).num_rows for index in range(stored.num_row_groups))
    if rows != manifest.count:
        raise DatasetError(f"index.parquet has row groups of {rows} rows, chain.json counts {manifest.count}")
    got = {field.name: _plain(field.type) for field in reader.schema_arrow}
    want = {field.name: field.type for field in _COLUMNS}
    for name in [*want, *got]:
        if got.get(name) != want.get(name):
            kinds = f"must be {want.get(name, 'absent')}, got {got.get(name, 'none')}"
            raise DatasetError(f"index.parquet: column {name!r} {kinds}")
    flat = [reader.schema.column(number) for number in range(stored.num_columns)]
    if len(flat) != len(want) or any(column.max_repetition_level for column in flat):
        raise DatasetError("index.parquet: a column is nested")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _check_rows(table: pa.Table, manifest: IndexManifest) -> None:
    for name in table.column_names:
        if table[name].null_count:
            raise DatasetError(f"index.parquet: column {name!r} has empty cells")
    start, stop, target = (table[name].to_numpy() for name in ("start", "stop", "target"))
    _refuse(start < 0, "start is negative", start)
    _refuse(stop < start, "stop lies before start", stop)
    _refuse(stop - start > MAX_SAMPLE_BYTES, f"a sample has more than {MAX_SAMPLE_BYTES} bytes", stop - start)
    classes = len(manifest.classes)
    _refuse((target < 0) | (target >= classes), f"target is not in 0..{classes - 1}", target)


def _refuse(wrong: np.ndarray[Any, np.dtype[np.bool_]], what: str, values: np.ndarray[Any, Any]) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        raise DatasetError(f"index.parquet, row {rows[0]}: {what} ({values[rows[0]]})")
