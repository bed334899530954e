"""The near-data server: front (HTTP, access, metrics) and compute workers.

The front reads the store and speaks to clients; workers compute, and have no network. What lies between them
is anonymous shared memory. The server keeps nothing that a client could miss: any request can be asked again,
elsewhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "Server": "service",
    "ServerConfig": "config",
    "StoreLocation": "config",
    "create_app": "app",
    "serve": "service",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.server.app import create_app as create_app
    from upriver.server.config import ServerConfig as ServerConfig
    from upriver.server.config import StoreLocation as StoreLocation
    from upriver.server.service import Server as Server
    from upriver.server.service import serve as serve


def __getattr__(name: str) -> Any:
    # Looked up when first used: a compute worker is of this package and has no use for an HTTP server.
    if name in _PLACES:
        return getattr(importlib.import_module(f"upriver.server.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'upriver.server' has no attribute {name!r}")
