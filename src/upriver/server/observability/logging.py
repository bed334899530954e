"""Write the server's log: text lines or JSON, each with its request, none with a secret.

Any code may log anything, so the finished text is searched for tokens, passwords and keys. Known secrets,
such as the request's token, are removed wherever they appear.
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
"""Replacement of a secret."""

ID_BYTES = 8
"""Bytes of a request's id. By chance, two of four billion ids are the same."""

MAX_CHARS = 32 * 1024
"""Most characters of a message or a trace. upriver's own are shorter; longer ones would fill the disk."""

AT_ONCE = 100
"""Lines from one place in the code that may follow one another: twice the lines of a worker's traceback."""

EVERY_S = 1.0
"""Seconds between further lines from that place: at most 86,400 a day, whatever a client does to cause
more."""

_WORDS = r"authorization|secret|passw(?:or)?d|access_?-?key|amz-credential"
_AROUND = r"[\w.-]{0,40}"  # bounded, or a long line without blanks would be searched from each letter
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
    """Attach a request to all lines that are logged inside the block; yield the request's id.

    Args:
        request_id: The id; None creates a new one.
        hidden: Secrets that the request came with.
    """
    new = request_id or random_tokens.token_hex(ID_BYTES)
    before = _request.set(_Request(new, tenant, tuple(filter(None, hidden))))
    try:
        yield new
    finally:
        _request.reset(before)


def request_id() -> str:
    """Return the id of the present request, or an empty string outside a request."""
    return _request.get().id


# ------------------------------------------------------------------------------------------- set-up


def configure(format: Format = "text", level: int | str = "INFO", *, secrets: Iterable[str] = ()) -> None:
    """Write the log to stderr from now on, one line each. A further call replaces the settings.

    Args:
        format: "text" for people, "json" for machines.
        level: Lowest level of upriver's own lines; other libraries' begin at WARNING.
        secrets: Known secrets to remove, besides those found by their form.

    Raises:
        ConfigError: If the format or the level is unknown.
    """
    global _handler, _hidden
    if format not in get_args(Format):
        raise ConfigError(f"log_format must be one of {', '.join(get_args(Format))}, got {format!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(RateLimitFilter())
    try:
        logging.getLogger("upriver").setLevel(level)
    except (ValueError, TypeError):
        raise ConfigError(f"there is no log level {level!r}; there are DEBUG, INFO, WARNING, ERROR") from None
    root = logging.getLogger()
    if _handler is not None:
        root.removeHandler(_handler)
    root.addHandler(handler)
    logging.captureWarnings(True)  # or warnings would be printed between the lines
    _handler, _hidden = handler, tuple(filter(None, secrets))


def writes_json() -> bool:
    """Return whether every line is JSON, so that nothing else may be written between lines."""
    return _handler is not None and isinstance(_handler.formatter, JsonFormatter)


def redacted(text: str) -> str:
    """Return ``text`` without known secrets and without parts that look like secrets.

    A long text is cut before it is searched, since the search takes time.
    """
    for secret in (*_hidden, *_request.get().hidden):
        text = text.replace(secret, HIDDEN)
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    if _MAY_NAME.search(text):
        text = _NAMED.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _IN_URL.sub(f"{HIDDEN}@", text)


def names_secret(name: str) -> bool:
    """Return whether a value of this name may be a secret."""
    return _MAY_NAME.search(name) is not None


# ------------------------------------------------------------------------------------------ sparing


class RateLimitFilter:
    """Filter that passes `AT_ONCE` lines from each place in the code, then one per `EVERY_S`.

    The next line that passes carries the number of dropped lines in its record's ``left_out``.

    Args:
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._paid_until: dict[tuple[str, int], float] = {}
        self._left_out = 0

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line."""
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
    """Format lines for people, with the number of lines dropped before each.

    ``2026-01-31T12:00:00.123Z WARNING upriver.server.execution.worker_pool: worker 7 is gone [request 1f…,
    tenant a]``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the lines of an exception."""
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
    """Format each line as a JSON object: time, level, logger, message.

    If known, request_id, tenant, exception and left_out (the number of lines dropped before this one) follow.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message contains."""
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
    """Escape bytes of file names that are not UTF-8, which JSON cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _one_line(text: str) -> str:
    """Escape control characters, so that a client's text cannot fake a line or move a terminal's cursor."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
