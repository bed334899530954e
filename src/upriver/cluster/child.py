"""Run a replica's server: a separate ``upriver serve`` or ``worker`` process that ends with the replica.

Therefore neither tensors nor tokens pass through Ray's processes. The server's configuration reaches it as a
file of mode 0600, which is removed once it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from upriver.cluster.asking import get, own_server
from upriver.cluster.document import for_replica, tls_files, toml_text
from upriver.errors import ServerUnavailable
from upriver.rpc.child_server import START_TIMEOUT_S, Lifeline, OutputTail, announced_url, end
from upriver.text import said

ASK_S = 5.0
"""Timeout of a request to the server's front, which answers in milliseconds even with busy workers."""

READY_POLL_S = 0.1
"""Interval between two requests of /readyz during the start."""

KILL_S = 5.0
"""Seconds that processes get to end after the grace period of requests; then the server is killed."""

OF_RAY = "RAY_"
NOT_PASSED_ON = ("UPRIVER_TOKEN", "OMP_NUM_THREADS")
"""Environment variables that the server does not get.

A token in the environment would add to the configured tenants. Ray sets the number of threads for its own
processes, and the server sets it for its workers.
"""


class ServerProcess:
    """Control a running server.

    Attributes:
        url: URL of the server.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        url: str,
        tail: OutputTail,
        lifeline: Lifeline,
        token: str | None,
        tls: Mapping[str, str],
        grace_s: float,
    ) -> None:
        self.url = url
        self._process, self._tail, self._lifeline = process, tail, lifeline
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        shown = (tls.get("certificate"), tls.get("key")) if "client_ca" in tls else (None, None)
        self._tls = own_server(*shown) if tls else None
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def start(
        cls,
        document: Mapping[str, object],
        *,
        host: str,
        grace_s: float,
        command: str = "serve",
        timeout_s: float = START_TIMEOUT_S,
    ) -> ServerProcess:
        """Start a server on a free port and wait until it accepts requests.

        Args:
            document: Configuration of the server (see `upriver.cluster.document.portable`).
            host: Address to bind.
            grace_s: Seconds that running requests get after `close`; the server's configuration says the
                same.
            command: Subcommand of ``upriver``: ``serve`` or ``worker``.
            timeout_s: Seconds that starting may need.

        Raises:
            ServerUnavailable: If the server ends or is not ready in time; with the last lines of its stderr.
        """
        token = secrets.token_urlsafe(32)
        told, asks = for_replica(document, host=host, keeper_token=token)
        deadline = time.monotonic() + timeout_s
        lifeline = Lifeline()
        with tempfile.TemporaryDirectory(prefix="upriver-") as folder:
            try:
                process = _spawn(
                    command, _written(Path(folder), toml_text(told)), parent_pipe=lifeline.reader
                )
            except BaseException:
                lifeline.close()
                raise
            finally:
                lifeline.hand_over()
            tail = OutputTail(process.stderr, echo=True)
            try:
                url = announced_url(process, deadline)
                if url is None:
                    raise _not_there(process, tail)
                server = cls(
                    process,
                    url=url,
                    tail=tail,
                    lifeline=lifeline,
                    token=token if asks else None,
                    tls=tls_files(document),
                    grace_s=grace_s,
                )
                server._wait_until_ready(deadline)
            except BaseException:
                end(process, tail, lifeline, timeout_s=KILL_S)
                raise
        return server

    @property
    def pid(self) -> int:
        """PID of the server's front."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._process.wait()

    def check(self) -> None:
        """Check that the server is alive.

        Raises:
            ServerUnavailable: If it has ended, or does not answer.
        """
        if not self.running:
            raise ServerUnavailable(_ended(self._process, self._tail))
        status, _ = get(self.url, "/livez", timeout_s=ASK_S, tls=self._tls)
        if status != 200:
            raise ServerUnavailable(f"{self.url}/livez answered {status}")

    def load(self) -> tuple[int, float]:
        """Return the bytes that wait for admission, and the utilisation of its workers.

        Raises:
            ServerUnavailable: If the server does not report them.
        """
        status, body = get(self.url, "/v1/load", timeout_s=ASK_S, headers=self._headers, tls=self._tls)
        try:
            found = json.loads(body)
            if status == 200:
                return int(found.get("waiting_bytes", 0)), float(found.get("utilisation", 0.0))
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise ServerUnavailable(f"{self.url}/v1/load answered {status} {said(body.decode(errors='replace'))}")

    def close(self) -> None:
        """Let running requests finish and end the server, by force if that takes too long. Callable again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        grace_s = self._grace_s
        try:
            self.check()
        except ServerUnavailable:
            grace_s = 0.0  # the server does not go on with its requests
        end(self._process, self._tail, self._lifeline, timeout_s=grace_s + KILL_S)

    def _wait_until_ready(self, deadline: float) -> None:
        while self.running and time.monotonic() < deadline:
            with contextlib.suppress(ServerUnavailable):
                if get(self.url, "/readyz", timeout_s=ASK_S, tls=self._tls)[0] == 200:
                    return
            time.sleep(READY_POLL_S)
        raise _not_there(self._process, self._tail)


def _written(folder: Path, text: str) -> Path:
    """Write a new file that only this user can read."""
    path = folder / "server.toml"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment: the replica's, without Ray's variables, which hold Ray's token."""
    return {
        name: value
        for name, value in ours.items()
        if not name.startswith(OF_RAY) and name not in NOT_PASSED_ON
    }


def _spawn(command: str, config: Path, *, parent_pipe: int) -> subprocess.Popen[bytes]:
    options = ["--config", str(config), "--parent-pipe", str(parent_pipe)]
    return subprocess.Popen(
        [sys.executable, "-m", "upriver", command, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(parent_pipe,),
        env=environment(os.environ),
        start_new_session=True,  # Ctrl-C at a terminal is for the process that started the cluster
    )


def _not_there(process: subprocess.Popen[bytes], tail: OutputTail) -> ServerUnavailable:
    """Return why a started server cannot be used; its stdout ends a moment before the process does."""
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return ServerUnavailable(f"the replica's server was not ready in time{_words(tail)}")
    return ServerUnavailable(_ended(process, tail))


def _ended(process: subprocess.Popen[bytes], tail: OutputTail) -> str:
    tail.join(KILL_S)
    code = process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the replica's server {how}{_words(tail)}"


def _words(tail: OutputTail) -> str:
    return f"; it said: {tail.text}" if tail.text else ""
