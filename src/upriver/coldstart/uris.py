"""Where weights and programs are said to be."""

from __future__ import annotations

from collections.abc import Mapping

from upriver.errors import ConfigError
from upriver.store import Store


def opened(uri: str, options: Mapping[str, str] | None = None) -> tuple[Store, str]:
    """A store at the folder that a URI's last part lies in, and that part.

    Args:
        uri: ``s3://BUCKET/NAME`` or ``file:///FOLDER/NAME``.
        options: Of an S3 store.

    Raises:
        ConfigError: If that is no URI of an object.
        StoreError: If there is no such folder.
    """
    folder, _, name = uri.rstrip("/").rpartition("/")
    if not name or "://" not in folder or folder.endswith(":/"):
        raise ConfigError(f"weights are s3://BUCKET/NAME or file:///FOLDER/NAME, got {uri!r}")
    return Store.open(folder, options=options), name


def program_at(uri: str) -> tuple[str, str, str]:
    """Where a program is: the URI of its store, the folder there that programs are kept under, its digest.

    Args:
        uri: ``STORE/PREFIX/programs/DIGEST``, as :func:`program_uri` gives it, or of its ``graph.json``.

    Raises:
        ConfigError: If that is no URI of a program.
    """
    folder, _, digest = uri.rstrip("/").removesuffix("/graph.json").rpartition("/")
    root, _, prefix = folder.removesuffix("/programs").rpartition("/")
    if not folder.endswith("/programs") or not prefix or "://" not in root or root.endswith(":/"):
        raise ConfigError(f"a program is STORE/PREFIX/programs/DIGEST, as push says it, got {uri!r}")
    return root, prefix, digest


def program_uri(store_uri: str, prefix: str, digest: str) -> str:
    """The URI of a program: what :func:`upriver.coldstart.open` takes."""
    from upriver.program.files import graph_path  # what runs programs, which a model's load does without

    return f"{store_uri.rstrip('/')}/{graph_path(prefix, digest).removesuffix('/graph.json')}"
