"""The audit log: a line of JSON for each request to run, store or measure something, appended when it ends.

One more for each request of somebody who is not known; those that only look (``/metrics``, say) have none.

It says who asked for what, and how that ended. It holds names, digests and numbers, and nothing that opens a
door: no token, no credential, no query.
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
    """SHA-256 of a dataset's arguments as JSON, in hex."""
    return hashlib.sha256(msgspec.json.encode(code.arguments)).hexdigest()


log = logging.getLogger(__name__)

TEXT_CHARS = 256
"""Longest text of a line: a path or a name that somebody else chose."""

STRANGERS_PER_MINUTE = 600
"""Lines about requests of nobody known, at most. A stranger could fill a disk otherwise: this many are 170 MB
a day, and what is left out is counted."""

WEIGHTS_WANTED = "weights_wanted"
"""Outcome of an upload without its weights, which are not here: clients try that first, as another program
may have brought them, and then send both. Nothing has failed."""

_Value = str | int | float | list[str] | None


class Audit:
    """Appends to one file; belongs to the event loop's thread.

    Where a line cannot be written the request goes on: the failure is counted, and logged when it begins.

    Args:
        path: The file; nothing is written if None. It is made for its owner alone.
        now: Seconds since 1970.
        on_failure: Told of each line that was not written, or not to its end.

    Attributes:
        path: Where the file is.
        failures: Lines that were not written, or not to their end.

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
    ) -> None:
        """A run request has ended.

        Args:
            tenant: Name of whose it was.
            request_id: Names it in the other logs.
            dataset: Digest of what was read, or the name of code; None where tensors were sent along.
            store: Name of the dataset's store.
            program: Digest of what was run.
            samples: That were asked for.
            bytes_out: Of the answer, as far as it was sent.
            seconds: From its first byte to its end.
            outcome: ``ok``, an error's code, ``stalled`` or ``disconnect``.
            bytes_in: Of its body.
            arguments: Digest of those that the code was given; None without code.
        """
        self._write(
            "run",
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
        """A program was sent, and stored or refused; `bytes_in` counts what came, not what was announced.

        Its ``outcome`` is ``ok``, `WEIGHTS_WANTED` or an error's code.
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
        """Programs were measured, or not."""
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
        """A request was turned away before it was anything else.

        Args:
            tenant: Name of whose it was, where that is known.
            path: What was asked for, without its query.
            status: Of the answer.
            code: The error's.
            request_id: Names it in the other logs.
            client: The address it came from.
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
        """Go on in a new file of the same name, where the old one was moved away; else in the old one."""
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
        """Write no more. May be called again."""
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
        """All at once: lines of several processes that append to one file must not mix."""
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
    """What has come of a request.

    Attributes:
        bytes_in: Of its body, as far as it came.
    """

    bytes_in = 0


class AuditEntry(Outcome):
    """The line of one run request, from its first byte to its end.

    Args:
        audit: Where it goes.
        tenant: Name of whose request it is.
        request_id: Names it in the other logs.

    Attributes:
        bytes_out: Of its answer, as far as it was sent.
    """

    def __init__(self, audit: Audit, tenant: str, request_id: str) -> None:
        self.bytes_out = 0
        self._audit, self._tenant, self._request_id = audit, tenant, request_id
        self._request: RunRequest | None = None
        self._error = ""
        self._began = time.perf_counter()
        self._closed = False

    def about(self, request: RunRequest) -> None:
        """What is asked for is known."""
        self._request = request

    @property
    def has_failed(self) -> bool:
        """Whether its answer was ended by an error."""
        return bool(self._error)

    def failed(self, code: str) -> None:
        """Its answer was ended by an error: that is its outcome, whoever ends it how."""
        self._error = self._error or code

    def close(self, outcome: str) -> None:
        """The request has ended; whoever says so first knows why."""
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
            **_about(self._request),
        )


def _about(request: RunRequest | None) -> dict[str, Any]:
    """What a request names, as far as it was read."""
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
