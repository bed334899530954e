"""Keep the connections of one client: each request in flight has its own, kept for the next one."""

from __future__ import annotations

from upriver._threads.forks import ForkSafeLock, reset_in_child
from upriver.errors import ServerUnavailable
from upriver.rpc.http import Address, Connection


class Connections:
    """Connections to one address. Thread-safe.

    A forked child of this process begins without any: two processes that read from one connection would get
    each other's answers.

    Args:
        address: Address to connect to.

    Attributes:
        idle: Open connections without a request.
        busy: Connections in use.
    """

    def __init__(self, address: Address) -> None:
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()
        self._address, self._closed = address, False
        self._lock = ForkSafeLock()  # reentrant: a finalizer may close them in any thread, even in here
        reset_in_child(self)

    def borrow(self) -> tuple[Connection, bool]:
        """Return an unused connection, and whether it is a new one.

        Raises:
            ServerUnavailable: If the connections were closed.
        """
        with self._lock:
            idle = self.idle
            fresh = not idle
            connection = self._address.connection() if fresh else idle.pop()
            self.busy.add(connection)
            if self._closed:  # checked last: a finalizer may have closed them meanwhile
                self.busy.discard(connection)
                connection.close()
                raise ServerUnavailable(f"{self._address.url}: this client was closed")
        return connection, fresh

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """Return a connection to the pool; close one that is not ``reusable``."""
        with self._lock:
            self.busy.discard(connection)
            if reusable and not connection.broken_off and not self._closed:
                self.idle.append(connection)
                return
        connection.close()

    def abort(self) -> None:
        """Break off all connections; new ones are still allowed."""
        with self._lock:
            busy, idle = list(self.busy), self.idle
            self.idle = []
        for connection in busy:
            connection.break_off()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Abort, and refuse new connections."""
        self._closed = True
        self.abort()

    def forked(self) -> None:
        """Leave the connections to the parent, and begin without any; called in a forked child."""
        idle, busy = self.idle, self.busy
        self.idle, self.busy = [], set()
        for connection in (*idle, *busy):
            connection.leave()
        for connection in idle:
            connection.close()
