"""Check the refusal of servers whose fingerprint or canary differs from this process's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.rpc.scripted_http import Exchange, scripted
from upriver.engine.fingerprint import fingerprint
from upriver.errors import NotExact, ServerUnavailable
from upriver.protocol import DEFAULT_CAPS, End, Info, RunRequest
from upriver.rpc import server_verification
from upriver.rpc.client import ServerClient
from upriver.rpc.server_verification import (
    ServerVerifier,
    bring,
    differing_fields,
    fingerprint_difference,
    only,
)
from upriver.rpc.tolerance import COARSER, FLOAT32, Agreement
from upriver.types import MicroBatch, Timings

CPU = torch.device("cpu")
BITWISE = ServerVerifier(device=CPU, agreement=Agreement("bitwise", FLOAT32))
NUMERIC = ServerVerifier(device=CPU, agreement=Agreement("numeric", FLOAT32))
URL = "http://there:7000"
ONES = (torch.ones(4),)


class Program:
    digest, graph_bytes, weights_bytes = "ab" * 32, b"{}", memoryview(b"")


def info_of(*, more_threads: int = 0, device: str = "cpu", **fingerprint_of: str | None) -> Info:
    """Return a server's description: this process's fingerprint, with changes; None leaves a field out."""
    fields = {**fingerprint(), **fingerprint_of}
    return Info(
        version="1",
        fingerprint={name: value for name, value in fields.items() if value is not None},
        stores=("default",),
        micro_batch=4,
        caps=DEFAULT_CAPS,
        device=device,
        workers=1,
        threads=torch.get_num_threads() + more_threads,
    )


@pytest.fixture
def server() -> Iterator[ServerClient]:
    """Yield a client of a server."""
    info = info_of()

    def respond(exchange: Exchange) -> None:
        exchange.plain(200, msgspec.json.encode(info))

    with scripted(respond) as url, ServerClient(url) as client:
        yield client


# ------------------------------------------------------------------------------------------- fingerprints


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "0.1"}, f"torch '0.1' there, {str(torch.__version__)!r} here"),
        ({"torch": None}, f"torch 'none' there, {str(torch.__version__)!r} here"),
        ({"newer": "1"}, "newer '1' there, None here"),
    ],
)
def test_another_fingerprint_is_refused_with_the_field_that_differs(
    change: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = info_of(**change)
    assert fingerprint_difference(theirs.fingerprint) == said
    with pytest.raises(NotExact) as raised:
        BITWISE.check_fingerprint(URL, theirs)
    assert str(raised.value) == f"{URL} computes with other low bits: {said}"
    with caplog.at_level(logging.INFO, "upriver"):
        NUMERIC.check_fingerprint(URL, theirs)
    assert caplog.messages == [f"{URL} has another fingerprint: {said}"]


def test_the_same_fingerprint_passes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "upriver"):
        for verifier in (BITWISE, NUMERIC):
            verifier.check_fingerprint(URL, info_of())
    assert fingerprint_difference(fingerprint()) == "" and not caplog.messages


def test_another_number_of_threads_is_refused_where_both_compute_on_the_cpu() -> None:
    here = torch.get_num_threads()
    with pytest.raises(NotExact, match=f"threads {here + 1} there, {here} here"):
        BITWISE.check_fingerprint(URL, info_of(more_threads=1))
    NUMERIC.check_fingerprint(URL, info_of(more_threads=1))
    BITWISE.check_fingerprint(URL, info_of(more_threads=1, device="cuda"))


ACCELERATOR = {"accelerator": "one", "cuda": "13.0", "cudnn": "9", "conv_precision": "cuda tf32, cpu ieee"}


def test_a_server_on_an_accelerator_may_differ_by_what_tf32_does(server: ServerClient) -> None:
    """Convolutions of accelerators round to TF32 by default, which takes features 0.001 apart."""
    near = (ONES[0] * 1.003,)
    for device, fields, passes in (("cuda", ACCELERATOR, True), ("cpu", {"torch": "0.1"}, False)):
        verifier = ServerVerifier(device=CPU, agreement=Agreement("numeric", FLOAT32))
        verifier.check_fingerprint(URL, info_of(device=device, **fields))
        with contextlib.nullcontext() if passes else pytest.raises(NotExact, match=r"0\.003 of the largest"):
            verifier.check_canary(server, ONES, near, "the canary at cut 2")
        with pytest.raises(NotExact, match=r"0\.05 of the largest"):
            verifier.check_canary(server, ONES, (ONES[0] * 1.05,), "the canary at cut 2")


def test_a_trainer_on_an_accelerator_takes_a_server_on_a_cpu_within_what_tf32_does(
    server: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {**fingerprint(), **ACCELERATOR}
    monkeypatch.setattr(server_verification, "fingerprint", lambda device: ours)
    agreement = Agreement("auto", FLOAT32)
    verifier = ServerVerifier(device=torch.device("cuda"), agreement=agreement)
    with pytest.raises(NotExact, match="accelerator '' there, 'one' here"):
        verifier.check_fingerprint(URL, info_of(more_threads=1))
    assert agreement.try_tolerance("another device")
    verifier.check_fingerprint(URL, info_of(more_threads=1))
    verifier.check_canary(server, ONES, (ONES[0] * 1.003,), "the canary at cut 2")
    assert agreement.allowed is COARSER[torch.float16]


def test_the_first_three_of_many_fields_are_named() -> None:
    theirs = {**fingerprint(), **{f"a{number}": "" for number in range(9)}}
    said = ", ".join(f"a{number} '' there, None here" for number in range(3))
    assert fingerprint_difference(theirs) == said
    assert differing_fields(theirs) == {f"a{number}": ("", None) for number in range(9)}
    less = {name: value for name, value in fingerprint().items() if name != "torch"}
    assert differing_fields(less) == {"torch": (None, str(torch.__version__))}


# ------------------------------------------------------------------------------------------------ canaries


def test_a_canary_of_other_bits_is_refused(server: ServerClient) -> None:
    BITWISE.check_canary(server, ONES, (torch.ones(4),), "the canary at cut 2")
    nudged = ONES[0].nextafter(torch.tensor(2.0))
    with pytest.raises(NotExact) as raised:
        BITWISE.check_canary(server, ONES, (nudged,), "the canary at cut 2")
    assert str(raised.value) == (
        f"{server.url} gives other bits for the canary at cut 2; "
        f"upriver diff MODEL --server {server.url} names the first operator that differs"
    )


def test_a_canary_within_the_tolerance_passes_and_one_beyond_it_is_refused(server: ServerClient) -> None:
    NUMERIC.check_canary(server, ONES, (ONES[0] * 1.0005,), "the canary at cut 2")
    with pytest.raises(NotExact) as raised:
        NUMERIC.check_canary(server, ONES, (ONES[0] * 1.01,), "the canary at cut 2")
    assert str(raised.value) == (
        f"{server.url} gives features that are 0.01 of the largest apart for the canary at cut 2, "
        f"where {FLOAT32} is allowed; upriver diff MODEL --server {server.url} names the first operator that "
        "differs"
    )


# ------------------------------------------------------------------------------------ programs and answers


@pytest.mark.parametrize("status", [200, 404])
def test_a_program_is_uploaded_where_it_is_missing(status: int) -> None:
    asked = list[str]()

    def respond(exchange: Exchange) -> None:
        asked.append(exchange.method)
        exchange.plain(status if exchange.method == "HEAD" else 200)

    with scripted(respond) as url, ServerClient(url) as client:
        bring(client, Program())
    assert asked == (["HEAD"] if status == 200 else ["HEAD", "PUT"])


REQUEST = RunRequest(micro_batches=((7,),), start=0, stop=1, micro_batch=1, program=Program.digest)


def test_an_answer_is_read_to_its_end_so_that_its_connection_serves_again() -> None:
    ports = list[int]()
    batch = MicroBatch(ids=(7,), position=1, tensors=(torch.ones(1),))

    def respond(exchange: Exchange) -> None:
        ports.append(exchange.client_port)
        exchange.frames(batch, Timings(phases={"forward": 0.5}), End())

    with scripted(respond) as url, ServerClient(url) as client:
        for _ in range(2):
            found, timings = only(client.run(REQUEST), 60.0, url=url)
            assert torch.equal(found.tensors[0], batch.tensors[0]) and timings.phases == {"forward": 0.5}
    assert len(set(ports)) == 1


def test_an_answer_that_does_not_come_in_time_is_given_up() -> None:
    def respond(exchange: Exchange) -> None:
        exchange.start_chunks()
        exchange.handler.connection.recv(1)  # until the client hangs up
        exchange.handler.close_connection = True

    with scripted(respond) as url, ServerClient(url) as client, pytest.raises(ServerUnavailable) as raised:
        only(client.run(REQUEST), 0.05, url=url)
    assert str(raised.value) == f"{url}: no answer in time (0.05 s in all)"
