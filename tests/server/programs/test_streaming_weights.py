"""Test programs that a server runs while their weights arrive: real processes, a real store behind a gate."""

from __future__ import annotations

import gc
import http.client
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch import nn

from tests.server.cold import (
    LAYER_BYTES,
    ROWS,
    WIDTH,
    Place,
    Served,
    here,
    published,
    request,
    same,
    sent,
    serving,
    store_of,
    wide,
)
from tests.server.running import answering, ask, body_of, messages, run, wait_for
from tests.store.gated_server import GatedServer
from upriver.coldstart import load_program
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.load_program import publish
from upriver.control import service_costs
from upriver.errors import Damaged, ProgramError, UpriverError
from upriver.program.capture.prefix import capture
from upriver.program.graph.artifact_paths import weights_path
from upriver.protocol import RunRequest, error_from, program_head
from upriver.server.execution.worker_process import WorkerHandle
from upriver.server.ipc.messages import Here
from upriver.server.programs import registry, streaming_weights
from upriver.server.programs.streaming_weights import ColdFile
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import MicroBatch, Timings


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat unknown work as so long that a worker may begin with the first weight."""
    monkeypatch.setattr(service_costs, "FIRST_GUESS_S", 1e6)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List workers as each begins to wait for weights; one that weighs a program is busy as well."""
    pids, bring = [], WorkerHandle._bring

    def noted(worker: WorkerHandle, program: Any, asked: Any, *rest: Any) -> None:
        if not program.weights._arrivals.here([program.numbers[number] for number in asked.weights]):
            pids.append(worker.pid)
        bring(worker, program, asked, *rest)

    monkeypatch.setattr(WorkerHandle, "_bring", noted)
    return pids


@pytest.fixture
def s3() -> Iterator[GatedServer]:
    with GatedServer() as s3:
        yield s3


