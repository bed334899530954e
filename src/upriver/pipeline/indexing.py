"""Index what is stored: WebDataset shards or class folders, of images, of audio or of ready tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Literal

import pyarrow as pa

from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import manifest as files
from upriver.pipeline import tarshard
from upriver.pipeline.audio_stages import DecodeWav
from upriver.pipeline.chain import InputChain
from upriver.pipeline.dataset import Dataset, check_reads
from upriver.pipeline.errors import SampleError
from upriver.pipeline.input_stage import InputStage
from upriver.pipeline.wavfile import read_form
from upriver.store import DEFAULT_PREFIX, ObjectInfo, Store, check_name
from upriver.types import require_type

Layout = Literal["auto", "webdataset", "folders"]
Progress = Callable[[int, int], None]
"""Called with the bytes dealt with and the bytes of all objects; from several threads, one at a time."""

FORMAT_OF = {
    "jpg": "image",
    "jpeg": "image",
    "png": "image",
    "webp": "image",
    "wav": "wav",
    "npy": "npy",
    "safetensors": "safetensors",
}
"""Extension to the format a sample is stored in."""

MAX_CLASSES = 2**20
"""Cap on targets where no class names say how many there are."""

CLASSES_FILE = "classes.txt"
"""Class names beside the shards, one a line, in the order of the targets."""

_UNSUPPORTED = (
    *("bmp", "gif", "tif", "tiff", "avif", "heic", "jp2"),
    *("flac", "mp3", "ogg", "opus", "m4a", "aac", "aif", "aiff"),
    *("pt", "pth", "pkl", "npz"),
)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_WAV_HEADER_BYTES = 4096  # of what stands before the samples, where the format is among the first
_SHARDS_AT_ONCE = 8  # headers are small and far apart: the wait is for round trips, not for bytes


@dataclass(frozen=True, slots=True)
class _Row:
    object: ObjectInfo
    start: int
    stop: int
    target: int
    name: str
    format: str


def index(
    store: Store | str,
    path: str = "",
    *,
    stages: Sequence[InputStage],
    layout: Layout = "auto",
    prefix: str = DEFAULT_PREFIX,
    on_progress: Progress | None = None,
) -> Dataset:
    """Index the samples under a path. Nothing is written until the dataset's ``publish()``.

    A WebDataset shard gives a sample for each key with one media member and an integer in ``.cls``; class
    folders (``class/name.jpg``) give their sorted names as classes. Only listings and tar headers are read,
    and of audio the first file's header.

    Args:
        store: A store, or the URI of one.
        path: Directory, or one shard, in the store; empty for all of it.
        stages: The input stages; the first must read the stored format.
        layout: What to look for; ``auto`` tells by what is there.
        prefix: Where upriver keeps its own objects; never indexed.
        on_progress: Called with (bytes done, bytes in all).

    Raises:
        DatasetError: If there is nothing to index or something cannot be: a sample without a class, a
            truncated shard, a duplicate, mixed formats. The message names the object.
        ConfigError: If the stages do not fit together or do not read the stored format, or the audio has
            another rate than they say.
        StoreError: If the store cannot be read.
    """
    _check_arguments(store, path, stages, prefix, on_progress)
    if layout not in ("auto", *files.LAYOUTS):
        raise ConfigError(f"layout must be auto, {' or '.join(files.LAYOUTS)}, got {layout!r}")
    chain = InputChain(tuple(stages))
    store = Store.open(store) if isinstance(store, str) else store
    where = (
        f"{path!r} in store {store.name!r} ({store.uri})" if path else f"store {store.name!r} ({store.uri})"
    )
    found = [info for info in store.list(path) if not info.path.startswith(f"{prefix}/")]
    found.sort(key=lambda info: info.path)
    _check_names(found)
    kind = _layout_of(found, where) if layout == "auto" else layout
    if kind == "webdataset":
        rows, classes = _shards(store, found, path.removesuffix("/"), where, on_progress)
    else:
        rows, classes = _folders(found, path.removesuffix("/"), where, on_progress)
    return _dataset(store, rows, classes, layout=kind, chain=chain, prefix=prefix)


def _check_arguments(store: object, path: object, stages: object, prefix: str, on_progress: object) -> None:
    if not isinstance(store, Store | str):
        raise ConfigError(f"store must be a Store or the URI of one, got {store!r}")
    require_type("path", path, str, "a folder in the store")
    if not isinstance(stages, Sequence) or isinstance(stages, str | bytes):
        raise ConfigError(f"stages must be a list of input stages, as of imagenet_eval(), got {stages!r}")
    check_name(require_type("prefix", prefix, str, "a folder in the store"))
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress must be a function, got {on_progress!r}")


def _check_names(found: Sequence[ObjectInfo]) -> None:
    """The index is UTF-8; a file system may hold other names, which arrive with lone surrogates in them."""
    for info in found:
        if _extension(info.path) not in FORMAT_OF and not info.path.endswith(".tar"):
            continue
        try:
            info.path.encode()
        except UnicodeEncodeError:
            raise DatasetError(f"object {info.path!r}: its name is not UTF-8; rename it") from None


def _layout_of(found: Sequence[ObjectInfo], where: str) -> Literal["webdataset", "folders"]:
    shard = next((info.path for info in found if info.path.endswith(".tar")), None)
    single = next((info.path for info in found if _extension(info.path) in FORMAT_OF), None)
    if shard and single:
        raise DatasetError(
            f"{where} holds shards ({shard!r}) and single samples ({single!r}); say which layout "
            "('webdataset' or 'folders'), or a path that holds only one of them"
        )
    if shard:
        return "webdataset"
    if single:
        return "folders"
    packed = next((info.path for info in found if info.path.endswith(_COMPRESSED)), None)
    if packed:
        raise DatasetError(f"shard {packed!r} is compressed; samples can only be read from a plain .tar")
    raise DatasetError(f"no samples in {where}: neither .tar shards nor {', '.join(FORMAT_OF)} files")


# -------------------------------------------------------------------------------------- class folders


def _folders(
    found: Sequence[ObjectInfo], path: str, where: str, on_progress: Progress | None
) -> tuple[list[_Row], list[str]]:
    media = [info for info in found if not _is_hidden(info.path) and _is_media(info.path)]
    if not media:
        raise DatasetError(f"no samples in {where}: no {', '.join(FORMAT_OF)} files in class folders")
    names = [info.path[len(path) + 1 if path else 0 :] for info in media]
    for name, info in zip(names, media, strict=True):
        if "/" not in name:
            raise DatasetError(
                f"object {info.path!r} lies in no class folder; class folders look like class/name.jpg"
            )
    classes = sorted({name.split("/", 1)[0] for name in names})
    number = {label: target for target, label in enumerate(classes)}
    rows = [
        _Row(info, 0, info.size, number[name.split("/", 1)[0]], name, FORMAT_OF[_extension(name)])
        for name, info in zip(names, media, strict=True)
    ]
    if on_progress:
        total = sum(info.size for info in media)
        on_progress(total, total)
    return rows, classes


def _is_media(path: str) -> bool:
    extension = _extension(path)
    if extension in _UNSUPPORTED:
        raise DatasetError(f"object {path!r}: .{extension} is not supported; allowed: {', '.join(FORMAT_OF)}")
    return extension in FORMAT_OF


# ------------------------------------------------------------------------------------------- shards


def _shards(
    store: Store, found: Sequence[ObjectInfo], path: str, where: str, on_progress: Progress | None
) -> tuple[list[_Row], list[str]]:
    shards = [
        store.head(info.path) for info in found if info.path.endswith(".tar") and not _is_hidden(info.path)
    ]
    if not shards:
        raise DatasetError(f"no samples in {where}: no .tar shards")
    meter = _Meter(sum(info.size for info in shards), on_progress)
    with ThreadPoolExecutor(min(_SHARDS_AT_ONCE, len(shards))) as pool:
        parts = list(pool.map(lambda info: _shard(store, info, meter), shards))
    rows = [row for part in parts for row in part]
    if not rows:
        raise DatasetError(f"no samples in {where}: its {len(shards)} shards hold none")
    beside = f"{path}/{CLASSES_FILE}" if path else CLASSES_FILE
    listed = any(info.path == beside for info in found)
    return rows, _class_names(store.get(beside) if listed else None, beside, rows)


def _shard(store: Store, info: ObjectInfo, meter: _Meter) -> list[_Row]:
    reader = tarshard.RangedReader(store, info, meter.at(info))
    rows: list[_Row] = []
    seen: set[str] = set()
    for key, group in groupby(tarshard.members(reader, info), key=lambda member: member.key):
        if key in seen:
            raise DatasetError(
                f"shard {info.path!r}: sample {key!r} is there twice, or its members lie apart"
            )
        seen.add(key)
        rows.append(_sample(reader, info, key, group))
    meter.at(info)(info.size)
    return rows


def _sample(
    reader: tarshard.RangedReader, info: ObjectInfo, key: str, group: Iterable[tarshard.Member]
) -> _Row:
    media: list[tarshard.Member] = []
    target: int | None = None
    others: list[str] = []
    for member in group:
        if member.extension in FORMAT_OF:
            media.append(member)
        elif member.extension == "cls":
            if target is not None:
                raise DatasetError(f"shard {info.path!r}, sample {key!r}: two .cls members")
            target = tarshard.read_class(reader, info, member)
        else:
            others.append(member.extension)
    if len(media) != 1:
        got = (
            ", ".join(f".{extension}" for extension in [each.extension for each in media] + others) or "none"
        )
        raise DatasetError(
            f"shard {info.path!r}, sample {key!r}: must have one of {', '.join(FORMAT_OF)}; it has {got}"
        )
    if target is None:
        raise DatasetError(f"shard {info.path!r}, sample {key!r}: no .cls member with its class")
    return _Row(info, media[0].start, media[0].stop, target, key, FORMAT_OF[media[0].extension])


def _class_names(text: bytes | None, path: str, rows: Sequence[_Row]) -> list[str]:
    largest = max(rows, key=lambda row: row.target)
    at_fault = f"shard {largest.object.path!r}, sample {largest.name!r}: class {largest.target}"
    if text is None:
        if largest.target >= MAX_CLASSES:
            raise DatasetError(f"{at_fault}; classes lie in 0..{MAX_CLASSES - 1}")
        return [str(target) for target in range(largest.target + 1)]
    try:
        names = text.decode().splitlines()
    except UnicodeDecodeError as exc:
        raise DatasetError(f"object {path!r} is not UTF-8: {exc}") from None
    if largest.target >= len(names):
        raise DatasetError(f"{at_fault}, but {path!r} names {len(names)} classes, 0..{len(names) - 1}")
    return names


class _Meter:
    """Adds up how far each shard has come; a threaded index reports one number."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def at(self, info: ObjectInfo) -> Callable[[int], None]:
        """What to call with the bytes of one shard that are dealt with."""

        def report(done: int) -> None:
            with self._lock:
                self._done[info.path] = max(done, self._done.get(info.path, 0))
                if self._on_progress:
                    self._on_progress(sum(self._done.values()), self._total)

        return report


