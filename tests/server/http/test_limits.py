"""Test the routes over real HTTP: correct requests get exact answers, wrong ones get a named error."""

import hashlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.pipeline.making import write
from tests.server.conftest import MICRO_BATCH, images, make_program
from tests.server.running import (
    answering,
    ask,
    body_of,
    changed,
    connect,
    in_thread,
    messages,
    refused,
    run,
    wait_for,
)
from upriver.errors import BadSample, CodeFailed, ObjectChanged, StoreError
from upriver.pipeline import CenterCrop, Decode, Normalize, Resize, index
from upriver.program.capture.prefix import capture
from upriver.program.graph.artifact_paths import graph_path
from upriver.protocol import (
    PROCESS_HEADER,
    VERSION,
    DatasetRef,
    End,
    RunRequest,
    decode_info,
    program_head,
)
from upriver.rpc.client import ServerClient
from upriver.server.http.errors import ErrorWording
from upriver.server.tenants import Tenant, hash_token
from upriver.store import Store
from upriver.types import MicroBatch, Timings


def same(got, wanted):
    assert (got.ids, got.position, got.skipped) == (wanted.ids, wanted.position, wanted.skipped)
    assert len(got.tensors) == len(wanted.tensors)
    for one, other in zip(got.tensors, wanted.tensors, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()


def upload(program):
    return program_head(len(program.graph_bytes)) + program.graph_bytes + bytes(program.weights_bytes)


def stored(world):
    return {info.path for info in world.store.list()}


@pytest.fixture(scope="module")
def uploaded(server, world):
    status, _, answer = ask(server, "PUT", f"/v1/programs/{world.program.digest}", upload(world.program))
    assert status == 201, answer
    return server


# ------------------------------------------------------------------------------------ small routes


def test_health(server):
    assert ask(server, "GET", "/livez")[0] == 200
    assert ask(server, "GET", "/readyz")[0] == 200


def test_info(server):
    info = decode_info(ask(server, "GET", "/v1/info")[2])
    assert info.protocol == VERSION
    assert info.stores == ("default",)
    assert info.fingerprint["torch"] == torch.__version__
    assert (info.workers, info.threads, info.micro_batch, info.caps.samples) == (2, 1, 16, 64)
    assert info.admits == 8


@pytest.mark.full
def test_info_tells_each_tenant_how_many_requests_are_computed_at_once(world):
    quotas = {"none": None, "small": 3, "large": 9}
    tenants = tuple(
        Tenant(name=name, token_hashes=(hash_token(name),), max_requests=quota)
        for name, quota in quotas.items()
    )
    admits = {}
    with in_thread(world.store.uri, max_admitted=5, tenants=tenants) as server:
        for name in quotas:
            with ServerClient(server.url, token=name) as client:
                wait_for(lambda client=client: client.ready())
                admits[name] = client.info().admits
    assert admits == {"none": 5, "small": 3, "large": 5}


def test_every_answer_names_the_process_that_gives_it(server, uploaded, world):
    request = RunRequest(micro_batches=(), start=0, stop=1, micro_batch=1)
    asked = [("GET", "/livez"), ("GET", "/v1/info"), ("GET", "/v1/load"), ("GET", "/nothing")]
    named = {ask(server, *each)[1][PROCESS_HEADER] for each in asked}
    named.add(ask(server, "POST", "/v1/run", body_of(request))[1][PROCESS_HEADER])
    assert len(named) == 1 and len(named.pop()) == 32
    with in_thread(world.store.uri, threads=1) as other:
        assert (
            ask(other, "GET", "/livez")[1][PROCESS_HEADER] != ask(server, "GET", "/livez")[1][PROCESS_HEADER]
        )


def test_no_answer_says_where_a_store_is(server, world):
    answers = [ask(server, "GET", "/v1/info")[2], ask(server, "GET", "/metrics")[2]]
    assert not any(world.store.uri.encode() in answer for answer in answers)


@pytest.mark.parametrize("count", [0, 1, 300_000])
def test_probe(server, count):
    status, headers, body = ask(server, "GET", f"/v1/probe?bytes={count}")
    assert (status, len(body), headers["content-length"]) == (200, count, str(count))


@pytest.mark.parametrize("count", ["-1", "x", str((64 << 20) + 1), "9" * 5000])
def test_probe_is_capped(server, count):
    status, error = refused(server, None, f"/v1/probe?bytes={count}", "GET")
    assert (status, error["code"]) == (400, "protocol")
    assert str(64 << 20) in error["message"]


def test_other_paths_and_methods_are_refused_in_the_same_form(server):
    assert refused(server, None, "/v1/nothing", "GET")[0] == 404
    assert refused(server, None, "/v1/run", "GET")[0] == 405
    assert ask(server, "GET", "/v1/run")[1]["allow"] == "POST"
    assert refused(server, None, "/v1/programs/..%2f..%2fetc", "PUT")[0] in (400, 404)


def test_an_address_of_bytes_that_are_no_text_is_none_of_ours(server):
    """The error must quote neither the query nor the host."""
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"GET /v1/nothing?\xff\xfe HTTP/1.1\r\nHost: " + server.address.encode() + b"\r\n\r\n")
        assert raw.recv(12) in (b"HTTP/1.1 404", b"HTTP/1.1 400")