def timings_of(server: Served, asked: RunRequest, batches: list[MicroBatch]) -> Timings:
    """Return the stage seconds of an answer's only micro-batch."""
    with answering(server, asked, batches) as response:
        [found] = [message for message in messages(response) if isinstance(message, Timings)]
    return found


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.usefixtures("at_once")
def test_stages_run_while_the_rest_arrives_and_the_answer_is_that_of_the_whole(
    s3: GatedServer, waiting: list[int]
) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(run, server, request(program), sent(program))
        wait_for(lambda: waiting)  # a worker is past the first stages; other weights are gated
        assert not answer.done() and not server.is_whole(program)
        s3.open_to(None)
        assert same(answer.result(), here(program))
        wait_for(lambda: server.is_whole(program))
        assert same(run(server, request(program), sent(program)), here(program))
    assert s3.weights_asked() < 1.1 * program.weight_nbytes  # once


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
def test_the_wait_for_weights_is_no_part_of_the_stages(
    s3: GatedServer, waiting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WorkerHandle._send

    def late(worker: WorkerHandle, message: Any, *rest: Any) -> None:
        send(worker, message, *rest)
        if isinstance(message, Here):  # delays the sender, while its worker continues
            time.sleep(0.3)

    monkeypatch.setattr(WorkerHandle, "_send", late)
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(timings_of, server, request(program), sent(program))
        wait_for(lambda: waiting)
        time.sleep(0.3)
        s3.open_to(None)
        took = answer.result()
    assert took.phases["weights"] >= 0.3
    assert took.phases["forward"] == pytest.approx(sum(took.stages.values()), abs=0.25)


@pytest.mark.full
@pytest.mark.parametrize(("start", "stop"), [pytest.param(0, 3, marks=pytest.mark.full), (4, 7)])
def test_only_the_weights_between_the_cuts_are_read(s3: GatedServer, start: int, stop: int) -> None:
    program = wide()
    published(s3, program)
    with serving(s3) as server:
        found = run(server, request(program, stop, start), sent(program, start))
        assert same(found, here(program, stop, start))
        assert s3.weights_asked() < (stop - start + 1) * LAYER_BYTES
        # More weights arrive when more are requested, and weights already here are not read again.
        assert same(run(server, request(program), sent(program)), here(program))
        assert s3.weights_asked() < 1.1 * program.weight_nbytes


@pytest.mark.full
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


@pytest.mark.full
def test_an_answer_up_to_a_cut_needs_nothing_that_another_asks_for(
    s3: GatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ColdFile, "_bytes_per_s", lambda file: 1.0
    )  # a request for all stages begins when all weights have arrived
    program = wide()
    published(s3, program)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        assert same(run(server, request(program, 2), sent(program)), here(program, 2))
        s3.open_to(4 * LAYER_BYTES)
        answer = beside.submit(run, server, request(program), sent(program))
        wait_for(lambda: s3.weights_asked() > 4 * LAYER_BYTES)
        assert same(run(server, request(program, 2), sent(program)), here(program, 2))
        assert not answer.done()
        s3.open_to(None)
        assert same(answer.result(), here(program))


@pytest.mark.full
def test_whole_means_that_nothing_runs_before_the_digest_is_right(s3: GatedServer) -> None:
    program = wide()
    store = published(s3, program)
    store.put(layout.manifest_path(weights_path(DEFAULT_PREFIX, program.weights_digest)), b"no manifest")
    with serving(s3, cold_start="whole") as server:
        assert same(run(server, request(program), sent(program)), here(program))
    assert not any("manifest" in path for method, path, _ in s3.requests if method != "PUT")


@pytest.mark.full
@pytest.mark.parametrize("manifest", [pytest.param(None, marks=pytest.mark.full), b"no manifest"])
def test_weights_without_a_manifest_of_theirs_are_read_whole(s3: GatedServer, manifest: bytes | None) -> None:
    program = wide()
    store = published(s3, program)
    beside = layout.manifest_path(weights_path(DEFAULT_PREFIX, program.weights_digest))
    store.delete(beside) if manifest is None else store.put(beside, manifest)
    with serving(s3) as server:
        assert same(run(server, request(program), sent(program)), here(program))


# ------------------------------------------------------------------------------------------- faults


def failed(server: Any, asked: RunRequest, batches: list[MicroBatch]) -> tuple[int, UpriverError]:
    """Return the micro-batches before the error, and the error."""
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
    return sum(unit.program_cache.nbytes for unit in server.units)


def changed(s3: GatedServer, path: str, data: bytes) -> None:
    """Replace the stored bytes; the manifest still claims to describe them."""
    beside = layout.manifest_path(path)
    s3.objects[path] = data
    etag = store_of(s3).head(path.removeprefix("bucket/data/")).etag
    manifest = msgspec.json.decode(s3.objects[beside], type=layout.Manifest)
    s3.objects[beside] = msgspec.structs.replace(manifest, etag=etag).encode()


@pytest.mark.full
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


@pytest.mark.full
def test_weights_that_are_others_than_the_graph_names_never_end_an_answer_well(s3: GatedServer) -> None:
    program, other = wide(), wide(7)
    store = published(s3, program)
    path = weights_path(DEFAULT_PREFIX, program.weights_digest)
    layout.publish(other.weight_tensors, store, path, tied=False)  # replaced, with a correct manifest
    with serving(s3) as server:
        _, error = failed(server, request(program), sent(program))
        assert isinstance(error, ProgramError)
        assert "digest" in str(error)
        wait_for(lambda: held(server) == 0)
        count, error = failed(server, request(program), sent(program))  # one was enough: nothing runs early
        assert count == 0
        assert isinstance(error, ProgramError)
        layout.publish(program.weight_tensors, store, path, tied=False)
        assert same(run(server, request(program), sent(program)), here(program))


def memories(nbytes: int) -> int:
    """Return the memories of programs of that size in this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = f"/proc/self/fd/{name}"
            found += "memfd:upriver-program" in os.readlink(path) and os.stat(path).st_size == nbytes
    return found


@pytest.mark.parametrize(
    "what", ["part", *(pytest.param(what, marks=pytest.mark.full) for what in ("whole", "damaged"))]
)
@pytest.mark.full
def test_what_is_let_go_of_takes_no_memory(s3: GatedServer, what: str) -> None:
    program = wide()
    published(s3, program)
    nbytes = len(program.weights_bytes)
    if what == "damaged":
        (path,) = [path for path in s3.objects if path.endswith(".safetensors")]
        data = bytearray(s3.objects[path])
        data[nbytes // 2] ^= 1
        changed(s3, path, bytes(data))
    gc.collect()
    before = memories(nbytes)
    gc.disable()
    try:
        with serving(s3, program_budget_bytes=len(program.graph_bytes) + nbytes) as server:
            if what == "damaged":
                assert isinstance(failed(server, request(program), sent(program))[1], Damaged)
            else:
                stop = 2 if what == "part" else program.num_stages
                assert same(run(server, request(program, stop), sent(program)), here(program, stop))
            wait_for(lambda: held(server) == 0)
            wait_for(lambda: memories(nbytes) <= before)
    finally:
        gc.enable()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to `x` of shape `(rows, WIDTH)`."""
        return self.layer(x)


@pytest.mark.full
def test_a_store_that_says_nothing_holds_up_cold_programs_alone(
    s3: GatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = min(32, (os.cpu_count() or 1) + 4) + 1  # one more than the threads for everything else
    torch.manual_seed(0)
    made = [capture(Small().eval(), (torch.randn(ROWS, WIDTH),), granularity="op") for _ in range(count)]
    for program in made:
        published(s3, program)
    go_on, find = threading.Event(), load_program.find

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(120)
        return find(*arguments, **options)

    monkeypatch.setattr(load_program, "find", slow)
    with serving(s3, max_admitted=count) as server, ThreadPoolExecutor(count) as beside:
        answers = [beside.submit(run, server, request(program), sent(program)) for program in made]
        try:
            wait_for(lambda: len(server.units[0].program_cache.keys) == count)
            assert ask(server, "GET", "/metrics")[0] == 200
        finally:
            go_on.set()
        for program, answer in zip(made, answers, strict=True):
            assert same(answer.result(), here(program))


@pytest.mark.full
def test_many_small_weights_are_read_whole(s3: GatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_weights, "TENSOR_BYTES", LAYER_BYTES)
    program = wide()
    published(s3, program)
    with serving(s3) as server:
        assert same(run(server, request(program, 2), sent(program)), here(program, 2))
        assert server.is_whole(program)


@pytest.mark.usefixtures("at_once")
@pytest.mark.full
def test_a_worker_that_dies_while_it_waits_is_replaced(s3: GatedServer, waiting: list[int]) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server, ThreadPoolExecutor(1) as beside:
        answer = beside.submit(run, server, request(program), sent(program))
        pid = wait_for(lambda: list(waiting))[0]  # it may wait several times before it reaches the gate
        psutil.Process(pid).kill()
        wait_for(lambda: set(waiting) - {pid})  # its weights may arrive after another waits
        assert not answer.done()
        s3.open_to(None)
        assert same(answer.result(), here(program))


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
def test_a_client_that_goes_leaves_a_program_that_others_can_use(s3: GatedServer, waiting: list[int]) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with serving(s3) as server:
        with answering(server, request(program), sent(program)):
            wait_for(lambda: waiting)
        s3.open_to(None)
        wait_for(lambda: server.is_whole(program))
        assert same(run(server, request(program), sent(program)), here(program))


@pytest.mark.full
@pytest.mark.usefixtures("at_once")
def test_a_server_that_ends_while_weights_come_leaves_nothing(s3: GatedServer, waiting: list[int]) -> None:
    program = wide()
    published(s3, program)
    s3.open_to(3 * LAYER_BYTES)
    with ThreadPoolExecutor(1) as beside:
        with serving(s3) as server:
            answer = beside.submit(failed, server, request(program), sent(program))
            wait_for(lambda: waiting)
        with pytest.raises((UpriverError, OSError, http.client.HTTPException, AssertionError)):
            answer.result()
            raise AssertionError("it was told, which is as good")
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("upriver-cold", "upriver-worker"))}


