"""Test attacks on a server with two tenants: each is refused, reaches nobody, and leaves nothing behind."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import torch

from tests.examples import often
from tests.pipeline.making import of_one_value
from tests.server.attacking import (
    BODY_BYTES,
    BUDGET_BYTES,
    PIXELS,
    Peaks,
    Reply,
    Target,
    assert_unharmed,
    first_reply,
    good_answer,
    good_request,
    send_until_answered,
    targeted,
)
from tests.server.broken_bodies import Frame, frames_of, wire, wire_of
from tests.server.running import body_of, changed, wait_for
from upriver.pipeline.manifest import MAX_ROWS
from upriver.program.graph import weights_file
from upriver.program.graph.artifact_paths import digest_of
from upriver.program.graph.operators import fingerprints
from upriver.program.graph.schema import SCHEMA
from upriver.protocol import VERSION, DatasetRef, FrameKind, RunRequest, frame_head
from upriver.protocol.frames import PREFIX
from upriver.server.http.openapi import document
from upriver.types import MicroBatch

pytestmark = pytest.mark.slow

LIMIT_BYTES = 64 << 20
"""Bytes by which the server's memory may have grown: an allocator keeps some; no attack does."""

Attack = Callable[[Target], list[Reply]]


@dataclass(frozen=True)
class Kind:
    """Attack, and its allowed answers.

    Attributes:
        held: Whether the server may hold much until it refuses: then only the memory that stays counts.
    """

    attack: Attack
    statuses: frozenset[int]
    held: bool = False


ATTACKS: dict[str, Kind] = {}


def attack(*statuses: int, held: bool = False) -> Callable[[Attack], Attack]:
    """Register an attack."""

    def listed(function: Attack) -> Attack:
        ATTACKS[function.__name__] = Kind(function, frozenset(statuses), held)
        return function

    return listed


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with targeted(tmp_path_factory.mktemp("attacked")) as found:
        yield found


# ----------------------------------------------------------------------------- unauthenticated requests


def closed_operations() -> list[tuple[str, str]]:
    """Return method and path of every route that needs a token."""
    return [
        (method.upper(), path.replace("{digest}", "0" * 64))
        for path, item in document()["paths"].items()
        for method, operation in item.items()
        if method != "parameters" and operation.get("security") != []
    ]


@attack(401)
def no_token(target: Target) -> list[Reply]:
    return [target.ask(method, path, b"{}", who=None) for method, path in closed_operations()]


@attack(401)
def a_wrong_token(target: Target) -> list[Reply]:
    token = target.tokens["alice"]
    wrong = ["", "x", token[:-1], f"{token}x", token.swapcase(), hashlib.sha256(token.encode()).hexdigest()]
    wrong += [f"{token},{target.tokens['bob']}", "é" * 40, "0" * 60_000]
    headers = [f"Bearer {each}" for each in wrong]
    headers += [f"Token {token}", token, f"Basic {base64.b64encode(f'alice:{token}x'.encode()).decode()}"]
    return [
        target.ask(method, path, b"{}", headers={"Authorization": header})
        for method, path in closed_operations()
        for header in headers
    ]


@attack(401)
def a_password_for_what_changes_something(target: Target) -> list[Reply]:
    """Use the password alone: a browser adds it even when a foreign page makes it send the request."""
    password = base64.b64encode(f"alice:{target.tokens['alice']}".encode()).decode()
    headers = {"Authorization": f"Basic {password}"}
    changing = [each for each in closed_operations() if each[0] in ("PUT", "POST")]
    return [target.ask(method, path, b"{}", headers=headers) for method, path in changing]


# ----------------------------------------------------------------------------------- other tenants' data


def request_for(target: Target, store: str, digest: str, **fields: Any) -> bytes:
    request = changed(
        good_request(target.stored, target.program), dataset=DatasetRef(store=store, digest=digest)
    )
    return body_of(changed(request, **fields))


@attack(403, 404)
def another_tenants_store(target: Target) -> list[Reply]:
    digest = target.stored.private.digest
    missing = target.run(request_for(target, "nowhere", digest))
    theirs = target.run(request_for(target, "private", digest))
    assert missing.message.replace("nowhere", "private") == theirs.message  # nor is its existence revealed
    return [missing, theirs]


