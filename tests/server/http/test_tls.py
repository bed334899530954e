"""Test HTTPS: who is let in, and what a stranger can hold before authentication."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import struct
from pathlib import Path

import pytest

from tests.server.certificates import Authority, needs_openssl
from tests.server.configured import bearer
from tests.server.running import in_thread, wait_for
from upriver.errors import ConfigError, ServerUnavailable
from upriver.rpc.client import ServerClient
from upriver.server import Server, ServerConfig
from upriver.server.http.tls import names_in, server_context
from upriver.server.tenants import Tenant, hash_token

pytestmark = [needs_openssl, pytest.mark.slow]

STORE = "memory://tls"
STORES = {"default": STORE}
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder / "ours")


@pytest.fixture(scope="module")
def others(folder):
    """Return another authority, which neither side trusts."""
    return Authority(folder / "theirs")


@pytest.fixture(scope="module")
def own(authority):
    """Return the server's certificate as settings."""
    identity = authority.issue("server")
    return {"tls_certificate": str(identity.certificate), "tls_key": str(identity.key)}


@pytest.fixture(scope="module")
def server(own):
    with in_thread(STORE, token="sesame", **own) as found:
        yield found


def ask(server, context, path, method="GET", **headers):
    """Return status and body of an answer over TLS."""
    connection = http.client.HTTPSConnection(server.address, timeout=60, context=context)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def raw(server):
    """Open a bare connection, not encrypted."""
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield connection


