"""Share options, output and the progress bar between commands."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO

import typer

from upriver.errors import ConfigError, StoreError
from upriver.progress import progress_bar
from upriver.text import aligned, printable

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([hdw])", re.ASCII)
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}
_MOST = 1_000_000


def age_s(text: str) -> float:
    """Parse the age of ``--older-than``, such as ``30d``, as seconds."""
    match = _AGE.fullmatch(text.strip())
    if match is None or not float(match[1]) < _MOST:
        raise ConfigError(
            f"--older-than is a number below {_MOST} with h, d or w as in 12h, 30d or 8w, got "
            f"{printable(repr(text), 80)}"
        )
    return float(match[1]) * _HOURS[match[2]] * 3600


def date_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as a date, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def emit(document: object, *, as_json: bool, text: Callable[[], None]) -> None:
    """Print a command's result: as one JSON document, or for people.

    JSON has no NaN and no infinity; ``null`` stands for them.
    """
    if as_json:
        print(json.dumps(_finite(document), allow_nan=False), flush=True)
    else:
        text()


def _finite(value: object) -> object:
    """Return a document with None in place of every NaN and infinity."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, aligned."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        print(f"{name:<{width}}  {value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: frozenset[int]) -> None:
    """Print a table on stdout; columns whose index is in ``left`` hold words, the others numbers."""
    print(aligned(columns, [[str(cell) for cell in row] for row in rows], left=left))


class ReaderGone(Exception):
    """Signal that the reader of stdout has closed it: no error, but the command has no reason to continue."""


class _Stdout:
    """Name write errors of a stream: a bare `OSError` could have any source."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
    except OSError as error:
        raise StoreError(f"cannot write to stdout: {error.strerror or error}") from error


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Raise a named error if a print within the block cannot be written.

    Raises:
        StoreError: When stdout is printed to or flushed and cannot be written, as on a full disk.
        ReaderGone: Likewise, if stdout is a pipe that nothing reads.
    """
    stream = sys.stdout
    if stream is None:  # closed before Python began: prints are dropped
        yield
        return
    try:
        with _any_text(stream), contextlib.redirect_stdout(_Stdout(stream)):
            yield
    finally:
        try:
            stream.flush()
        except OSError:
            _drop(stream)


@contextlib.contextmanager
def _any_text(stream: TextIO) -> Iterator[None]:
    """Print characters that the stream's encoding lacks as escapes, as Python does on stderr."""
    if not isinstance(stream, io.TextIOWrapper) or stream.errors != "strict":
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # reconfigure flushes first
            stream.reconfigure(errors="strict")


def _drop(stream: TextIO) -> None:
    """Redirect a stream's buffered text to nowhere, or Python reports its error again at exit."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def named_as_options(**options: str) -> Iterator[None]:
    """Begin an argument's error with the option that set it.

    Args:
        options: Option by the argument's name in Python.
    """
    try:
        yield
    except ConfigError as error:
        name, space, rest = str(error).partition(" ")
        if name not in options:
            raise
        raise ConfigError(f"{options[name]}{space}{rest}") from error


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that work of unknown length is in progress."""
    with progress_bar() as bar:
        bar.add_task(what, total=None)
        yield
