"""Run the two sides of a benchmark: a server on one core, and a process that loads it on another."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks.harness.children import Failed, Lines, ProcessLost, module_command, paths
from benchmarks.harness.hosts import last_lines
from benchmarks.harness.memory_group import MemoryGroup
from benchmarks.server.load import Done, Order, Question, Stream
from benchmarks.server.readers import Stalled
from upriver.errors import UpriverError
from upriver.protocol import Load
from upriver.rpc.client import ServerClient
from upriver.server.tenants import hash_token

START_LIMIT_S = 120.0
LOAD_LIMIT_S = 600.0
"""Most seconds of an order. The longest orders last two minutes."""

STOP_LIMIT_S = 10.0
LOOK_S = 0.05
GRACE_S = 1
LOG_BYTES = 1 << 16

TOKEN_VARIABLE = "UPRIVER_TOKEN"

Settings = Mapping[str, Any]
"""Keys of a server's TOML file. A mapping becomes a table."""

CORES = tuple(sorted(os.sched_getaffinity(0)))
"""All cores that were available at the start."""

SERVER_CORE, LOAD_CORE = CORES[0], CORES[-1]
"""The first core is the server's. The last one belongs to the processes that load or watch the server."""


def pinned(cores: Collection[int], argv: Sequence[object], *, group: MemoryGroup | None = None) -> list[str]:
    """Return a command that runs on some cores, in a control group from its first moment on."""
    command = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *map(str, argv)]
    if group is None:
        return command
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs"), *command]


def environment() -> dict[str, str]:
    """Return the environment of every process.

    It leaves out the caller's token, and makes threads sleep in waits.
    """
    known = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return {**known, **paths(), "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}


def end(process: subprocess.Popen[Any], *, limit_s: float = STOP_LIMIT_S) -> None:
    """End a process and the group that it leads, with SIGTERM first, and close its pipes."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


# ---------------------------------------------------------------------------------------------- server


class Server:
    """Run ``upriver serve`` from a TOML file on its core. It is ready when the block begins.

    Args:
        uri: URI of its one store, ``default``.
        folder: For its file and its log.
        settings: Further keys of the file.
        tenants: Names, and keys of their tables. Each tenant has a token of its own.
        group: Control group that the server runs in.

    Attributes:
        url: URL of the server.
        tokens: By tenant.
        pid: Process id of the front.
    """

    def __init__(
        self,
        uri: str,
        folder: Path,
        settings: Settings,
        *,
        tenants: Mapping[str, Settings],
        group: MemoryGroup | None = None,
    ) -> None:
        self.tokens = {name: secrets.token_hex(16) for name in tenants}
        self.group = group
        self._tag = secrets.token_hex(4)
        self._folder, self._log = folder, folder / f"{self._tag}.log"
        self._settings = {"threads": 1, "workers": 1, "grace_s": GRACE_S, "port": 0, **settings}
        self._document = {
            **self._settings,
            "stores": {"default": uri},
            "tenants": {
                name: {"token_hashes": [hash_token(self.tokens[name])], **keys}
                for name, keys in tenants.items()
            },
        }
        self.url = ""
        self.pid = 0

    def __enter__(self) -> Server:
        path = self._folder / f"{self._tag}.toml"
        path.write_text(toml(self._document), encoding="utf-8")
        reading, self._alive = os.pipe()  # a server ends when this process does, however this process ends
        argv = [sys.executable, "-m", "upriver", "serve", "--config", path, "--parent-pipe", reading]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    pinned([SERVER_CORE], argv, group=self.group),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(),
                    pass_fds=(reading,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(reading)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        family = self._family()
        end(self._process)
        for process in family:  # workers end with the front; any process that does not is ended here
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=STOP_LIMIT_S)
        os.close(self._alive)

    def _wait_ready(self) -> None:
        try:
            found = json.loads(Lines(self._process).next(START_LIMIT_S))
        except ProcessLost:
            raise Failed(f"the server does not listen{last_lines(self.said())}") from None
        self.url, self.pid = found["listening"], found["pid"]
        self.wait_for_workers()

    def wait_for_workers(self) -> None:
        """Wait until all workers run, including replacements.

        Raises:
            Failed: If a worker does not appear in time.
        """
        until = time.monotonic() + START_LIMIT_S
        while (load := self.load()) is None or len(load.workers) < self._settings["workers"]:
            if time.monotonic() > until or self._process.poll() is not None:
                raise Failed(f"the server's workers do not come{last_lines(self.said())}")
            time.sleep(LOOK_S)

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self._process.pid).children(recursive=True))
        return []

    def client(self, tenant: str | None = None) -> ServerClient:
        """Return a client for a tenant, by default the first one."""
        return ServerClient(self.url, token=self.tokens[tenant or next(iter(self.tokens))])

    def load(self) -> Load | None:
        """Return the server's load report, or None if the server does not answer in time."""
        try:
            with self.client() as client:
                return client.load()
        except UpriverError:
            return None

    def metrics(self) -> Metrics:
        """Return the server's counters.

        Raises:
            Failed: If the server does not answer.
        """
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=START_LIMIT_S)
        try:
            token = next(iter(self.tokens.values()))
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise Failed(f"/metrics answered {response.status}")
            return Metrics(body.decode())
        except (OSError, http.client.HTTPException) as error:  # the server has ended, or hangs
            raise Failed(f"no /metrics: {error!r}{last_lines(self.said())}") from error
        finally:
            connection.close()

    def said(self) -> str:
        """Return the end of the server's log."""
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
        return ""


