"""Check a profile that follows a running job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import alexnet, cluster, clusters, profiles
from upriver.errors import ConfigError
from upriver.policies import POLICIES
from upriver.profile.live_profile import (
    ENOUGH,
    MOST_SLOWED,
    STEPS,
    TOLD_WINDOW,
    UNSEEN,
    WINDOW,
    AtServers,
    LiveProfile,
    worker_s,
)
from upriver.types import Cluster, Profile, StageProfile, Tier, Timings, Workload


def seconds(live: LiveProfile, tier: str, position: int) -> float:
    profile, _ = live.now()
    fixed, each = profile.stage(position).seconds[tier]
    assert fixed == 0.0
    return each


def test_untouched_it_is_what_was_measured() -> None:
    profile, machines = LiveProfile(alexnet(), cluster(), samples=16).now()
    assert (profile, machines) == (alexnet(), cluster())


def test_the_median_of_the_window_counts() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=10)
    before = seconds(live, "storage", 3)
    for count, took in enumerate((1.0, 1.0, 50.0, 1.0, 1.0)):
        assert seconds(live, "storage", 3) == (before if count < ENOUGH else pytest.approx(0.1))
        live.saw(Tier.STORAGE, Timings(stages={3: took}))
    assert seconds(live, "storage", 3) == pytest.approx(0.1)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={3: 4.0}))
    assert seconds(live, "storage", 3) == pytest.approx(0.4), "what has left the window is forgotten"


def test_a_stage_that_is_not_seen_slows_with_those_beside_it() -> None:
    live = LiveProfile(alexnet(storage_s=1e-3), cluster(), samples=10)
    for _ in range(ENOUGH):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.02, 2: 0.04}))
    assert seconds(live, "storage", 1) == pytest.approx(2e-3)
    assert seconds(live, "storage", 17) == pytest.approx(3e-3), "1 + 1 ms became 2 + 4 ms"
    assert seconds(live, "compute", 17) == pytest.approx(2e-5), "the other tier has not been seen"
    profile, _ = live.now()
    assert profile.stages[20] == alexnet(storage_s=1e-3).stages[20], "past the freeze point the tail counts"


def test_steps_count_once_there_are_enough() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16)
    for step in range(STEPS):
        assert live.now()[0].tail == alexnet().tail
        live.trained(0.5 if step else 9.0, 100)
    assert live.now()[0].tail.seconds == (0.0, 0.005)


def test_read_and_encode_are_seconds_a_byte() -> None:
    live = LiveProfile(alexnet(stored_bytes=1000), cluster(), samples=10)
    live.saw(Tier.STORAGE, Timings(phases={"read": 0.5, "encode": 0.2, "queue": 9.0}), sent_bytes=2000)
    rates = live.now()[1].storage.seconds_per_byte
    assert rates == pytest.approx({"read": 0.5 / 10_000, "encode": 1e-4})


def test_the_link_is_what_it_last_carried() -> None:
    live = LiveProfile(alexnet(), cluster(bandwidth=1e6), samples=10)
    for bandwidth in (2e6, 9e9, 2e6):
        live.carried(bandwidth)
    assert live.now()[1].link.bandwidth_bytes_per_s == 2e6
    assert live.recent_bandwidths(2) == (9e9, 2e6)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="bandwidth_bytes_per_s"):
            live.carried(bad)


def test_a_stage_that_ran_once_follows_those_that_run_now() -> None:
    live = LiveProfile(alexnet(storage_s=1e-3), cluster(), samples=10)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.01, 2: 0.07}))
    assert seconds(live, "storage", 2) == pytest.approx(7e-3), "as seen"
    for _ in range(UNSEEN * WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.01}))
    assert seconds(live, "storage", 2) == pytest.approx(7e-3), "a route with few micro-batches has run it"
    before = seconds(live, "storage", 1)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.03}))
    assert seconds(live, "storage", 1) == pytest.approx(3 * before)
    slower = seconds(live, "storage", 2)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.06}))
    assert seconds(live, "storage", 2) == pytest.approx(2 * slower), "as those beside it since"


def test_input_stages_on_cores_of_their_own_are_followed_under_that_name() -> None:
    inputs = (StageProfile(name="decode", kind="decode", out_bytes=9.0, seconds={"compute.cpu": (0.0, 0.5)}),)
    live = LiveProfile(replace(alexnet(), input_stages=inputs), cluster(), samples=10)
    for _ in range(WINDOW):
        live.saw(Tier.COMPUTE, Timings(stages={0: 20.0}))
    assert live.now()[0].stage(0).seconds == {"compute.cpu": (0.0, 2.0)}


# ---------------------------------------------------------------------------------- work of others

TOOK_S = 0.125


def answered(live: LiveProfile, count: int, wait_s: float, *, took_s: float = TOOK_S) -> None:
    """Feed responses of a server that states how long one more micro-batch would wait."""
    phases = {"queue": 99.0, "forward": 0.75 * took_s, "encode": 0.25 * took_s}
    for _ in range(count):
        live.saw(Tier.STORAGE, Timings(phases=phases, expected_wait_s=wait_s))


def load(live: LiveProfile) -> float:
    return live.now()[1].storage.load


def test_a_worker_is_kept_from_others_neither_by_waiting_nor_by_reading() -> None:
    phases = {"receive": 9.0, "queue": 9.0, "read": 9.0, "input": 1.0, "forward": 2.0, "encode": 0.5}
    timings = Timings(phases=phases)
    assert worker_s(timings) == 3.5


@pytest.mark.parametrize(("in_flight", "at_once"), [(1, 1), (4, 1), (4, 2), (2, 8)])
def test_what_a_job_waits_for_by_itself_is_no_load(in_flight: int, at_once: int) -> None:
    at = AtServers(in_flight=in_flight, at_once=at_once)
    live = LiveProfile(alexnet(), cluster(), samples=16, at_servers=at)
    answered(live, WINDOW, (in_flight - 1) * TOOK_S / at_once)
    assert live.slowed == 1.0
    assert live.now()[1] == cluster()


@given(
    mine=st.integers(1, 40), others=st.integers(0, 40), at_once=st.integers(1, 8), took_s=st.floats(1e-3, 10)
)
def test_taking_turns_takes_as_many_times_as_long_as_there_are_more(
    mine: int, others: int, at_once: int, took_s: float
) -> None:
    """Clients that repeat at once share in rounds: this job has only its own part of each round."""
    at = AtServers(in_flight=mine, at_once=at_once)
    live = LiveProfile(alexnet(), cluster(load=0.5), samples=16, at_servers=at)
    answered(live, ENOUGH, (mine - 1 + others) * took_s / at_once, took_s=took_s)
    assert load(live) == pytest.approx(0.5 * (mine + others) / mine)


def test_waiting_is_smoothed_over_the_window_and_forgotten() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16, at_servers=AtServers(in_flight=4))
    answered(live, ENOUGH - 1, 7 * TOOK_S)
    assert load(live) == 1.0, "too few say so"
    answered(live, 1, 7 * TOOK_S)
    assert load(live) == pytest.approx(2.0)
    answered(live, 3, 999.0)
    assert load(live) == pytest.approx(2.0), "an odd one or two are nothing"
    answered(live, WINDOW // 2, 0.0)
    answered(live, 1, 0.0)
    assert load(live) == 1.0, "when most of the window says that it is over, it is"


def test_what_was_waited_for_at_the_start_counts_once() -> None:
    at = AtServers(in_flight=4, slowed=2.0)
    live = LiveProfile(alexnet(), cluster(load=3.0), samples=16, at_servers=at)
    assert live.now()[1] == cluster(load=3.0)
    answered(live, ENOUGH, 7 * TOOK_S)
    assert load(live) == pytest.approx(3.0), "it is as it was"
    answered(live, WINDOW, 0.0)
    assert load(live) == 1.5, "others have gone"


def test_where_nothing_comes_what_servers_say_counts() -> None:
    at = AtServers(in_flight=4, at_once=2, micro_batch_s=0.5)
    live = LiveProfile(alexnet(), cluster(), samples=16, at_servers=at)
    live.waits(0.5)
    assert load(live) == pytest.approx(3.0), "two turns of others for each of this job's"
    answered(live, WINDOW, 99 * TOOK_S)
    assert load(live) > 10
    for _ in range(TOLD_WINDOW):
        live.waits(0.0)
    assert load(live) == 1.0, "answers are of another time"
    answered(live, ENOUGH - 1, 99 * TOOK_S)
    assert load(live) == 1.0
    answered(live, 1, 99 * TOOK_S)
    assert load(live) > 10, "and count again once there are some"


def test_a_moment_tells_less_than_three() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16, at_servers=AtServers(micro_batch_s=1.0))
    for wait_s in (0.0, 9.0, 0.0):
        live.waits(wait_s)
    assert load(live) == 1.0
    with pytest.raises(ConfigError, match="wait_s"):
        live.waits(-1.0)


@pytest.mark.parametrize(("wait_s", "took_s"), [(1e300, 1e-3), (1e300, 1e-300), (1e-300, 1e-300), (0.0, 0.0)])
def test_whatever_a_server_says_a_load_can_be_planned_with(wait_s: float, took_s: float) -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16, at_servers=AtServers(in_flight=4))
    answered(live, WINDOW, wait_s, took_s=took_s)
    assert 1.0 <= load(live) <= MOST_SLOWED
    live.waits(wait_s)
    assert 1.0 <= load(live) <= MOST_SLOWED


def test_answers_are_counted() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16)
    live.saw(Tier.COMPUTE, Timings(phases={"forward": 1.0}))
    assert live.answers == 0
    answered(live, 3, 0.0)
    assert live.answers == 3


@pytest.mark.parametrize(
    "fields", [{"in_flight": 0}, {"at_once": -1}, {"slowed": math.nan}, {"micro_batch_s": math.inf}]
)
def test_what_a_job_has_there_is_checked(fields: dict[str, float]) -> None:
    [name] = fields
    with pytest.raises(ConfigError, match=f"at_servers.{name}"):
        AtServers(**fields)


SEEN = st.builds(
    Timings,
    phases=st.dictionaries(
        st.sampled_from(["receive", "queue", "read", "input", "forward", "encode"]), st.floats(0, 9)
    ),
    stages=st.dictionaries(st.integers(-2, 7), st.floats(0, 9)),
)


@given(
    profile=profiles(),
    machines=clusters(),
    seen=st.lists(SEEN, max_size=12),
    at=st.builds(AtServers, in_flight=st.integers(1, 20), at_once=st.integers(1, 8)),
)
def test_where_nobody_waits_every_plan_is_what_it_would_be_without_all_this(
    profile: Profile, machines: Cluster, seen: list[Timings], at: AtServers
) -> None:
    lives = [
        LiveProfile(profile, machines, samples=4),
        LiveProfile(profile, machines, samples=4, at_servers=at),
    ]
    for live in lives:
        for timings in seen:
            live.saw(Tier.STORAGE, timings, sent_bytes=100.0)
    (before, now), work = (live.now() for live in lives), Workload(batch_size=8, num_samples=100)
    assert now == before
    assert now[1].storage.load == machines.storage.load
    plans = [POLICIES["upriver"](*each, work) for each in (before, now)]
    assert plans[0].routes == plans[1].routes and plans[0].predicted == plans[1].predicted
