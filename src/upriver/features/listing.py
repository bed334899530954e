"""List what a root of kept features holds: a folder for each stretch, in it shards and ``stretch.json``.

Only names that this room gives count. Anything else in a root or a folder is left alone.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from upriver import files
from upriver.features.shard import BLOCK_NBYTES, disk_bytes
from upriver.features.stretch import SCHEMA, Stretch

STRETCH_FILE: Final = "stretch.json"
LOCK_FILE: Final = ".lock"

MAX_STRETCH_BYTES = 1 << 20
"""Longest ``stretch.json`` to read. One of 64 stages has some 10 kB."""

LEFT_BEHIND_S = 60.0
"""Age at which an unfinished ``stretch.json`` has lost its writer. A write takes milliseconds."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
SHARD_FILE = re.compile(r"rows-([0-9]{1,9})-[0-9a-f]{16}\.safetensors")
_UNFINISHED = re.compile(rf"\.(?:({SHARD_FILE.pattern})|{re.escape(STRETCH_FILE)})-[^#]+#[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """File of a shard.

    Attributes:
        rows: Number of rows, by its name.
        num_bytes: Bytes on disk.
        written_s: Time of writing, by the file system's clock.
    """

    path: Path
    rows: int
    num_bytes: int
    written_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFolder:
    """Folder of a stretch as it is on disk.

    Attributes:
        saved_s: Seconds that a row saves; 0 if ``stretch.json`` does not say.
        last_used_s: Time of the last use; that of the newest file without a ``stretch.json``.
        about: What the rows are, in words; empty if ``stretch.json`` does not say.
        description: The stretch as plain data; empty if ``stretch.json`` is missing, damaged or of another
            version.
        unfinished: Files of shards that are being written, or were by a job that was killed.
        other_bytes: Bytes on disk of all but the shards.
    """

    path: Path
    saved_s: float
    last_used_s: float
    about: str
    description: dict[str, Any]
    shards: tuple[ShardFile, ...]
    unfinished: tuple[Path, ...]
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.other_bytes + sum(shard.num_bytes for shard in self.shards)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(shard.rows for shard in self.shards)

    @property
    def saved_s_per_byte(self) -> float:
        """Seconds that a byte saves."""
        return self.saved_s * self.rows / max(1, sum(shard.num_bytes for shard in self.shards))


class _StretchFile(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    saved_s: float
    about: str = ""
    stretch: dict[str, Any]


def stretch_text(stretch: Stretch, *, saved_s: float, about: str) -> bytes:
    """Return the content of ``stretch.json``."""
    file = _StretchFile(schema=SCHEMA, saved_s=saved_s, about=about, stretch=stretch.to_json())
    return msgspec.json.format(msgspec.json.encode(file), indent=2)


def shard_name(rows: int, token: str) -> str:
    """Return the name of a shard.

    Args:
        rows: Number of its rows.
        token: 16 hexadecimal characters that no other shard of the folder has.
    """
    return f"rows-{rows}-{token}.safetensors"


def shard_files(folder: Path) -> list[ShardFile]:
    """Return the shards of a folder, the oldest first; none if it is missing.

    Raises:
        OSError: If the folder cannot be read.
    """
    return list(_listed(folder, {}, time.time())[0])


def kept_folders(root: Path) -> list[KeptFolder]:
    """Return the folders of a root; none if it is missing. What cannot be read is left out."""
    try:
        names = sorted(name for name in os.listdir(root) if _DIGEST.fullmatch(name))
    except OSError:
        return []
    return [folder for name in names if (folder := kept_folder(root / name)) is not None]


def kept_folder(path: Path) -> KeptFolder | None:
    """Return one folder; None if it is missing or cannot be read."""
    others: dict[str, os.stat_result] = {}
    now = time.time()
    try:
        own = path.lstat()
        if not stat.S_ISDIR(own.st_mode):
            return None
        shards, unfinished = _listed(path, others, now)
    except OSError:
        return None
    found = _read_stretch(path / STRETCH_FILE)
    used = others.get(STRETCH_FILE)
    return KeptFolder(
        path=path,
        saved_s=found.saved_s if found else 0.0,
        last_used_s=used.st_mtime if used else max([own.st_mtime, *(each.written_s for each in shards)]),
        about=found.about if found else "",
        description=found.stretch if found else {},
        shards=shards,
        unfinished=unfinished,
        other_bytes=BLOCK_NBYTES + sum(disk_bytes(each.st_size) for each in others.values()),
    )


def remove_files(folder: KeptFolder) -> None:
    """Remove a folder that holds no shard, with what this room writes beside shards. The caller locks it."""
    for name in (STRETCH_FILE, LOCK_FILE):
        with suppress(OSError):
            (folder.path / name).unlink()
    with suppress(OSError):  # foreign files, which stay
        folder.path.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove what killed writers of a folder have left. The caller must be its only writer."""
    with suppress(OSError):
        for path in _listed(folder, {}, time.time())[1]:
            with suppress(OSError):
                path.unlink()


def write_stretch(folder: Path, text: bytes) -> None:
    """Write ``stretch.json``, whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    with files.replacing(folder / STRETCH_FILE, private=True) as new:
        new.write_bytes(text)


def _listed(
    folder: Path, others: dict[str, os.stat_result], now: float
) -> tuple[tuple[ShardFile, ...], tuple[Path, ...]]:
    """Return shards and unfinished files of a folder; add the state of all but shards to ``others``."""
    shards, unfinished = list[ShardFile](), list[Path]()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match, left = SHARD_FILE.fullmatch(entry.name), _UNFINISHED.fullmatch(entry.name)
            if match is None and left is None and entry.name not in (STRETCH_FILE, LOCK_FILE):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another job has removed it
                continue
            path = Path(entry.path)
            if match is None:
                others[entry.name] = status
                if left is not None and (left[1] or abs(now - status.st_mtime) > LEFT_BEHIND_S):
                    unfinished.append(path)
            elif stat.S_ISREG(status.st_mode):
                num_bytes, rows = disk_bytes(status.st_size), int(match[1])
                each = ShardFile(path=path, rows=rows, num_bytes=num_bytes, written_s=status.st_mtime)
                shards.append(each)
    shards.sort(key=lambda shard: (shard.written_s, shard.path.name))
    return tuple(shards), tuple(unfinished)


def _read_stretch(path: Path) -> _StretchFile | None:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            found = msgspec.json.decode(file.read(MAX_STRETCH_BYTES), type=_StretchFile)
        if found.schema == SCHEMA and 0 <= found.saved_s < float("inf"):
            return found
    return None
