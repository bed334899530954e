"""Find a model's weights in a store, in any safetensors file, and the order in which to request them.

Published files have a manifest (:mod:`upriver.coldstart.format.manifest`). For any other safetensors file the
header gives the position of each tensor. An index, in the format of Hugging Face's libraries, names the files
of a model that has several. None of this is trusted: tensors may lie at any byte and in any order. A tensor
that overlaps another, lies outside the file or is too large is refused before any memory is allocated.

Such files have no execution order and no checksums. The execution order is recorded on first use and stored
next to the files. It is a hint: an order that does not match is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from typing import Any, Literal, TypeVar

import msgspec

from upriver._threads.executor import DaemonExecutor
from upriver.coldstart.format.manifest import CHUNK_BYTES, ENDING, Manifest, damaged, manifest_path, read
from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.roofline import NOTHING, Execution
from upriver.errors import (
    AccessDenied,
    ConfigError,
    Damaged,
    ObjectChanged,
    ObjectNotFound,
    ProgramError,
    StoreError,
)
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.fetch import get_at_most
from upriver.program.graph.weights_file import (
    LENGTH_BYTES,
    METADATA,
    TensorEntry,
    entry_of,
    head_of,
    header_length,
    is_reserved,
    table_of,
)
from upriver.program.models.pickled import BEGINNINGS, has_pickled_name, refusal
from upriver.store import ObjectInfo, Store, check_name

log = logging.getLogger(__name__)

INDEX_ENDING = ".safetensors.index.json"

ORDER_SCHEMA = "upriver.order/1"

MOST_SHARDS = 1_000
"""Most files of one model. Each costs three requests before the first weight. The largest models have
hundreds of files."""

SHARDS_AT_ONCE = 8
"""Headers read at the same time. Each costs one latency and few bytes."""

MOST_LISTED, MOST_NAMED = 1_000, 5
"""Bounds for a folder without the usual names: objects that are listed, and objects that an error names."""

_PICKLED_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""File names of pickled checkpoints in Hugging Face's libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLocation:
    """Position of one tensor in a store, in row-major order.

    Attributes:
        dtype: One of :data:`~upriver.program.graph.schema.DTYPES`.
        start: First byte, counted from the start of the object.
        stop: Byte after the last one.
        crc32c: Checksum of each chunk of :attr:`WeightSource.chunk_bytes`, counted from ``start``; empty if
            unknown.
        execution: Work between the first use of this tensor and that of the next one, if it was counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    stop: int
    crc32c: tuple[int, ...] = ()
    execution: Execution = NOTHING

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """A model's weights in a store.

    Attributes:
        path: Requested path.
        tensors: Tensors, in execution order if ``ordered``, else in file order.
        ties: Alias of a tensor to its name in ``tensors``.
        etags: Object to its ETag; the ETag is empty if the store has none.
        chunk_bytes: Bytes of a tensor that one checksum covers.
        ordered: True if the execution order is known.
    """

    store: Store
    path: str
    tensors: tuple[TensorLocation, ...]
    ties: Mapping[str, str] = field(default_factory=dict)
    etags: Mapping[str, str]
    chunk_bytes: int = CHUNK_BYTES
    ordered: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_checked(self) -> bool:
        """True if the weights have checksums, as published files do."""
        return any(tensor.crc32c for tensor in self.tensors)


def object_at(path: str) -> str | None:
    """Return the weights object that :func:`find` reads first, or None if it reads another kind of object."""
    path = path.removesuffix("/")
    if path.endswith(INDEX_ENDING) or has_pickled_name(path):
        return None
    return path if path.endswith(ENDING) else f"{path}{ENDING}"


