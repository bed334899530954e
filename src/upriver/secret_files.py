"""Read files that hold secrets: tokens, stores' keys, private keys. Refuse files that others may read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from upriver.errors import ConfigError

_TOKEN = re.compile(r"[!-~]+")


def read_secret(path: Path, what: str) -> bytes:
    """Read a file that only its owner may read. If root owns it, its group may read it, too.

    Args:
        path: Path of the file. For a symbolic link its target counts.
        what: Description of the file for errors: ``"the token file"``.

    Raises:
        ConfigError: If it cannot be read, or others could read or change it.
    """
    try:
        with path.open("rb") as file:
            _require_private(os.fstat(file.fileno()), path, what)
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None


def check_secret(path: Path, what: str) -> None:
    """Check a file that a library opens by its name, as `read_secret` does.

    Raises:
        ConfigError: As in `read_secret`.
    """
    try:
        _require_private(path.stat(), path, what)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None


def read_token_file(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: If the file cannot be read, is open to others, or holds no token.
    """
    try:
        token = read_secret(path, "the token file").decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"the token file {path} is not text") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    fault = token_fault(token)
    if fault:
        raise ConfigError(f"the token file {path}: {fault}")
    return token


def token_fault(token: str) -> str:
    """Return why a text is no token, without repeating it; empty if it is one."""
    if _TOKEN.fullmatch(token):
        return ""
    rule = "a token must be one or more visible ASCII characters without spaces"
    if _TOKEN.fullmatch(token.rstrip("\r\n")):
        return (
            f"{rule}; this one ends with a line break, as text read from a file does: remove it with .strip()"
        )
    return rule


def open_to_others(mode: int, *, owner: int, user: int) -> bool:
    """Return True if others than a file's owner may read or change it, by PostgreSQL's rule for keys.

    Root gives a file to a service through the service's group. That group may read it, and do no more.

    Args:
        mode: Mode of the file.
        owner: User id of the owner.
        user: User id of the reader.
    """
    return bool(mode & (0o037 if owner == 0 != user else 0o077))


def _require_private(status: os.stat_result, path: Path, what: str) -> None:
    if open_to_others(status.st_mode, owner=status.st_uid, user=os.geteuid()):
        raise ConfigError(
            f"{what} {path} is open to others (mode {status.st_mode & 0o777:03o}); say chmod 600 {path}"
        )
