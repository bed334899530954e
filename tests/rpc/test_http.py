"""Check that a caller who stops waiting for a stuck connection attempt is released."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rpc.scripted_http import scripted
from tests.rpc.test_client import request, serve_batches
from upriver.errors import ServerUnavailable, UpriverError
from upriver.rpc.client import AnswerClosed, ServerClient
from upriver.rpc.http import Address, Connection, ConnectionHolder, Timeouts, within

PATIENT = Timeouts(connect_s=600.0, read_s=600.0, question_s=600.0)
"""Timeouts so long that nothing ends by itself during a test."""


@contextlib.contextmanager
def full() -> Iterator[str]:
    """Run a server that accepts no more connections: its queue is full, and further ones are dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as waiting:
        address = listener.getsockname()
        for _ in range(64):
            sock = waiting.enter_context(socket.socket())
            sock.settimeout(0.2)
            try:
                sock.connect(address)
            except TimeoutError:
                break
        else:
            pytest.skip("here a full queue takes connections")
        yield f"http://127.0.0.1:{address[1]}"


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """Run a server that accepts connections and never begins TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def no_resolver() -> Iterator[str]:
    """Yield a host name that no resolver answers."""
    over, original = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if host == "edge-1" and not flags & socket.AI_NUMERICHOST:
            over.wait(600)
        return original(host, *args, flags=flags, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        try:
            yield "http://edge-1:7000"
        finally:
            over.set()


HANG = {"connecting": full, "tls": mute, "resolver": no_resolver}


@pytest.fixture(params=HANG)
def client(request: pytest.FixtureRequest) -> Iterator[ServerClient]:
    with HANG[request.param]() as url, ServerClient(url, timeouts=PATIENT) as found:
        yield found


def ended(work: Callable[[], Any], stop: Callable[[], None], client: ServerClient) -> UpriverError:
    """Return the error of ``work``, stopped in the middle of connecting."""
    errors: list[UpriverError] = []

    def catch() -> None:
        try:
            work()
        except UpriverError as error:
            errors.append(error)

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and client._connections.busy
    stop()
    thread.join(60)
    assert not thread.is_alive() and not client._connections.busy
    return errors[0]


def test_an_answer_is_closed_while_connecting(client: ServerClient) -> None:
    answer = client.run(request((0,)))
    assert isinstance(ended(lambda: next(answer), answer.close, client), AnswerClosed)


def test_a_client_is_closed_while_connecting(client: ServerClient) -> None:
    assert isinstance(ended(client.info, client.close, client), ServerUnavailable)


def test_a_deadline_holds_while_connecting(client: ServerClient) -> None:
    answer = client.run(request((0,)))
    with (
        pytest.raises(ServerUnavailable, match=r"no answer in time \(0.2 s in all\)"),
        within(0.2, answer.close, url=client.url),
    ):
        next(answer)
    assert not client._connections.busy


def test_one_that_was_broken_off_before_it_began_connects_nowhere(client: ServerClient) -> None:
    connection = client._address.connection()
    connection.break_off()
    with pytest.raises(ConnectionAbortedError, match="broken off"):
        connection.open(PATIENT, None)


def test_one_that_is_taken_after_its_deadline_connects_nowhere(client: ServerClient) -> None:
    connection, holder = client._address.connection(), ConnectionHolder()
    holder.close()
    holder.hold(connection)
    with pytest.raises(ConnectionAbortedError, match="broken off"):
        connection.open(PATIENT, None)


def test_a_finalizer_may_close_a_client_in_the_midst_of_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may call a finalizer at any allocation."""
    client = ServerClient("http://127.0.0.1:9")
    address = client._address

    def collecting(_: Address) -> Connection:
        client.close()
        return address_connection(address)

    address_connection = Address.connection
    monkeypatch.setattr(Address, "connection", collecting)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.alive()
        except BaseException as error:
            errors.append(error)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(60)
    assert not asker.is_alive()
    assert "this client was closed" in str(errors[0])
    assert not client._connections.busy


def test_a_name_is_looked_up_and_all_its_addresses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    original = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host != "edge-1":
            return original(host, port, *args, **kwargs)
        if kwargs.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return [
            *original("127.0.0.1", 1, type=socket.SOCK_STREAM),
            *original("127.0.0.1", port, type=socket.SOCK_STREAM),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    hosts = []

    def respond(exchange: Any) -> None:
        hosts.append(exchange.headers["Host"])
        serve_batches(exchange)

    with scripted(respond) as url:
        named = url.replace("127.0.0.1", "edge-1")
        with ServerClient(named) as client:
            assert len(list(client.run(request((0,), (1,))))) == 2
    assert hosts == [named.removeprefix("http://")]


def test_a_name_that_is_none_is_said() -> None:
    with ServerClient("http://nowhere.invalid:7000") as client, pytest.raises(ServerUnavailable) as raised:
        client.info()
    assert "http://nowhere.invalid:7000: " in str(raised.value)


def test_an_address_without_a_listener_is_refused_at_once() -> None:
    with (
        ServerClient("http://127.0.0.1:1", timeouts=PATIENT) as client,
        pytest.raises(ServerUnavailable, match="refused"),
    ):
        client.info()


def test_what_speaks_no_tls_is_an_error() -> None:
    tls = ssl.create_default_context()
    with (
        scripted(serve_batches) as url,
        ServerClient(url.replace("http", "https"), timeouts=PATIENT, tls=tls) as client,
        pytest.raises(ServerUnavailable),
    ):
        client.info()