def find(
    store: Store, path: str, *, caps: GraphCaps = DEFAULT_CAPS, ahead: Readahead | None = None
) -> WeightSource:
    """Find a model's weights without reading any of them.

    Args:
        path: ``NAME.safetensors``, published here or written by other software;
            ``NAME.safetensors.index.json`` of several such files; or ``NAME``. ``NAME`` stands for the first
            that exists of ``NAME.safetensors``, ``NAME/model.safetensors`` and
            ``NAME/model.safetensors.index.json``. An index that names the file ``NAME/model.safetensors``
            precedes that file.
        ahead: Readahead of :func:`object_at`, if one was started.

    Raises:
        ConfigError: If the path cannot name an object.
        ObjectNotFound: If no such object exists, or a file that an index names is missing.
        ObjectChanged: If the object differs from the one that its manifest describes, or changes during the
            search.
        ProgramError: If manifest, index or header is invalid, or the file is a pickled checkpoint.
        StoreError: If the store cannot be read.
    """
    path = check_name(path.removesuffix("/"))
    if has_pickled_name(path):
        raise ProgramError(refusal(path))
    if path.endswith(INDEX_ENDING):
        found = _shards(store, path, get_at_most(store, path, caps.header_bytes), caps)
    elif path.endswith(ENDING):
        found = _file(store, path, caps, ahead)
    else:
        found = _named(store, path, caps, ahead)
    found = replace(found, path=path)
    return found if found.ordered else _as_kept(found, caps)


def _named(store: Store, path: str, caps: GraphCaps, ahead: Readahead | None) -> WeightSource:
    """Find the weights for a name without an ending."""
    index = f"{path}/model{INDEX_ENDING}"
    files = (f"{path}{ENDING}", f"{path}/model{ENDING}")
    absent = _Absent()
    with absent:
        return _file(store, files[0], caps, ahead)
    with absent:
        _refuse_object(store, path)
    found, data = None, None
    with absent:
        found = _file(store, files[1], caps)
        if found.is_checked:
            return found
    with absent:
        data = get_at_most(store, index, caps.header_bytes)
    # An index that names this file may overlay it. Otherwise file and index are two forms of one model.
    if data is not None and (found is None or files[1] in _places(index, data, caps).values()):
        return _shards(store, index, data, caps)
    if found is not None:
        return found
    for name in _PICKLED_NAMES:
        with absent:
            if store.exists(f"{path}/{name}"):
                raise ProgramError(refusal(f"{path}/{name}"))
    if absent.refused:
        raise AccessDenied(absent.refused)
    looked = ", ".join(repr(name) for name in files)
    raise ObjectNotFound(
        f"no weights of {path!r} in store {store.name!r} ({store.uri}): there is none of {looked} and "
        f"{index!r}{_others(store, path)}"
    )


def _others(store: Store, path: str) -> str:
    """List weights files of a folder for an error message. None of them is chosen."""
    with suppress(StoreError):
        objects = islice(store.list(path, on_unreachable=lambda entry: None), MOST_LISTED)
        inside = (info.path.removeprefix(f"{path}/") for info in objects)
        names = sorted(name for name in inside if "/" not in name and name.endswith((ENDING, INDEX_ENDING)))
        if names:
            some = ", ".join(names[:MOST_NAMED]) + (" and more" if len(names) > MOST_NAMED else "")
            return f"; name one of the files that it holds: {some}"
    return ""


class _Absent:
    """Suppress errors about an absent object, or about a refused one.

    A client that may not list a bucket gets the same refusal for both.

    Attributes:
        refused: First refusal of the store; empty if there was none.
    """

    refused = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AccessDenied):
            self.refused = self.refused or str(error)
        return isinstance(error, ObjectNotFound | AccessDenied)


# -------------------------------------------------------------------------------------------- one file


def _file(store: Store, path: str, caps: GraphCaps, ahead: Readahead | None = None) -> WeightSource:
    """Find the weights of one file, by its manifest or else by its header."""
    absent = _Absent()
    with absent:  # the manifest, or both
        return published(store, path, read(store, path, caps=caps, ahead=ahead, copies=True))
    info, tensors, ours = _foreign(store, path, caps, ahead)
    if ours != "no" and not absent.refused:
        with absent:  # the store may have failed once
            return published(store, path, read(store, path, caps=caps, copies=True))
    if ours == "certainly" and absent.refused:
        raise StoreError(
            f"{absent.refused}; {path} is laid out as published files are, and is not loaded without its "
            "manifest. That may be missing: allow these credentials to list the bucket, and the store says so"
        )
    if ours != "no":
        log.warning(
            "%s in store %r is laid out as published files are, but %s %s: it is loaded without checksums",
            path,
            store.name,
            "the store refuses" if absent.refused else "there is no",
            manifest_path(path),
        )
    return WeightSource(store=store, path=path, etags={path: info.etag}, tensors=tuple(tensors))


