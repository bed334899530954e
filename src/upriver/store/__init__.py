"""Access objects in file, memory and S3-compatible stores through one small interface."""

from upriver.store.local import Unreachable
from upriver.store.names import DEFAULT_PREFIX, check_name, local_path, store_uri
from upriver.store.store import ObjectInfo, Store

__all__ = [
    "DEFAULT_PREFIX",
    "ObjectInfo",
    "Store",
    "Unreachable",
    "check_name",
    "local_path",
    "store_uri",
]
