"""Where a model's weights lie in a store, whoever wrote them, and the order in which to ask for them.

What was published here has a manifest (:mod:`upriver.coldstart.format.manifest`). Any other safetensors file
says in its own header where its tensors are, and an index beside several of them says which ones belong
together, as Hugging Face's libraries write it. Such files are believed in nothing: their tensors may lie at
any byte and in any order, and what overlaps, lies outside or is too much is refused before anything is
allocated for it.

They have no execution order and no checksums. An order that was recorded on first use is kept beside them; it
is a hint, and one that does not fit is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, Literal

import msgspec

from upriver._threads import Beside
from upriver.coldstart.format.manifest import CHUNK_BYTES, ENDING, Manifest, manifest_path, read
from upriver.coldstart.format.readahead import Ahead
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
"""Each costs three requests before any weight is asked for. The largest models have a few hundred."""

SHARDS_AT_ONCE = 8
"""How many headers are read at the same time: a latency each, hardly any bytes."""

MOST_LISTED, MOST_NAMED = 1_000, 5
"""Objects of a folder that are looked at where none of the usual names is there, and those an error names."""

_PICKLED_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""What Hugging Face's libraries call them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLocation:
    """One tensor, in row-major order.

    Attributes:
        name: As in the model's state dict.
        dtype: One of :data:`~upriver.program.graph.schema.DTYPES`.
        shape: Its sizes.
        path: The object that it lies in.
        start: Its first byte, counted from the object's.
        stop: The byte behind its last one.
        crc32c: Of each chunk of :attr:`WeightSource.chunk_bytes`, counted from ``start``; empty if none are
            known.
        execution: What runs from its first use until that of the next one, as far as it was counted.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    stop: int
    crc32c: tuple[int, ...] = ()
    execution: Execution = NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """A model's weights in a store.

    Attributes:
        store: Where they are.
        path: What was asked for.
        tensors: In execution order where ``ordered``, else as they lie.
        ties: Names of tensors that are others too, and the names that those have in ``tensors``.
        etags: Object to its ETag, which is empty where the store has none.
        chunk_bytes: How many bytes of a tensor one checksum is for.
        ordered: Whether the execution order is known.
    """

    store: Store
    path: str
    tensors: tuple[TensorLocation, ...]
    ties: Mapping[str, str]
    etags: Mapping[str, str]
    chunk_bytes: int
    ordered: bool

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.stop - tensor.start for tensor in self.tensors)

    @property
    def is_checked(self) -> bool:
        """Whether its bytes have checksums, as those of published files have."""
        return any(tensor.crc32c for tensor in self.tensors)


def object_at(path: str) -> str | None:
    """The object with weights that :func:`find` looks at first; None where it looks at something else."""
    path = path.removesuffix("/")
    if path.endswith(INDEX_ENDING) or has_pickled_name(path):
        return None
    return path if path.endswith(ENDING) else f"{path}{ENDING}"


