"""What the operator decides about a server."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from upriver.errors import ConfigError
from upriver.protocol import DEFAULT_CAPS, Caps, valid_store_name
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import require_finite


@runtime_checkable
class StoreLocation(Protocol):
    """Where a store is and how it is reached."""

    @property
    def uri(self) -> str:
        """``file://``, ``memory://`` or ``s3://``."""

    @property
    def options(self) -> Mapping[str, str]:
        """Endpoint and credentials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Everything a server is told; clients decide none of it.

    Attributes:
        stores: Name to URI, or to something with a ``uri`` and ``options``.
        host: Address to bind; anything but loopback needs a ``token``.
        port: 0 takes a free one.
        token: What clients must send as a bearer token.
        workers: Compute processes.
        threads: Threads of each; the cores divided among the workers if None.
        device: Where they compute.
        prefix: Where in a store upriver keeps programs and datasets.
        program_budget_bytes: Programs kept loaded between requests. 4 GiB: six networks of the size of vgg19.
        buffer_budget_bytes: Answers that may wait for slow readers before no micro-batch is computed ahead.
        max_requests: Run requests at once; more are told to come back.
        max_datasets: Indexes kept between requests.
        job_timeout_s: A worker that takes longer for one micro-batch is ended; the slowest network measured
            takes 11 s for 16 samples on one core.
        stall_timeout_s: A client that takes nothing for so long is dropped, and so is the request of one that
            stops in the middle of its body.
        head_timeout_s: A connection that has sent no whole request head by then is closed. 20 s: a head is
            one packet, and one that is lost three times in a row comes after 7 s.
        idle_timeout_s: A connection without a request is closed after so long. 75 s: longer than any pause
            between two micro-batches of training.
        max_connections: One more, and whoever has gone longest without a request is disconnected. 512: half
            of the descriptors that a process may usually have, enough for dozens of training jobs.
        grace_s: What is running may finish for so long after a request to stop.
        caps: Limits of frames and requests.
    """

    stores: Mapping[str, str | StoreLocation]
    host: str = "127.0.0.1"
    port: int = 7000
    token: str | None = field(default=None, repr=False)
    workers: int = 1
    threads: int | None = None
    device: str = "cpu"
    prefix: str = DEFAULT_PREFIX
    program_budget_bytes: int = 4 << 30
    buffer_budget_bytes: int = 1 << 30
    max_requests: int = 32
    max_datasets: int = 16
    job_timeout_s: float = 300.0
    stall_timeout_s: float = 120.0
    head_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    max_connections: int = 512
    grace_s: float = 10.0
    caps: Caps = DEFAULT_CAPS

    def __post_init__(self) -> None:
        if not self.stores:
            raise ConfigError("a server needs at least one store")
        for name in self.stores:
            if not valid_store_name(name):
                raise ConfigError(f"a store's name has 1 to 64 letters, digits, '.', '_', '-', got {name!r}")
        for name in (
            "workers",
            "max_requests",
            "max_datasets",
            "max_connections",
            "program_budget_bytes",
            "buffer_budget_bytes",
        ):
            _require_count(name, getattr(self, name))
        if self.threads is not None:
            _require_count("threads", self.threads)
        for name in ("job_timeout_s", "stall_timeout_s", "head_timeout_s", "idle_timeout_s"):
            require_finite(name, getattr(self, name), positive=True)
        require_finite("grace_s", self.grace_s)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in 0..65535, got {self.port}")
        self._check_token()

    @property
    def threads_per_worker(self) -> int:
        """Threads each worker computes with."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // self.workers)

    def open_stores(self) -> dict[str, Store]:
        """Every store, opened; the one programs are put into comes first: ``default``, else the first.

        Raises:
            ConfigError: If a URI is not understood.
            StoreError: If a store is not there.
        """
        names = sorted(self.stores, key=lambda name: name != "default")
        return {name: _open(name, self.stores[name]) for name in names}

    def _check_token(self) -> None:
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise ConfigError("a token has one or more visible ASCII characters, and no spaces")
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"binding {self.host!r} lets others in: set a token, or bind a loopback address (127.0.0.1)"
            )


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def same_token(given: str, expected: str) -> bool:
    """Compare without telling by the time taken how much of it was right."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _open(name: str, location: str | StoreLocation) -> Store:
    if isinstance(location, str):
        return Store.open(location, name=name)
    return Store.open(location.uri, name=name, options=dict(location.options) or None)
