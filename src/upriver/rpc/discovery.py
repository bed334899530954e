"""Follow servers that come and go, by polling a directory for their addresses while a job runs.

A directory (``upriver serve --engine ray`` runs one) answers ``GET /upriver/servers`` with addresses. It is
used for control only: a job streams straight from the servers. If the directory does not answer, the job
continues with the servers that it knows.

A newly listed server joins at once. A server that is no longer listed stays for the length of its lease,
counted from the first answer without it. A directory that has just restarted lists no servers, and the pool
itself detects lost servers better.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from upriver._threads.background import BackgroundThread
from upriver.errors import ConfigError, Overloaded, ProtocolError, ServerUnavailable, UpriverError
from upriver.rpc.http import BROKEN, Address, ConnectionHolder, Timeouts, error_of, within
from upriver.rpc.server_pool import Transport
from upriver.text import said
from upriver.types import require_finite

log = logging.getLogger("upriver")

SCHEMES = {"ray+http": "http", "ray+https": "https"}
"""URL schemes of directories, and the protocol for each."""

LISTING_PATH = "/upriver/servers"
"""Path of the listing, appended to the path of the directory's address."""

LISTING_BYTES = 1 << 20
"""Longest answer read: a server needs some 60 bytes in it, and there are dozens."""

MAX_SERVERS = 256
"""Most servers that one job uses. Each needs a thread in this process and connections to the server. A
directory that lists more is broken, or not one of upriver's."""

POLL_S = 2.0
"""Seconds between two requests: a new server needs 20 s to start, and an answer comes from memory."""

FIRST_S = 60.0
"""Seconds that a new job waits for the first server: about its start time on a busy machine."""


class Listed(msgspec.Struct, frozen=True):
    """One server in a directory's answer.

    Attributes:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        since: When it began to serve, in seconds since 1970.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    since: float = 0.0


class Listing(msgspec.Struct, frozen=True):
    """A directory's answer; other fields are reserved for later versions.

    Attributes:
        servers: All servers that the directory knows.
        version: Version of the directory's software.
        lease_s: Seconds for which a server that is no longer listed may still count as serving.
    """

    servers: Annotated[tuple[Listed, ...], msgspec.Meta(max_length=MAX_SERVERS)]
    version: str = ""
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


def is_directory(url: str) -> bool:
    """Return whether an address is that of a directory, not of a server."""
    return url.partition("://")[0] in SCHEMES


class DirectoryClient:
    """A client for a directory. It keeps no connection, since its requests are rare.

    Args:
        url: ``ray+http://HOST:PORT`` or ``ray+https://HOST:PORT``; plain ``http`` and ``https`` also work.
        tls: TLS context for https; the system's certificates if None.

    Raises:
        ConfigError: If the address is invalid.
    """

    def __init__(
        self, url: str, *, tls: ssl.SSLContext | None = None, timeouts: Timeouts | None = None
    ) -> None:
        self.url = url
        self._timeouts = timeouts or Timeouts()
        scheme, separator, rest = url.partition("://")
        self._address = Address.parse(SCHEMES.get(scheme, scheme) + separator + rest, tls)
        self._unused_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loading certificates takes 20 ms
        path = self._address.path
        self._path = path if path.endswith(LISTING_PATH) else path + LISTING_PATH

    def __repr__(self) -> str:
        return f"Directory({self.url!r})"

    def listing(self) -> Listing:
        """Return the directory's answer, without servers at addresses that are invalid or lack its TLS.

        Raises:
            ServerUnavailable: If it cannot be reached, or does not answer in time.
            Overloaded: If it cannot answer at the moment.
            ProtocolError: If the answer is invalid.
        """
        holder = ConnectionHolder()
        connection = self._address.connection()
        total_s = self._timeouts.question_s
        with within(total_s, holder.close, url=self.url):
            try:
                holder.hold(connection)
                connection.open(self._timeouts, total_s)
                response = connection.ask("GET", self._path, (), {"Accept": "application/json"})
                found = self._read(response)
            except BROKEN as error:
                raise ServerUnavailable(f"{self.url}: {error or type(error).__name__}") from error
            finally:
                holder.release()
                connection.close()
        servers = tuple(server for server in found.servers if self._may_use(server.url))
        return msgspec.structs.replace(found, servers=servers)

    def wait(self, timeout_s: float = FIRST_S) -> Listing:
        """Return the first answer that lists a server.

        Raises:
            ServerUnavailable: If none does in time.
        """
        deadline = time.monotonic() + timeout_s
        why = "names no server"
        while True:
            try:
                found = self.listing()
                if found.servers:
                    return found
                why = "names no server"
            except (ServerUnavailable, Overloaded) as error:
                why = str(error)
            if time.monotonic() + POLL_S > deadline:
                raise ServerUnavailable(f"the directory {self.url} named no server in time: {why}")
            time.sleep(POLL_S)

    def _read(self, response: http.client.HTTPResponse) -> Listing:
        if response.status != 200:
            raise error_of(response, self.url)
        body = response.read(LISTING_BYTES + 1)
        if len(body) > LISTING_BYTES:
            raise ProtocolError(f"{self.url} answered more than {LISTING_BYTES} bytes")
        try:
            return msgspec.json.decode(body, type=Listing)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.url} is no directory of servers: {said(str(error))}") from None

    def _may_use(self, url: str) -> bool:
        """Return whether a job's token may go to this address: without TLS only if the directory has none."""
        try:
            secure = Address.parse(url, self._unused_tls).tls is not None
        except ConfigError:
            log.warning("%s names a server whose address is none: %s", self.url, said(url, 100))
            return False
        if self._address.tls is not None and not secure:
            log.warning("%s names a server without TLS, which is left out: %s", self.url, said(url, 100))
            return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The changes in one answer of a directory.

    Attributes:
        joined: Addresses that are new.
        gone: Addresses that no answer has listed for longer than their lease.
    """

    joined: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class ServerRoll:
    """Track the listed servers, from a directory's answers and the clock; no threads, no sockets.

    Args:
        urls: Addresses that are listed already.
    """

    def __init__(self, urls: Collection[str] = ()) -> None:
        # Time of the first answer without each address; None if the last answer lists it.
        self._missed_s: dict[str, float | None] = dict.fromkeys(map(_plain, urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the listed servers, in the order in which they joined."""
        return tuple(self._missed_s)

    def heard(self, listing: Listing, now_s: float) -> Changes:
        """Update the roll with an answer and return the changes; a missing answer changes nothing."""
        named = tuple(dict.fromkeys(_plain(server.url) for server in listing.servers))
        joined = tuple(url for url in named if url not in self._missed_s)
        missed_s = {url: now_s if at_s is None else at_s for url, at_s in self._missed_s.items()}
        gone = tuple(
            url for url, at_s in missed_s.items() if url not in named and now_s - at_s > listing.lease_s
        )
        self._missed_s = {**missed_s, **dict.fromkeys(named)}
        for url in gone:
            del self._missed_s[url]
        return Changes(joined=joined, gone=gone)