@attack(403)
def another_tenants_folder(target: Target) -> list[Reply]:
    digest = target.stored.bob.digest
    bodies = [
        request_for(target, "shared", digest),
        request_for(target, "shared", digest, micro_batches=((5,),)),
        request_for(target, "shared", digest, stop=target.stored.bob.chain.start, program=None),
        request_for(target, "shared", digest, on_bad_sample="skip"),
    ]
    return [target.run(body) for body in bodies]


@attack(403, 404)
def another_tenants_program(target: Target) -> list[Reply]:
    digest = target.program.digest
    wanted = {"programs": [digest], "repeats": 1}
    return [
        target.ask("HEAD", f"/v1/programs/{digest}", who="bob"),
        target.run(request_for(target, "shared", target.stored.bob.digest), who="bob"),
        target.ask("POST", "/v1/profile", json.dumps(wanted).encode(), who="bob"),
    ]


# --------------------------------------------------------------------------------------- misleading names


def names_elsewhere(target: Target) -> list[str]:
    url = f"http://{target.trap_address}"
    names = [
        "..",
        ".",
        "/",
        "../..",
        "../shared",
        "shared/../private",
        "shared/",
        "//host/share",
        "\\\\host\\share",
    ]
    names += [
        url,
        f"{url}/datasets",
        f"{url.replace('http', 'https')}/",
        f"s3://{target.trap_address}/bucket",
    ]
    names += [
        "file:///etc/passwd",
        "file://localhost/etc",
        "s3://bucket/key",
        "memory://x",
        "gopher://x",
        "data:,x",
    ]
    names += [
        "/etc/passwd",
        "%2e%2e%2f",
        "..%2f..%2fetc",
        "shared\x00",
        "shared\n",
        " shared",
        "sharé",
        "${HOME}",
    ]
    return [*names, "~root", "x" * 65, "x" * 5000, ""]


@attack(400, 404)
def names_that_lead_elsewhere(target: Target) -> list[Reply]:
    fields = json.loads(frames_of(body_of(good_request(target.stored, target.program)))[0].header)
    dataset = fields["dataset"]
    changes = [
        change
        for name in names_elsewhere(target)
        for change in (
            {"dataset": {**dataset, "store": name}},
            {"dataset": {**dataset, "digest": name}},
            {"dataset": {**dataset, "uri": name}},
            {"dataset": name},
            {"program": name},
            {"weights": name},
            {"larger": [{"program": name, "micro_batch": 8}]},
        )
    ]
    bodies = [frame_head(FrameKind.REQUEST, json.dumps({**fields, **change}).encode()) for change in changes]
    return [target.run(body) for body in bodies]


@attack(400, 404, 405, 413)
def programs_of_names_that_lead_elsewhere(target: Target) -> list[Reply]:
    replies = []
    for name in names_elsewhere(target):
        path = f"/v1/programs/{quote(name, safe='')}"
        replies += [target.ask("HEAD", path), target.ask("PUT", path, b"x" * 100)]
        asked = json.dumps({"programs": [name]}).encode()
        replies.append(target.ask("POST", "/v1/profile", asked))
    return replies


# ------------------------------------------------------------------------------------------- false frames


SENT = MicroBatch(ids=(1,), position=0, tensors=(torch.zeros(4, 6), torch.ones(4, dtype=torch.int64)))
ALONG = RunRequest(micro_batches=((1,),), start=0, stop=0, micro_batch=4)


def with_header(change: Callable[[Any], object], payload: bytes | None = None) -> bytes:
    """Return a request and a data frame whose header is changed."""
    request, data = frames_of(wire_of(ALONG, SENT))
    header = json.loads(data.header)
    change(header)
    sent = data.payload if payload is None else payload
    return wire([request, Frame(data.kind, json.dumps(header).encode(), sent)])


def with_prefix(header_nbytes: int, payload_nbytes: int) -> bytes:
    """Return a request and a data frame whose prefix is wrong."""
    request, data = frames_of(wire_of(ALONG, SENT))
    prefix = PREFIX.pack(b"UPRV", VERSION, FrameKind.DATA, 0, header_nbytes, payload_nbytes)
    return wire([request, Frame(data.kind, data.header, data.payload, prefix)])


def first_tensor(**fields: Any) -> bytes:
    return with_header(lambda header: header["tensors"][0].update(fields))