def find(
    store: Store, path: str, *, caps: GraphCaps = DEFAULT_CAPS, ahead: Ahead | None = None
) -> WeightSource:
    """Find a model's weights; none of them is read.

    Args:
        store: Where to look.
        path: ``NAME.safetensors``, published here or written by anyone; ``NAME.safetensors.index.json`` of
            several such files; or ``NAME``, which stands for ``NAME.safetensors``,
            ``NAME/model.safetensors`` or ``NAME/model.safetensors.index.json``, whichever is there first;
            an index that names the file ``NAME/model.safetensors`` comes before that.
        caps: What may be claimed, at most.
        ahead: What has been asked for already, of :func:`object_at`.

    Raises:
        ConfigError: If the path cannot name an object.
        ObjectNotFound: If there is none of these, or a file that an index names is missing.
        ObjectChanged: If the object is not the one that its manifest was written for, or changes meanwhile.
        ProgramError: If manifest, index or header is not what it should be, or it is a pickled checkpoint.
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


def _named(store: Store, path: str, caps: GraphCaps, ahead: Ahead | None) -> WeightSource:
    """What lies under a name without an ending."""
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
    # One that names that file says what overlays it; else they are two forms of a model.
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
    """Which files of a folder could be meant, for an error; which one is not guessed."""
    with suppress(StoreError):
        objects = islice(store.list(path, on_unreachable=lambda entry: None), MOST_LISTED)
        inside = (info.path.removeprefix(f"{path}/") for info in objects)
        names = sorted(name for name in inside if "/" not in name and name.endswith((ENDING, INDEX_ENDING)))
        if names:
            some = ", ".join(names[:MOST_NAMED]) + (" and more" if len(names) > MOST_NAMED else "")
            return f"; name one of the files that it holds: {some}"
    return ""


class _Absent:
    """Goes on where an object is not there, or may not be: who may not list a bucket is refused either way.

    Attributes:
        refused: What the store said when it first refused; empty if it did not.
    """

    refused = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AccessDenied):
            self.refused = self.refused or str(error)
        return isinstance(error, ObjectNotFound | AccessDenied)


# -------------------------------------------------------------------------------------------- one file


def _file(store: Store, path: str, caps: GraphCaps, ahead: Ahead | None = None) -> WeightSource:
    """One file, by its manifest or else by its header.

    Raises:
        ObjectNotFound: If there is no such object; and the others of :func:`find`.
    """
    absent = _Absent()
    with absent:  # the manifest, or both
        return published(store, path, read(store, path, caps=caps, ahead=ahead, copies=True))
    info, tensors, ours = _foreign(store, path, caps, ahead)
    if ours != "no" and not absent.refused:
        with absent:  # a store may err once
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
    return _unordered(store, path, {path: info.etag}, tensors)


def find_any(store: Store, path: str, *, caps: GraphCaps = DEFAULT_CAPS) -> WeightSource:
    """The weights of a file, whatever its name, by its header alone.

    Raises:
        ProgramError: If it is no safetensors file; and the others of :func:`find`.
    """
    info, tensors, _ = _foreign(store, check_name(path), caps)
    return _unordered(store, path, {path: info.etag}, tensors)


def damaged_error(source: WeightSource, tensor: TensorLocation, found: range) -> Damaged:
    """The error of bytes that are others than were published.

    Args:
        source: Where they were read.
        tensor: Whose they are.
        found: Which of it, counted from its first.
    """
    start, stop = tensor.start + found.start, tensor.start + found.stop
    return Damaged(
        f"weight {tensor.name!r}: bytes {start} to {stop} of object {tensor.path!r} in store "
        f"{source.store.name!r} have another checksum than was published; publish it again, a program with "
        "upriver push --rewrite"
    )


def published(store: Store, path: str, manifest: Manifest) -> WeightSource:
    """What a manifest says of the object that it lies beside."""
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


def _unordered(
    store: Store, path: str, etags: Mapping[str, str], tensors: Iterable[TensorLocation]
) -> WeightSource:
    return WeightSource(
        store=store,
        path=path,
        tensors=tuple(tensors),
        ties={},
        etags=etags,
        chunk_bytes=CHUNK_BYTES,
        ordered=False,
    )


def _foreign(
    store: Store, path: str, caps: GraphCaps, ahead: Ahead | None = None
) -> tuple[ObjectInfo, list[TensorLocation], Literal["no", "perhaps", "certainly"]]:
    """What the header of anyone's file says, tensors as they lie, and whether it was published here."""
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
    if len(weights) < len(entries):  # nobody else pads so; and a bit may be wrong in what was read here
        return info, placed, "certainly"
    alike = head == head_of((entry.name, entry.dtype, entry.shape) for entry in weights)[0]
    return info, placed, "perhaps" if alike else "no"


def _header(store: Store | Ahead, info: ObjectInfo, caps: GraphCaps) -> tuple[bytes, list[TensorEntry]]:
    """What a file begins with, up to its body, and its tensors, each of them within the body."""
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
    """No byte belongs to two tensors; they are given in the order of their places."""
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
    """The tensors of the files that an index names, each from the file that it says."""
    places = _places(path, index, caps)
    paths = sorted(set(places.values()))
    if len(paths) > MOST_SHARDS:
        raise ProgramError(f"{path} names {len(paths)} files; at most {MOST_SHARDS} are allowed")
    with Beside(SHARDS_AT_ONCE, name="upriver-coldstart-header") as pool:
        shards = list(pool.map(lambda shard: _shard(store, path, shard, caps), paths))
    tensors = _chosen(path, places, [tensor for _, placed in shards for tensor in placed])
    _check_size(path, len(tensors), sum(info.size for info, _ in shards), caps)
    return _unordered(store, path, {info.path: info.etag for info, _ in shards}, tensors)


