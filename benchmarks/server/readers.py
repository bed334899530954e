"""Request answers without reading them, through sockets with hardly any memory of their own."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from upriver.protocol import RunRequest, encode

BUFFER_BYTES = 64 << 10
"""Receive buffer of a socket. The kernel doubles it, which is little compared with any answer."""

PIECE_BYTES = 1 << 20
DRAIN_S = 10.0
"""Seconds in which all readers read the rest. Data left in the server's kernel buffers arrives at once."""

LEAST_S = 0.2
"""Least seconds of each reader for the rest."""


class Stalled(msgspec.Struct, frozen=True, kw_only=True):
    """Readers that read nothing.

    Attributes:
        token: Token of all readers.
        question: Question of each reader.
        count: Number of readers.
        hold_s: Seconds without reading. The readers then read the rest, to see how the answer ended.
    """

    token: str
    question: str
    count: int
    hold_s: float


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a reader received at the end.

    Attributes:
        status: HTTP status; 0 if none arrived.
        num_bytes: Bytes of the answer that arrived, including its head.
        whole: Whether the answer arrived to its end.
        closed: Whether the server had ended the connection.
    """

    status: int
    num_bytes: int
    whole: bool
    closed: bool


def stall(url: str, readers: Stalled, request: RunRequest) -> Iterator[Taken]:
    """Send a request with every reader, hold still, and then yield what each received."""
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for _ in range(readers.count):
            sockets.append(stack.enter_context(_asking(url, readers.token, request)))
        time.sleep(readers.hold_s)
        until = time.monotonic() + DRAIN_S
        for each in sockets:
            yield _rest(each, until)


def _asking(url: str, token: str, request: RunRequest) -> socket.socket:
    address = urlsplit(url)
    body = b"".join(bytes(part) for part in encode(request))
    head = (
        "POST /v1/run HTTP/1.1",
        f"host: {address.netloc}",
        f"authorization: Bearer {token}",
        "content-type: application/octet-stream",
        f"content-length: {len(body)}",
    )
    asking = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        asking.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES
        )  # must be set before the connection exists
        asking.connect((address.hostname, address.port))
        asking.sendall("\r\n".join([*head, "", ""]).encode() + body)
    except BaseException:
        asking.close()
        raise
    return asking


def _rest(reader: socket.socket, until: float) -> Taken:
    """Read everything that still arrives."""
    first, last, num_bytes, closed = b"", b"", 0, False
    with contextlib.suppress(TimeoutError):
        while not closed:
            reader.settimeout(max(LEAST_S, until - time.monotonic()))
            try:
                piece = reader.recv(PIECE_BYTES)
            except ConnectionError:
                piece = b""
            closed = not piece
            first, last = first or piece[:64], (last + piece)[-5:]
            num_bytes += len(piece)
    words = first.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return Taken(status=status, num_bytes=num_bytes, whole=last == b"0\r\n\r\n", closed=closed)
