"""Small files that outlast a process: what was measured or proven once, under ``$UPRIVER_CACHE``.

Every file is optional. One that cannot be used, as a damaged one, a pipe or a folder, counts as missing, and
the next one that is written takes its place. Where nothing can be written, each process finds out anew.
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
"""Longest file read: some thirty times the longest that is written."""

MAX_FILES: Final = 4096
"""Files in one folder; beyond, those written first go. Most have some hundred bytes."""

LEFT_BEHIND_S: Final = 60.0
"""A file takes its place within milliseconds; one that still waits after so long has lost its writer."""

_KEPT = re.compile(r"[0-9a-f]{64}(\.[a-z]+)?\.json")
_UNFINISHED = re.compile(rf"\.{_KEPT.pattern}-.+")

_Found = TypeVar("_Found")

_told: set[Path] = set()
"""Folders that this process has said something about."""


def cache_folder() -> Path:
    """Give the folder that remembers findings: ``$UPRIVER_CACHE`` or the user's cache folder.

    A user without a home folder, or a relative folder where the current one is gone, has no cache: nothing
    can be read from or written to the path given then. A folder that others may write to would not do, as
    proofs lie there.
    """
    try:
        if own := os.environ.get("UPRIVER_CACHE"):
            return Path(own).absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "upriver"
    except (RuntimeError, OSError):  # a user id without an entry in the password file, as in many containers
        return Path(os.devnull)


class Cache:
    """JSON files in one folder, each named by the digest of what it depends on.

    Trouble is logged once a process, and raised by `write` alone. In ``/dev/null`` nothing is kept, and
    nothing said.

    Args:
        folder: Its name in `cache_folder`, or its absolute path.
        max_files: Files in it; beyond, those written first go.
    """

    def __init__(self, folder: str | Path, *, max_files: int = MAX_FILES) -> None:
        self._name, self._max_files = folder, max_files

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return cache_folder() / self._name

    def load(
        self, name: str, decode: Callable[[bytes], _Found], *, max_age_s: float = math.inf
    ) -> _Found | None:
        """Give what a file holds; None where it is missing, older than that, or cannot be used.

        Args:
            name: Of the file, without ``.json``.
            decode: Makes something of its bytes; any error that it raises means that they cannot be used.
            max_age_s: Seconds since it was written, at most.
        """
        path = self.folder / f"{name}.json"
        try:
            data = _read(path, max_age_s)
            return decode(data) if data is not None else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # a damaged file may make a decoder raise anything
            why = error_text(error).removeprefix("ConfigError: ")
            self._tell(f"{printable(str(path), 400)} is not used: {why}")
            return None

    def save(self, name: str, text: str) -> None:
        """Keep a file if that is possible; see `write`."""
        folder = self.folder
        if Path(os.devnull) in (folder, *folder.parents):
            return
        try:
            self.write(name, text)
        except OSError as error:
            self._tell(f"nothing is kept in {printable(str(folder), 400)}: {error_text(error)}")

    def write(self, name: str, text: str) -> Path:
        """Write a file whole or not at all, also when two jobs write it; give its path.

        Raises:
            OSError: If it cannot be written. What was there is still there.
        """
        path = self.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, private=True) as new:
            new.write_text(text, encoding="utf-8")
        _clear_up(path.parent, self._max_files)
        return path

    def _tell(self, what: str) -> None:
        """Warn of the first trouble in the user's cache, or in a folder of its own."""
        about = self.folder if isinstance(self._name, Path) else cache_folder()
        if about not in _told:
            _told.add(about)
            log.warning("%s", what)


def _read(path: Path, max_age_s: float) -> bytes | None:
    """Read a regular file; None where it is older than that.

    Raises:
        OSError: If it cannot be read.
        ConfigError: If it is something else, or too long.
    """
    # Without waiting: the path may be that of a pipe that nobody writes to.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError("it is no regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(f"it has {status.st_size} bytes, one of ours at most {MAX_FILE_BYTES}")
        # An age below 0 is that of a clock that was put back; it is no better known than one above.
        if abs(time.time() - status.st_mtime) > max_age_s:
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(handle)


def _clear_up(folder: Path, max_files: int) -> None:
    """Drop what killed jobs left half written, and the oldest files where there are too many."""
    kept: list[tuple[int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another job may be dropping it
                if _KEPT.fullmatch(entry.name):
                    kept.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
                elif _UNFINISHED.fullmatch(entry.name):
                    written_s = entry.stat(follow_symlinks=False).st_mtime
                    if time.time() - written_s > LEFT_BEHIND_S:
                        os.unlink(entry.path)
    for _, path in sorted(kept)[: max(0, len(kept) - max_files)]:
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(path)
