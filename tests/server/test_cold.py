"""Programs that a server runs while their weights arrive: real processes, a real store behind a gate."""

from __future__ import annotations

import asyncio
import functools
import http.client
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.server.running import Running, answering, ask, body_of, messages, run, wait_for
from tests.store.gated_server import GatedServer
from upriver.coldstart import layout
from upriver.coldstart.programs import find, publish
from upriver.coldstart.stream import StreamLimits
from upriver.errors import ConfigError, Damaged, ProgramError, UpriverError
from upriver.program import Program, weights_path
from upriver.program.capture import capture
from upriver.protocol import RunRequest, error_from, program_head
from upriver.server import Server, ServerConfig, cold, costs
from upriver.server.cold import ColdFile
from upriver.server.memory import FillingFile, map_privately
from upriver.server.scale import MOST_RUNS, runs_of
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import MicroBatch

ROWS, WIDTH, LAYERS = 2, 512, 8
LAYER_BYTES = WIDTH * WIDTH * 4
OPTIONS = {"access_key_id": "a", "secret_access_key": "b"}


class Wide(nn.Module):
    """Layers of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@functools.cache
def wide(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    return capture(Wide().eval(), (torch.randn(ROWS, WIDTH),), granularity="op")


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
    options: dict[str, str]


class Served(Running):
    """A server in this process, its workers in processes of their own."""

    def __init__(self, server: Server) -> None:
        super().__init__(None, f"http://127.0.0.1:{server.socket.getsockname()[1]}")
        self.front = server._front

    @property
    def units(self) -> list[Any]:
        return list(self.front.units)

    def busy(self) -> list[int]:
        return [row.pid for unit in self.units for row in unit.pool.rows() if row.state == "busy"]

    def is_whole(self, program: Program) -> bool:
        files = self.units[0].shelf.files(f"anyone/{program.digest}")
        return files is not None and files.cold is None


@contextmanager
def serving(s3: GatedServer, **settings: Any) -> Iterator[Served]:
    place = Place("s3://bucket/data", {"endpoint": s3.url, **OPTIONS})
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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that nobody knows is taken to last so long that a worker may begin with the first weight."""
    monkeypatch.setattr(costs, "FIRST_GUESS_S", 1e6)


@pytest.fixture
def s3() -> Iterator[GatedServer]:
    with GatedServer() as s3:
        yield s3


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


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.usefixtures("at_once")
def test_stages_run_while_the_rest_arrives_and_the_answer_is_that_of_the_whole(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(run, server, request(program), sent(program))
        wait_for(server.busy)  # a worker is at the first stages, with the others' weights behind the gate
        assert not answer.done() and not server.is_whole(program)
        s3.open_to(None)
        assert same(answer.result(), here(program))
        wait_for(lambda: server.is_whole(program))
        assert same(run(server, request(program), sent(program)), here(program))
    assert s3.weights_asked() < 1.1 * program.weight_nbytes  # once


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (4, 7)])
def test_only_the_weights_between_the_cuts_are_read(s3: GatedServer, start: int, stop: int) -> None:
    program = wide()
    published(s3, program)
    with serving(s3) as server:
        found = run(server, request(program, stop, start), sent(program, start))
        assert same(found, here(program, stop, start))
        assert s3.weights_asked() < (stop - start + 1) * LAYER_BYTES
        # More of them come when more is asked for, and what is here is not read again.
        assert same(run(server, request(program), sent(program)), here(program))
        assert s3.weights_asked() < 1.1 * program.weight_nbytes


