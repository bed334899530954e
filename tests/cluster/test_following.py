"""Test a client that follows changing servers: directory answers of all kinds, and the members after each."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rpc.scripted_http import Exchange, scripted
from tests.rpc.scripted_transport import ScriptedServer
from upriver.errors import ConfigError, Overloaded, ProtocolError, ServerUnavailable
from upriver.rpc.discovery import (
    LISTING_BYTES,
    MAX_SERVERS,
    Changes,
    DirectoryClient,
    DirectoryFollower,
    Listed,
    Listing,
    ServerRoll,
    is_directory,
)
from upriver.rpc.http import Timeouts
from upriver.rpc.server_pool import Transport

LEASE_S = 10.0


def listing(*urls: str, lease_s: float = LEASE_S) -> Listing:
    return Listing(servers=tuple(Listed(url=url) for url in urls), lease_s=lease_s)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Answers:
    """Directory that answers as it is set, and counts."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.status = 200
        self.lease_s = LEASE_S
        self.asked = 0
        self.paths: list[str] = []

    def __call__(self, exchange: Exchange) -> None:
        self.asked += 1
        self.paths.append(f"{exchange.method} {exchange.path}")
        servers = [{"url": url, "since": 1.0} for url in self.urls]
        body = {"servers": servers, "version": "9", "lease_s": self.lease_s, "of a later version": True}
        exchange.plain(self.status, json.dumps(body).encode(), Content_Type="application/json")


@contextmanager
def answering(respond: Callable[[Exchange], None]) -> Iterator[str]:
    """Yield the address of a directory, as users write it."""
    with scripted(respond) as url:
        yield f"ray+{url}"


# ------------------------------------------------------------------------------------- a single answer


def test_which_addresses_are_directories() -> None:
    assert is_directory("ray+http://h:8000") and is_directory("ray+https://h")
    assert not is_directory("http://h:8000") and not is_directory("https://[h") and not is_directory("ray")


@pytest.mark.parametrize(
    "url", ["ray+ftp://h", "ray://h:10001", "ray+http://", "ray+http://u:p@h", "h:8000", "ray+http://[h"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError):
        DirectoryClient(url)


@pytest.mark.parametrize("tail", ["", "/", "/upriver/servers"])
def test_it_asks_where_the_directory_answers(tail: str) -> None:
    answers = Answers("http://a:1", "https://b:2")
    with answering(answers) as url:
        found = DirectoryClient(url + tail).listing()
    assert [server.url for server in found.servers] == ["http://a:1", "https://b:2"]
    assert (found.version, found.lease_s) == ("9", LEASE_S)
    assert answers.paths == ["GET /upriver/servers"]


def test_a_path_of_a_proxy_stays_in_front() -> None:
    answers = Answers()
    with answering(answers) as url:
        assert DirectoryClient(f"{url}/behind/").listing().servers == ()
    assert answers.paths == ["GET /behind/upriver/servers"]


@pytest.mark.parametrize(
    "named",
    [
        "ftp://a",
        "http://user:word@a",
        "http://",
        "http://a:99999",
        "http://a?x=1",
        "file:///etc",
        "a",
        "http://[a",
    ],
)
def test_what_is_no_server_is_left_out(named: str) -> None:
    with answering(Answers(named, "http://good:1")) as url:
        assert [server.url for server in DirectoryClient(url).listing().servers] == ["http://good:1"]


def test_whoever_asks_in_private_is_not_sent_into_the_open() -> None:
    directory = DirectoryClient("ray+https://h")
    assert directory._may_use("https://a:1")
    assert not directory._may_use("http://a:1")
    assert DirectoryClient("ray+http://h")._may_use("http://a:1")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no directory"),
        (b"[]", "no directory"),
        (b"{}", "no directory"),
        (b'{"servers": [{"url": 3}]}', "no directory"),
        (b'{"servers": [{"url": ""}]}', "no directory"),
        (b'{"servers": [], "lease_s": -1}', "no directory"),
        (b'{"servers": ' + b"[" * 100_000, "no directory"),
        (
            json.dumps({"servers": [{"url": f"http://h:{i}"} for i in range(MAX_SERVERS + 1)]}).encode(),
            "no dir",
        ),
        (b" " * (LISTING_BYTES + 1), "more than"),
    ],
)
def test_an_answer_that_is_none(body: bytes, said: str) -> None:
    with (
        answering(lambda exchange: exchange.plain(200, body)) as url,
        pytest.raises(ProtocolError, match=said),
    ):
        DirectoryClient(url).listing()


def test_errors_are_those_of_servers() -> None:
    def overloaded(exchange: Exchange) -> None:
        body = json.dumps({"error": {"code": "overloaded", "message": "not now"}}).encode()
        exchange.plain(503, body, Retry_After="3")

    with answering(overloaded) as url, pytest.raises(Overloaded, match="not now") as caught:
        DirectoryClient(url).listing()
    assert caught.value.retry_after_s == 3
    with (
        answering(lambda exchange: exchange.plain(404)) as url,
        pytest.raises(ProtocolError, match="404"),
    ):
        DirectoryClient(url).listing()


def test_a_directory_that_hangs_up_or_says_nothing() -> None:
    with answering(Exchange.hang_up) as url, pytest.raises(ServerUnavailable):
        DirectoryClient(url).listing()
    silent = threading.Event()
    with answering(lambda exchange: silent.wait(60) and None) as url:
        try:
            with pytest.raises(ServerUnavailable):
                DirectoryClient(url, timeouts=Timeouts(question_s=0.2)).listing()
        finally:
            silent.set()


