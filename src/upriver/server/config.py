"""Hold and check a server's configuration."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args, runtime_checkable
from urllib.parse import urlsplit

from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.control.memory_budget import BASE, INDEXES
from upriver.errors import ConfigError
from upriver.protocol import DEFAULT_CAPS, Caps, valid_store_name
from upriver.secret_files import token_fault
from upriver.server.code_allowlist import require_allow
from upriver.server.observability.load import FREE_BELOW, WINDOW_S
from upriver.server.tenants import ANYONE, Tenant, Tenants, hash_token, require_count
from upriver.store import DEFAULT_PREFIX, Store, check_name
from upriver.store.names import check_prefix
from upriver.types import PIXEL_CEILING, require_finite

Admission = Literal["static", "adaptive"]
ColdStart = Literal["stream", "whole"]
Sandbox = Literal["auto", "bubblewrap", "none"]
LogFormat = Literal["text", "json"]

_COUNTS = (
    "workers",
    "max_requests",
    "max_datasets",
    "max_connections",
    "max_admitted",
    "max_waiting",
    "max_waiting_bytes",
    "min_batch",
    "program_budget_bytes",
    "stored_bytes",
    "code_bytes",
)
_COUNTS_OR_NONE = ("threads", "memory_budget_bytes")
_SECONDS = (
    "job_timeout_s",
    "stall_timeout_s",
    "head_timeout_s",
    "idle_timeout_s",
    "deadline_s",
    "load_window_s",
    "load_watch_s",
)
_RESERVED = (BASE, INDEXES)
"""Owners of memory that is no tenant's: idle workers and indexes."""

PER_CORE = 4
"""Most compute processes per core, and most threads of each. Two keep a core busy while one waits; more only
take memory."""

ANYWAY = 64
"""Processes and threads that any machine allows: trainers may have more cores, and equal bits need as many
threads. Their stacks are a quarter of a worker's `OVERHEAD_BYTES` (`upriver.server.sandbox.rlimits`)."""

_CHOICES = {
    "admission": Admission,
    "cold_start": ColdStart,
    "sandbox": Sandbox,
    "log_format": LogFormat,
}


