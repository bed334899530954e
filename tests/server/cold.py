"""Share parts of tests of cold programs: a network of some MiB, a gated store, a server in this process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.server.running import Running, wait_for
from tests.store.gated_server import GatedServer
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.load_program import find, publish
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program
from upriver.protocol import RunRequest
from upriver.server import Server, ServerConfig
from upriver.server.programs.streaming_weights import ColdFile
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import MicroBatch

ROWS, WIDTH, LAYERS = 2, 512, 8
LAYER_BYTES = WIDTH * WIDTH * 4
OPTIONS = {"access_key_id": "a", "secret_access_key": "b"}


class Wide(nn.Module):
    """Network of layers of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to `x` of shape `(rows, WIDTH)`."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@functools.cache
def wide(seed: int = 0, rows: int = ROWS) -> Program:
    torch.manual_seed(seed)
    return capture(Wide().eval(), (torch.randn(rows, WIDTH),), granularity="op")


def given_rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def request(program: Program, stop: int | None = None, start: int = 0) -> RunRequest:
    return RunRequest(
        micro_batches=((0, 1),),
        start=start,
        stop=program.num_stages if stop is None else stop,
        micro_batch=ROWS,
        program=program.digest,
    )


def here(program: Program, stop: int | None = None, start: int = 0) -> tuple[torch.Tensor, ...]:
    given = program.run([given_rows()], 0, start) if start else (given_rows(),)
    return program.run(given, start, program.num_stages if stop is None else stop)


def sent(program: Program, start: int = 0) -> list[MicroBatch]:
    tensors = program.run([given_rows()], 0, start) if start else (given_rows(),)
    return [MicroBatch(ids=(0, 1), position=start, tensors=tuple(tensors))]


@dataclass
class Place:
    uri: str
    options: dict[str, str] = field(default_factory=dict)


class Served(Running):
    """Server in this process, with its workers in their own processes."""

    def __init__(self, server: Server) -> None:
        super().__init__(None, f"http://127.0.0.1:{server.socket.getsockname()[1]}")
        self.front = server._front

    @property
    def programs(self) -> Any:
        return self.units[0].programs

    @property
    def units(self) -> list[Any]:
        return list(self.front.units)

    def busy(self) -> list[int]:
        return [row.pid for unit in self.units for row in unit.pool.rows() if row.state == "busy"]

    def is_whole(self, program: Program) -> bool:
        files = self.units[0].program_cache.files(f"anyone/{program.digest}")
        return files is not None and files.cold is None


@contextmanager
def serving(where: GatedServer | Place, **settings: Any) -> Iterator[Served]:
    s3 = isinstance(where, GatedServer)
    place = Place("s3://bucket/data", {"endpoint": where.url, **OPTIONS}) if s3 else where
    config = ServerConfig(stores={"default": place}, port=0, grace_s=0, threads=1, sandbox="none", **settings)
    server = Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server.socket]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Served(server).wait_ready()
    finally:
        server.should_exit = True
        thread.join()
        server.socket.close()


def store_of(s3: GatedServer) -> Store:
    return Store.open("s3://bucket/data", name="default", options={"endpoint": s3.url, **OPTIONS})


def published(s3: GatedServer, program: Program) -> Store:
    store = store_of(s3)
    publish(program, store)
    with s3.lock:
        s3.requests.clear()
    return store


def same(batches: list[MicroBatch], wanted: tuple[torch.Tensor, ...]) -> bool:
    (batch,) = batches
    return len(batch.tensors) == len(wanted) and all(map(torch.equal, batch.tensors, wanted))


def cold_file(store: Store, program: Program, limits: StreamLimits, forged: list[int]) -> ColdFile:
    with ThreadPoolExecutor(1) as beside:
        found = find(
            store, DEFAULT_PREFIX, program.digest, program.weights_digest, limits=limits, beside=beside
        )
    assert found is not None
    return ColdFile(found, program.weights_digest, limits, device="cpu", on_forged=lambda: forged.append(1))
