"""Index stored samples: WebDataset shards or class folders, of images, audio or tensors."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

import pyarrow as pa

from upriver.errors import ConfigError, DatasetError, StoreError
from upriver.pipeline import left_out
from upriver.pipeline import manifest as files
from upriver.pipeline.chain import InputChain
from upriver.pipeline.dataset import Dataset, check_reads
from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats import tarshard, tensorfile
from upriver.pipeline.formats.wavfile import read_form
from upriver.pipeline.left_out import FORMAT_OF, OnLeftOut, Tally, describe
from upriver.pipeline.stages.audio import DecodeWav
from upriver.pipeline.stages.base import InputStage
from upriver.pipeline.stages.registry import in_place_of
from upriver.program.graph.artifact_paths import digest_of
from upriver.store import DEFAULT_PREFIX, ObjectInfo, Store, Unreachable, check_name
from upriver.text import near_names, printable
from upriver.types import require_type

log = logging.getLogger("upriver")

Layout = Literal["auto", "webdataset", "folders"]
Progress = Callable[[int, int], None]
"""Called with the bytes processed and the bytes of all objects, from several threads, one at a time."""

MAX_CLASSES = 2**20
"""Cap on targets where no class names give their number."""

CLASSES_FILE = "classes.txt"
"""File of class names next to the shards, one a line, in the order of the targets."""

SPLITS = frozenset(
    {
        *("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation"),
        *("heldout", "held-out", "held_out", "holdout"),
    }
)
"""Names of folders that hold splits of a dataset; as names of classes they are a mistake, as a rule."""

MAX_NAMED = 6
"""Most folders that an error names in place of one that is not there."""

_WAV_HEADER_BYTES = 4096  # bytes before the samples, where the format is among the first chunks
_SHARDS_AT_ONCE = 8  # headers are small and far apart: the wait is for round trips, not for bytes


@dataclass(frozen=True, slots=True)
class _Found:
    """An object, and its name below the indexed path."""

    name: str
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class _Row:
    object: ObjectInfo
    start: int
    stop: int
    target: int
    name: str
    format: str


def index(
    store: Store | str | os.PathLike[str],
    path: str = "",
    *,
    stages: Sequence[InputStage],
    layout: Layout = "auto",
    prefix: str = DEFAULT_PREFIX,
    on_left_out: OnLeftOut = "error",
    on_progress: Progress | None = None,
) -> Dataset:
    """Index the samples under a path. Nothing is written until the dataset's ``publish()``.

    A WebDataset shard gives a sample for each key with one media member and an integer in ``.cls``. Class
    folders (``class/name.jpg``) give their sorted names as classes. Only listings and tar headers are read,
    and for audio and ``.safetensors`` the first file's header.

    Everything that may be a sample and is not indexed counts as left out, by its reason: see
    :attr:`Dataset.left_out`. Texts, tables, a README and files that systems leave behind (``.DS_Store``) are
    no samples and do not count, nor do files next to class folders. Symbolic links that lead out of a file
    store or nowhere count by the rules for a file of their name. A file that a link gives a second name is
    two samples, and a warning names the link.

    Args:
        store: Store, its URI, or the path of a local folder.
        path: Directory, or one shard, in the store; empty for the whole store. ``./train/`` is ``train``.
        stages: Input stages; the first must read the stored format.
        prefix: Folder in which upriver keeps its own objects; never indexed.
        on_left_out: ``error`` refuses to leave anything out, ``report`` counts it in the dataset.
        on_progress: Called with (bytes done, bytes in all).

    Raises:
        DatasetError: If there is nothing to index or something cannot be indexed: a truncated shard, a
            duplicate, mixed formats, several tensors in a ``.safetensors``; with ``on_left_out="error"``
            anything that would be left out. The message names the object.
        ConfigError: If the stages do not fit together or do not read the stored format, or the audio has
            another rate than the stages'.
        StoreError: If the store cannot be read.
    """
    _check_arguments(store, path, stages, prefix, on_progress)
    for name, value, allowed in (
        ("layout", layout, ("auto", *files.LAYOUTS)),
        ("on_left_out", on_left_out, ("error", "report")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {value!r}")
    chain = InputChain(tuple(stages))
    store = store if isinstance(store, Store) else Store.open(store)
    path = _without_dots(path)
    where = (
        f"{path!r} in store {store.name!r} ({store.uri})" if path else f"store {store.name!r} ({store.uri})"
    )
    tally = Tally()
    listed, unreachable = _listed(store, path, prefix)
    found, missing = _visible(listed, tally)
    kind = _layout_of(found, where) if layout == "auto" else layout
    missing += [name for name, entry in unreachable if _is_missing(name, entry, kind, layout, tally)]
    if kind == "webdataset":
        rows, classes = _shards(store, found, path, tally, on_progress)
    else:
        folders = _class_folders(store, path, prefix)
        rows, classes = _folders(found, missing, folders, path, layout, tally, on_progress)
    rows = [row for row in rows if _has_a_size_that_is_read(row, tally)]
    if on_left_out == "error":
        tally.check(where)
    if not rows:
        missing_folder = "" if listed or unreachable else _missing_folder(store, path, prefix)
        raise DatasetError(_nothing(found, kind, tally, where) + missing_folder)
    _tell_of_links(store, rows)
    if kind == "folders":
        _tell_of_splits(path, classes)
    return _dataset(store, rows, classes, tally, layout=kind, chain=chain, prefix=prefix)


def _check_arguments(store: object, path: object, stages: object, prefix: str, on_progress: object) -> None:
    if not isinstance(store, Store | str | os.PathLike):
        raise ConfigError(f"store must be a Store, the URI of one or a folder's path, got {store!r}")
    require_type("path", path, str, "a folder in the store")
    if not isinstance(stages, Sequence) or isinstance(stages, str | bytes):
        raise ConfigError(
            "stages must be a list of input stages, as of imagenet_eval(), got "
            f"{printable(repr(stages), 80)}: {in_place_of(stages)}"
        )
    check_name(require_type("prefix", prefix, str, "a folder in the store"))
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress must be a function, got {on_progress!r}")


def _without_dots(path: str) -> str:
    """Return a path without ``.`` segments and trailing slashes, which a shell ignores, too."""
    return "/".join(segment for segment in path.split("/") if segment != ".").rstrip("/")


def _listed(store: Store, path: str, prefix: str) -> tuple[list[_Found], list[tuple[str, Unreachable]]]:
    """List all objects under a path by their names below it, without folder markers of S3 consoles.

    The second list holds the entries that the store cannot give, also by name.
    """
    own, unreachable = f"{prefix}/", list[Unreachable]()
    infos = [
        info for info in store.list(path, on_unreachable=unreachable.append) if not info.path.startswith(own)
    ]
    empty = set[str]()
    if store.is_far:
        infos, slashed = _told_apart(store, infos)
        unreachable += slashed
        empty = {info.path for info in infos if not info.size}
    if empty:
        parents = {info.path[:at] for info in infos for at, char in enumerate(info.path) if char == "/"}
        empty = {name for name in empty if name in parents or not store.exists(name)}

    def below(name: str) -> str:
        return name[len(path) + 1 if path else 0 :] or path.rpartition("/")[2]

    found = [_Found(below(info.path), info) for info in infos if info.path not in empty]
    others = [(below(entry.path), entry) for entry in unreachable if not f"{entry.path}/".startswith(own)]
    return sorted(found, key=lambda each: each.info.path), others


def _told_apart(store: Store, infos: Sequence[ObjectInfo]) -> tuple[list[ObjectInfo], list[Unreachable]]:
    """Separate keys that differ only in a trailing slash, which a listing gives the same name.

    Return each object once, and the keys with the slash as unreachable.
    """
    counts = Counter(info.path for info in infos)
    single = [info for info in infos if counts[info.path] == 1]
    twice = {path: store.head(path) for path, count in counts.items() if count > 1}
    slashed = [
        Unreachable(path=info.path, reason="name", why="has a twin whose key ends with a slash; rename it")
        for info in infos
        if info.size and info.path in twice and info != twice[info.path]
    ]
    return [*single, *twice.values()], slashed


def _visible(found: Sequence[_Found], tally: Tally) -> tuple[list[_Found], list[str]]:
    """Return the objects with an indexable name, without clutter and hidden ones; and names left out."""
    visible, missing = list[_Found](), list[str]()
    for each in found:
        name, info = each.name, each.info
        if left_out.is_clutter(name):
            continue
        if left_out.is_hidden(name):
            if _is_sample(name) or _is_shard(name) or left_out.is_compressed_shard(name):
                tally.add("hidden", info.path, f"object {info.path!r} is hidden by a dot")
                missing.append(name)
            continue
        why_not = _why_not_named(info.path)
        if why_not and (_is_sample(name) or _is_shard(name) or _may_be_a_sample(each)):
            tally.add("name", info.path, f"object {info.path!r}: {why_not}; rename it")
            missing.append(name)
        elif not why_not:
            visible.append(each)
    return visible, missing


def _is_missing(name: str, entry: Unreachable, kind: str, layout: str, tally: Tally) -> bool:
    """Return whether an unreachable entry may hold samples, by its name; if so, count it.

    A link that leads nowhere may have led to a folder if its name has no extension.
    """
    is_folder = entry.is_folder or (entry.is_folder is None and not _extension(name))
    is_packed = _is_shard(name) or left_out.is_compressed_shard(name)
    if left_out.is_clutter(name):
        return False
    if left_out.is_hidden(name):
        counts = entry.is_folder is False and (_is_sample(name) or is_packed)
    elif left_out.is_companion(name) and not entry.is_folder:
        counts = kind == "webdataset" and name == CLASSES_FILE
    elif is_folder:
        counts = True
    elif kind == "folders":
        counts = layout == "auto" if is_packed else "/" in name or _is_sample(name)
    else:
        counts = is_packed or _may_be_packed(name) or (layout == "auto" and _is_sample(name))
    if counts:
        known = "format" if entry.reason == "upload" else entry.reason
        reason = "hidden" if left_out.is_hidden(name) else known
        tally.add(reason, entry.path, f"{entry.path!r} {entry.why}")
    return counts


def _why_not_named(path: str) -> str:
    try:
        path.encode()
        check_name(path)
    except UnicodeEncodeError:  # from a file system, whose names arrive with lone surrogates in them
        return "its name is not UTF-8"
    except ConfigError as exc:
        return str(exc)
    return ""


def _layout_of(found: Sequence[_Found], where: str) -> Literal["webdataset", "folders"]:
    shard = next((each.info.path for each in found if _is_shard(each.name)), None)
    single = next((each.info.path for each in found if _is_sample(each.name)), None)
    if shard and single:
        raise DatasetError(
            f"{where} holds shards ({shard!r}) and single samples ({single!r}); say which layout "
            "('webdataset' or 'folders'), or a path that holds only one of them"
        )
    packed = any(left_out.is_compressed_shard(each.name) for each in found)
    return "webdataset" if shard or (packed and not single) else "folders"


def _nothing(found: Sequence[_Found], kind: str, tally: Tally, where: str) -> str:
    """Return why there is nothing to index."""
    if tally:
        return f"no samples in {where}; left out: {describe(tally.report())}"
    wanted = {
        "webdataset": "no .tar shards"
        if not any(_is_shard(each.name) for each in found)
        else "its shards hold none",
        "folders": f"no {', '.join(FORMAT_OF)} files in class folders",
    }
    return f"no samples in {where}: {wanted[kind]}"


def _missing_folder(store: Store, path: str, prefix: str) -> str:
    """Return which folder of a path does not exist, and the folders in its place; empty if all exist.

    Also empty if a folder above the path may not be listed: the hint hides no other error.
    """
    parent = ""
    for name in filter(None, path.split("/")):
        whole = f"{parent}/{name}".lstrip("/")
        try:
            folders = _class_folders(store, parent, prefix)
        except StoreError:
            return ""
        if name not in folders:
            known = sorted(folders)
            others = near_names(name, known) or known[:MAX_NAMED]
            hint = f"there are {', '.join(map(repr, others))}" if others else "there are no folders"
            return f"; there is no {whole!r}, and in {parent or store.uri!r} {hint}"
        parent = whole
    return ""


# -------------------------------------------------------------------------------------- class folders


def _class_folders(store: Store, path: str, prefix: str) -> set[str]:
    """Return the folders directly below the path, also empty ones, without hidden ones and upriver's own."""
    return {
        name
        for name in store.folders(path)
        if not f"{prefix}/".startswith(f"{path}/{name}/".lstrip("/"))
        and not left_out.is_hidden(name)
        and not left_out.is_clutter(name)
    }