@pytest.mark.usefixtures("at_once")
def test_two_callers_and_a_cut_that_moves(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(2 * LAYER_BYTES)
    cuts = [1, program.num_stages, 5, 2, program.num_stages - 1, 7]
    with serving(s3, workers=2) as server, ThreadPoolExecutor(len(cuts)) as beside:
        answers = [beside.submit(run, server, request(program, cut), sent(program)) for cut in cuts]
        for gate in (3, 5, 7):
            s3.open_to(gate * LAYER_BYTES)
        s3.open_to(None)
        for cut, answer in zip(cuts, answers, strict=True):
            assert same(answer.result(), here(program, cut))


def test_whole_means_that_nothing_runs_before_the_digest_is_right(s3: GatedServer) -> None:
    program = wide()
    store = published(s3, program)
    store.put(layout.manifest_path(weights_path(DEFAULT_PREFIX, program.weights_digest)), b"no manifest")
    with serving(s3, cold_start="whole") as server:
        assert same(run(server, request(program), sent(program)), here(program))
    assert not any("manifest" in path for method, path, _ in s3.requests if method != "PUT")


@pytest.mark.parametrize("manifest", [None, b"no manifest"])
def test_weights_without_a_manifest_of_theirs_are_read_whole(s3: GatedServer, manifest: bytes | None) -> None:
    program = wide()
    store = published(s3, program)
    beside = layout.manifest_path(weights_path(DEFAULT_PREFIX, program.weights_digest))
    store.delete(beside) if manifest is None else store.put(beside, manifest)
    with serving(s3) as server:
        assert same(run(server, request(program), sent(program)), here(program))


# ------------------------------------------------------------------------------------------- faults


def failed(server: Any, asked: RunRequest, batches: list[MicroBatch]) -> tuple[int, UpriverError]:
    """Micro-batches before the error, and the error."""
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        connection.request("POST", "/v1/run", body=body_of(asked, *batches))
        response = connection.getresponse()
        if response.status != 200:
            return 0, error_from(msgspec.json.decode(response.read()))
        *before, error = messages(response)
        assert isinstance(error, UpriverError), error
        return sum(isinstance(each, MicroBatch) for each in before), error
    finally:
        connection.close()


def held(server: Served) -> int:
    return sum(unit.shelf.nbytes for unit in server.units)


def changed(s3: GatedServer, path: str, data: bytes) -> None:
    """Other bytes stand in the store, and the manifest is said to be theirs."""
    beside = layout.manifest_path(path)
    s3.objects[path] = data
    etag = store_of(s3).head(path.removeprefix("bucket/data/")).etag
    manifest = msgspec.json.decode(s3.objects[beside], type=layout.Manifest)
    s3.objects[beside] = msgspec.structs.replace(manifest, etag=etag).encode()


def test_a_damaged_chunk_is_a_typed_error_and_the_next_request_loads_anew(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    (path,) = [path for path in s3.objects if path.endswith(".safetensors")]
    whole = s3.objects[path]
    at = len(whole) // 2
    changed(s3, path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with serving(s3) as server:
        count, error = failed(server, request(program), sent(program))
        assert count == 0
        assert isinstance(error, Damaged), error
        wait_for(lambda: held(server) == 0)
        changed(s3, path, whole)
        assert same(run(server, request(program), sent(program)), here(program))


def test_weights_that_are_others_than_the_graph_names_never_end_an_answer_well(s3: GatedServer) -> None:
    program, other = wide(), wide(7)
    store = published(s3, program)
    path = weights_path(DEFAULT_PREFIX, program.weights_digest)
    layout.publish(
        other.weight_tensors, store, path, tied=False
    )  # in its place, with a manifest that is right
    with serving(s3) as server:
        _, error = failed(server, request(program), sent(program))
        assert isinstance(error, ProgramError)
        assert "digest" in str(error)
        wait_for(lambda: held(server) == 0)
        count, error = failed(server, request(program), sent(program))  # once was enough: nothing runs early
        assert count == 0
        assert isinstance(error, ProgramError)
        layout.publish(program.weight_tensors, store, path, tied=False)
        assert same(run(server, request(program), sent(program)), here(program))


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_dies_while_it_waits_is_replaced(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(run, server, request(program), sent(program))
        (pid,) = wait_for(server.busy)
        psutil.Process(pid).kill()
        wait_for(lambda: server.busy() not in ([], [pid]))
        s3.open_to(None)
        assert same(answer.result(), here(program))


@pytest.mark.usefixtures("at_once")
def test_a_client_that_goes_leaves_a_program_that_others_can_use(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server:
        with answering(server, request(program), sent(program)):
            wait_for(server.busy)
        s3.open_to(None)
        wait_for(lambda: server.is_whole(program))
        assert same(run(server, request(program), sent(program)), here(program))


@pytest.mark.usefixtures("at_once")
def test_a_server_that_ends_while_weights_come_leaves_nothing(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with ThreadPoolExecutor(1) as beside:
        with serving(s3) as server:
            answer = beside.submit(failed, server, request(program), sent(program))
            wait_for(server.busy)
        with pytest.raises((UpriverError, OSError, http.client.HTTPException, AssertionError)):
            answer.result()
            raise AssertionError("it was told, which is as good")
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("upriver-cold", "upriver-worker"))}


# ------------------------------------------------------------------------------------------ uploads


def test_what_is_uploaded_can_be_streamed_afterwards(s3: GatedServer) -> None:
    program = wide()
    graph, weights = program.graph_bytes, bytes(program.weights_bytes)
    with serving(s3) as server:
        body = program_head(len(graph)) + graph + weights
        status, _, answer = ask(server, "PUT", f"/v1/programs/{program.digest}", body)
        assert status == 201, answer
    path = weights_path(DEFAULT_PREFIX, program.weights_digest)
    store = store_of(s3)
    manifest = layout.read(store, path)
    layout.check_head(store, path, manifest)
    assert [tensor.name for tensor in manifest.tensors] == list(program.weight_tensors)
    for tensor in manifest.tensors:
        data = store.get_range(path, tensor.start, tensor.stop)
        assert not layout.damaged(tensor, data, chunk_bytes=manifest.chunk_bytes)
    with s3.lock:
        s3.requests.clear()
    with serving(s3) as server:
        assert same(run(server, request(program, 2), sent(program)), here(program, 2))
    assert 0 < s3.weights_asked() < program.weight_nbytes // 2


# ------------------------------------------------------------------------------- file and its memory


def cold_file(store: Store, program: Program, limits: StreamLimits, forged: list[int]) -> ColdFile:
    with ThreadPoolExecutor(1) as beside:
        found = find(
            store, DEFAULT_PREFIX, program.digest, program.weights_digest, limits=limits, beside=beside
        )
    assert found is not None
    return ColdFile(
        found, program.weights_digest, limits, device=torch.device("cpu"), on_forged=lambda: forged.append(1)
    )


LIMITS = [StreamLimits(), StreamLimits(request_bytes=1 << 16, in_flight_bytes=1 << 17, concurrency=3)]


@given(data=st.data(), limits=st.sampled_from(LIMITS))
def test_whatever_is_asked_for_in_whatever_order_comes_to_its_place(data: st.DataObject, limits: Any) -> None:
    program = wide()
    store = Store.open("memory://cold")
    publish(program, store)
    file = bytes(program.weights_bytes)
    numbers = st.sets(st.integers(0, len(program.weight_tensors) - 1))
    asked = data.draw(st.lists(numbers, max_size=4))
    to_end = data.draw(st.booleans())

    async def go() -> None:
        cold = cold_file(store, program, limits, [])
        view = map_privately(cold.fd, cold.nbytes)  # before a byte is there, as a worker does
        tensors = list(cold._tensors)
        assert view[: tensors[0].start] == file[: tensors[0].start]
        for some in asked:
            cold.ask(some)
            if some and data.draw(st.booleans()):
                await cold.ready(some, some, within_s=0.0)
                for number in some:
                    place = slice(tensors[number].start, tensors[number].stop)
                    assert view[place] == file[place]
        await cold.over()
        wanted = set().union(*asked)
        for number, tensor in enumerate(tensors):
            here = view[tensor.start : tensor.stop]
            assert here == (file[tensor.start : tensor.stop] if number in wanted else bytes(len(here)))
        assert not cold.whole
        if to_end:
            cold.ask((), to_end=True)
            await cold.checked()
            assert cold.whole
            assert view == file
        cold.cancel()
        await asyncio.to_thread(cold.join)

    asyncio.run(go())


@pytest.mark.parametrize("error", [ConfigError("no such group"), RuntimeError("can't start new thread")])
def test_what_cannot_be_asked_for_is_an_error_of_all_who_wait(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = wide()
    store = Store.open("memory://cold")
    publish(program, store)

    def fail(*_: Any) -> None:
        raise error

    async def go() -> None:
        file = cold_file(store, program, StreamLimits(), [])
        monkeypatch.setattr(cold, "grouped", fail)
        file.ask([1])
        for waiting in (file.ready([1], [1], within_s=0.0), file.over(), file.checked()):
            with pytest.raises(UpriverError, match=str(error)):
                await waiting
        file.cancel()
        await asyncio.to_thread(file.join)

    asyncio.run(go())


def test_memory_that_fills_can_be_written_by_its_owner_alone() -> None:
    memory = FillingFile(1 << 16)
    view = map_privately(memory.fd, 1 << 16)
    memory.room(100, 103)[:] = b"abc"
    assert bytes(view[99:104]) == b"\0abc\0"
    tried = """
import mmap, os, sys
fd = int(sys.argv[1])
for attempt in (lambda: mmap.mmap(fd, 1 << 16), lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1)):
    try:
        attempt()
    except OSError:
        continue
    sys.exit("it could")
private = mmap.mmap(fd, 1 << 16, access=mmap.ACCESS_COPY)
private[100:103] = b"xyz"
print(private[99:104])
"""
    done = subprocess.run(
        [sys.executable, "-c", tried, str(memory.fd)],
        pass_fds=[memory.fd],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "b'\\x00xyz\\x00'\n"), done.stderr
    assert bytes(view[99:104]) == b"\0abc\0"
    memory.close()
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(memory.fd, 1 << 16)
    assert os.fstat(memory.fd).st_size == 1 << 16


@given(numbers=st.sets(st.integers(0, 400)).map(sorted))
def test_runs_hold_all_numbers_and_are_few(numbers: list[int]) -> None:
    runs = runs_of(numbers)
    assert len(runs) <= MOST_RUNS
    held = [number for start, stop in runs for number in range(start, stop)]
    assert held == sorted(set(held))
    assert set(held) >= set(numbers)
    if len(runs) < MOST_RUNS:
        assert held == numbers