@pytest.mark.parametrize("route", ["upload", "profile"])
@pytest.mark.full
def test_weights_replaced_while_read_whole_are_a_conflict(
    s3: GatedServer, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PIECE_BYTES", LAYER_BYTES)
    program, larger = wide(), wide(0, 2 * ROWS)
    published(s3, program)
    [path] = [path for path in s3.objects if path.endswith(".safetensors")]
    whole = s3.objects[path]
    if route == "upload":  # a graph alone, for weights that are stored
        asked = ("PUT", f"/v1/programs/{larger.digest}")
        body = program_head(len(larger.graph_bytes)) + larger.graph_bytes
    else:
        asked = ("POST", "/v1/profile")
        body = msgspec.json.encode({"protocol": 1, "programs": [program.digest], "stop": 1, "repeats": 1})
    with serving(s3, cold_start="whole") as server, ThreadPoolExecutor(1) as beside:
        s3.open_to(0)
        answer = beside.submit(ask, server, *asked, body)
        wait_for(s3.weights_asked)
        s3.objects[path] = whole[:-1] + bytes([whole[-1] ^ 1])
        s3.open_to(None)
        status, _, error = answer.result()
        assert (status, msgspec.json.decode(error)["error"]["code"]) == (409, "object_changed")
        s3.objects[path] = whole
        assert ask(server, *asked, body)[0] in (200, 201)


# ------------------------------------------------------------------------------------------ uploads


@pytest.mark.full
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


@pytest.mark.full
def test_an_upload_leaves_stored_weights_as_they_are(tmp_path: Path) -> None:
    """Check that an upload changes no stored weights: others may be reading them, by their ETag."""
    program, larger = wide(), wide(0, 2 * ROWS)
    assert program.weights_digest == larger.weights_digest
    store, path = Store.open(tmp_path.as_uri()), weights_path(DEFAULT_PREFIX, program.weights_digest)
    publish(program, store)
    with serving(Place(tmp_path.as_uri())) as server:
        assert same(run(server, request(program, 2), sent(program)), here(program, 2))
        before, graph = store.head(path), larger.graph_bytes
        body = program_head(len(graph)) + graph
        status, _, answer = ask(server, "PUT", f"/v1/programs/{larger.digest}", body)
        assert status == 201, answer
        assert store.head(path) == before
        assert same(run(server, request(program), sent(program)), here(program))


@pytest.mark.full
def test_an_upload_replaces_weights_whose_manifest_is_that_of_others(tmp_path: Path) -> None:
    program = wide()
    store, path = Store.open(tmp_path.as_uri()), weights_path(DEFAULT_PREFIX, program.weights_digest)
    layout.publish(wide(7).weight_tensors, store, path, tied=False)
    graph, weights = program.graph_bytes, bytes(program.weights_bytes)
    with serving(Place(tmp_path.as_uri())) as server:
        body = program_head(len(graph)) + graph + weights
        status, _, answer = ask(server, "PUT", f"/v1/programs/{program.digest}", body)
        assert status == 201, answer
    assert store.get(path) == weights
    assert layout.read(store, path).tensors != []
