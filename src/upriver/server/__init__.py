"""The near-data server: front (HTTP, access, metrics) and compute workers.

The front reads the store and speaks to clients; workers compute, and have no network. What lies between them
is anonymous shared memory. The server keeps nothing that a client could miss: any request can be asked again,
elsewhere.
"""

from upriver.server.app import create_app
from upriver.server.config import ServerConfig, StoreLocation
from upriver.server.service import Server, serve

__all__ = ["Server", "ServerConfig", "StoreLocation", "create_app", "serve"]
