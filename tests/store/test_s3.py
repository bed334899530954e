"""Test the duties of a store behind a network: retry, resume, give up, keep secrets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.s3_server import S3Server
from upriver.errors import ConfigError, StorageFull, StoreError
from upriver.store import Store
from upriver.store.s3 import TIMEOUT_S, _number, _retry_config

KEY, SECRET = "AKIATESTKEY", "wJalrSECRETtest"


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def connect(server: S3Server, **options: str) -> Store:
    credentials = {"access_key_id": KEY, "secret_access_key": SECRET}
    return Store.open("s3://bucket/p", options={"endpoint": server.url, **credentials, **options})


def test_names_lie_under_the_prefix(server: S3Server) -> None:
    connect(server).put("a/b", b"1")
    assert server.objects == {"bucket/p/a/b": b"1"}


def test_a_busy_store_is_asked_again(server: S3Server) -> None:
    store = connect(server)
    store.put("a", b"0123456789")
    server.faults = [503, 500]
    assert store.get_range("a", 2, 8) == b"234567"
    assert [method for method, _, _ in server.requests] == ["PUT", "GET", "GET", "GET"]


def test_a_body_that_breaks_off_is_resumed_in_the_middle(server: S3Server) -> None:
    store, content = connect(server), bytes(range(256)) * 1000
    store.put("a", content)
    server.faults = ["cut"]
    assert store.get("a") == content
    assert len([each for each in server.requests if each[0] == "GET"]) == 2
    assert server.requests[-1][2].startswith("bytes=128000-")


def test_a_store_that_stays_down_is_given_up(server: S3Server) -> None:
    store = connect(server, max_retries="2")
    server.faults = [503] * 10
    with pytest.raises(StoreError, match=r"cannot read 'a' in store 'default' \(s3://bucket/p\)"):
        store.get("a")
    assert len(server.requests) == 3


def test_nobody_listening_is_a_store_error() -> None:
    with S3Server() as server:
        url = server.url
    options = {"endpoint": url, "access_key_id": KEY, "secret_access_key": SECRET, "max_retries": "0"}
    with pytest.raises(StoreError, match="cannot read 'a'"):
        Store.open("s3://bucket", options=options).get("a")


def test_no_credentials_are_told_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with S3Server() as server:
        url = server.url
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)  # of a machine outside any cloud
    store = Store.open("s3://bucket", options={"endpoint": url, "max_retries": "0"})
    with pytest.raises(StoreError, match=r"there are no credentials.* AWS_ACCESS_KEY_ID"):
        store.get("a")


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_show_nowhere(server: S3Server, status: int) -> None:
    store = connect(server)
    server.faults = [status]  # the answer repeats the request's Authorization header, as real ones do
    with pytest.raises(StoreError) as caught:
        store.get("a")
    for text in (str(caught.value), repr(caught.value), repr(store), str(vars(caught.value))):
        assert KEY not in text
        assert SECRET not in text


def test_the_environment_gives_what_options_leave_out(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = Store.open("s3://bucket")
    store.put("a", b"1")
    assert server.objects == {"bucket/a": b"1"}
    server.faults = [403]
    with pytest.raises(StoreError) as caught:
        store.get("a")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"endpiont": "x"}, "unknown s3 store option 'endpiont'; allowed: access_key_id"),
        ({"anonymous": "yes"}, "anonymous must be 'true' or 'false', got 'yes'"),
        ({"timeout_s": "soon"}, "timeout_s must be a number"),
        ({"timeout_s": "0"}, "timeout_s must be a number"),
        ({"read_timeout_s": "nan"}, "read_timeout_s must be a number"),
        ({"max_retries": "-1"}, "max_retries must be a number from 0"),
    ],
)
def test_an_option_that_is_not_understood(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Store.open("s3://bucket", options=options)


def test_credentials_in_a_uri_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="no credentials") as caught:
        Store.open(f"s3://{KEY}:{SECRET}@bucket/x")
    assert SECRET not in str(caught.value)


def test_retrying_outlasts_one_attempt() -> None:
    numbers = {"timeout_s": TIMEOUT_S, "max_retries": _number("max_retries", "6")}
    assert _retry_config(numbers)["retry_timeout"].total_seconds() > TIMEOUT_S


def test_a_store_without_room_is_told_as_such() -> None:
    with S3Server() as server:
        keys = {"access_key_id": "KEY", "secret_access_key": "SECRET", "max_retries": "0"}
        store = Store.open("s3://bucket", options={"endpoint": server.url, **keys})
        server.faults.append(507)
        with pytest.raises(StorageFull, match=r"cannot write 'a' .* the store has no room left"):
            store.put("a", b"1")
        server.faults.append(500)
        with pytest.raises(StoreError) as caught:
            store.put("a", b"1")
        assert not isinstance(caught.value, StorageFull)
