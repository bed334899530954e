"""Add a gate to the S3 double: bytes behind it in a weights file wait until it opens."""

from __future__ import annotations

import re
import threading
from typing import Any

from tests.store.s3_server import S3Server, _Handler, _path

PIECE_BYTES = 1 << 16
WAIT_S = 180.0


class GatedServer(S3Server):
    """S3 double that serves only the part of weights files before ``gate``.

    Attributes:
        gate: How many bytes of a weights file are available; no bound if None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Gated
        self.gate: int | None = None
        self.moved = threading.Condition()

    def open_to(self, gate: int | None) -> None:
        """Open the gate up to ``gate``."""
        with self.moved:
            self.gate = gate
            self.moved.notify_all()

    def weights_asked(self) -> int:
        """Return the bytes of weights files that were requested."""
        with self.lock:
            asked = [
                re.fullmatch(r"bytes=(\d+)-(\d+)", each)
                for method, path, each in self.requests
                if method == "GET" and _path(path).endswith(".safetensors")
            ]
        return sum(int(each[2]) + 1 - int(each[1]) for each in asked if each is not None)

    def __exit__(self, *_: object) -> None:
        self.open_to(None)
        super().__exit__()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about clients that leave in mid-answer: clients may."""


class _Gated(_Handler):
    server: GatedServer

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        place = re.fullmatch(r"bytes (\d+)-\d+/\d+", (headers or {}).get("Content-Range", ""))
        if place is None or self.command != "GET" or not _path(self.path).endswith(".safetensors"):
            return super()._answer(status, body, headers)
        super()._answer(status, b"", headers)
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            self._wait(int(place[1]) + at + len(piece))
            self.wfile.write(piece)

    def _wait(self, stop: int) -> None:
        with self.server.moved:
            self.server.moved.wait_for(
                lambda: self.server.gate is None or stop <= self.server.gate, timeout=WAIT_S
            )
