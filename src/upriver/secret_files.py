"""Files that hold secrets: tokens, stores' keys, private keys. One that is open to others is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

from upriver.errors import ConfigError


def read_secret(path: Path, what: str) -> bytes:
    """Read a file that only its owner may read; of one that belongs to root, its group may read it, too.

    Args:
        path: Of the file; of a symbolic link, the file that it leads to counts.
        what: The file is, in errors: ``"the token file"``.

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
        ConfigError: As `read_secret`.
    """
    try:
        _require_private(path.stat(), path, what)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None


def read_token_file(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: If it cannot be read, is open to others, or holds none.
    """
    try:
        token = read_secret(path, "the token file").decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"the token file {path} is not text") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(f"a token has visible ASCII characters and no spaces; the one in {path} has others")
    return token


def open_to_others(mode: int, *, owner: int, user: int) -> bool:
    """Return whether others than a file's owner may read or change it, as PostgreSQL tells it of keys.

    Root gives a file to a service by the service's group: there the group may read it, and do no more.

    Args:
        mode: Of the file.
        owner: Of the file, by number.
        user: Who reads it, by number.
    """
    return bool(mode & (0o037 if owner == 0 != user else 0o077))


def _require_private(status: os.stat_result, path: Path, what: str) -> None:
    if open_to_others(status.st_mode, owner=status.st_uid, user=os.geteuid()):
        raise ConfigError(
            f"{what} {path} is open to others (mode {status.st_mode & 0o777:03o}); say chmod 600 {path}"
        )
