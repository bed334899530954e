"""Write the audit log: a JSON line for each request that runs, stores or measures, when it ends.

Each request of an unknown client gets a line, too. Requests that only read (``/metrics``, for example) get
none.

A line says which tenant asked for what, and how the request ended. It holds names, digests and numbers, and
nothing that grants access: no token, no credential, no query.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from upriver.errors import ConfigError
from upriver.protocol import CodeRef, RunRequest
from upriver.text import printable


def arguments_digest(code: CodeRef) -> str:
    """Return the SHA-256 of a dataset's arguments as JSON, in hex."""
    return hashlib.sha256(msgspec.json.encode(code.arguments)).hexdigest()


log = logging.getLogger(__name__)

TEXT_CHARS = 256
"""Most characters of a text in a line: a client may choose paths and names."""

STRANGERS_PER_MINUTE = 600
"""Most lines per minute about requests of unknown clients, which could fill a disk otherwise. This many are
170 MB a day; a later line counts the omitted ones."""

WEIGHTS_WANTED = "weights_wanted"
"""Outcome of an upload that lacks weights which the server does not have. Clients try such an upload first,
as another program may have brought the weights, and then send both. It is no failure."""

_Value = str | int | float | list[str] | None


class AuditLog:
    """Append lines to one file. Use it from the event loop's thread only.

    If a line cannot be written, its request goes on. The failure is counted, and the first of a series is
    logged.

    Args:
        path: The file, created with access for its owner alone. None writes nothing.
        now: Seconds since 1970.
        on_failure: Called for each line that was not written, or not to its end.

    Attributes:
        failures: Number of lines that were not written, or not to their end.

    Raises:
        ConfigError: If the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        now: Callable[[], float] = time.time,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures = 0
        self.path, self._now, self._on_failure = path, now, on_failure
        self._failing = self._torn = False
        self._minute = self._strangers = self._left_out = 0
        self._fd: int | None = None
        if path is not None:
            try:
                self._fd = _open(path)
            except OSError as error:
                raise ConfigError(f"cannot write the audit log {path}: {error.strerror}") from None

    def run(
        self,
        tenant: str,
        *,
        request_id: str,
        dataset: str | None,
        store: str | None,
        program: str | None,
        samples: int,
        bytes_out: int,
        seconds: float,
        outcome: str,
        bytes_in: int = 0,
        arguments: str | None = None,
        kind: str = "run",
    ) -> None:
        """Record the end of a run request.

        Args:
            kind: ``run``; ``features`` for a question about its kept rows; ``features_removed``.
            request_id: Id of the request, as in the other logs.
            dataset: Digest of the dataset, or name of the code; None if the client sent tensors.
            program: Digest of the program that ran.
            samples: Number of samples requested.
            bytes_out: Bytes of the response that were sent.
            seconds: Seconds from the request's first byte to its end.
            outcome: ``ok``, an error's code, ``stalled`` or ``disconnect``.
            arguments: Digest of the arguments of the code; None without code.
        """
        self._write(
            kind,
            tenant,
            request_id=request_id,
            **({} if arguments is None else {"arguments": arguments}),
            store=store,
            dataset=dataset,
            program=program,
            samples=samples,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            seconds=round(seconds, 6),
            outcome=outcome,
        )

    def upload(
        self,
        tenant: str,
        *,
        request_id: str,
        program: str,
        bytes_in: int,
        seconds: float = 0.0,
        outcome: str = "ok",
    ) -> None:
        """Record the upload of a program, whether it was stored or refused.

        `bytes_in` counts the bytes that arrived, not those announced. ``outcome`` is ``ok``, `WEIGHTS_WANTED`
        or an error's code.
        """
        self._write(
            "upload",
            tenant,
            request_id=request_id,
            program=program,
            bytes_in=bytes_in,
            seconds=round(seconds, 6),
            outcome=outcome,
        )

    def profile(
        self,
        tenant: str,
        *,
        request_id: str,
        programs: Sequence[str],
        seconds: float = 0.0,
        outcome: str = "ok",
    ) -> None:
        """Record a request to measure programs."""
        self._write(
            "profile",
            tenant,
            request_id=request_id,
            programs=list(programs),
            seconds=round(seconds, 6),
            outcome=outcome,
        )

    def refused(
        self,
        tenant: str | None,
        *,
        path: str,
        status: int,
        code: str,
        request_id: str | None = None,
        client: str | None = None,
    ) -> None:
        """Record a request that was refused before it was handled.

        Args:
            path: Path of the request, without its query.
        """
        fields: dict[str, _Value] = {"path": path, "status": status, "outcome": code}
        if client is not None:
            fields["address"] = client
        if request_id is not None:
            fields["request_id"] = request_id
        if tenant is None:
            if not self._room_for_a_stranger():
                return
            if self._left_out:
                fields["left_out"], self._left_out = self._left_out, 0
        self._write("refused", tenant, **fields)

    def reopen(self) -> None:
        """Continue in a new file of the same name if the old one was moved away, else in the old one."""
        if self.path is None:
            return
        try:
            fd = _open(self.path)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        self.close()
        self._fd, self._torn = fd, False

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _room_for_a_stranger(self) -> bool:
        minute = int(self._now() // 60)
        if minute != self._minute:
            self._minute, self._strangers = minute, 0
        self._strangers += 1
        if self._strangers > STRANGERS_PER_MINUTE:
            self._left_out += 1
            return False
        return True

    def _write(self, what: str, tenant: str | None, **fields: _Value) -> None:
        if self._fd is None:
            return
        line: dict[str, _Value] = {
            "time": _stamp(self._now()),
            "who": tenant,
            "what": what,
            **fields,
        }
        self._append(self._fd, msgspec.json.encode({name: _plain(value) for name, value in line.items()}))

    def _append(self, fd: int, line: bytes) -> None:
        """Append a line in one write, so that lines of several processes in one file do not mix."""
        data = (b"\n" if self._torn else b"") + line + b"\n"
        try:
            written = os.write(fd, data)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        self._torn = written < len(data)
        if self._torn:
            self._failed("there was room for a part of a line")
        else:
            self._failing = False

    def _failed(self, reason: str) -> None:
        self.failures += 1
        self._on_failure()
        if not self._failing:
            log.error("cannot write the audit log %s: %s; requests go on without", self.path, reason)
        self._failing = True


class Outcome:
    """Result of a request.

    Attributes:
        bytes_in: Bytes of its body that arrived.
    """

    bytes_in = 0


class AuditEntry(Outcome):
    """The line of one run request, from its first byte to its end.

    Attributes:
        bytes_out: Bytes of the response that were sent.
    """

    def __init__(self, audit: AuditLog, tenant: str, request_id: str, *, kind: str = "run") -> None:
        self.bytes_out, self._kind = 0, kind
        self._audit, self._tenant, self._request_id = audit, tenant, request_id
        self._request: RunRequest | None = None
        self._error = ""
        self._began = time.perf_counter()
        self._closed = False

    def about(self, request: RunRequest) -> None:
        """Set the decoded request that the line describes."""
        self._request = request

    @property
    def has_failed(self) -> bool:
        """Return whether an error ended the response."""
        return bool(self._error)

    def failed(self, code: str) -> None:
        """Note the error that ended the response: the first one is the outcome, however the request ends."""
        self._error = self._error or code

    def close(self, outcome: str) -> None:
        """Write the line. The first call decides the outcome; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._audit.run(
            self._tenant,
            request_id=self._request_id,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            seconds=time.perf_counter() - self._began,
            outcome=self._error or outcome,
            kind=self._kind,
            **_about(self._request),
        )


def _about(request: RunRequest | None) -> dict[str, Any]:
    """Return the line's fields that a request names; they are empty if the request was not read."""
    found: dict[str, Any] = {"dataset": None, "store": None, "program": None, "samples": 0}
    if request is not None:
        found |= {"program": request.program, "samples": sum(map(len, request.micro_batches))}
        if request.dataset is not None:
            found |= {"dataset": request.dataset.digest, "store": request.dataset.store}
        if request.code is not None:
            found |= {"dataset": request.code.name, "arguments": arguments_digest(request.code)}
    return found


def _open(path: str | Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: _Value) -> _Value:
    if isinstance(value, str):
        return printable(value, TEXT_CHARS)
    if isinstance(value, list):
        return [printable(text, TEXT_CHARS) for text in value]
    return value
