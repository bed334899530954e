"""Measure what unknown clients and tenants that only view pages cost another tenant's request.

The cost is a server's time, log and processor. Run with ``python -m benchmarks.strangers``; it prints a line
of JSON for each setting. ``--source SRC`` runs the server of another source tree. A server with one worker
reads four small arrays for each request; its process may have 1,024 descriptors. It takes about a minute.

``--small`` measures instead the processor time of the front for such a request, one and eight at a time, in
turns with the server of ``--source``; it writes ``benchmarks/results/small_requests.md``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.harness.code_version import commit
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.records import Output, command_line
from benchmarks.harness.reports import table
from upriver.pipeline import LoadTensor, index
from upriver.protocol import DatasetRef, RunRequest, encode
from upriver.server.tenants import hash_token

STRANGERS = 3000
FILES = 1024
"""Descriptors that a process may open by default."""

LOOKING = 16
LOOKED_AT = ("/metrics", "/openapi.json", "/ui", "/v1/load", "/v1/probe?bytes=1048576")
SAMPLES = 4
TENANTS = ("working", "looking")
WATCH_S = 5.0
"""Seconds in which each setting is watched."""

TURNS, ASKED_A_TURN = 8, 400
AT_ONCE = (1, 8)


class Server:
    """A server process, and its used resources.

    Args:
        folder: Folder of its store, configuration and log.
        source: Folder of its code; this tree's if None.
    """

    def __init__(self, folder: Path, source: str | None) -> None:
        self.folder, self._log = folder, folder / "log"
        path = folder / "server.toml"
        path.write_text(_settings(folder))
        limited = ["sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh"]
        self._process = subprocess.Popen(
            [*limited, sys.executable, "-m", "upriver", "serve", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            env=os.environ | ({} if source is None else {"PYTHONPATH": source}),
        )
        assert self._process.stdout is not None
        self.address = urlsplit(json.loads(self._process.stdout.readline())["listening"]).netloc

    def used(self) -> tuple[float, int]:
        """Return the processor seconds of the front, and the bytes of the log, so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system, self._log.stat().st_size

    def computed(self) -> tuple[float, float]:
        """Return the processor milliseconds of the front's event loop and its other threads so far."""
        loop = others = 0.0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            took = int((task / "schedstat").read_text().split()[0]) / 1e6
            if int(task.name) == self._process.pid:
                loop = took
            else:
                others += took
        return loop, others

    def end(self) -> None:
        """End the server and its worker."""
        self._process.kill()
        self._process.wait()


def _settings(folder: Path) -> str:
    tenants = "".join(f'[tenants.{name}]\ntoken_hashes = ["{hash_token(name)}"]\n' for name in TENANTS)
    return f'port = 0\nthreads = 1\n[stores.default]\nuri = "{folder.as_uri()}/store"\n{tenants}'