@attack(400)
def prefixes_that_claim_too_much(target: Target) -> list[Reply]:
    header_nbytes = len(frames_of(wire_of(ALONG, SENT))[1].header)
    lies = [(header_nbytes, 8 << 30), (header_nbytes, (1 << 64) - 1), ((1 << 32) - 1, 0), ((1 << 20) + 1, 96)]
    return [
        target.run(with_prefix(*lie)) for lie in [*lies, (0, 0), (header_nbytes, 0), (header_nbytes, 1 << 29)]
    ]


@attack(400)
def headers_that_claim_too_much(target: Target) -> list[Reply]:
    many = [{"dtype": "uint8", "shape": [1], "strides": [1], "storage": 0, "offset": 0}] * 10_000
    bodies = [
        with_header(lambda header: header.update(tensors=many)),
        with_header(lambda header: header.update(tensors=1 << 40)),
        with_header(lambda header: header["storages"].append({"nbytes": 8 << 30, "skew": 0})),
        with_header(lambda header: header["storages"][0].update(nbytes=8 << 30)),
        with_header(lambda header: header["storages"][0].update(nbytes=(1 << 63) - 1)),
        with_header(lambda header: header.update(ids=list(range(100_000)))),
        first_tensor(shape=[1 << 40, 6]),
        first_tensor(shape=[1 << 40] * 16),
        first_tensor(shape=[0, 1 << 47], strides=[0, 0]),
        first_tensor(shape=[1 << 30, 1], strides=[0, 0]),
        first_tensor(shape=[1] * 10_000, strides=[1] * 10_000),
    ]
    return [target.run(body) for body in bodies]


@attack(400)
def strides_that_leave_the_payload(target: Target) -> list[Reply]:
    strides = [[-6, 1], [6, -1], [1 << 40, 1], [(1 << 63) - 1, 1], [1 << 64, 1], [7, 1], [6, 2], [24, 6]]
    places = [{"offset": 1}, {"offset": -1}, {"offset": 1 << 62}, {"storage": 9}, {"storage": -1}]
    return [
        *(target.run(first_tensor(strides=each)) for each in strides),
        *(target.run(first_tensor(**each)) for each in places),
        target.run(first_tensor(dtype="object")),
        target.run(first_tensor(dtype="complex128")),
    ]


@attack(400)
def json_of_a_hundred_thousand_levels(target: Target) -> list[Reply]:
    levels = 100_000
    request, data = frames_of(wire_of(ALONG, SENT))
    deep = [b"[" * levels, b"[" * levels + b"]" * levels, b'{"a":' * levels + b"1" + b"}" * levels]
    replies = []
    for text in deep:
        replies.append(target.run(frame_head(FrameKind.REQUEST, text)))
        replies.append(target.run(frame_head(FrameKind.REQUEST, b'{"micro_batches":' + text + b"}")))
        replies.append(target.run(wire([request, Frame(data.kind, b'{"ids":' + text + b"}", data.payload)])))
        replies.append(target.run(frame_head(FrameKind.ERROR, b'{"error":' + text + b"}")))
        replies.append(target.put(b'{"schema":"upriver.program/2","nodes":' + text + b"}", b""))
    shallower = b"[" * 8_000
    replies.append(target.ask("POST", "/v1/profile", b'{"programs":' + shallower))
    return replies


# ---------------------------------------------------------------------------------------- endless bodies


@attack(413)
def a_body_of_10_gb_that_is_only_announced(target: Target) -> list[Reply]:
    replies = []
    for method, path in (("POST", "/v1/run"), ("PUT", f"/v1/programs/{'0' * 64}"), ("POST", "/v1/profile")):
        with target.raw() as connection:
            connection.sendall(target.head(method, path, "Content-Length: 10000000000") + b"x" * 20_000)
            replies.append(first_reply(connection))
    return replies


def chunked(first: bytes, then: bytes) -> Iterator[bytes]:
    """Yield chunks for ever."""
    for data in itertools.chain([first] if first else [], itertools.repeat(then)):
        yield b"%x\r\n%s\r\n" % (len(data), data)


