"""Workers on the training node itself: for a try, and for CPUs that training leaves alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from upriver.client import checks
from upriver.client.embedded import EmbeddedServer
from upriver.client.fleet import Fleet, Provider, Serves
from upriver.errors import ConfigError, ServerUnavailable
from upriver.profile.available import available_cpus
from upriver.text import printable

MOST = 64
"""For a try one or two do."""


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


def beside_training(num_workers: int, cpus: int | None = None) -> LocalWorkers:
    """As many workers as are needed, on CPUs that training does not use.

    Args:
        num_workers: Loader processes of the training process; it and each of them have a CPU of their own.
        cpus: That processes like this may use; what the machine and its control groups say if None.

    Raises:
        ConfigError: If training uses all of them.
    """
    cpus = available_cpus() if cpus is None else cpus
    left = cpus - 1 - num_workers
    if left < 1:
        raise ConfigError(
            f"workers='auto' finds no CPU for a worker on this machine: it has {cpus}, and training uses "
            f"{1 + num_workers} (itself and num_workers={num_workers}); have workers on other machines, with "
            "upriver.ray_workers('auto') on a Ray cluster or by their addresses"
        )
    return LocalWorkers(number=None, most=min(left, MOST))


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
        number = checks.whole("workers", workers, most=MOST)
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

    Args:
        what: They are to serve.
        most: How many there may be.
    """

    token = None
    processes = 1

    def __init__(self, what: Serves, *, most: int) -> None:
        self._what, self._most, self._owner = what, most, os.getpid()
        self._servers = dict[str, EmbeddedServer]()
        self._lock, self._stopped = threading.Lock(), False

    def room(self) -> int:
        """What is missing to the most there may be."""
        return self._most - len(self._servers)

    def start(self, count: int) -> Sequence[str]:
        """Start servers, one after another."""
        return [self._start() for _ in range(count)]

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
            server = EmbeddedServer.start(self._what.stores, workers=1)
        else:
            server = EmbeddedServer.start_worker(self._what.allow, workers=1)
        with self._lock:
            if not self._stopped:
                self._servers[server.url] = server
                return server.url
        server.close()
        raise ServerUnavailable("the workers of this loader have been stopped")
