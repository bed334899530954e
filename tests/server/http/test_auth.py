"""Test which requests are let in."""

import asyncio
import base64
import json
from contextlib import ExitStack

import pytest
from starlette.requests import Request

from tests.server.running import ask, connect, in_thread
from upriver.errors import ConfigError, NotAuthorized, StoreError
from upriver.protocol import Caps
from upriver.server import Server, ServerConfig
from upriver.server.http.auth import Authenticator, given_token, tenant_of
from upriver.server.http.limits import PEER_CERTIFICATE
from upriver.server.observability.audit_log import AuditLog
from upriver.server.sandbox.environment import worker_environment
from upriver.server.tenants import ANYONE, Tenant, hash_token

STORE = "memory://access"
STORES = {"default": STORE}
ALICE = Tenant(name="alice", token_hashes=(hash_token("token-a"),))
BOB = Tenant(name="bob", token_hashes=(hash_token("token-b"),), stores={})
TLS = {"tls_certificate": "server.pem", "tls_client_ca": "clients.pem"}


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "storage-node"])
def test_a_token_is_required_beyond_loopback(host):
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(stores=STORES, host=host)
    assert ServerConfig(stores=STORES, host=host, token="secret").host == host


@pytest.mark.parametrize("settings", [{"tenants": (ALICE,)}, TLS])
def test_tenants_or_client_certificates_will_do_as_well(settings):
    assert ServerConfig(stores=STORES, host="0.0.0.0", **settings).token is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert ServerConfig(stores=STORES, host=host).token is None


def test_what_opens_a_door_is_never_shown():
    class Place:
        uri = "s3://bucket"

        def __init__(self):
            self.options = {"secret_access_key": "hush"}

        def __repr__(self):
            return f"Place({self.options})"

    digest = hash_token("hush")
    shown = repr(ServerConfig(stores={"default": Place()}, token="hush"))
    shown += repr(ServerConfig(stores=STORES, tenants=(Tenant(name="a", token_hashes=(digest,)),)))
    assert "hush" not in shown
    assert digest not in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"stores": {}},
        {"stores": {"a/b": "memory://x"}},
        {"prefix": ""},
        {"prefix": "../elsewhere"},
        {"prefix": "/absolute"},
        {"token": ""},
        {"token": "two words"},
        {"port": 70000},
        {"workers": 0},
        {"threads": 0},
        {"program_budget_bytes": 0},
        {"job_timeout_s": 0},
        {"grace_s": float("nan")},
        {"deadline_s": 0},
        {"collect_s": -1},
        {"memory_budget_bytes": 0},
        {"memory_reserve": 1},
        {"load_window_s": 0},
        {"load_watch_s": 0},
        {"load_watch_s": float("inf")},
        {"load_free_below": 0},
        {"load_free_below": 1.1},
        {"admission": "greedy"},
        {"sandbox": "chroot"},
        {"log_format": "xml"},
        {"min_batch": 0},
        {"max_admitted": 0},
        {"max_waiting": 0},
        {"max_waiting_bytes": 0},
        {"trace_endpoint": "localhost:4318"},
        {"caps": Caps(samples=0)},
        {"caps": Caps(pixels=10**9)},
        {"tls_key": "server.key"},
        {"tls_client_ca": "clients.pem"},
        {"tenants": (ALICE,), "token": "one"},
        {"tenants": (ALICE, Tenant(name="alice", token_hashes=(hash_token("another"),)))},
        {"tenants": (Tenant(name="nobody"),)},
        {"tenants": (Tenant(name="carol", certificates=("carol",)),)},
        {"tenants": (Tenant(name="x", token_hashes=(hash_token("x"),), stores={"other": ("",)}),)},
    ],
)
def test_settings_that_cannot_be_meant(settings):
    with pytest.raises(ConfigError):
        ServerConfig(**{"stores": STORES, **settings})


def test_a_store_that_is_not_there_is_an_error_before_anything_is_bound(tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        Server(ServerConfig(stores={"default": (tmp_path / "none").as_uri()}, port=0))


def test_a_port_that_is_taken_is_named():
    with in_thread(STORE) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}"):
            Server(ServerConfig(stores=STORES, port=port))


def test_the_token_opens_everything_but_health():
    with in_thread(STORE, token="open-sesame", host="0.0.0.0") as server:
        for path in ("/livez", "/readyz"):
            assert ask(server, "GET", path)[0] in (200, 503)
        for path in ("/metrics", "/v1/info", "/v1/probe?bytes=1", "/nothing"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic open-sesame"},
                {"Authorization": "Bearer open-sesam\xe9"},
            ):
                status, answer, body = ask(server, "GET", path, headers=headers)
                assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
                assert answer["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer open-sesame"}
        assert ask(server, "GET", "/v1/probe?bytes=1", headers=good)[0] == 200
        assert ask(server, "GET", "/nothing", headers=good)[0] == 404


