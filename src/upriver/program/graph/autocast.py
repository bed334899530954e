"""Check autocast types, and run code under a program's autocast or with autocast off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from upriver.errors import ConfigError

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that autocast may compute in."""


def autocast_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return the type to autocast to. None leaves autocast off.

    Raises:
        ConfigError: If autocast does not support the type.
    """
    name = str(given).removeprefix("torch.") if given is not None else None
    if name is not None and name not in AUTOCAST:
        raise ConfigError(f"autocast must be {' or '.join(AUTOCAST)} or None, got {given!r}")
    return AUTOCAST[name] if name is not None else None


def autocast_here(device: torch.device) -> torch.dtype | None:
    """Return the type that this thread's autocast computes in. None if it is off or unavailable."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


@contextlib.contextmanager
def autocasting(device: torch.device | str, dtype: torch.dtype | None) -> Iterator[None]:
    """Run under autocast to ``dtype``. None runs without autocast, even if the caller has it on.

    Cast weights are not cached between uses: the cache would make a program's memory depend on the caller.
    """
    kind = torch.device(device).type
    if dtype is None:
        with torch.autocast(kind, enabled=False):
            yield
    else:
        with torch.autocast(kind, dtype=dtype, cache_enabled=False):
            yield
