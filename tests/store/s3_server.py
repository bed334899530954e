"""Serve the S3 calls that a store uses, over HTTP: objects, parts, ranges, If-Match, listings; and faults."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

NOT_PUT_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class S3Server(ThreadingHTTPServer):
    """Bucket in memory.

    Attributes:
        objects: Path (bucket included) to content.
        modified: Path to the time of its upload, in seconds since 1970; others are of 1 January 2026.
        requests: Method, path and Range of every request; of a signed path the signed part.
        num_signed: Requests with a signed path: those of connections of a reader's own.
        uploads: Uploads in parts, by their ids: path, and parts by their numbers.
        faults: Faults of the next requests, first come first served: a status, or ``cut`` for a body that
            breaks off half way.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.num_signed = 0
        self.faults: list[int | str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, path: str, body: bytes) -> None:
        self.objects[path], self.modified[path] = body, time.time()

    def date(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.modified.get(path, NOT_PUT_S), UTC)

    def __enter__(self) -> S3Server:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, *_: Any) -> None:
        pass

    def _fault(self) -> int | str | None:
        with self.server.lock:
            path, signature, _ = self.path.partition("?X-Amz-")
            self.server.requests.append((self.command, path, self.headers.get("Range", "")))
            self.server.num_signed += bool(signature)
            return self.server.faults.pop(0) if self.server.faults else None

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        length = {} if headers and "Content-Length" in headers else {"Content-Length": str(len(body))}
        for name, value in ((headers or {}) | length).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self._fault()
        if isinstance(fault, int):
            return self._answer(fault)
        query = _query(self.path)
        if "uploadId" in query:
            upload = self.server.uploads.get(query["uploadId"])
            if upload is None:  # given up while this part arrived
                return self._answer(404)
            upload[1][int(query["partNumber"])] = body
        else:
            self.server.put(_path(self.path), body)
        self._answer(200, headers={"ETag": _etag(body)})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self._fault()
        if isinstance(fault, int):
            return self._answer(fault)
        query, path = _query(self.path), _path(self.path)
        if "uploadId" not in query:
            with self.server.lock:
                number = f"upload-{len(self.server.requests)}"
                self.server.uploads[number] = path, {}
            return self._answer(200, _xml("InitiateMultipartUploadResult", UploadId=number))
        _, parts = self.server.uploads.pop(query["uploadId"])
        body = b"".join(parts[number] for number in sorted(parts))
        self.server.put(path, body)
        self._answer(200, _xml("CompleteMultipartUploadResult", ETag=_etag(body)))

    def do_DELETE(self) -> None:
        self._fault()
        if "uploadId" in (query := _query(self.path)):
            self.server.uploads.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(_path(self.path), None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        fault = self._fault()
        if isinstance(fault, int):
            return self._answer(
                fault, f"<Error><Message>key {self.headers.get('Authorization')}</Message></Error>".encode()
            )
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._answer(
                200, self._listing(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
            )
        body = self.server.objects.get(_path(self.path))
        if body is None:
            return self._answer(404)
        if self.headers.get("If-Match") not in (None, _etag(body)):
            return self._answer(412)
        self._send(body, cut=fault == "cut")

    def _send(self, body: bytes, *, cut: bool) -> None:
        date = format_datetime(self.server.date(_path(self.path)), usegmt=True)
        headers = {"ETag": _etag(body), "Last-Modified": date}
        status, part = 200, body
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            start, stop = int(asked[1]), min(int(asked[2] or len(body) - 1) + 1, len(body))
            if start >= len(body):
                return self._answer(416)
            status, part = 206, body[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        headers["Content-Length"] = str(len(part))
        if self.command == "HEAD":
            part = b""
        if cut:
            part = part[: len(part) // 2]
            self.close_connection = True
        self._answer(status, part, headers)

    def _listing(self, prefix: str, delimiter: str) -> bytes:
        bucket = _path(self.path)
        keys = {path[len(bucket) + 1 :]: body for path, body in sorted(self.server.objects.items())}
        items, folders = "", {}
        for key, body in keys.items():
            rest = key[len(prefix) :]
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders[prefix + rest[: rest.index(delimiter) + 1]] = True
                continue
            date = f"{self.server.date(f'{bucket}/{key}'):%Y-%m-%dT%H:%M:%S.000Z}"
            items += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size>"
                f"<LastModified>{date}</LastModified><ETag>{escape(_etag(body))}</ETag>"
                "</Contents>"
            )
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()


class UnlistedServer(S3Server):
    """Server that says 403 for missing objects, as S3 does to clients that may not list the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Unlisted


class _Unlisted(_Handler):
    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        super()._answer(403 if status == 404 else status, body, headers)


def _path(target: str) -> str:
    return unquote(urlsplit(target).path).strip("/")


def _query(target: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}


def _xml(name: str, **values: str) -> bytes:
    inner = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in values.items())
    return f"<{name}>{inner}</{name}>".encode()


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'
