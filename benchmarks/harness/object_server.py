"""Serve a directory as an S3 bucket over real HTTP, for clients without access to the storage tier's files.

The server supports the part of S3 that upriver's store uses: ranges, If-Match, listings, whole puts (of up to
64 MB: no multipart) and deletes. ETags are those of a ``file://`` store over the same directory, so a dataset
indexed through one is the same dataset through the other. Any client may read and write: the server is for a
testbed's namespace, not for a network. It can imitate a distance and a rate of each connection, as object
stores have that give more to many connections.

Run with ``python -m benchmarks.harness.object_server DIRECTORY --bucket store --port 9000``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from upriver.errors import ConfigError, ObjectNotFound, StoreError
from upriver.store import Store, check_name
from upriver.store.local import etag_of, inside

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_LISTED = "<Contents><Key>{}</Key><Size>{}</Size><LastModified>{}</LastModified><ETag>{}</ETag></Contents>"
_DATE = "%Y-%m-%dT%H:%M:%S.%fZ"

PART_S = 0.005
"""Seconds of data that a rate-limited connection sends at once."""


def _date(modified_s: float) -> str:
    return datetime.fromtimestamp(modified_s, UTC).strftime(_DATE)


class ObjectServer(ThreadingHTTPServer):
    """One directory as one bucket, with a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        root: Path,
        *,
        bucket: str,
        host: str,
        port: int,
        latency_s: float = 0.0,
        connection_bytes_per_s: float = math.inf,
    ) -> None:
        self.root, self.bucket = root.resolve(), bucket
        self.latency_s, self.connection_bytes_per_s = latency_s, connection_bytes_per_s
        self.store = Store.open(self.root.as_uri())
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Return the endpoint for clients."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects during an answer: clients may."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_HEAD(self) -> None:
        self._answered(self._get)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answered(lambda: self._put(body))

    def do_DELETE(self) -> None:
        self._answered(self._delete)

    def _answered(self, action: Any) -> None:
        """Turn an exception of a store into a status."""
        try:
            action()
        except (ObjectNotFound, FileNotFoundError, IsADirectoryError):
            self._answer(404)
        except (ConfigError, PermissionError):
            self._answer(400)
        except StoreError as error:
            self._answer(500, str(error).encode())

    def _get(self) -> None:
        bucket, key = self._target()
        if not bucket:  # the list of buckets, which also shows that this server is ready
            return self._answer(200, b"<ListAllMyBucketsResult/>")
        if not key:
            query = parse_qs(urlsplit(self.path).query)
            return self._answer(200, self._listing(query.get("prefix", [""])[0]))
        with inside(self.server.root, check_name(key)).open("rb") as file:
            self._send_object(file)

    def _put(self, body: bytes) -> None:
        _, key = self._target()
        self.server.store.put(key, body)
        self._answer(200, headers={"ETag": self.server.store.head(key).etag})

    def _delete(self) -> None:
        _, key = self._target()
        self.server.store.delete(key)
        self._answer(204)

    def _target(self) -> tuple[str, str]:
        """Return bucket and key of the request. The bucket is empty for the server itself."""
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket not in ("", self.server.bucket):
            raise ObjectNotFound(f"no bucket {bucket!r}")
        return bucket, key

    def _send_object(self, file: BinaryIO) -> None:
        """Send the file, or the requested range, without a copy through this process."""
        time.sleep(self.server.latency_s)
        status = os.fstat(file.fileno())
        headers = {"ETag": etag_of(status), "Last-Modified": formatdate(status.st_mtime, usegmt=True)}
        headers["Accept-Ranges"] = "bytes"
        if self.headers.get("If-Match", "*") not in ("*", headers["ETag"]):
            return self._answer(412)
        code, start, stop = 200, 0, status.st_size
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            code, start = 206, int(asked[1])
            stop = min(int(asked[2]) + 1, stop) if asked[2] else stop
            if start >= stop:
                return self._answer(416)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
        self._head(code, stop - start, headers)
        if self.command == "GET" and stop > start:
            self._send_bytes(file, start, stop)

    def _send_bytes(self, file: BinaryIO, start: int, stop: int) -> None:
        rate, free_at_s = self.server.connection_bytes_per_s, 0.0
        part = stop - start if rate == math.inf else math.ceil(rate * PART_S)
        while start < stop:
            time.sleep(max(0.0, free_at_s - time.monotonic()))
            free_at_s = max(free_at_s, time.monotonic()) + part / rate
            sent = self.connection.sendfile(file, start, min(part, stop - start))
            if not sent:
                raise ConnectionError("the object became shorter")
            start += sent

    def _listing(self, prefix: str) -> bytes:
        """Return all keys that begin with a prefix, in one page."""
        folder = prefix.rpartition("/")[0]
        items = "".join(
            _LISTED.format(escape(info.path), info.size, _date(info.modified_s), escape(info.etag))
            for info in self.server.store.list(folder)
            if info.path.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, num_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(num_bytes))
        self.end_headers()


def main() -> None:
    """Serve until ended. Print one JSON line with ``listening`` first."""
    parser = argparse.ArgumentParser(description="A directory as an S3 bucket, without any authentication.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bucket", default="store")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency-s", type=float, default=0.0, help="before an object is sent")
    parser.add_argument("--connection-bytes-per-s", type=float, default=math.inf, help="no limit without")
    told = vars(parser.parse_args())
    try:
        server = ObjectServer(told.pop("directory"), **told)
    except (StoreError, OSError) as error:
        sys.exit(f"error: {error}")
    with server:
        print(json.dumps({"listening": server.url}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
