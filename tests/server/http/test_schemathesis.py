"""Test requests generated from the OpenAPI document: each answer is documented, and none is a fault.

A test run sends some hundred; with ``UPRIVER_FUZZ=10000`` it sends that many (``scripts/fuzz``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.server.broken_bodies import CASES, SEED, make, note, valid_bodies
from tests.server.conftest import CAPS, World, make_world
from tests.server.running import Running, ask, running
from upriver.protocol import program_head
from upriver.server.http.openapi import FRAMES, document

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its warnings at import are its own affair
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    import requests
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

from fuzz_mutations import make as make_program
from fuzz_mutations import seeds as valid_programs

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200), pytest.mark.filterwarnings("default")]

REQUESTS = CASES or 600
TOKEN = "open-sesame"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE_S = 60.0

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

PROGRAM = "/v1/programs/{digest}"

SHARES = {
    ("POST", "/v1/run", "positive"): 0.3,
    ("PUT", PROGRAM, "positive"): 0.2,
    ("POST", "/v1/profile", "positive"): 0.1,
    ("POST", "/v1/profile", "negative"): 0.2,
    ("HEAD", PROGRAM, "positive"): 0.05,
    ("HEAD", PROGRAM, "negative"): 0.05,
    ("GET", "/v1/probe", "positive"): 0.05,
    ("GET", "/v1/probe", "negative"): 0.05,
    ("POST", "/v1/probe", "positive"): 0.05,
}
"""Shares of all requests, by what can be generated. Any bytes are a valid body of bytes, so none is
"negative".
"""

FAULTS = {500, 502}
"""Statuses that no request may cause. 503 and 504 may come: the generated values include deadlines."""

PLAIN = sorted(
    (method.upper(), path)
    for path, item in document()["paths"].items()
    for method in item
    if method != "parameters" and not any((method.upper(), path) == each[:2] for each in SHARES)
)
"""Operations for which only headers can be generated."""

sent: Counter[str] = Counter()
statuses: Counter[int] = Counter()
began = time.monotonic()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Make a separate store, because the tests put much into it."""
    return make_world(tmp_path_factory.mktemp("made-up"))


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Running]:
    """Start a server with a token, little memory, and the world's program."""
    with running(world.store.uri, caps=CAPS, workers=2, token=TOKEN, memory_budget_bytes=2 << 30) as server:
        server.wait_ready()
        program = world.program
        body = program_head(len(program.graph_bytes)) + program.graph_bytes + bytes(program.weights_bytes)
        path = f"/v1/programs/{program.digest}"
        assert ask(server, "PUT", path, body, headers=AUTHORIZED)[0] == 201
        yield server


@pytest.fixture(scope="module")
def schema(served: Running, world: World) -> Any:
    """Load the document that the server returns, and register how its bodies of bytes are generated."""
    bodies = valid_bodies(world.request((0, 3), (1,)), world.request((2, 5), stop=2))
    programs = valid_programs()
    numbers = st.integers(0, 2**32 - 1)
    schemathesis.openapi.media_type(FRAMES, numbers.map(lambda number: make(number, bodies).body))
    schemathesis.openapi.media_type(
        "application/octet-stream",
        numbers.map(lambda number: upload(make_program(SEED, number, programs).files)),
    )
    return schemathesis.openapi.from_dict(
        json.loads(ask(served, "GET", "/openapi.json", headers=AUTHORIZED)[2])
    )


