"""Run two near-data servers that are killed and restarted, as a supervisor would restart them."""

from __future__ import annotations

import http.client
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from benchmarks.kills.leftovers import Seen, alive, is_open, workers_of

READY_LIMIT_S = 180.0
"""Seconds until a server must be ready. The front and the worker import torch one after the other: 2 s each,
or 20 s on a busy machine."""

STOP_LIMIT_S = 60.0
"""Seconds until a stopped server must have ended. A server ends within 30 s of SIGTERM."""

GONE_LIMIT_S = 30.0
"""Seconds until ended or killed processes must be gone. They are gone long before."""

PROBE_LIMIT_S = 5.0
POLL_S = 0.02

PORTS = range(20000, 30000)
"""Ports below the kernel's range for outgoing connections. An outgoing connection could otherwise occupy the
port of a server that restarts."""

TOKEN_VARIABLE = "UPRIVER_TOKEN"
TAIL_BYTES = 2000
"""Bytes of a server's log that an error quotes."""

Kind = Literal["front", "worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The process to kill.

    Attributes:
        server: Index of the server.
        kind: The server's front, or one process of its workers.
    """

    server: int
    kind: Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A process that was killed.

    Attributes:
        at: Time of the kill, by the monotonic clock.
        target: What was killed: the front where no worker ran.
        pid: Its process id.
    """

    at: float
    target: Target
    pid: int


class NotWell(Exception):
    """Error for a server in an unexpected state. The text describes it and ends with the server's log."""


def drawn(rng: random.Random, count: int, *, servers: int = 2) -> list[Target]:
    """Draw targets in a random order: the front and workers of each server at least once.

    The other targets are drawn by chance.
    """
    every = [Target(server=server, kind=kind) for server in range(servers) for kind in ("front", "worker")]
    targets = rng.sample(every, min(count, len(every)))
    targets += rng.choices(every, k=count - len(targets))
    rng.shuffle(targets)
    return targets


class Supervised:
    """Run a near-data server that is restarted on the same port whenever it is killed.

    Args:
        store: URI of the store that the server reads.
        port: Port on loopback.
        log: File that the server writes to.
        seen: Records the server's processes.

    Attributes:
        ended: Exit codes of the server's fronts, in order. A negative code is the number of a signal.
    """

    def __init__(self, store: str, *, port: int, log: Path, seen: Seen) -> None:
        self.port = port
        self.ended: list[int] = []
        self._store, self._log, self._seen = store, log, seen
        self._stopping = False
        self._lock = threading.Lock()
        # The server ends when this pipe closes, which happens however this process ends.
        self._theirs, self._ours = os.pipe()
        self._process, self._front = self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor-{port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_tail(self) -> str:
        """Return the end of the server's log."""
        return self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def is_ready(self) -> bool:
        """Return whether the server has a worker and accepts requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROBE_LIMIT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until the server accepts requests.

        Raises:
            NotWell: If the server is not ready in time, or ended by itself.
        """
        until = time.monotonic() + READY_LIMIT_S
        while not self.is_ready():
            self._check()
            if time.monotonic() >= until:
                raise NotWell(f"{self.url} is not ready in time:\n{self.log_tail}")
            time.sleep(POLL_S)
        self._seen.look(self._front)

    def kill(self, kind: Kind, rng: random.Random, *, patience_s: float) -> tuple[Kind, int]:
        """Kill one process of the server. Return its kind and process id.

        Args:
            kind: The front, or any process of a worker.
            rng: Chooses among several processes.
            patience_s: Seconds to wait for a worker. If none appears, the front is killed instead.

        Raises:
            NotWell: If the server ended by itself.
        """
        until = time.monotonic() + patience_s
        while True:
            self._check()
            front = self._front
            self._seen.look(front)
            workers = workers_of(front) if kind == "worker" else []
            if workers:
                victim = rng.choice(workers)
            elif (kind == "front" or time.monotonic() >= until) and alive(front):
                victim = front
            else:
                time.sleep(POLL_S)
                continue
            self._seen.processes.add(victim)
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue  # it ended before this check
            return ("front" if victim is front else "worker"), victim.pid

    def stop(self) -> int:
        """Stop the server, wait for its end, and return its exit code.

        Raises:
            NotWell: If the server does not end in time.
        """
        with self._lock:
            self._stopping = True
            process = self._process
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise NotWell(f"{self.url} does not end:\n{self.log_tail}") from None
        self._thread.join()
        return code

    def close(self) -> None:
        """End the server in any state. A second call does nothing."""
        with self._lock:
            self._stopping = True
            process = self._process
        process.kill()
        process.wait()
        self._thread.join()
        for descriptor in (self._theirs, self._ours):
            if descriptor >= 0:
                os.close(descriptor)
        self._theirs = self._ours = -1

    def _check(self) -> None:
        """Check that the server runs or will be restarted.

        Raises:
            NotWell: If the server ended by itself.
        """
        if not self._thread.is_alive():
            raise NotWell(f"{self.url} has ended, its fronts with {self.ended}:\n{self.log_tail}")

    def _start(self) -> tuple[subprocess.Popen[bytes], psutil.Process]:
        command = [sys.executable, "-m", "upriver", "serve", "--store", f"default={self._store}"]
        command += ["--port", str(self.port), "--threads", "1", "--parent-pipe", str(self._theirs)]
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._theirs],
                env=environment,
            )
        self._seen.fronts.add(process.pid)
        return process, psutil.Process(
            process.pid
        )  # which tells the process from another one with the same id

    def _supervise(self) -> None:
        """Restart the server after each kill.

        Leave a server that ended by itself, so that a check notices it.
        """
        while True:
            code = self._process.wait()
            with self._lock:
                self.ended.append(code)
                if self._stopping or code != -signal.SIGKILL:
                    return
                self._process, self._front = self._start()