def _folders(
    found: Sequence[_Found],
    missing: Sequence[str],
    folders: set[str],
    path: str,
    layout: str,
    tally: Tally,
    on_progress: Progress | None,
) -> tuple[list[_Row], list[str]]:
    media: list[_Found] = []
    above = {_class_of(name) for name in missing if "/" in name}
    classes = {name for name in above if not left_out.is_hidden(name)}
    for each in found:
        if _is_in_a_class(each, layout, tally):
            classes.add(_class_of(each.name))
            if _is_sample(each.name):
                media.append(each)
    others = [each for each in found if "/" in each.name and not left_out.is_description(each.name)]
    by_samples = {_extension(each.name) for each in others if _class_of(each.name) in classes}
    annotations = {
        # An empty file says nothing. A text of a kind that accompanies samples may belong to a missing one.
        _class_of(each.name)
        for each in others
        if each.info.size > 0 and _extension(each.name) not in by_samples
    }
    folders = folders | {_class_of(each.name) for each in found if "/" in each.name}
    with_samples = {_class_of(each.name) for each in media}
    for name in sorted(((folders - annotations) | classes) - with_samples):
        whole = f"{path}/{name}" if path else name
        tally.add("empty_class", whole, f"class folder {whole!r} holds no sample that is read")
        classes.add(name)
    ordered = sorted(classes)
    number = {label: target for target, label in enumerate(ordered)}
    rows = [
        _Row(
            each.info,
            0,
            each.info.size,
            number[_class_of(each.name)],
            each.name,
            FORMAT_OF[_extension(each.name)],
        )
        for each in media
    ]
    if on_progress:
        total = sum(each.info.size for each in media)
        on_progress(total, total)
    return rows, [label.encode(errors="backslashreplace").decode() for label in ordered]


