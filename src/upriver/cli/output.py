"""Files that a command writes beside what it prints: checked before any work, written whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from upriver.errors import ConfigError, StoreError
from upriver.files import replacing

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, option: str = "--plot") -> None:
    """A picture can be drawn and has a place to go.

    Raises:
        ConfigError: If its ending is none that we draw, it cannot be written, or matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in PICTURES or path.is_dir():
        raise ConfigError(f"{option} takes a file name that ends in {', '.join(PICTURES)}, got {path}")
    check_output(path, option)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"matplotlib is not installed; install 'upriver[plot]' for {option}")


def check_output(path: Path | None, option: str) -> None:
    """A file can be written there, as far as can be told before.

    Raises:
        ConfigError: If it cannot.
    """
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
    """Make a file to write to, which takes the place of ``path`` at the end, whole or not at all.

    A link stays one. What is no ordinary file (a device, a pipe) is written as it is: it must not be replaced
    by one.

    Raises:
        StoreError: If it cannot be written; what was there is still there, and nothing else is left behind.
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
