"""Check names: of objects, which never lead out of their store, and of stores, which are URIs or folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

from upriver.errors import ConfigError

DEFAULT_PREFIX = ".upriver"
"""Default folder for upriver's own objects in a store."""

MAX_NAME_BYTES = 1024
"""Longest key that S3 allows."""

_URI = re.compile(r"(?:file|memory|s3):|.*://", re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(path: str) -> str:
    """Check an object's name once, at the public border.

    Args:
        path: Segments joined by ``/``, relative to the store's root.

    Returns:
        The same name.

    Raises:
        ConfigError: If the name is empty, too long, absolute, a URL, or has an empty, ``.`` or ``..`` segment
            or a control character.
    """
    why_not = _why_not(path)
    if why_not:
        raise ConfigError(
            f"object name {path[:200]!r} {why_not}; a name is relative, like 'train/shard-000.tar'"
        )
    return path


def _why_not(path: str) -> str:
    if not path:
        return "is empty"
    if "://" in path:
        return "looks like a URL"
    if _CONTROL.search(path):
        return "has a control character"
    try:
        if len(path.encode()) > MAX_NAME_BYTES:
            return f"is longer than {MAX_NAME_BYTES} bytes"
    except UnicodeEncodeError:
        return "is not valid Unicode"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"has the segment {segment!r}"
    return ""


def check_prefix(prefix: str) -> str:
    """Check the prefix of a listing: empty for everything, or a name. Drop one trailing ``/``."""
    prefix = prefix.removesuffix("/")
    return check_name(prefix) if prefix else ""


def local_path(place: str | os.PathLike[str]) -> Path | None:
    """Return the path if text names a place by its path; None if it is a URI.

    Raises:
        ConfigError: If it is empty, or neither text nor a path.
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"a store is file:///PATH, memory://NAME, s3://BUCKET/PREFIX or a folder's path, got {place!r}"
        )
    return None if isinstance(place, str) and _URI.match(text) else Path(text)


def store_uri(place: str | os.PathLike[str]) -> str:
    """Return the URI of a store: that of the absolute path, if it is named by a path.

    Raises:
        ConfigError: As `local_path`.
    """
    path = local_path(place)
    return str(place) if path is None else path.absolute().as_uri()
