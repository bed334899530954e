import logging
import random
import threading
import time
from collections.abc import Callable

import pytest

from tests.rpc.scripted_transport import ScriptedServer
from upriver.control.server_choice import DECIDED_REST_S, LEAST, Health
from upriver.errors import (
    BadSample,
    ConfigError,
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    NotAuthorized,
    NotExact,
    Overloaded,
    ProgramError,
    ProgramNotFound,
    ProtocolError,
    QuotaExceeded,
    ServerUnavailable,
    TooLarge,
    UpriverError,
)
from upriver.retry import Backoff
from upriver.rpc.server_pool import ServerPool

QUICK = {"backoff": Backoff(base_s=0.001, cap_s=0.01), "quiet_s": 0.05}
SLOW = {"backoff": Backoff(base_s=100, cap_s=100)}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def healths(pool: ServerPool) -> list[Health]:
    return [status.health for status in pool.status()]


def fail(pool: ServerPool, error: Exception) -> None:
    lease = pool.borrow()
    assert lease is not None
    with pytest.raises(type(error)), lease:
        raise error


def test_lends_the_least_loaded():
    with ServerPool([ScriptedServer("a"), ScriptedServer("b")], max_in_flight=2) as pool:
        assert pool.wait_joined(60)
        leases = [pool.borrow() for _ in range(5)]
        assert sorted(lease.client.url for lease in leases[:4] if lease) == ["a", "a", "b", "b"]
        assert leases[4] is None and pool.usable
        with leases[1]:
            pass
        again = pool.borrow()
        assert again is not None and again.client.url == leases[1].client.url


@pytest.mark.parametrize(
    "error",
    [ServerUnavailable("x"), ProtocolError("x"), ProgramNotFound("x"), NotAuthorized("x"), Forbidden("x")],
)
def test_a_lost_server_is_out_of_use_until_it_was_admitted_again(error):
    admitted = []
    server = ScriptedServer("a")
    options = {**QUICK, "quiet_s": 60}  # or its keeper may find it dead before the test says so
    with ServerPool([server], admit=lambda client: admitted.append(client.url), **options) as pool:
        assert pool.wait_joined(60)
        server.dead = True
        fail(pool, error)
        assert pool.borrow() is None and not pool.usable
        assert pool.status()[0].reason == "x" or "refused" in pool.status()[0].reason
        server.dead = False
        until(lambda: pool.usable)
        assert admitted == ["a", "a"]


def test_a_server_that_is_back_is_told_of_once_and_nothing_is_said_against_it_any_more(caplog):
    caplog.set_level(logging.INFO, "upriver")
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        assert caplog.messages == [], "it has never been away"
        server.dead = True
        fail(pool, ServerUnavailable("a: reset"))
        until(lambda: pool.status()[0].reason == "a: refused")
        server.dead = False
        until(lambda: pool.usable)
        assert pool.status()[0].reason == ""
        until(lambda: caplog.messages)
    assert caplog.messages == ["a is used again; it was not, since: a: refused"]
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_nothing_is_said_against_a_server_that_has_rested():
    with ServerPool([ScriptedServer("a")], **QUICK) as pool:
        assert pool.wait_joined(60)
        fail(pool, Overloaded("full", retry_after_s=0))
        until(lambda: pool.usable)
        assert pool.status()[0].reason == ""


@pytest.mark.parametrize(
    "error",
    [
        BadSample(sample=1, object_name="o", reason="r"),
        DoesNotFit("9 GB of memory"),
        DeadlineExceeded("too slow"),
        TooLarge("an image of 10000 x 10000 pixels"),
    ],
)
def test_errors_about_the_work_say_nothing_about_the_server(error):
    with ServerPool([ScriptedServer("a")], **SLOW) as pool:
        assert pool.wait_joined(60)
        fail(pool, error)
        assert pool.usable
        assert pool.status()[0].available == 1.0


def test_a_server_that_is_not_exact_stays_out_with_its_reason():
    def admit(client):
        raise NotExact(f"{client.url} gives other bits")

    with ServerPool([ScriptedServer("a")], admit=admit, **QUICK) as pool:
        assert not pool.wait_joined(10)
        [status] = pool.status()
        assert status.health is Health.OUT
        assert status.reason == "a gives other bits"
        until(lambda: not pool._keepers[0].is_alive())  # no request goes to it again


def test_a_fault_in_admit_is_not_tried_again():
    with ServerPool([ScriptedServer("a")], admit=lambda client: 1 / 0, **QUICK) as pool:
        assert not pool.wait_joined(10)
        assert healths(pool) == [Health.OUT]
        assert "ZeroDivisionError" in pool.status()[0].reason


