"""Start a server with two tenants, and provide the means to attack it and to check the outcome."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch

from tests.pipeline.making import encoded, npy, pixels, write
from tests.server.conftest import MICRO_BATCH, images, make_program
from tests.server.running import Running, body_of
from upriver.errors import UpriverError
from upriver.pipeline import CenterCrop, Dataset, Decode, LoadTensor, Normalize, Resize, index
from upriver.program.graph.executor import Program
from upriver.protocol import DatasetRef, End, RunRequest, program_head, read_frame
from upriver.server.http.errors import STATUS
from upriver.types import MicroBatch

PIXELS = 1_000_000
"""Pixels that the operator of this server allows; stages allow 67 times as many."""

BODY_BYTES = 8 << 20

BUDGET_BYTES = 2 << 30
"""Memory for requests and programs: enough for all valid requests, on any machine."""

PATIENCE_S = 60.0
"""Seconds for one answer; the longest takes a second or two."""

STATUS_OF = {kind.code: status for kind, status in STATUS} | {"error": 500}

CONFIG = """
port = 0
workers = 2
threads = 1
memory_budget_bytes = {budget}

[stores.shared]
uri = "{shared}"

[stores.private]
uri = "{private}"

[tenants.alice]
token_hashes = ["{alice}"]

[tenants.alice.stores]
shared = ["alice/", "bombs/", "lies/"]

[tenants.bob]
token_hashes = ["{bob}"]

[tenants.bob.stores]
shared = ["bob/"]
private = [""]

[caps]
body_bytes = {body_bytes}
pixels = {pixels}
"""


# --------------------------------------------------------------------------------------------- stored data


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *more: bytes, packed: bytes = b"") -> bytes:
    """Return a PNG of 8 bits grey that claims this size, whatever it holds."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    end = chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + end


def zeros_packed(nbytes: int) -> bytes:
    """Return ``nbytes`` zeros, compressed to a thousandth of their size."""
    packer, piece = zlib.compressobj(9), bytes(1 << 20)
    parts = [packer.compress(piece) for _ in range(nbytes >> 20)]
    return b"".join([*parts, packer.flush()])


def bombs() -> dict[str, bytes]:
    """Return images that are small as files."""
    text = chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(1_000_000)))
    return {
        "huge.png": png(50_000, 50_000, packed=zeros_packed(256 << 20)),
        "long.png": png(1, 1 << 24, packed=zeros_packed(16 << 20)),
        "swelling.png": png(50_000, 50_000, *[text] * 60),
        "hidden.png": png(4, 4, chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0))),
        "large.png": encoded(np.zeros((1001, 1000, 3), dtype=np.uint8), "PNG"),
        "fine.png": encoded(pixels(20, 24), "PNG"),
    }


def lying_arrays() -> dict[str, bytes]:
    """Return ``.npy`` files whose headers claim more than they hold."""
    good = npy(np.zeros((4, 4), dtype=np.float32))
    lies = {"many": b"(4,1099511627776)", "deep": b"(" + b"1," * 60 + b")", "minus": b"(-1,-4)"}
    files = {f"{name}.npy": good.replace(b"(4, 4)", shape) for name, shape in lies.items()}
    return {**files, "short.npy": good[:-8], "fine.npy": good}


@dataclass(frozen=True)
class Stored:
    """Two tenants' data in one store, one tenant's in another, and objects that should not be there."""

    alice: Dataset
    bob: Dataset
    private: Dataset
    bombs: Dataset
    lies: Dataset


def make_stored(root: Path) -> Stored:
    """Write and publish all data."""
    shared, private = root / "shared", root / "private"
    stages = [Decode(), Resize(18), CenterCrop(16), Normalize()]
    files = {f"{who}/{name}": data for who in ("alice", "bob") for name, data in images(6).items()}
    files |= {f"bombs/all/{name}": data for name, data in bombs().items()}
    files |= {f"lies/all/{name}": data for name, data in lying_arrays().items()}
    uri = write(shared, files)
    found = Stored(
        alice=index(uri, "alice", stages=stages),
        bob=index(uri, "bob", stages=stages),
        private=index(write(private, images(4)), stages=stages),
        bombs=index(uri, "bombs", stages=stages),
        lies=index(uri, "lies", stages=[LoadTensor()]),
    )
    for dataset in (found.alice, found.bob, found.private, found.bombs, found.lies):
        dataset.publish()
    return found


