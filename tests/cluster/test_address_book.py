"""Test the address book by a virtual clock against a plain reading of its history, and its keepers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

import upriver
from upriver.cluster.discover import AddressBook, Membership

LEASE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def urls(book: AddressBook) -> list[str]:
    servers = book.listing()["servers"]
    assert isinstance(servers, list)
    return [server["url"] for server in servers]


def test_an_entry_is_told_until_its_lease_is_over() -> None:
    clock = Clock()
    book = AddressBook(lease_s=LEASE_S, now=clock)
    book.renew("a", "http://a", 5.0)
    clock.now_s += LEASE_S - 0.5
    assert urls(book) == ["http://a"]
    book.renew("a", "http://a", 5.0)
    clock.now_s += LEASE_S - 0.5
    assert urls(book) == ["http://a"]
    clock.now_s += 0.5
    assert urls(book) == []


def test_who_leaves_is_told_no_more_and_who_stays_is() -> None:
    book = AddressBook(now=Clock())
    book.renew("a", "http://a", 7.0)
    book.renew("b", "http://b", 6.0)
    assert urls(book) == ["http://b", "http://a"], "the longest-serving first"
    book.leave("a")
    book.leave("never there")
    assert urls(book) == ["http://b"]


def test_a_replica_that_took_over_a_port_keeps_it_when_the_one_before_leaves() -> None:
    book = AddressBook(now=Clock())
    book.renew("before", "http://a", 1.0)
    book.renew("after", "http://a", 2.0)
    assert book.listing()["servers"] == [{"url": "http://a", "since": 2.0}]
    book.leave("before")
    assert urls(book) == ["http://a"]


def test_the_listing_is_json_and_names_version_and_lease() -> None:
    book = AddressBook(lease_s=3.0, now=Clock())
    book.renew("a", "http://a", 1.5)
    assert json.loads(json.dumps(book.listing())) == {
        "servers": [{"url": "http://a", "since": 1.5}],
        "version": upriver.__version__,
        "lease_s": 3.0,
    }


KEYS = st.sampled_from("abcd")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("renew"), KEYS, st.sampled_from(["http://1", "http://2", "http://3"])),
        st.tuples(st.just("leave"), KEYS, st.just("")),
        st.tuples(st.just("later"), st.just(""), st.integers(1, 25).map(str)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_who_is_listed_is_who_renewed_last_and_not_too_long_ago(events: list[tuple[str, str, str]]) -> None:
    clock = Clock()
    book = AddressBook(lease_s=LEASE_S, now=clock)
    history: list[tuple[float, str, str]] = []
    for what, key, value in events:
        if what == "later":
            clock.now_s += int(value)
        elif what == "renew":
            book.renew(key, value, clock.now_s)
            history.append((clock.now_s, key, value))
        else:
            book.leave(key)
            history.append((clock.now_s, key, ""))
        last = {key: (at_s, url) for at_s, key, url in history}
        expected = {url for at_s, url in last.values() if url and clock.now_s - at_s < LEASE_S}
        assert set(urls(book)) == expected
        assert len(urls(book)) == len(expected), "each address once"


# ------------------------------------------------------------------------------------------ membership


class Kept:
    """Address book of threads, which may fail."""

    def __init__(self) -> None:
        self.book = AddressBook()
        self.lock = threading.Lock()
        self.broken = False
        self.renewals = 0

    def renew(self, key: str, url: str, since: float) -> None:
        with self.lock:
            if self.broken:
                raise RuntimeError("gone")
            self.renewals += 1
            self.book.renew(key, url, since)

    def leave(self, key: str) -> None:
        with self.lock:
            if self.broken:
                raise RuntimeError("gone")
            self.book.leave(key)

    def urls(self) -> list[str]:
        with self.lock:
            return urls(self.book)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_member_is_listed_renewed_and_gone_when_closed() -> None:
    kept = Kept()
    member = Membership(kept, url="http://a", alive=lambda: True, renew_s=0.01, look_s=0.005)
    until(lambda: kept.renewals >= 3)
    assert kept.urls() == ["http://a"]
    member.close()
    assert kept.urls() == []
    renewals = kept.renewals
    member.close()
    assert kept.renewals == renewals


def test_a_member_whose_server_ends_leaves_by_itself() -> None:
    kept, alive = Kept(), threading.Event()
    alive.set()
    member = Membership(kept, url="http://a", alive=alive.is_set, renew_s=0.01, look_s=0.005)
    until(lambda: kept.urls() == ["http://a"])
    alive.clear()
    until(lambda: kept.urls() == [])
    member.close()


def test_a_book_that_fails_is_told_again() -> None:
    kept = Kept()
    kept.broken = True
    member = Membership(kept, url="http://a", alive=lambda: True, renew_s=0.01, look_s=0.005)
    with kept.lock:
        assert kept.renewals == 0
        kept.broken = False
    until(lambda: kept.urls() == ["http://a"])
    kept.broken = True
    member.close()
    assert kept.renewals >= 1
