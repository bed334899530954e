"""Start workers on the training node: for a trial, or on CPUs that training leaves idle."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from upriver._threads.forks import ForkSafeLock
from upriver.errors import ConfigError, ServerUnavailable, UpriverError
from upriver.resources import available_cpus
from upriver.rpc import validation
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.worker_fleet import Fleet, Provider, Serves
from upriver.text import printable

log = logging.getLogger("upriver")

MOST = 64
"""Maximum number of workers on this machine; one or two suffice for a trial."""

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Variable in which ``torchrun`` gives the number of processes that it has started on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWorkers(Provider):
    """Provider of workers on this machine, of one process each.

    Attributes:
        number: Number of workers; None for as many as needed.
    """

    number: int | None
    most: int

    def open(self, what: Serves) -> Fleet:
        """Return a fleet that has no workers yet."""
        return LocalFleet(what, most=self.most)


def beside_training(num_workers: int, cpus: int | None = None, ranks: int | None = None) -> LocalWorkers:
    """Provide as many workers as needed, on CPUs that training does not use.

    Args:
        num_workers: Number of loader processes. They and the training process have one CPU each.
        cpus: Number of CPUs that this process may use; by default as the machine and its control groups say.
        ranks: Number of training processes that share these CPUs, each with workers of its own; by default as
            ``torchrun`` says.

    Raises:
        ConfigError: If training uses all CPUs.
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
    """Return the number of training processes of this job on this machine."""
    told = os.environ.get(RANKS_VARIABLE, "")
    return max(1, int(told)) if told.isascii() and told.isdigit() else 1


def sharing_ranks() -> int:
    """Return the number of training processes that share this process's CPUs; 1 if each has its own.

    Each has its own CPUs if its parent process may use more than it may.
    """
    ranks = ranks_here()
    if ranks == 1:
        return 1
    try:
        pinned = os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except OSError:  # the parent process has ended
        pinned = False
    return 1 if pinned else ranks


def provider_of(workers: Sequence[str] | int | Provider, *, num_workers: int) -> Provider | None:
    """Return the provider that starts a loader's workers; None if the user gave addresses.

    Raises:
        ConfigError: If the number of workers is not allowed, or no CPU is left for one.
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
    """Workers of one loader on this machine.

    A token keeps the machine's other users out, who can reach the workers' ports.

    Args:
        what: Stores or code that the workers serve.
    """

    processes = 1

    def __init__(self, what: Serves, *, most: int) -> None:
        self._what, self._most = what, most
        self._token = secrets.token_urlsafe(32)
        self._servers = dict[str, EmbeddedServer]()
        self._lock, self._stopped = ForkSafeLock(), False

    @property
    def token(self) -> str:
        """Return the token drawn for this loader."""
        return self._token

    def room(self) -> int:
        """Return how many more workers may be started."""
        return self._most - len(self._servers)

    def start(self, count: int) -> Sequence[str]:
        """Start servers one after another, until one fails to start."""
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
        """Remove the workers whose server has ended, and return their addresses."""
        with self._lock:
            gone = [url for url, server in self._servers.items() if not server.running]
            ended = [self._servers.pop(url) for url in gone]
        for server in ended:
            server.close()
        return gone

    def stop(self) -> None:
        """End all servers; one that is being started ends as soon as it runs."""
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
