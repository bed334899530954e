"""``upriver token``: make a token for a tenant, and its hash for the server's configuration."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from upriver.cli.common import DebugOption, JsonOption, emit, print_fields
from upriver.errors import ConfigError
from upriver.secret_files import read_token_file

TOKEN_BYTES = 32
"""Random bytes of a token: 256 bits, as many as its hash has."""

LEAST_CHARS = 16
"""Least characters of a token that is hashed. Random ones hold 96 bits, too many to guess; a short token is
soon found from its hash."""


def token(
    file: Annotated[
        Path | None, typer.Option(help="Hash the token in this file; a new one is made without.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a token for a tenant of a server.

    The token is for the client; the server's configuration takes its hash, from which nobody finds the token.
    """
    fields: dict[str, str] = {}
    if file is None:
        made = secrets.token_urlsafe(TOKEN_BYTES)
        fields["token"] = made
    else:
        made = _long_enough(read_token_file(file), file)
    fields["token_hash"] = hashlib.sha256(made.encode()).hexdigest()
    emit(fields, as_json=as_json, text=lambda: print_fields(fields))


def _long_enough(token: str, file: Path) -> str:
    if len(token) < LEAST_CHARS:
        raise ConfigError(
            f"the token in {file} has {len(token)} characters: a short one is found from its hash by "
            f"trying; take {LEAST_CHARS} random ones or more, or let 'upriver token' make one"
        )
    return token
