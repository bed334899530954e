"""Run a replica's server: a separate ``upriver serve`` or ``worker`` process that ends with the replica.

Therefore neither tensors nor tokens pass through Ray's processes. The server's configuration reaches it as a
file of mode 0600, which is removed once it is read.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

from upriver.cluster.replica_config import for_replica, tls_files, toml_text
from upriver.errors import ServerUnavailable
from upriver.rpc.child_server import ASK_S, START_TIMEOUT_S, ChildServer
from upriver.rpc.short_question import get
from upriver.rpc.tls import client_context
from upriver.text import said

KILL_S = 5.0
"""Seconds that processes get to end after the grace period of requests; then the server is killed."""

OF_RAY = "RAY_"
NOT_PASSED_ON = ("UPRIVER_TOKEN", "OMP_NUM_THREADS")
"""Environment variables that the server does not get. A token in the environment would add to the configured
tenants. Ray sets the number of threads for its own processes, and the server sets it for its workers."""


class ServerProcess(ChildServer):
    """Start a replica's server on a free port, and end it in order.

    Args:
        document: Configuration of the server (see `upriver.cluster.replica_config.portable`).
        grace_s: Seconds that running requests get after `close`; the server's configuration says the same.
        command: Subcommand of ``upriver``: ``serve`` or ``worker``.
        timeout_s: Seconds that starting may need.

    Raises:
        ConfigError: If the certificate that the server's clients show cannot be used.
        ServerUnavailable: If the server ends or is not ready in time; with the last lines of its stderr.
    """

    def __init__(
        self,
        document: Mapping[str, object],
        *,
        host: str,
        grace_s: float,
        command: str = "serve",
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        token, tls = secrets.token_urlsafe(32), tls_files(document)
        told, asks = for_replica(document, host=host, keeper_token=token)
        shown = (tls.get("certificate"), tls.get("key")) if "client_ca" in tls else (None, None)
        context = own_server(*shown) if tls else None
        with tempfile.TemporaryDirectory(prefix="upriver-") as folder:
            super().__init__(
                [command, "--config", str(_written(Path(folder), toml_text(told)))],
                name="the replica's server",
                environment=environment(os.environ),
                tls=context,
                timeout_s=timeout_s,
                echo=True,
                new_session=True,
            )
        self._finalizer.atexit = False  # at this process's exit the server ends by itself, after its grace
        self._grace_s, self._token, self._tls = grace_s, token if asks else None, context

    def check(self) -> None:
        """Check that the server is alive.

        Raises:
            ServerUnavailable: If it has ended, or does not answer.
        """
        if not self.running:
            raise ServerUnavailable(self.how_ended())
        status, _ = get(self.url, "/livez", timeout_s=ASK_S, tls=self._tls)
        if status != 200:
            raise ServerUnavailable(f"{self.url}/livez answered {status}")

    def load(self) -> tuple[int, float]:
        """Return the bytes that wait for admission, and the utilisation of its workers.

        Raises:
            ServerUnavailable: If the server does not report them.
        """
        status, body = get(self.url, "/v1/load", timeout_s=ASK_S, token=self._token, tls=self._tls)
        try:
            found = json.loads(body)
            if status == 200:
                return int(found.get("waiting_bytes", 0)), float(found.get("utilisation", 0.0))
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise ServerUnavailable(f"{self.url}/v1/load answered {status} {said(body.decode(errors='replace'))}")

    def close(self) -> None:
        """Let running requests finish and end the server, by force if that takes too long. Callable again."""
        grace_s = self._grace_s
        try:
            self.check()
        except ServerUnavailable:
            grace_s = 0.0  # the server does not go on with its requests
        self._end_within(grace_s + KILL_S)


def own_server(certificate: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return TLS settings for a server that this machine started, at the address it just announced.

    Its certificate names the address that clients use, which may be another, so the certificate is not
    checked.

    Args:
        certificate: Shown to servers that ask for one, with its ``key``.
        key: Key of the certificate; None where it stands in the same file.

    Raises:
        ConfigError: If certificate or key cannot be used.
    """
    context = client_context(certificate=certificate, key=key or certificate) or ssl.SSLContext(
        ssl.PROTOCOL_TLS_CLIENT
    )
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


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