@runtime_checkable
class StoreLocation(Protocol):
    """Address of a store, and how to reach it."""

    @property
    def uri(self) -> str:
        """URI: ``file://``, ``memory://`` or ``s3://``."""

    @property
    def options(self) -> Mapping[str, str]:
        """Endpoint and credentials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """All settings of a server; clients decide none of them.

    Attributes:
        stores: URI or folder by name, or an object with a ``uri`` and ``options``. May be empty if ``allow``
            is given.
        host: Address to bind; any but loopback needs a ``token``, ``tenants`` or a ``tls_client_ca``.
        port: Port to bind; 0 takes a free one.
        token: Bearer token that all clients send, on a server without tenants.
        tenants: Tenants that may use the server.
        tls_certificate: PEM file with the server's certificate, and those between it and its authority.
        tls_key: PEM file with the private key, if it is not in the same file.
        tls_client_ca: PEM file with authorities; a client must show a certificate of one of them.
        audit_log: File to which a line is appended for each request.
        workers: Compute processes; in all at most `PER_CORE` per core, or `ANYWAY` if that is more.
        threads: Threads of each worker, with the same limit. None divides the cores among the workers.
        device: Device on which workers compute. Several of one kind, ``cuda:0,cuda:1``, have ``workers``
            each, and memory, queue and limits of their own.
        prefix: Folder of a store in which upriver keeps programs and datasets.
        memory_budget_bytes: Most memory of requests, programs and idle workers together; None derives it.
        memory_reserve: Share of available memory that a derived budget leaves free. A tenth: the C library
            and torch keep some of the memory that they have freed.
        admission: How a request's micro-batch is chosen: "static" as the client asks, "adaptive" as memory
            allows. Adaptive is for numeric jobs only: for others the client's choice is part of the result.
        collect_s: Seconds for which a round of adaptive admission waits for further requests. 10 ms: a
            fortieth of the time of the quickest network measured, for 16 samples on one core.
        min_batch: Smallest batch of adaptive admission; 25 as in HAPI (2022), section 4.5.
        max_admitted: Requests that may compute at once, besides a tenant's only one. 8: each holds memory
            while it is admitted, and two keep a worker busy.
        max_waiting: Requests that may wait for admission. 64: eight for each admitted one.
        max_waiting_bytes: Memory that waiting requests may ask for together. 8 GiB: forty micro-batches of
            the largest cut of the networks tried.
        deadline_s: Most seconds of a request, including waits; a client may ask for less. 600 s: fifty
            micro-batches of the slowest network measured, on one core.
        program_budget_bytes: Programs kept loaded between requests. 4 GiB: six networks of the size of vgg19.
        stored_bytes: Programs, weights and kept features that each tenant may have in a store, unless the
            tenant has a limit of its own. 64 GiB: sixteen of the largest programs accepted.
        max_requests: Run requests in any state; further ones must be retried later. 128: those that may wait
            or compute, with room for some that are still being sent.
        max_datasets: Indexes kept between requests.
        job_timeout_s: Seconds after which a worker that computes one micro-batch is ended. The slowest
            network measured takes 11 s for 16 samples on one core.
        stall_timeout_s: Seconds after which a client that reads nothing is dropped, and a request whose body
            stops arriving.
        head_timeout_s: Seconds for a TLS handshake, and again for a whole request head; a slower connection
            is closed. 20 s: a head is one packet, which arrives after 7 s if it is lost three times in a row.
        idle_timeout_s: Seconds after which a connection without a request is closed. 75 s: longer than any
            pause between two micro-batches of training.
        max_connections: Connections at once; a further one ends the connection that is longest without a
            request. 512: half of a process's usual descriptors, enough for dozens of training jobs.
        grace_s: Seconds that running requests get after a request to stop. 25 s: with its shutdown a server
            ends within the 30 s that Kubernetes waits.
        load_window_s: Seconds of micro-batches that count in the load factor sent to clients. 5 s as in
            LoADPart: with 60 s clients would learn of a new load half a minute late.
        load_watch_s: Seconds between measurements of the utilisation of cores or accelerators by all
            processes. 1 s: a device that computes locally returns within two or three. A measurement takes
            0.05 ms of a CPU for two cores, 1.5 ms for 256.
        load_free_below: Utilisation below which a machine bounds the load factor; 0.9 as in LoADPart.
        cold_start: "stream" runs a program's stages as soon as their own weights are there; "whole" waits
            until all are there and checked against their graph.
        cold_bytes_per_s: Most bandwidth of one program's streamed weights; None uses all of the link.
        sandbox: How workers are confined: "bubblewrap" requires it, "auto" uses it where it works, "none"
            uses namespaces alone.
        log_format: "text" for people, "json" for machines.
        trace_endpoint: URL to which traces are sent (OpenTelemetry over HTTP); None makes no traces.
        allow: Code of this machine that clients may run: packages, modules, ``package.module:callable``.
            Compute processes are not confined then: they see what the server's user sees.
        code_bytes: Estimated memory of a micro-batch of such code until one has been measured. 64 MiB: a
            hundred images of 224 by 224, as floats.
        hidden_variables: Environment variables that such code does not see: credentials of stores.
        caps: Limits of frames, requests, programs and stored images.
    """

    stores: Mapping[str, str | os.PathLike[str] | StoreLocation] = field(
        repr=False
    )  # options may hold credentials
    host: str = "127.0.0.1"
    port: int = 7000
    token: str | None = field(default=None, repr=False)
    tenants: tuple[Tenant, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    audit_log: str | None = None
    workers: int = 1
    threads: int | None = None
    device: str = "cpu"
    prefix: str = DEFAULT_PREFIX
    memory_budget_bytes: int | None = None
    memory_reserve: float = 0.1
    admission: Admission = "static"
    collect_s: float = 0.01
    min_batch: int = 25
    max_admitted: int = 8
    max_waiting: int = 64
    max_waiting_bytes: int = 8 << 30
    deadline_s: float = 600.0
    program_budget_bytes: int = 4 << 30
    stored_bytes: int = 64 << 30
    max_requests: int = 128
    max_datasets: int = 16
    job_timeout_s: float = 300.0
    stall_timeout_s: float = 120.0
    head_timeout_s: float = 20.0
    idle_timeout_s: float = 75.0
    max_connections: int = 512
    grace_s: float = 25.0
    load_window_s: float = WINDOW_S
    load_watch_s: float = 1.0
    load_free_below: float = FREE_BELOW
    cold_start: ColdStart = "stream"
    cold_bytes_per_s: float | None = None
    sandbox: Sandbox = "auto"
    log_format: LogFormat = "text"
    trace_endpoint: str | None = None
    allow: tuple[str, ...] = ()
    code_bytes: int = 64 << 20
    hidden_variables: tuple[str, ...] = ()
    caps: Caps = DEFAULT_CAPS

    def __post_init__(self) -> None:
        require_allow(self.allow)
        if not self.stores and not self.allow:
            raise ConfigError("a server needs at least one store")
        for name in self.stores:
            if not valid_store_name(name):
                raise ConfigError(f"a store's name has 1 to 64 letters, digits, '.', '_', '-', got {name!r}")
        try:
            check_name(self.prefix)
        except ConfigError as error:
            raise ConfigError(f"prefix is a folder's name: {error}") from None
        self._check_numbers()
        for name, choice in _CHOICES.items():
            _require_choice(name, getattr(self, name), get_args(choice))
        if self.allow and self.sandbox == "bubblewrap":
            raise ConfigError(
                "code that is allowed runs as the user who starts the server: leave sandbox out"
            )
        self._check_devices()
        self._check_processes()
        self._check_tls()
        self._check_tenants()
        self._check_host()
        if self.trace_endpoint is not None and not _is_http(self.trace_endpoint):
            raise ConfigError(
                f"trace_endpoint must be http://HOST:PORT or https://…, got {self.trace_endpoint!r}"
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """Return each device over which requests are dealt."""
        return tuple(part.strip() for part in self.device.split(","))

    @property
    def threads_per_worker(self) -> int:
        """Return the number of threads with which each worker computes."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // (self.workers * len(self.devices)))

    @property
    def pixels(self) -> int:
        """Return the most pixels of a stored image."""
        return self.caps.pixels

    @property
    def stream_limits(self) -> StreamLimits | None:
        """Return the limits of weights that stream while their program runs; None without streaming."""
        if self.cold_start == "whole":
            return None
        if self.cold_bytes_per_s is None:
            return StreamLimits()
        return StreamLimits(bandwidth_bytes_per_s=self.cold_bytes_per_s)

    def open_stores(self) -> dict[str, Store]:
        """Open every store.

        Programs are stored in the first of the result: ``default``, or else the first configured.

        Raises:
            ConfigError: If a URI is invalid.
            StoreError: If a store does not exist.
        """
        names = sorted(self.stores, key=lambda name: name != "default")
        return {name: _open(name, self.stores[name]) for name in names}

    def everyone(self) -> Tenants:
        """Return all tenants with a token or a certificate; a single token is `ANYONE`'s."""
        if self.token is None:
            return Tenants(self.tenants)
        return Tenants([replace(ANYONE, token_hashes=(hash_token(self.token),))])

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            require_count(name, getattr(self, name))
        for name in _COUNTS_OR_NONE:
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        for name in self.caps.__struct_fields__:
            require_count(f"caps: {name}", getattr(self.caps, name))
        if self.pixels > PIXEL_CEILING:
            raise ConfigError(f"caps: pixels is at most {PIXEL_CEILING}, got {self.pixels}")
        for name in _SECONDS:
            require_finite(name, getattr(self, name), positive=True)
        for name in ("grace_s", "collect_s", "memory_reserve"):
            require_finite(name, getattr(self, name))
        require_finite("load_free_below", self.load_free_below, at_most=1.0, positive=True)
        if self.memory_reserve >= 1:
            raise ConfigError(
                f"memory_reserve is a share below 1 of what is available, got {self.memory_reserve}"
            )
        if self.cold_bytes_per_s is not None:
            require_finite("cold_bytes_per_s", self.cold_bytes_per_s, at_most=1e15, positive=True)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in 0..65535, got {self.port}")

    def _check_devices(self) -> None:
        kinds = {device.partition(":")[0] for device in self.devices}
        if "" in kinds or len(kinds) > 1:
            raise ConfigError(
                f"device names one, or several of one kind with commas between them, got {self.device!r}"
            )
        if kinds != {"cpu"} and len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"device names one twice: {self.device!r}")

    def _check_processes(self) -> None:
        """Refuse numbers with a digit too many, which could exhaust the machine's processes."""
        cores = len(os.sched_getaffinity(0))
        most = max(ANYWAY, PER_CORE * cores)
        rule = f"{ANYWAY}, or {PER_CORE} for each core where that is more; there are {cores} here"
        if self.workers * len(self.devices) > most:
            raise ConfigError(
                f"workers are at most {most} over all devices ({rule}), got {self.workers}"
                + (f" for each of {len(self.devices)}" if len(self.devices) > 1 else "")
            )
        if self.threads is not None and self.threads > most:
            raise ConfigError(f"threads are at most {most} in each worker ({rule}), got {self.threads}")

    def _check_tls(self) -> None:
        if self.tls_certificate is None and not (self.tls_key is None and self.tls_client_ca is None):
            raise ConfigError("tls_key and tls_client_ca need a tls_certificate: the server's own")

    def _check_tenants(self) -> None:
        if self.token is not None and self.tenants:
            raise ConfigError("give one token or tenants, not both: each tenant has its own tokens")
        Tenants(self.tenants)
        for tenant in self.tenants:
            if tenant.name in _RESERVED:
                raise ConfigError(
                    f"no tenant can be called {tenant.name!r}: the server's own share has that name"
                )
            if tenant.name == ANYONE.name and not self._alone(tenant):
                raise ConfigError(
                    f"a tenant called {tenant.name!r} shares its programs with all: give it another name"
                )
            if tenant.certificates and self.tls_client_ca is None:
                raise ConfigError(f"tenant {tenant.name!r} names certificates; they need tls.client_ca")
            if not tenant.certificates and not tenant.token_hashes:
                raise ConfigError(f"tenant {tenant.name!r} has no way in: give it a token or a certificate")
            self._check_stores_of(tenant)

    def _check_stores_of(self, tenant: Tenant) -> None:
        for store, folders in (tenant.stores or {}).items():
            if store not in self.stores:
                raise ConfigError(
                    f"tenant {tenant.name!r} names the store {store!r}, which is not configured; "
                    f"there are {', '.join(self.stores)}"
                )
            for folder in folders:
                if f"{check_prefix(folder)}/".startswith(f"{self.prefix}/"):
                    raise ConfigError(
                        f"tenant {tenant.name!r}, store {store!r}: {folder!r} lies in {self.prefix!r}, where "
                        "the server keeps all tenants' programs; a folder is one of samples"
                    )

    def _alone(self, tenant: Tenant) -> bool:
        """Return whether no other tenant may read anything."""
        return not any(other.stores is None or other.stores for other in self.tenants if other is not tenant)

    def _check_host(self) -> None:
        fault = "" if self.token is None else token_fault(self.token)
        if fault:
            raise ConfigError(fault)
        guarded = self.token is not None or self.tenants or self.tls_client_ca is not None
        if not guarded and not is_loopback(self.host):
            raise ConfigError(
                f"binding {self.host!r} lets others in: set a token or tenants, or bind a loopback address "
                "(127.0.0.1)"
            )


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be {' or '.join(choices)}, got {value!r}")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open(name: str, location: str | os.PathLike[str] | StoreLocation) -> Store:
    if isinstance(location, str | os.PathLike):
        return Store.open(location, name=name)
    return Store.open(location.uri, name=name, options=dict(location.options) or None)