class Metrics:
    """A server's counters at one moment, from Prometheus' text."""

    def __init__(self, text: str) -> None:
        self._lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    def of(self, name: str, **labels: str) -> float:
        """Return the sum over all series of that name with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        total = 0.0
        for line in self._lines:
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(each in series for each in wanted):
                total += float(value)
        return total

    @property
    def restarts(self) -> int:
        """Return the number of replaced workers, for any reason."""
        return round(self.of("upriver_worker_restarts_total"))


def toml(document: Mapping[str, Any], place: str = "") -> str:
    """Return TOML for text, numbers, lists and tables. A JSON string is a TOML string."""
    plain = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
    lines = [f"[{place}]"] if place and (plain or not document) else []
    lines += [f"{_key(key)} = {json.dumps(value)}" for key, value in plain.items()]
    tables = [
        toml(value, f"{place}.{_key(key)}" if place else _key(key))
        for key, value in document.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join(lines) + "\n" + "".join(tables)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


# ------------------------------------------------------------------------------------------------ load


class Generator:
    """Run the process that puts load on servers, on its core. All runs share it."""

    def __enter__(self) -> Generator:
        self._start()
        return self

    def _start(self) -> None:
        self._process = subprocess.Popen(
            pinned([LOAD_CORE], module_command("server.load")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        self._lines = Lines(self._process)
        try:
            self._answer(START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        end(self._process, limit_s=LOOK_S)  # the process has nothing to finish

    def put(
        self,
        server: Server,
        questions: Mapping[str, Question],
        streams: Iterable[Stream] = (),
        readers: Iterable[Stalled] = (),
        *,
        limit_s: float = LOAD_LIMIT_S,
    ) -> Done:
        """Execute an order.

        Raises:
            Failed: If the order fails or exceeds its time. The next order then goes to a new process.
        """
        if self._process.poll() is not None:
            self.__exit__()  # closes its pipes
            self._start()
        order = Order(
            url=server.url, questions=dict(questions), streams=tuple(streams), readers=tuple(readers)
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed("the process that makes the load has ended") from None
        return self._answer(limit_s, said=server.said)

    def _answer(self, limit_s: float, said: Any = lambda: "") -> Done:
        try:
            done = msgspec.json.decode(self._lines.next(limit_s), type=Done)
        except ProcessLost:
            self.__exit__()  # a late answer to this order is no answer to the next one
            raise Failed(f"no load within {limit_s:g} s{last_lines(said())}") from None
        if done.error:
            raise Failed(f"{done.error}{last_lines(said())}")
        return done
