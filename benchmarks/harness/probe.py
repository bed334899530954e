"""Probe a testbed from inside its namespaces: a bounded transfer, and waiting for a server.

The script uses the standard library only, so that it starts in a few milliseconds. Every probe ends by
itself.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from urllib.parse import urlsplit

BLOCK_BYTES = 1 << 18
POLL_S = 0.05


def receive(host: str, seconds: float) -> None:
    """Receive the bytes of one connection until its end. Print the port, then bytes and seconds as JSON."""
    deadline = time.monotonic() + seconds
    buffer = bytearray(BLOCK_BYTES)
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(seconds)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(seconds)
        connection.recv_into(buffer)  # the bytes of the first read arrived in no measurable time
        num_bytes, began = 0, time.perf_counter()
        while time.monotonic() < deadline and (got := connection.recv_into(buffer)):
            num_bytes += got
        print(json.dumps({"num_bytes": num_bytes, "seconds": time.perf_counter() - began}))


def send(host: str, port: int, num_bytes: int, seconds: float) -> None:
    """Send that many zeros, or as many as fit into the time."""
    deadline = time.monotonic() + seconds
    block = memoryview(bytes(BLOCK_BYTES))
    with socket.create_connection((host, port), timeout=seconds) as connection:
        while num_bytes > 0 and time.monotonic() < deadline:
            num_bytes -= connection.send(block[: min(num_bytes, BLOCK_BYTES)])


def ready(url: str, seconds: float) -> bool:
    """Poll the URL until it answers 200."""
    parts, deadline = urlsplit(url), time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(parts.netloc, timeout=5)
        try:
            connection.request("GET", parts.path or "/")
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)
    return False


if __name__ == "__main__":
    match sys.argv[1:]:
        case "receive", host, seconds:
            receive(host, float(seconds))
        case "send", host, port, num_bytes, seconds:
            send(host, int(port), int(num_bytes), float(seconds))
        case "ready", url, seconds:
            sys.exit(0 if ready(url, float(seconds)) else 1)
        case _:
            sys.exit(f"unknown arguments {sys.argv[1:]}")