def test_a_server_that_comes_late_is_used():
    refusing = ScriptedServer("a", probes=[False] * 5)
    with ServerPool([refusing], **QUICK) as pool:
        until(lambda: pool.usable)
        assert not refusing.probes


@pytest.mark.parametrize("kind", [Overloaded, QuotaExceeded])
def test_overload_lowers_the_limit_then_rests(kind):
    with Held([ScriptedServer("a")], max_in_flight=4, **QUICK) as pool:
        assert pool.wait_joined(60)
        first, second = pool.borrow(), pool.borrow()
        assert first and second
        with pytest.raises(kind), second:
            raise kind("full", retry_after_s=100)
        assert healths(pool) == [Health.UP], "it is still at work on the first"
        assert pool.borrow() is None, "one is what it can take"
        with pytest.raises(kind), first:
            raise kind("full", retry_after_s=0.01)
        assert not pool.usable
        pool.wake.set()
        until(lambda: pool.usable)
        for _ in range(9):
            with pool.borrow() as lease:
                assert lease is not None
        one, two = pool.borrow(), pool.borrow()
        assert one and two, "successes raise the limit again"


def test_silent_server_that_does_not_live_is_broken_off():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        lease = pool.borrow()
        assert lease is not None
        server.dead = True
        assert server.aborted.wait(60)
        assert healths(pool) == [Health.DOWN]
        with pytest.raises(ServerUnavailable), lease:
            raise ServerUnavailable("aborted")


def test_silent_server_that_lives_is_left_alone():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        with pool.borrow() as lease:
            assert lease is not None
            time.sleep(0.2)  # four times the silence that triggers the question
        assert not server.aborted.is_set() and pool.usable


def test_a_failure_of_an_earlier_life_does_not_count():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        old, older = pool.borrow(), pool.borrow()
        assert old and older
        with pytest.raises(ServerUnavailable), old:
            raise ServerUnavailable("first life")
        until(lambda: pool.usable)
        with pytest.raises(ServerUnavailable), older:
            raise ServerUnavailable("first life, heard late")
        assert pool.usable


def test_listeners_hear_of_changes():
    heard = threading.Event()
    server = ScriptedServer("a")
    with ServerPool([server], **SLOW) as pool:
        assert pool.wait_joined(60)
        pool.add_listener(heard.set)
        fail(pool, ServerUnavailable("x"))
        assert heard.is_set()
        pool.remove_listener(heard.set)
        assert pool._listeners == []


def test_close_stops_the_keepers_whatever_they_do():
    before = set(threading.enumerate())
    dead = ScriptedServer("dead")
    dead.dead = True
    pool = ServerPool([ScriptedServer("a"), dead], **SLOW)
    pool.wait_joined(60)
    pool.close()
    pool.close()
    assert set(threading.enumerate()) <= before  # another test's server may have ended
    assert pool.borrow() is None


def test_a_server_that_has_no_room_to_be_let_in_is_asked_again_when_it_says():
    asked = []

    def admit(client):
        asked.append(client.url)
        if len(asked) < 3:
            raise QuotaExceeded("two at once", retry_after_s=3)

    with Noting([ScriptedServer("a")], admit=admit, **QUICK) as pool:
        until(lambda: pool.usable)
    assert len(asked) == 3
    assert len(pool.slept) == 2 and all(3 <= s <= 6 for s in pool.slept), "not by its own backoff"


class Noting(ServerPool):
    """Record the pauses of its keepers, and skip them."""

    def __init__(self, *args, **options):
        self.slept = []
        super().__init__(*args, **options)

    def _sleep(self, member, seconds):
        self.slept.append(seconds)
        return super()._sleep(member, 0.0)


class Held(ServerPool):
    """Let its keepers sleep until a test wakes them, however long the pause."""

    def __init__(self, *args, **options):
        self.wake = threading.Event()
        super().__init__(*args, **options)

    def _sleep(self, member, seconds):
        assert self.wake.wait(60)
        return super()._sleep(member, 0.0)


def test_all_of_a_rest_counts_as_time_in_which_nothing_is_taken():
    """A pause longer than the server asked for counts as well."""
    with Noting([ScriptedServer("a")], **QUICK) as pool:
        assert pool.wait_joined(60)
        spans = pool._members[0].refusals._spans
        fail(pool, Overloaded("full", retry_after_s=3))
        until(lambda: pool.usable)
        [(began, ended)] = spans
        [rest_s] = pool.slept
        assert 3 <= rest_s <= 6
        assert ended - began >= rest_s