@pytest.mark.parametrize("folder", ["plain", "of ours and ä"])
def test_where_a_store_lies_is_in_no_clients_words(tmp_path, folder):
    root = tmp_path / folder
    root.mkdir()
    wording = ErrorWording({"images": Store.open(root.as_uri(), name="images")})
    for place in (root.as_uri(), str(root), f"{root}/a/b.png"):
        told = str(wording.of(StoreError(f"cannot read {place}: no")))
        assert told.startswith("cannot read store images")
        assert str(tmp_path) not in told
        failed = wording.of(CodeFailed("no", trace=f"File {place}, line 1"))
        assert isinstance(failed, CodeFailed) and str(tmp_path) not in failed.trace
        assert failed.trace.startswith("File store images")


# ------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("stop", [-5, -4, -3, -2, -1, 0])
def test_input_stages_are_the_same_here_and_there(server, world, stop):
    ids = ((0, 3, 1, 9), (2, 5))
    got = run(server, world.request(*ids, stop=stop))
    assert [batch.ids for batch in got] == list(ids)
    for batch in got:
        same(batch, world.here(batch.ids, stop))


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_model_stages_are_the_same_here_and_there(uploaded, world, stop):
    got = run(uploaded, world.request((0, 1, 2, 3), (4,), (9, 8, 7), stop=stop))
    for batch in got:
        same(batch, world.here(batch.ids, stop))


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (1, 4), (4, 4)])
def test_tensors_sent_along(uploaded, world, start, stop):
    sent = [world.here(ids, start) for ids in ((0, 1, 2, 3), (5, 6))]
    request = RunRequest(
        micro_batches=tuple(batch.ids for batch in sent),
        start=start,
        stop=stop,
        micro_batch=MICRO_BATCH,
        program=world.program.digest,
    )
    for batch, got in zip(sent, run(uploaded, request, sent), strict=True):
        same(got, world.here(batch.ids, stop))


def test_how_long_what_is_sent_along_takes_to_come_is_told(uploaded, world):
    sent = [world.here(ids, 0) for ids in ((0, 1, 2, 3), (5, 6))]
    request = RunRequest(
        micro_batches=tuple(batch.ids for batch in sent),
        start=0,
        stop=1,
        micro_batch=MICRO_BATCH,
        program=world.program.digest,
    )
    body, before = body_of(request, *sent), uploaded.metric("upriver_bytes_in_total")
    connection = connect(uploaded)
    try:
        connection.putrequest("POST", "/v1/run")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:1000])
        wait_for(lambda: uploaded.metric("upriver_bytes_in_total") == before + 1000)
        connection.send(body[1000:])
        told = [found for found in messages(connection.getresponse()) if isinstance(found, Timings)]
    finally:
        connection.close()
    assert ["receive" in timings.phases for timings in told] == [True, False]
    assert told[0].phases["receive"] > 0
    assert all(timings.k >= 1 for timings in told)


def test_an_answer_is_data_and_stats_in_turn_and_then_an_end(uploaded, world):
    request = world.request((0, 1), (2, 3), stop=1)
    with answering(uploaded, request) as response:
        found = messages(response)
    assert [type(message) for message in found] == [MicroBatch, Timings, MicroBatch, Timings, End]
    assert set(found[1].phases) == {"queue", "read", "input", "forward", "encode"}
    assert sorted(found[1].stages) == [-4, -3, -2, -1, 0, 1]


def test_many_micro_batches_come_in_order(server, world):
    ids = tuple((number % 10, (7 * number + 3) % 10) for number in range(32))
    assert [batch.ids for batch in run(server, world.request(*ids))] == list(ids)


