"""Share options, stores, the token and signals between commands that serve."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from upriver._threads.background import BackgroundThread
from upriver.cli.serve import config_file
from upriver.cli.serve.config_file import SECRETS, TOKEN_VARIABLE, Checked
from upriver.errors import ConfigError
from upriver.extras import SERVER, why_missing
from upriver.imports import uncollected
from upriver.secret_files import read_token_file

SHUTDOWN_GRACE_S = 5.0
"""Seconds in which an embedded server may finish its work after its parent has ended."""

EXIT_CODES: Mapping[int, int] = {signal.SIGTERM: 0, signal.SIGINT: 130}
"""Exit codes by signal. SIGTERM is a server's normal end and a success; Ctrl-C is an interruption."""

StoresOption = Annotated[
    list[str] | None, typer.Option(metavar="[NAME=]URI", help="A store to serve; may be repeated.")
]
HostOption = Annotated[str | None, typer.Option(help="Address to bind; loopback unless told otherwise.")]
TokenFileOption = Annotated[
    Path | None, typer.Option(help=f"File with the token that clients must send (or {TOKEN_VARIABLE}).")
]
ConfigOption = Annotated[Path | None, typer.Option(help="TOML file; options given here win over it.")]
ParentPipeOption = Annotated[
    int | None, typer.Option(metavar="FD", help="Stop when this inherited pipe reaches its end.")
]


def told(
    config: Path | None, store: Sequence[str] | None, options: Mapping[str, Any], *, command: str
) -> tuple[dict[str, Any], Checked]:
    """Read a server's settings from a file and from options, which win.

    Args:
        options: Other options by their keys in a file; None if not given.
        command: Name for errors if there is no file.

    Returns:
        The settings as plain values, and checked.

    Raises:
        ConfigError: If the file cannot be read, or the file or an option is invalid.
    """
    document = config_file.load(config) if config is not None else {}
    where = str(config) if config is not None else command
    config_file.check(document, where=where)  # before options: overridden values must be valid, too
    document |= {name: value for name, value in options.items() if value is not None}
    document["stores"] = _stores(store or [], document.get("stores", {}))
    return document, config_file.check(document, where=where)


def check_server_installed(command: str) -> None:
    """Check that the packages of a server are installed, before anything else is.

    Raises:
        ConfigError: If one is not; the message names the extra.
    """
    why = why_missing(command, "server", *SERVER)
    if why:
        raise ConfigError(why)


def serve_here(settings: Mapping[str, Any], token: str | None) -> None:
    """Run a server in this process, and print on stdout when it listens.

    Args:
        settings: Keyword arguments of `upriver.server.ServerConfig`.
        token: Token that clients must send.
    """
    with uncollected():
        from upriver.server import ServerConfig
        from upriver.server import serve as run_server
        from upriver.server.code_allowlist import check_here
        from upriver.server.observability import logging

    config = ServerConfig(**settings, token=token)
    check_here(config.allow)
    # People see only warnings, machines also normal events.
    level = "INFO" if config.log_format == "json" else "WARNING"
    logging.configure(config.log_format, level, secrets=_secrets(token, settings))
    run_server(config, on_listening=_announce)


def _secrets(token: str | None, settings: Mapping[str, Any]) -> list[str]:
    """Return the secrets that no log may contain: the token, and the keys of the stores."""
    stores = [store for store in settings["stores"].values() if isinstance(store, config_file.StoreAt)]
    keys = [store.options.get(name, "") for store in stores for name in SECRETS]
    return [secret for secret in (token, *keys) if secret]


def _announce(document: Mapping[str, object]) -> None:
    print(json.dumps(document), flush=True)


# ------------------------------------------------------------------------------------------- its end


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End this process on SIGTERM and SIGINT while the block runs, even before a server exists."""
    before = {number: signal.signal(number, leave) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(signum: int, frame: FrameType | None) -> None:
    """End this process at once, as no server runs: an exception could be lost in an import."""
    os._exit(EXIT_CODES[signum])


def stop_with_parent(fd: int) -> None:
    """End this process when the other end of an inherited pipe closes, however its owner died."""
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

    BackgroundThread(watch, name="parent-pipe").start()


# ------------------------------------------------------------------------------------ stores and token


def _stores(given: Sequence[str], from_file: object) -> object:
    """Return stores by name: those of the file, then those of the command line."""
    from upriver.store import store_uri

    from_options: dict[str, object] = {}
    for name, uri in map(split_store, given):
        if name in from_options:
            raise ConfigError(f"--store names {name!r} twice; give each its own: --store NAME=URI")
        from_options[name] = store_uri(uri)
    if not isinstance(from_file, dict):
        return from_file  # checked later: the file's error says what was expected
    return {**from_file, **from_options}


def split_store(text: str) -> tuple[str, str]:
    """Split ``NAME=URI``, or ``URI`` with the name "default"; a path may stand for the URI."""
    name, separator, uri = text.partition("=")
    if not separator or "/" in name:
        return "default", text
    if not name or not uri:
        raise ConfigError(f"--store must be [NAME=]URI, got {text!r}")
    return name, uri


def token_of(file: Checked) -> str | None:
    """Return the single token of the file, else of the environment.

    With tenants the variable is for clients.
    """
    if file.plain.token_file is not None:
        return read_token(Path(file.plain.token_file))
    return None if file.tenants else read_token(None)


def read_token(path: Path | None) -> str | None:
    """Return the token of a file, else of the environment, else None.

    Raises:
        ConfigError: If the file cannot be read, is open to others or is empty.
    """
    return os.environ.get(TOKEN_VARIABLE) or None if path is None else read_token_file(path)
