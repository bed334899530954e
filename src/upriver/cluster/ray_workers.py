"""Run workers of the input pipeline on a Ray cluster: actors that each keep an ``upriver worker``.

Ray decides on which machines they run, and ends them with their job. Samples never pass through Ray: the
loader talks to each worker's own server over HTTP, as to any other.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from upriver._threads.forks import unless_forked
from upriver.cluster.child import ServerProcess
from upriver.cluster.deploy import LOCAL, before_import, join, reason, start
from upriver.cluster.replica_config import ANYONE, token_hash
from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.extras import install
from upriver.rpc.child_server import START_TIMEOUT_S
from upriver.rpc.worker_fleet import Fleet, Provider, Serves
from upriver.text import printable, said

log = logging.getLogger(__name__)

MOST = 8
"""Most workers of ``"auto"`` by default: a number that a shared cluster can spare for a job."""

MOST_WORKERS = 1024
MOST_CPUS = 256
"""CPUs of the largest machines. A larger number is a mistake, as is a larger number of workers."""

THREADS = 1
"""Threads of each process, as in an ``upriver worker``: with more, some kernels give other low bits."""

GRACE_S = 1.0
"""Grace period of a worker's server: once its loader is gone, no client waits for a request."""

ADMITTED, ADMITTED_EACH = 8, 2
"""Requests that may compute at once, as in an ``upriver worker``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayWorkers(Provider):
    """Provider of a loader's ``workers`` on a Ray cluster; `ray_workers` explains the fields."""

    number: int | None
    most: int
    cpus: int = 1
    address: str | None = None
    start_timeout_s: float = START_TIMEOUT_S

    def open(self, what: Serves) -> Fleet:
        """Connect to the cluster, and return a fleet without workers yet.

        Raises:
            ConfigError: If there is no cluster, Ray is not installed, or stores are to be served.
        """
        if what.stores:
            raise ConfigError(
                "ray_workers make datasets by name; an upriver.Dataset is made by servers near its store "
                "(on a Ray cluster, upriver serve --engine ray), whose addresses are the loader's workers"
            )
        ray = connected(self.address, num_cpus=(self.number or 1) * self.cpus)
        return RayFleet(ray, what.allow, cpus=self.cpus, start_timeout_s=self.start_timeout_s)