def test_requests_at_once_do_not_mix(uploaded, world):
    def both(number):
        stop = number % 3
        ids = tuple(((number + step) % 10, (number + 2 * step) % 10) for step in range(6))
        for batch, wanted in zip(run(uploaded, world.request(*ids, stop=stop)), ids, strict=True):
            same(batch, world.here(wanted, stop))
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(both, range(12)))


def test_metrics_count(server, world):
    before = [server.metric(f"upriver_{name}_total") for name in ("micro_batches", "bytes_out")]
    run(server, world.request((0, 1), (2,)))
    after = [server.metric(f"upriver_{name}_total") for name in ("micro_batches", "bytes_out")]
    assert after[0] - before[0] == 2
    assert after[1] - before[1] > 2 * MICRO_BATCH * 3 * 16 * 16 * 4
    wait_for(lambda: server.metric("upriver_running_requests") == 0)


# ---------------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="module")
def spoilt(world, tmp_path_factory):
    """Make a dataset in the same store with a truncated image at row 1."""
    files = {f"spoilt/{name}": data for name, data in images(4).items()}
    files["spoilt/cat/001.png"] = files["spoilt/cat/001.png"][:60]
    root = world.store.uri.removeprefix("file://")
    write(Path(root), files)
    dataset = index(world.store, "spoilt", stages=world.dataset.chain.stages)
    dataset.publish()
    return dataset


def bad_row(dataset):
    return next(row for row in range(len(dataset)) if "001.png" in dataset.locate([row])[0].object)


def test_a_bad_sample_fails_by_name(server, world, spoilt):
    request = world.request((0, 1, 2, 3), dataset=DatasetRef(store="default", digest=spoilt.digest))
    with pytest.raises(BadSample, match=r"001\.png") as caught:
        run(server, request)
    assert caught.value.sample == bad_row(spoilt)
    assert caught.value.object_name == "spoilt/cat/001.png"


def test_a_bad_sample_is_skipped_where_asked_for(server, world, spoilt):
    request = world.request(
        (0, 1, 2, 3), dataset=DatasetRef(store="default", digest=spoilt.digest), on_bad_sample="skip"
    )
    (batch,) = run(server, request)
    row = bad_row(spoilt)
    assert batch.skipped == (row,)
    assert not batch.tensors[0][row].any()
    assert batch.tensors[0][(row + 1) % 4].any()


def test_a_changed_object_is_noticed(server, world):
    root = Path(world.store.uri.removeprefix("file://"))
    write(root, {f"moving/{name}": data for name, data in images(2).items()})
    dataset = index(world.store, "moving", stages=[Decode()])
    dataset.publish()
    request = world.request(
        (0, 1), start=-1, stop=-1, dataset=DatasetRef(store="default", digest=dataset.digest)
    )
    assert len(run(server, request)) == 1
    write(root, {f"moving/{name}": data + b"!" for name, data in images(2).items()})
    with pytest.raises(ObjectChanged):
        run(server, request)


def test_what_is_not_there_is_named(server, world):
    status, error = refused(
        server, body_of(world.request((0,), dataset=DatasetRef(store="other", digest="0" * 64)))
    )
    assert (status, error["code"]) == (404, "not_found")
    assert "'other'" in error["message"]
    assert "default" in error["message"]
    status, error = refused(
        server, body_of(world.request((0,), dataset=DatasetRef(store="default", digest="0" * 64)))
    )
    assert (status, error["code"]) == (404, "not_found")
    status, error = refused(server, body_of(world.request((0,), stop=1, program="1" * 64)))
    assert (status, error["code"]) == (404, "program_not_found")
    assert "1" * 64 in error["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"micro_batches": ((10,),)}, "0..9, got 10"),
        ({"start": -4}, "starts at -5, got -4"),
        ({"micro_batches": ((1,) * 4,) * 17}, "at most 64 samples, got 68"),
        ({"micro_batches": ((1, 2, 3, 4, 5),)}, "1 to 4 samples, got 5"),
    ],
)
def test_a_request_outside_the_dataset_or_the_caps_is_refused(server, world, change, said):
    status, error = refused(server, body_of(changed(world.request((0,)), **change)))
    assert (status, error["code"]) == (400, "protocol")
    assert said in error["message"]


def test_stages_past_the_end_are_refused(uploaded, world):
    with pytest.raises(Exception, match="stages"):
        run(uploaded, world.request((0,), stop=77))