# --------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class Reply:
    """Answer of the server; an error frame counts as the HTTP status of its code."""

    status: int
    code: str
    message: str = ""


@dataclass(frozen=True)
class Target:
    """Server to attack.

    Attributes:
        tokens: Token of each tenant.
        trap: A listening socket that no request has a reason to connect to.
        program: Alice's, uploaded.
        wanted: The answer to a valid request of hers.
        processes: Front and workers, as they were at the start.
    """

    server: Running
    stored: Stored
    tokens: Mapping[str, str]
    trap: socket.socket
    program: Program
    wanted: Sequence[MicroBatch]
    processes: frozenset[int]

    @property
    def trap_address(self) -> str:
        """Return ``host:port`` of the trap."""
        host, port = self.trap.getsockname()
        return f"{host}:{port}"

    def headers(self, who: str | None) -> dict[str, str]:
        """Return headers with a tenant's token, or none."""
        return {} if who is None else {"Authorization": f"Bearer {self.tokens[who]}"}

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        who: str | None = "alice",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one whole request."""
        connection = http.client.HTTPConnection(self.server.address, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body=body, headers=headers or self.headers(who))
            response = connection.getresponse()
            return reply(response.status, response.read())
        finally:
            connection.close()

    def run(self, body: bytes, *, who: str | None = "alice") -> Reply:
        """Send one run request."""
        return self.ask("POST", "/v1/run", body, who=who)

    def put(self, graph: bytes, weights: bytes, *, who: str = "alice") -> Reply:
        """Upload under the graph's own digest, so that the server reads the graph."""
        body = program_head(len(graph)) + graph + weights
        return self.ask("PUT", f"/v1/programs/{hashlib.sha256(graph).hexdigest()}", body, who=who)

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """Open a bare connection."""
        host, _, port = self.server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            yield connection

    def head(self, method: str, path: str, *lines: str) -> bytes:
        """Return request line and headers, with Alice's token."""
        token = self.headers("alice")["Authorization"]
        told = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.server.address}",
            f"Authorization: {token}",
            *lines,
        ]
        return "\r\n".join([*told, "", ""]).encode()

    # ----------------------------------------------------------------------------------- what came of it

    def running(self) -> frozenset[int]:
        """Return the current front and workers."""
        return frozenset(each.pid for each in family(self.server.process.pid))

    def memory(self) -> int:
        """Return the bytes of front and workers together; shared memory counts once."""
        return sum(map(pss, self.processes))

    def outward(self) -> list[str]:
        """Return the connections that none of our requests began."""
        port = int(self.server.address.rpartition(":")[2])
        found = []
        for pid in self.processes:
            with suppress(psutil.Error):
                found += [
                    str(each)
                    for each in psutil.Process(pid).net_connections(kind="inet")
                    if each.laddr and each.laddr.port != port
                ]
        with suppress(BlockingIOError):
            found.append(f"at the trap: {self.trap.accept()}")
        return found


def reply(status: int, body: bytes) -> Reply:
    """Turn an HTTP answer into a reply."""
    if status != 200 or body[:4] != b"UPRV":
        error = json.loads(body).get("error", {}) if status >= 400 and body else {}
        return Reply(status, error.get("code", ""), error.get("message", ""))
    stream = io.BytesIO(body)
    while True:
        message = read_frame(stream)
        if isinstance(message, UpriverError):
            return Reply(STATUS_OF[message.code], message.code, str(message))
        if isinstance(message, End):
            return Reply(200, "")