def _plain(url: str) -> str:
    """Return the address as clients write it, without a trailing slash."""
    return url.rstrip("/")


class PoolMembers(Protocol):
    """The pool interface that a `DirectoryFollower` needs."""

    def add(self, client: Transport) -> None:
        """Add one more server, used once it is admitted; the pool closes its client."""

    def drop(self, url: str) -> None:
        """Send a server no more requests; those in flight may finish. Unknown addresses are ignored."""


class DirectoryFollower:
    """Keep a pool in step with a directory, in a thread. Close it before the pool.

    Args:
        directory: The directory, polled every ``poll_s``.
        members: The pool, told of each server that joins or leaves.
        client: Returns a client for an address.
        urls: Addresses that are in the pool already.
        poll_s: Seconds between two requests.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        members: PoolMembers,
        client: Callable[[str], Transport],
        *,
        urls: Sequence[str],
        poll_s: float = POLL_S,
    ) -> None:
        require_finite("poll_s", poll_s, positive=True)
        self._directory, self._members, self._client = directory, members, client
        self._poll_s = poll_s
        self._roll = ServerRoll(urls)
        self._closed = threading.Event()
        self._silent = False
        self._thread = BackgroundThread(self._follow, name="following")
        self._thread.start()

    def close(self) -> None:
        """Stop following, and wait for a running request. Idempotent; any thread may call this."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> DirectoryFollower:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _follow(self) -> None:
        while not self._closed.wait(self._poll_s):
            listing = self._ask()
            if listing is not None and not self._closed.is_set():
                self._apply(self._roll.heard(listing, time.monotonic()))

    def _ask(self) -> Listing | None:
        try:
            listing = self._directory.listing()
        except UpriverError as error:
            if not self._silent:
                log.warning("going on with the servers that are known, the directory does not say: %s", error)
            self._silent = True
            return None
        if self._silent:
            log.info("%s answers again", self._directory.url)
        self._silent = False
        return listing

    def _apply(self, changes: Changes) -> None:
        for url in changes.joined:
            log.info("%s names a new server: %s", self._directory.url, url)
            self._members.add(self._client(url))
        for url in changes.gone:
            log.info("%s no longer names %s", self._directory.url, url)
            self._members.drop(url)
