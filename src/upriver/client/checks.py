"""What callers hand in, checked once: an error names the argument, what is allowed, and what was got."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import TypeVar

from upriver.client.connection import Address
from upriver.errors import ConfigError
from upriver.text import printable
from upriver.types import require_type

MAX_THREADS = 256
"""Threads or connections of one job. Each has a stack, a socket and a micro-batch in memory; the largest
machines in common use have about as many cores, so a larger number is a slip."""

_T = TypeVar("_T")


def whole(name: str, value: int, *, most: int | None = None) -> int:
    """A whole number from 1 on; a bool is none."""
    if type(value) is not int or value < 1 or (most is not None and value > most):
        allowed = "of at least 1" if most is None else f"in 1..{most}"
        raise ConfigError(f"{name} must be a whole number {allowed}, got {_shown(value)}")
    return value


def flag(name: str, value: bool) -> bool:
    """True or False and nothing that merely counts as one: ``"no"`` would count as True."""
    if type(value) is not bool:
        raise ConfigError(f"{name} must be True or False, got {_shown(value)}")
    return value


def choice(name: str, value: _T, allowed: Collection[_T]) -> _T:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        separator = " or " if len(allowed) == 2 else ", "
        raise ConfigError(f"{name} must be {separator.join(map(str, allowed))}, got {_shown(value)}")
    return value


def function(name: str, value: _T) -> _T:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function, got {_shown(value)}")
    return value


def addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Addresses of servers."""
    for url in urls:
        Address.parse(require_type("a server's address", url, str, "http://HOST:PORT"), None)
    return tuple(urls)


def token(value: str | None) -> str | None:
    """What may stand in a header; what is wrong with it is said without repeating it."""
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[!-~]+", value)):
        raise ConfigError("token must be a text of visible ASCII characters without spaces")
    return value


def cores(value: set[int] | None) -> set[int] | None:
    """Cores that this process may use itself."""
    allowed = os.sched_getaffinity(0)
    if value is not None and not (isinstance(value, set | frozenset) and value and value <= allowed):
        raise ConfigError(f"server_cpus must be a set of the cores {sorted(allowed)}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return printable(repr(value), 100)
