"""Publish weights for cold starts: a safetensors file in execution order, and its manifest.

The file is the one of :mod:`upriver.program.graph.weights_file`: tensors in the given order, which is that of
execution, each on a 64-byte boundary, with named padding between. Any safetensors reader reads it. The
manifest is a JSON file. It gives each tensor's position in the object, each chunk's CRC32C, the aliases of
tied tensors and the object's ETag. If the work was counted, it also gives the work from each tensor to the
next. With the manifest alone a loader can request weights, and check any tensor without bytes of others.

A reader does not trust the manifest. Order, types and shapes determine each byte position and each byte of
the header. The reader compares the manifest's positions with these, and the object's header byte for byte. It
never allocates a size only because a manifest claims it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from crc32c import crc32c

from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.roofline import NOTHING, Execution
from upriver.errors import ConfigError, ObjectChanged, ProgramError, StoreError
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.fetch import get_at_most
from upriver.program.graph.schema import DTYPES, Count
from upriver.program.graph.weights_file import (
    ALIGNMENT,
    LENGTH_BYTES,
    TensorEntry,
    head_of,
    is_reserved,
    place_of,
    raw_bytes,
)
from upriver.store import Store

if TYPE_CHECKING:
    from upriver.coldstart.format.checkpoint import TensorLocation

log = logging.getLogger(__name__)

SCHEMA = "upriver.weights/1"

ENDING = ".safetensors"

CHUNK_BYTES = 1 << 20
"""Bytes that are fetched again after a wrong checksum. One checksum a chunk takes a few kB for 1 GB."""

MOST_CHUNK_BYTES = 64 << 20

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the file, in row-major order.

    Attributes:
        dtype: One of :data:`~upriver.program.graph.schema.DTYPES`.
        start: First byte, counted from the start of the object.
        stop: Byte after the last one.
        crc32c: Checksum of each chunk, counted from ``start``; the last chunk may be shorter.
    """

    name: str
    dtype: str
    shape: list[Count]
    start: Count
    stop: Count
    crc32c: list[Checksum]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest of a weights file.

    Attributes:
        etag: ETag of the object when it was published; empty if the store has none.
        chunk_bytes: Bytes of a tensor that one checksum covers.
        tensors: Tensors in file order, which is that of execution.
        ties: Alias of a tensor to its name in ``tensors``.
        execution: Work between the first use of each tensor and that of the next one; absent if not counted.
    """

    schema: str
    etag: str
    nbytes: Count
    chunk_bytes: Count
    tensors: list[StoredTensor]
    ties: dict[str, str]
    execution: list[Execution] | msgspec.UnsetType = msgspec.UNSET

    def encode(self) -> bytes:
        """Return the canonical bytes of the manifest."""
        return msgspec.json.encode(self)

    def head(self) -> bytes:
        """Return the first bytes of the object: the header's length and the safetensors header.

        Raises:
            ProgramError: If no such file can exist.
        """
        return head_of(_forms(self.tensors))[0]


def manifest_path(path: str) -> str:
    """Return the path of a weights file's manifest.

    Raises:
        ConfigError: If the path cannot name a weights file.
    """
    if not path.removesuffix(ENDING).rpartition("/")[2] or not path.endswith(ENDING):
        raise ConfigError(f"a weights file is called NAME{ENDING}, got {path[:200]!r}")
    return f"{path.removesuffix(ENDING)}.manifest.json"


# ----------------------------------------------------------------------------------------- writing


def publish(
    tensors: Mapping[str, torch.Tensor],
    store: Store,
    path: str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    tied: bool = True,
    execution: Mapping[str, Execution] | None = None,
    caps: GraphCaps = DEFAULT_CAPS,
) -> Manifest:
    """Write a weights file and then its manifest.

    The file is never whole in memory. Memory holds the parts in flight, and one copy of a tensor that is not
    contiguous in main memory.

    Args:
        tensors: State dict in execution order. Its tensors must not change during the call.
        chunk_bytes: Bytes of a tensor that one checksum covers.
        tied: If true, a tensor with several names is stored once, under the first; else under each, as a
            program's weights are.
        execution: Work between the first use of a tensor and that of the next one, by name; None if not
            counted.

    Raises:
        ConfigError: If the path cannot name a weights file.
        ProgramError: If a tensor cannot be stored in such a file, or exceeds the caps.
        ObjectChanged: If another client was seen to write the same object. Publish again then.
        StoreError: If the store refuses. No manifest is left that contradicts the object. A new object
            without a manifest is deleted, if the store says that it is new.
    """
    beside = manifest_path(path)
    stored, ties = _untied(tensors, tied=tied)
    _check_chunk_bytes(chunk_bytes)
    planned = _planned(stored, ties, chunk_bytes)
    if execution is not None:
        planned = msgspec.structs.replace(planned, execution=_executions(planned, execution))
    _check(planned, caps)
    sums: list[list[int]] = []
    is_new = _is_new(store, path)
    store.put_stream(path, _pieces(planned, stored, sums))
    info = store.head(path)
    manifest = msgspec.structs.replace(_summed(planned, sums), etag=info.etag)
    try:
        if info.size == planned.nbytes:
            store.put(beside, manifest.encode())
    except BaseException as error:
        with suppress(StoreError):  # another client may have published it meanwhile
            if is_new and store.head(path).etag == info.etag and not store.exists(beside):
                store.delete(path)
        if isinstance(error, StoreError) and not is_new:
            raise StoreError(
                f"{error}; {path!r} is written already: publish it again, until then it does not load"
            ) from error
        raise
    if info.size != planned.nbytes or store.head(path).etag != info.etag:
        raise ObjectChanged(
            f"object {path!r} in store {store.name!r} is not the one that was written: somebody else wrote "
            "it; publish again"
        )
    return manifest


def _is_new(store: Store, path: str) -> bool:
    """Return True if the store says that the object does not exist; it may refuse to say so."""
    try:
        return not store.exists(path)
    except StoreError:
        return False


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has dense elements that can be written.

    Raises:
        ProgramError: If it has none.
    """
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "is on the meta device" if tensor.is_meta else f"is of layout {tensor.layout}"
        raise ProgramError(f"weight {name!r} {kind}: it has no dense elements to write")


