"""Check that a forked child sends its own requests, and each process gets the answers to its own inputs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import pytest
import torch

import upriver
from tests.finetune.children import ended, fork
from tests.inference.asking import SELDOM, chain, far_of, here, proxy
from tests.rpc.scripted_http import Exchange
from tests.server.running import Running, wait_for
from upriver.errors import ConfigError
from upriver.inference.offload import Offload
from upriver.program.capture import export

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="here nothing is forked")


def by_the_server(answer: Offload, x: torch.Tensor, wanted: torch.Tensor, times: int) -> Callable[[], bool]:
    """Return a check that ``times`` right answers come from the server after its admission."""

    def asked() -> bool:
        assert torch.equal(answer(x), wanted)
        return answer.last is not None and bool(answer.last.server)

    return lambda: bool(wait_for(asked)) and all(asked() for _ in range(times))


@pytest.mark.parametrize("hedge_s", [None, pytest.param(3600.0, marks=pytest.mark.full)])
@pytest.mark.full
def test_children_that_ask_at_once_get_their_own_answers(hedge_s: float | None, server: Running) -> None:
    model = chain()
    inputs = [torch.randn(1, 64) for _ in range(3)]
    wanted = [here(model, x) for x in inputs]
    with upriver.offload(
        model,
        example_inputs=inputs[0],
        servers=[server.url],
        cut=0,
        hedge_s=hedge_s,
        **SELDOM,
    ) as answer:
        assert torch.equal(answer(inputs[0]), wanted[0])
        children = [
            fork(by_the_server(answer, x, y, 200)) for x, y in zip(inputs[1:], wanted[1:], strict=True)
        ]
        mine = by_the_server(answer, inputs[0], wanted[0], 200)()
        assert [ended(child) for child in children] == [0, 0]
        assert mine and answer.counts["gave_up"] == 0


@pytest.mark.full
def test_until_a_server_is_let_in_there_the_device_answers(server: Running) -> None:
    model, x, four = chain(), torch.randn(1, 64), torch.randn(4, 64)
    with upriver.offload(model, example_inputs=x, servers=[server.url], cut=2, **SELDOM) as answer:
        answer(four)

        def child() -> bool:
            assert threading.active_count() == 1 and not answer._fars, "not every child asks"
            assert torch.equal(answer(x), here(model, x))
            assert by_the_server(answer, x, here(model, x), 5)()
            assert by_the_server(answer, four, here(model, four), 5)()
            answer.close()
            with pytest.raises(ConfigError, match="closed"):
                answer(x)
            return bool(wait_for(lambda: threading.active_count() == 1))

        assert ended(fork(child)) == 0
        assert by_the_server(answer, x, here(model, x), 5)()


def test_locks_that_were_held_at_the_fork_are_free_there(server: Running) -> None:
    model, x, other = chain(), torch.randn(1, 64), torch.randn(5, 64)
    with upriver.offload(model, example_inputs=x, servers=[server.url], cut=2, **SELDOM) as answer:
        held, over, far = threading.Event(), threading.Event(), far_of(answer)

        def hold() -> None:
            locks = (answer._lock, answer._forms._lock, far._lock, far._uplink._lock, far._wake._cond)
            locks = (*locks, answer._agreement._lock)
            with contextlib.ExitStack() as stack:
                for lock in (*locks, export._ONE_AT_A_TIME):
                    stack.enter_context(lock)
                held.set()
                over.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60)
        child = fork(lambda: by_the_server(answer, x, here(model, x), 2)() and answer(other) is not None)
        over.set()
        holder.join()
        assert ended(child) == 0


@pytest.mark.full
def test_what_was_closed_stays_closed_there(server: Running) -> None:
    x = torch.randn(1, 64)
    answer = upriver.offload(chain(), example_inputs=x, servers=[server.url])
    answer.close()

    def child() -> bool:
        with pytest.raises(ConfigError, match="closed"):
            answer(x)
        return threading.active_count() == 1

    assert ended(fork(child)) == 0


@pytest.mark.full
def test_an_answer_to_another_request_is_not_taken(server: Running) -> None:
    """The response repeats identifiers that this request does not have."""
    model, inputs, kept = chain(), [torch.randn(1, 64) for _ in range(2)], list[bytes]()

    def replay(exchange: Exchange) -> None:
        plain = exchange.plain

        def first(status: int, body: bytes) -> None:
            kept.append(body)
            plain(status, kept[0])

        exchange.plain = first  # type: ignore[method-assign]
        between.forward(exchange)

    with (
        proxy(server.url) as between,
        upriver.offload(model, example_inputs=inputs[0], servers=[between.url], cut=2, **SELDOM) as answer,
    ):
        between.instead = replay
        for x, server_url in zip(inputs, (between.url, ""), strict=True):
            assert torch.equal(answer(x), here(model, x))
            assert answer.last is not None and answer.last.server == server_url
        assert len(kept) == 2 and "asked" in answer.last.why_not