# ------------------------------------------------------------------------------------------- common


def _dataset(
    store: Store, rows: Sequence[_Row], classes: Sequence[str], *, layout: str, chain: InputChain, prefix: str
) -> Dataset:
    other = next((row for row in rows if row.format != rows[0].format), None)
    if other is not None:
        raise DatasetError(
            f"formats are mixed: {rows[0].object.path!r} ({rows[0].name}) holds {rows[0].format}, "
            f"{other.object.path!r} ({other.name}) holds {other.format}; index them apart"
        )
    for row in rows:
        if not row.object.etag:
            raise DatasetError(
                f"object {row.object.path!r} has no ETag in store {store.name!r}; changes would go unseen"
            )
        if row.stop - row.start > files.MAX_SAMPLE_BYTES:
            raise DatasetError(
                f"sample {row.name!r} in {row.object.path!r} has {row.stop - row.start} bytes; at most "
                f"{files.MAX_SAMPLE_BYTES} are allowed"
            )
    _check_reads(store, rows[0], chain)
    index_bytes = files.encode_index(_table(rows))
    manifest = files.Manifest(
        schema=files.SCHEMA,
        layout=layout,
        format=rows[0].format,
        count=len(rows),
        classes=tuple(classes),
        index=files.IndexFile(sha256=sha256(index_bytes).hexdigest(), bytes=len(index_bytes)),
        stages=chain.to_json(),
    )
    return Dataset(store, files.encode_manifest(manifest), index_bytes, prefix=prefix)


