"""``upriver worker``: run a server for the user's own datasets, from options, a TOML file, or both."""

from __future__ import annotations

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

PORT = 7001
"""Default port, next to a near-data server's on the same machine."""

THREADS = 1
"""Default threads, as in the processes of PyTorch's own loader: with more, some kernels give other low
bits."""

ADMITTED, ADMITTED_EACH = 8, 2
"""Requests that may compute at once: the larger of a server's default and two per process, one being computed
and one being sent."""

RANKS = 8
"""Training processes that may each ask for as much as computes at once: those of a machine with 8 GPUs."""

REQUESTS, MOST_REQUESTS = 128, 512
"""Requests in any state: at least a server's default, at most its number of connections."""


def worker(
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Code that clients may have run: a package, module or package.module:callable; repeatable.",
        ),
    ] = None,
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(help=f"{PORT} by default; 0 takes a free one.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that make samples, as many as CPUs by default.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help=f"Threads of each, {THREADS} by default.")] = None,
    token_file: TokenFileOption = None,
    store: StoresOption = None,
    config: ConfigOption = None,
    parent_pipe: ParentPipeOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make samples for training nodes with datasets that are installed here, and allowed by name.

    When its first process is ready it prints one JSON line with "listening" on stdout.
    """
    with ended_by_signals():
        check_server_installed("upriver worker")
        options = {
            "allow": allow or None,
            "host": host,
            "port": port,
            "workers": workers,
            "threads": threads,
            "token_file": None if token_file is None else str(token_file),
        }
        _, file = told(config, store, options, command="upriver worker")
        if not file.plain.allow:
            raise ConfigError(
                "no code to run: give --allow NAME, a package, a module or package.module:callable, or "
                "allow = [...] in --config"
            )
        token = token_of(file)
        if parent_pipe is not None:
            stop_with_parent(parent_pipe)
        serve_here({**_defaults(file), **config_file.settings(file)}, token)


def _defaults(file: Checked) -> dict[str, Any]:
    """Return a worker's defaults that differ from those of a near-data server."""
    from upriver.resources import available_cpus

    workers = file.plain.workers if file.plain.workers is not None else available_cpus()
    admitted = max(ADMITTED, ADMITTED_EACH * workers)
    requests = max(REQUESTS, min(MOST_REQUESTS, RANKS * admitted))
    return {
        "port": PORT,
        "workers": workers,
        "threads": THREADS,
        "max_admitted": admitted,
        "max_waiting": requests,
        "max_requests": requests,
    }
