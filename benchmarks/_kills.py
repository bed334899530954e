"""Two near-data servers that are killed and started again, as a supervisor would start them."""

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

from _leftovers import Seen, alive, is_open, workers_of

READY_LIMIT_S = 180.0
"""Front and worker import torch one after the other: 2 s each, or 20 on a busy machine."""

STOP_LIMIT_S = 60.0
"""After SIGTERM a server is gone within 30 s."""

GONE_LIMIT_S = 30.0
"""Processes that were told to end, or killed, are gone long before."""

PROBE_LIMIT_S = 5.0
POLL_S = 0.02

PORTS = range(20000, 30000)
"""Below those that the kernel gives to outgoing connections: one of these might lie where a server that is
started again is to listen."""

TOKEN_VARIABLE = "UPRIVER_TOKEN"
TAIL_BYTES = 2000
"""Of a server's log, for an error."""

Kind = Literal["front", "worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is to be killed.

    Attributes:
        server: Which of the servers.
        kind: Its front, or one of its workers' processes.
    """

    server: int
    kind: Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A process that was killed.

    Attributes:
        at: When, by the monotonic clock.
        target: What it was; a front where there was no worker to kill.
        pid: Its number.
    """

    at: float
    target: Target
    pid: int


class NotWell(Exception):
    """A server is not as it should be; the text says how, with the end of its log."""


def drawn(rng: random.Random, count: int, *, servers: int = 2) -> list[Target]:
    """What to kill, in a random order: fronts and workers of each at least once, the rest by chance."""
    every = [Target(server=server, kind=kind) for server in range(servers) for kind in ("front", "worker")]
    targets = rng.sample(every, min(count, len(every)))
    targets += rng.choices(every, k=count - len(targets))
    rng.shuffle(targets)
    return targets


class Supervised:
    """A near-data server that is started again, on the same port, whenever it is killed.

    Args:
        store: URI of what it serves.
        port: Of loopback.
        log: File that it writes to.
        seen: Told of its processes.

    Attributes:
        ended: Exit codes of its fronts, in order; one that is negative is a signal's number.
    """

    def __init__(self, store: str, *, port: int, log: Path, seen: Seen) -> None:
        self.port = port
        self.ended: list[int] = []
        self._store, self._log, self._seen = store, log, seen
        self._stopping = False
        self._lock = threading.Lock()
        # It ends at the end of this pipe: when this process does, however that happens.
        self._theirs, self._ours = os.pipe()
        self._process, self._front = self._start()
        self._thread = threading.Thread(target=self._supervise, name=f"supervisor-{port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_tail(self) -> str:
        """The end of what it wrote."""
        return self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def is_ready(self) -> bool:
        """Whether it has a worker, and takes requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROBE_LIMIT_S)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until it takes requests.

        Raises:
            NotWell: If it does not in time, or has ended by itself.
        """
        until = time.monotonic() + READY_LIMIT_S
        while not self.is_ready():
            self._check()
            if time.monotonic() >= until:
                raise NotWell(f"{self.url} is not ready in time:\n{self.log_tail}")
            time.sleep(POLL_S)
        self._seen.look(self._front)

    def kill(self, kind: Kind, rng: random.Random, *, patience_s: float) -> tuple[Kind, int]:
        """Kill one of its processes; what it was, and its number.

        Args:
            kind: Its front, or any of the processes of a worker.
            rng: Chooses among several.
            patience_s: How long a worker is waited for where there is none; then it is the front's turn.

        Raises:
            NotWell: If it has ended by itself.
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
                continue  # it was faster
            return ("front" if victim is front else "worker"), victim.pid

    def stop(self) -> int:
        """Tell it to end, and wait; its exit code.

        Raises:
            NotWell: If it does not end in time.
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
        """End it, whatever it is at. May be called again."""
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
        """Whether it is there, or will be again.

        Raises:
            NotWell: If it has ended by itself.
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
        return process, psutil.Process(process.pid)  # which knows it from another one of that number

    def _supervise(self) -> None:
        """Start it again when it was killed; one that ends by itself is left as it is, to be noticed."""
        while True:
            code = self._process.wait()
            with self._lock:
                self.ended.append(code)
                if self._stopping or code != -signal.SIGKILL:
                    return
                self._process, self._front = self._start()


class Servers:
    """Some servers of one store; use it as a context manager.

    Args:
        store: Its URI.
        folder: For their logs.
        count: How many.

    Attributes:
        seen: What was seen of them.
        kills: What was killed so far.
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
        """Where they listen."""
        return [server.url for server in self._servers]

    @property
    def ports(self) -> list[int]:
        """Of loopback."""
        return [server.port for server in self._servers]

    @property
    def ended(self) -> list[int]:
        """Exit codes of all fronts that have ended, server by server."""
        return [code for server in self._servers for code in server.ended]

    def wait_ready(self) -> None:
        """Wait until all take requests; their control groups are noted, too.

        Raises:
            NotWell: If one does not in time.
        """
        for server in self._servers:
            server.wait_ready()
        self.seen.look_for_groups()

    def kill(self, target: Target, rng: random.Random, *, patience_s: float = 0.0) -> Kill:
        """Kill one process; see `Supervised.kill`."""
        kind, pid = self._servers[target.server].kill(target.kind, rng, patience_s=patience_s)
        kill = Kill(at=time.monotonic(), target=Target(server=target.server, kind=kind), pid=pid)
        self.kills.append(kill)
        return kill

    def stop(self) -> list[int]:
        """End all of them as an operator would; their exit codes."""
        return [server.stop() for server in self._servers]

    def left(self) -> dict[str, list[str]]:
        """What is left of them once they have ended, by kind."""
        return self.seen.left_after(GONE_LIMIT_S, self.ports)

    def close(self) -> None:
        """End all of them, whatever they are at."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Killer:
    """Kills one process after the other, by the clock, from `begin` on; a context manager, which ends it.

    Args:
        targets: What to kill, in order.
        every_s: Seconds from one to the next.
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
        """The first one is killed after as long as lies between two."""
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
    """Ports of loopback at which nobody listens."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == count:
            break
        if not is_open(port):
            ports.append(port)
    return ports