def _check_reads(store: Store, row: _Row, chain: InputChain) -> None:
    """Whether the stages read what is stored, and audio at the rate that the first sample has.

    Of audio that cannot be read nothing is said: it is a bad sample, as any other would be.
    """
    rate = _wav_rate(store, row) if row.format == "wav" else None
    try:
        check_reads(chain, row.format)
    except ConfigError as exc:
        raise (exc if rate is None else ConfigError(f"{exc}, with sample_rate {rate}")) from None
    first = chain.stages[0]
    if rate is not None and isinstance(first, DecodeWav) and first.sample_rate != rate:
        raise ConfigError(
            f"sample {row.name!r} in {row.object.path!r} has {rate} samples a second, and "
            f"decode_wav.sample_rate is {first.sample_rate}; it must be {rate}, and resample may come behind"
        )


def _wav_rate(store: Store, row: _Row) -> int | None:
    stop = min(row.stop, row.start + _WAV_HEADER_BYTES)
    if stop == row.start:
        return None
    head = store.get_range(row.object.path, row.start, stop, etag=row.object.etag)
    try:
        return read_form(head).rate
    except SampleError:
        return None


def _table(rows: Sequence[_Row]) -> pa.Table:
    return pa.table(
        {
            "object": [row.object.path for row in rows],
            "etag": [row.object.etag for row in rows],
            "start": pa.array([row.start for row in rows], pa.int64()),
            "stop": pa.array([row.stop for row in rows], pa.int64()),
            "target": pa.array([row.target for row in rows], pa.int64()),
            "name": [row.name for row in rows],
        }
    )


def _extension(path: str) -> str:
    base = path.rpartition("/")[2]
    return base.rpartition(".")[2].lower() if "." in base else ""


def _is_hidden(path: str) -> bool:
    return any(segment.startswith((".", "__")) for segment in path.split("/"))
