"""Check that broken run requests are refused with the right error, and nothing else happens.

The reader in this process gets 10,000 of them; real, reused connections carry some hundred. With
``UPRIVER_FUZZ=10000`` that many go over connections (``scripts/fuzz``); ``UPRIVER_FUZZ_SEED`` selects others.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from tests.server.broken_bodies import (
    CASES,
    KINDS,
    SEED,
    Case,
    frames_of,
    made_up_request,
    make,
    note,
    pieces,
    valid_bodies,
    wire,
)
from tests.server.running import ask, connect, run
from upriver.errors import DeadlineExceeded, ProtocolError, UpriverError
from upriver.program.graph.executor import Program
from upriver.protocol import Caps, End, RunRequest, program_head, read_frame
from upriver.server.http.errors import STATUS
from upriver.server.http.request_body import read_body
from upriver.types import MicroBatch

IN_PROCESS = max(CASES, 10_000)
OVER_HTTP = CASES or 500

CAPS = Caps(header_bytes=1 << 17, payload_bytes=1 << 20, body_bytes=1 << 20, samples=4096)
"""Caps as small as the bodies, so that anything beyond the caps shows."""

PATIENCE_S = 60.0
"""Seconds for one answer; the slowest takes some milliseconds."""

CLIENTS_FAULT = {kind.code for kind, status in STATUS if status < 500} | {DeadlineExceeded.code}
"""Errors explained by the client's own fault. A changed deadline of half a second may expire."""


# ------------------------------------------------------------------------------------- in this process


async def read_all(count: int) -> Counter[str]:
    """Count the bodies that the reader accepts or refuses."""
    bodies = valid_bodies(made_up_request())
    outcomes: Counter[str] = Counter()
    for number in range(count):
        case = make(number, bodies)
        try:
            request, batches = await read_body(chunks(pieces(number, case.body)), CAPS)
        except ProtocolError as error:
            outcomes[f"{case.kind}: refused"] += 1
            assert 0 < len(str(error)) < 100_000, case.name
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
        else:
            outcomes[f"{case.kind}: accepted"] += 1
            check(request, batches, case.name)
    return outcomes


async def chunks(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def check(request: RunRequest, batches: Sequence[MicroBatch], name: str) -> None:
    """Assert that an accepted body keeps to the caps, and its tensors lie in memory of their own."""
    request.check(CAPS)
    for batch in batches:
        assert len(batch.ids) <= request.micro_batch, name
        for tensor in batch.tensors:
            assert tensor.numel() * tensor.itemsize <= CAPS.payload_bytes, name
            tensor.clone()


def test_ten_thousand_broken_bodies_give_protocol_errors_and_nothing_else() -> None:
    began = time.monotonic()
    outcomes = asyncio.run(read_all(IN_PROCESS))
    seconds = time.monotonic() - began
    note(f"frames, in process: {IN_PROCESS} cases, seed {SEED}, {seconds:.0f} s: {summary(outcomes)}")
    assert sum(outcomes.values()) == IN_PROCESS
    for kind in KINDS:
        assert outcomes[f"{kind}: {'accepted' if kind == 'as it was' else 'refused'}"] > 50, kind
    assert outcomes["as it was: refused"] == 0
    # Later checks are reached only if some of the changed bodies are still valid.
    assert outcomes["header edited: accepted"] > 5
    assert outcomes["payload changed: accepted"] > 20


def summary(outcomes: Counter[str]) -> str:
    """Return the accepted and refused bodies over all kinds."""
    whole: Counter[str] = Counter()
    for outcome, count in outcomes.items():
        whole[outcome.rpartition(": ")[2]] += count
    return ", ".join(f"{count} {outcome}" for outcome, count in whole.most_common())


def test_a_body_can_be_made_again() -> None:
    bodies = valid_bodies(made_up_request())
    first = [make(number, bodies) for number in range(200)]
    assert [make(number, bodies) for number in range(200)] == first
    assert [make(number, bodies, seed=SEED + 1).body for number in range(200)] != [
        case.body for case in first
    ]
    assert len({case.body for case in first}) > 150
    assert all(wire(frames_of(body)) == body for body in bodies)


# ------------------------------------------------------------------------------------ over connections


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_broken_bodies_over_kept_connections_do_the_server_no_harm(server: Any, world: Any) -> None:
    requests = [world.request((0, 3), (1,)), world.request((0, 1, 2, 3), stop=-2, on_bad_sample="skip")]
    put(server, world.program)
    requests.append(world.request((2, 5, 7), stop=2))
    before = [run(server, request) for request in requests]
    faults = own_faults(server)
    bodies = valid_bodies(*requests)
    outcomes: Counter[str] = Counter()
    expected = {"200", "400 protocol", "404 not_found"}
    began = time.monotonic()
    connection = connect(server)
    connection.timeout = PATIENCE_S
    try:
        # Bodies hold digests of this run's files, so which case meets which check is chance.
        for number in range(10 * OVER_HTTP):
            if number >= OVER_HTTP and expected <= set(outcomes):
                break
            case = make(number, bodies)
            outcomes[told(connection, case)] += 1
    finally:
        connection.close()
    seconds = time.monotonic() - began
    counts = ", ".join(f"{count} x {outcome}" for outcome, count in outcomes.most_common())
    note(f"frames, over HTTP: {sum(outcomes.values())} cases, seed {SEED}, {seconds:.0f} s: {counts}")
    assert sum(outcomes.values()) >= OVER_HTTP
    assert expected <= set(outcomes)
    assert ask(server, "GET", "/readyz")[0] == 200
    assert own_faults(server) == faults
    for request, wanted in zip(requests, before, strict=True):
        for got, expected in zip(run(server, request), wanted, strict=True):
            assert (got.ids, got.position, got.skipped) == (expected.ids, expected.position, expected.skipped)
            assert all(map(torch.equal, got.tensors, expected.tensors))


def put(server: Any, program: Program) -> None:
    """Upload a program, so that a request may get as far as computing."""
    body = program_head(len(program.graph_bytes)) + program.graph_bytes + bytes(program.weights_bytes)
    assert ask(server, "PUT", f"/v1/programs/{program.digest}", body)[0] == 201


def own_faults(server: Any) -> tuple[float, float, float]:
    """Return the counts of lost workers and of unexplained errors."""
    return (
        server.metric("upriver_worker_restarts_total"),
        server.metric("upriver_requests_total", 'code="500"'),
        server.metric("upriver_errors_total", 'code="error"'),
    )


def told(connection: http.client.HTTPConnection, case: Case) -> str:
    """Return status and code of the answer; assert that the client's own fault explains it."""
    try:
        connection.request("POST", "/v1/run", body=case.body)
        response = connection.getresponse()
        body = response.read()
    except TimeoutError:
        raise AssertionError(f"{case.name}: no whole answer within {PATIENCE_S:g} s") from None
    if response.status == 200:
        return frames_told(body, case)
    assert response.status >= 400, f"{case.name}: {response.status}"
    error = json.loads(body)["error"]
    assert error["code"] in CLIENTS_FAULT, f"{case.name}: {error}"
    return f"{response.status} {error['code']}"


def frames_told(body: bytes, case: Case) -> str:
    """Return 200, with the code of the error frame that ended the answer early, if any."""
    stream = io.BytesIO(body)
    while True:
        message = read_frame(stream)
        if isinstance(message, UpriverError):
            assert message.code in CLIENTS_FAULT, f"{case.name}: {message.code}: {message}"
            return f"200 {message.code}"
        if isinstance(message, End):
            assert not stream.read(), case.name
            return "200"