def rest_of(connection):
    """Read until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            found += part
    return found


class Encrypted:
    """Client side of TLS over a bare connection: the test chooses what it sends, and when."""

    def __init__(self, connection, context):
        self._connection, self._out, self._in = connection, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    def agree(self):
        """Run the handshake up to our last part, which is not sent yet."""
        self._until(self._tls.do_handshake)

    def write(self, data):
        while data:  # one record at a time
            data = data[self._tls.write(data) :]
        self._connection.sendall(self._out.read())

    def read(self):
        return self._until(lambda: self._tls.read(1 << 16))

    def answer(self):
        """Read one whole answer, which may arrive in any pieces."""
        found = b""
        while b"\r\n\r\n" not in found:
            found += self.read()
        head, _, rest = found.partition(b"\r\n\r\n")
        left = int(re.search(rb"content-length: (\d+)", head.lower())[1]) - len(rest)
        while left > 0:
            left -= len(more := self.read())
            found += more
        assert left == 0
        return found

    def _until(self, step):
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._out.read())
                data = self._connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("the server has gone") from None
                self._in.write(data)


# ------------------------------------------------------------------------------------------- settings


def test_without_a_certificate_there_is_no_tls():
    assert server_context(ServerConfig(stores=STORES)) is None


def test_the_address_says_so(own):
    server = Server(ServerConfig(stores=STORES, port=0, **own))
    try:
        assert server.url == f"https://127.0.0.1:{server.socket.getsockname()[1]}"
    finally:
        server.socket.close()


def test_old_versions_are_not_spoken(own):
    context = server_context(ServerConfig(stores=STORES, **own))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


def test_certificate_and_key_may_be_in_one_file(own, tmp_path):
    both = tmp_path / "both.pem"
    parts = [Path(own[name]).read_bytes() for name in ("tls_certificate", "tls_key")]
    both.touch(0o600)
    both.write_bytes(b"".join(parts))
    assert server_context(ServerConfig(stores=STORES, tls_certificate=str(both))) is not None


@pytest.mark.parametrize("key", ["tls_certificate", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_that_cannot_be_used_is_named_before_anything_is_bound(own, tmp_path, key, content):
    path = tmp_path / "wrong.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.pem"):
        Server(ServerConfig(stores=STORES, port=0, **{**own, key: str(path)}))


def test_a_key_of_another_certificate_is_refused(own, others):
    stranger = others.issue("server")
    with pytest.raises(ConfigError, match=r"server\.key"):
        server_context(ServerConfig(stores=STORES, **{**own, "tls_key": str(stranger.key)}))


def test_names_of_a_certificate():
    certificate = {
        "subject": ((("countryName", "XX"),), (("commonName", "alice"),)),
        "subjectAltName": (("DNS", "a.example"), ("DNS", "alice"), ("IP Address", "::1"), ("URI", "id:a")),
    }
    assert names_in(certificate) == ("alice", "a.example", "id:a")
    assert names_in({}) == names_in(None) == ()


# ------------------------------------------------------------------------------------ over the network


def test_what_is_asked_is_answered(server, authority):
    context = authority.client()
    assert ask(server, context, "/livez") == (200, b"live\n")
    status, body = ask(server, context, "/v1/info")
    assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
    status, body = ask(server, context, "/v1/probe?bytes=20000000", **bearer("sesame"))
    assert (status, len(body)) == (200, 20_000_000)


def test_our_own_client_speaks_it(server, authority):
    url = f"https://{server.address}"
    with ServerClient(url, token="sesame", tls=authority.client()) as client:
        assert client.alive()
    with ServerClient(url, token="sesame") as client, pytest.raises(ServerUnavailable):
        client.alive()


def test_a_connection_serves_more_than_one_request(server, authority):
    with raw(server) as connection:
        tls = Encrypted(connection, authority.client())
        tls.agree()
        for _ in range(3):
            tls.write(REQUEST)
            assert tls.answer().startswith(b"HTTP/1.1 200")


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(server, authority):
    with raw(server) as connection:
        tls = Encrypted(connection, authority.client())
        tls.agree()
        tls.write(REQUEST)  # sent together with the client's last part of the handshake
        assert tls.read().startswith(b"HTTP/1.1 200")


def test_a_refusal_arrives(server, authority):
    """TLS cannot close one direction, as plain connections do after a refusal."""
    with raw(server) as connection:
        tls = Encrypted(connection, authority.client())
        tls.agree()
        tls.write(b"GET / HTTP/1.1\r\na: " + b"v" * 70_000)
        answer = tls.read()
        assert answer.startswith(b"HTTP/1.1 431")
        assert b"too_large" in answer


@pytest.mark.parametrize("sent", [REQUEST, b"\x16\x03\x01\x00\x05hello", b"\x00" * 1000])
def test_what_is_no_tls_gets_no_answer_and_disturbs_nobody(server, authority, sent):
    with raw(server) as connection:
        connection.sendall(sent)
        assert b"HTTP/1.1 200" not in rest_of(connection)
    assert ask(server, authority.client(), "/livez")[0] == 200


def test_a_handshake_that_is_never_finished_is_not_waited_for(own, authority):
    with in_thread(STORE, head_timeout_s=0.5, **own) as server:
        with raw(server) as connection:
            assert rest_of(connection) == b""
        with raw(server) as connection:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of one
            rest_of(connection)
        assert ask(server, authority.client(), "/livez")[0] == 200


def test_strangers_who_begin_no_handshake_make_room(own, authority):
    with (
        in_thread(STORE, max_connections=4, head_timeout_s=600, **own) as server,
        contextlib.ExitStack() as stack,
    ):
        held = [stack.enter_context(raw(server)) for _ in range(12)]
        assert ask(server, authority.client(), "/livez")[0] == 200
        for connection in held[:8]:
            assert rest_of(connection) == b""
        tls = Encrypted(held[-1], authority.client())  # the remaining connections may continue
        tls.agree()
        tls.write(REQUEST)
        assert tls.read().startswith(b"HTTP/1.1 200")


def test_nothing_of_a_client_that_goes_stays_behind(own, authority):
    with in_thread(STORE, max_connections=2, head_timeout_s=600, **own) as server:
        for _ in range(20):
            with raw(server) as connection:
                Encrypted(connection, authority.client()).agree()
        wait_for(lambda: ask(server, authority.client(), "/livez")[0] == 200)


def test_nothing_more_is_written_to_a_client_that_has_reset(own, authority, caplog):
    probe = REQUEST.replace(b"/livez", b"/v1/probe?bytes=67108864")
    context = authority.client()
    with in_thread(STORE, **own) as server:
        for _ in range(5):
            with raw(server) as bare, context.wrap_socket(bare, server_hostname="localhost") as connection:
                connection.sendall(probe)
                assert connection.recv(12) == b"HTTP/1.1 200"
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: ask(server, context, "/livez")[0] == 200)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


# ------------------------------------------------------------------------------- client certificates


@pytest.fixture(scope="module")
def strict(own, authority):
    """Start a server that requires a client certificate."""
    tenants = (
        Tenant(name="alice", certificates=("alice",)),
        Tenant(name="bob", certificates=("bob.example",), token_hashes=(hash_token("token-b"),)),
    )
    settings = {**own, "tls_client_ca": str(authority.certificate), "tenants": tenants}
    with in_thread(STORE, **settings) as server:
        yield server


PROBE = "/v1/probe?bytes=1"


def test_a_certificate_lets_in_whom_it_names(strict, authority):
    assert ask(strict, authority.client(authority.issue("alice")), PROBE) == (200, b"\0")
    bob = authority.issue("some-machine", alternatives="DNS:bob.example")
    assert ask(strict, authority.client(bob), PROBE)[0] == 200


def test_a_certificate_of_nobody_known_needs_a_token(strict, authority):
    machine = authority.client(authority.issue("machine"))
    status, body = ask(strict, machine, PROBE)
    assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
    assert ask(strict, machine, PROBE, **bearer("token-a"))[0] == 401
    assert ask(strict, machine, PROBE, **bearer("token-b"))[0] == 200


def test_without_a_certificate_of_ours_not_even_a_token_helps(strict, authority, others):
    stranger = others.issue("alice")
    shows_theirs = authority.client()
    shows_theirs.load_cert_chain(stranger.certificate, stranger.key)
    for context in (authority.client(), shows_theirs):
        for path in (PROBE, "/livez"):
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(strict, context, path, **bearer("token-b"))
    assert ask(strict, authority.client(authority.issue("alice")), PROBE)[0] == 200


def test_a_certificate_alone_is_enough_where_tenants_are_not_told_apart(own, authority):
    settings = {**own, "tls_client_ca": str(authority.certificate), "host": "0.0.0.0"}
    with in_thread(STORE, **settings) as server:
        assert ask(server, authority.client(authority.issue("whoever")), PROBE)[0] == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(server, authority.client(), PROBE)