@attack(400, 413)
def bodies_that_never_end(target: Target) -> list[Reply]:
    header = {
        "ids": [1],
        "position": 0,
        "skipped": [],
        "checksum": "0" * 16,
        "storages": [{"nbytes": 1 << 29, "skew": 0}],
        "tensors": [{"dtype": "uint8", "shape": [1 << 29], "strides": [1], "storage": 0, "offset": 0}],
    }
    begun = wire_of(ALONG) + frame_head(FrameKind.DATA, json.dumps(header).encode(), 1 << 29)
    ends = [frame_head(FrameKind.END, b"")] * 1000
    replies = []
    for path, first, then in (
        ("/v1/run", begun, bytes(1 << 16)),
        ("/v1/run", b"", bytes(1 << 16)),
        ("/v1/run", wire_of(ALONG), b"".join(ends)),
        ("/v1/run", b"UPRV", b"\x00"),
        ("/v1/profile", b'{"programs": [', b" " * (1 << 12)),
        ("/v1/profile", b"", b" "),
    ):
        with target.raw() as connection:
            connection.sendall(target.head("POST", path, "Transfer-Encoding: chunked"))
            sent = send_until_answered(connection, chunked(first, then), most=4 * BODY_BYTES)
            assert sent <= 4 * BODY_BYTES, path
            replies.append(first_reply(connection))
    with target.raw() as connection:
        connection.sendall(target.head("PUT", f"/v1/programs/{'0' * 64}", "Transfer-Encoding: chunked"))
        send_until_answered(connection, chunked(b"", bytes(1 << 16)), most=4 * BODY_BYTES)
        replies.append(first_reply(connection))
    return replies


# ------------------------------------------------------------------------------------------ stored samples


def samples(target: Target, name: str, dataset: Any, *, stop: int = 0, **fields: Any) -> Reply:
    """Request one sample of a dataset by the name of its file."""
    row = next(row for row in range(len(dataset)) if dataset.locate([row])[0].object.endswith(f"/{name}"))
    request = RunRequest(
        micro_batches=((row,),),
        start=dataset.chain.start,
        stop=stop,
        micro_batch=4,
        dataset=DatasetRef(store="shared", digest=dataset.digest),
        **fields,
    )
    return target.run(body_of(request))


@attack(422)
def images_that_would_fill_the_memory(target: Target) -> list[Reply]:
    replies = [
        samples(target, name, target.stored.bombs)
        for name in ("huge.png", "long.png", "swelling.png", "hidden.png")
    ]
    assert "50000 x 50000" in replies[0].message
    return replies


@attack(400, 413)
def indexes_that_would_fill_the_memory(target: Target) -> list[Reply]:
    store, stages = target.stored.alice.store, target.stored.alice.chain.to_json()
    replies = []
    for groups in (20, 50):
        index = of_one_value(1 << 20, groups=groups)
        chain = json.dumps(
            {
                "schema": "upriver.dataset/1",
                "layout": "folders",
                "format": "image",
                "count": groups << 20,
                "classes": ["one"],
                "index": {"sha256": hashlib.sha256(index).hexdigest(), "bytes": len(index)},
                "stages": stages,
            }
        ).encode()
        digest = hashlib.sha256(chain).hexdigest()
        store.put(f".upriver/datasets/{digest}/index.parquet", index)
        store.put(f".upriver/datasets/{digest}/chain.json", chain)
        replies.append(target.run(request_for(target, "shared", digest)))
    assert "of memory to open its index; at most" in replies[0].message
    assert f"at most {MAX_ROWS} rows, got {50 << 20}" in replies[1].message
    return replies


@attack(413)
def an_image_beyond_what_the_operator_allows(target: Target) -> list[Reply]:
    replies = [
        samples(target, "large.png", target.stored.bombs),
        samples(target, "large.png", target.stored.bombs, on_bad_sample="skip"),  # the sample is not bad
    ]
    assert all(f"at most {PIXELS}" in each.message for each in replies)
    return replies


@attack(422)
def arrays_that_say_more_than_there_is(target: Target) -> list[Reply]:
    return [samples(target, f"{name}.npy", target.stored.lies) for name in ("many", "deep", "minus", "short")]


@attack(400, 413)
def more_rows_than_memory_has(target: Target) -> list[Reply]:
    """Request few samples in a micro-batch of many rows, and many micro-batches."""
    request = good_request(target.stored, target.program)
    return [
        target.run(body_of(changed(request, micro_batch=65_536, program=None, stop=0))),
        target.run(body_of(changed(request, micro_batches=((0,),) * 5000))),
        target.run(body_of(changed(request, micro_batches=((0,) * 4,) * 1000 + ((0,),) * 100))),
        target.run(body_of(changed(request, micro_batches=((1 << 47,),)))),
    ]


