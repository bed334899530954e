"""Run a near-data server of one's own: a subprocess on loopback, for one machine and for demonstrations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from typing import Self

from upriver.errors import ConfigError, ServerUnavailable
from upriver.extras import SERVER, why_missing
from upriver.rpc.child_server import START_TIMEOUT_S, ChildServer

TOKEN_VARIABLE = "UPRIVER_TOKEN"
"""Environment variable with the token of ``upriver serve``: unlike arguments, other users cannot see it."""


class EmbeddedServer(ChildServer):
    """A running ``upriver serve`` on loopback."""

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
        environment: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start a server and wait until it accepts requests.

        Args:
            stores: URIs of stores, by name.
            threads: Threads of each compute process; the server's own default if None.
            workers: Compute processes; the server's own default if None.
            cpu: Cores that the server and its processes may use.
            token: Token that clients must send.
            port: Port to listen on; 0 chooses a free one.
            environment: Variables of the server in addition to this process's, whose values they replace.
            timeout_s: Seconds that the start may take.

        Raises:
            ConfigError: If a store cannot be shared with another process.
            ServerUnavailable: If a package of the extra ``server`` is missing, or the server ends or does
                not get ready; with the last lines of its stderr.
        """
        _check_stores(stores)
        options = [option for name, uri in stores.items() for option in ("--store", f"{name}={uri}")]
        numbers = {"--threads": threads, "--workers": workers, "--port": port}
        return cls._started(
            "serve", options, numbers, cpu=cpu, token=token, timeout_s=timeout_s, variables=environment
        )

    @classmethod
    def start_worker(
        cls,
        allow: Sequence[str],
        *,
        workers: int | None = None,
        cpu: Set[int] | None = None,
        token: str | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start an ``upriver worker`` and wait until it accepts requests.

        Args:
            allow: Names that it may run, as for ``--allow``.
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
        variables: Mapping[str, str] | None = None,
    ) -> Self:
        why = why_missing(f"an embedded server (upriver {command})", "server", *SERVER)
        if why:
            raise ServerUnavailable(why)
        given = [(option, str(value)) for option, value in numbers.items() if value is not None]
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environment |= variables or {}
        if token is not None:
            environment[TOKEN_VARIABLE] = token
        return cls(
            [command, *options, *(word for pair in given for word in pair)],
            name="the embedded server",
            environment=environment,
            timeout_s=timeout_s,
            cpu=cpu,
        )


def _check_stores(stores: Mapping[str, str]) -> None:
    if not stores:
        raise ConfigError("an embedded server needs at least one store")
    for name, uri in stores.items():
        if uri.startswith("memory:"):
            raise ConfigError(
                f"store {name!r} ({uri}) lies in this process's memory, where a server cannot see it; "
                "use a file:// or s3:// store, or connect without a server"
            )