def _is_in_a_class(each: _Found, layout: str, tally: Tally) -> bool:
    """Return whether a file is a sample of a class, or may be one and is left out."""
    name, shown = each.name, repr(each.info.path)
    if _is_sample(name):
        if "/" in name:
            return True
        why_not = f"object {shown} lies in no class folder; class folders look like class/name.jpg"
        tally.add("no_class_folder", each.info.path, why_not)
    elif left_out.is_compressed_shard(name):
        if layout == "auto":
            tally.add("compressed", each.info.path, f"shard {shown} is compressed, beside single samples")
    elif not _is_shard(name) and _may_be_a_sample(each):
        extension = _extension(name)
        kind = f".{extension} is not supported" if extension else "it has no extension"
        tally.add("format", each.info.path, f"object {shown}: {kind}; allowed: {', '.join(FORMAT_OF)}")
        return True
    return False


# ------------------------------------------------------------------------------------------- shards


def _may_be_a_sample(each: _Found) -> bool:
    """Return whether a file of unknown format may be a sample: it is in a class folder and no companion."""
    says_something = each.info.size > 0 or bool(_extension(each.name))
    return "/" in each.name and says_something and not left_out.is_companion(each.name)


def _shards(
    store: Store, found: Sequence[_Found], path: str, tally: Tally, on_progress: Progress | None
) -> tuple[list[_Row], list[str]]:
    shards = [store.head(each.info.path) for each in found if _is_shard(each.name)]
    for each in found:
        if left_out.is_compressed_shard(each.name):
            why_not = f"shard {each.info.path!r} is compressed; samples can only be read from a plain .tar"
            tally.add("compressed", each.info.path, why_not)
        elif _may_hold_samples(each):
            tally.add("format", each.info.path, f"object {each.info.path!r}: no shard that is read")
    if not shards:
        return [], []
    meter = _Meter(sum(info.size for info in shards), on_progress)
    with ThreadPoolExecutor(min(_SHARDS_AT_ONCE, len(shards))) as pool:
        parts = list(pool.map(lambda info: _shard(store, info, meter), shards))
    for _, part in parts:
        tally.merge(part)
    rows = [row for part, _ in parts for row in part]
    is_shard = shards[0].path == path
    folder = path.rpartition("/")[0] if is_shard else path
    beside = f"{folder}/{CLASSES_FILE}" if folder else CLASSES_FILE
    infos = store.list(beside) if is_shard else (each.info for each in found)
    listed = any(info.path == beside for info in infos)
    return rows, _class_names(store.get(beside) if listed else None, beside, rows) if rows else []


