"""Test probes of the link: the server discards their bytes, counts and bounds them, and holds no memory."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.configured import bearer
from tests.server.running import Running, ask, connect, in_thread, refused, wait_for
from upriver.errors import ConfigError, NotAuthorized, TooLarge
from upriver.rpc.client import ServerClient
from upriver.server import app
from upriver.server.app import PROBE_BYTES

STORE = "memory://probe"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Start a server. Probes need no worker, but a worker that starts meanwhile would open files."""
    with in_thread(STORE) as found:
        yield found.wait_ready()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lower the number of bytes that servers of this process accept; return it."""
    monkeypatch.setattr(app, "PROBE_BYTES", 100_000)
    return 100_000


def posted(server: Running, body: Any, **headers: str) -> dict[str, Any]:
    status, _, answer = ask(server, "POST", "/v1/probe", body, headers)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    assert set(found) == {"bytes", "seconds"}
    return found


@contextmanager
def begun(server: Running, nbytes: int, first: bytes) -> Iterator[http.client.HTTPConnection]:
    """Begin a probe of ``nbytes``, of which only ``first`` is sent."""
    before = server.metric("upriver_bytes_in_total")
    connection = connect(server)
    try:
        connection.putrequest("POST", "/v1/probe")
        connection.putheader("Content-Length", str(nbytes))
        connection.endheaders(first)
        wait_for(lambda: server.metric("upriver_bytes_in_total") == before + len(first))
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("nbytes", [0, 1, 300_000, 3_000_000])
def test_what_comes_is_counted(server: Running, nbytes: int) -> None:
    before = server.metric("upriver_bytes_in_total")
    found = posted(server, bytes(nbytes))
    assert found["bytes"] == nbytes
    assert found["seconds"] >= 0
    assert server.metric("upriver_bytes_in_total") == before + nbytes


def test_what_comes_at_once_takes_no_time_and_what_comes_later_does(server: Running) -> None:
    assert posted(server, b"x")["seconds"] == 0
    with begun(server, 10, b"12345") as connection:
        connection.send(b"67890")
        found = json.loads(connection.getresponse().read())
    assert found["bytes"] == 10
    assert found["seconds"] > 0


def test_chunks_are_counted_as_they_are(server: Running) -> None:
    found = posted(server, iter([b"123", b"45"]))
    assert found["bytes"] == 5


def test_as_much_as_a_download_may_have_and_no_more(server: Running, small: int) -> None:
    assert posted(server, bytes(small))["bytes"] == small
    status, error = refused(server, bytes(small + 1), "/v1/probe")
    assert (status, error["code"]) == (413, "too_large")
    assert str(small) in error["message"]


def test_more_than_that_is_refused_before_any_of_it_is_read(server: Running) -> None:
    connection = connect(server)
    try:
        connection.putrequest("POST", "/v1/probe")
        connection.putheader("Content-Length", str(PROBE_BYTES + 1))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "too_large"
    finally:
        connection.close()


def test_chunks_that_come_to_more_are_refused(server: Running, small: int) -> None:
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"POST /v1/probe HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            raw.sendall(b"%x\r\n%s\r\n" % (small // 2, bytes(small // 2)))
        assert raw.recv(12) == b"HTTP/1.1 413"


def test_strangers_are_not_measured() -> None:
    with in_thread(STORE, token="open-sesame") as server:
        for headers in ({}, bearer("another"), {"Authorization": "Basic Om9wZW4tc2VzYW1l"}):
            status, _, body = ask(server, "POST", "/v1/probe", b"x" * 1000, headers)
            assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
        assert posted(server, b"x" * 1000, **bearer("open-sesame"))["bytes"] == 1000
        with ServerClient(server.url, token="another") as client, pytest.raises(NotAuthorized):
            client.probe_upload(1000)
        with ServerClient(server.url, token="open-sesame") as client:
            assert client.probe_upload(1000).num_bytes == 1000


def test_a_client_that_goes_in_the_middle_leaves_nothing(server: Running) -> None:
    gone = 'code="499",route="/v1/probe"'
    before, open_fds = (
        server.metric("upriver_requests_total", gone),
        server.metric("upriver_process_open_fds"),
    )
    for _ in range(3):
        with begun(server, 1000, b"x" * 10):
            pass
    wait_for(lambda: server.metric("upriver_requests_total", gone) == before + 3)
    wait_for(lambda: server.metric("upriver_process_open_fds") <= open_fds)
    assert posted(server, b"x" * 1000)["bytes"] == 1000


def test_a_client_that_stops_in_the_middle_is_told_so() -> None:
    with in_thread(STORE, stall_timeout_s=0.2) as server, begun(server, 1000, b"x" * 10) as connection:
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (400, "protocol")


def test_a_client_that_is_too_slow_is_told_so() -> None:
    with in_thread(STORE, deadline_s=0.2) as server, begun(server, 1000, b"x" * 10) as connection:
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (504, "deadline")


@pytest.mark.parametrize("nbytes", [1, 70_000, 5_000_000])
def test_a_client_measures_the_way_up(server: Running, nbytes: int) -> None:
    before = server.metric("upriver_bytes_in_total")
    with ServerClient(server.url) as client:
        probe = client.probe_upload(nbytes)
        assert client.meter.total_bytes == 0  # which counts the way down
    assert probe.num_bytes == nbytes == server.metric("upriver_bytes_in_total") - before
    assert probe.seconds >= 0 and probe.first_byte_s >= 0 and probe.bytes_per_s > 0


def test_a_client_is_told_what_may_be_sent(server: Running, small: int) -> None:
    with ServerClient(server.url) as client:
        for nbytes in (0, -1):
            with pytest.raises(ConfigError, match="num_bytes"):
                client.probe_upload(nbytes)
        with pytest.raises(TooLarge, match=str(small)):
            client.probe_upload(small + 1)
        assert client.probe_upload(small).num_bytes == small
