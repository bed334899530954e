"""Add faults to the S3 double: stalls, resets, wrong bits, objects that change in mid-body."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args

from tests.store.s3_server import S3Server, _Handler, _path

Fault = Literal["stalled", "silent", "reset", "changed", "gone", "flipped", "short", "slow"]
"""Faults of the next requests, next to a status. In order: a body that stops half way for good; no answer at
all; a connection that is reset half way; a body that breaks off half way while its object is replaced, or
removed; one with a wrong bit in the middle; the first half as if the object ended there; and a body that
arrives at `SLOW_BYTES_PER_S`.
"""

SLOW_BYTES_PER_S, SLOW_BYTES = 640_000, 32_000


class FaultyServer(S3Server):
    """S3 double whose ``faults`` may hold a `Fault`.

    Args:
        certificate: File with a certificate and its key, to speak TLS with.

    Attributes:
        put_s: Seconds that an upload of an object lasts, besides its transfer.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__()
        self.RequestHandlerClass = _Faulty
        self.put_s = 0.0
        self._scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self._scheme = "https"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_address[1]}"

    @property
    def reads(self) -> list[str]:
        """Return the Range of every GET so far."""
        with self.lock:
            return [asked for method, _, asked in self.requests if method == "GET"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about clients that leave in mid-answer: clients may."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Faulty(_Handler):
    server: FaultyServer
    fault_now: str | None = None

    def do_PUT(self) -> None:
        time.sleep(self.server.put_s)
        super().do_PUT()

    def _fault(self) -> int | str | None:
        fault = super()._fault()
        self.fault_now = fault if fault in get_args(Fault) else None
        return None if self.fault_now else fault

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        fault, self.fault_now = self.fault_now, None
        if self.command == "HEAD":
            body, headers = b"", {"Content-Length": str(len(body)), **(headers or {})}
        if fault is None or self.command != "GET" or status not in (200, 206):
            return super()._answer(status, body, headers)
        half = len(body) // 2
        if fault == "flipped":
            return super()._answer(status, body[:half] + bytes([body[half] ^ 8]) + body[half + 1 :], headers)
        if fault == "short":
            return super()._answer(status, body[:half], _ending(headers or {}, half))
        if fault == "slow":
            super()._answer(status, b"", {"Content-Length": str(len(body)), **(headers or {})})
            for start in range(0, len(body), SLOW_BYTES):
                time.sleep(SLOW_BYTES / SLOW_BYTES_PER_S)
                self.wfile.write(body[start : start + SLOW_BYTES])
            return None
        if fault != "silent":
            path = _path(self.path)
            if fault == "changed" and path in self.server.objects:
                self.server.objects[path] = self.server.objects[path][::-1]
            elif fault == "gone":
                self.server.objects.pop(path, None)
            super()._answer(status, body[:half], {"Content-Length": str(len(body)), **(headers or {})})
            self.wfile.flush()
        if fault in ("stalled", "silent"):
            self.rfile.read(1)  # until the client hangs up
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
        self.close_connection = True


def _ending(headers: dict[str, str], num_bytes: int) -> dict[str, str]:
    """Return the headers of an answer from an object that ends after ``num_bytes`` of the requested bytes."""
    changed = {**headers, "Content-Length": str(num_bytes)}
    if found := re.match(r"bytes (\d+)-", headers.get("Content-Range", "")):
        stop = int(found[1]) + num_bytes
        changed["Content-Range"] = f"bytes {found[1]}-{stop - 1}/{stop}"
    return changed
