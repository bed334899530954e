"""Object access: file, memory and S3-compatible stores behind one small interface."""

from upriver.store.names import check_name
from upriver.store.store import ObjectInfo, Store

__all__ = ["ObjectInfo", "Store", "check_name"]
