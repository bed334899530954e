"""Write files durably and atomically, and give each output one owner at a time.

All writes to outputs, caches and file stores go through `replacing`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from upriver.errors import ConfigError
from upriver.text import printable

NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that do not sync folders (``fsync(2)``)."""

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without locks (``flock(2)``)."""


LOCK_EVERY_S = 0.01
"""Seconds between two tries to lock a file that another process has locked."""

STATUS = Path("/proc/self/status")
"""File that shows the user's mask for new files. umask(2) shows it only by changing it."""


@contextlib.contextmanager
def replacing(
    path: Path, *, private: bool = False, lock: AbstractContextManager[object] | None = None
) -> Iterator[Path]:
    """Create a file in the same folder that durably replaces ``path`` at the end of the block.

    The file is synced before it is renamed, and the folder afterwards. So after a power failure the disk
    holds the old file or the new one. An error leaves the old one. Listings of stores skip the unfinished
    file.

    Args:
        path: Destination. A link is replaced, not followed.
        private: If true, only the owner may access the new file. Else it has the permissions of the old one,
            or the usual ones.
        lock: Held while the file is renamed.

    Raises:
        OSError: If the file cannot be created, written or renamed.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=f"#{os.getpid()}")
    new = Path(name)
    try:
        try:
            os.fchmod(handle, 0o600 if private else _mode_for(path))
        finally:
            os.close(handle)
        yield new
        sync(new)
        with lock or contextlib.nullcontext():
            os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        raise
    sync(path.parent)


def _mode_for(path: Path) -> int:
    """Return the permissions of an existing file, else those of a new one, which temporary files lack."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    return 0o666 & ~_umask()


def _umask() -> int:
    with contextlib.suppress(OSError):
        status = STATUS.read_text(encoding="ascii", errors="replace")
        if found := re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE):
            return int(found[1], 8)
    mask = os.umask(0o077)  # some sandboxes hide it; for a moment, other threads make private files
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


def place_folder(made: Path, path: Path) -> None:
    """Rename a folder to its final name, with all its content synced.

    Raises:
        OSError: If it cannot be renamed, as when the name is taken, or the disk fails.
    """
    for each in (*made.rglob("*"), made):
        sync(each)
    made.rename(path)
    sync(path.parent)


def make_folders(folder: Path, *, private: bool = False) -> list[Path]:
    """Create a folder and its missing parents durably; return the new ones, outermost first.

    Args:
        private: If true, only the owner may access the new ones.
    """
    if folder.is_dir():
        return []
    made = make_folders(folder.parent, private=private)
    try:
        folder.mkdir(0o700 if private else 0o777)
    except FileExistsError:  # another process was faster, or a file has the name, which its user reports
        return made
    sync(folder.parent)
    return [*made, folder]


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Own an output during the block, by a lock on ``.NAME.lock`` in its folder.

    The kernel releases the lock when its process ends in any way. On a file system without locks, every
    process owns every output.

    Raises:
        ConfigError: If another process owns it; the message names that process.
        OSError: If the lock cannot be created.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.lock")
    handle = _locked(path, beside)
    try:
        with contextlib.suppress(OSError):  # on a full disk the owner stays unnamed
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
        os.close(handle)


def _locked(path: Path, beside: Path) -> int:
    """Open and lock a lock file; the error for a lock of another process names that process."""
    handle = try_lock(beside, mode=0o666)
    if handle is None:
        owner = ""
        with contextlib.suppress(OSError), beside.open("rb") as file:
            owner = file.read(200).decode(errors="replace")
        owner = printable(owner or "another process", 200)
        raise ConfigError(f"{owner} is writing to {path}: give another output")
    return handle


def try_lock(path: Path, *, mode: int = 0o600, within_s: float = 0.0) -> int | None:
    """Open and lock a lock file; retry if its last owner has just removed it.

    The kernel releases the lock when the descriptor and all its copies are closed. On a file system without
    locks, every process gets it.

    Args:
        within_s: Seconds to wait for the lock.

    Returns:
        The file's descriptor; None if another one has the lock.

    Raises:
        OSError: If the file cannot be opened or locked.
    """
    until_s = time.monotonic() + within_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                os.close(handle)
                if time.monotonic() >= until_s:
                    return None
                time.sleep(LOCK_EVERY_S)
                continue
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
        if is_at(handle, path):
            return handle
        os.close(handle)


def release(handle: int) -> None:
    """Release a lock, even if a forked process has a copy of its descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


def is_at(handle: int, path: Path) -> bool:
    """Return whether an open file still has this path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def remove_unfinished(path: Path) -> None:
    """Remove unfinished files that killed writers of a file have left. The file must be `owned`."""
    path = Path(os.path.realpath(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}-????????#*"):
        with contextlib.suppress(OSError):
            left.unlink()
