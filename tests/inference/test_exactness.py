"""Check that answers are bit for bit where a server proves it, else within a tolerance, decided once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.children import ended, fork
from tests.inference.asking import SELDOM, chain, here, let_in
from tests.program.nets import Small
from tests.server.running import Running, free_port, running, wait_for
from upriver.errors import NotExact
from upriver.inference.offload import Offload
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.tolerance import COARSER, FLOAT32

ISA = "onednn_max_cpu_isa 'SSE41' there, '' here"
NOBODY = "bit for bit so far: no server took part"


def started_other(store: str, *, port: int = 0) -> EmbeddedServer:
    """Start a server with another instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # for the server only: this process has chosen already
        return EmbeddedServer.start({"default": store}, threads=1, port=port)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tmp_path_factory.mktemp("store").as_uri()


@pytest.fixture(scope="module")
def other(store: str) -> Iterator[str]:
    """Return the address of a server with another instruction set."""
    with started_other(store) as server:
        yield server.url


@pytest.fixture(scope="module")
def model() -> Small:
    torch.manual_seed(0)
    return Small()


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def asking(model: Small, *urls: str, **options: Any) -> Offload:
    return upriver.offload(model, example_inputs=X, servers=urls, cut=0, **SELDOM, **options)


def asked(answer: Offload) -> str:
    """Make a request, and return the server that answered it."""
    answer(X)
    assert answer.last is not None
    return answer.last.server


def test_a_server_with_the_same_bits_serves_bit_for_bit(model: Small, server: Running) -> None:
    with asking(model, server.url) as answer:
        assert torch.equal(answer(X), here(model, X))
        assert answer.last is not None and answer.last.server == server.url
        assert answer.exactness == "bit for bit"
        assert "Exactness: bit for bit." in answer.why and answer.why == answer.plan.why


@pytest.mark.full
def test_a_server_with_other_bits_serves_within_a_tolerance_that_is_stated(
    model: Small, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), asking(model, other) as answer:
        found = answer(X)
        assert answer.last is not None and answer.last.server == other
        torch.testing.assert_close(found, here(model, X), rtol=FLOAT32.rtol, atol=FLOAT32.atol)
        assert not torch.equal(found, here(model, X))
        assert answer.exactness == f"within {FLOAT32}, since {other} computes with other low bits: {ISA}"
        assert f"Exactness: {answer.exactness}." in answer.why
        assert set(answer.warm()) == {other}
    assert not caplog.records, "a server that is used is no cause for a warning"


@pytest.mark.full
def test_equal_bits_that_no_server_gives_are_an_error_that_names_the_field(model: Small, other: str) -> None:
    with pytest.raises(NotExact, match=f"{ISA}; exact='auto' accepts a tolerance"):
        asking(model, other, exact="bitwise")


@pytest.mark.full
def test_equal_bits_are_no_error_while_some_server_does_not_answer(model: Small, other: str) -> None:
    with asking(model, other, f"http://127.0.0.1:{free_port()}", exact="bitwise") as answer:
        assert asked(answer) == ""
        assert answer.exactness == "bit for bit" and f"Not asked: {other} computes with" in answer.why


@pytest.mark.full
def test_a_tolerance_that_was_asked_for_needs_no_reason(model: Small, other: str) -> None:
    with asking(model, other, exact="numeric") as answer:
        torch.testing.assert_close(answer(X), here(model, X), rtol=FLOAT32.rtol, atol=FLOAT32.atol)
        assert answer.last is not None and answer.last.server == other
        assert answer.exactness == f"within {FLOAT32}"


@pytest.mark.parametrize("exact", ["auto", "bitwise"])
@pytest.mark.full
def test_one_server_with_the_same_bits_keeps_the_others_out(
    exact: str, model: Small, server: Running, other: str
) -> None:
    for urls in ((other, server.url), (server.url, other)):
        with asking(model, *urls, exact=exact) as answer:
            assert torch.equal(answer(X), here(model, X))
            assert answer.last is not None and answer.last.server == server.url
            assert answer.exactness == "bit for bit"
            assert f"Not asked: {other} computes with other low bits: {ISA}" in answer.why


