"""Run an ``upriver serve`` or ``worker`` as a child process: its start, address, last output and end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from types import TracebackType
from typing import IO, Self

from upriver._threads.background import BackgroundThread
from upriver._threads.forks import reset_in_child
from upriver.errors import ConfigError, ServerUnavailable
from upriver.rpc.short_question import get

START_TIMEOUT_S = 180.0
"""Seconds until a server is ready: the server and its workers import torch. That takes 2 s, or a minute on a
machine that is busy or starts several at once. A server that ends earlier is noticed at once."""

READY_POLL_S = 0.05
"""Seconds between two requests to /readyz during the start: a hundredth of the start's duration."""

ASK_S = 5.0
"""Timeout of a question to the server's front, which answers in milliseconds even with busy workers."""

STOP_TIMEOUT_S = 10.0
"""Seconds after SIGTERM before a process is killed."""

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

    @property
    def held(self) -> bool:
        """Return whether this process holds the writing end; a fork does not."""
        return self._writer >= 0

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


class ChildServer:
    """Run a server that ends with this object, and with this process however that dies.

    A fork of this process leaves the server alone.

    Args:
        arguments: Subcommand of ``upriver`` and its options.
        name: Name of the server in errors.
        environment: Environment of the server.
        tls: TLS settings for https.
        timeout_s: Seconds that the start may take.
        cpu: Cores that the server and its processes may use.
        echo: Whether to print what the server writes to stderr.
        new_session: Whether Ctrl-C at this process's terminal does not reach the server.

    Attributes:
        url: Address of the server.

    Raises:
        ConfigError: If ``cpu`` contains other cores than this process's.
        ServerUnavailable: If the server ends or is not ready in time; with the last lines of its stderr.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        timeout_s: float = START_TIMEOUT_S,
        cpu: Set[int] | None = None,
        echo: bool = False,
        new_session: bool = False,
    ) -> None:
        deadline, self._name, self._lifeline = time.monotonic() + timeout_s, name, Lifeline()
        try:
            with _on_cores(cpu):
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "upriver",
                        *arguments,
                        "--parent-pipe",
                        str(self._lifeline.reader),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(self._lifeline.reader,),
                    env=environment,
                    start_new_session=new_session,
                )
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            self._lifeline.hand_over()
        try:
            self._errors = OutputTail(self._process.stderr, echo=echo)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._lifeline.close()
            raise
        self._finalizer = weakref.finalize(self, _end, self._process, self._errors, self._lifeline)
        try:
            self.url = self._announced(deadline)
            self._wait_until_ready(tls, deadline)
        except BaseException:
            self._finalizer()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server's front."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process is still running."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._process.wait()

    def how_ended(self) -> str:
        """Return how the ended server ended, and its last words."""
        self._errors.join(STOP_TIMEOUT_S)
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self._name} {how}{self._words()}"

    def close(self) -> None:
        """Ask the server to end, wait, and kill it if it does not. Idempotent."""
        self._end_within(STOP_TIMEOUT_S)

    def _end_within(self, timeout_s: float) -> None:
        if self._finalizer.detach() is not None:
            _end(self._process, self._errors, self._lifeline, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _announced(self, deadline: float) -> str:
        """Return the address in the JSON line of a server that listens."""
        for line in _lines(self._process, deadline):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and isinstance(found.get("listening"), str):
                    return str(found["listening"])
        raise self._not_there(deadline)

    def _wait_until_ready(self, tls: ssl.SSLContext | None, deadline: float) -> None:
        """Wait until /readyz answers; the server announced its address once one worker was ready."""
        while self.running and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(ServerUnavailable):
                if get(self.url, "/readyz", timeout_s=min(left_s, ASK_S), tls=tls)[0] == 200:
                    return
            time.sleep(READY_POLL_S)
        raise self._not_there(deadline)

    def _not_there(self, deadline: float) -> ServerUnavailable:
        """Return the error that says why a started server cannot be used."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stdout ends a moment before the process
            self._process.wait(0.0 if time.monotonic() >= deadline else STOP_TIMEOUT_S)
            return ServerUnavailable(self.how_ended())
        return ServerUnavailable(f"{self._name} was not ready in time{self._words()}")

    def _words(self) -> str:
        return f"; it said: {self._errors.text}" if self._errors.text else ""


def _end(
    process: subprocess.Popen[bytes],
    errors: OutputTail,
    lifeline: Lifeline,
    timeout_s: float = STOP_TIMEOUT_S,
) -> None:
    """End exactly this process, by its handle, which knows whether the process id is still valid."""
    if not lifeline.held:  # a fork of the process that started the server is exiting
        return
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    lifeline.close()
    errors.join(timeout_s)
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


@contextlib.contextmanager
def _on_cores(cpu: Set[int] | None) -> Iterator[None]:
    """Restrict this thread's cores within a block: a child inherits them from the thread that starts it."""
    if cpu is None:
        yield
        return
    allowed = os.sched_getaffinity(0)
    if not cpu or not cpu <= allowed:
        raise ConfigError(f"cpu must be some of this process's cores {sorted(allowed)}, got {sorted(cpu)}")
    os.sched_setaffinity(0, cpu)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