def _may_hold_samples(each: _Found) -> bool:
    """Return whether a file next to shards may be a shard by another name, or an archive of samples."""
    base = each.name.rpartition("/")[2].lower()
    if _is_shard(base) or _is_sample(base) or not each.info.size or left_out.is_companion(base):
        return False
    return _may_be_packed(base)


def _may_be_packed(name: str) -> bool:
    base = name.rpartition("/")[2].lower()
    return ".tar" in base or _extension(base) in left_out.ARCHIVES


def _shard(store: Store, info: ObjectInfo, meter: _Meter) -> tuple[list[_Row], Tally]:
    reader = tarshard.RangedReader(store, info, meter.at(info))
    tally = Tally()
    rows: list[_Row] = []
    seen: set[str] = set()
    for key, group in groupby(tarshard.members(reader, info, tally), key=lambda member: member.key):
        if key in seen:
            raise DatasetError(
                f"shard {info.path!r}: sample {key!r} is there twice, or its members lie apart"
            )
        seen.add(key)
        row = _sample(info, key, list(group), tally)
        if row is not None:
            rows.append(row)
    meter.at(info)(info.size)
    return rows, tally


def _sample(info: ObjectInfo, key: str, group: Sequence[tarshard.Member], tally: Tally) -> _Row | None:
    """Return the sample of a key; None if it is left out."""
    media = [member for member in group if member.extension in FORMAT_OF]
    labels = [member for member in group if member.extension == "cls"]
    shown = f"shard {info.path!r}, sample {key!r}"
    if len(labels) > 1:
        raise DatasetError(f"{shown}: two .cls members")
    if len(media) > 1:
        names = ", ".join(f".{member.extension}" for member in media)
        raise DatasetError(f"{shown}: must have one of {', '.join(FORMAT_OF)}; it has {names}")
    unread = next((member for member in (*media, *labels) if member.reason), None)
    if not media and unread is None:
        unread = next((member for member in group if member.reason), None)
    if unread is not None:
        tally.add(unread.reason, f"{info.path}: {key}", f"shard {info.path!r}: {unread.why_not}")
    elif not media:
        got = ", ".join(f".{member.extension}" for member in group if member.extension not in ("", "cls"))
        why_not = f"{shown}: must have one of {', '.join(FORMAT_OF)}; it has {got or 'none'}"
        tally.add("no_media", f"{info.path}: {key}", why_not)
    elif not labels:
        tally.add("no_class", f"{info.path}: {key}", f"{shown}: no .cls member with its class")
    else:
        target = tarshard.read_class(info, labels[0])
        return _Row(info, media[0].start, media[0].stop, target, key, FORMAT_OF[media[0].extension])
    return None


