"""Control an ``upriver serve`` that this process has started: its address, its last output, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import IO

from upriver._threads.background import BackgroundThread
from upriver._threads.forks import reset_in_child

START_TIMEOUT_S = 180.0
"""Seconds until a server is ready: the server and its workers import torch. That takes 2 s, or a minute on a
machine that is busy or starts several at once. A server that ends earlier is noticed at once."""

TAIL_LINES = 20
"""Last lines of the server's stderr, kept for the error if it ends."""


class Lifeline:
    """Hold the writing end of a pipe: the child that reads it ends when this process does.

    The kernel closes the writing end however this process dies. A fork of this process closes its own copy at
    once, as it would otherwise keep the child alive. (A death signal would follow the *thread* that started
    the child.)

    Attributes:
        reader: The reading end, for the child.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        reset_in_child(self)

    def hand_over(self) -> None:
        """Close this process's reading end, once the child has its own."""
        os.close(self.reader)

    def close(self) -> None:
        """Close the writing end. Idempotent."""
        writer, self._writer = self._writer, -1
        if writer >= 0:
            os.close(writer)

    forked = close


class OutputTail:
    """Read a stream to its end in a thread, so that its writer never blocks; keep the last lines.

    Args:
        echo: Whether to print the lines to this process's stderr.
    """

    def __init__(self, stream: IO[bytes] | None, *, echo: bool = False) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._stream, self._echo = stream, echo
        self._thread = BackgroundThread(self._read, name="server-stderr")
        self._thread.start()

    @property
    def text(self) -> str:
        """The last lines."""
        return "\n".join(self._lines).strip()

    def join(self, timeout_s: float) -> None:
        """Wait for the stream's end."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        if self._stream is None:
            return
        with self._stream:
            for line in self._stream:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                if self._echo:
                    with contextlib.suppress(OSError, ValueError):  # stderr may be closed by now
                        print(text, file=sys.stderr, flush=True)


def announced_url(process: subprocess.Popen[bytes], deadline: float) -> str | None:
    """Return the address in the JSON line of a server that listens; None if it ends, or time is up."""
    for line in _lines(process, deadline):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("listening"), str):
                return str(found["listening"])
    return None


def end(process: subprocess.Popen[bytes], tail: OutputTail, lifeline: Lifeline, *, timeout_s: float) -> None:
    """End exactly this process, by its handle, which knows whether the process id is still valid.

    Args:
        lifeline: The lifeline of its start; closed at the end.
        timeout_s: Seconds after SIGTERM before it is killed.
    """
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    lifeline.close()
    tail.join(timeout_s)
    if process.stdout is not None:
        process.stdout.close()


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Yield lines of a process's stdout until it ends or time is up."""
    if process.stdout is None:
        return
    descriptor, rest = process.stdout.fileno(), b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            return
        data = os.read(descriptor, 4096)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