def body_of(folder: Path) -> bytes:
    """Make a store, and return a request for a few of its small samples."""
    store = folder / "store" / "data" / "one"
    store.mkdir(parents=True)
    for number in range(SAMPLES):
        np.save(store / f"{number}.npy", np.full(16, number, dtype=np.float32))
    dataset = index((folder / "store").as_uri(), "data", stages=[LoadTensor("npy")])
    dataset.publish()
    request = RunRequest(
        micro_batches=(tuple(range(SAMPLES)),),
        start=dataset.chain.start,
        stop=0,
        micro_batch=SAMPLES,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    return b"".join(bytes(part) for part in encode(request))


def asked(server: Server, body: bytes, connection: http.client.HTTPConnection | None = None) -> float:
    """Return the milliseconds of a good request, on a new connection if None."""
    began = time.perf_counter()
    found = connection or http.client.HTTPConnection(server.address, timeout=120)
    found.request("POST", "/v1/run", body=body, headers={"Authorization": "Bearer working"})
    response = found.getresponse()
    answer = response.read()
    if response.status != 200 or b"error" in answer:
        raise SystemExit(f"a good request was answered with {response.status}: {answer[:200]!r}")
    if connection is None:
        found.close()
    return 1e3 * (time.perf_counter() - began)


# -------------------------------------------------------------------------------------------- strangers


@contextlib.contextmanager
def strangers(address: str, *, says: bytes) -> Iterator[None]:
    """Hold many connections from another process. A lost one reconnects, once a second at most."""
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(address, says), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _hold(address: str, says: bytes) -> None:
    host, port = address.split(":")
    with selectors.DefaultSelector() as selector:
        lost = STRANGERS
        while True:
            for _ in range(lost):
                _stranger(selector, host, int(port))
            lost = 0
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    lost += _heard(selector, key, says)


def _stranger(selector: selectors.BaseSelector, host: str, port: int) -> None:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex((host, port))
    selector.register(connection, selectors.EVENT_WRITE)


def _heard(selector: selectors.BaseSelector, key: selectors.SelectorKey, says: bytes) -> int:
    """Send the bytes once connected, and listen. Return 1 if the connection is lost."""
    connection = key.fileobj
    assert isinstance(connection, socket.socket)
    try:
        if key.events == selectors.EVENT_WRITE:
            connection.send(says)
            selector.modify(connection, selectors.EVENT_READ)
            return 0
        if connection.recv(1 << 16):
            return 0
    except BlockingIOError:
        return 0
    except OSError:
        pass
    selector.unregister(connection)
    connection.close()
    return 1


ASKING = b"GET /v1/info HTTP/1.1\r\nHost: server\r\n\r\n"
SLOW = b"GET /v1/info HTTP/1.1\r\nHost: ser"


# ---------------------------------------------------------------------------------------------- looking


@contextlib.contextmanager
def looking(address: str, path: str) -> Iterator[list[float]]:
    """Request a page over and over on many connections of another tenant. Yield the times in ms."""
    over, times = threading.Event(), list[float]()

    def look() -> None:
        connection = http.client.HTTPConnection(address, timeout=120)
        while not over.is_set():
            began = time.perf_counter()
            with contextlib.suppress(http.client.HTTPException, OSError):
                connection.request("GET", path, headers={"Authorization": "Bearer looking"})
                response = connection.getresponse()
                response.read()
                times.append(1e3 * (time.perf_counter() - began))
                if response.status in (429, 503):
                    over.wait(float(response.headers["Retry-After"]))

    threads = [threading.Thread(target=look) for _ in range(LOOKING)]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        over.set()
        for thread in threads:
            thread.join()


# ----------------------------------------------------------------------------------------------- measure


def watched(server: Server, body: bytes, *, fresh: bool) -> dict[str, Any]:
    """Send good requests one after another for some seconds. Return them and the server's use meanwhile."""
    seconds, nbytes = server.used()
    until, times = time.monotonic() + WATCH_S, list[float]()
    kept = None if fresh else http.client.HTTPConnection(server.address, timeout=120)
    while not times or time.monotonic() < until:
        times.append(asked(server, body, kept))
        time.sleep(0.02)
    after_s, after_nbytes = server.used()
    return {
        "requests": len(times),
        "median_ms": round(median(times), 1),
        "worst_ms": round(max(times), 1),
        "front_cpu_s": round(after_s - seconds, 2),
        "log_bytes": after_nbytes - nbytes,
    }


def settings(server: Server, body: bytes, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure each setting, and yield the results."""
    if "alone" in only:
        yield {"setting": "alone", **watched(server, body, fresh=True)}
    for name, says in (("idle", b""), ("asking", ASKING), ("slow heads", SLOW)):
        if "strangers" in only:
            with strangers(server.address, says=says):
                yield {"setting": f"{STRANGERS} strangers, {name}", **watched(server, body, fresh=True)}
            time.sleep(1.0)
    for path in LOOKED_AT if "looking" in only else ():
        with looking(server.address, path) as times:
            found = watched(server, body, fresh=False)
        yield {"setting": f"{LOOKING} look at {path}", **found, "looks": len(times)}


# --------------------------------------------------------------------------------------- small requests


def cost(server: Server, body: bytes, at_once: int) -> tuple[float, float]:
    """Return the milliseconds of the front's loop and of its threads for one request, of many."""

    def ask() -> None:
        connection = http.client.HTTPConnection(server.address, timeout=120)
        for _ in range(ASKED_A_TURN // at_once):
            asked(server, body, connection)
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(at_once)]
    before = server.computed()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop, others = ((now - then) / ASKED_A_TURN for now, then in zip(server.computed(), before, strict=True))
    return loop, others


def small(servers: dict[str, Server], body: bytes, turns: int) -> Iterator[dict[str, Any]]:
    """Yield the cost of a small request to each server, in turns."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(turns):
        for at_once in AT_ONCE:
            for name, server in servers.items():
                found.setdefault((name, at_once), []).append(cost(server, body, at_once))
    for (name, at_once), costs in found.items():
        loop, others = zip(*costs, strict=True)
        yield {
            "server": name,
            "at_once": at_once,
            "front_ms": list(map(sum, costs)),
            "loop_ms": list(loop),
            "threads_ms": list(others),
        }


def report(found: Sequence[dict[str, Any]], nbytes: int, turns: int) -> str:
    """Return the results as a page."""
    header = ("server", "requests at a time", "front, ms", "event loop, ms", "other threads, ms")
    rows = [
        (
            each["server"],
            each["at_once"],
            *(Spread.of(each[key]).text() for key in ("front_ms", "loop_ms", "threads_ms")),
        )
        for each in found
    ]
    return f"""# What a small request costs the front

Processor time of the front's process for one run request of {nbytes} bytes that reads {SAMPLES} arrays
of 64 bytes from a file store, with a token, over connections that are kept. Milliseconds: the median and the
range of {turns} turns of {ASKED_A_TURN} requests. Servers take turns, beside whatever else the machine does.
The worker's process is left out.

{table(header, rows)}

- "Before" is the server of the tree that `--source` names. A busy machine makes both dearer: compare
  rows of one run alone.
- Commit {commit()}; {machine()}; {versions("uvicorn", "starlette", "httptools")}.

Run it again: `python -m benchmarks.strangers --small --source SRC`.
"""


def measure_small(folder: Path, source: str | None, turns: int) -> str:
    """Measure this tree's server and another one's. Return the report."""
    body, servers = body_of(folder), dict[str, Server]()
    try:
        for name, src in [("before", source)] * (source is not None) + [("now", None)]:
            (folder / name).mkdir()
            (folder / name / "store").symlink_to(folder / "store")
            servers[name] = Server(folder / name, src)
            for _ in range(50):
                asked(servers[name], body)
        found = list(small(servers, body, turns))
    finally:
        for server in servers.values():
            server.end()
    return report(found, len(body), turns)


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--source", help="src of another tree, whose server is measured")
    parser.add_argument("--only", nargs="*", default=["alone", "strangers", "looking"])
    parser.add_argument("--small", action="store_true", help="measure what a small request costs instead")
    options = parser.parse_args()
    if options.small or options.quick:
        with tempfile.TemporaryDirectory(prefix="upriver-small-") as name:
            turns = 1 if options.quick else TURNS
            Output.of(options, "small_requests").write(measure_small(Path(name), options.source, turns))
        return
    with tempfile.TemporaryDirectory(prefix="upriver-strangers-") as name:
        body = body_of(Path(name))
        server = Server(Path(name), options.source)
        try:
            for _ in range(20):
                asked(server, body)
            for found in settings(server, body, options.only):
                print(json.dumps(found), flush=True)
        finally:
            server.end()


if __name__ == "__main__":
    main()
