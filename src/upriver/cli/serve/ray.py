"""``upriver serve --engine ray``: run the server as replicas on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from upriver.errors import ConfigError

PORT = 8000
"""Default port of the directory: Ray Serve's own."""

OnListening = Callable[[Mapping[str, object]], None]


def run(
    config_document: Mapping[str, object],
    *,
    address: str | None = None,
    replicas: int | tuple[int, int] = 1,
    token: str | None = None,
    num_cpus: float | None = None,
    queue_bytes: int | None = None,
    on_listening: OnListening | None = None,
) -> None:
    """Serve with replicas until SIGTERM or SIGINT, and return when all replicas have ended.

    Args:
        config_document: The server's TOML file as plain values, with options included and paths made
            absolute. ``port`` is the directory's. ``threads`` defaults to 1: Ray hands out cores one by one.
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:10001`` of a running cluster, or ``local`` to start
            one on this machine. None takes the variable ``RAY_ADDRESS``, or else ``local``.
        replicas: Number of replicas, or its lower and upper limit.
        token: The single token that clients must send, if the document has no tenants.
        num_cpus: Cores that Ray reserves for a replica; None means ``workers`` times ``threads``.
        queue_bytes: Bytes that may wait at one replica before more replicas are started.
        on_listening: Called once the first replica serves; None prints one JSON line.

    Raises:
        ConfigError: If an argument is out of range, Ray is not installed, or no cluster exists.
        ServerUnavailable: If no replica can serve.
    """
    from upriver.cluster.autoscale import TARGET_BYTES
    from upriver.cluster.deploy import APPLICATION, LOCAL, Deployment, serve_on_ray
    from upriver.cluster.deployment import ReplicaSettings, Scale
    from upriver.cluster.replica_config import bind_host, portable, seconds, tls_files, whole

    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    document = {"threads": 1, **portable(config_document, token=token)}
    host = bind_host(config_document, local=address == LOCAL, token=token)
    least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    on_accelerator = str(document.get("device", "cpu")).startswith("cuda")
    if address == LOCAL and most > 1 and not on_accelerator and document.get("memory_budget_bytes") is None:
        document["memory_reserve"] = _reserve_of_each(document, most)
    tls = tls_files(document)
    deployment = Deployment(
        document=document,
        settings=ReplicaSettings(
            book=f"{APPLICATION}-addresses",
            host=host,
            grace_s=seconds(document, "grace_s", _default("grace_s")),
            target_bytes=_positive("queue_bytes", queue_bytes, TARGET_BYTES),
        ),
        scale=Scale(
            least=least,
            most=most,
            num_cpus=num_cpus
            if num_cpus is not None
            else float(whole(document, "workers", _default("workers")) * whole(document, "threads", 1)),
            num_gpus=1.0 if on_accelerator else 0.0,
        ),
        port=_port(config_document.get("port")),
        address=address,
        certificate=tls.get("certificate"),
        key=tls.get("key"),
    )
    announce = on_listening or _announcer()
    # Ray prints the output of its processes; stdout is for the one line that programs read.
    with contextlib.redirect_stdout(sys.stderr):
        serve_on_ray(deployment, on_listening=announce)


def _reserve_of_each(document: Mapping[str, object], most: int) -> float:
    """Return the share of memory that each server on one machine leaves free.

    The share includes the parts of the others, of ``most`` servers in all. Each server derives its budget
    from the memory that is free when it starts, and cannot see later servers.
    """
    from upriver.cluster.replica_config import seconds

    reserve = seconds(document, "memory_reserve", _default("memory_reserve"))
    if reserve >= 1:
        raise ConfigError(f"memory_reserve is a share below 1 of what is available, got {reserve:g}")
    return 1 - (1 - reserve) / most


def _default(name: str) -> Any:
    """Return the default of a setting of each server."""
    from upriver.server import ServerConfig

    return next(field.default for field in fields(ServerConfig) if field.name == name)


def _announcer() -> OnListening:
    out = sys.stdout

    def announce(document: Mapping[str, object]) -> None:
        print(json.dumps(dict(document)), file=out, flush=True)

    return announce


def _positive(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def _port(value: object) -> int:
    if value is None:
        return PORT
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(f"port must lie in 0..65535, got {value!r}")
    return value