def _class_names(text: bytes | None, path: str, rows: Sequence[_Row]) -> list[str]:
    largest = max(rows, key=lambda row: row.target)
    at_fault = f"shard {largest.object.path!r}, sample {largest.name!r}: class {largest.target}"
    if text is None:
        if largest.target >= MAX_CLASSES:
            raise DatasetError(f"{at_fault}; classes lie in 0..{MAX_CLASSES - 1}")
        return [str(target) for target in range(largest.target + 1)]
    names = _read_class_names(text, path)
    if largest.target >= len(names):
        raise DatasetError(f"{at_fault}, but {path!r} names {len(names)} classes, 0..{len(names) - 1}")
    return names


def _read_class_names(text: bytes, path: str) -> list[str]:
    """Read names, one a line, ignoring a byte order mark, blanks at ends and blank last lines."""
    try:
        lines = re.split(r"\r\n|\n|\r", text.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise DatasetError(f"object {path!r} is not UTF-8: {exc}") from None
    names = [line.strip(" \t\f\v\0") for line in lines]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise DatasetError(
            f"object {path!r}: line {names.index('') + 1} is blank and others follow, which leaves open what "
            "number each class has; remove it or name its class"
        )
    return names


class _Meter:
    """Sum of the progress of all shards, which threads index at once."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done: dict[str, int] = {}
        self._lock = threading.Lock()

    def at(self, info: ObjectInfo) -> Callable[[int], None]:
        """Return the function to call with the processed bytes of one shard."""

        def report(done: int) -> None:
            with self._lock:
                self._done[info.path] = max(done, self._done.get(info.path, 0))
                if self._on_progress:
                    self._on_progress(sum(self._done.values()), self._total)

        return report


# ------------------------------------------------------------------------------------------- common


def _has_a_size_that_is_read(row: _Row, tally: Tally) -> bool:
    """Return whether a sample has bytes, and no more than a server reads; else count it."""
    num_bytes, path = row.stop - row.start, row.object.path
    if 0 < num_bytes <= files.MAX_SAMPLE_BYTES:
        return True
    shown = f"sample {row.name!r} in {path!r}"
    what = f"has {num_bytes} bytes; at most {files.MAX_SAMPLE_BYTES} are allowed" if num_bytes else "is empty"
    tally.add(
        "size" if num_bytes else "empty", f"{path}: {row.name}" if row.start else path, f"{shown} {what}"
    )
    return False


def _tell_of_links(store: Store, rows: Sequence[_Row]) -> None:
    """Warn of symbolic links that give a file a second name, which makes it a second sample."""
    etags = {row.object.path: row.object.etag for row in rows}
    if not store.is_local or len(set(etags.values())) == len(etags):
        return
    first: dict[str, str] = {}
    links: dict[str, str] = {}
    count = 0
    for name, etag in etags.items():
        other = first.setdefault(etag, name)
        link = other != name and (store.link_in(name) or store.link_in(other))
        if link:
            count += 1
            links.setdefault(link, f"{link!r} ({name!r} is {other!r})")
    if links:
        shown = [
            *islice(links.values(), left_out.MAX_EXAMPLES),
            *["..."][: len(links) - left_out.MAX_EXAMPLES],
        ]
        log.warning(
            "%d objects are indexed under a second name, through symbolic links: %s; each is a separate "
            "sample. Remove the links if that is not intended",
            count,
            "; ".join(shown),
        )


def _tell_of_splits(path: str, classes: Sequence[str]) -> None:
    """Warn where all classes have names of splits: then the path is most likely one folder too high."""
    if classes and all(name.lower() in SPLITS for name in classes):
        log.warning(
            "the classes are %s, which are names of splits: to index one of them, give its folder as the "
            "path, such as %r",
            ", ".join(classes),
            f"{path}/{classes[0]}".lstrip("/"),
        )


def _dataset(
    store: Store,
    rows: Sequence[_Row],
    classes: Sequence[str],
    tally: Tally,
    *,
    layout: str,
    chain: InputChain,
    prefix: str,
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
    _check_reads(store, rows[0], chain)
    index_bytes = files.encode_index(_table(rows))
    manifest = files.IndexManifest(
        schema=files.SCHEMA,
        layout=layout,
        format=rows[0].format,
        count=len(rows),
        classes=tuple(classes),
        index=files.IndexFile(sha256=digest_of(index_bytes), bytes=len(index_bytes)),
        stages=chain.to_json(),
        left_out=tally.report(),
    )
    return Dataset(store, files.encode_manifest(manifest), index_bytes, prefix=prefix)


def _check_reads(store: Store, row: _Row, chain: InputChain) -> None:
    """Check that the stages read the stored format, and audio at the first sample's rate.

    Of tensors the first sample must leave no doubt which tensor is meant. A file that cannot be read is
    ignored here: it is a bad sample like any other.
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
    problem = _why_unclear(store, row) if row.format == "safetensors" else ""
    if problem:
        raise DatasetError(f"sample {row.name!r} in {row.object.path!r} {problem}")


def _wav_rate(store: Store, row: _Row) -> int | None:
    try:
        return read_form(_head(store, row, _WAV_HEADER_BYTES)).rate
    except SampleError:
        return None


def _why_unclear(store: Store, row: _Row) -> str:
    try:
        return tensorfile.why_unclear(tensorfile.tensor_names(_head(store, row, tensorfile.MAX_HEAD_BYTES)))
    except SampleError:
        return ""


def _head(store: Store, row: _Row, num_bytes: int) -> bytes:
    """Return the first bytes of a sample."""
    stop = min(row.stop, row.start + num_bytes)
    return store.get_range(row.object.path, row.start, stop, etag=row.object.etag)


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


def _class_of(path: str) -> str:
    """Return the class folder of a path below the dataset."""
    return path.split("/", 1)[0]


def _is_sample(path: str) -> bool:
    return _extension(path) in FORMAT_OF


def _is_shard(path: str) -> bool:
    return _extension(path) == "tar"
