"""The server's log: lines for people or JSON for machines, each with its request, none with a secret.

A line says what it was told, whoever wrote it: so tokens, passwords and keys are looked for in the finished
text, and what is known to be one (the token that a request came with, for example) is taken out wherever it
stands.
"""

from __future__ import annotations

import logging
import re
import secrets as random_tokens
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

import msgspec

from upriver.errors import ConfigError

Format = Literal["text", "json"]

HIDDEN = "***"
"""Stands where a secret stood."""

ID_BYTES = 8
"""Of a request's id: by chance, two of four billion are the same."""

MAX_CHARS = 32 * 1024
"""Of a message or a trace: more than any of ours, and what is longer would fill the disk."""

AT_ONCE = 100
"""Lines of one place in the code that may follow one another: twice a traceback that a worker prints."""

EVERY_S = 1.0
"""After those, one line of a place in so much time: 86,400 a day, whatever a stranger does to cause more."""

_WORDS = r"authorization|secret|passw(?:or)?d|access_?-?key|amz-credential"
_AROUND = r"[\w.-]{0,40}"  # bounded, or a long line without blanks would be searched once for each letter
_VALUE = r"""(?:(?:bearer|basic)\s+)?(?:\\*"[^"]{0,4096}"|\\*'[^']{0,4096}'|[^\s"',;&}\])]+)"""
_MAY_NAME = re.compile(rf"(?i){_WORDS}|token")
_NAMED = re.compile(
    rf"""(?ix) ( \\*["']? (?: {_AROUND} (?:{_WORDS}) {_AROUND} | (?<![a-z])token(?![a-z]) )
    \\*["']? \s? [:=] \s? ) {_VALUE}"""
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+(?!\*\*\*)[A-Za-z0-9._~+/=:-]+")
_IN_URL = re.compile(r"(?<=://)[^/\s@]{1,256}@")


@dataclass(frozen=True, slots=True)
class _Request:
    id: str = ""
    tenant: str = ""
    hidden: tuple[str, ...] = ()


_request: ContextVar[_Request] = ContextVar("upriver_request", default=_Request())  # noqa: B039 - is frozen
_handler: logging.Handler | None = None
_hidden: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------ requests


@contextmanager
def request_context(
    *, tenant: str = "", request_id: str | None = None, hidden: Iterable[str] = ()
) -> Iterator[str]:
    """Whatever is logged inside belongs to a request; gives its id.

    Args:
        tenant: Whose it is.
        request_id: A new one if None.
        hidden: Secrets that the request came with.
    """
    new = request_id or random_tokens.token_hex(ID_BYTES)
    before = _request.set(_Request(new, tenant, tuple(filter(None, hidden))))
    try:
        yield new
    finally:
        _request.reset(before)


def request_id() -> str:
    """Of the request that is being answered; empty outside of one."""
    return _request.get().id


# ------------------------------------------------------------------------------------------- set-up


def configure(format: Format = "text", level: int | str = "INFO", *, secrets: Iterable[str] = ()) -> None:
    """Write the log to stderr from here on, one line each; again: in another way.

    Args:
        format: For people or for machines.
        level: Of upriver's own lines; other libraries' begin at WARNING.
        secrets: What must never appear, beside what is found by its form.

    Raises:
        ConfigError: If there is no such format or level.
    """
    global _handler, _hidden
    if format not in get_args(Format):
        raise ConfigError(f"log_format must be one of {', '.join(get_args(Format))}, got {format!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(Sparing())
    try:
        logging.getLogger("upriver").setLevel(level)
    except (ValueError, TypeError):
        raise ConfigError(f"there is no log level {level!r}; there are DEBUG, INFO, WARNING, ERROR") from None
    root = logging.getLogger()
    if _handler is not None:
        root.removeHandler(_handler)
    root.addHandler(handler)
    logging.captureWarnings(True)  # or they would stand between the lines
    _handler, _hidden = handler, tuple(filter(None, secrets))


def writes_json() -> bool:
    """Whether every line is to be JSON: then nothing else may be written between them."""
    return _handler is not None and isinstance(_handler.formatter, JsonFormatter)


def redacted(text: str) -> str:
    """``text`` without what looks like a secret, and without those that are known.

    A long text is cut before it is looked through, which takes time.
    """
    for secret in (*_hidden, *_request.get().hidden):
        text = text.replace(secret, HIDDEN)
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    if _MAY_NAME.search(text):
        text = _NAMED.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _IN_URL.sub(f"{HIDDEN}@", text)


def names_secret(name: str) -> bool:
    """Whether what goes by that name may be a secret."""
    return _MAY_NAME.search(name) is not None


# ------------------------------------------------------------------------------------------ sparing


class Sparing:
    """A filter that lets `AT_ONCE` lines of each place in the code pass, then one in `EVERY_S`.

    The next line that passes has the number of those that did not: its record's ``left_out``.

    Args:
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._paid_until: dict[tuple[str, int], float] = {}
        self._left_out = 0

    def __call__(self, record: logging.LogRecord) -> bool:
        """Whether to write a line."""
        place, now = (record.pathname, record.lineno), self._now()
        with self._lock:
            until = max(now, self._paid_until.get(place, now))
            if until > now + (AT_ONCE - 1) * EVERY_S:
                self._left_out += 1
                return False
            self._paid_until[place] = until + EVERY_S
            record.left_out, self._left_out = self._left_out, 0
        return True


# --------------------------------------------------------------------------------------- formatters


class TextFormatter(logging.Formatter):
    """Lines for people; after others were left out with their number.

    ``2026-01-31T12:00:00.123Z WARNING upriver.server.execution.worker_pool: worker 7 is gone [request 1f…,
    tenant a]``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line, and those of an exception below it."""
        request = _request.get()
        about = [f"request {request.id}"] if request.id else []
        about += [f"tenant {request.tenant}"] if request.tenant else []
        left_out = getattr(record, "left_out", 0)
        about += [f"{left_out} lines left out before it"] if left_out else []
        where = f" [{', '.join(about)}]" if about else ""
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(_message(record))}{where}"
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message.

    Where known also request_id, tenant, exception, and left_out: lines that were not written before this one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever stands in it."""
        request = _request.get()
        where = {
            "request_id": request.id,
            "tenant": request.tenant,
            "exception": _trace(self, record),
            "left_out": getattr(record, "left_out", 0),
        }
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **{name: value for name, value in where.items() if value},
        }
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    return redacted(_encodable(record.getMessage()))


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return redacted(_encodable("\n".join(parts)))


def _encodable(text: str) -> str:
    """File names may hold bytes that are no UTF-8, which no JSON can say."""
    return text.encode("utf-8", "backslashreplace").decode()


def _one_line(text: str) -> str:
    """What a client says must not look like a line of its own, nor move a terminal's cursor."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
