"""Define the application on Ray Serve: replicas that each keep a server, and a directory of the servers."""

from __future__ import annotations

import asyncio
import importlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upriver.cluster.autoscale import TARGET_BYTES, report
from upriver.cluster.child import KILL_S, ServerProcess
from upriver.cluster.discover import LISTING_PATH, Membership, RayBook
from upriver.errors import ConfigError

log = logging.getLogger(__name__)

SERVERS, DIRECTORY = "servers", "directory"
"""The two deployments of the application, as Ray Serve's status shows them."""

HEALTH_PERIOD_S = 2.0
"""Interval between two checks of a replica. Ray Serve replaces one that fails three in a row."""

HEALTH_TIMEOUT_S = 15.0
"""Timeout of one check, which gives the server 5 s; the replica's own process may be busy too."""

METRICS_S = 2.0
"""Interval between two reports of a replica's queue. New replicas start in 20 s, and should meet a burst."""

LOOK_BACK_S = 10.0
"""Time for which Ray Serve keeps reports; only the last one counts."""

DIRECTORY_REQUESTS = 200
"""Concurrent requests to the directory. Each takes some milliseconds; a job asks every few seconds."""

STOP_MARGIN_S = 10.0
"""Seconds beyond the replica's own wait for its server, after which Ray kills the replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """Settings of a replica that its server's document does not hold.

    Attributes:
        book: Name of the address book.
        host: Address to bind; None for that of the replica's machine.
        grace_s: Seconds that running requests get when the replica stops.
        target_bytes: Bytes that may wait at one replica before more replicas start.
    """

    book: str
    host: str | None
    grace_s: float
    target_bytes: int = TARGET_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Number of replicas, and the resources of each.

    Attributes:
        least: Fewest replicas, and the number at the start.
        most: Most replicas; equal to ``least`` for a fixed number.
        num_cpus: Cores that Ray reserves for each.
        num_gpus: Accelerators that Ray reserves for each.
    """

    least: int
    most: int
    num_cpus: float
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("least", self.least), ("most", self.most)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"replicas must be whole numbers >= 1, got {value!r} ({name})")
        if self.least > self.most:
            raise ConfigError(f"replicas must be least <= most, got {self.least} and {self.most}")
        if not (self.num_cpus >= 0 and self.num_gpus >= 0):
            raise ConfigError(
                f"a replica needs >= 0 cores and accelerators, got {self.num_cpus:g} and {self.num_gpus:g}"
            )


class ReplicaServer:
    """Replica that keeps one server, registers its address, and ends it in order.

    Ray Serve creates the replica, checks it, and calls ``__del__`` to stop it.

    Raises:
        ServerUnavailable: If the server does not start.
    """

    def __init__(self, document: Mapping[str, object], settings: ReplicaSettings) -> None:
        ray: Any = importlib.import_module("ray")
        host = settings.host or str(ray.util.get_node_ip_address())
        self._settings = settings
        self._server = ServerProcess(document, host=host, grace_s=settings.grace_s)
        server = self._server
        try:
            self._membership = Membership(
                RayBook(settings.book), url=server.url, alive=lambda: server.running
            )
        except BaseException:
            server.close()
            raise
        log.info("serving at %s", server.url)

    def __call__(self) -> str:
        """Return the URL of its server."""
        return self._server.url

    async def check_health(self) -> None:
        """Check that the server is alive; called by Ray Serve.

        Raises:
            ServerUnavailable: If it is not; Ray Serve then replaces this replica.
        """
        await asyncio.to_thread(self._server.check)

    def __del__(self) -> None:
        """Leave the address book first, so that no new client comes; then let the server finish."""
        if (membership := getattr(self, "_membership", None)) is not None:
            membership.close()
        if (server := getattr(self, "_server", None)) is not None:
            server.close()


class ScaledReplicaServer(ReplicaServer):
    """Replica that also reports the bytes that wait at its server.

    It is a separate class: Ray Serve asks every class that can report, even if the number of replicas is
    fixed.
    """

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the waiting bytes and the utilisation; called by Ray Serve.

        Raises:
            UpriverError: If the server does not report them.
        """
        waiting_bytes, utilisation = await asyncio.to_thread(self._server.load)
        target_bytes = self._settings.target_bytes
        return report(waiting_bytes=waiting_bytes, utilisation=utilisation, target_bytes=target_bytes)


class Directory:
    """Endpoint that answers ``GET …/servers`` with the addresses of all servers, and no other request.

    Args:
        servers: The replicas; an argument so that they belong to the same application.
        book: Name of the address book.
    """

    def __init__(self, servers: object, book: str) -> None:
        self._servers = servers
        self._book = RayBook(book)

    async def __call__(self, request: Any) -> Any:
        """Answer one request of Starlette's type."""
        if not str(request.url.path).rstrip("/").endswith(LISTING_PATH):
            return _answer({"error": {"code": "not_found", "message": f"there is {LISTING_PATH} only"}}, 404)
        if request.method not in ("GET", "HEAD"):
            return _answer({"error": {"code": "protocol", "message": "it can only be read"}}, 405)
        try:
            return _answer(await asyncio.to_thread(self._book.listing), 200)
        except Exception as error:  # Ray raises many kinds of its own
            log.warning("the address book does not answer: %s", error)
            message = "the address book does not answer now"
            return _answer({"error": {"code": "overloaded", "message": message}}, 503)


def _answer(document: Mapping[str, object], status: int) -> Any:
    responses: Any = importlib.import_module("starlette.responses")
    headers = {"cache-control": "no-store", **({"retry-after": "1"} if status == 503 else {})}
    return responses.JSONResponse(dict(document), status_code=status, headers=headers)


def application(document: Mapping[str, object], settings: ReplicaSettings, scale: Scale) -> Any:
    """Return the application for ``ray.serve.run``.

    Args:
        document: Configuration of each replica's server (see `upriver.cluster.replica_config.portable`).
    """
    serve: Any = importlib.import_module("ray.serve")
    cls = ReplicaServer if scale.least == scale.most else ScaledReplicaServer
    gpus = {"num_gpus": scale.num_gpus} if scale.num_gpus else {}
    servers = serve.deployment(
        cls,
        name=SERVERS,
        ray_actor_options={"num_cpus": scale.num_cpus, **gpus},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,  # no request passes through Serve
        graceful_shutdown_timeout_s=stop_timeout_s(settings.grace_s),
        **_how_many(scale),
    ).bind(dict(document), settings)
    directory = serve.deployment(
        Directory,
        name=DIRECTORY,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=DIRECTORY_REQUESTS,
    )
    return directory.bind(servers, settings.book)


def stop_timeout_s(grace_s: float) -> float:
    """Return the seconds that a stopping replica may need: for requests, server, and calls in between."""
    return grace_s + KILL_S + STOP_MARGIN_S


def _how_many(scale: Scale) -> dict[str, object]:
    if scale.least == scale.most:
        return {"num_replicas": scale.least}
    config: Any = importlib.import_module("ray.serve.config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about metrics_interval_s, in some versions
        autoscaling = config.AutoscalingConfig(
            min_replicas=scale.least,
            initial_replicas=scale.least,
            max_replicas=scale.most,
            upscale_delay_s=0,  # the policy has its own
            downscale_delay_s=0,
            metrics_interval_s=METRICS_S,
            look_back_period_s=LOOK_BACK_S,
            policy=config.AutoscalingPolicy(policy_function="upriver.cluster.autoscale:policy"),
        )
    return {"autoscaling_config": autoscaling}
