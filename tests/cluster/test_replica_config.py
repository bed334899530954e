"""Test the document that travels through Ray: no token, no credentials; its use on a replica's machine."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.cluster.replica_config import (
    KEEPER,
    bind_host,
    for_replica,
    portable,
    seconds,
    tls_files,
    toml_text,
    whole,
)
from upriver.errors import ConfigError

STORES = {"default": "file:///data"}
SESAME = hashlib.sha256(b"sesame").hexdigest()


# --------------------------------------------------------------------------------------------- secrets


def test_a_token_becomes_a_hash() -> None:
    found = portable({"stores": STORES, "host": "0.0.0.0", "port": 7000, "workers": 2}, token="sesame")
    assert found == {"stores": STORES, "workers": 2, "tenants": {"anyone": {"token_hashes": [SESAME]}}}


def test_the_file_of_a_token_is_read_here(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("sesame\n")
    found = portable({"stores": STORES, "token_file": str(tmp_path / "token")})
    assert found == {"stores": STORES, "tenants": {"anyone": {"token_hashes": [SESAME]}}}


def test_tokens_of_tenants_become_hashes_beside_those_they_have(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("sesame\n")
    tenants = {
        "alice": {"token_hashes": ["00"], "token_file": str(tmp_path / "token"), "weight": 2},
        "bob": {"token_hashes": ["11"]},
    }
    found = portable({"stores": STORES, "tenants": tenants})
    assert found["tenants"] == {
        "alice": {"token_hashes": ["00", SESAME], "weight": 2},
        "bob": {"token_hashes": ["11"]},
    }
    assert "sesame" not in json.dumps(found) and "token_file" not in json.dumps(found)


def test_without_tokens_there_is_nothing_to_add() -> None:
    assert portable({"stores": STORES, "threads": 4}) == {"stores": STORES, "threads": 4}


@pytest.mark.parametrize("option", ["access_key_id", "secret_access_key", "session_token"])
def test_credentials_do_not_travel(option: str) -> None:
    stores = {"images": {"uri": "s3://images", "options": {option: "hush", "region": "here"}}}
    with pytest.raises(ConfigError, match=rf"'images' has {option}.*credentials_file") as caught:
        portable({"stores": stores})
    assert "hush" not in str(caught.value)


def test_names_of_credentials_do() -> None:
    stores = {
        "a": {"uri": "s3://a", "options": {"endpoint": "http://x"}, "credentials_file": "/etc/a.json"},
        "b": {"uri": "s3://b", "environment": {"secret_access_key": "B_SECRET"}},
    }
    assert portable({"stores": stores})["stores"] == stores


def test_one_token_or_tenants() -> None:
    with pytest.raises(ConfigError, match="either"):
        portable({"stores": STORES, "tenants": {"a": {"token_hashes": ["00"]}}}, token="sesame")


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_without_a_token(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").touch(0o600)
        (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="token file"):
        portable({"stores": STORES, "token_file": str(tmp_path / "token")})


@pytest.mark.parametrize("name", ["stores", "tenants", "tls"])
def test_what_should_be_a_table(name: str) -> None:
    document: dict[str, object] = {"stores": STORES, name: 3}
    with pytest.raises(ConfigError, match=f"{name} must be a table"):
        portable(document)
        tls_files(document)


# ------------------------------------------------------------------------------------------- a replica


def test_a_replica_gets_a_free_port_and_a_way_to_ask_its_own_server() -> None:
    document = {"stores": STORES, "tenants": {"alice": {"token_hashes": ["00"]}}}
    told, asks = for_replica(document, host="10.0.0.1", keeper_token="sesame")
    assert asks
    assert told == {
        "stores": STORES,
        "host": "10.0.0.1",
        "port": 0,
        "tenants": {"alice": {"token_hashes": ["00"]}, KEEPER: {"token_hashes": [SESAME], "stores": {}}},
    }
    assert document == {"stores": STORES, "tenants": {"alice": {"token_hashes": ["00"]}}}, "left as it was"


def test_a_server_that_asks_nobody_asks_its_replica_neither() -> None:
    told, asks = for_replica({"stores": STORES}, host="127.0.0.1", keeper_token="sesame")
    assert not asks
    assert told == {"stores": STORES, "host": "127.0.0.1", "port": 0}


def test_nobody_else_is_the_replica() -> None:
    with pytest.raises(ConfigError, match=KEEPER):
        for_replica({"tenants": {KEEPER: {}}}, host="127.0.0.1", keeper_token="x")


@pytest.mark.parametrize(
    ("host", "local", "bound"),
    [
        (None, True, "127.0.0.1"),
        (None, False, None),
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", True, "localhost"),
        ("::1", True, "::1"),
        ("0.0.0.0", True, None),
        ("10.1.2.3", False, None),
    ],
)
def test_servers_bind_loopback_or_the_address_of_their_machine(
    host: str | None, local: bool, bound: str | None
) -> None:
    document: dict[str, object] = {} if host is None else {"host": host}
    assert bind_host(document, local=local, token="sesame") == bound
    if bound is not None:
        assert bind_host(document, local=local) == bound, "nobody else can come"
        return
    with pytest.raises(ConfigError, match="token"):
        bind_host(document, local=local)
    ways = ({"tenants": {"a": {}}}, {"token_file": "t"}, {"tls": {"client_ca": "ca.pem"}})
    for way in ways:
        assert bind_host({**document, **way}, local=local) is None
    with pytest.raises(ConfigError, match="token"):
        bind_host({**document, "tls": {"certificate": "c.pem", "key": "k.pem"}}, local=local)


def test_numbers_are_checked() -> None:
    assert whole({"workers": 3}, "workers", 1) == 3 and whole({}, "workers", 1) == 1
    assert seconds({"grace_s": 2}, "grace_s", 25.0) == 2.0 and seconds({}, "grace_s", 25.0) == 25.0
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="workers"):
            whole({"workers": wrong}, "workers", 1)
    for bad in (-1, float("inf"), float("nan"), True, "2"):
        with pytest.raises(ConfigError, match="grace_s"):
            seconds({"grace_s": bad}, "grace_s", 25.0)


# ------------------------------------------------------------------------------------------------ TOML

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether values and types are equal: 1, 1.0 and true are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_what_is_written_as_toml_is_read_as_it_was(document: dict[str, Any]) -> None:
    assert same(tomllib.loads(toml_text(document)), document)


def test_none_is_left_out_and_tuples_are_lists() -> None:
    text = toml_text({"a": None, "b": {"c": None, "d": (1, "x")}})
    assert tomllib.loads(text) == {"b": {"d": [1, "x"]}}


def test_what_toml_has_no_word_for_is_named() -> None:
    with pytest.raises(ConfigError, match="thing must be text"):
        toml_text({"thing": b"bytes"})