class Servers:
    """Run several servers of one store, as a context manager.

    Args:
        store: URI of the store.
        folder: Folder for the logs.
        count: Number of servers.

    Attributes:
        seen: The processes and resources of the servers that were seen.
        kills: The processes that were killed so far.
    """

    def __init__(self, store: str, folder: Path, *, count: int = 2) -> None:
        self.seen = Seen()
        self.kills: list[Kill] = []
        self._servers: list[Supervised] = []
        try:
            for number, port in enumerate(free_ports(count)):
                log = folder / f"server{number}.log"
                self._servers.append(Supervised(store, port=port, log=log, seen=self.seen))
        except BaseException:
            self.close()
            raise

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the servers."""
        return [server.url for server in self._servers]

    @property
    def ports(self) -> list[int]:
        """Return the ports of the servers on loopback."""
        return [server.port for server in self._servers]

    @property
    def ended(self) -> list[int]:
        """Return the exit codes of all ended fronts, server by server."""
        return [code for server in self._servers for code in server.ended]

    def wait_ready(self) -> None:
        """Wait until all servers accept requests, and record their control groups.

        Raises:
            NotWell: If a server is not ready in time.
        """
        for server in self._servers:
            server.wait_ready()
        self.seen.look_for_groups()

    def kill(self, target: Target, rng: random.Random, *, patience_s: float = 0.0) -> Kill:
        """Kill one process, as `Supervised.kill` does."""
        kind, pid = self._servers[target.server].kill(target.kind, rng, patience_s=patience_s)
        kill = Kill(at=time.monotonic(), target=Target(server=target.server, kind=kind), pid=pid)
        self.kills.append(kill)
        return kill

    def stop(self) -> list[int]:
        """Stop all servers as an operator would, and return their exit codes."""
        return [server.stop() for server in self._servers]

    def left(self) -> dict[str, list[str]]:
        """Return what the ended servers left behind, by kind."""
        return self.seen.left_after(GONE_LIMIT_S, self.ports)

    def close(self) -> None:
        """End all servers in any state."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Killer:
    """Kill one process after the other at a fixed interval, from `begin` until the context ends.

    Args:
        targets: Targets, in order.
        every_s: Seconds between two kills.
        rng: Chooses among the processes of a worker.
    """

    def __init__(
        self, servers: Servers, targets: Sequence[Target], *, every_s: float, rng: random.Random
    ) -> None:
        self._servers, self._targets, self._every_s, self._rng = servers, targets, every_s, rng
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self.began = 0.0

    def begin(self) -> None:
        """Start the clock. The first kill follows after one interval."""
        self.began = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        try:
            for number, target in enumerate(self._targets, start=1):
                due = self.began + number * self._every_s
                if self._over.wait(max(0.0, due - time.monotonic())):
                    return
                self._servers.kill(target, self._rng)
        except Exception as error:
            self._failure = error

    def __enter__(self) -> Killer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        if not is_open(port):
            ports.append(port)
    return ports
