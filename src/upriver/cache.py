"""Cache small results between processes, such as measurements and proofs, under ``$UPRIVER_CACHE``.

Every file is optional. An unusable one, such as a damaged file, a pipe or a folder, counts as missing, and
the next write replaces it. If nothing can be written, each process measures again.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from upriver.errors import ConfigError
from upriver.files import replacing
from upriver.text import error_text, printable

log = logging.getLogger(__name__)

MAX_FILE_BYTES: Final = 64 << 20
"""Longest file to read: some thirty times the longest one written."""

MAX_FILES: Final = 4096
"""Most files in one folder; more, and the oldest are deleted. Most files have some hundred bytes."""

LEFT_BEHIND_S: Final = 60.0
"""Age at which an unfinished file has lost its writer. A write takes milliseconds."""

_KEPT = re.compile(r"[0-9a-f]{64}(\.[a-z]+)?\.json")
_UNFINISHED = re.compile(rf"\.{_KEPT.pattern}-.+")

_Found = TypeVar("_Found")

_told: set[Path] = set()
"""Folders about which this process has logged a warning."""


def cache_folder() -> Path:
    """Return the cache folder: ``$UPRIVER_CACHE`` or the user's own cache folder.

    There is no cache for a user without a home folder, or with a relative path whose current folder is gone.
    The returned path then can be neither read nor written. A folder that others may write to is not used
    instead, because the cache holds proofs.
    """
    try:
        if own := os.environ.get("UPRIVER_CACHE"):
            return Path(own).absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "upriver"
    except (RuntimeError, OSError):  # a user id without an entry in the password file, as in many containers
        return Path(os.devnull)


class Cache:
    """JSON files in one folder, each named by the digest of its inputs.

    Each process logs its first problem; only `write` raises errors. With ``/dev/null`` nothing is stored or
    logged.

    Args:
        folder: Name within `cache_folder`, or an absolute path.
    """

    def __init__(self, folder: str | Path, *, max_files: int = MAX_FILES) -> None:
        self._name, self._max_files = folder, max_files

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return cache_folder() / self._name

    def load(
        self, name: str, decode: Callable[[bytes], _Found], *, max_age_s: float = math.inf
    ) -> _Found | None:
        """Return the content of a file; None if it is missing, too old or unusable.

        Args:
            name: Name of the file without ``.json``.
            decode: Function that decodes the bytes. Any error that it raises makes the file unusable.
            max_age_s: Most seconds since the file was written.
        """
        path = self.folder / f"{name}.json"
        try:
            data = _read(path, max_age_s)
            return decode(data) if data is not None else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # for a damaged file a decoder may raise any error
            why = error_text(error).removeprefix("ConfigError: ")
            self._tell(f"{printable(str(path), 400)} is not used: {why}")
            return None

    def save(self, name: str, text: str) -> None:
        """Write a file if possible; see `write`."""
        folder = self.folder
        if Path(os.devnull) in (folder, *folder.parents):
            return
        try:
            self.write(name, text)
        except OSError as error:
            self._tell(f"nothing is kept in {printable(str(folder), 400)}: {error_text(error)}")

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically, even if two jobs write it, and return its path.

        Raises:
            OSError: If it cannot be written. An existing file is unchanged.
        """
        path = self.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, private=True) as new:
            new.write_text(text, encoding="utf-8")
        _clear_up(path.parent, self._max_files)
        return path

    def _tell(self, what: str) -> None:
        """Log the first problem of the user's cache, or of a folder outside it."""
        about = self.folder if isinstance(self._name, Path) else cache_folder()
        if about not in _told:
            _told.add(about)
            log.warning("%s", what)


def _read(path: Path, max_age_s: float) -> bytes | None:
    """Read a regular file. Return None if it is too old."""
    # Do not block: the path may be a pipe without a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("it is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"the file has {status.st_size} bytes; a cache file has at most {MAX_FILE_BYTES}"
            )
        # A negative age comes from a clock that was set back, and says no more than a positive one.
        if abs(time.time() - status.st_mtime) > max_age_s:
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(handle)


def _clear_up(folder: Path, max_files: int) -> None:
    """Delete unfinished files of killed jobs, and the oldest files beyond `max_files`."""
    kept: list[tuple[int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another job may have deleted it
                if _KEPT.fullmatch(entry.name):
                    kept.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
                elif _UNFINISHED.fullmatch(entry.name):
                    written_s = entry.stat(follow_symlinks=False).st_mtime
                    if time.time() - written_s > LEFT_BEHIND_S:
                        os.unlink(entry.path)
    for _, path in sorted(kept)[: max(0, len(kept) - max_files)]:
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(path)
