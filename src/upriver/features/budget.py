"""Read the size of a budget: bytes, text such as ``2 GB``, or a share of the free room."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from upriver.errors import ConfigError
from upriver.text import parse_bytes, printable
from upriver.types import MOST_BYTES

AUTO: Final = "auto"
AUTO_SHARE = 10
"""Part of the free room that ``"auto"`` takes: one tenth."""


def budget_bytes(name: str, value: object, *, free: Callable[[], int]) -> int:
    """Return a budget in bytes.

    Args:
        name: Name of the option, for errors.
        value: Whole number of bytes, text such as ``512 MiB``, or ``"auto"``.
        free: Returns the free bytes; called for ``"auto"`` only.

    Raises:
        ConfigError: If the value is no size.
    """
    found: object = value
    if isinstance(value, str):
        if value.strip() == AUTO:
            return max(0, free()) // AUTO_SHARE
        try:
            found = 0 if value.strip() == "0" else parse_bytes(value)
        except ValueError:
            found = None
    if type(found) is not int or not 0 <= found <= MOST_BYTES:
        raise ConfigError(
            f"{name} must be a whole number of bytes in 0..{MOST_BYTES}, text such as '2 GB' or '512 MiB', "
            f"or 'auto', got {printable(repr(value), 80)}"
        )
    return found


def free_on_disk(folder: Path) -> int:
    """Return the bytes that this user can still write below a folder, which need not exist yet.

    Returns:
        0 if its disk cannot be asked.
    """
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return 0
    return 0
