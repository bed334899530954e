"""Check the decision for one request against its definition, and against policies that plan from files."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.examples import seeds
from upriver.control.partition import (
    BEHIND,
    ESTIMATES,
    HAND_OVER_S,
    LATE,
    LONGER,
    SAME,
    TRIAL_S,
    CutChoice,
    OwnLoad,
    PartitionRule,
    ServerConditions,
    choose,
    kept_away,
    kept_away_by_link,
    likely,
)
from upriver.errors import ConfigError
from upriver.latency import LatencyModel, LatencySums, last_of_least
from upriver.policies import inference, loadpart
from upriver.types import (
    BANDWIDTH,
    Cluster,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    Workload,
)

ONE = Workload(batch_size=1, num_samples=1)


def drawn(rng: random.Random, stages: int) -> Profile:
    """Draw whole numbers, so that many cuts cost the same."""
    return Profile(
        model="",
        freeze=stages,
        input=InputProfile(stored_bytes=rng.randint(0, 9) * 1e6, tensor_bytes=1.0),
        stages=tuple(
            StageProfile(
                name=str(number),
                kind="",
                out_bytes=rng.randint(0, 9) * 1e6,
                seconds={
                    "compute": (0.0, float(rng.randint(0, 4))),
                    "storage": (0.0, float(rng.randint(0, 3))),
                },
            )
            for number in range(stages)
        ),
    )


def now_of(rng: random.Random) -> ServerConditions:
    return ServerConditions(
        upload_bytes_per_s=rng.choice([1e6, 2e6, 4e6]),
        download_bytes_per_s=rng.choice([None, 1e6, 2e6]),
        rtt_s=float(rng.randint(0, 2)),
        load=float(rng.randint(1, 3)),
        wait_s=float(rng.randint(0, 2)),
    )


def cluster_of(now: ServerConditions) -> Cluster:
    return Cluster(
        link=Link(
            bandwidth_bytes_per_s=now.upload_bytes_per_s,
            rtt_s=now.rtt_s,
            download_bytes_per_s=now.download_bytes_per_s,
        ),
        storage=StorageTier(load=now.load, wait_s=now.wait_s),
    )


def sums_of(profile: Profile) -> LatencySums:
    return LatencyModel(profile, Cluster(link=Link(bandwidth_bytes_per_s=1.0))).sums


def by_hand(profile: Profile, cut: int, now: ServerConditions) -> float:
    """Return the seconds of a request, summed stage by stage."""
    stages = profile.stages
    seconds = sum(stage.seconds["compute"][1] for stage in stages[:cut])
    if cut == len(stages):
        return seconds
    seconds += profile.cut_bytes(cut) / now.upload_bytes_per_s + now.rtt_s + now.wait_s
    seconds += now.load * sum(stage.seconds["storage"][1] for stage in stages[cut:])
    if now.download_bytes_per_s is not None:
        seconds += stages[-1].out_bytes / now.download_bytes_per_s
    return seconds


def choice_for(profile: Profile, offers: Any, **rule: Any) -> CutChoice:
    local = sum(stage.seconds["compute"][1] for stage in profile.stages)
    return choose(PartitionRule(**rule), local, len(profile.stages), offers)


@pytest.mark.parametrize("seed", seeds(300))
def test_the_choice_is_the_least_of_all_cuts_and_the_last_of_equals(seed: int) -> None:
    rng = random.Random(seed)
    profile, now = drawn(rng, rng.randint(1, 9)), now_of(rng)
    found = choice_for(profile, [(sums_of(profile), now)])
    seconds = [by_hand(profile, cut, now) for cut in range(len(profile.stages) + 1)]
    least = min(seconds)
    assert found.seconds == pytest.approx(least)
    assert seconds[found.cut] == pytest.approx(least)
    assert all(each > least + 1e-9 for each in seconds[found.cut + 1 :])
    assert (found.server is None) == (found.cut == len(profile.stages))


@pytest.mark.parametrize("seed", seeds(100))
def test_it_is_what_the_policies_plan_from_the_same_numbers(seed: int) -> None:
    rng = random.Random(seed)
    profile, now = drawn(rng, rng.randint(1, 9)), now_of(rng)
    offers = [(sums_of(profile), now)]
    assert choice_for(profile, offers).cut == inference.plan(profile, cluster_of(now), ONE).cut
    free = ServerConditions(upload_bytes_per_s=now.upload_bytes_per_s, load=now.load)
    assert (
        choice_for(profile, offers, policy="loadpart").cut
        == loadpart.plan(profile, cluster_of(free), ONE).cut
    )
    blind = ServerConditions(upload_bytes_per_s=now.upload_bytes_per_s)
    planned = loadpart.plan(profile, cluster_of(blind), ONE).cut
    assert choice_for(profile, offers, policy="neurosurgeon").cut == planned


@pytest.mark.parametrize("seed", seeds(100))
def test_of_several_servers_the_one_with_the_least_seconds_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 6)
    profiles = [drawn(rng, stages)]
    device = profiles[0]
    for _ in range(2):  # the same network and device, another server
        other = drawn(rng, stages)
        joined = [
            StageProfile(
                name=mine.name,
                kind="",
                out_bytes=mine.out_bytes,
                seconds={"compute": mine.seconds["compute"], "storage": theirs.seconds["storage"]},
            )
            for mine, theirs in zip(device.stages, other.stages, strict=True)
        ]
        profiles.append(Profile(model="", freeze=stages, input=device.input, stages=tuple(joined)))
    states = [now_of(rng) for _ in profiles]
    offers = list(zip(map(sums_of, profiles), states, strict=True))
    found = choice_for(device, offers)
    seconds = [
        by_hand(profile, cut, now)
        for profile, now in zip(profiles, states, strict=True)
        for cut in range(stages + 1)
    ]
    assert found.seconds == pytest.approx(min(seconds))
    if found.server is not None:
        assert by_hand(profiles[found.server], found.cut, states[found.server]) == pytest.approx(min(seconds))


@pytest.mark.parametrize("seed", seeds(200))
def test_a_request_is_kept_away_from_servers_that_would_be_asked_if_they_were_free(seed: int) -> None:
    rng = random.Random(seed)
    profile, states = drawn(rng, rng.randint(1, 6)), [now_of(rng) for _ in range(2)]
    sums, stages = sums_of(profile), len(profile.stages)
    local = sum(stage.seconds["compute"][1] for stage in profile.stages)
    offers = [(sums, states[0]), (sums, states[1]), (sums, None)]
    for deadline_s in (4.5, math.inf):
        choice = choose(PartitionRule(), local, stages, offers, deadline_s=deadline_s)
        away = []
        for server, now in enumerate(states):
            free = replace(now, load=1.0, wait_s=0.0)
            least = min(by_hand(profile, cut, free) for cut in range(stages))
            if free != now and server != choice.server and least < min(choice.seconds, deadline_s) - 1e-9:
                away.append(server)
        assert kept_away(PartitionRule(), choice, offers, deadline_s=deadline_s) == away
        for rule in (PartitionRule(policy="loadpart"), PartitionRule(policy="local"), PartitionRule(cut=0)):
            assert kept_away(rule, choice, offers) == []


@pytest.mark.parametrize("seed", seeds(200))
def test_a_request_is_kept_away_by_links_over_which_servers_would_be_asked_were_they_wide(
    seed: int,
) -> None:
    rng = random.Random(seed)
    profile, states = drawn(rng, rng.randint(1, 6)), [now_of(rng) for _ in range(2)]
    sums, stages = sums_of(profile), len(profile.stages)
    local = sum(stage.seconds["compute"][1] for stage in profile.stages)
    offers = [(sums, states[0]), (sums, states[1]), (sums, None)]
    for deadline_s in (4.5, math.inf):
        choice = choose(PartitionRule(), local, stages, offers, deadline_s=deadline_s)
        most_s = min(choice.seconds, deadline_s) - 1e-9
        wide = [replace(now, upload_bytes_per_s=BANDWIDTH.most) for now in states]
        away = [
            server
            for server, now in enumerate(wide)
            if choice.server is None and min(by_hand(profile, cut, now) for cut in range(stages)) < most_s
        ]
        assert kept_away_by_link(PartitionRule(), choice, offers, deadline_s=deadline_s) == away
        for rule in (PartitionRule(policy="loadpart"), PartitionRule(policy="local"), PartitionRule(cut=0)):
            assert kept_away_by_link(rule, choice, offers) == []


def flat(stages: int) -> LatencySums:
    return LatencySums(
        device_s=np.arange(stages + 1, dtype=np.float64),
        server_s=np.zeros(stages + 1),
        sent_bytes=np.full(stages + 1, 1e6),
        handling_s=np.zeros(stages + 1),
    )


def test_a_cut_that_is_asked_for_is_taken_on_the_best_server() -> None:
    slow, fast = (
        (flat(4), ServerConditions(upload_bytes_per_s=1e5)),
        (flat(4), ServerConditions(upload_bytes_per_s=1e6)),
    )
    for cut in range(4):
        assert choose(PartitionRule(cut=cut), 4.0, 4, [slow, fast]) == CutChoice(
            cut=cut, server=1, seconds=cut + 1.0
        )
    assert choose(PartitionRule(policy="remote"), 4.0, 4, [slow, fast]) == CutChoice(
        cut=0, server=1, seconds=1.0
    )
    for rule in (PartitionRule(cut=4), PartitionRule(policy="local")):
        assert choose(rule, 4.0, 4, [slow, fast]) == CutChoice(cut=4, server=None, seconds=4.0)


@pytest.mark.parametrize("seed", seeds(100))
def test_no_server_is_asked_that_would_be_late(seed: int) -> None:
    rng = random.Random(seed)
    profile, now = drawn(rng, rng.randint(1, 9)), now_of(rng)
    seconds = [by_hand(profile, cut, now) for cut in range(len(profile.stages) + 1)]
    for deadline_s in (0.5, 2.0, 5.0, 8.5, 20.5, math.inf):
        there = [each for each in seconds[:-1] if each <= deadline_s]
        wanted = min([*there, seconds[-1]])
        found = choose(
            PartitionRule(),
            seconds[-1],
            len(profile.stages),
            [(sums_of(profile), now)],
            deadline_s=deadline_s,
        )
        assert found.seconds == pytest.approx(wanted)
        assert (found.server is None) == (not there or seconds[-1] <= min(there))


def test_a_cut_that_must_be_taken_is_taken_however_late() -> None:
    for rule in (PartitionRule(cut=2), PartitionRule(policy="remote")):
        found = choose(rule, 4.0, 4, [(flat(4), ServerConditions(upload_bytes_per_s=1e6))], deadline_s=0.1)
        assert found.server == 0


def test_without_a_server_or_a_link_that_is_known_the_device_does_all() -> None:
    alone = CutChoice(cut=4, server=None, seconds=4.0)
    for rule in (PartitionRule(), PartitionRule(cut=2), PartitionRule(policy="remote")):
        assert choose(rule, 4.0, 4, []) == alone
    assert choose(PartitionRule(), 4.0, 4, [(flat(4), None)]) == alone
    assert choose(PartitionRule(cut=2), 4.0, 4, [(flat(4), None)]) == CutChoice(
        cut=2, server=0, seconds=math.inf
    )


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_no_policy_is_told_of_a_bandwidth_that_is_none(value: float) -> None:
    with pytest.raises(ConfigError, match="upload_bytes_per_s"):
        ServerConditions(upload_bytes_per_s=value)
    with pytest.raises(ConfigError, match="download_bytes_per_s"):
        ServerConditions(upload_bytes_per_s=1.0, download_bytes_per_s=value)


def test_the_likely_cuts_are_those_that_win_somewhere() -> None:
    rng = random.Random(0)
    for _ in range(20):
        sums = sums_of(drawn(rng, 12))
        found = likely(PartitionRule(), sums, most=3)
        assert len(found) <= 3 and len(set(found)) == len(found)
        assert all(0 <= cut < 12 for cut in found)
        for cut in found:
            assert any(
                last_of_least(
                    ESTIMATES["inference"](sums, ServerConditions(upload_bytes_per_s=2.0**power, load=2.0**k))
                )
                == cut
                for power in range(14, 31)
                for k in range(6)
            )
    assert likely(PartitionRule(cut=5), sums, most=3) == (5,)
    assert likely(PartitionRule(policy="local"), sums, most=3) == ()
    assert likely(PartitionRule(policy="remote"), sums, most=3) == (0,)


# ------------------------------------------------------------------------------- the last answer's load


def sums_with(device_s: list[float], server_s: list[float], sent_bytes: list[float]) -> LatencySums:
    """Return the sums of stages with these seconds; bytes are given for each cut."""
    stages = len(device_s)
    return LatencySums(
        device_s=np.array([sum(device_s[:cut]) for cut in range(stages + 1)]),
        server_s=np.array([sum(server_s[cut:]) for cut in range(stages + 1)]),
        sent_bytes=np.array(sent_bytes),
        handling_s=np.zeros(stages + 1),
    )


def test_a_last_answer_that_was_slower_than_told_counts_for_every_cut() -> None:
    sums = sums_with([1.0, 1.0], [0.2, 0.02], [1e6, 0.1e6, 0.0])
    now = ServerConditions(upload_bytes_per_s=1e7, load=1.0, own=OwnLoad(load=10.0, server_s=0.02, told=1.0))
    assert choose(PartitionRule(), 2.0, 2, [(sums, replace(now, own=None))]).cut == 0
    found = choose(PartitionRule(), 2.0, 2, [(sums, now)])
    assert (found.cut, found.seconds) == (1, pytest.approx(1.0 + 0.01 + 0.2))
    for policy in ("loadpart", "neurosurgeon"):
        assert choose(PartitionRule(policy=policy), 2.0, 2, [(sums, now)]).cut == 0


@pytest.mark.parametrize(("server_s", "cut"), [(1.01 * 0.22 / LONGER, 0), (0.99 * 0.22 / LONGER, 1)])
def test_a_last_answer_that_was_quicker_than_told_counts_for_stretches_like_it(
    server_s: float, cut: int
) -> None:
    """A short stretch on a busy machine is often not interrupted."""
    sums = sums_with([1.0, 1.0], [0.2, 0.02], [1e6, 0.1e6, 0.0])
    now = ServerConditions(
        upload_bytes_per_s=1e7, load=10.0, own=OwnLoad(load=1.0, server_s=server_s, told=10.0)
    )
    assert choose(PartitionRule(), 2.0, 2, [(sums, replace(now, own=None))]).cut == 1
    assert choose(PartitionRule(), 2.0, 2, [(sums, now)]).cut == cut


@pytest.mark.parametrize(("told", "cut"), [(1.0, 1), (0.99 * SAME, 1), (1.01 * SAME, 0)])
def test_a_last_answer_counts_until_another_load_is_told(told: float, cut: int) -> None:
    sums = sums_with([1.0, 1.0], [0.2, 0.02], [1e6, 0.1e6, 0.0])
    own = OwnLoad(load=10.0, server_s=0.02, told=1.0)
    now = ServerConditions(upload_bytes_per_s=1e7, load=told, own=own)
    assert choose(PartitionRule(), 2.0, 2, [(sums, now)]).cut == cut


def test_a_last_answer_changes_no_choice_that_is_hardly_behind() -> None:
    sums = sums_with([1.0], [0.5], [0.0, 0.0])
    for load, cut in ((2 * (1 + 0.9 * BEHIND), 0), (2 * (1 + 1.1 * BEHIND), 1)):
        now = ServerConditions(
            upload_bytes_per_s=1.0, load=1.0, own=OwnLoad(load=load, server_s=0.5, told=1.0)
        )
        assert choose(PartitionRule(), 1.0, 1, [(sums, now)]).cut == cut


# ------------------------------------------------------------------------------------ hedges and trials


AT_ONCE = 0.0

FAR = sums_with([1.0, 1.0], [0.1, 0.1], [1e6, 1e6, 0.0])
"""At 10 MB/s all of it takes 0.3 s there, and 2 s here."""

FAST = ServerConditions(upload_bytes_per_s=1e7)


def place(now: ServerConditions, rule: PartitionRule | None = None, **options: Any) -> CutChoice:
    return choose(rule or PartitionRule(), 2.0, 2, [(FAR, now)], **options)


def test_a_request_is_hedged_from_when_it_is_late() -> None:
    assert place(FAST) == CutChoice(
        cut=0, server=0, seconds=pytest.approx(0.3), hedge_s=pytest.approx(0.3 * LATE)
    )
    for told in (
        place(FAST, hedges=False),
        place(FAST, PartitionRule(policy="loadpart")),
        place(FAST, PartitionRule(policy="remote")),
        place(FAST, PartitionRule(cut=0)),
    ):
        assert told.cut == 0 and told.hedge_s is None


def test_a_request_by_old_figures_is_hedged_at_once() -> None:
    assert place(replace(FAST, old=True)).hedge_s == AT_ONCE


def test_a_request_whose_packing_costs_the_device_too_much_is_not_hedged() -> None:
    most_s = BEHIND * 2.0 - HAND_OVER_S
    for packing_s, hedged in ((0.99 * most_s, True), (1.01 * most_s, False)):
        sums = replace(FAR, handling_s=np.array([packing_s, packing_s, 0.0]))
        found = choose(PartitionRule(), 2.0, 2, [(sums, FAST)])
        assert found.cut == 0 and (found.hedge_s is not None) == hedged
        lost = choose(PartitionRule(), 2.0, 2, [(sums, replace(FAST, misses=1))])
        assert lost.cut == 0 and (lost.hedge_s == AT_ONCE) == hedged, "it cannot be tried otherwise"


def test_a_server_that_lost_is_tried_at_once_and_then_after_a_while() -> None:
    for misses, silent_s, tried in (
        (1, 0.0, True),
        (2, 0.99 * TRIAL_S, False),
        (2, TRIAL_S, True),
        (9, TRIAL_S, True),
        (0, 0.0, False),
    ):
        now = replace(FAST, load=100.0, misses=misses, silent_s=silent_s)
        found = place(now)
        assert found == (
            CutChoice(cut=0, server=0, seconds=pytest.approx(0.3), hedge_s=AT_ONCE)
            if tried
            else CutChoice(cut=2, server=None, seconds=2.0)
        )
        assert place(now, hedges=False).server is None
    assert place(replace(FAST, misses=2)).server is None, "whatever the server tells"


def test_a_server_that_keeps_requests_away_by_what_it_tells_is_tried_now_and_then() -> None:
    now = replace(FAST, load=100.0)
    assert place(replace(now, silent_s=0.99 * TRIAL_S)).server is None
    assert place(replace(now, silent_s=TRIAL_S)).hedge_s == AT_ONCE


def test_a_trial_takes_a_hundredth_of_the_link_at_most() -> None:
    now = ServerConditions(upload_bytes_per_s=1e6, load=100.0, misses=2)  # 1 s for the input
    assert place(replace(now, silent_s=99.0)).server is None
    assert place(replace(now, silent_s=100.0)).hedge_s == AT_ONCE


def test_a_server_that_gained_nothing_if_it_were_idle_is_not_tried() -> None:
    now = ServerConditions(upload_bytes_per_s=1e6 / (2.0 / (1 + BEHIND) - 0.2 + 0.01), misses=1)
    assert place(now).server is None
    assert place(replace(now, upload_bytes_per_s=1.1 * now.upload_bytes_per_s)).hedge_s == AT_ONCE
    assert place(replace(FAST, misses=1), deadline_s=0.29).server is None


def test_a_server_that_lost_is_not_tried_at_once_where_another_one_serves() -> None:
    other = sums_with([1.0, 1.0], [0.4, 0.4], [1e6, 1e6, 0.0])
    for silent_s, server in ((0.0, 1), (TRIAL_S, 0)):
        lost = replace(FAST, misses=1, silent_s=silent_s)
        assert choose(PartitionRule(), 2.0, 2, [(FAR, lost), (other, FAST)]).server == server


@pytest.mark.parametrize("seed", seeds(200))
def test_a_trial_is_never_behind_full_offload_however_busy_the_server_is(seed: int) -> None:
    rng = random.Random(seed)
    profile, now = drawn(rng, rng.randint(1, 9)), replace(now_of(rng), misses=1)
    sums, local = sums_of(profile), sum(stage.seconds["compute"][1] for stage in profile.stages)
    found = choose(PartitionRule(), local, len(profile.stages), [(sums, now)])
    if found.server is None:
        return
    assert found.hedge_s == AT_ONCE
    for load in (1.0, 3.0, 50.0):
        then = replace(now, load=load)
        assert by_hand(profile, found.cut, then) <= by_hand(profile, 0, then) + 1e-9