def test_waiting_for_the_first_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.rpc.discovery.POLL_S", 0.01)
    answers = Answers()
    answers.status = 503

    def later(exchange: Exchange) -> None:
        if answers.asked == 2:
            answers.status = 200
        if answers.asked == 4:
            answers.urls = ["http://a:1"]
        answers(exchange)

    with answering(later) as url:
        assert [server.url for server in DirectoryClient(url).wait(60).servers] == ["http://a:1"]
        assert answers.asked == 5
        answers.urls = []
        with pytest.raises(ServerUnavailable, match="named no server"):
            DirectoryClient(url).wait(0.05)


# ------------------------------------------------------------------------------------------- member list


def test_who_is_new_joins_and_who_is_named_no_more_stays_for_a_lease() -> None:
    roll = ServerRoll(["http://a"])
    changes = roll.heard(listing("http://a", "http://b/", "http://b"), 1.0)
    assert (changes.joined, changes.gone) == (("http://b",), ())
    changes = roll.heard(listing("http://b"), 2.0)
    assert (changes.joined, changes.gone) == ((), ())
    changes = roll.heard(listing("http://b"), 2.0 + LEASE_S)
    assert (changes.joined, changes.gone) == ((), ())
    changes = roll.heard(listing("http://b"), 2.5 + LEASE_S)
    assert (changes.joined, changes.gone) == ((), ("http://a",))
    changes = roll.heard(listing("http://b", "http://a"), 3.0 + LEASE_S)
    assert (changes.joined, changes.gone) == (("http://a",), ())
    assert roll.urls == ("http://b", "http://a")


def test_a_directory_that_was_restarted_and_knows_nobody_takes_nobody_away() -> None:
    roll = ServerRoll(["http://a", "http://b"])
    roll.heard(listing("http://a", "http://b"), 100.0)
    after = 100.0 + 5 * LEASE_S  # the directory was silent for that time
    assert roll.heard(listing(), after) == roll.heard(listing(), after + LEASE_S) == Changes()
    assert roll.urls == ("http://a", "http://b")
    assert roll.heard(listing("http://a"), after + LEASE_S + 1).gone == ("http://b",)


NAMES = st.lists(st.sampled_from(["http://a", "http://b", "http://c", "http://d"]), max_size=4)


@given(NAMES, st.lists(st.tuples(st.integers(1, 15), NAMES), max_size=30))
def test_who_is_in_was_not_left_out_for_longer_than_a_lease(
    first: list[str], answers: list[tuple[int, list[str]]]
) -> None:
    now_s = 0
    roll = ServerRoll(first)
    members = set(first)
    history: list[tuple[int, set[str]]] = []
    for later, named in answers:
        now_s += later
        changes = roll.heard(listing(*named), now_s)
        history.append((now_s, set(named)))
        assert not members & set(changes.joined) and set(changes.gone) <= members
        members = (members | set(changes.joined)) - set(changes.gone)
        expected = set()
        for url in {*first, *(url for _, urls in history for url in urls)}:
            last = max((i for i, (_, urls) in enumerate(history) if url in urls), default=-1)
            if last < 0 and url not in first:
                continue
            since_s = history[last + 1][0] if last + 1 < len(history) else now_s
            if now_s - since_s <= LEASE_S:
                expected.add(url)
        assert members == expected == set(roll.urls)


# --------------------------------------------------------------------------------------------- following


class Members:
    """Pool that records its servers and the dropped ones."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.dropped: list[str] = []

    def add(self, client: Transport) -> None:
        self.urls.append(client.url)

    def drop(self, url: str) -> None:
        self.urls.remove(url)
        self.dropped.append(url)


def test_a_pool_follows_its_directory() -> None:
    answers = Answers("http://a:1")
    answers.lease_s = 0.05
    members = Members("http://a:1")
    with (
        answering(answers) as url,
        DirectoryFollower(DirectoryClient(url), members, ScriptedServer, urls=["http://a:1"], poll_s=0.01),
    ):
        answers.urls = ["http://a:1", "http://b:1"]
        until(lambda: members.urls == ["http://a:1", "http://b:1"])
        answers.urls = ["http://b:1"]
        until(lambda: members.urls == ["http://b:1"])
        answers.urls = ["http://b:1", "http://a:1"]
        until(lambda: members.urls == ["http://b:1", "http://a:1"])
    assert members.dropped == ["http://a:1"]


def test_a_silent_directory_changes_nothing() -> None:
    answers = Answers("http://a:1")
    answers.lease_s = 0.0
    members = Members("http://a:1")
    with (
        answering(answers) as url,
        DirectoryFollower(DirectoryClient(url), members, ScriptedServer, urls=["http://a:1"], poll_s=0.01),
    ):
        until(lambda: answers.asked >= 2)
        answers.status = 500
        before = answers.asked
        until(lambda: answers.asked >= before + 5)
        assert members.urls == ["http://a:1"]
        answers.urls = ["http://b:1"]
        answers.status = 200
        until(lambda: members.urls == ["http://b:1"])


def test_closing_ends_the_thread_and_may_be_done_twice() -> None:
    before = set(threading.enumerate())
    with answering(Answers()) as url:
        following = DirectoryFollower(DirectoryClient(url), Members(), ScriptedServer, urls=[], poll_s=100)
        following.close()
        following.close()
        assert not following._thread.is_alive()
    until(lambda: set(threading.enumerate()) <= before)  # the directory's own may end a moment later


def test_a_poll_without_a_pause_is_refused() -> None:
    with pytest.raises(ConfigError, match="poll_s"):
        DirectoryFollower(DirectoryClient("ray+http://h"), Members(), ScriptedServer, urls=[], poll_s=0)
