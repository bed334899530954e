"""Files that outlast a process: each takes its place whole, and an output has one owner at a time.

All that upriver writes to outputs, caches and file stores goes through `replacing`.
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
from collections.abc import Iterator
from pathlib import Path

from upriver.errors import ConfigError
from upriver.text import printable

NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""How file systems answer that sync no folders (``fsync(2)``)."""

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""How file systems answer that have no locks (``flock(2)``)."""


STATUS = Path("/proc/self/status")
"""Tells the user's mask for new files, which umask(2) tells only by changing it."""


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Make a new file in the same folder, which takes the place of ``path`` at the end, and lasts.

    The file is synced before it is renamed, the folder after, so that a machine that loses power holds the
    old file or the new one. An error leaves the old one. Listings of stores skip the new file until then.

    Args:
        path: A link is replaced, not followed.
        private: Give the new file to its owner alone. Else it has the permissions of the old one, or where
            there was none the usual ones.

    Raises:
        OSError: If the file cannot be made, does not fit, or cannot take that place.
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
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        raise
    sync(path.parent)


def _mode_for(path: Path) -> int:
    """Give the permissions of a file that is there, else those of a new one, which temporary files lack."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    return 0o666 & ~_umask()


def _umask() -> int:
    with contextlib.suppress(OSError):
        status = STATUS.read_text(encoding="ascii", errors="replace")
        if found := re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE):
            return int(found[1], 8)
    mask = os.umask(0o077)  # some sandboxes do not tell; for a moment, other threads make private files
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or a folder's names.

    Raises:
        OSError: If the disk does not take it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


def place_folder(made: Path, path: Path) -> None:
    """Give a folder its final name, with all in it to last, unless there is one already.

    Raises:
        OSError: If it cannot be renamed, or the disk does not take it.
    """
    for each in (*made.rglob("*"), made):
        sync(each)
    made.rename(path)
    sync(path.parent)


def make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it that are missing, so that they last; return them, outermost first.

    Raises:
        OSError: If one cannot be made.
    """
    if folder.is_dir():
        return []
    made = make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:  # another process was faster, or a file stands there, which is told when used
        return made
    sync(folder.parent)
    return [*made, folder]


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Own an output while the block runs, by a lock on ``.NAME.lock`` in its folder.

    The kernel releases the lock when its process ends, however that happens. Where a file system has no
    locks, everybody owns everything.

    Raises:
        ConfigError: If another process owns it; names that process.
        OSError: If the lock cannot be made.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.lock")
    handle = _locked(path, beside)
    try:
        with contextlib.suppress(OSError):  # a full disk: the owner stays without a name
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
        os.close(handle)


def _locked(path: Path, beside: Path) -> int:
    """Open a lock file and lock it; try again where an owner that ends has just removed it."""
    while True:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise ConfigError(f"{printable(owner, 200)} is writing to {path}: give another output") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), beside.stat()):
                return handle
        os.close(handle)


def remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed have left of writing a file, which must be `owned`."""
    path = Path(os.path.realpath(path))
    for left in path.parent.glob(f".{glob.escape(path.name)}-????????#*"):
        with contextlib.suppress(OSError):
            left.unlink()
