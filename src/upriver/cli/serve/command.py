"""``upriver serve``: run the near-data server, from options, a TOML file, or both (options win)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from upriver.cli.common import DebugOption, JsonOption
from upriver.cli.serve import config_file
from upriver.cli.serve.config_file import Checked
from upriver.cli.serve.options import (
    ConfigOption,
    HostOption,
    ParentPipeOption,
    StoresOption,
    TokenFileOption,
    check_server_installed,
    ended_by_signals,
    serve_here,
    stop_with_parent,
    token_of,
    told,
)
from upriver.errors import ConfigError

ENGINES = ("process", "ray")
_OF_RAY = ("address", "replicas", "min_replicas", "max_replicas", "queue_bytes")


def serve(
    store: StoresOption = None,
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(help="7000 by default; 0 takes a free one.")] = None,
    token_file: TokenFileOption = None,
    workers: Annotated[int | None, typer.Option(help="Compute processes.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each compute process.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the compute processes, cpu by default.")
    ] = None,
    config: ConfigOption = None,
    engine: Annotated[
        str, typer.Option(metavar="process|ray", help="One server here, or replicas on a Ray cluster.")
    ] = "process",
    address: Annotated[
        str | None,
        typer.Option(metavar="auto|local|HOST:PORT|ray://…", help="With ray: the cluster, local starts one."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="With ray: how many servers, 1 by default.")] = None,
    min_replicas: Annotated[int | None, typer.Option(help="With ray: at least so many.")] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="With ray: at most so many, more as requests queue up.")
    ] = None,
    queue_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With ray: bytes that may wait at each until there are more, 1 GiB by default.",
        ),
    ] = None,
    parent_pipe: ParentPipeOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the near-data server: frozen first layers, beside the store.

    When its first compute process is ready it prints one JSON line with "listening" on stdout.
    """
    with ended_by_signals():
        if engine != "ray":  # its replicas serve elsewhere
            check_server_installed("upriver serve")
        options = {
            "host": host,
            "port": port,
            "workers": workers,
            "threads": threads,
            "device": device,
            "token_file": None if token_file is None else str(token_file),
        }
        document, file = told(config, store, options, command="upriver serve")
        _check_served(file)
        may_wait = None if queue_bytes is None else config_file.size("--queue-bytes", queue_bytes)
        of_ray = (address, replicas, min_replicas, max_replicas, may_wait)
        cluster: dict[str, Any] = dict(zip(_OF_RAY, of_ray, strict=True))
        _check_engine(engine, cluster)
        token = token_of(file)
        if parent_pipe is not None:
            stop_with_parent(parent_pipe)
        if engine == "ray":
            _serve_on_ray(document, token, **cluster)
        else:
            serve_here(config_file.settings(file), token)


def _check_served(file: Checked) -> None:
    """Check that a near-data server has a store, and runs no code but clients' programs."""
    if file.plain.allow is not None:
        raise ConfigError(
            "allow is for `upriver worker`, which runs code installed on its machine; leave it out here"
        )
    if not file.stores:
        raise ConfigError("no store to serve: give --store [NAME=]URI or a [stores] table in --config")


def _serve_on_ray(
    document: Mapping[str, Any],
    token: str | None,
    *,
    address: str | None,
    replicas: int | None,
    min_replicas: int | None,
    max_replicas: int | None,
    queue_bytes: int | None,
) -> None:
    from upriver.cli.serve import ray

    wanted: int | tuple[int, int] = replicas or 1
    if max_replicas is not None:
        wanted = (min_replicas or 1, max_replicas)
    ray.run(document, address=address, replicas=wanted, token=token, queue_bytes=queue_bytes)


def _check_engine(engine: str, cluster: Mapping[str, Any]) -> None:
    if engine not in ENGINES:
        raise ConfigError(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
    given = [f"--{name.replace('_', '-')}" for name, value in cluster.items() if value is not None]
    if engine != "ray" and given:
        raise ConfigError(f"{given[0]} is for --engine ray")
    for name in _OF_RAY[1:]:
        if cluster[name] is not None and cluster[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {cluster[name]}")
    least, most = cluster["min_replicas"], cluster["max_replicas"]
    if cluster["replicas"] is not None and (least or most):
        raise ConfigError("give --replicas, or --min-replicas and --max-replicas, not both")
    if most is None and least is not None:
        raise ConfigError("--min-replicas needs --max-replicas; a fixed number is --replicas")
    if most is None and cluster["queue_bytes"] is not None:
        raise ConfigError("--queue-bytes needs --max-replicas: it says when there are to be more")
    if most is not None and most < (least or 1):
        raise ConfigError(f"--max-replicas must be at least --min-replicas, got {most} and {least or 1}")
