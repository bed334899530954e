"""The two files of a dataset: ``index.parquet``, one row a sample, and ``chain.json``.

A dataset's own digest is the SHA-256 of ``chain.json``, so it covers the index, the classes and the input
stages. Everything read from a store is checked against it, and against caps, before it is used.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from upriver.errors import DatasetError
from upriver.pipeline.chain import InputChain
from upriver.pipeline.left_out import LeftOut

SCHEMA = "upriver.dataset/1"
LAYOUTS = ("webdataset", "folders")
FORMATS = ("image", "wav", "npy", "safetensors")

MAX_CHAIN_BYTES = 2**26
"""Cap on ``chain.json``; a million class names of 60 bytes fit."""

MAX_INDEX_BYTES = 2**30
"""Cap on ``index.parquet``; at about 30 bytes a row some 30 million samples fit."""

MAX_UNPACKED_BYTES = 2**33
"""Cap on what the index unpacks to."""

MAX_SAMPLE_BYTES = 2**28
"""Cap on one stored sample: an image at the default pixel cap, uncompressed, fits."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEXT_COLUMNS = ("object", "etag", "name")
_COLUMNS = pa.schema(
    [
        pa.field("object", pa.string(), nullable=False),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("target", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
    ]
)


class IndexFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``chain.json`` says of ``index.parquet``."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """The content of ``chain.json``.

    Attributes:
        schema: Version of this form.
        layout: ``webdataset`` or ``folders``.
        format: ``image``, ``wav``, ``npy`` or ``safetensors``.
        count: Number of samples.
        classes: Names of the targets 0, 1, …
        index: Size and digest of the index.
        stages: The input chain.
        left_out: What may be a sample and was not indexed, by reason; absent where there is nothing.
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
        """The input chain, checked."""
        return InputChain.from_json(self.stages)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``chain.json``: sorted keys, so that equal content has an equal digest."""
    return msgspec.json.encode(manifest, order="sorted")


def decode_manifest(data: bytes, digest: str) -> Manifest:
    """Read ``chain.json`` strictly.

    Raises:
        DatasetError: If it does not have that digest, or a field is unknown, missing or not what it may be.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise DatasetError(f"chain.json of dataset {digest} is damaged: its SHA-256 is another one")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as exc:
        raise DatasetError(f"chain.json of dataset {digest}: {exc}") from None
    problem = _why_not(manifest)
    if problem:
        raise DatasetError(f"chain.json of dataset {digest}: {problem}")
    return manifest


def _why_not(manifest: Manifest) -> str:
    for what, allowed in (("schema", (SCHEMA,)), ("layout", LAYOUTS), ("format", FORMATS)):
        if getattr(manifest, what) not in allowed:
            return f"{what} must be {' or '.join(allowed)}, got {getattr(manifest, what)[:100]!r}"
    if manifest.count < 1:
        return f"count must be at least 1, got {manifest.count}"
    if not 0 < manifest.index.bytes <= MAX_INDEX_BYTES:
        return f"index.bytes must lie in 1..{MAX_INDEX_BYTES}, got {manifest.index.bytes}"
    return ""


def check_digest(digest: str) -> str:
    """A digest names a directory in a store, so nothing else may pass for one.

    Raises:
        DatasetError: If it is not 64 hexadecimal digits in lower case.
    """
    if not _DIGEST.fullmatch(digest):
        raise DatasetError(f"a dataset's digest is 64 hexadecimal digits, got {digest[:100]!r}")
    return digest


def encode_index(table: pa.Table) -> bytes:
    """The bytes of ``index.parquet``."""
    sink = io.BytesIO()
    pq.write_table(table.cast(_COLUMNS), sink, compression="zstd", use_dictionary=["object", "etag"])
    return sink.getvalue()


def decode_index(data: bytes, manifest: Manifest) -> pa.Table:
    """Read ``index.parquet`` strictly.

    Text columns come back dictionary-encoded: a few bytes that stand for many rows stay a few bytes.

    Raises:
        DatasetError: If it is not the file ``chain.json`` names, or a column or value is not what it may be.
    """
    if len(data) != manifest.index.bytes or hashlib.sha256(data).hexdigest() != manifest.index.sha256:
        raise DatasetError("index.parquet is damaged: its size or SHA-256 is not the one in chain.json")
    try:
        _check_columns(pq.ParquetFile(pa.BufferReader(data), pre_buffer=False), manifest)
        # By this thread alone: a process that ends while Arrow starts its threads is aborted.
        whole = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_TEXT_COLUMNS), pre_buffer=False)
        table = whole.read(use_threads=False)
    except (pa.ArrowException, OSError) as exc:
        raise DatasetError(f"index.parquet cannot be read: {exc}".split("\n", 1)[0]) from None
    _check_rows(table, manifest)
    return table


def _check_columns(reader: pq.ParquetFile, manifest: Manifest) -> None:
    stored = reader.metadata
    if stored.num_rows != manifest.count:
        raise DatasetError(f"index.parquet has {stored.num_rows} rows, chain.json counts {manifest.count}")
    unpacked = sum(stored.row_group(index).total_byte_size for index in range(stored.num_row_groups))
    if unpacked > MAX_UNPACKED_BYTES:
        raise DatasetError(
            f"index.parquet unpacks to {unpacked} bytes; at most {MAX_UNPACKED_BYTES} are allowed"
        )
    got = {field.name: _plain(field.type) for field in reader.schema_arrow}
    want = {field.name: field.type for field in _COLUMNS}
    for name in [*want, *got]:
        if got.get(name) != want.get(name):
            kinds = f"must be {want.get(name, 'absent')}, got {got.get(name, 'none')}"
            raise DatasetError(f"index.parquet: column {name!r} {kinds}")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _check_rows(table: pa.Table, manifest: Manifest) -> None:
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
