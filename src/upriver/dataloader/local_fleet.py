"""Workers on the training node itself: for a try, and for CPUs that training leaves alone."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.profile.resources import available_cpus
from upriver.rpc import validation
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.worker_fleet import Fleet, Provider, Serves
from upriver.text import printable

log = logging.getLogger("upriver")

MOST = 64
"""For a try one or two do."""

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Where ``torchrun`` says how many processes it has started on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWorkers(Provider):
    """Workers of one process each, on this machine.

    Attributes:
        number: How many; None for as many as are needed.
        most: How many at most.
    """

    number: int | None
    most: int

    def open(self, what: Serves) -> Fleet:
        """A fleet of none yet."""
        return LocalFleet(what, most=self.most)


def beside_training(num_workers: int, cpus: int | None = None, ranks: int | None = None) -> LocalWorkers:
    """As many workers as are needed, on CPUs that training does not use.

    Args:
        num_workers: Loader processes of the training process; it and each of them have a CPU of their own.
        cpus: That processes like this may use; what the machine and its control groups say if None.
        ranks: Processes that train and share these CPUs, each with workers of its own; what ``torchrun`` says
            if None.

    Raises:
        ConfigError: If training uses all of them.
    """
    cpus = available_cpus() if cpus is None else cpus
    ranks = sharing_ranks() if ranks is None else ranks
    left = cpus // ranks - 1 - num_workers
    if left < 1:
        shared = f", for each of {ranks} processes that train {cpus // ranks}" if ranks > 1 else ""
        raise ConfigError(
            f"workers='auto' finds no CPU for a worker on this machine: it has {cpus}{shared}, and training "
            f"uses {1 + num_workers} (itself and num_workers={num_workers}); have workers on other machines, "
            "with upriver.ray_workers('auto') on a Ray cluster or by their addresses"
        )
    return LocalWorkers(number=None, most=min(left, MOST))


def ranks_here() -> int:
    """Processes of this job that train on this machine."""
    told = os.environ.get(RANKS_VARIABLE, "")
    return max(1, int(told)) if told.isascii() and told.isdigit() else 1


def sharing_ranks() -> int:
    """Processes that train on this machine with the CPUs that this one has; 1 where each has its own.

    Whoever has started them may use more CPUs than each of them then.
    """
    ranks = ranks_here()
    if ranks == 1:
        return 1
    try:
        pinned = os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        pinned = False
    return 1 if pinned else ranks


def provider_of(workers: Sequence[str] | int | Provider, *, num_workers: int) -> Provider | None:
    """What starts a loader's workers; None where they have addresses.

    Args:
        num_workers: Loader processes.

    Raises:
        ConfigError: If so many cannot be, or there is no CPU for one.
    """
    if isinstance(workers, Provider):
        return workers
    if isinstance(workers, int):
        number = validation.whole("workers", workers, most=MOST)
        return LocalWorkers(number=number, most=number)
    if isinstance(workers, str) and workers == "auto":
        return beside_training(num_workers)
    if isinstance(workers, (str, bytes)) or not isinstance(workers, Sequence):
        raise ConfigError(
            "workers must be a list of addresses (http://HOST:PORT), how many to start here, 'auto', or what "
            f"starts them (upriver.ray_workers), got {printable(repr(workers), 60)}"
        )
    return None


class LocalFleet(Fleet):
    """Workers of one loader on this machine, which answer nobody else: its other users can reach them, too.

    Args:
        what: They are to serve.
        most: How many there may be.
    """

    processes = 1

    def __init__(self, what: Serves, *, most: int) -> None:
        self._what, self._most, self._owner = what, most, os.getpid()
        self._token = secrets.token_urlsafe(32)
        self._servers = dict[str, EmbeddedServer]()
        self._lock, self._stopped = threading.Lock(), False

    @property
    def token(self) -> str:
        """Drawn for this loader."""
        return self._token

    def room(self) -> int:
        """What is missing to the most there may be."""
        return self._most - len(self._servers)

    def start(self, count: int) -> Sequence[str]:
        """Start servers, one after another, until one cannot be."""
        urls = list[str]()
        for _ in range(count):
            try:
                urls.append(self._start())
            except UpriverError as error:
                if not urls or self._stopped:
                    raise
                log.warning("%d of %d workers were started on this machine: %s", len(urls), count, error)
                break
        return urls

    def lost(self) -> Sequence[str]:
        """Those whose server has ended."""
        with self._lock:
            gone = [url for url, server in self._servers.items() if not server.running]
            ended = [self._servers.pop(url) for url in gone]
        for server in ended:
            server.close()
        return gone

    def stop(self) -> None:
        """End all servers; one that is being started ends as soon as it has."""
        if self._owner != os.getpid():
            return  # a fork of the process that started them
        with self._lock:
            self._stopped = True
            servers = list(self._servers.values())
            self._servers.clear()
        for server in servers:
            server.close()

    def _start(self) -> str:
        if self._what.stores:
            server = EmbeddedServer.start(self._what.stores, workers=1, token=self._token)
        else:
            server = EmbeddedServer.start_worker(self._what.allow, workers=1, token=self._token)
        with self._lock:
            if not self._stopped:
                self._servers[server.url] = server
                return server.url
        server.close()
        raise ServerUnavailable("the workers of this loader have been stopped")
