import threading
import time
from collections.abc import Callable

import pytest

from tests.client.scripted_transport import ScriptedServer
from upriver.client.pool import Health, ServerPool
from upriver.client.retry import Backoff
from upriver.errors import (
    BadSample,
    ConfigError,
    NotExact,
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    ServerUnavailable,
)

QUICK = {"backoff": Backoff(base_s=0.001, cap_s=0.01), "quiet_s": 0.05}
SLOW = {"backoff": Backoff(base_s=100, cap_s=100)}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
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
        assert pool.wait_joined(10)
        leases = [pool.borrow() for _ in range(5)]
        assert sorted(lease.client.url for lease in leases[:4] if lease) == ["a", "a", "b", "b"]
        assert leases[4] is None and pool.usable
        with leases[1]:
            pass
        again = pool.borrow()
        assert again is not None and again.client.url == leases[1].client.url


@pytest.mark.parametrize("error", [ServerUnavailable("x"), ProtocolError("x"), ProgramNotFound("x")])
def test_a_lost_server_is_out_of_use_until_it_was_admitted_again(error):
    admitted = []
    server = ScriptedServer("a")
    with ServerPool([server], admit=lambda client: admitted.append(client.url), **QUICK) as pool:
        assert pool.wait_joined(10)
        server.dead = True
        fail(pool, error)
        assert pool.borrow() is None and not pool.usable
        assert pool.status()[0].reason == "x" or "refused" in pool.status()[0].reason
        server.dead = False
        until(lambda: pool.usable)
        assert admitted == ["a", "a"]


def test_errors_about_samples_say_nothing_about_the_server():
    with ServerPool([ScriptedServer("a")], **SLOW) as pool:
        assert pool.wait_joined(10)
        fail(pool, BadSample(sample=1, object_name="o", reason="r"))
        assert pool.usable


def test_a_server_that_is_not_exact_stays_out_with_its_reason():
    def admit(client):
        raise NotExact(f"{client.url} gives other bits")

    with ServerPool([ScriptedServer("a")], admit=admit, **QUICK) as pool:
        assert not pool.wait_joined(10)
        [status] = pool.status()
        assert status.health is Health.OUT
        assert status.reason == "a gives other bits"
        until(lambda: not pool._keepers[0].is_alive())  # nobody asks it again


def test_a_fault_in_admit_is_not_tried_again():
    with ServerPool([ScriptedServer("a")], admit=lambda client: 1 / 0, **QUICK) as pool:
        assert not pool.wait_joined(10)
        assert healths(pool) == [Health.OUT]
        assert "ZeroDivisionError" in pool.status()[0].reason


def test_a_server_that_comes_late_is_used():
    refusing = ScriptedServer("a", probes=[False] * 5)
    with ServerPool([refusing], **QUICK) as pool:
        assert not pool.wait_joined(10)
        until(lambda: pool.usable)
        assert not refusing.probes


def test_overload_lowers_the_limit_then_rests():
    with ServerPool([ScriptedServer("a")], max_in_flight=4, **QUICK) as pool:
        assert pool.wait_joined(10)
        first, second = pool.borrow(), pool.borrow()
        assert first and second
        with pytest.raises(Overloaded), second:
            raise Overloaded("full", retry_after_s=100)
        assert healths(pool) == [Health.UP], "it is still at work on the first"
        assert pool.borrow() is None, "one is what it can take"
        with pytest.raises(Overloaded), first:
            raise Overloaded("full", retry_after_s=0.01)
        assert not pool.usable
        until(lambda: pool.usable)
        for _ in range(9):
            with pool.borrow() as lease:
                assert lease is not None
        one, two = pool.borrow(), pool.borrow()
        assert one and two, "successes raise the limit again"


def test_silent_server_that_does_not_live_is_broken_off():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(10)
        lease = pool.borrow()
        assert lease is not None
        server.dead = True
        assert server.aborted.wait(20)
        assert healths(pool) == [Health.DOWN]
        with pytest.raises(ServerUnavailable), lease:
            raise ServerUnavailable("aborted")


def test_silent_server_that_lives_is_left_alone():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(10)
        with pool.borrow() as lease:
            assert lease is not None
            time.sleep(0.2)  # four times the silence that raises the question
        assert not server.aborted.is_set() and pool.usable


def test_a_failure_of_an_earlier_life_does_not_count():
    server = ScriptedServer("a")
    with ServerPool([server], **QUICK) as pool:
        assert pool.wait_joined(10)
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
        assert pool.wait_joined(10)
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
    pool.wait_joined(10)
    pool.close()
    pool.close()
    assert set(threading.enumerate()) == before
    assert pool.borrow() is None


def test_bad_arguments():
    with pytest.raises(ConfigError, match="at least one"):
        ServerPool([])
    with pytest.raises(ConfigError, match="max_in_flight"):
        ServerPool([ScriptedServer("a")], max_in_flight=0)
