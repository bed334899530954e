"""The connections of one client: each request in flight has one of its own, kept for the next one."""

from __future__ import annotations

import threading

from upriver.errors import ServerUnavailable
from upriver.rpc import forking
from upriver.rpc.http import Address, Connection


class Connections:
    """Connections to one address. Thread-safe.

    A child of this process begins without any: two processes that read from one connection would take each
    other's answers.

    Args:
        address: Where they go.

    Attributes:
        idle: Open, and asked for nothing.
        busy: In use.
    """

    def __init__(self, address: Address) -> None:
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()
        self._address, self._closed = address, False
        self._lock = threading.RLock()  # a finalizer may close them in whatever thread, also in here
        forking.tell(self)

    def borrow(self) -> tuple[Connection, bool]:
        """One that nobody uses, and whether it is a new one.

        Raises:
            ServerUnavailable: If they were closed.
        """
        with self._lock:
            idle = self.idle
            fresh = not idle
            connection = self._address.connection() if fresh else idle.pop()
            self.busy.add(connection)
            if self._closed:  # last: it may have happened in the midst of this
                self.busy.discard(connection)
                connection.close()
                raise ServerUnavailable(f"{self._address.url}: this client was closed")
        return connection, fresh

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """It is not in use any more; one that is not ``reusable`` is closed."""
        with self._lock:
            self.busy.discard(connection)
            if reusable and not connection.broken_off and not self._closed:
                self.idle.append(connection)
                return
        connection.close()

    def abort(self) -> None:
        """Break all of them off; there may be new ones."""
        with self._lock:
            busy, idle = list(self.busy), self.idle
            self.idle = []
        for connection in busy:
            connection.break_off()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Abort, and refuse new ones."""
        self._closed = True
        self.abort()

    def forked(self) -> None:
        """In a child: leave those there are to the parent, and begin with none."""
        idle, busy = self.idle, self.busy
        self._lock, self.idle, self.busy = threading.RLock(), [], set()
        for connection in (*idle, *busy):
            connection.leave()
        for connection in idle:
            connection.close()