def upload(files: Any) -> bytes:
    """Return a program as it is sent."""
    return program_head(len(files.graph)) + files.graph + files.weights


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Yield a session whose connections are kept."""
    with requests.Session() as found:
        found.trust_env = False  # no proxy from the environment, and no password
        yield found


def fuzzed(strategy: Any, count: int, check: Any) -> None:
    """Pass ``count`` generated cases to ``check``."""

    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def each(case: Any) -> None:
        check(case)

    each()


@pytest.mark.parametrize(("method", "path", "mode"), list(SHARES))
def test_what_is_made_up_is_answered_as_documented(
    served: Running, schema: Any, session: requests.Session, world: World, method: str, path: str, mode: str
) -> None:
    modes = {"positive": GenerationMode.POSITIVE, "negative": GenerationMode.NEGATIVE}
    strategy = schema[path][method].as_strategy(generation_mode=modes[mode])
    count = math.ceil(REQUESTS * SHARES[method, path, mode])

    def check(case: Any) -> None:
        adapt(case, world.program.digest)
        answered(case, served, session)
        sent[f"{method} {path} {mode}"] += 1

    fuzzed(strategy, count, check)
    assert sent[f"{method} {path} {mode}"] >= count


@pytest.mark.parametrize(("method", "path"), PLAIN)
def test_what_takes_nothing_is_answered_as_documented(
    served: Running, schema: Any, session: requests.Session, method: str, path: str
) -> None:
    fuzzed(schema[path][method].as_strategy(), 5, lambda case: answered(case, served, session))


def adapt(case: Any, digest: str) -> None:
    """Adapt a case so that more of them pass the first check."""
    if case.method == "POST" and case.path == "/v1/probe":
        return  # any bytes will do
    if case.path == "/v1/probe" and re.fullmatch(r"[0-9]{1,8}", str(case.query.get("bytes"))):
        nbytes = int(case.query["bytes"]) % (1 << 16)  # not 64 MiB, hundreds of times
        case.query = {**case.query, "bytes": nbytes}
    elif case.method == "PUT" and isinstance(case.body, bytes) and case.body:
        nbytes = int.from_bytes(case.body[:8], "big")
        case.path_parameters = {"digest": hashlib.sha256(case.body[8 : 8 + nbytes]).hexdigest()}
    elif case.path == "/v1/profile" and isinstance(case.body, dict):
        named = case.body.get("programs")
        if isinstance(named, list) and named and case.body.get("stop") in (None, 0, 1):
            case.body = {**case.body, "programs": [digest, *named[1:]]}


def answered(case: Any, server: Running, session: requests.Session) -> None:
    """Send a case, and check the answer against the document."""
    response = case.call_and_validate(
        base_url=server.url, session=session, headers=AUTHORIZED, checks=CHECKS, timeout=PATIENCE_S
    )
    statuses[response.status_code] += 1
    assert response.status_code not in FAULTS


@pytest.mark.parametrize("path", ["/v1/info", "/v1/load", "/metrics", "/ui", "/openapi.json"])
def test_without_a_token_the_answer_is_documented_too(
    served: Running, schema: Any, session: requests.Session, path: str
) -> None:
    def check(case: Any) -> None:
        case.headers.pop("Authorization", None)
        response = case.call(base_url=served.url, session=session, timeout=PATIENCE_S)
        assert response.status_code == 401
        case.validate_response(response, checks=CHECKS)

    fuzzed(schema[path]["GET"].as_strategy(), 3, check)


def test_the_server_is_as_it_was(served: Running, world: World) -> None:
    """Run after all the other tests."""
    total = sum(sent.values())
    by_status = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    seconds = time.monotonic() - began
    note(f"schemathesis: {total} cases, seed {SEED}, {seconds:.0f} s: {by_status}")
    assert ask(served, "GET", "/readyz")[0] == 200
    lines = ask(served, "GET", "/metrics", headers=AUTHORIZED)[2].decode().splitlines()
    assert not [line for line in lines if line.startswith("upriver_requests_total") and 'code="500"' in line]
    assert not FAULTS & set(statuses)
    if total >= REQUESTS >= 5_000:  # the whole of a long run
        assert statuses[200] > 0 and statuses[201] > 0 and statuses[400] > 0 and statuses[404] > 0
        assert sum(count for status, count in statuses.items() if status >= 500) <= total / 100