def test_who_refuses_again_and_again_is_left_alone_for_longer_whatever_it_says():
    class Most(random.Random):
        def uniform(self, least, most):
            return most

    backoff = Backoff(base_s=1, cap_s=4, rng=Most())
    with Noting([ScriptedServer("a")], backoff=backoff, quiet_s=60) as pool:
        assert pool.wait_joined(60)
        for _ in range(3):
            fail(pool, Overloaded("full", retry_after_s=0.0))
            until(lambda: pool.usable)
        lease = pool.borrow()
        assert lease is not None
        with lease:
            pass
        fail(pool, Overloaded("full", retry_after_s=0.0))
        until(lambda: pool.usable)
        assert pool.slept == [1, 2, 4, 1]


@pytest.mark.parametrize(
    ("error", "least"),
    [
        (DoesNotFit("9 GB of memory"), DECIDED_REST_S),
        (TooLarge("an answer of 2 GB"), DECIDED_REST_S),
        (Forbidden("another tenant's"), DECIDED_REST_S),
        (NotAuthorized("no token"), DECIDED_REST_S),
        (ProgramError("an operator that is not allowed"), DECIDED_REST_S),
        (ServerUnavailable("reset"), 0.0),
    ],
)
def test_what_comes_again_until_somebody_changes_it_is_not_tried_every_second(
    error: UpriverError, least: float
) -> None:
    asked = []

    def admit(client):
        asked.append(client.url)
        if len(asked) < 3:
            raise error

    with Noting([ScriptedServer("a")], admit=admit, **QUICK) as pool:
        until(lambda: pool.usable)
        assert len(pool.slept) == 2, "but it is tried"
        assert all(least <= seconds <= 2 * least + 0.01 for seconds in pool.slept)
        fail(pool, ServerUnavailable("reset"))
        until(lambda: pool.usable)
        assert pool.slept[2] <= 0.01, "how long it was left alone before does not matter any more"


def test_what_servers_refuse_is_logged_and_kept_when_they_have_gone(caplog):
    with ServerPool([ScriptedServer("a")], **QUICK) as pool:
        assert pool.wait_joined(60)
        fail(pool, DoesNotFit("9 GB of memory"))
        assert pool.refusal_log.remark == ""
        fail(pool, Overloaded("full", retry_after_s=0))
        until(lambda: pool.usable)
        fail(pool, QuotaExceeded("3 requests at once", retry_after_s=0))
        pool.drop("a")
        assert "refused 2 requests" in pool.refusal_log.remark
        assert "a, to be asked again after 0 s: 3 requests at once" in pool.refusal_log.remark
    said = [record.message for record in caplog.records]
    assert said == ["a refused a request, to be asked again after 0 s: full"]


def test_a_server_that_has_no_room_to_be_let_in_is_told_of_too(caplog):
    answers = [Overloaded("about to end", retry_after_s=0)]

    def admit(client):
        if answers:
            raise answers.pop()

    with ServerPool([ScriptedServer("a")], admit=admit, **QUICK) as pool:
        until(lambda: pool.usable)
        assert "refused a request" in pool.refusal_log.remark
    assert [record.message for record in caplog.records] == [
        "a refused a request, to be asked again after 0 s: about to end"
    ]


def test_a_server_that_refuses_all_the_time_is_hardly_there():
    with ServerPool([ScriptedServer("a"), ScriptedServer("b")], **QUICK) as pool:
        assert pool.wait_joined(60)
        member = pool._members[0]
        assert [status.available for status in pool.status()] == [1.0, 1.0]
        for _ in range(3):
            lease = pool.borrow("a")
            assert lease is not None
            with pytest.raises(Overloaded), lease:
                raise Overloaded("full", retry_after_s=0.01)
            until(lambda: pool.status()[0].health is Health.UP)
        refusing, well = (status.available for status in pool.status())
        assert LEAST < refusing < 1.0 and well == 1.0
        member.refusals.refused(0.0, time.monotonic() + 100)
        assert pool.status()[0].available < refusing


# ----------------------------------------------------------------------------- servers come and go


def test_a_server_that_is_added_is_let_in_like_all_others():
    admitted = []
    with ServerPool([ScriptedServer("a")], admit=lambda client: admitted.append(client.url), **QUICK) as pool:
        assert pool.wait_joined(60)
        pool.add(ScriptedServer("b"))
        assert pool.wait_joined(10, {"b"})
        assert admitted == ["a", "b"] and pool.urls == ("a", "b")
        assert [client.url for client in pool.up] == ["a", "b"]
        assert {lease.client.url for lease in (pool.borrow(), pool.borrow()) if lease} == {"a", "b"}


