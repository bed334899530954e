"""Small files that outlast a process, under ``$UPRIVER_CACHE`` or the user's cache folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Where what was found out once is remembered: ``$UPRIVER_CACHE`` or the user's cache folder.

    A user without a home folder has no cache: nothing can be read from or written to the path given then.
    A folder that others may write to would not do, as proofs lie there.
    """
    if own := os.environ.get("UPRIVER_CACHE"):
        return Path(own).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "upriver"
    except RuntimeError:  # a user id without an entry in the password file, as in many containers
        return Path(os.devnull)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, also when two jobs write it.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` to write to, which takes its place at the end; whatever fails removes it.

    Nobody but the user may read it, unless its mode is changed before the end.

    Raises:
        OSError: If it cannot be made, or cannot take that place.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
