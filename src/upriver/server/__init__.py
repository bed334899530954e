"""Serve near-data requests: a front (HTTP, authentication, metrics) and compute workers.

The front reads the store and talks to clients. Workers compute and have no network. Front and workers share
anonymous memory. The server keeps no state that a client could lose: any request can be repeated elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.imports import lazy_names

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

# Resolve names at first use: a compute worker imports this package and needs no HTTP server.
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