def describe(
    tensors: Mapping[str, torch.Tensor], digest: str, *, caps: GraphCaps = DEFAULT_CAPS
) -> Manifest | None:
    """Return the manifest of an existing weights file, without its ETag.

    Returns:
        The manifest, or None if the file has another layout than this module writes.

    Raises:
        ProgramError: If the content exceeds the caps.
    """
    planned = _planned(dict(tensors), {}, CHUNK_BYTES)
    _check(planned, caps)
    sums: list[list[int]] = []
    folded = hashlib.sha256()
    for piece in _pieces(planned, tensors, sums):
        folded.update(piece)
    return _summed(planned, sums) if folded.hexdigest() == digest else None


def _summed(planned: Manifest, sums: Sequence[list[int]]) -> Manifest:
    """Return the manifest with the checksums of its tensors."""
    tensors = [
        msgspec.structs.replace(tensor, crc32c=crcs)
        for tensor, crcs in zip(planned.tensors, sums, strict=True)
    ]
    return msgspec.structs.replace(planned, tensors=tensors)


def _untied(
    tensors: Mapping[str, torch.Tensor], *, tied: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to store, and the aliases of tied tensors."""
    stored: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        place = place_of(tensor)
        if tied and tensor.numel() and first.setdefault(place, name) != name:
            ties[name] = first[place]
        else:
            stored[name] = tensor
    return stored, ties


def _planned(stored: Mapping[str, torch.Tensor], ties: dict[str, str], chunk_bytes: int) -> Manifest:
    """Return a manifest without checksums and ETag."""
    head, entries = head_of(
        (name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in stored.items()
    )
    tensors = [
        StoredTensor(
            name=entry.name,
            dtype=entry.dtype,
            shape=list(entry.shape),
            start=len(head) + entry.start,
            stop=len(head) + entry.stop,
            crc32c=[0] * _chunks(entry, chunk_bytes),
        )
        for entry in entries
    ]
    nbytes = len(head) + (entries[-1].stop + entries[-1].gap if entries else 0)
    return Manifest(
        schema=SCHEMA, etag="", nbytes=nbytes, chunk_bytes=chunk_bytes, tensors=tensors, ties=ties
    )


def _executions(planned: Manifest, execution: Mapping[str, Execution]) -> list[Execution]:
    """Return the work of each stored tensor. The aliases of a tensor add up."""
    found = {tensor.name: NOTHING for tensor in planned.tensors}
    for name, each in execution.items():
        stored = planned.ties.get(name, name)
        found[stored] = found[stored].plus(each)
    return list(found.values())


def _pieces(
    planned: Manifest, stored: Mapping[str, torch.Tensor], sums: list[list[int]]
) -> Iterator[bytes | memoryview]:
    """Yield the file in pieces, and append the checksums of the tensors yielded so far to ``sums``."""
    yield planned.head()
    for tensor in planned.tensors:
        raw = raw_bytes(stored[tensor.name])
        crcs: list[int] = []
        sums.append(crcs)
        for start in range(0, len(raw), planned.chunk_bytes):
            piece = raw[start : start + planned.chunk_bytes]
            crcs.append(crc32c(piece))
            yield piece
        if gap := -tensor.stop % ALIGNMENT:
            yield bytes(gap)


# ----------------------------------------------------------------------------------------- reading


class _Head(msgspec.Struct):
    schema: str


def decode(data: bytes | memoryview, caps: GraphCaps = DEFAULT_CAPS) -> Manifest:
    """Parse an untrusted manifest.

    Raises:
        ProgramError: If the data is no manifest of this schema, describes an impossible file, or exceeds the
            caps. The message names the field.
    """
    if len(data) > caps.header_bytes:
        raise ProgramError(f"manifest of {len(data)} bytes; at most {caps.header_bytes} are allowed")
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema != SCHEMA:
            raise ProgramError(f"manifest of schema {schema[:80]!r}; this version reads {SCHEMA!r}")
        manifest = msgspec.json.decode(data, type=Manifest)
        canonical = manifest.encode() == data
    # msgspec raises its own errors and, for some text, Python's.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"manifest: {error}") from None
    if not canonical:
        # One spelling, no field twice: all readers understand the same.
        raise ProgramError("the manifest is not written as this version writes it")
    _check(manifest, caps)
    return manifest


def read(
    store: Store,
    path: str,
    *,
    caps: GraphCaps = DEFAULT_CAPS,
    ahead: Readahead | None = None,
    copies: bool = False,
) -> Manifest:
    """Read the manifest of a published weights file, and check it against the object's size and ETag.

    The object itself is not read, except for the header of a copy. Later reads send the manifest's ETag, so
    they refer to the same object.

    Args:
        copies: If true, accept an object with another ETag but the manifest's size and header, as a copy of
            the file has. Its other bytes are left to the checksums.

    Returns:
        The manifest, with the object's current ETag.

    Raises:
        ConfigError: If the path cannot name a weights file.
        ObjectNotFound: If the object or its manifest does not exist.
        ObjectChanged: If the object is not the one that the manifest describes.
        ProgramError: If the manifest is invalid, or the object has another size than it says.
        StoreError: If the store cannot be read.
    """
    manifest = _beside(store, path, caps)
    info = (ahead or store).head(path)
    if (info.etag, info.size) != (manifest.etag or info.etag, manifest.nbytes):
        # A publisher may have replaced both. It writes the weights first and the manifest after them.
        info, manifest = store.head(path), _beside(store, path, caps)
    if copies and info.etag != manifest.etag and info.size == manifest.nbytes:
        copied = msgspec.structs.replace(manifest, etag=info.etag)
        with suppress(ProgramError, ObjectChanged):
            check_head(store, path, copied)
            log.info("%s in store %r has another ETag than when it was published", path, store.name)
            return copied
    if manifest.etag and info.etag != manifest.etag:
        raise ObjectChanged(
            f"object {path!r} in store {store.name!r} is not the one that its manifest was written for (ETag "
            f"{info.etag} is not {manifest.etag[:80]}); publish it again"
        )
    if info.size != manifest.nbytes:
        raise ProgramError(f"{path} has {info.size} bytes; its manifest says {manifest.nbytes}")
    return manifest


def _beside(store: Store, path: str, caps: GraphCaps) -> Manifest:
    """Read the manifest of a weights file, without a look at that file."""
    beside = manifest_path(path)
    data = get_at_most(store, beside, caps.header_bytes)
    try:
        return decode(data, caps)
    except ProgramError as error:
        raise ProgramError(
            f"{beside} in store {store.name!r} cannot be read: {error}; publish {path} again"
        ) from None


def check_head(store: Store, path: str, manifest: Manifest) -> None:
    """Check the object's header against the manifest.

    A loader that follows the manifest need not wait for this if the ETags are equal.

    Raises:
        ObjectChanged: If the object is not the one that the manifest describes.
        ProgramError: If the header is not the one that the manifest's tensors have.
        StoreError: If the store cannot be read.
    """
    head = manifest.head()
    if store.get_range(path, 0, len(head), etag=manifest.etag or None) != head:
        raise ProgramError(f"{path} does not begin with the header that its manifest's tensors have")


def damaged(
    tensor: StoredTensor | TensorLocation, data: bytes | memoryview, *, chunk_bytes: int
) -> list[range]:
    """Return the byte ranges of a tensor that its checksums prove wrong, counted from its first byte.

    Raises:
        ProgramError: If the data has another size than the tensor.
    """
    view = memoryview(data).cast("B")
    if len(view) != tensor.stop - tensor.start:
        raise ProgramError(f"weight {tensor.name!r}: {len(view)} bytes, it has {tensor.stop - tensor.start}")
    chunks = (range(at, min(at + chunk_bytes, len(view))) for at in range(0, len(view), chunk_bytes))
    return [
        chunk
        for chunk, expected in zip(chunks, tensor.crc32c, strict=True)
        if crc32c(view[chunk.start : chunk.stop]) != expected
    ]


def _check(manifest: Manifest, caps: GraphCaps) -> None:
    """Check a manifest against the caps, and against the one layout that its tensors allow."""
    _check_chunk_bytes(manifest.chunk_bytes)
    if len(manifest.etag) > caps.text:
        raise ProgramError(f"an ETag of {len(manifest.etag)} characters; at most {caps.text} are allowed")
    if 2 * len(manifest.tensors) > caps.header_entries:  # each may have padding behind it
        raise ProgramError(
            f"{len(manifest.tensors)} tensors and their padding; at most {caps.header_entries} are allowed"
        )
    if manifest.execution is not msgspec.UNSET and len(manifest.execution) != len(manifest.tensors):
        raise ProgramError(f"execution: {len(manifest.execution)} counts for {len(manifest.tensors)} weights")
    for tensor in manifest.tensors:
        _check_tensor(tensor, caps)
    _check_names(manifest, caps)
    head, entries = head_of(_forms(manifest.tensors))
    if len(head) - LENGTH_BYTES > caps.header_bytes:
        raise ProgramError(f"a header of {len(head)} bytes; at most {caps.header_bytes} are allowed")
    end = len(head)
    for tensor, entry in zip(manifest.tensors, entries, strict=True):
        _check_place(tensor, entry, len(head), manifest.chunk_bytes)
        end = tensor.stop + entry.gap
    if manifest.nbytes != end:
        raise ProgramError(f"the weights end at byte {end}, the object has {manifest.nbytes}")
    if end > caps.weights_bytes:
        raise ProgramError(f"a weights file has 1..{caps.weights_bytes} bytes, got {end}")


def _check_chunk_bytes(chunk_bytes: int) -> None:
    if not ALIGNMENT <= chunk_bytes <= MOST_CHUNK_BYTES or chunk_bytes % ALIGNMENT:
        raise ProgramError(
            f"chunk_bytes must be a multiple of {ALIGNMENT} in {ALIGNMENT}..{MOST_CHUNK_BYTES}, got "
            f"{chunk_bytes}"
        )


def _check_tensor(tensor: StoredTensor, caps: GraphCaps) -> None:
    where = f"weight {tensor.name[:80]!r}"
    if tensor.dtype not in DTYPES:
        raise ProgramError(f"{where}: type {tensor.dtype[:80]!r} is not allowed")
    if len(tensor.shape) > caps.dimensions:
        raise ProgramError(f"{where}: {len(tensor.shape)} sizes; at most {caps.dimensions} are allowed")
    # A size of 0 hides the others from the product, and torch multiplies those too.
    largest = DTYPES[tensor.dtype].itemsize
    for size in tensor.shape:
        largest *= max(1, size)
    if largest > caps.tensor_bytes:
        raise ProgramError(f"{where}: takes {largest} bytes, at most {caps.tensor_bytes} are allowed")


def _check_names(manifest: Manifest, caps: GraphCaps) -> None:
    names = [tensor.name for tensor in manifest.tensors]
    known = set(names)
    for name in (*names, *manifest.ties):
        if len(name) > caps.text or is_reserved(name):
            raise ProgramError(f"a weight cannot be called {name[:80]!r}")
    if len(known) != len(names):
        twice, _ = Counter(names).most_common(1)[0]
        raise ProgramError(f"weight {twice!r} is there twice")
    for name, other in manifest.ties.items():
        if name in known or other not in known:
            raise ProgramError(
                f"ties: {name!r} must be a new name of a weight that is there, got {other[:80]!r}"
            )


def _check_place(tensor: StoredTensor, entry: TensorEntry, body: int, chunk_bytes: int) -> None:
    where = f"weight {tensor.name!r}"
    start, stop = body + entry.start, body + entry.stop
    if tensor.start != start:
        what = "overlaps what is before it" if tensor.start < start else "leaves a hole before it"
        raise ProgramError(f"{where} {what}: it starts at byte {tensor.start}, not {start}")
    if tensor.stop != stop:
        raise ProgramError(f"{where}: bytes {start}..{tensor.stop} do not hold its shape of {tensor.dtype}")
    if len(tensor.crc32c) != _chunks(entry, chunk_bytes):
        raise ProgramError(
            f"{where}: {len(tensor.crc32c)} checksums for {_chunks(entry, chunk_bytes)} chunks"
        )


def _forms(tensors: Sequence[StoredTensor]) -> Iterator[tuple[str, str, Sequence[int]]]:
    return ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _chunks(entry: TensorEntry, chunk_bytes: int) -> int:
    return -(-(entry.stop - entry.start) // chunk_bytes)
