"""Check that a forked child and its parent read from connections of their own."""

from __future__ import annotations

import os
import threading

import pytest

from tests.finetune.children import ended, fork
from tests.rpc.scripted_http import Exchange, scripted
from tests.rpc.test_client import ids_of, request, serve_batches
from upriver.errors import ServerUnavailable
from upriver.rpc.client import ServerClient

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="here nothing is forked")


def test_a_child_asks_by_a_connection_of_its_own() -> None:
    ports: list[int] = []

    def respond(exchange: Exchange) -> None:
        ports.append(exchange.client_port)
        exchange.plain(200)

    with scripted(respond) as url, ServerClient(url) as client:
        assert client.alive()
        children = [fork(lambda: client.alive() and client.alive()) for _ in range(2)]
        assert [ended(child) for child in children] == [0, 0]
        assert client.alive()
        mine, *_, still_mine = ports
        assert mine == still_mine
        assert len(ports) == 6 and len(set(ports)) == 3, "each has kept its own"


def test_what_a_child_closes_stays_open_for_its_parent() -> None:
    with scripted(serve_batches) as url, ServerClient(url) as client:
        answer = client.run(request(*((number,) for number in range(2000))))
        first, _ = next(answer)

        def close() -> bool:
            client.close()
            with pytest.raises(ServerUnavailable, match="closed"):
                client.alive()
            return True

        assert ended(fork(close)) == 0
        assert [first.ids, *ids_of(answer)] == [(number,) for number in range(2000)]


def test_an_answer_that_is_being_read_is_the_parents() -> None:
    with scripted(serve_batches) as url, ServerClient(url) as client:
        answer = client.run(request(*((number,) for number in range(2000))))
        first, _ = next(answer)

        def not_here() -> bool:
            with pytest.raises(ServerUnavailable):
                for _ in answer:
                    pass
            answer.close()
            return True

        assert ended(fork(not_here)) == 0
        assert [first.ids, *ids_of(answer)] == [(number,) for number in range(2000)]


def test_a_lock_that_was_held_at_the_fork_is_free_in_the_child() -> None:
    held, over = threading.Event(), threading.Event()
    with scripted(lambda exchange: exchange.plain(200)) as url, ServerClient(url) as client:

        def hold() -> None:
            with client._connections._lock:
                held.set()
                over.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60)
        child = fork(client.alive)
        over.set()
        holder.join()
        assert ended(child) == 0