def first_reply(connection: socket.socket) -> Reply:
    """Read the answer on a bare connection, as much as is needed."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return reply(response.status, response.read())


def send_until_answered(connection: socket.socket, parts: Iterator[bytes], most: int) -> int:
    """Send until the other side answers or accepts no more; return the number of bytes sent."""
    sent = 0
    with suppress(ConnectionError):
        for part in parts:
            if sent > most or select.select([connection], [], [], 0)[0]:
                break
            connection.sendall(part)
            sent += len(part)
    return sent


def good_request(stored: Stored, program: Program) -> RunRequest:
    """Return a valid request of Alice's."""
    return RunRequest(
        micro_batches=((0, 1, 2), (4,)),
        start=stored.alice.chain.start,
        stop=2,
        micro_batch=MICRO_BATCH,
        dataset=DatasetRef(store="shared", digest=stored.alice.digest),
        program=program.digest,
    )


def good_answer(server: Running, token: str, request: RunRequest) -> list[MicroBatch]:
    """Return the answer to a valid request."""
    connection = http.client.HTTPConnection(server.address, timeout=PATIENCE_S)
    try:
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/v1/run", body=body_of(request), headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        found = []
        while not isinstance(message := read_frame(response), End):
            if isinstance(message, UpriverError):
                raise message
            if isinstance(message, MicroBatch):
                found.append(message)
        return found
    finally:
        connection.close()


@contextlib.contextmanager
def targeted(root: Path) -> Iterator[Target]:
    """Start the server and the stores; remove everything afterwards."""
    stored, program = make_stored(root), make_program(0)
    tokens = {who: secrets.token_urlsafe(32) for who in ("alice", "bob")}
    hashes = {who: hashlib.sha256(token.encode()).hexdigest() for who, token in tokens.items()}
    config = root / "server.toml"
    places = {"shared": (root / "shared").as_uri(), "private": (root / "private").as_uri()}
    limits = {"body_bytes": BODY_BYTES, "pixels": PIXELS, "budget": BUDGET_BYTES}
    config.write_text(CONFIG.format(**places, **hashes, **limits))
    command = [sys.executable, "-m", "upriver", "serve", "--config", str(config)]
    environment = {name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        socket.create_server(("127.0.0.1", 0)) as trap,
    ):
        try:
            assert process.stdout is not None
            server = Running(process, json.loads(process.stdout.readline())["listening"]).wait_ready()
            assert urlsplit(server.url).scheme == "http"
            trap.setblocking(False)
            yield prepared(server, stored, tokens, trap, program)
        finally:
            process.kill()


def prepared(
    server: Running, stored: Stored, tokens: Mapping[str, str], trap: socket.socket, program: Program
) -> Target:
    """Return the server with Alice's program, all workers ready."""
    bare = Target(server, stored, tokens, trap, program, (), frozenset())
    assert bare.put(program.graph_bytes, bytes(program.weights_bytes)).status == 201
    for _ in range(4):  # both workers have loaded it then
        wanted = good_answer(server, tokens["alice"], good_request(stored, program))
    return Target(server, stored, tokens, trap, program, wanted, bare.running())


def assert_unharmed(target: Target) -> None:
    """Assert that the server is ready, with the same processes, and gives the same bytes as before."""
    assert target.ask("GET", "/readyz", who=None).status == 200
    answer = good_answer(target.server, target.tokens["alice"], good_request(target.stored, target.program))
    assert [batch.ids for batch in answer] == [batch.ids for batch in target.wanted]
    for got, wanted in zip(answer, target.wanted, strict=True):
        assert all(map(torch.equal, got.tensors, wanted.tensors))
    assert target.running() == target.processes


# ------------------------------------------------------------------------------------------------- memory


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    front = psutil.Process(pid)
    return [front, *front.children(recursive=True)]


def pss(pid: int) -> int:
    """Return the bytes that a process has in memory, with shared memory divided among its users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Peaks:
    """Peak memory of some processes since this was made; None where the kernel hides it."""

    def __init__(self, pids: frozenset[int]) -> None:
        self._before: dict[int, int] | None = {}
        for pid in pids:
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:  # not permitted here, or not in this kernel
                self._before = None
                return
            self._before[pid] = status_bytes(pid, "VmRSS")

    def grew(self) -> int | None:
        """Return by how much all of them together grew at their peaks."""
        if self._before is None:
            return None
        return sum(max(0, status_bytes(pid, "VmHWM") - was) for pid, was in self._before.items())


def status_bytes(pid: int, name: str) -> int:
    """Return one of the sizes in a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