def test_a_micro_batch_the_program_was_not_made_for_is_refused(uploaded, world):
    sent = MicroBatch(ids=(0,), position=0, tensors=(torch.zeros(3, 3, 16, 16),))
    along = world.request((0,), start=0, stop=1, micro_batch=3, dataset=None)
    for body in (body_of(world.request((0,), stop=1, micro_batch=3)), body_of(along, sent)):
        status, error = refused(uploaded, body)
        assert (status, error["code"]) == (400, "protocol")
        assert "micro-batches of 4, not 3" in error["message"]


def test_another_version_is_refused_and_both_are_named(server, world):
    body = bytearray(body_of(world.request((0,))))
    body[4:6] = (9).to_bytes(2, "big")
    status, error = refused(server, bytes(body))
    assert (status, error["code"]) == (400, "protocol")
    assert f"version {VERSION}" in error["message"]
    assert "9" in error["message"]


def test_lying_bodies_are_refused(server, world):
    good = body_of(world.request((0,)))
    sent = MicroBatch(ids=(1,), position=0, tensors=(torch.zeros(4),))
    along = RunRequest(micro_batches=((1,),), start=0, stop=0, micro_batch=4)
    for body in (
        b"",
        b"GET / HTTP/1.1",
        good[:-1],
        good + b"x",
        good + good,
        good[:8] + b"\xff\xff\xff\xff" + good[12:],
        good[:12] + b"\xff" * 8 + good[20:],
        body_of(sent),
        body_of(along),
        body_of(along, sent, sent),
        body_of(along, MicroBatch(ids=(2,), position=0, tensors=(torch.zeros(4),))),
        body_of(along, MicroBatch(ids=(1,), position=1, tensors=(torch.zeros(4),))),
        body_of(along, sent)[:-3] + b"abc",
        body_of(End()),
    ):
        status, error = refused(server, body)
        assert (status, error["code"]) == (400, "protocol"), body[:60]
    for body, named in (
        (good + good, "a request frame"),
        (body_of(sent), "a data frame"),
        (body_of(Timings()), "a stats frame"),
        (body_of(StoreError("gone")), "an error frame"),
        (body_of(End()), "an end frame"),
    ):
        assert refused(server, body)[1]["message"].endswith(f"then data frames, got {named}")
    assert len(run(server, world.request((0,)))) == 1


def test_a_body_that_is_too_large_is_refused(server):
    along = RunRequest(micro_batches=((1,),), start=0, stop=0, micro_batch=4)
    sent = MicroBatch(ids=(1,), position=0, tensors=(torch.zeros(1 << 20),))
    status, error = refused(server, body_of(along, sent))
    assert (status, error["code"]) == (413, "too_large")
    assert str(2 << 20) in error["message"]


@pytest.mark.parametrize("start", [0, 4])
def test_tensors_the_program_does_not_take_are_refused(uploaded, world, start):
    good = world.here((1,), start)
    (tensor,) = good.tensors
    along = RunRequest(
        micro_batches=((1,), (1,)), start=start, stop=4, micro_batch=4, program=world.program.digest
    )
    for tensors, got in (
        ((tensor[:3],), f"got float32 of {(3, *tensor.shape[1:])}"),
        ((tensor[:, :-1],), "got float32 of"),
        ((tensor.double(),), "got float64 of"),
        ((tensor, tensor), "got 2"),
        ((), "got 0"),
    ):
        status, error = refused(uploaded, body_of(along, good, replace(good, tensors=tensors)))
        assert (status, error["code"]) == (400, "protocol")
        assert error["message"].startswith("data frame 1: the program takes ")
        assert f"at position {start}" in error["message"] and got in error["message"]


def test_a_program_of_two_inputs_gets_only_what_is_sent_along(uploaded, world):
    class Sum(torch.nn.Module):
        def forward(self, one, other):
            return torch.relu(one + other)

    program = capture(Sum().eval(), (torch.zeros(MICRO_BATCH, 3, 16, 16),) * 2)
    assert ask(uploaded, "PUT", f"/v1/programs/{program.digest}", upload(program))[0] == 201
    status, error = refused(uploaded, body_of(world.request((0,), stop=1, program=program.digest)))
    assert (status, error["code"]) == (400, "protocol")
    assert "the program takes 2" in error["message"]