def find_any(store: Store, path: str, *, caps: GraphCaps = DEFAULT_CAPS) -> WeightSource:
    """Find the weights of a file of any name, by its header alone. Errors are those of :func:`find`."""
    info, tensors, _ = _foreign(store, check_name(path), caps)
    return WeightSource(store=store, path=path, etags={path: info.etag}, tensors=tuple(tensors))


def damaged_error(source: WeightSource, tensor: TensorLocation, found: range) -> Damaged:
    """Return the error for bytes of a tensor that differ from the published ones."""
    start, stop = tensor.start + found.start, tensor.start + found.stop
    return Damaged(
        f"weight {tensor.name!r}: bytes {start} to {stop} of object {tensor.path!r} in store "
        f"{source.store.name!r} have another checksum than was published; publish it again, a program with "
        "upriver push --rewrite"
    )


def check_bytes(source: WeightSource, tensor: TensorLocation, data: memoryview) -> None:
    """Check all bytes of a tensor against its checksums, if it has any.

    Raises:
        Damaged: If they differ.
    """
    if tensor.crc32c and (wrong := damaged(tensor, data, chunk_bytes=source.chunk_bytes)):
        raise damaged_error(source, tensor, wrong[0])


def published(store: Store, path: str, manifest: Manifest) -> WeightSource:
    """Return the weights that a manifest describes."""
    counted: Iterable[Execution] = (
        repeat(NOTHING) if manifest.execution is msgspec.UNSET else manifest.execution
    )
    tensors = tuple(
        TensorLocation(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            path=path,
            start=tensor.start,
            stop=tensor.stop,
            crc32c=tuple(tensor.crc32c),
            execution=execution,
        )
        for tensor, execution in zip(manifest.tensors, counted, strict=False)
    )
    return WeightSource(
        store=store,
        path=path,
        tensors=tensors,
        ties=manifest.ties,
        etags={path: manifest.etag},
        chunk_bytes=manifest.chunk_bytes,
        ordered=True,
    )


def _foreign(
    store: Store, path: str, caps: GraphCaps, ahead: Readahead | None = None
) -> tuple[ObjectInfo, list[TensorLocation], Literal["no", "perhaps", "certainly"]]:
    """Read the header of an untrusted file."""
    info = (ahead or store).head(path)
    try:
        head, entries = _header(ahead or store, info, caps)
        entries.sort(key=lambda entry: (entry.start, entry.stop))
        _check_apart(entries)
    except ProgramError as error:
        raise ProgramError(f"{path} in store {store.name!r}: {error}") from None
    except ObjectChanged:
        raise ObjectChanged(
            f"object {path!r} in store {store.name!r} was replaced while its header was read; load again"
        ) from None
    weights = [entry for entry in entries if not is_reserved(entry.name)]
    placed = [
        TensorLocation(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=path,
            start=len(head) + entry.start,
            stop=len(head) + entry.stop,
        )
        for entry in weights
    ]
    if len(weights) < len(entries):  # only upriver pads this way, and a bit of the header may be wrong
        return info, placed, "certainly"
    alike = head == head_of((entry.name, entry.dtype, entry.shape) for entry in weights)[0]
    return info, placed, "perhaps" if alike else "no"


def _header(store: Store | Readahead, info: ObjectInfo, caps: GraphCaps) -> tuple[bytes, list[TensorEntry]]:
    """Return the bytes of a file before its body, and its tensors. Each tensor lies within the body."""
    etag = info.etag or None
    first = store.get_range(info.path, 0, min(LENGTH_BYTES, info.size), etag=etag)
    try:
        body = LENGTH_BYTES + header_length(first, info.size, caps)
    except ProgramError:
        if first.startswith(BEGINNINGS):
            raise ProgramError(refusal(info.path)) from None
        raise
    if info.size > caps.weights_bytes:
        raise ProgramError(f"a weights file has 1..{caps.weights_bytes} bytes, got {info.size}")
    text = store.get_range(info.path, LENGTH_BYTES, body, etag=etag)
    table = table_of(text, "weights header", caps)
    most = info.size - body
    return first + text, [
        entry_of(name, entry, most, caps) for name, entry in table.items() if name != METADATA
    ]


