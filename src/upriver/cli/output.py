"""Write a command's files: checked before any work, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from upriver.errors import ConfigError, StoreError
from upriver.extras import why_missing
from upriver.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """Check that a picture can be drawn and written.

    Raises:
        ConfigError: If its suffix is unknown, it cannot be written, or matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURES or path.is_dir():
        raise ConfigError(f"{option} takes a file name that ends in {', '.join(PICTURES)}, got {path}")
    check_output(path, option)
    why = why_missing(option, "plot", "matplotlib")
    if why:
        raise ConfigError(why)


def check_output(path: Path | None, option: str) -> None:
    """Check that a file can be written, before any work."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} takes a file name, got the directory {path}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the directory of {path} does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option}: {path} may not be written")


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a file to write to, which replaces ``path`` at the end, whole or not at all.

    A link stays a link. A path that is no ordinary file (a device, a pipe) is written directly, as it must
    not be replaced by a file.

    Raises:
        StoreError: If the file cannot be written. The earlier content stays, and nothing else is left behind.
    """
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        with replacing(Path(os.path.realpath(path))) as new:
            yield new
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers find the old one or all of the new one; see `written`."""
    with written(path) as new:
        new.write_bytes(data)


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure in the format that the suffix names; see `check_picture` and `written`."""
    from upriver.report.figure import encoded

    write_whole(path, encoded(figure, path.suffix.lower().removeprefix(".")))
