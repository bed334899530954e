"""Resolve URIs of weights and programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from upriver.coldstart.format.checkpoint import INDEX_ENDING
from upriver.coldstart.format.manifest import ENDING
from upriver.errors import ConfigError
from upriver.program.graph.artifact_paths import graph_path
from upriver.store import Store, local_path


def opened(uri: str, options: Mapping[str, str] | None = None) -> tuple[Store, str]:
    """Open a store at the folder of a URI's last part. Return the store and that part.

    Args:
        uri: ``s3://BUCKET/NAME``, ``file:///FOLDER/NAME`` or a path.

    Raises:
        ConfigError: If the URI cannot name an object.
        StoreError: If the folder does not exist.
    """
    if (local := local_path(uri)) is not None:
        if options:
            raise ConfigError(f"store {uri!r} takes no options, got {', '.join(sorted(options))}")
        return file_at(local)
    folder, _, name = uri.rstrip("/").rpartition("/")
    if not name or "://" not in folder or folder.endswith(":/"):
        raise ConfigError(f"weights are s3://BUCKET/NAME, file:///FOLDER/NAME or a path, got {uri!r}")
    store = Store.open(folder, options=options)
    if folder.startswith("file://"):
        there, path = file_at(Path(unquote(urlsplit(folder).path)) / name)
        return (store, name) if path == name else (there, path)
    return store, name


def file_at(path: Path) -> tuple[Store, str]:
    """Open a store that holds local weights and the targets of their links. Return it and the weights' name.

    The cache of Hugging Face's libraries holds links from a model's folder to files in another.

    Raises:
        ConfigError: If the path names no file.
        StoreError: If the folder does not exist.
    """
    path = Path(os.path.abspath(path))
    if not path.name or "\0" in path.name:
        raise ConfigError(f"weights are a file or a folder below another one, got {str(path)!r}")
    root = path.parent
    inside = [path / f"model{ending}" for ending in (ENDING, INDEX_ENDING)]
    for each in (path.with_name(path.name + ENDING), path, *inside):
        real = Path(os.path.realpath(each))
        if real.is_file() and not real.is_relative_to(os.path.realpath(root)):
            root = Path(os.path.commonpath([root, real.parent]))
    return Store.open(root.as_uri()), path.relative_to(root).as_posix()


def program_at(uri: str) -> tuple[str, str, str]:
    """Split a program's URI into the URI of its store, the folder of programs there, and the digest.

    Args:
        uri: ``STORE/PREFIX/programs/DIGEST``, as :func:`program_uri` returns it, or the URI of its
            ``graph.json``.

    Raises:
        ConfigError: If the URI cannot name a program.
    """
    local = local_path(uri) if uri else None
    place = uri if local is None else str(local.absolute())
    folder, _, digest = place.rstrip("/").removesuffix("/graph.json").rpartition("/")
    root, _, prefix = folder.removesuffix("/programs").rpartition("/")
    is_store = bool(root) and (local is not None or ("://" in root and not root.endswith(":/")))
    if not folder.endswith("/programs") or not prefix or not is_store:
        raise ConfigError(f"a program is STORE/PREFIX/programs/DIGEST, as push says it, got {uri!r}")
    return root, prefix, digest


def program_uri(store_uri: str, prefix: str, digest: str) -> str:
    """Return the URI of a program, as :func:`upriver.coldstart.open` needs it."""
    return f"{store_uri.rstrip('/')}/{graph_path(prefix, digest).removesuffix('/graph.json')}"