def _shard(store: Store, index: str, path: str, caps: GraphCaps) -> tuple[ObjectInfo, list[TensorLocation]]:
    try:
        info, placed, _ = _foreign(store, path, caps)
    except ObjectNotFound as error:
        raise ObjectNotFound(f"{index} names {path}: {error}") from None
    return info, placed


def _places(path: str, index: bytes, caps: GraphCaps) -> dict[str, str]:
    """Name of each tensor to the object that an index says it is in.

    Raises:
        ProgramError: If the index is none, or names what cannot be a weights file beside it.
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
    """Each tensor once: where the index says, or in the only file that has it.

    A copy in another file may be stale, and is left there: an index that was changed to name an overlay says
    which of the two counts.

    Raises:
        ProgramError: If a tensor is not where the index says, or lies twice where it says nothing.
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
    """Hold files of one model to what one may have."""
    if num_tensors > caps.header_entries:
        raise ProgramError(f"{path}: {num_tensors} tensors; at most {caps.header_entries} are allowed")
    if nbytes > caps.weights_bytes:
        raise ProgramError(f"{path}: files of {nbytes} bytes; at most {caps.weights_bytes} are allowed")


# -------------------------------------------------------------------------------- what can run code


def _refuse_object(store: Store, path: str) -> None:
    """A name without an ending is no object; an empty one is how some stores write a directory.

    Raises:
        ProgramError: If it is an object.
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


class _Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``NAME.order.json`` holds.

    Attributes:
        schema: Name and version of the format.
        etags: Of the objects that the order was recorded for.
        names: Of all their tensors, in execution order.
    """

    schema: str
    etags: dict[str, str]
    names: list[str]


def order_path(path: str) -> str:
    """Where the order of files without one is kept."""
    return f"{path.removesuffix(INDEX_ENDING).removesuffix(ENDING)}.order.json"


def in_order(source: WeightSource, names: Iterable[str]) -> WeightSource:
    """The same weights in an execution order that was recorded.

    Args:
        names: Of tensors; those that the source has not are left out, those that it has besides go last.
    """
    by_name = {tensor.name: tensor for tensor in source.tensors}
    wanted = dict.fromkeys(source.ties.get(name, name) for name in names)
    first = [by_name.pop(name) for name in wanted if name in by_name]
    return replace(source, tensors=(*first, *by_name.values()), ordered=True)


def keep_order(source: WeightSource, names: Iterable[str]) -> None:
    """Keep an execution order for the next one who looks for these files.

    Args:
        source: As :func:`find` gave it.
        names: As for :func:`in_order`.

    Raises:
        StoreError: If the store refuses, as it may: nothing depends on it.
    """
    order = _Order(
        schema=ORDER_SCHEMA,
        etags=dict(sorted(source.etags.items())),
        names=[tensor.name for tensor in in_order(source, names).tensors],
    )
    source.store.put(order_path(source.path), msgspec.json.encode(order))


def _as_kept(source: WeightSource, caps: GraphCaps) -> WeightSource:
    """In the order that is kept beside, if there is one of just these tensors of just these objects."""
    beside = order_path(source.path)
    try:
        return in_order(source, _kept(source, beside, caps))
    except ObjectNotFound:
        return source
    # msgspec raises its own errors and, on some text, Python's.
    except (StoreError, ProgramError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.info("the order kept in %s is not used: %s", beside, error)
        return source


def _kept(source: WeightSource, beside: str, caps: GraphCaps) -> list[str]:
    order = msgspec.json.decode(get_at_most(source.store, beside, caps.header_bytes), type=_Order)
    if order.schema != ORDER_SCHEMA:
        raise ProgramError(f"order of schema {order.schema[:80]!r}; this version reads {ORDER_SCHEMA!r}")
    if order.etags != source.etags or sorted(order.names) != sorted(t.name for t in source.tensors):
        raise ProgramError("it is that of other files")
    return order.names
