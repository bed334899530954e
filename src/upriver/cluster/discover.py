"""Keep an address book of servers: their replicas register them, and each entry is valid for a few seconds.

A replica renews its entry while its server lives, and removes it on a stop. The entry of a replica that
crashed expires with its lease. The book keeps no other state: after a loss the next renewals fill it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import upriver
from upriver._threads.background import BackgroundThread

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Lease of an entry: five renewals, so one lost call or a pause of some seconds removes no server."""

RENEW_S = 2.0
"""Interval between two renewals. A renewal is a call of a millisecond."""

LOOK_S = 0.25
"""Interval between two checks whether the server's process has ended. A dead server stays listed for that
long, and clients notice its death before."""

ASK_S = 5.0
"""Timeout of one call to the book, which holds some entries in memory."""

NAMESPACE = "upriver"
"""Namespace of Ray's named actors, in which replicas and later runs find the book."""

LISTING_PATH = "/servers"
"""Path below the deployment's own prefix."""


class ReplicaEntry(NamedTuple):
    """Entry of a replica's server: its start in seconds since 1970, and its lease by the book's clock."""

    since: float
    url: str
    until_s: float


class AddressBook:
    """Entries with leases. Not thread-safe: an actor runs one call at a time.

    Args:
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, lease_s: float = LEASE_S, now: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self._now = lease_s, now
        self._entries: dict[str, ReplicaEntry] = {}

    def renew(self, key: str, url: str, since: float) -> None:
        """Renew the lease of a replica's server."""
        self._entries[key] = ReplicaEntry(url=url, since=since, until_s=self._now() + self._lease_s)

    def leave(self, key: str) -> None:
        """Remove an entry; unknown keys are ignored."""
        self._entries.pop(key, None)

    def listing(self) -> dict[str, object]:
        """Return the list for clients: the servers, the longest-serving first."""
        now_s = self._now()
        self._entries = {key: entry for key, entry in self._entries.items() if entry.until_s > now_s}
        # A replica that took over a port may share an address with one whose lease has not ended.
        latest = {entry.url: entry for entry in sorted(self._entries.values())}
        servers = [{"url": entry.url, "since": entry.since} for entry in sorted(latest.values())]
        return {"servers": servers, "version": upriver.__version__, "lease_s": self._lease_s}


class RayBook:
    """Address book of a cluster, found by its name.

    Args:
        name: Name of the actor that `create` made.
    """

    def __init__(self, name: str) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._name = name
        self._actor: Any = None

    @classmethod
    def create(cls, name: str) -> RayBook:
        """Return the book of that name; create it if there is none. It outlives its creator, until `end`."""
        book = cls(name)
        actor = book._ray.remote(AddressBook)
        book._actor = actor.options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,  # restarts with its node: renewals fill the new one
        ).remote()
        return book

    def renew(self, key: str, url: str, since: float) -> None:
        """See `AddressBook.renew`."""
        self._ask("renew", key, url, since)

    def leave(self, key: str) -> None:
        """See `AddressBook.leave`."""
        self._ask("leave", key)

    def listing(self) -> Mapping[str, object]:
        """See `AddressBook.listing`. Blocks: do not call it in an event loop."""
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
    """Membership of one server in the book, while the server lives and this object is not closed.

    Args:
        alive: Returns whether the server's process has not ended; called every ``look_s``.
    """

    def __init__(
        self,
        book: RayBook,
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
        self._thread = BackgroundThread(self._keep, name="membership")
        self._thread.start()

    def close(self) -> None:
        """Remove the server from the book. May be called again."""
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
        """Call the book, and only log a failure.

        A server must not stop for lack of the book, and a later call retries.
        """
        try:
            call()
        except Exception as error:  # Ray raises many kinds of its own
            if self._told:
                log.warning("the address book does not answer: %s", error)
            self._told = False
        else:
            self._told = True
