"""Resolve names of a file store, including symbolic links, within its root.

obstore refuses ``..`` but follows symbolic links, even out of its root, and lists through them. So every name
is resolved here first and refused if it leaves the root. Listing walks the folders by itself. A link that
stays inside the root counts as a file.

Check and read are two steps, because obstore opens files by name. A user who can write to the root can swap a
link between them. The kernel could do both in one step (``openat2`` with ``RESOLVE_BENEATH``), but neither
Python nor obstore offers that. ``O_NOFOLLOW`` would check only the last part of a name. The root is resolved
once, and opened by name at each access: a folder above it that a link replaces is followed. Only the operator
grants write access to a store's folder and to those above.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from upriver.errors import ObjectNotFound
from upriver.files import make_folders, replacing
from upriver.store.names import MAX_NAME_BYTES

_STAGED = re.compile(r"#\d+$")
"""Names of unfinished files: obstore and `upriver.files.replacing` write to them before they rename."""


_OUT = "out of the store's root"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreachable:
    """Entry of a folder that a listing cannot yield.

    Attributes:
        path: Name of the entry, relative to the store.
        reason: ``link``: a symbolic link that leads out of the store, nowhere, in a circle, or above the
            listed folder. ``special``: a FIFO, socket or device. ``unreadable``: a file or folder that this
            process may not read. ``name``: a folder whose name is longer than an object's may be. ``upload``:
            a file of an interrupted upload.
        why: The reason in words that follow the name.
        is_folder: True for a folder or a link to one; None if unknown.
    """

    path: str
    reason: Literal["link", "special", "unreadable", "name", "upload"]
    why: str
    is_folder: bool | None = False


OnUnreachable = Callable[[Unreachable], None]
"""Function to call with each entry that a listing cannot yield."""


def is_staged(name: str) -> bool:
    """Return True if obstore writes to such a name before it renames the file."""
    return _STAGED.search(name) is not None


def inside(root: Path, path: str) -> Path:
    """Return the real path of a name.

    Args:
        root: Resolved root of the store.
        path: Checked name.

    Raises:
        ObjectNotFound: If a symbolic link leads out of ``root``, or in a circle: its target is no object of
            this store.
    """
    real, why_not = _resolve(root, path)
    if why_not:
        raise ObjectNotFound(f"{path!r} is behind a symbolic link that leads {why_not}")
    return real


def _resolve(root: Path, path: str) -> tuple[Path, str]:
    """Return the real path of a name, and where it leads instead if it leaves the root."""
    if not _is_behind_link(root, path):
        return root / path, ""
    try:
        real = (root / path).resolve()
    except RuntimeError:
        return root, "in a circle"
    return real, "" if real.is_relative_to(root) else _OUT


def _is_behind_link(root: Path, path: str) -> bool:
    """Return True if a part of a name is a link. The root itself is resolved already."""
    place = str(root)
    try:
        for part in path.split("/"):
            place = f"{place}/{part}"
            if stat.S_ISLNK(os.lstat(place).st_mode):
                return True
    except OSError:  # the file does not exist, or may not be inspected
        pass
    return False


def walk(
    root: Path, prefix: str, on_unreachable: OnUnreachable | None = None
) -> Iterator[tuple[str, os.stat_result]]:
    """List every object under a prefix, by name, with its status.

    A link to a folder is followed, so a folder may appear under several names. A link to a folder on its own
    path, or above one, is not followed. Folders that links join in a circle are listed once each: by their
    own names, else once behind each link that leads into the circle.

    Args:
        root: Resolved root of the store.
        prefix: Folder or file to list; empty for all.
        on_unreachable: Function to call with each entry that is left out. With it, files that this process
            may not read are left out, too.

    Raises:
        ObjectNotFound: If the prefix itself is behind a symbolic link that leads out of ``root``.
        OSError: If the prefix cannot be listed. Without ``on_unreachable`` also for the first link, special
            file or folder that cannot be listed: samples would be missing silently. Names that begin with a
            dot are exempt: editors leave such links (``.#name``), and no sample has such a name.
    """
    start = inside(root, prefix) if prefix else root
    if start.is_dir():
        yield from _Walk(root, start, on_unreachable).own(prefix, (start,))
    elif start.is_file():
        yield prefix, start.stat()


def _refuse(entry: Unreachable) -> None:
    """Raise an error for an entry that must not be left out."""
    if entry.reason != "upload" and not entry.path.rpartition("/")[2].startswith("."):
        raise OSError(f"{entry.path!r} {entry.why}; remove it, or list a folder without it")


class _Walk:
    """List one folder.

    Args:
        root: Root of the store.
        start: The folder, resolved.
        on_unreachable: Function to call with each entry that is left out; None to raise.
    """

    def __init__(self, root: Path, start: Path, on_unreachable: OnUnreachable | None) -> None:
        self._root, self._start = root, start
        self._tell, self._tells = on_unreachable or _refuse, on_unreachable is not None
        self._known: dict[Path, int] | None = None

    def own(self, prefix: str, way: tuple[Path, ...]) -> Iterator[tuple[str, os.stat_result]]:
        """List a folder below the start by its own name. ``way`` holds the folders from the start to it."""
        seen: set[Path] = set()
        for name, entry, real in self._entries(prefix, way[-1], self._tell):
            if real is None:
                yield from self._object(name, entry)
            elif entry.is_symlink():
                yield from self._linked(name, (*way, real), len(way), seen)
            else:
                yield from self.own(name, (*way, real))

    def _linked(
        self, prefix: str, way: tuple[Path, ...], num_own: int, seen: set[Path]
    ) -> Iterator[tuple[str, os.stat_result]]:
        """List a folder behind a link, unless that would list it twice.

        Args:
            prefix: Name of the folder.
            way: Resolved folders from the start to it.
            num_own: Number of these that were reached by their own names.
            seen: Folders of its circle that were listed since a link led into the circle.
        """
        *before, folder = way
        if any(passed.is_relative_to(folder) for passed in before):
            return  # its content has other names, or lies above the listed folder
        circle = self._circle(folder)
        if circle != self._circle(before[-1]):
            seen = set()
        named = circle == self._circle(way[num_own - 1]) and folder.is_relative_to(self._start)
        if named or folder in seen:
            return
        seen.add(folder)
        for name, entry, real in self._entries(prefix, folder, self._tell):
            if real is None:
                yield from self._object(name, entry)
            else:
                yield from self._linked(name, (*way, real), num_own, seen)

    def _entries(
        self, prefix: str, folder: Path, tell: OnUnreachable
    ) -> Iterator[tuple[str, os.DirEntry[str], Path | None]]:
        """Yield each entry of a folder with its name, and the real path of those that are folders.

        Links that lead out of the root or in a circle are left out, as are folders that cannot be listed.
        """
        try:
            with os.scandir(folder) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError as exc:
            if folder == self._start:
                raise
            why = f"is a folder that cannot be listed ({exc.strerror})"
            tell(Unreachable(path=prefix, reason="unreadable", why=why, is_folder=True))
            return
        for entry in ordered:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            real, why_not = _resolve(self._root, name) if entry.is_symlink() else (folder / entry.name, "")
            if why_not:
                tell(_link(name, entry, why_not))
            elif not _is_folder(entry):
                yield name, entry, None
            elif len(os.fsencode(name)) > MAX_NAME_BYTES:
                why = f"is a folder with a name that is longer than {MAX_NAME_BYTES} bytes"
                tell(Unreachable(path=name, reason="name", why=why, is_folder=True))
            else:
                yield name, entry, real

    def _object(self, name: str, entry: os.DirEntry[str]) -> Iterator[tuple[str, os.stat_result]]:
        """List an entry that is not a folder."""
        try:
            status = entry.stat()
        except OSError as exc:
            if entry.is_symlink() and exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                self._tell(_link(name, entry, "in a circle" if exc.errno == errno.ELOOP else "nowhere"))
            elif exc.errno != errno.ENOENT:  # a file deleted since the folder was read is no error
                why = f"cannot be looked at ({exc.strerror})"
                self._tell(Unreachable(path=name, reason="unreadable", why=why, is_folder=None))
            return
        if not stat.S_ISREG(status.st_mode):
            self._tell(Unreachable(path=name, reason="special", why="is neither file nor directory"))
        elif is_staged(name):
            why = "is what an upload left that was cut off"
            self._tell(Unreachable(path=name, reason="upload", why=why))
        elif self._tells and not _is_readable(entry, status):
            self._tell(Unreachable(path=name, reason="unreadable", why="is a file that may not be read"))
        else:
            yield name, status

    def _circle(self, folder: Path) -> int:
        """Return the number of a folder's circle. Folders that lead to each other have the same number."""
        if self._known is None:
            self._known = self._circles()
        return self._known[folder]

    def _circles(self) -> dict[Path, int]:
        """Return a number for each folder's strongly connected component (Tarjan, SIAM J. Comput. 1972)."""
        found: dict[Path, int] = {}
        low: dict[Path, int] = {}
        numbered: dict[Path, int] = {}
        open_ones: list[Path] = []
        ahead: list[tuple[Path, Iterator[Path]]] = []

        def enter(folder: Path) -> None:
            numbered[folder] = low[folder] = len(numbered)
            open_ones.append(folder)
            name = "" if folder == self._root else folder.relative_to(self._root).as_posix()
            entries = self._entries(name, folder, lambda entry: None)
            below = (real for _, _, real in entries if real is not None)
            # Links to folders above are never followed, so they close no circle.
            ahead.append((folder, (real for real in below if not folder.is_relative_to(real))))

        enter(self._start)
        while ahead:
            folder, others = ahead[-1]
            other = next(others, None)
            if other is None:
                ahead.pop()
                if ahead:
                    low[ahead[-1][0]] = min(low[ahead[-1][0]], low[folder])
                if low[folder] == numbered[folder]:
                    while folder not in found:
                        found[open_ones.pop()] = numbered[folder]
            elif other not in numbered:
                enter(other)
            elif other not in found:
                low[folder] = min(low[folder], numbered[other])
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is a folder or a link to one; False if unknown."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_readable(entry: os.DirEntry[str], status: os.stat_result) -> bool:
    """Return True if this process may read a file. The kernel is asked only if the mode does not decide."""
    return status.st_mode & 0o444 == 0o444 or os.access(entry.path, os.R_OK, effective_ids=True)


def _link(name: str, entry: os.DirEntry[str], where: str) -> Unreachable:
    """Return the entry for a symbolic link that leads to no object, with its target."""
    is_folder: bool | None = None
    with suppress(OSError):
        is_folder = stat.S_ISDIR(entry.stat().st_mode)
    hint = " (open the store at a folder that holds both)" if where == _OUT else ""
    why = f"is a symbolic link to {os.readlink(entry.path)!r}, which leads {where}{hint}"
    return Unreachable(path=name, reason="link", why=why, is_folder=is_folder)


def put(
    root: Path, path: str, pieces: Iterable[bytes | bytearray | memoryview], *, private: bool = False
) -> None:
    """Write a file durably, whole or not at all; see `upriver.files.replacing`.

    obstore does not sync: after a power failure an object could exist and be empty.

    Args:
        private: If true, only the owner may access the file (mode 0600), and new folders for it (0700).

    Raises:
        ObjectNotFound: If a symbolic link leads out of ``root``.
        OSError: If it cannot be written. Neither the file nor a new folder for it is left.
        Exception: An error of ``pieces``, likewise.
    """
    real = inside(root, path)
    made = make_folders(real.parent, private=private)
    try:
        with replacing(real, private=private) as new, new.open("wb") as file:
            file.writelines(pieces)
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # another object is in the folder by now
                folder.rmdir()
        raise


def folders(root: Path, prefix: str) -> list[str]:
    """Return the names of all folders right below a prefix, and of links to empty or unlistable ones.

    A link to a folder outside the root counts, without a look inside. A link to a folder with content is left
    to the listing, which handles circles.

    Raises:
        ObjectNotFound: If the prefix is behind a symbolic link that leads out of ``root``.
    """
    start = inside(root, prefix) if prefix else root
    if not start.is_dir():
        return []
    with os.scandir(start) as entries:
        found = sorted((entry for entry in entries if _is_folder(entry)), key=lambda entry: entry.name)
    return [entry.name for entry in found if not entry.is_symlink() or _holds_nothing(root, entry)]


def _holds_nothing(root: Path, link: os.DirEntry[str]) -> bool:
    """Return True if a link leads to a folder of which a listing yields nothing."""
    try:
        real = Path(link.path).resolve()
        return not real.is_relative_to(root) or not os.listdir(real)
    except OSError:
        return True


def link_in(root: Path, path: str) -> str:
    """Return the first part of a name that is a symbolic link; empty if none is."""
    ends = [at for at, char in enumerate(path) if char == "/"]
    parts = (path[:end] for end in (*ends, len(path)))
    return next((part for part in parts if os.path.islink(root / part)), "")


def etag_of(status: os.stat_result) -> str:
    """Return an ETag for a file's state: inode, modification time, size and change time, in hexadecimal.

    A program that overwrites a file can keep its size and restore its modification time. Only the kernel sets
    the change time.
    """
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ctime_ns:x}"'


def is_same(status: os.stat_result, etag: str) -> bool:
    """Return True if a file is in the state that an ETag names.

    Indexes of older versions hold ETags without the change time. For these the other values decide.
    """
    return etag == etag_of(status) or etag == _etag_without_change_time(status)


def _etag_without_change_time(status: os.stat_result) -> str:
    return f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"'
