"""Where names lead on a file system, symbolic links included.

obstore refuses ``..`` but follows symbolic links, out of its root too, and lists through them. So every name
is resolved here first and refused if it leaves the root, and listing walks by itself. A link that stays
inside the root is as good as a file.

The check and the read are two steps, for obstore opens by name: someone who can write to the root can swap a
link between them. The kernel could do both in one (``openat2`` with ``RESOLVE_BENEATH``), which neither
Python nor obstore offers, and ``O_NOFOLLOW`` would look at a name's last part alone. Write access to a
store's directory is the operator's to give.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from upriver.errors import ObjectNotFound

_STAGED = re.compile(r"#\d+$")
"""obstore writes ``name#1`` first and renames it; such a file is an upload that was cut off, not an
object."""


def inside(root: Path, path: str) -> Path:
    """The real path that a name leads to.

    Args:
        root: The store's root, already resolved.
        path: A checked name.

    Raises:
        ObjectNotFound: If a symbolic link leads out of ``root``, or in a circle: nothing that is there is an
            object of this store.
    """
    try:
        real = (root / path).resolve()
    except RuntimeError:
        raise ObjectNotFound(f"{path!r} is behind a symbolic link that leads in a circle") from None
    if not real.is_relative_to(root):
        raise ObjectNotFound(f"{path!r} is behind a symbolic link that leads out of the store's root")
    return real


def walk(root: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """List every object under a prefix, by name, with its status.

    A link to a folder is followed, so that a folder may be listed under several names. A link that leads to a
    folder on the way to it, or above one, is not followed. Folders that links join in a circle are listed
    once each: by their own names, else once behind each link that leads into the circle.

    Raises:
        ObjectNotFound: If a symbolic link under the prefix leads out of ``root``: leaving it out would drop
            samples without a word.
        OSError: For the same reason, if it leads nowhere, or if there is a FIFO, socket or device. Names that
            begin with a dot are let be: editors leave such links (``.#name``), and no sample has such a name.
    """
    start = inside(root, prefix) if prefix else root
    if start.is_dir():
        yield from _Walk(root, start).own(prefix, (start,))
    elif start.is_file():
        yield prefix, start.stat()


class _Walk:
    """List one folder.

    Args:
        root: The store's.
        start: The folder, resolved.
    """

    def __init__(self, root: Path, start: Path) -> None:
        self._root, self._start = root, start
        self._known: dict[Path, int] | None = None

    def own(self, prefix: str, way: tuple[Path, ...]) -> Iterator[tuple[str, os.stat_result]]:
        """List a folder below the start by its own name; ``way`` holds the folders from the start to it."""
        seen: set[Path] = set()
        for name, entry, real in self._entries(prefix, way[-1]):
            if real is None:
                yield from _object(name, entry)
            elif entry.is_symlink():
                yield from self._linked(name, (*way, real), len(way), seen)
            else:
                yield from self.own(name, (*way, real))

    def _linked(
        self, prefix: str, way: tuple[Path, ...], num_own: int, seen: set[Path]
    ) -> Iterator[tuple[str, os.stat_result]]:
        """List a folder that was reached through a link, unless that would list it again.

        Args:
            prefix: Its name.
            way: The folders from the start to it, resolved.
            num_own: How many of those were reached by their own names.
            seen: Folders of its circle that were listed since a link led into the circle.
        """
        *before, folder = way
        if any(passed.is_relative_to(folder) for passed in before):
            return
        circle = self._circle(folder)
        if circle != self._circle(before[-1]):
            seen = set()
        named = circle == self._circle(way[num_own - 1]) and folder.is_relative_to(self._start)
        if named or folder in seen:
            return
        seen.add(folder)
        for name, entry, real in self._entries(prefix, folder):
            if real is None:
                yield from _object(name, entry)
            else:
                yield from self._linked(name, (*way, real), num_own, seen)

    def _entries(self, prefix: str, folder: Path) -> Iterator[tuple[str, os.DirEntry[str], Path | None]]:
        """Each entry of a folder with its name, and the real path of those that are folders."""
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            real = inside(self._root, name) if entry.is_symlink() else folder / entry.name
            yield name, entry, real if entry.is_dir() else None

    def _circle(self, folder: Path) -> int:
        """Which folders lead to each other, through links and folders: those that have the same number."""
        if self._known is None:
            self._known = self._circles()
        return self._known[folder]

    def _circles(self) -> dict[Path, int]:
        """Number the strongly connected components of the folders (Tarjan, SIAM J. Comput. 1972)."""
        found: dict[Path, int] = {}
        low: dict[Path, int] = {}
        numbered: dict[Path, int] = {}
        open_ones: list[Path] = []
        ahead: list[tuple[Path, Iterator[Path]]] = []

        def enter(folder: Path) -> None:
            numbered[folder] = low[folder] = len(numbered)
            open_ones.append(folder)
            name = "" if folder == self._root else folder.relative_to(self._root).as_posix()
            below = (real for _, _, real in self._entries(name, folder) if real is not None)
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


def _object(name: str, entry: os.DirEntry[str]) -> Iterator[tuple[str, os.stat_result]]:
    """List what is no folder."""
    if entry.is_file():
        if not _STAGED.search(name):
            yield name, entry.stat()
    elif not entry.name.startswith("."):
        what = "a symbolic link that leads nowhere" if entry.is_symlink() else "neither file nor directory"
        raise OSError(f"{name!r} is {what}; remove it, or index a folder without it")


def folders(root: Path, prefix: str) -> list[str]:
    """Names of the folders right below a prefix, empty ones and links to empty ones among them.

    A link to a folder that holds something is left to the listing, which knows circles.

    Raises:
        ObjectNotFound: If a symbolic link leads out of ``root``.
    """
    start = inside(root, prefix) if prefix else root
    if not start.is_dir():
        return []
    with os.scandir(start) as entries:
        found = sorted((entry for entry in entries if entry.is_dir()), key=lambda entry: entry.name)
    links = {
        entry.name: inside(root, f"{prefix}/{entry.name}" if prefix else entry.name)
        for entry in found
        if entry.is_symlink()
    }
    return [entry.name for entry in found if entry.name not in links or not os.listdir(links[entry.name])]


def etag_of(status: os.stat_result) -> str:
    """Name a file's state: inode, modification time, size and change time, in hexadecimal.

    A program that overwrites a file can keep its size and set its modification time back. The change time is
    the kernel's alone.
    """
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ctime_ns:x}"'


def is_same(status: os.stat_result, etag: str) -> bool:
    """Whether a file is in the state that an ETag names.

    Indexes that older versions made hold ETags without the change time, which go by the rest.
    """
    older = f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"'
    return etag in (etag_of(status), older)