def test_a_sample_that_the_program_does_not_take_is_a_bad_one(uploaded, world):
    """The input stages' output is known only once they have run."""
    root = Path(world.store.uri.removeprefix("file://"))
    write(root, {f"wide/{name}": data for name, data in images(2).items()})
    dataset = index(world.store, "wide", stages=[Decode(), Resize(20), CenterCrop(18), Normalize()])
    dataset.publish()
    given = {"dataset": DatasetRef(store="default", digest=dataset.digest), "start": dataset.chain.start}
    with pytest.raises(BadSample, match=r"\(3, 16, 16\).*is needed"):
        run(uploaded, world.request((0,), stop=1, **given))
    (batch,) = run(uploaded, world.request((0,), stop=1, on_bad_sample="skip", **given))
    assert batch.skipped == (0,)


def test_a_data_frame_that_skips_what_it_does_not_hold_is_refused(uploaded, world):
    along = RunRequest(micro_batches=((0,),), start=0, stop=1, micro_batch=4, program=world.program.digest)
    sent = replace(world.here((0,), 0), skipped=(9,))
    status, error = refused(uploaded, body_of(along, sent))
    assert (status, error["code"]) == (400, "protocol")
    assert "skipped samples must be among" in error["message"]
    assert len(run(uploaded, along, [replace(sent, skipped=(0,))])) == 1


# ----------------------------------------------------------------------------------------- programs


def test_head_after_put(server, world):
    program = make_program(1)
    path = f"/v1/programs/{program.digest}"
    assert ask(server, "HEAD", path)[0] == 404
    status, _, answer = ask(server, "PUT", path, upload(program))
    assert (status, json.loads(answer)) == (201, {"digest": program.digest})
    assert ask(server, "HEAD", path)[0] == 200
    assert world.store.get(graph_path(".upriver", program.digest)) == program.graph_bytes


def alone(graph: bytes) -> bytes:
    """Return an upload without weights."""
    return program_head(len(graph)) + graph


@pytest.mark.full
def test_weights_that_came_with_another_program_are_not_needed_again(server, world):
    first, second = (make_program(4, micro_batch=size) for size in (4, 2))
    assert first.digest != second.digest
    assert ask(server, "PUT", f"/v1/programs/{first.digest}", upload(first))[0] == 201
    path = f"/v1/programs/{second.digest}"
    assert ask(server, "PUT", path, alone(second.graph_bytes))[0] == 201
    sent = MicroBatch(ids=(0, 1), position=0, tensors=(torch.randn(2, 3, 16, 16),))
    request = RunRequest(micro_batches=((0, 1),), start=0, stop=2, micro_batch=2, program=second.digest)
    (got,) = run(server, request, [sent])
    assert torch.equal(got.tensors[0], second.run(sent.tensors, 0, 2)[0])


def test_nothing_wrong_is_stored(server, world):
    program, before = make_program(2), stored(world)
    path, good = f"/v1/programs/{program.digest}", upload(program)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    not_a_program = b'{"weights_digest": "' + b"0" * 64 + b'"}'
    path_of_none = f"/v1/programs/{hashlib.sha256(not_a_program).hexdigest()}"
    for target, body, code in (
        (f"/v1/programs/{'0' * 64}", good, "bad_program"),
        (path, bytes(flipped), "bad_program"),
        (path, good[:-1], "bad_program"),
        (path, good + b"x", "bad_program"),
        (path, b"", "protocol"),
        (path, b"\xff" * 8 + good[8:], "protocol"),
        (
            path_of_none,
            alone(not_a_program),
            "program_not_found",
        ),
        (path, alone(not_a_program), "bad_program"),
        (path, alone(program.graph_bytes), "program_not_found"),
        ("/v1/programs/ABC", good, "protocol"),
        (path, b"\0" * (2 << 20), "too_large"),
    ):
        status, error = refused(server, body, target, "PUT")
        assert error["code"] == code, error
        assert status == {"too_large": 413, "program_not_found": 404}.get(code, 400)
    assert ask(server, "HEAD", path)[0] == 404
    assert stored(world) == before


def test_an_upload_that_breaks_off_stores_nothing(server, world):
    program, before = make_program(3), stored(world)
    body = upload(program)
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT /v1/programs/{program.digest} HTTP/1.1\r\nHost: {server.address}\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
    wait_for(lambda: server.metric("upriver_requests_total", 'code="499"'))
    assert stored(world) == before
    assert ask(server, "PUT", f"/v1/programs/{program.digest}", body)[0] == 201
