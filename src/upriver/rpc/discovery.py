"""Servers that come and go: their addresses are asked of a directory, again and again, while a job runs.

A directory (``upriver serve --engine ray`` keeps one) answers ``GET /upriver/servers`` with addresses. It is
control only: a job streams straight from the servers, and where the directory falls silent, it goes on with
those that it knows.

A server that is named for the first time joins at once. One that is named no more stays for as long as an
address is good for (its lease), counted from the first answer without it: a directory that has just been
restarted, after whatever silence, knows nobody, and whether a server really is gone the pool sees better by
itself.
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

from upriver.errors import ConfigError, Overloaded, ProtocolError, ServerUnavailable, UpriverError
from upriver.rpc.http import BROKEN, Address, Holder, Timeouts, error_of, within
from upriver.rpc.server_pool import Transport
from upriver.text import said
from upriver.types import require_finite

log = logging.getLogger("upriver")

SCHEMES = {"ray+http": "http", "ray+https": "https"}
"""How the address of a directory differs from a server's, and what is spoken there."""

LISTING_PATH = "/upriver/servers"
"""Where a directory answers, behind whatever path its address has."""

LISTING_BYTES = 1 << 20
"""Longest answer read: a server takes some 60 bytes in it, and there are dozens."""

MAX_SERVERS = 256
"""Most servers that one job uses: each has a thread here and connections there, and a directory that names
more is broken, or not ours."""

POLL_S = 2.0
"""Between two questions: a new server takes 20 s to start, and an answer comes from memory."""

FIRST_S = 60.0
"""How long a job that begins waits for the first server: about as long as one takes to start on a busy
machine."""


class Listed(msgspec.Struct, frozen=True):
    """One server, as a directory names it.

    Attributes:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        since: When it began to serve, in seconds since 1970.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    since: float = 0.0


class Listing(msgspec.Struct, frozen=True):
    """A directory's answer; what else is in it is for later versions.

    Attributes:
        servers: All that it knows.
        version: Of the software there.
        lease_s: How long a server that is named no more may still be taken for one that serves.
    """

    servers: Annotated[tuple[Listed, ...], msgspec.Meta(max_length=MAX_SERVERS)]
    version: str = ""
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0


def is_directory(url: str) -> bool:
    """Whether an address is that of a directory, not of a server."""
    return url.partition("://")[0] in SCHEMES


class DirectoryClient:
    """Asks a directory; keeps no connection, since it asks seldom.

    Args:
        url: ``ray+http://HOST:PORT`` or ``ray+https://HOST:PORT``; plain ``http`` and ``https`` will do.
        tls: For https; the system's certificates if None.
        timeouts: For connecting and answering.

    Raises:
        ConfigError: If the address is none.
    """

    def __init__(
        self, url: str, *, tls: ssl.SSLContext | None = None, timeouts: Timeouts | None = None
    ) -> None:
        self.url = url
        self._timeouts = timeouts or Timeouts()
        scheme, separator, rest = url.partition("://")
        self._address = Address.parse(SCHEMES.get(scheme, scheme) + separator + rest, tls)
        self._unused_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's certificates take 20 ms
        path = self._address.path
        self._path = path if path.endswith(LISTING_PATH) else path + LISTING_PATH

    def __repr__(self) -> str:
        return f"Directory({self.url!r})"

    def listing(self) -> Listing:
        """What it says now, less servers whose address is none, or less private than the directory's.

        Raises:
            ServerUnavailable: If it cannot be reached, or says nothing in time.
            Overloaded: If it cannot tell just now.
            ProtocolError: If the answer is none.
        """
        holder = Holder()
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
        """The first answer that names a server.

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
        """Whether a job's token may go there: in the clear only where the directory itself was asked so."""
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
    """What one answer of a directory changes.

    Attributes:
        joined: Addresses that are new.
        gone: Addresses that no answer has named for longer than their lease.
    """

    joined: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class Roll:
    """Who is in, by a directory's answers and the clock; no threads, no sockets.

    Args:
        urls: Who is in already.
    """

    def __init__(self, urls: Collection[str] = ()) -> None:
        # To the time of the first answer that left them out; None where the last one names them.
        self._missed_s: dict[str, float | None] = dict.fromkeys(map(_plain, urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Who is in, in the order in which they came."""
        return tuple(self._missed_s)

    def heard(self, listing: Listing, now_s: float) -> Changes:
        """Take an answer in; silence changes nothing, so there is no method for it."""
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
    """As clients write it, without a slash at its end."""
    return url.rstrip("/")


class Members(Protocol):
    """What a `Following` needs of a pool of servers."""

    def add(self, client: Transport) -> None:
        """Let one more server in, once it has passed what all have to pass; the pool closes its client."""

    def drop(self, url: str) -> None:
        """Give a server no more requests; those under way may finish. Unknown ones are ignored."""


class Following:
    """Keeps a pool in step with a directory, in a thread, until it is closed. Close it before the pool.

    Args:
        directory: Asked every ``poll_s``.
        members: Told who comes and goes.
        client: Makes a client for an address.
        urls: Who is in the pool already.
        poll_s: Between two questions.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        members: Members,
        client: Callable[[str], Transport],
        *,
        urls: Sequence[str],
        poll_s: float = POLL_S,
    ) -> None:
        require_finite("poll_s", poll_s, positive=True)
        self._directory, self._members, self._client = directory, members, client
        self._poll_s = poll_s
        self._roll = Roll(urls)
        self._closed = threading.Event()
        self._silent = False
        self._thread = threading.Thread(target=self._follow, name="upriver-following", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following; waits for the question under way. May be called again, from any thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Following:
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
