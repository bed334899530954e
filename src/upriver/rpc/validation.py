"""Check callers' arguments once: an error names the argument, the allowed values, and the given one."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import torch
from torch.utils.data import ConcatDataset, Subset

from upriver.errors import ConfigError
from upriver.pipeline import Dataset
from upriver.pipeline.subset import rows_of, whole_of
from upriver.rpc.discovery import DirectoryClient, is_directory
from upriver.rpc.http import Address
from upriver.secret_files import token_fault
from upriver.text import printable
from upriver.types import require_finite, require_type

MAX_THREADS = 256
"""Most threads or connections of one job. Each needs a stack, a socket and a micro-batch in memory. The
largest machines in common use have about as many cores, so a larger number is a mistake."""

COMPILE_OPTIONS = ("backend", "mode", "options", "fullgraph", "dynamic")
"""Arguments of ``torch.compile`` that decide how the tail is compiled."""

Indexed: TypeAlias = Dataset | Subset[Any] | ConcatDataset[Any]
"""A dataset from `upriver.index`, or a part of one as PyTorch makes it."""

_T = TypeVar("_T")


def whole(name: str, value: int, *, most: int | None = None) -> int:
    """Return a whole number from 1 on; a bool is rejected."""
    if type(value) is not int or value < 1 or (most is not None and value > most):
        allowed = "of at least 1" if most is None else f"in 1..{most}"
        raise ConfigError(f"{name} must be a whole number {allowed}, got {_shown(value)}")
    return value


def flag(name: str, value: bool) -> bool:
    """Return True or False; other values are rejected, since ``"no"`` would count as True."""
    if type(value) is not bool:
        raise ConfigError(f"{name} must be True or False, got {_shown(value)}")
    return value


def choice(name: str, value: _T, allowed: Collection[_T]) -> _T:
    """Return one of a few words."""
    if not isinstance(value, str) or value not in allowed:
        separator = " or " if len(allowed) == 2 else ", "
        raise ConfigError(f"{name} must be {separator.join(map(str, allowed))}, got {_shown(value)}")
    return value


def cuts(value: int | Mapping[int, float] | None) -> dict[int, float] | None:
    """Return cuts and their shares of the samples, earliest first; None if the policy is to choose.

    Only the split model knows which cuts exist.
    """
    if value is None or type(value) is int:
        return None if value is None else {value: 1.0}
    if not isinstance(value, Mapping) or any(type(cut) is not int for cut in value):
        raise ConfigError(
            "cut must be a whole number, a mapping of whole numbers to shares of the samples, or None, got "
            f"{_shown(value)}"
        )
    for cut, share in value.items():
        require_finite(f"cut[{cut}]", share, positive=True)
    shares = {cut: float(share) for cut, share in value.items()}
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise ConfigError(f"cut must have shares that sum to 1, got {_shown(dict(value))}")
    return dict(sorted(shares.items()))


def compiling(value: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments for ``torch.compile``; None leaves the tail as it is."""
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in COMPILE_OPTIONS]
        if unknown:
            raise ConfigError(
                f"compile_tail takes {', '.join(COMPILE_OPTIONS)}, which go to torch.compile, "
                f"got {_shown(unknown)}"
            )
        _check_compile_options(value)
        return dict(value)
    if type(value) is not bool:
        raise ConfigError(
            f"compile_tail must be True, False or a mapping of torch.compile's arguments, got {_shown(value)}"
        )
    return {} if value else None


def _check_compile_options(options: Mapping[str, Any]) -> None:
    """Check options that ``torch.compile`` accepts unchecked and that fail at the first call."""
    backend = options.get("backend", "")
    if not isinstance(backend, str) and not callable(backend):
        raise ConfigError(f"compile_tail's backend must be a name or a function, got {_shown(backend)}")
    flag("compile_tail's fullgraph", options.get("fullgraph", False))
    if options.get("dynamic") is not None:
        flag("compile_tail's dynamic", options["dynamic"])


def indexed(dataset: Indexed) -> tuple[Dataset, Sequence[int]]:
    """Return an indexed dataset and its selected rows: all, or those of a part."""
    whole = require_type(
        "dataset", whole_of(dataset), Dataset, "from upriver.index(), or a torch.utils.data.Subset of one"
    )
    return whole, rows_of(dataset)


def function(name: str, value: _T) -> _T:
    """Return a callable, or None."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function, got {_shown(value)}")
    return value


def addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Return addresses of servers, or of one directory that lists them."""
    for url in urls:
        require_type("a server's address", url, str, "http://HOST:PORT")
        if not is_directory(url):
            Address.parse(url, None)
        elif len(urls) == 1:
            DirectoryClient(url)
        else:
            raise ConfigError(f"{url} names servers that come and go: give it alone, without other addresses")
    return tuple(urls)


def encrypts(url: str) -> bool:
    """Return whether an address uses TLS, or is a directory whose servers may."""
    return is_directory(url) or urlsplit(url).scheme == "https"


def token(value: str | None) -> str | None:
    """Return a token that is valid in a header; the error does not repeat the token."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"token must be a text, got a {type(value).__name__}")
    fault = token_fault(value)
    if fault:
        raise ConfigError(fault)
    return value


def cores(value: set[int] | None) -> set[int] | None:
    """Return cores that this process may use itself."""
    allowed = os.sched_getaffinity(0)
    if value is not None and not (isinstance(value, set | frozenset) and value and value <= allowed):
        raise ConfigError(f"server_cpus must be a set of the cores {sorted(allowed)}, got {_shown(value)}")
    return value


def number(metric: object, value: Any) -> float:
    """Return a metric's result as a number.

    Raises:
        ConfigError: If it is no number; names the metric.
    """
    try:
        if not isinstance(value, str | bytes | bytearray):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    name = getattr(metric, "__name__", type(metric).__name__)
    tensor = isinstance(value, torch.Tensor)
    got = f"a tensor of shape {tuple(value.shape)}" if tensor else f"{type(value).__name__} {_shown(value)}"
    raise ConfigError(f"metric {name} must give one number, got {got}") from None


def _shown(value: object) -> str:
    return printable(repr(value), 100)
