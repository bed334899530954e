"""``upriver serve``: the near-data server, from options, a TOML file, or both (options win)."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from upriver.cli.common import DebugOption, JsonOption
from upriver.cli.config import read_toml
from upriver.errors import ConfigError

TOKEN_VARIABLE = "UPRIVER_TOKEN"
SHUTDOWN_GRACE_S = 5.0
"""After its parent has gone, an embedded server may finish what it is doing for so long."""


class StoreSection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``[stores.NAME]``: where a store lies and how it is reached (endpoint, credentials)."""

    uri: str
    options: dict[str, str] = {}


class ServeFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """The TOML file of ``--config``; what is left out takes the server's own default."""

    stores: dict[str, str | StoreSection] = {}
    host: str | None = None
    port: int | None = None
    token_file: str | None = None
    workers: int | None = None
    threads: int | None = None
    device: str | None = None
    prefix: str | None = None
    program_budget_bytes: int | None = None


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
    parent_pipe: Annotated[
        int | None, typer.Option(metavar="FD", help="Stop when this inherited pipe reaches its end.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run the near-data server: frozen first layers, beside the store.

    When its first compute process is ready it prints one JSON line with "listening" on stdout.
    """
    file = read_toml(config, ServeFile) if config is not None else ServeFile()
    settings = _settings(
        file,
        stores=_stores(store or [], file.stores),
        options={"host": host, "port": port, "workers": workers, "threads": threads, "device": device},
        token=read_token(token_file or (Path(file.token_file) if file.token_file else None)),
    )
    # A server is ended with SIGTERM in its normal life: that is success, where Ctrl-C is an interruption.
    signal.signal(signal.SIGTERM, _leave)
    if parent_pipe is not None:
        _stop_with_parent(parent_pipe)
    from upriver.server import ServerConfig
    from upriver.server import serve as run_server

    run_server(ServerConfig(**settings), on_listening=_announce)


def _announce(document: Mapping[str, object]) -> None:
    print(json.dumps(document), flush=True)


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _settings(
    file: ServeFile, *, stores: Mapping[str, object], options: Mapping[str, Any], token: str | None
) -> dict[str, Any]:
    """What was said, by the file or by options; nothing that was not."""
    said = {name: value for name, value in options.items() if value is not None}
    from_file = {
        name: value
        for name in file.__struct_fields__
        if name not in ("stores", "token_file") and (value := getattr(file, name)) is not None
    }
    return {**from_file, **said, "stores": stores, "token": token}


def _stores(given: Sequence[str], from_file: Mapping[str, str | StoreSection]) -> dict[str, object]:
    """Stores by name: those of the file, then those of the command line."""
    from_options: dict[str, object] = {}
    for name, uri in map(split_store, given):
        if name in from_options:
            raise ConfigError(f"--store names {name!r} twice; give each its own: --store NAME=URI")
        from_options[name] = uri
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


def read_token(path: Path | None) -> str | None:
    """The token of a file, else of the environment, else none.

    Raises:
        ConfigError: If the file cannot be read or is empty.
    """
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    return token


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
