"""The address book: which servers there are, told by their replicas and believed for a few seconds.

A replica renews its entry while its server lives and takes it out when it stops. One that dies without a word
drops out when its lease is over. The book keeps nothing else: were it lost, the next renewals would fill it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import upriver

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""An entry that has not been renewed for so long is no longer told. Five renewals: one lost call, or a pause
of some seconds, takes no server from anyone."""

RENEW_S = 2.0
"""Between two renewals: a call of a millisecond."""

LOOK_S = 0.25
"""Between two looks whether the server's process has ended: a server that died is told for so long, and
clients notice by themselves before that."""

ASK_S = 5.0
"""For one call to the book, which holds some entries in memory."""

NAMESPACE = "upriver"
"""Of Ray's named actors, where the book is found by replicas and by later runs."""

LISTING_PATH = "/servers"
"""Below the deployment's own prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEntry:
    """One replica's server.

    Attributes:
        url: Where it listens.
        since: When it began to serve, in seconds since 1970.
        until_s: When the lease is over, by the book's clock.
    """

    url: str
    since: float
    until_s: float


class AddressBook:
    """Entries with leases. Not thread-safe: an actor does one thing at a time.

    Args:
        lease_s: How long an entry is believed.
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, lease_s: float = LEASE_S, now: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self._now = lease_s, now
        self._entries: dict[str, ReplicaEntry] = {}

    def renew(self, key: str, url: str, since: float) -> None:
        """A replica's server serves: believe that for another lease."""
        self._entries[key] = ReplicaEntry(url=url, since=since, until_s=self._now() + self._lease_s)

    def leave(self, key: str) -> None:
        """It does not, from now on; unknown keys are ignored."""
        self._entries.pop(key, None)

    def listing(self) -> dict[str, object]:
        """What clients are told: the servers, the longest-serving first."""
        now_s = self._now()
        self._entries = {key: entry for key, entry in self._entries.items() if entry.until_s > now_s}
        # A replica that took over a port may share an address with one whose lease is not over.
        since: dict[str, float] = {}
        for entry in self._entries.values():
            since[entry.url] = max(entry.since, since.get(entry.url, entry.since))
        servers = [{"url": url, "since": began} for url, began in sorted(since.items(), key=_by_age)]
        return {"servers": servers, "version": upriver.__version__, "lease_s": self._lease_s}


def _by_age(server: tuple[str, float]) -> tuple[float, str]:
    url, since = server
    return since, url


class Book(Protocol):
    """What a replica needs of an address book."""

    def renew(self, key: str, url: str, since: float) -> None:
        """See `AddressBook.renew`."""

    def leave(self, key: str) -> None:
        """See `AddressBook.leave`."""


class RayBook:
    """The address book of a cluster, by its name.

    Args:
        name: Of the actor that `create` made.
    """

    def __init__(self, name: str) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._name = name
        self._actor: Any = None

    @classmethod
    def create(cls, name: str) -> RayBook:
        """The book of that name, made where there is none; it outlives whoever makes it, until `end`."""
        book = cls(name)
        actor = book._ray.remote(AddressBook)
        book._actor = actor.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,  # with its node: renewals fill the new one
        ).remote()
        return book

    def renew(self, key: str, url: str, since: float) -> None:
        """See `AddressBook.renew`."""
        self._ask("renew", key, url, since)

    def leave(self, key: str) -> None:
        """See `AddressBook.leave`."""
        self._ask("leave", key)

    def listing(self) -> Mapping[str, object]:
        """See `AddressBook.listing`. Blocks: not for an event loop."""
        found: Mapping[str, object] = self._ask("listing")
        return found

    def end(self) -> None:
        """Remove the book from the cluster."""
        self._ray.kill(self._found(), no_restart=True)

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            return self._ray.get(getattr(self._found(), method).remote(*arguments), timeout=ASK_S)
        except Exception:
            self._actor = None  # another run may have replaced it
            raise

    def _found(self) -> Any:
        if self._actor is None:
            self._actor = self._ray.get_actor(self._name, namespace=NAMESPACE)
        return self._actor


class Membership:
    """Keeps one server in the book, for as long as it lives and this object is not closed.

    Args:
        book: Where it is written.
        url: The server's address.
        alive: Whether its process has not ended; asked often.
        renew_s: Between two renewals.
        look_s: Between two looks at ``alive``.
    """

    def __init__(
        self,
        book: Book,
        *,
        url: str,
        alive: Callable[[], bool],
        renew_s: float = RENEW_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._book, self._url, self._alive = book, url, alive
        self._renew_s, self._look_s = renew_s, look_s
        self._key, self._since = uuid.uuid4().hex, time.time()
        self._stop = threading.Event()
        self._told = True
        self._thread = threading.Thread(target=self._keep, name="upriver-membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the server out of the book. May be called again."""
        self._stop.set()
        self._thread.join(2 * ASK_S)

    def _keep(self) -> None:
        due_s = time.monotonic()
        while self._alive() and not self._stop.is_set():
            if time.monotonic() >= due_s:
                self._tell(lambda: self._book.renew(self._key, self._url, self._since))
                due_s = time.monotonic() + self._renew_s
            self._stop.wait(self._look_s)
        self._tell(lambda: self._book.leave(self._key))

    def _tell(self, call: Callable[[], None]) -> None:
        """A book that cannot be reached now is told again: a server must not stop for want of it."""
        try:
            call()
        except Exception as error:  # Ray's own kinds, and there are many
            if self._told:
                log.warning("the address book does not answer: %s", error)
            self._told = False
        else:
            self._told = True
