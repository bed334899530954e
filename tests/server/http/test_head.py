"""Test what a stranger can do with a connection before the server checks a token."""

import contextlib
import json
import socket
import struct

import psutil
import pytest

from tests.server.running import ask, running, wait_for

pytestmark = pytest.mark.slow

PROBE = b"GET /v1/probe?bytes=67108864 HTTP/1.1\r\nHost: localhost\r\n\r\n"
LINE = b"x-%06d: " + b"v" * 48 + b"\r\n"


@pytest.fixture(scope="module")
def server(world):
    with running(world.store.uri, token="secret", head_timeout_s=1.5, idle_timeout_s=1) as found:
        yield found.wait_ready()


@contextlib.contextmanager
def raw(server):
    """Open a bare connection."""
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def send_all(connection, parts):
    """Send until all is sent or the other side accepts no more; return the number of bytes sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
            sent += len(part)
    return sent


def rest_of(connection):
    """Read until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def status_and_code(answer):
    """Return status and code of the only answer in these bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def memory(server):
    return psutil.Process(server.process.pid).memory_info().rss


def head(size):
    """Return a valid head of exactly ``size`` bytes."""
    start, end = b"GET /livez HTTP/1.1\r\nHost: a\r\nx: ", b"\r\n\r\n"
    return start + b"v" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize(
    "flood",
    [
        (b"GET /livez HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
        (b"GET /livez HTTP/1.1\r\na: ", b"v" * 60_000),
        (b"GET /", b"u" * 60_000),
        (b"POST /v1/run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10_000),
        (b"POST /v1/run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: ", b"v" * 60_000),
        (b"POST /v1/run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"e" * 60_000),
        (b"", b"GET /livez HTTP/1.1\r\n\r\n" * 2_500),
    ],
    ids=["lines", "value", "url", "trailers", "trailer", "extension", "pipeline"],
)
def test_60_mib_that_are_no_body_do_not_stay_in_memory(server, flood):
    start, more = flood
    with raw(server) as connection:
        send_all(connection, [start, more])  # the first one loads whatever is loaded once
        rest_of(connection)
    before = memory(server)
    with raw(server) as connection:
        send_all(connection, [start, *[more] * (60 << 20 >> 16)])
        assert memory(server) - before < 8 << 20
        rest_of(connection)
    assert memory(server) - before < 8 << 20
    assert ask(server, "GET", "/livez")[0] == 200


def test_a_head_has_at_most_64_kib(server):
    with raw(server) as connection:
        connection.sendall(head(64 << 10))
        assert connection.recv(12) == b"HTTP/1.1 200"
    with raw(server) as connection:
        connection.sendall(head((64 << 10) + 2))
        assert status_and_code(rest_of(connection)) == (431, "too_large")
    metrics = ask(server, "GET", "/metrics", headers={"Authorization": "Bearer secret"})[2].decode()
    assert 'upriver_errors_total{code="too_large"}' in metrics


def test_a_head_has_at_most_100_fields(server):
    lines = [LINE % number for number in range(101)]
    for count, expected in ((100, b"200"), (101, b"431")):
        with raw(server) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\n" + b"".join(lines[:count]) + b"\r\n")
            assert connection.recv(12) == b"HTTP/1.1 " + expected


def test_the_refusal_arrives_though_more_was_sent(server):
    """Closing at once would reset the connection, and lose the answer."""
    with raw(server) as connection:
        assert send_all(connection, [b"GET / HTTP/1.1\r\na: ", *[b"v" * 60_000] * 100]) > 1 << 20
        assert status_and_code(rest_of(connection)) == (431, "too_large")


def test_what_is_no_http_is_told_so(server):
    with raw(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert status_and_code(rest_of(connection)) == (400, "protocol")


@pytest.mark.parametrize("sent", [b"G", b"GET /livez HTTP/1.1\r\nHost: a\r\nx: "], ids=["a byte", "half"])
def test_a_head_that_is_never_finished_is_not_waited_for(server, sent):
    with raw(server) as connection:
        connection.sendall(sent)
        assert status_and_code(rest_of(connection)) == (408, "protocol")


def test_a_head_that_trickles_is_not_waited_for(server):
    with raw(server) as connection:
        connection.settimeout(0.05)
        connection.sendall(b"GET /livez HTTP/1.1\r\n")

        def answer():
            with contextlib.suppress(TimeoutError):
                return connection.recv(12)
            connection.sendall(b"a: b\r\n")

        assert wait_for(answer) == b"HTTP/1.1 408"


def test_a_connection_that_says_nothing_is_closed(server):
    with raw(server) as connection:
        assert rest_of(connection) == b""
    with raw(server) as connection:
        connection.sendall(head(100))
        assert rest_of(connection).startswith(b"HTTP/1.1 200")  # followed by the end: it was idle too long
    with raw(server) as connection:
        connection.sendall(head(100))
        connection.sendall(b"GET")  # the first bytes of a second head
        first, second = rest_of(connection).split(b"HTTP/1.1 ")[1:]
        assert (first[:3], second[:3]) == (b"200", b"408")


def test_empty_lines_are_no_requests(server):
    """Empty lines may precede a request; a connection that sends nothing else is idle."""
    with raw(server) as connection:
        connection.settimeout(0.2)

        def closed():
            try:
                with contextlib.suppress(TimeoutError):
                    return connection.recv(1) == b""
                connection.sendall(b"\r\n")
            except ConnectionError:
                return True
            return False

        wait_for(closed)


def test_the_rest_of_a_refused_body_is_not_waited_for(server):
    with raw(server) as connection:
        connection.sendall(b"POST /v1/run HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nUPRV")
        assert rest_of(connection).startswith(b"HTTP/1.1 401")
    with raw(server) as connection:  # but a request that arrives is answered, and the connection stays open
        connection.sendall(b"POST /v1/run HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(bytes(1_000_000) + head(100))
        assert b"HTTP/1.1 200" in rest_of(connection)


def test_a_request_may_come_early_but_not_three(server):
    with raw(server) as connection:
        connection.sendall(head(100) * 2)
        assert rest_of(connection).count(b"HTTP/1.1 200") == 2
    with raw(server) as connection:
        connection.sendall(head(100) * 3)
        answers = rest_of(connection).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"200", b"400"]
        assert status_and_code(b"HTTP/1.1 " + answers[-1]) == (400, "protocol")


CHUNKED = b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "coding": (400, b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n"),
    "size": (400, CHUNKED + b"zz\r\n"),
    "extension": (431, CHUNKED + b"1;" + b"e" * 500_000),
    "trailers": (431, CHUNKED + b"0\r\n" + b"a: b\r\n" * 2_000 + b"\r\n"),
}


@pytest.fixture(scope="module")
def trusting(world):
    """Start a server that reads the body of a request without a token."""
    with running(world.store.uri) as found:
        yield found.wait_ready()


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("early", [False, True], ids=["alone", "behind another"])
def test_a_malformed_body_is_told_so(trusting, name, early):
    status, sent = MALFORMED[name]
    with raw(trusting) as connection:
        send_all(connection, [head(100) * early + sent])
        answer = rest_of(connection)
    if early:
        first, answer = answer.split(b"live\n")
        assert first.startswith(b"HTTP/1.1 200")
    assert status_and_code(answer) == (status, "too_large" if status == 431 else "protocol")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_malformed_body_is_told_so_though_its_handler_reads_it(trusting):
    before = trusting.metric("upriver_bytes_in_total")
    with raw(trusting) as connection:
        connection.sendall(CHUNKED.replace(b"Host", b"Expect: 100-continue\r\nHost") + b"4\r\nUPRV\r\n")
        wait_for(lambda: trusting.metric("upriver_bytes_in_total") == before + 4)
        connection.sendall(b"zz\r\n")
        answer = rest_of(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert status_and_code(answer) == (400, "protocol")
    assert ask(trusting, "GET", "/livez")[0] == 200


def test_what_was_answered_already_is_not_answered_again(server):
    with raw(server) as connection:
        connection.sendall(CHUNKED)
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in rest_of(connection)


def test_what_a_stranger_sends_fills_no_log(world, capfd):
    upgrade = b"GET /livez HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    with running(world.store.uri, idle_timeout_s=1) as server:
        for _ in range(5):
            with raw(server) as connection:
                connection.sendall(PROBE)
                connection.recv(100)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        for sent, status in (
            (upgrade, b"200"),
            (b"\x16\x03\x01\r\n\r\n", b"400"),
            (CHUNKED + b"zz\r\n", b"400"),
        ):
            with raw(server) as connection:
                connection.sendall(sent)
                assert rest_of(connection).startswith(b"HTTP/1.1 " + status)
    assert capfd.readouterr().err == ""


def test_strangers_who_hold_all_connections_make_room(world):
    with running(world.store.uri, max_connections=8) as server, contextlib.ExitStack() as stack:
        server.wait_ready()
        held = [stack.enter_context(raw(server)) for _ in range(8)]
        for connection in held[1:]:
            connection.sendall(b"GET /livez HTTP/1.1\r\n")
        assert ask(server, "GET", "/livez")[0] == 200
        assert rest_of(held[0]) == b""
        held[7].sendall(b"\r\n")  # the others may continue
        assert held[7].recv(12) == b"HTTP/1.1 200"


@pytest.mark.full
def test_a_connection_too_many_is_refused_where_all_are_in_use(world):
    with running(world.store.uri, max_connections=2) as server, contextlib.ExitStack() as stack:
        server.wait_ready()
        for _ in range(2):
            busy = stack.enter_context(raw(server))
            busy.sendall(PROBE)
            assert busy.recv(12) == b"HTTP/1.1 200"
        with raw(server) as connection:
            refusal = rest_of(connection)
    assert status_and_code(refusal) == (503, "overloaded")
    assert b"\r\nretry-after: 1\r\n" in refusal


def test_who_takes_nothing_is_dropped(world):
    with running(world.store.uri, max_connections=1, stall_timeout_s=1) as server, raw(server) as busy:
        busy.sendall(PROBE)
        assert busy.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: ask(server, "GET", "/livez")[0] == 200)
