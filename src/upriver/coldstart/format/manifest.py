"""Weights as they are published for cold starts: safetensors in execution order, and a manifest beside it.

The file is the one of :mod:`upriver.program.graph.weights_file`: tensors in the order in which they are
given, which is that of execution, each on a 64-byte boundary, named padding between; any safetensors reader
reads it. Its manifest, a JSON file, says where in the object each tensor lies, the CRC32C of each chunk of
it, which names stand for a tensor that has another one, the object's ETag and, where it was counted, what a
model computes from each tensor on. A loader that has read it needs nothing else before it asks for weights,
and any tensors are checked without a byte of others.

A reader believes nothing of it. Order, types and shapes decide where every byte of the file lies, those of
its header too, so what a manifest says of places is held against that, and the object's header against what
it must be, byte for byte. Nothing of the size that a manifest claims is allocated for that.
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

from upriver.coldstart.format.readahead import Ahead
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
"""What is fetched again where a checksum is wrong. A checksum is kept for each: a few kB for 1 GB."""

MOST_CHUNK_BYTES = 64 << 20

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the file, in row-major order.

    Attributes:
        name: As in the model's state dict.
        dtype: One of :data:`~upriver.program.graph.schema.DTYPES`.
        shape: Its sizes.
        start: Its first byte, counted from the object's.
        stop: The byte behind its last one.
        crc32c: Of each chunk, counted from ``start``; the last one may be shorter.
    """

    name: str
    dtype: str
    shape: list[Count]
    start: Count
    stop: Count
    crc32c: list[Checksum]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands beside a weights file.

    Attributes:
        schema: Name and version of the format.
        etag: Of the object when it was published; empty where the store has none.
        nbytes: Of the object.
        chunk_bytes: How many bytes of a tensor one checksum is for.
        tensors: In the order of the file, which is that of execution.
        ties: Names of tensors that are others too, and the names that those have in ``tensors``.
        execution: Of each tensor, what runs from its first use until that of the next one; left out where
            nobody counted it.
    """

    schema: str
    etag: str
    nbytes: Count
    chunk_bytes: Count
    tensors: list[StoredTensor]
    ties: dict[str, str]
    execution: list[Execution] | msgspec.UnsetType = msgspec.UNSET

    def encode(self) -> bytes:
        """The canonical bytes of the file."""
        return msgspec.json.encode(self)

    def head(self) -> bytes:
        """What the object begins with: a safetensors header, and the length before it.

        Raises:
            ProgramError: If there can be no such file.
        """
        return head_of(_forms(self.tensors))[0]


def manifest_path(path: str) -> str:
    """Where the manifest of a weights file lies.

    Raises:
        ConfigError: If that is no name of a weights file.
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
    """Write a weights file and, when it is there, its manifest.

    The file never stands in memory: parts of it that are on their way do, and one copy of a tensor that does
    not lie row by row in main memory.

    Args:
        tensors: A state dict in execution order; nothing in it may change meanwhile.
        store: Where to.
        path: The object's name; it ends in ``.safetensors``.
        chunk_bytes: How many bytes of a tensor one checksum is for.
        tied: Whether what is the same tensor under several names is stored once, under the first; else under
            each, as a program's weights are.
        execution: What runs from the first use of tensors until that of the next one, by their names; None
            where it was not counted.
        caps: What a reader may be expected to take.

    Raises:
        ConfigError: If the path is no name of a weights file.
        ProgramError: If something in it cannot stand in such a file, or is more than the caps allow.
        ObjectChanged: If somebody else was seen to write the same object meanwhile; publish again then.
        StoreError: If the store refuses. No manifest is left then that says otherwise of the object. Where
            there was no object before, none is left that has no manifest, as far as the store says so.
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
        with suppress(StoreError):  # somebody else may have published it meanwhile
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
    """Whether the store says that there is no such object; it may not say so to everybody."""
    try:
        return not store.exists(path)
    except StoreError:
        return False


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no elements in rows and columns that could be written.

    Raises:
        ProgramError: If it has none.
    """
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "is on the meta device" if tensor.is_meta else f"is of layout {tensor.layout}"
        raise ProgramError(f"weight {name!r} {kind}: it has no dense elements to write")


def describe(
    tensors: Mapping[str, torch.Tensor], digest: str, *, caps: GraphCaps = DEFAULT_CAPS
) -> Manifest | None:
    """The manifest of a weights file that is written already, but for its ETag.

    Args:
        tensors: What is in it, by name, in its order.
        digest: The file's SHA-256.
        caps: What a reader may be expected to take.

    Returns:
        None where the file is laid out otherwise than this module does it.

    Raises:
        ProgramError: If something in it is more than the caps allow.
    """
    planned = _planned(dict(tensors), {}, CHUNK_BYTES)
    _check(planned, caps)
    sums: list[list[int]] = []
    folded = hashlib.sha256()
    for piece in _pieces(planned, tensors, sums):
        folded.update(piece)
    return _summed(planned, sums) if folded.hexdigest() == digest else None


