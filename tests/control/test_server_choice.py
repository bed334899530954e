"""Check which server is next, and what answers and errors say about one; the clock counts whole seconds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.server_choice import (
    DECIDED_REST_S,
    LEAST,
    MAX_REST_S,
    WINDOW_S,
    Health,
    Refusals,
    ServerState,
    is_lost,
    least_loaded,
)
from upriver.errors import (
    DoesNotFit,
    NotExact,
    Overloaded,
    ProtocolError,
    ServerUnavailable,
    TooLarge,
)
from upriver.retry import Backoff

# --------------------------------------------------------------------------------------------- refusals


def test_a_server_that_refuses_nothing_is_all_there() -> None:
    assert Refusals().available(100) == 1.0


def test_rests_count_while_they_last_and_are_forgotten() -> None:
    refusals = Refusals()
    refusals.refused(100, 105)
    shares = [refusals.available(now) for now in (100, 104, 115, 122, 125)]
    assert shares == pytest.approx([1.0, 1 - 4 / 20, 1 - 5 / 20, 1 - 3 / 20, 1.0]), "at 100 it has only begun"


def test_one_that_does_little_else_is_hardly_there_but_there() -> None:
    refusals, now = Refusals(), 100
    for _ in range(20):
        refusals.refused(now, now + 2)
        now += 2
    assert refusals.available(now) == LEAST > 0


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 5)), max_size=30)


@given(spans=SPANS, later=st.integers(0, 60))
def test_a_moment_counts_once_however_many_requests_it_is_lost_for(
    spans: list[tuple[int, int, int]], later: int
) -> None:
    """The oracle keeps one bit per second; requests end one after another, each sent some time earlier."""
    refusals, lost, ended = Refusals(), set[int](), 100
    for after, before, rest in spans:
        ended += after
        refusals.refused(ended - before, ended + rest)
        lost |= set(range(ended - before, ended + rest))
        ended += rest
    now = ended + later
    recent = {second for second in lost if now - WINDOW_S <= second < now}
    assert refusals.available(now) == pytest.approx(max(LEAST, 1 - len(recent) / WINDOW_S))


# ------------------------------------------------------------------------------------------- one server


def server(most: int = 4, *, base_s: float = 1.0) -> ServerState:
    """Return a server that is up and pauses as long as its backoff allows."""
    state = ServerState(most, Backoff(base_s=base_s, cap_s=4.0, jitter=0.0, rng=random.Random(0)))
    assert state.health is Health.JOINING and not state.has_room
    state.admitted()
    return state


def finish(state: ServerState, error: Exception | None = None, *, now: float = 0, began: float = 0) -> None:
    state.begin(began)
    state.end(error, life=state.lives, began=began, now=now)


def test_a_refusal_with_nothing_else_in_flight_makes_a_server_rest() -> None:
    state = server()
    finish(state, Overloaded("full", retry_after_s=2), began=8, now=10)
    assert (state.health, state.reason) == (Health.RESTING, "full") and not state.has_room
    assert 2 <= state.breaker.pause_s <= 4, "one to two times what it asks for"
    assert state.refusals.available(10) == pytest.approx(1 - 2 / WINDOW_S), "since the request was sent"
    state.rested()
    assert (state.health, state.reason) == (Health.UP, "") and state.has_room
    finish(state, Overloaded("full", retry_after_s=3600), now=20, began=20)
    assert MAX_REST_S <= state.breaker.pause_s <= 2 * MAX_REST_S


def test_a_refusal_before_any_answer_counts_from_its_request_on() -> None:
    state = server()
    finish(state, Overloaded("full"), began=0, now=2)
    assert state.refusals.available(2) == pytest.approx(1 - 2 / WINDOW_S)


def test_a_refusal_next_to_other_requests_lowers_the_limit_and_answers_raise_it() -> None:
    state = server(4)
    for _ in range(3):
        state.begin(0)
    state.heard(5)
    state.end(Overloaded("full"), life=1, began=0, now=6)
    assert state.health is Health.UP and not state.has_room, "two are in flight, as many as it takes"
    assert state.refusals.available(10) == pytest.approx(1 - 1 / WINDOW_S), "it answered at 5"
    for _ in range(2):
        state.end(None, life=1, began=0, now=7)
    for answers in range(2, 30):
        taken = 0
        while state.has_room:
            state.begin(8)
            taken += 1
        assert taken == min(4, 2 + answers // 8)
        for _ in range(taken):
            state.in_flight -= 1
        finish(state)


@pytest.mark.parametrize("error", [ServerUnavailable("gone"), ProtocolError("what?")])
def test_a_lost_server_is_down_until_it_is_admitted_and_pauses_grow(error: Exception) -> None:
    state = server()
    finish(state, error, now=1)
    assert (state.health, state.reason, state.breaker.pause_s) == (Health.DOWN, str(error), 1)
    state.not_admitted(ServerUnavailable("still"), now=2)
    assert (state.health, state.reason, state.breaker.pause_s) == (Health.DOWN, "still", 2)
    state.admitted()
    assert (state.health, state.reason, state.lives) == (Health.UP, "", 2)
    finish(state)
    finish(state, error, now=9)
    assert state.breaker.pause_s == 1, "an answer makes the next pause short again"


def test_an_error_of_an_earlier_life_or_of_one_request_alone_says_nothing() -> None:
    state = server()
    for _ in range(2):
        state.begin(0)
    state.end(ServerUnavailable("gone"), life=1, began=0, now=1)
    state.admitted()
    state.end(ServerUnavailable("gone"), life=1, began=0, now=2)
    finish(state, TooLarge("too large"))
    assert state.health is Health.UP
    assert is_lost(ProtocolError("")) and not is_lost(TooLarge("")) and not is_lost(KeyError())


@pytest.mark.parametrize(
    ("error", "health", "reason"),
    [
        (NotExact("other bits"), Health.OUT, "other bits"),
        (KeyError("a fault"), Health.OUT, "KeyError('a fault')"),
        (DoesNotFit("too big"), Health.DOWN, "too big"),
        (Overloaded("full", retry_after_s=3), Health.DOWN, "full"),
    ],
)
def test_why_a_server_is_not_admitted_says_whether_it_is_asked_again(
    error: Exception, health: Health, reason: str
) -> None:
    state = server(base_s=0.01)
    state.not_admitted(error, now=0)
    assert (state.health, state.reason) == (health, reason)
    least_s = {DoesNotFit: DECIDED_REST_S, Overloaded: 3.0}.get(type(error), 0.0)
    assert least_s <= state.breaker.pause_s <= max(0.01, 2 * least_s)


def test_silence_counts_from_the_request_that_ends_idleness() -> None:
    state = server()
    state.begin(10)
    state.begin(12)
    assert state.last_heard == 10
    state.heard(13)
    assert state.last_heard == 13


# ----------------------------------------------------------------------------------------------- choice


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Health)), st.integers(0, 5), st.integers(0, 5)), min_size=0, max_size=6
    )
)
def test_the_next_request_goes_to_the_least_loaded_server_with_room(
    given_: list[tuple[Health, int, int]],
) -> None:
    servers = []
    for health, in_flight, served in given_:
        state = server(4)
        state.health, state.in_flight, state.served = health, in_flight, served
        servers.append(state)
    chosen = least_loaded(servers)
    able = [each for each in servers if each.health is Health.UP and each.in_flight < 4]
    if chosen is None:
        assert not able
    else:
        assert chosen in able
        assert all((chosen.in_flight, chosen.served) <= (each.in_flight, each.served) for each in able)