@pytest.mark.full
def test_a_server_that_comes_later_decides_before_its_first_answer(model: Small, store: str) -> None:
    port = free_port()
    with asking(model, f"http://127.0.0.1:{port}") as answer:
        assert asked(answer) == "" and answer.exactness == NOBODY
        with started_other(store, port=port) as late:
            let_in(answer)
            assert (
                answer.exactness == f"within {FLOAT32}, since {late.url} computes with other low bits: {ISA}"
            )
            assert asked(answer) == late.url


@pytest.mark.full
def test_what_was_bit_for_bit_stays_so_after_a_restart_with_other_bits(model: Small, store: str) -> None:
    port = free_port()
    with running(store, port=port) as first, asking(model, first.wait_ready().url) as answer:
        assert asked(answer) == first.url
        first.process.kill()
        first.process.wait()
        with started_other(store, port=port):
            wait_for(lambda: not asked(answer) and ISA in answer.why)
            assert torch.equal(answer(X), here(model, X))
            assert answer.exactness == "bit for bit"


@pytest.mark.full
def test_what_was_within_a_tolerance_takes_servers_with_equal_bits(
    model: Small, store: str, server: Running
) -> None:
    port = free_port()
    with started_other(store, port=port) as first:
        answer = asking(model, first.url)
        said = answer.exactness
        assert said.startswith("within")
    with answer, running(store, port=port) as second:
        second.wait_ready()
        wait_for(lambda: asked(answer) == second.url)
        assert torch.equal(answer(X), here(model, X)) and answer.exactness == said


@pytest.mark.full
def test_other_threads_than_at_the_capture_do_not_matter_within_a_tolerance(model: Small, other: str) -> None:
    with asking(model, other) as answer:
        torch.set_num_threads(2)
        try:
            assert asked(answer) == other
        finally:
            torch.set_num_threads(1)


@pytest.mark.full
def test_another_number_of_threads_is_another_fingerprint(model: Small, server: Running) -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(NotExact, match="threads 1 there, 2 here"):
            asking(model, server.url, exact="bitwise")
        with asking(model, server.url) as answer:
            assert "threads 1 there, 2 here" in answer.exactness and asked(answer) == server.url
    finally:
        torch.set_num_threads(1)


@pytest.mark.full
def test_an_answer_beyond_the_tolerance_keeps_a_server_out(
    model: Small, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.rpc.server_verification.difference", lambda ours, theirs, allowed: "others")
    with asking(model, other) as answer:
        assert asked(answer) == ""
        assert answer.exactness == "bit for bit so far: no server took part"
        assert f"gives others for the example at cut 0, where {FLOAT32} is allowed" in answer.why


def test_the_tolerance_is_larger_where_the_model_computes_in_half_precision(other: str) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        upriver.offload(chain(), example_inputs=torch.randn(1, 64), servers=[other], **SELDOM) as answer,
    ):
        assert answer.exactness.startswith(f"within {COARSER[torch.bfloat16]}, since {other}")


@pytest.mark.full
def test_a_child_keeps_to_what_was_decided_and_decides_what_was_not(
    model: Small, store: str, other: str
) -> None:
    port = free_port()
    with (
        asking(model, other) as decided,
        asking(model, f"http://127.0.0.1:{port}") as undecided,
        started_other(store, port=port) as late,
    ):

        def child() -> bool:
            for answer, url in ((decided, other), (undecided, late.url)):
                wait_for(lambda answer=answer, url=url: asked(answer) == url)  # type: ignore[misc]
                assert answer.exactness.startswith(f"within {FLOAT32}, since {url}")
            return True

        assert ended(fork(child)) == 0
