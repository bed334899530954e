"""What runs on Ray Serve: replicas that each keep a server, and a directory that tells where they are."""

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
"""Between two checks of a replica. Ray Serve replaces one that fails three in a row."""

HEALTH_TIMEOUT_S = 15.0
"""For one check, which asks the server and gives it 5 s; the replica's own process may be busy, too."""

METRICS_S = 2.0
"""Between two reports of a replica's queue: a burst should meet new replicas, and they take 20 s to start."""

LOOK_BACK_S = 10.0
"""How long Ray Serve keeps reports; only the last one counts."""

DIRECTORY_REQUESTS = 200
"""Clients that may ask the directory at once: a question takes some milliseconds, and a job asks every few
seconds."""

STOP_MARGIN_S = 10.0
"""Beyond what a replica itself waits for its server, until Ray kills the replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSettings:
    """What a replica is told beside its server's document.

    Attributes:
        book: The address book's name.
        host: Address to bind; None for that of the replica's machine.
        grace_s: How long running requests may go on when the replica is to stop.
        target_bytes: Bytes that may wait at one replica before there are to be more.
    """

    book: str
    host: str | None
    grace_s: float
    target_bytes: int = TARGET_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How many replicas, and what each takes.

    Attributes:
        least: Replicas at least, and at the start.
        most: Replicas at most; as many as ``least`` for a fixed number.
        num_cpus: Cores that Ray sets aside for each.
        num_gpus: Accelerators likewise.
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
    """A replica: keeps one server, says where it is, and takes it away in an orderly manner.

    Ray Serve makes it, checks it, and calls ``__del__`` when it is to stop.

    Args:
        document: What the server is told.
        settings: What the replica is told.

    Raises:
        ServerUnavailable: If the server does not start.
    """

    def __init__(self, document: Mapping[str, object], settings: ReplicaSettings) -> None:
        ray: Any = importlib.import_module("ray")
        host = settings.host or str(ray.util.get_node_ip_address())
        self._settings = settings
        self._server = ServerProcess.start(document, host=host, grace_s=settings.grace_s)
        server = self._server
        try:
            book = RayBook(settings.book)
            self._membership = Membership(book, url=server.url, alive=lambda: server.running)
        except BaseException:
            server.close()
            raise
        log.info("serving at %s", server.url)

    def __call__(self) -> str:
        """Where its server is."""
        return self._server.url

    async def check_health(self) -> None:
        """See that the server lives; Ray Serve calls this.

        Raises:
            ServerUnavailable: If it does not; Ray Serve then puts another replica in this one's place.
        """
        await asyncio.to_thread(self._server.check)

    def __del__(self) -> None:
        """Leave the address book first, so that nobody new comes; then let the server finish."""
        if (membership := getattr(self, "_membership", None)) is not None:
            membership.close()
        if (server := getattr(self, "_server", None)) is not None:
            server.close()


class ScaledReplicaServer(ReplicaServer):
    """A replica that also says how much waits at its server.

    A class of its own, since Ray Serve asks every class that can tell, also where nothing is to be scaled.
    """

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What waits here, and how busy it is; Ray Serve calls this.

        Raises:
            ServerUnavailable: If the server does not say.
        """
        waiting_bytes, utilisation = await asyncio.to_thread(self._server.load)
        target_bytes = self._settings.target_bytes
        return report(waiting_bytes=waiting_bytes, utilisation=utilisation, target_bytes=target_bytes)


class Directory:
    """Answers ``GET …/servers`` with the addresses of all servers; knows nothing else.

    Args:
        servers: The replicas; taken so that they belong to the same application.
        book: The address book's name.
    """

    def __init__(self, servers: object, book: str) -> None:
        self._servers = servers
        self._book = RayBook(book)

    async def __call__(self, request: Any) -> Any:
        """One request, as Starlette hands it over."""
        if not str(request.url.path).rstrip("/").endswith(LISTING_PATH):
            return _answer({"error": {"code": "not_found", "message": f"there is {LISTING_PATH} only"}}, 404)
        if request.method not in ("GET", "HEAD"):
            return _answer({"error": {"code": "protocol", "message": "it can only be read"}}, 405)
        try:
            return _answer(await asyncio.to_thread(self._book.listing), 200)
        except Exception as error:  # Ray's own kinds, and there are many
            log.warning("the address book does not answer: %s", error)
            message = "the address book does not answer now"
            return _answer({"error": {"code": "overloaded", "message": message}}, 503)


def _answer(document: Mapping[str, object], status: int) -> Any:
    responses: Any = importlib.import_module("starlette.responses")
    headers = {"cache-control": "no-store", **({"retry-after": "1"} if status == 503 else {})}
    return responses.JSONResponse(dict(document), status_code=status, headers=headers)


def application(document: Mapping[str, object], settings: ReplicaSettings, scale: Scale) -> Any:
    """The application for ``ray.serve.run``.

    Args:
        document: What each replica's server is told (see `upriver.cluster.document.portable`).
        settings: What replicas are told beside that.
        scale: How many.
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
        graceful_shutdown_wait_loop_s=0.1,  # of Serve's own requests there are none
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
    """How long a replica that is to stop may take: its requests, its server, and the calls in between."""
    return grace_s + KILL_S + STOP_MARGIN_S


def _how_many(scale: Scale) -> dict[str, object]:
    if scale.least == scale.most:
        return {"num_replicas": scale.least}
    config: Any = importlib.import_module("ray.serve.config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of metrics_interval_s, in some versions
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