def ray_workers(
    number: int | Literal["auto"],
    *,
    most: int | None = None,
    cpus: int = 1,
    address: str | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> RayWorkers:
    """Return workers on a Ray cluster: ``upriver.DataLoader(…, workers=upriver.ray_workers(4))``.

    Each worker is an actor with a server of its own. The server runs only the code of the loader's dataset,
    and answers only requests with the loader's token. Workers end with the loader. upriver, the dataset's
    code and its data must be on every machine of the cluster.

    Args:
        number: Number of workers. ``"auto"`` starts one, measures its throughput, and then starts as many as
            the input pipeline lacks, or none.
        most: Most workers of ``"auto"``; 8 if None. The free CPUs of the cluster are a bound too.
        cpus: CPUs that Ray reserves for each worker, which makes samples in as many processes.
        address: ``auto``, ``HOST:PORT`` or ``ray://HOST:10001`` of a running cluster; ``local`` starts one on
            this machine, which ends with this process; None for the one that ``ray.init`` has connected to.
        start_timeout_s: Seconds that workers may need to start, or to get their CPUs.

    Raises:
        ConfigError: If an argument is outside its allowed range.
    """
    if number != "auto":
        _whole("the number of Ray workers", number, MOST_WORKERS, other=", or 'auto'")
        if most is not None:
            raise ConfigError(f"most bounds the number of workers of 'auto', and here it is {number} anyway")
    if most is not None:
        _whole("most", most, MOST_WORKERS)
    _whole("cpus", cpus, MOST_CPUS)
    if address is not None and not (isinstance(address, str) and address):
        raise ConfigError(
            f"address must be 'auto', HOST:PORT, ray://HOST:PORT, 'local' or None, got {_shown(address)}"
        )
    if (
        isinstance(start_timeout_s, bool)
        or not isinstance(start_timeout_s, int | float)
        or not 0 < start_timeout_s < math.inf
    ):
        raise ConfigError(f"start_timeout_s must be a finite number > 0, got {_shown(start_timeout_s)}")
    return RayWorkers(
        number=None if number == "auto" else number,
        most=(most or MOST) if number == "auto" else number,
        cpus=cpus,
        address=address,
        start_timeout_s=start_timeout_s,
    )


def _whole(name: str, value: object, most: int, *, other: str = "") -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number in 1..{most}{other}, got {_shown(value)}")


def _shown(value: object) -> str:
    return printable(repr(value), 80)


_joined = set[str]()
"""Addresses by which this process was connected."""


def connected(address: str | None, *, num_cpus: int) -> Any:
    """Return Ray, connected to a cluster.

    Args:
        num_cpus: Least CPUs that a local cluster hands out.

    Raises:
        ConfigError: If there is no cluster, Ray is not installed, or the process is on another cluster.
    """
    if "ray" not in sys.modules:
        if address is None:
            raise _no_cluster()
        before_import(local=address == LOCAL)
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(install("ray_workers", f"ray ({error})", "ray")) from error
    if ray.is_initialized():
        if address is not None and address not in _joined:
            raise ConfigError(
                f"this process is connected to a Ray cluster already, and can be to one only; leave address "
                f"out to use it, got {address!r}"
            )
        return ray
    if address is None:
        raise _no_cluster()
    _joined.clear()
    if address == LOCAL:
        _start_here(ray, num_cpus)
    else:
        join(ray, address)
    _joined.add(address)
    return ray


def _no_cluster() -> ConfigError:
    return ConfigError(
        "ray_workers finds no Ray cluster: call ray.init(…) before, or give address='auto', 'HOST:PORT' or "
        "'ray://HOST:10001' of one that runs, or address='local' to have one started on this machine"
    )


def _start_here(ray: Any, num_cpus: int) -> None:
    """Start a cluster on this machine, which ends with this process, as do its files."""
    # In /tmp, as Ray's own: the sockets that Ray puts there have paths of at most 107 characters.
    folder = tempfile.mkdtemp(prefix="upriver-ray-", dir="/tmp")
    atexit.register(unless_forked(_end_here, ray, folder))
    start(ray, num_cpus=max(num_cpus, os.cpu_count() or 1), loopback=True, folder=folder)


def _end_here(ray: Any, folder: str) -> None:
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


class RayWorker:
    """Actor that keeps one ``upriver worker``, which ends with the actor's process.

    Raises:
        ServerUnavailable: If the server does not start.
    """

    def __init__(self, document: Mapping[str, object], start_timeout_s: float) -> None:
        ray: Any = importlib.import_module("ray")
        self._server = ServerProcess(
            document,
            host=str(ray.util.get_node_ip_address()),
            grace_s=GRACE_S,
            command="worker",
            timeout_s=start_timeout_s,
        )

    def url(self) -> str:
        """Return the URL of the server."""
        return self._server.url

    def ended(self) -> None:
        """Wait until the server has ended."""
        self._server.wait()


class RayFleet(Fleet):
    """Workers of one loader on a Ray cluster."""

    def __init__(self, ray: Any, allow: Sequence[str], *, cpus: int, start_timeout_s: float) -> None:
        self._ray, self._cpus, self._start_timeout_s = ray, cpus, start_timeout_s
        self._token = secrets.token_urlsafe(32)
        self._document = document(allow, self._token, cpus)
        self._actors = list[Any]()
        self._serving = dict[str, tuple[Any, Any]]()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._finalizer = weakref.finalize(self, unless_forked(_end, ray, self._actors, self._stopped))

    @property
    def token(self) -> str:
        """Token of this fleet alone; Ray carries only its hash."""
        return self._token

    @property
    def processes(self) -> int:
        """Number of processes of a worker: its CPUs."""
        return self._cpus

    def room(self) -> int:
        """Return the number of workers for which the cluster has free CPUs."""
        try:
            return int(self._free("available_resources") // self._cpus)
        except Exception:  # Ray raises many kinds of its own: the cluster is gone
            return 0

    def start(self, count: int) -> Sequence[str]:
        """Start actors, and wait until their servers accept requests."""
        # An explicit strategy also keeps actors out of the caller's placement group. A trainer of Ray's own
        # runs in one, which has no CPU left.
        options = {"num_cpus": self._cpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor_class = self._ray.remote(**options)(RayWorker)
        asked = dict[Any, Any]()
        try:
            for _ in range(count):
                actor = actor_class.remote(self._document, self._start_timeout_s)
                with self._lock:
                    self._actors.append(actor)
                asked[actor.url.remote()] = actor
            urls, failures = self._wait_for(asked)
        except BaseException as error:
            self._kill(asked.values())
            if isinstance(error, UpriverError) or not isinstance(error, Exception):
                raise
            raise ServerUnavailable(f"Ray starts no worker: {said(str(error))}") from error
        if not urls:
            raise ServerUnavailable(f"no worker could be started on the Ray cluster: {failures[0]}")
        if failures:
            log.warning("%d of %d Ray workers could not be started: %s", len(failures), count, failures[0])
        return urls

    def lost(self) -> Sequence[str]:
        """Return the URLs of workers whose actor or server has ended."""
        with self._lock:
            serving = dict(self._serving)
        if not serving:
            return []
        ends = [end for _, end in serving.values()]
        with suppress(Exception):  # Ray raises many kinds of its own: the cluster is gone, with all actors
            ends, _ = self._ray.wait(ends, num_returns=len(ends), timeout=0)
        ended = set(ends)
        gone = [url for url, (_, end) in serving.items() if end in ended]
        with self._lock:
            for url in gone:
                self._serving.pop(url, None)
        self._kill([serving[url][0] for url in gone])
        return gone

    def stop(self) -> None:
        """Kill all actors; their servers end with them."""
        self._finalizer()

    def _wait_for(self, asked: Mapping[Any, Any]) -> tuple[list[str], list[str]]:
        """Return the addresses of workers that serve, and the failures of the others, which are killed."""
        if self._stopped.is_set():
            raise ServerUnavailable("the workers of this loader have been stopped")
        urls, failures = list[str](), list[str]()
        ready, waiting = self._ray.wait(list(asked), num_returns=len(asked), timeout=self._start_timeout_s)
        for one in ready:
            try:
                url = str(self._ray.get(one))
            except Exception as error:  # Ray raises many kinds of its own
                failures.append(reason(str(error)))
                self._kill([asked[one]])
            else:
                urls.append(url)
                with self._lock:
                    self._serving[url] = (asked[one], asked[one].ended.remote())
        if waiting:
            self._kill([asked[one] for one in waiting])
            failures += [self._why_waiting()] * len(waiting)
        return urls, failures

    def _why_waiting(self) -> str:
        free, total = self._free("available_resources"), self._free("cluster_resources")
        return (
            f"not there within {self._start_timeout_s:g} s; each takes {self._cpus} CPUs of one machine, and "
            f"{free:g} of the cluster's {total:g} are free"
        )

    def _free(self, which: str) -> float:
        return float(getattr(self._ray, which)().get("CPU", 0.0))

    def _kill(self, actors: Iterable[Any]) -> None:
        for actor in list(actors):
            kill(self._ray, actor)
            with self._lock, suppress(ValueError):
                self._actors.remove(actor)


def document(allow: Sequence[str], token: str, cpus: int) -> dict[str, object]:
    """Return the configuration of an actor's server, with the token's hash only: Ray keeps it unencrypted."""
    return {
        "allow": list(allow),
        "workers": cpus,
        "threads": THREADS,
        "max_admitted": max(ADMITTED, ADMITTED_EACH * cpus),
        "grace_s": GRACE_S,
        "tenants": {ANYONE: {"token_hashes": [token_hash(token)]}},
    }


def kill(ray: Any, actor: Any) -> None:
    """End an actor, if its cluster still exists."""
    with suppress(Exception):  # Ray raises many kinds of its own: the actor or the cluster has ended
        ray.kill(actor)


def _end(ray: Any, actors: list[Any], stopped: threading.Event) -> None:
    stopped.set()
    while actors and ray.is_initialized():
        kill(ray, actors.pop())
