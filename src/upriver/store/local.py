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
    """Every object under a prefix, by name, with its status.

    Raises:
        ObjectNotFound: If a symbolic link under the prefix leads out of ``root``: leaving it out would drop
            samples without a word.
        OSError: For the same reason, if it leads nowhere, or if there is a FIFO, socket or device. Names that
            begin with a dot are let be: editors leave such links (``.#name``), and no sample has such a name.
    """
    start = inside(root, prefix) if prefix else root
    if start.is_dir():
        yield from _walk(root, prefix, (start,))
    elif start.is_file():
        yield prefix, start.stat()


def _walk(root: Path, prefix: str, way: tuple[Path, ...]) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(way[-1]) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_symlink() and inside(root, name) in way:
            continue  # a link to a directory above: following it would never end
        if entry.is_dir():
            yield from _walk(root, name, (*way, inside(root, name)))
        elif entry.is_file() and not _STAGED.search(name):
            yield name, entry.stat()
        elif not entry.is_file() and not entry.name.startswith("."):
            what = (
                "a symbolic link that leads nowhere" if entry.is_symlink() else "neither file nor directory"
            )
            raise OSError(f"{name!r} is {what}; remove it, or index a folder without it")


def etag_of(status: os.stat_result) -> str:
    """The ETag obstore gives a local file: inode, modification time in microseconds, size; in hexadecimal."""
    micros = status.st_mtime_ns // 1000
    return f'"{status.st_ino:x}-{micros:x}-{status.st_size:x}"'
