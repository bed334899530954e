"""Where weights are said to be."""

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