def _summed(planned: Manifest, sums: Sequence[list[int]]) -> Manifest:
    """The same with the checksums of its tensors."""
    tensors = [
        msgspec.structs.replace(tensor, crc32c=crcs)
        for tensor, crcs in zip(planned.tensors, sums, strict=True)
    ]
    return msgspec.structs.replace(planned, tensors=tensors)


def _untied(
    tensors: Mapping[str, torch.Tensor], *, tied: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What is stored, and the other names that it has.

    Raises:
        ProgramError: See `check_dense`.
    """
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
    """A manifest but for the checksums and the ETag."""
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
    """Of each tensor that is stored; what has several names counts once."""
    found = {tensor.name: NOTHING for tensor in planned.tensors}
    for name, each in execution.items():
        stored = planned.ties.get(name, name)
        found[stored] = found[stored].plus(each)
    return list(found.values())


def _pieces(
    planned: Manifest, stored: Mapping[str, torch.Tensor], sums: list[list[int]]
) -> Iterator[bytes | memoryview]:
    """The file piece by piece, and the checksums of what has been asked for."""
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
    """Read a manifest from anyone.

    Raises:
        ProgramError: If it is no manifest of this schema, describes no file that could be, or one that is
            more than the caps allow; the message says what and where.
    """
    if len(data) > caps.header_bytes:
        raise ProgramError(f"manifest of {len(data)} bytes; at most {caps.header_bytes} are allowed")
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema != SCHEMA:
            raise ProgramError(f"manifest of schema {schema[:80]!r}; this version reads {SCHEMA!r}")
        manifest = msgspec.json.decode(data, type=Manifest)
        canonical = manifest.encode() == data
    # msgspec raises its own errors and, on some text, Python's.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"manifest: {error}") from None
    if not canonical:
        # No other spelling and no field twice: all readers understand the same.
        raise ProgramError("the manifest is not written as this version writes it")
    _check(manifest, caps)
    return manifest


def read(
    store: Store,
    path: str,
    *,
    caps: GraphCaps = DEFAULT_CAPS,
    ahead: Ahead | None = None,
    copies: bool = False,
) -> Manifest:
    """The manifest of a published weights file, held against the object's size and ETag.

    Nothing of the object is read, but for the header of a copy. Later reads take the manifest's ETag along,
    so they are of the same object.

    Args:
        store: Where it is.
        path: The name of the weights file.
        caps: What it may take, at most.
        ahead: What has been asked for already.
        copies: Whether an object with another ETag will do that has the manifest's size and header, as a copy
            of the file has: what else it holds is for the checksums to say.

    Returns:
        It, with the ETag that the object has.

    Raises:
        ConfigError: If the path is no name of a weights file.
        ObjectNotFound: If there is no such object, or no manifest beside it.
        ObjectChanged: If the object is no longer the one that the manifest was written for.
        ProgramError: If the manifest is not what it should be, or its object larger or smaller than it says.
        StoreError: If the store cannot be read.
    """
    manifest = _beside(store, path, caps)
    info = (ahead or store).head(path)
    if (info.etag, info.size) != (manifest.etag or info.etag, manifest.nbytes):
        # Both may have been published again since; the weights are first then, the manifest follows.
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
    """The manifest of a weights file, whatever that file is."""
    beside = manifest_path(path)
    data = get_at_most(store, beside, caps.header_bytes)
    try:
        return decode(data, caps)
    except ProgramError as error:
        raise ProgramError(
            f"{beside} in store {store.name!r} cannot be read: {error}; publish {path} again"
        ) from None


def check_head(store: Store, path: str, manifest: Manifest) -> None:
    """Hold the object's own header against the manifest.

    A loader that goes by the manifest need not wait for this where their ETags say the same.

    Raises:
        ObjectChanged: If the object is no longer the one that the manifest was written for.
        ProgramError: If the header is not the one that the manifest's tensors have.
        StoreError: If the store cannot be read.
    """
    head = manifest.head()
    if store.get_range(path, 0, len(head), etag=manifest.etag or None) != head:
        raise ProgramError(f"{path} does not begin with the header that its manifest's tensors have")


def damaged(
    tensor: StoredTensor | TensorLocation, data: bytes | memoryview, *, chunk_bytes: int
) -> list[range]:
    """Which bytes of a tensor, counted from its first, are others than were published, by their checksums.

    Args:
        tensor: Of a manifest, or what was made of it.
        data: All its bytes.
        chunk_bytes: The manifest's.

    Raises:
        ProgramError: If these are more or fewer bytes than the tensor has.
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
    """Hold a manifest to the caps and to the one layout that its tensors have."""
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