def _check_apart(entries: Iterable[TensorEntry]) -> None:
    """Check that no two tensors share a byte. The entries are sorted by position."""
    end, before = 0, ""
    for entry in entries:
        if entry.start == entry.stop:
            continue
        if entry.start < end:
            raise ProgramError(
                f"weight {entry.name!r} overlaps {before!r}: it starts at byte {entry.start}, not {end} or "
                "behind"
            )
        end, before = entry.stop, entry.name


# ---------------------------------------------------------------------------------------- several files


def _shards(store: Store, path: str, index: bytes, caps: GraphCaps) -> WeightSource:
    """Read the headers of the files that an index names, and take each tensor from its file there."""
    places = _places(path, index, caps)
    paths = sorted(set(places.values()))
    if len(paths) > MOST_SHARDS:
        raise ProgramError(f"{path} names {len(paths)} files; at most {MOST_SHARDS} are allowed")
    with DaemonExecutor(SHARDS_AT_ONCE, name="coldstart-header") as pool:
        shards = list(pool.map(lambda shard: _shard(store, path, shard, caps), paths))
    tensors = _chosen(path, places, [tensor for _, placed in shards for tensor in placed])
    _check_size(path, len(tensors), sum(info.size for info, _ in shards), caps)
    etags = {info.path: info.etag for info, _ in shards}
    return WeightSource(store=store, path=path, etags=etags, tensors=tuple(tensors))


def _shard(store: Store, index: str, path: str, caps: GraphCaps) -> tuple[ObjectInfo, list[TensorLocation]]:
    try:
        info, placed, _ = _foreign(store, path, caps)
    except ObjectNotFound as error:
        raise ObjectNotFound(f"{index} names {path}: {error}") from None
    return info, placed


def _places(path: str, index: bytes, caps: GraphCaps) -> dict[str, str]:
    """Return the object that an index gives for each tensor name.

    Raises:
        ProgramError: If the index is invalid, or names a file that cannot be a weights file in the same
            folder.
    """
    table = table_of(index, path, caps).get("weight_map")
    if not isinstance(table, dict) or len(table) > caps.header_entries:
        raise ProgramError(f"{path} has no weight_map of at most {caps.header_entries} names")
    folder = path[: path.rfind("/") + 1]
    files = {file: _beside(path, folder, file) for file in {_text(path, file) for file in table.values()}}
    return {name: files[file] for name, file in table.items()}


def _text(path: str, file: Any) -> str:
    if not isinstance(file, str):
        raise ProgramError(f"{path}: weight_map gives a name its file, got a {type(file).__name__}")
    return file


def _beside(path: str, folder: str, file: str) -> str:
    if has_pickled_name(file):
        raise ProgramError(refusal(f"{folder}{file[:200]}"))
    try:
        shard = check_name(f"{folder}{file}")
    except ConfigError as error:
        raise ProgramError(f"{path}: weight_map: {error}") from None
    if not shard.endswith(ENDING):
        raise ProgramError(f"{path}: weight_map names files NAME{ENDING}, got {file[:200]!r}")
    return shard


def _chosen(path: str, places: Mapping[str, str], tensors: Iterable[TensorLocation]) -> list[TensorLocation]:
    """Choose one location for each tensor: where the index says, or the only file that holds it.

    A copy in another file may be stale and is ignored. An index that was changed to name an overlay decides
    between the two.

    Raises:
        ProgramError: If a tensor is not where the index says, or lies in two files and the index names
            neither.
    """
    copies: dict[str, list[TensorLocation]] = {}
    for tensor in tensors:
        copies.setdefault(tensor.name, []).append(tensor)
    for name, shard in places.items():
        there = [tensor.path for tensor in copies.get(name, ())]
        if shard not in there:
            elsewhere = f", but in {there[0]}" if there else ""
            raise ProgramError(f"{path}: weight {name[:80]!r} is not in {shard}{elsewhere}")
    chosen = []
    for name, found in copies.items():
        if name in places:
            found = [tensor for tensor in found if tensor.path == places[name]]
        if len(found) > 1:
            raise ProgramError(
                f"{path}: weight {name!r} is there twice, in {found[0].path} and in {found[1].path}, and "
                "weight_map does not say which one counts"
            )
        chosen += found
    return chosen


