"""Run a near-data server of one's own: a subprocess on loopback, for one machine and for demonstrations."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from types import TracebackType

from upriver._threads.forks import unless_forked
from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.rpc.child_server import START_TIMEOUT_S, Lifeline, OutputTail, announced_url, end
from upriver.rpc.client import ServerClient

READY_POLL_S = 0.05
"""Seconds between two requests to /readyz during the start: a hundredth of the start's duration."""

STOP_TIMEOUT_S = 10.0
"""Seconds after SIGTERM before a process is killed."""

TOKEN_VARIABLE = "UPRIVER_TOKEN"
"""Environment variable with the token of ``upriver serve``: unlike arguments, other users cannot see it."""


class EmbeddedServer:
    """A running ``upriver serve``, which ends with this object, and with this process however that dies.

    Attributes:
        url: Address on loopback.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], lifeline: Lifeline, errors: OutputTail, url: str
    ) -> None:
        self.url = url
        self._process = process
        self._errors = errors
        self._close = weakref.finalize(
            self, unless_forked(end, process, errors, lifeline, timeout_s=STOP_TIMEOUT_S)
        )

    @classmethod
    def start(
        cls,
        stores: Mapping[str, str],
        *,
        threads: int | None = None,
        workers: int | None = None,
        cpu: Set[int] | None = None,
        token: str | None = None,
        port: int = 0,
        timeout_s: float = START_TIMEOUT_S,
    ) -> EmbeddedServer:
        """Start a server and wait until it accepts requests.

        Args:
            stores: URIs of stores, by name.
            threads: Threads of each compute process; the server's own default if None.
            workers: Compute processes; the server's own default if None.
            cpu: Cores that the server and its processes may use.
            token: Token that clients must send.
            port: Port to listen on; 0 chooses a free one.
            timeout_s: Seconds that the start may take.

        Raises:
            ConfigError: If a store cannot be shared with another process.
            ServerUnavailable: If it ends or does not get ready; with the last lines of its stderr.
        """
        _check_stores(stores)
        options = [option for name, uri in stores.items() for option in ("--store", f"{name}={uri}")]
        numbers = {"--threads": threads, "--workers": workers, "--port": port}
        return cls._started("serve", options, numbers, cpu=cpu, token=token, timeout_s=timeout_s)

    @classmethod
    def start_worker(
        cls,
        allow: Sequence[str],
        *,
        workers: int | None = None,
        cpu: Set[int] | None = None,
        token: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> EmbeddedServer:
        """Start an ``upriver worker`` and wait until it accepts requests.

        Args:
            allow: Names that it may run, as for ``--allow``.
            workers: Compute processes; its own default if None.
            cpu: As for `start`, as are the other arguments.

        Raises:
            ServerUnavailable: As `start`.
        """
        options = [option for name in allow for option in ("--allow", name)]
        numbers = {"--workers": workers, "--port": 0}
        return cls._started("worker", options, numbers, cpu=cpu, token=token, timeout_s=timeout_s)

    @classmethod
    def _started(
        cls,
        command: str,
        options: Sequence[str],
        numbers: Mapping[str, int | None],
        *,
        cpu: Set[int] | None,
        token: str | None,
        timeout_s: float,
    ) -> EmbeddedServer:
        lifeline = Lifeline()
        try:
            line = _command(command, options, {**numbers, "--parent-pipe": lifeline.reader})
            process = _spawn(line, pass_fd=lifeline.reader, cpu=cpu, token=token)
        except BaseException:
            lifeline.close()
            raise
        finally:
            lifeline.hand_over()
        errors = OutputTail(process.stderr)
        try:
            deadline = time.monotonic() + timeout_s
            url = announced_url(process, deadline)
            if url is None:
                raise _not_there(process, errors, deadline)
            _wait_until_ready(process, errors, url, token, deadline)
            return cls(process, lifeline, errors, url)
        except BaseException:
            end(process, errors, lifeline, timeout_s=STOP_TIMEOUT_S)
            raise

    @property
    def pid(self) -> int:
        """Process id of the server's front."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process is still running."""
        return self._process.poll() is None

    @property
    def stderr_tail(self) -> str:
        """The last lines that the server wrote to stderr."""
        return self._errors.text

    def close(self) -> None:
        """Ask the server to end, wait, and kill it if it does not. Idempotent."""
        self._close()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_stores(stores: Mapping[str, str]) -> None:
    if not stores:
        raise ConfigError("an embedded server needs at least one store")
    for name, uri in stores.items():
        if uri.startswith("memory:"):
            raise ConfigError(
                f"store {name!r} ({uri}) lies in this process's memory, where a server cannot see it; "
                "use a file:// or s3:// store, or connect without a server"
            )


def _command(command: str, options: Sequence[str], numbers: Mapping[str, int | None]) -> list[str]:
    given = [(option, str(value)) for option, value in numbers.items() if value is not None]
    return [sys.executable, "-m", "upriver", command, *options, *chain.from_iterable(given)]


def _spawn(
    command: list[str], *, pass_fd: int, cpu: Set[int] | None, token: str | None
) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    if token is not None:
        environment[TOKEN_VARIABLE] = token
    with _on_cores(cpu):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(pass_fd,),
            env=environment,
        )


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


def _wait_until_ready(
    process: subprocess.Popen[bytes], errors: OutputTail, url: str, token: str | None, deadline: float
) -> None:
    """Wait until /readyz answers; the server announced its address once one worker was ready."""
    with ServerClient(url, token=token) as client:
        while process.poll() is None and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(UpriverError):
                if client.ready(timeout_s=left_s):
                    return
            time.sleep(READY_POLL_S)
    raise _not_there(process, errors, deadline)


def _not_there(process: subprocess.Popen[bytes], errors: OutputTail, deadline: float) -> ServerUnavailable:
    """Return the error that says why a started server cannot be used."""
    if time.monotonic() >= deadline:
        return ServerUnavailable(f"the embedded server was not ready in time{_said(errors)}")
    code = process.wait()
    errors.join(STOP_TIMEOUT_S)
    return ServerUnavailable(f"the embedded server ended with exit code {code}{_said(errors)}")


def _said(errors: OutputTail) -> str:
    return f"; it said:\n{errors.text}" if errors.text else ""