def test_without_a_token_other_names_for_this_machine_are_refused():
    """A web page can point its own name at 127.0.0.1, and a local browser would send requests for it."""
    with in_thread(STORE) as server:
        for host in ("evil.example", "evil.example:80", ""):
            assert ask(server, "GET", "/v1/probe?bytes=1", headers={"Host": host})[0] == 401
        for host in ("localhost:1", "[::1]:1", server.address):
            assert ask(server, "GET", "/v1/probe?bytes=1", headers={"Host": host})[0] == 200


def test_each_tenants_token_opens_and_no_other():
    with in_thread(STORE, tenants=(ALICE, BOB), host="0.0.0.0") as server:
        for token, status in (("token-a", 200), ("token-b", 200), ("token-c", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {token}"}
            assert ask(server, "GET", "/v1/probe?bytes=1", headers=headers)[0] == status
        assert ask(server, "GET", "/v1/probe?bytes=1")[0] == 401
        assert ask(server, "GET", "/livez")[0] == 200


def test_a_browser_gives_the_token_as_a_password():
    page = {"Accept": "text/html,application/xhtml+xml"}
    with in_thread(STORE, tenants=(ALICE,), host="0.0.0.0") as server:
        status, answer, _ = ask(server, "GET", "/ui", headers=page)
        assert status == 401
        kinds = [line.partition(" ")[0] for line in answer.get_all("www-authenticate")]
        assert kinds == ["Basic", "Bearer"]
        for given, expected in (
            (basic("whoever", "token-a"), 200),
            (basic("", "token-a"), 200),
            (basic("alice", "token-b"), 401),
            (basic("token-a", ""), 401),
            ("Basic token-a", 401),
            ("Basic " + base64.b64encode(b"token-a").decode(), 401),
            ("Basic " + base64.b64encode(b"alice:\xff").decode(), 401),
        ):
            headers = {"Authorization": given}
            assert ask(server, "GET", "/v1/probe?bytes=1", headers=headers)[0] == expected, given
            assert ask(server, "GET", "/v1/probe?bytes=1", headers={**headers, **page})[0] == expected


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/run"), ("POST", "/v1/profile"), ("PUT", f"/v1/programs/{'0' * 64}")]
)
def test_a_password_changes_nothing(method, path):
    """A browser adds the password by itself, even when a foreign page makes it send a form."""
    with in_thread(STORE, tenants=(ALICE,)) as server:
        headers = {"Authorization": basic("alice", "token-a"), "Accept": "text/html"}
        status, answer, body = ask(server, method, path, b"UPRV", headers)
        assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
        assert answer.get_all("www-authenticate") == ["Bearer"]


def test_a_tenant_that_takes_no_answers_leaves_a_connection_for_another_one():
    def probe(token, nbytes):
        connection = connect(server)
        stack.callback(connection.close)
        connection.request("GET", f"/v1/probe?bytes={nbytes}", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse()

    with in_thread(STORE, tenants=(ALICE, BOB), max_connections=4) as server, ExitStack() as stack:
        assert [probe("token-a", 64 << 20).status for _ in range(3)] == [200] * 3
        refused = probe("token-a", 1)
        assert json.loads(refused.read())["error"]["code"] == "overloaded"
        assert (refused.status, int(refused.headers["retry-after"])) == (503, 1)
        assert probe("token-b", 1).read() == bytes(1)


def test_what_is_a_token():
    assert given_token("POST", "Bearer  abc ") == "abc"
    assert given_token("POST", "bearer abc") == "abc"
    assert given_token("HEAD", basic("a", "b:c")) == "b:c"
    for method, header in (("GET", ""), ("GET", "Digest abc"), ("DELETE", basic("a", "b"))):
        with pytest.raises(NotAuthorized):
            given_token(method, header)


# ------------------------------------------------------------------------------------- tenant of a request


def asked(config, *, audit=None, certificate=None, path="/v1/run", method="POST", **headers):
    """Return the tenant of a request, or the status of the refusal."""
    seen = []

    async def app(scope, receive, send):
        seen.append(tenant_of(Request(scope)))

    async def send(message):
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"secret=1",
        "client": ("10.0.0.7", 1234),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {PEER_CERTIFICATE: certificate},
    }
    asyncio.run(Authenticator(app, config, audit)(scope, None, send))
    (found,) = seen
    return found


def certificate(common_name, *alternatives):
    """Return a certificate as the ssl module represents it."""
    return {
        "subject": ((("organizationName", "bob"),), (("commonName", common_name),)),
        "subjectAltName": alternatives,
    }


def test_a_certificate_says_more_than_a_token():
    alice = Tenant(name="alice", token_hashes=(hash_token("token-a"),), certificates=("a.example", "alice"))
    bob = Tenant(name="bob", token_hashes=(hash_token("token-b"),), certificates=("bob",))
    config = ServerConfig(stores=STORES, tenants=(alice, bob), **TLS)
    by_token = {"authorization": "Bearer token-b"}
    assert asked(config, certificate=certificate("alice")) is alice
    assert asked(config, certificate=certificate("x", ("DNS", "a.example"), ("DNS", "alice"))) is alice
    assert asked(config, certificate=certificate("alice"), **by_token) is alice
    assert asked(config, certificate=certificate("machine"), **by_token) is bob
    assert asked(config, **by_token) is bob
    assert asked(config, certificate=certificate("machine")) == 401
    assert asked(config, certificate=certificate("alice", ("DNS", "bob")), **by_token) == 401
    assert asked(config, certificate=certificate("x", ("IP Address", "bob"))) == 401


def test_names_in_certificates_mean_nothing_where_none_are_asked_for():
    config = ServerConfig(stores=STORES, tenants=(ALICE,))
    assert asked(config, certificate=certificate("alice")) == 401


def test_whoever_is_let_in_is_anyone_where_they_are_not_told_apart():
    assert asked(ServerConfig(stores=STORES), host="localhost") is ANYONE
    assert asked(ServerConfig(stores=STORES), host="evil.example") == 401
    assert asked(ServerConfig(stores=STORES), host="localhost", origin="https://evil.example") == 401
    assert asked(ServerConfig(stores=STORES), method="GET", host="localhost", origin="null") is ANYONE
    found = asked(ServerConfig(stores=STORES, token="one"), authorization="Bearer one")
    assert (found.name, found.stores) == ("anyone", None)
    by_certificate = ServerConfig(stores=STORES, host="0.0.0.0", **TLS)
    assert asked(by_certificate, certificate=certificate("whoever"), host="storage.example") is ANYONE


def test_nobody_is_asked_where_everyone_may_come():
    with pytest.raises(LookupError, match="/livez"):
        asked(ServerConfig(stores=STORES, token="one"), path="/livez", method="GET")


def test_a_refusal_is_written_down_without_what_was_shown(tmp_path):
    config = ServerConfig(stores=STORES, token="one")
    audit = AuditLog(tmp_path / "audit")
    assert asked(config, audit=audit, authorization="Bearer a-wrong-token") == 401
    assert asked(config, audit=audit, authorization="Bearer one").name == "anyone"
    audit.close()
    (line,) = (tmp_path / "audit").read_text().splitlines()
    assert "wrong" not in line
    assert "secret" not in line
    found = json.loads(line)
    del found["time"]
    assert found == {
        "who": None,
        "what": "refused",
        "path": "/v1/run",
        "status": 401,
        "outcome": "not_authorized",
        "address": "10.0.0.7",
    }


def test_a_refusal_is_logged_with_the_address_and_without_what_was_shown(caplog):
    config = ServerConfig(stores=STORES, token="one")
    assert asked(config, authorization="Bearer a-wrong-token") == 401
    assert asked(config) == 401
    assert asked(config, authorization="Bearer one").name == "anyone"
    assert asked(ServerConfig(stores=STORES), host="evil.example") == 401
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "refused a request from 10.0.0.7: the token is not valid here"),
        ("WARNING", "refused a request from 10.0.0.7: it sent no token"),
        (
            "WARNING",
            "refused a request from 10.0.0.7: without a token only loopback names are served, not "
            "'evil.example'",
        ),
    ]


def test_refusals_of_an_address_are_logged_once_a_minute(caplog):
    seconds = iter((0, 30, 59, 60, 61))
    refuse = Authenticator(None, ServerConfig(stores=STORES, token="one"), now=lambda: next(seconds))

    async def send(message):
        pass

    async def ask_all():
        for address in ("10.0.0.7", "10.0.0.7", "10.0.0.8", "10.0.0.7", "10.0.0.7"):
            scope = {
                "type": "http",
                "method": "GET",
                "path": "/ui",
                "client": (address, 1),
                "headers": [(b"authorization", b"Bearer two")],
            }
            await refuse(scope, None, send)

    asyncio.run(ask_all())
    said = [record.getMessage().removeprefix("refused a request from ") for record in caplog.records]
    assert said == [f"10.0.0.{last}: the token is not valid here" for last in (7, 8, 7)]


def test_a_worker_gets_no_credentials():
    seen = worker_environment(
        {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "UPRIVER_TOKEN": "y", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        threads=3,
    )
    assert seen["PATH"] == "/bin"
    assert seen["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert seen["OMP_NUM_THREADS"] == "3"
    assert not {"AWS_SECRET_ACCESS_KEY", "UPRIVER_TOKEN"} & set(seen)