def _check_size(path: str, num_tensors: int, nbytes: int, caps: GraphCaps) -> None:
    """Check the files of one model against the caps."""
    if num_tensors > caps.header_entries:
        raise ProgramError(f"{path}: {num_tensors} tensors; at most {caps.header_entries} are allowed")
    if nbytes > caps.weights_bytes:
        raise ProgramError(f"{path}: files of {nbytes} bytes; at most {caps.weights_bytes} are allowed")


# -------------------------------------------------------------------------------- what can run code


def _refuse_object(store: Store, path: str) -> None:
    """Check that a name without an ending is not an object with content.

    Some stores represent a directory as an empty object.
    """
    try:
        info = store.head(path)
    except ObjectNotFound:
        return
    if not info.size:
        return
    first = store.get_range(path, 0, min(LENGTH_BYTES, info.size), etag=info.etag or None)
    if first.startswith(BEGINNINGS):
        raise ProgramError(refusal(path))
    raise ProgramError(f"{path} in store {store.name!r} is no weights file: those are called NAME{ENDING}")


# ------------------------------------------------------------------------------------------ the order


class Hint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Document that a load stores next to the weights for later loads.

    Attributes:
        etags: ETags of the objects that it is for.
    """

    schema: str
    etags: dict[str, str]


class _Order(Hint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``NAME.order.json``: names of all tensors of the objects, in execution order."""

    names: list[str]


def order_path(path: str) -> str:
    """Return the path at which the recorded order of unpublished files is stored."""
    return f"{path.removesuffix(INDEX_ENDING).removesuffix(ENDING)}.order.json"


def in_order(source: WeightSource, names: Iterable[str]) -> WeightSource:
    """Return the same weights in a recorded execution order.

    Args:
        names: Tensor names in order. Unknown names are skipped. Tensors without a name here go last.
    """
    by_name = {tensor.name: tensor for tensor in source.tensors}
    wanted = dict.fromkeys(source.ties.get(name, name) for name in names)
    first = [by_name.pop(name) for name in wanted if name in by_name]
    return replace(source, tensors=(*first, *by_name.values()), ordered=True)


def keep_order(source: WeightSource, names: Iterable[str]) -> None:
    """Store an execution order for later loads of these files.

    Raises:
        StoreError: If the store refuses. The caller may ignore this: nothing depends on the order.
    """
    order = _Order(
        schema=ORDER_SCHEMA,
        etags=dict(sorted(source.etags.items())),
        names=[tensor.name for tensor in in_order(source, names).tensors],
    )
    source.store.put(order_path(source.path), msgspec.json.encode(order))


def _as_kept(source: WeightSource, caps: GraphCaps) -> WeightSource:
    """Return the weights in their stored order, if that order is for these tensors of these objects."""
    beside = order_path(source.path)
    order = read_hint(source, beside, _Order, ORDER_SCHEMA, lambda found: _names(source, found), caps=caps)
    return source if order is None else in_order(source, order)


def _names(source: WeightSource, order: _Order) -> list[str]:
    if sorted(order.names) != sorted(tensor.name for tensor in source.tensors):
        raise ProgramError("it is that of other files")
    return order.names


_Hint = TypeVar("_Hint", bound=Hint)
_Read = TypeVar("_Read")


def read_hint(
    source: WeightSource,
    path: str,
    kind: type[_Hint],
    schema: str,
    use: Callable[[_Hint], _Read],
    *,
    caps: GraphCaps = DEFAULT_CAPS,
) -> _Read | None:
    """Read what an earlier load has stored next to these weights; None if there is nothing of use.

    A hint decides when bytes arrive and never which, so one that cannot be read is only logged.

    Args:
        use: Function of the document. A `ProgramError` refuses it.
    """
    try:
        found = msgspec.json.decode(get_at_most(source.store, path, caps.header_bytes), type=kind)
        if found.schema != schema:
            raise ProgramError(f"schema {found.schema[:80]!r}; this version reads {schema!r}")
        if found.etags != source.etags:
            raise ProgramError("it is that of other files")
        return use(found)
    except ObjectNotFound:
        return None
    # msgspec raises its own errors and, for some text, Python's.
    except (StoreError, ProgramError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.info("%s is not used: %s", path, error)
        return None