# ------------------------------------------------------------------------------------------------ programs


def graph_of(target: Target, change: Callable[[Any], object]) -> bytes:
    graph = json.loads(target.program.graph_bytes)
    change(graph)
    return msgspec.json.encode(graph)


def use_operator(name: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        graph["operators"][name] = graph["operators"].pop(graph["nodes"][0]["op"], "0" * 16)
        graph["nodes"][0]["op"] = name

    return change


def go_round(graph: Any) -> None:
    """Let the first operator read the output of the last one."""
    graph["nodes"][0]["args"][0] = {"tensor": graph["nodes"][-1]["outputs"][0]["name"]}


def every_spec(**fields: Any) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        for value in [*graph["inputs"], *graph["nodes"][0]["outputs"]]:
            value["spec"].update(fields)

    return change


@attack(400)
def graphs_that_do_what_they_may_not(target: Target) -> list[Reply]:
    huge = [4, 1 << 62, 1 << 62, 1 << 62]
    changes: list[Callable[[Any], object]] = [
        *(
            use_operator(name)
            for name in ("as_strided.default", "relu_.default", "os.system", "load.default")
        ),
        *(
            use_operator(name)
            for name in ("bernoulli.p", "set_.source_Storage", "prim.PythonOp", "__import__")
        ),
        go_round,
        every_spec(shape=huge, stride=[1, 1, 1, 1]),
        every_spec(shape=huge, stride=[0, 0, 0, 0]),
        every_spec(shape=[4, -1, 16, 16]),
        every_spec(dtype="object"),
        every_spec(stride=[1 << 62, 1 << 62, 1 << 62, 1 << 62]),
        lambda graph: graph.update(micro_batch=1 << 62),
        lambda graph: graph.update(micro_batch=0),
        lambda graph: graph.update(code="import os"),
        lambda graph: graph.update(weights_digest="../../etc/passwd"),
        lambda graph: graph["weights"][0].update(key="../../etc/passwd"),
        lambda graph: graph["nodes"][0].update(args=[{"eval": "1+1"}]),
        lambda graph: graph["stages"][0].update(stop=1 << 40),
    ]
    weights = bytes(target.program.weights_bytes)
    return [target.put(graph_of(target, change), weights) for change in changes]


@attack(400, 413, held=True)
def a_graph_of_a_million_nodes(target: Target) -> list[Reply]:
    graph = json.loads(target.program.graph_bytes)
    before, after = msgspec.json.encode({**graph, "nodes": ["@nodes@"]}).split(b'"@nodes@"')
    node = b'{"op":"","args":[],"kwargs":{},"outputs":[]}'
    return [target.put(before + b",".join([node] * 1_000_000) + after, bytes(target.program.weights_bytes))]


@attack(400, 413)
def a_constant_that_would_fill_the_memory(target: Target) -> list[Reply]:
    """Upload a few hundred bytes that make more than the budget when the program is loaded."""
    elements = BUDGET_BYTES // 4 + (256 << 20)
    nodes = [
        node("full.default", [[elements], 1.0], "table", [elements]),
        node("sum.default", [{"tensor": "table"}], "total", []),
        node("mul.Tensor", [{"tensor": "x"}, {"tensor": "total"}], "y", [4, 2]),
    ]
    stage = {"name": "s", "kind": "k", "stop": 3, "live": ["y"], "out_bytes": 0.0}
    weights = weights_file.encode({})
    graph = {
        "schema": SCHEMA,
        "micro_batch": 4,
        "device": "cpu",
        "autocast": None,
        "operators": fingerprints(each["op"] for each in nodes),
        "weights_digest": digest_of(weights),
        "inputs": [value("x", [4, 2])],
        "weights": [],
        "nodes": nodes,
        "stages": [{**stage, "param_bytes": 0, "flops": 0.0, "peak_bytes": 0.0}],
    }
    return [target.put(msgspec.json.encode(graph), weights)]


def node(op: str, args: list[Any], name: str, shape: list[int]) -> dict[str, Any]:
    return {"op": op, "args": args, "kwargs": {}, "outputs": [value(name, shape)]}


def value(name: str, shape: list[int]) -> dict[str, Any]:
    stride = list(torch.empty(shape, device="meta").stride())
    return {"name": name, "spec": {"dtype": "float32", "shape": shape, "stride": stride}}


@attack(400)
def weights_that_are_not_what_their_header_says(target: Target) -> list[Reply]:
    data = bytes(target.program.weights_bytes)
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = next(iter(header))
    lies: list[dict[str, Any]] = [
        {"shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"shape": [0, 1 << 62], "data_offsets": [0, 0]},
        {"data_offsets": [-64, 64]},
        {"data_offsets": [1 << 62, 1 << 62]},
        {"dtype": "PICKLE"},
        {"shape": [1] * 5000},
    ]
    files = [put_together({**header, name: {**header[name], **lie}}, body) for lie in lies]
    files += [struct.pack("<Q", (1 << 64) - 1) + data[8:], struct.pack("<Q", 1 << 33) + data[8:], data[:20]]
    files += [put_together(header, body[:-64]), put_together(header, body + bytes(64)), b"\x80\x04K\x01."]
    replies = []
    for weights in files:
        digest = hashlib.sha256(weights).hexdigest()
        graph = graph_of(target, lambda graph, digest=digest: graph.update(weights_digest=digest))
        replies.append(target.put(graph, weights))
    return replies


def put_together(header: dict[str, Any], body: bytes) -> bytes:
    """Return a weights file with this header, its tensors on 64-byte boundaries."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text + body


# ------------------------------------------------------------------------------------------------- tests


LONG = {"a_graph_of_a_million_nodes", "indexes_that_would_fill_the_memory"}
"""Attacks that are refused after many seconds of work."""


@pytest.mark.parametrize("name", often(sorted(ATTACKS), *(ATTACKS.keys() - LONG)))
def test_it_is_refused_and_leaves_nothing_behind(target: Target, name: str) -> None:
    kind = ATTACKS[name]
    expect(kind, kind.attack(target))  # the first run loads whatever is loaded once
    before, peaks = target.memory(), Peaks(target.processes)
    expect(kind, kind.attack(target))
    grew = peaks.grew()
    if grew is not None and not kind.held:
        assert grew < LIMIT_BYTES
    wait_for(lambda: target.memory() - before < LIMIT_BYTES)
    assert target.outward() == []
    assert_unharmed(target)


def expect(kind: Kind, replies: list[Reply]) -> None:
    """Assert that all were refused, with errors that reveal nothing but the request's own words."""
    assert replies
    unlike = [each for each in replies if each.status not in kind.statuses]
    assert not unlike, unlike[:5]


def test_no_refusal_tells_a_token_or_a_place(target: Target) -> None:
    """The location of a store belongs to the operator, and a token to its owner."""
    secret = [*target.tokens.values(), target.stored.alice.store.uri, target.stored.private.store.uri]
    missing = request_for(target, "shared", "0" * 64)
    replies = [
        target.run(missing),
        target.run(request_for(target, "shared", target.stored.alice.digest, program="1" * 64)),
        target.ask("PUT", f"/v1/programs/{'0' * 64}", b"x" * 100),
        *another_tenants_store(target),
        *another_tenants_folder(target),
        *no_token(target),
    ]
    told = " ".join(each.message for each in replies)
    assert "0" * 64 in told
    assert [text for text in secret if text in told] == []


def test_a_bomb_that_may_be_skipped_is(target: Target) -> None:
    dataset = target.stored.bombs
    names = [ref.object.rpartition("/")[2] for ref in dataset.locate(range(len(dataset)))]
    rows = [row for row, name in enumerate(names) if name != "large.png"]
    request = RunRequest(
        micro_batches=(tuple(rows[:4]), tuple(rows[4:])),
        start=dataset.chain.start,
        stop=0,
        micro_batch=4,
        dataset=DatasetRef(store="shared", digest=dataset.digest),
        on_bad_sample="skip",
    )
    before = target.memory()
    answer = good_answer(target.server, target.tokens["alice"], request)
    skipped = {row for batch in answer for row in batch.skipped}
    assert {names[row] for row in rows if row not in skipped} == {"fine.png"}
    wait_for(lambda: target.memory() - before < LIMIT_BYTES)


def test_strides_that_overlap_are_read_as_they_stand(target: Target) -> None:
    """Overlapping strides are valid: a kernel may leave its result so, and its bits depend on them."""
    reply = target.run(first_tensor(strides=[1, 1]))
    assert (reply.status, reply.code) == (200, "")


def test_every_attack_has_been_tried() -> None:
    assert len(ATTACKS) >= 20
