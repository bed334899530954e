"""A server in front of a real one that reports another process, load, or time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from tests.rpc.scripted_http import Exchange, scripted
from upriver.errors import Overloaded, UpriverError
from upriver.protocol import PROCESS_HEADER, FrameDecoder, encode, error_body
from upriver.types import Timings


class Between:
    """Pass every request on, and change the chosen parts of the responses.

    Attributes:
        process: Name of the responding process.
        asked: Paths with the process that responded, in order.
        load: Fields of ``/v1/load`` in place of the server's.
        profile_s: Seconds of every stage in profiles.
        run_s: Seconds of every stage in run responses.
        k: Value of k in run responses.
        phases: Seconds of phases in run responses, added to those of the server.
        refuses: Errors by path, each in place of a response.
        before: Called with each path before its response.
    """

    def __init__(self, url: str) -> None:
        self.url, self.process = "", "first"
        self.asked: list[tuple[str, str]] = []
        self.load: Mapping[str, Any] = {}
        self.profile_s: float | None = None
        self.run_s: float | None = None
        self.k: float | None = None
        self.phases: Mapping[str, float] = {}
        self.refuses: dict[str, UpriverError] = {}
        self.before: Callable[[str], None] = lambda path: None
        self._address = urlsplit(url).netloc

    def count(self, path: str) -> int:
        """Return the number of requests for this path."""
        return sum(each == path for each, _ in self.asked)

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        self.before(path)
        self.asked.append((path, self.process))
        if (error := self.refuses.get(path)) is not None:
            status = 429 if isinstance(error, Overloaded) else 400
            return exchange.plain(status, json.dumps(error_body(error)).encode())
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.request(exchange.method, exchange.path, body=exchange.body or None)
            response = connection.getresponse()
            status, body = response.status, response.read()
        finally:
            connection.close()
        if status == 200:
            body = self._changed(path, body)
        return exchange.plain(status, body, **{PROCESS_HEADER.replace("-", "_"): self.process})

    def _changed(self, path: str, body: bytes) -> bytes:
        if path == "/v1/load":
            return json.dumps({**json.loads(body), **self.load}).encode()
        if path == "/v1/profile" and self.profile_s is not None:
            found = json.loads(body)
            rows = found["micro_batches"][0]
            for stage in found["stages"]:
                stage["seconds"] = [0.0, self.profile_s / rows]
            return json.dumps(found).encode()
        if path == "/v1/run":
            messages = [self._timed(message) for message in FrameDecoder().feed(body)]
            return b"".join(bytes(part) for message in messages for part in encode(message))
        return body

    def _timed(self, message: Any) -> Any:
        if not isinstance(message, Timings):
            return message
        message = replace(message, phases={**message.phases, **self.phases})
        if self.run_s is not None:
            message = replace(message, stages=dict.fromkeys(message.stages, self.run_s))
        return message if self.k is None else replace(message, k=self.k)


@contextmanager
def between(url: str) -> Iterator[Between]:
    """Run a `Between` in front of the server at ``url``."""
    found = Between(url)
    with scripted(found) as found.url:
        yield found
