"""Who may come in."""

import json

import pytest

from tests.server.running import ask, in_thread
from upriver.errors import ConfigError, StoreError
from upriver.server import Server, ServerConfig
from upriver.server.config import same_token
from upriver.server.handle import worker_environment

STORE = "memory://access"
STORES = {"default": STORE}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "storage-node"])
def test_a_token_is_required_beyond_loopback(host):
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(stores=STORES, host=host)
    assert ServerConfig(stores=STORES, host=host, token="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert ServerConfig(stores=STORES, host=host).token is None


def test_a_token_is_never_shown():
    assert "hush" not in repr(ServerConfig(stores=STORES, token="hush"))


@pytest.mark.parametrize(
    "settings",
    [
        {"stores": {}},
        {"stores": {"a/b": "memory://x"}},
        {"token": ""},
        {"token": "two words"},
        {"port": 70000},
        {"workers": 0},
        {"threads": 0},
        {"program_budget_bytes": 0},
        {"job_timeout_s": 0},
        {"grace_s": float("nan")},
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
    """A web page can make its own name mean 127.0.0.1, and a browser here would ask on its behalf."""
    with in_thread(STORE) as server:
        for host in ("evil.example", "evil.example:80", ""):
            assert ask(server, "GET", "/v1/probe?bytes=1", headers={"Host": host})[0] == 401
        for host in ("localhost:1", "[::1]:1", server.address):
            assert ask(server, "GET", "/v1/probe?bytes=1", headers={"Host": host})[0] == 200


def test_tokens_are_compared_whole():
    assert same_token("abc", "abc")
    assert not same_token("abcd", "abc")
    assert not same_token("", "abc")


def test_a_worker_gets_no_credentials():
    seen = worker_environment(
        {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "UPRIVER_TOKEN": "y", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        threads=3,
    )
    assert seen["PATH"] == "/bin"
    assert seen["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert seen["OMP_NUM_THREADS"] == "3"
    assert not {"AWS_SECRET_ACCESS_KEY", "UPRIVER_TOKEN"} & set(seen)