def test_a_server_that_is_there_already_is_added_once():
    first, again = ScriptedServer("a"), ScriptedServer("a")
    with ServerPool([first], **QUICK) as pool:
        assert pool.wait_joined(60)
        pool.add(again)
        pool.add(first)
        assert pool.urls == ("a",)
        assert again.closed, "nobody else would"
        assert not first.closed and pool.usable


def test_a_server_that_is_dropped_gets_nothing_more_and_ends_what_it_is_at():
    server, heard = ScriptedServer("a"), threading.Event()
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        first, second = pool.borrow(), pool.borrow()
        assert first and second
        pool.add_listener(heard.set)
        pool.drop("a")
        assert heard.is_set()
        assert pool.borrow() is None and not pool.usable and pool.urls == () and pool.status() == ()
        assert pool.lost("a") == "it is none of this job's servers"
        with first:
            assert not server.closed, "it owes two answers"
        assert not server.closed, "it owes one"
        with pytest.raises(ServerUnavailable), second:
            raise ServerUnavailable("reset")
        assert server.closed
        until(lambda: not any(keeper.is_alive() for keeper in pool._keepers))


@pytest.mark.parametrize("dead", [False, True])
def test_a_server_that_owes_nothing_is_let_go_at_once_whatever_its_keeper_does(dead):
    server = ScriptedServer("a")
    server.dead = dead  # then its keeper sleeps until the next request
    with ServerPool([server], **SLOW) as pool:
        assert pool.wait_joined(60) is not dead
        pool.drop("a")
        assert server.closed
        until(lambda: not pool._keepers[0].is_alive())
        pool.drop("a")
        pool.drop("never there")


def test_a_server_that_was_dropped_and_falls_silent_is_broken_off():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(60)
        lease = pool.borrow()
        assert lease is not None
        pool.drop("a")
        server.dead = True
        assert server.aborted.wait(60)
        assert not server.closed
        with pytest.raises(ServerUnavailable), lease:
            raise ServerUnavailable("aborted")
        assert server.closed


@pytest.mark.parametrize("dropped_first", [False, True])
def test_a_server_that_is_lost_and_dropped_owes_nothing_for_long(dropped_first):
    """Its keeper ends with it, so nothing would notice that the other response never comes."""
    server = ScriptedServer("a")
    with ServerPool([server], **SLOW) as pool:
        assert pool.wait_joined(60)
        first, second = pool.borrow(), pool.borrow()
        assert first and second
        if dropped_first:
            pool.drop("a")
        with pytest.raises(ServerUnavailable), first:
            raise ServerUnavailable("reset")
        pool.drop("a")
        assert server.aborted.wait(60)
        assert not server.closed
        with pytest.raises(ServerUnavailable), second:
            raise ServerUnavailable("aborted")
        assert server.closed


def test_a_server_may_come_back_while_what_it_was_at_is_not_over():
    old, new = ScriptedServer("a"), ScriptedServer("a")
    with ServerPool([old], **QUICK) as pool:
        assert pool.wait_joined(60)
        lease = pool.borrow()
        assert lease is not None
        pool.drop("a")
        pool.add(new)
        assert pool.wait_joined(60)
        again = pool.borrow("a")
        assert again is not None and again.client is new
        with lease, again:
            pass
        assert old.closed and not new.closed and pool.usable


def test_nothing_is_added_to_a_closed_pool_and_those_that_leave_are_closed_with_it():
    leaving, late = ScriptedServer("a"), ScriptedServer("b")
    pool = ServerPool([leaving], **QUICK)
    assert pool.wait_joined(60)
    lease = pool.borrow()
    pool.drop("a")
    pool.close()
    assert leaving.closed
    pool.add(late)
    assert late.closed and pool.urls == ()
    assert lease is not None
    with lease:
        pass


def test_many_come_and_go_at_once_and_no_thread_stays():
    before = set(threading.enumerate())
    with ServerPool([ScriptedServer("0")], **QUICK) as pool:

        def churn(first):
            for number in range(first, first + 20):
                pool.add(ScriptedServer(str(number)))
                if lease := pool.borrow():
                    with lease:
                        pool.drop(lease.client.url)
                pool.drop(str(number))

        threads = [threading.Thread(target=churn, args=(100 * n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(pool.urls) <= {"0"}
        assert pool._leaving == []
    assert set(threading.enumerate()) <= before  # another test's server may have ended


def test_bad_arguments():
    with pytest.raises(ConfigError, match="at least one"):
        ServerPool([])
    with pytest.raises(ConfigError, match="max_in_flight"):
        ServerPool([ScriptedServer("a")], max_in_flight=0)
