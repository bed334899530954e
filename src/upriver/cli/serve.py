"""``upriver serve``: the near-data server, from options, a TOML file, or both (options win)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from upriver.cli import serve_file
from upriver.cli.common import DebugOption, JsonOption
from upriver.cli.serve_file import Checked, read_token_file
from upriver.errors import ConfigError

TOKEN_VARIABLE = "UPRIVER_TOKEN"
SHUTDOWN_GRACE_S = 5.0
"""After its parent has gone, an embedded server may finish what it is doing for so long."""

EXIT_CODES: Mapping[int, int] = {signal.SIGTERM: 0, signal.SIGINT: 130}
"""A server is ended with SIGTERM in its normal life: that is success, where Ctrl-C is an interruption."""

ENGINES = ("process", "ray")
_OF_RAY = ("address", "replicas", "min_replicas", "max_replicas", "queue_bytes")


def serve(
    store: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]URI", help="A store to serve; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback unless told otherwise.")] = None,
    port: Annotated[int | None, typer.Option(help="7000 by default; 0 takes a free one.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that clients must send (or {TOKEN_VARIABLE}).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Compute processes.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each compute process.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the compute processes, cpu by default.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; options given here win over it.")] = None,
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
    parent_pipe: Annotated[
        int | None, typer.Option(metavar="FD", help="Stop when this inherited pipe reaches its end.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the near-data server: frozen first layers, beside the store.

    When its first compute process is ready it prints one JSON line with "listening" on stdout.
    """
    with _ended_by_signals():
        document = serve_file.load(config) if config is not None else {}
        where = str(config) if config is not None else "upriver serve"
        serve_file.check(document, where=where)  # before options: what they win over is to be right, too
        options = {"host": host, "port": port, "workers": workers, "threads": threads, "device": device}
        document |= {name: value for name, value in options.items() if value is not None}
        document["stores"] = _stores(store or [], document.get("stores", {}))
        if token_file is not None:
            document["token_file"] = str(token_file)
        may_wait = None if queue_bytes is None else serve_file.size("--queue-bytes", queue_bytes)
        of_ray = (address, replicas, min_replicas, max_replicas, may_wait)
        cluster: dict[str, Any] = dict(zip(_OF_RAY, of_ray, strict=True))
        _check_engine(engine, cluster)
        file = serve_file.check(document, where=where)
        token = _token_of(file)
        if parent_pipe is not None:
            _stop_with_parent(parent_pipe)
        if engine == "ray":
            _serve_on_ray(document, token, **cluster)
        else:
            _serve_here(serve_file.settings(file), token)


def _serve_here(settings: dict[str, Any], token: str | None) -> None:
    from upriver.server import ServerConfig, logs
    from upriver.server import serve as run_server

    config = ServerConfig(**settings, token=token)
    # People are told what they should look at, machines also what is as it should be.
    level = "INFO" if config.log_format == "json" else "WARNING"
    logs.configure(config.log_format, level, secrets=_secrets(token, settings))
    run_server(config, on_listening=_announce)


def _secrets(token: str | None, settings: Mapping[str, Any]) -> list[str]:
    """What must stand in no log, in whatever words: the token, and what opens the stores."""
    stores = [store for store in settings["stores"].values() if isinstance(store, serve_file.StoreAt)]
    keys = [
        store.options.get(name, "") for store in stores for name in ("secret_access_key", "session_token")
    ]
    return [secret for secret in (token, *keys) if secret]


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
    from upriver.cli import serve_ray

    wanted: int | tuple[int, int] = replicas or 1
    if max_replicas is not None:
        wanted = (min_replicas or 1, max_replicas)
    serve_ray.run(document, address=address, replicas=wanted, token=token, queue_bytes=queue_bytes)


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


def _announce(document: Mapping[str, object]) -> None:
    print(json.dumps(document), flush=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end this process while the block runs, also before there is a server to end."""
    before = {number: signal.signal(number, leave) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(signum: int, frame: FrameType | None) -> None:
    """End this process: nothing runs yet, or no more. An exception could be lost in an import."""
    os._exit(EXIT_CODES[signum])


def _stores(given: Sequence[str], from_file: object) -> object:
    """Stores by name: those of the file, then those of the command line."""
    from_options: dict[str, object] = {}
    for name, uri in map(split_store, given):
        if name in from_options:
            raise ConfigError(f"--store names {name!r} twice; give each its own: --store NAME=URI")
        from_options[name] = uri
    if not isinstance(from_file, dict):
        return from_file  # the file's error, which says what was expected
    named = {**from_file, **from_options}
    if not named:
        raise ConfigError("no store to serve: give --store [NAME=]URI or a [stores] table in --config")
    return named


def split_store(text: str) -> tuple[str, str]:
    """``NAME=URI`` or ``URI`` (then the name is "default")."""
    name, separator, uri = text.partition("=")
    if not separator or "://" in name:
        return "default", text
    if not name or not uri:
        raise ConfigError(f"--store must be [NAME=]URI, got {text!r}")
    return name, uri


def _token_of(file: Checked) -> str | None:
    """The one token: of a file, else of the environment. With tenants that one is left to clients."""
    if file.plain.token_file is not None:
        return read_token(Path(file.plain.token_file))
    return None if file.tenants else read_token(None)


def read_token(path: Path | None) -> str | None:
    """The token of a file, else of the environment, else none.

    Raises:
        ConfigError: If the file cannot be read or is empty.
    """
    return os.environ.get(TOKEN_VARIABLE) or None if path is None else read_token_file(path)


def _stop_with_parent(fd: int) -> None:
    """End this process when the other end of an inherited pipe is closed, however its owner died."""
    try:
        os.fstat(fd)
    except OSError as error:
        raise ConfigError(f"--parent-pipe {fd} is not an open file descriptor") from error

    def watch() -> None:
        while os.read(fd, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SHUTDOWN_GRACE_S)
        os._exit(0)

    threading.Thread(target=watch, name="parent-pipe", daemon=True).start()
