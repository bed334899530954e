"""Check the decision about kept rows against brute force, and against cases worked out by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning import cluster, clusters, profiles, stage
from tests.policies.keeping import (
    DISK,
    MEMORY,
    STORE,
    Question,
    asked,
    full_lives,
    full_program,
    one_stage,
    questions,
    single,
)
from upriver.cost import CostModel, evaluate
from upriver.errors import ConfigError
from upriver.policies._common import MARGIN, SLACK
from upriver.policies.kept import KeepingTiers, KeepPlan, KeepRoom, KeepRoute, KeepTier, fresh_shares, plan
from upriver.types import Cluster, InputProfile, Link, Profile, StorageTier, TailProfile, Workload

NEAR = (1 + SLACK) * (1 + MARGIN) * (1 + 1e-9)
"""How much longer an answer may be than the shortest: answers within the slack are equal, and mixes of cuts
count as longer."""

PLENTY = KeepRoom(budget_bytes=math.inf)


# ---------------------------------------------------------------------------------- brute force


def shortest_s(question: Question, steps: int) -> float:
    """Return the least seconds of the horizon over all shares in ``1 / steps``, fill and drain included."""
    costs, best_s = question.costs, math.inf
    for views in {1, *question.keeping.positions.values()}:
        lives, firsts = full_lives(question, views), min(views, question.epochs)
        program = full_program(question, lives)
        chosen = np.array([*combinations_with_replacement(range(len(lives)), steps)])
        held = program.limited[:, chosen].sum(axis=2) / steps
        chosen = chosen[(held <= program.limits[:, np.newaxis] * (1 + 1e-12)).all(axis=0)]
        total_s = np.zeros(len(chosen))
        for busy, sources, epochs in (
            (program.first, [life.first for life in lives], firsts),
            (program.later, [life.later for life in lives], question.epochs - firsts),
        ):
            busiest = busy[:, chosen].sum(axis=2).max(axis=0) / steps
            total_s += epochs * (busiest + costs.around_s[sources][chosen].max(axis=1))
        best_s = min(best_s, float(total_s.min()))
    return best_s


def smaller(question: Question) -> Question:
    """Return the same of few stages, for which all shares can be tried, and with many samples."""
    profile = replace(
        question.profile,
        input_stages=question.profile.input_stages[-1:],
        stages=question.profile.stages[:2],
        freeze=min(question.profile.freeze, 2),
    )
    cuts, keeping = range(profile.unsplit, profile.freeze + 1), question.keeping
    keeping = replace(
        keeping,
        there={place: share for place, share in keeping.there.items() if place[0] in cuts},
        positions={position: views for position, views in keeping.positions.items() if position in cuts},
    )
    workload = replace(question.workload, num_samples=3000)
    return replace(question, profile=profile, keeping=keeping, workload=workload)


@given(question=questions(most_places=3).map(smaller))
def test_plan_is_near_the_shortest_of_a_grid(question: Question) -> None:
    assert question.plan().total_s <= NEAR * shortest_s(question, steps=3) + 1e-9


def rows_of(found: KeepPlan) -> Iterator[KeepRoute]:
    yield from (*found.first, *found.later)


@given(question=questions())
def test_plan_keeps_the_contract(question: Question) -> None:
    before = copy.deepcopy(question)
    found = question.plan()
    assert question == before and question.plan() == found, "equal questions, equal answers"
    assert found.total_s <= found.total_without_s
    assert (
        found.without_s
        == evaluate(question.routes, question.profile, question.cluster, question.workload).epoch_s
    )
    assert found.epochs == question.epochs and bool(found.later) == (question.epochs > min(found.views, 12))
    for routes in filter(None, (found.first, found.later)):
        assert math.isclose(sum(route.share for route in routes), 1.0)
    kept_rows = [route for route in rows_of(found) if route.read or route.written]
    for route in rows_of(found):
        assert route.share > 0 and (route.cut is None) != (route.read is None)
        if kept_rows:
            samples = route.share * question.workload.num_samples
            assert math.isclose(samples, round(samples), abs_tol=1e-6)
    assert all(route.written is None for route in found.later)
    for place, share in found.written.items():
        assert question.keeping.positions[place[0]] == found.views
        assert share <= found.kept[place] + 1e-9, "what is written is read"
    for route in found.first:
        if route.written and route.written[1] is STORE:
            assert route.cut is not None and route.cut >= route.written[0]
        elif route.written:
            arrives = route.cut if route.read is None else route.read[0]
            assert arrives is not None and arrives <= route.written[0]


@given(question=questions())
def test_plan_never_exceeds_a_budget_nor_reads_what_is_not_there(question: Question) -> None:
    found, keeping = question.plan(), question.keeping
    for tier, room in keeping.tiers.items():
        size = 0.0
        for (position, place_tier), share in found.kept.items():
            row = keeping.row_bytes.get(position, question.profile.cut_bytes(position))
            views = keeping.positions[position]
            size += share * question.workload.num_samples * row * views if place_tier is tier else 0.0
        assert size <= room.budget_bytes * (1 + 1e-9)
    for route in found.first:
        if route.read:
            assert route.share <= keeping.there[route.read] + 1e-9
    for place, share in found.kept.items():
        assert share <= found.written.get(place, 0.0) + keeping.there.get(place, 0.0) + 1e-9


@given(question=questions())
def test_epoch_from_which_keeping_pays_is_the_first_with_the_shorter_sum(question: Question) -> None:
    found = question.plan()
    sums = [
        min(count, found.views) * found.first_s + max(0, count - found.views) * found.later_s
        for count in range(1, question.epochs + 1)
    ]
    shorter = [count for count, sum_s in enumerate(sums, 1) if sum_s < count * found.without_s * (1 - 1e-9)]
    kept_rows = any(route.read or route.written for route in rows_of(found))
    assert (found.pays_from is not None) == kept_rows
    if kept_rows:
        assert found.pays_from == shorter[0]
        assert f"pays from epoch {found.pays_from} on" in found.why
    else:
        assert found.why.startswith("Nothing is kept: ")


def test_better_cuts_alone_are_not_called_keeping() -> None:
    """A cut for each of two samples halves the epoch, and no row is read or written."""
    free, costly = (stage("s", 0.0, storage=each, compute=each) for each in (0.0, 1 / 16))
    question = Question(
        profile=Profile(
            model="one costly input stage",
            freeze=0,
            input=InputProfile(stored_bytes=0.0, tensor_bytes=0.0),
            stages=(free,),
            input_stages=(free, free, costly),
        ),
        cluster=cluster(1e4, micro_batch=2, request_samples=1),
        workload=Workload(batch_size=1, num_samples=2),
        keeping=KeepingTiers(
            tiers={MEMORY: KeepRoom(budget_bytes=0.0)},
            positions={-3: 1},
            there={(-3, MEMORY): 0.1},
            row_bytes={-3: 0.0},
        ),
        epochs=1,
    )
    found = question.plan()
    assert found.pays_from is None
    assert found.why.startswith("Nothing is kept: ")


@given(question=questions(), times=st.sampled_from([1.5, 4.0, math.inf]))
def test_larger_budget_is_never_slower(question: Question, times: float) -> None:
    tiers = {
        tier: replace(room, budget_bytes=room.budget_bytes * times if room.budget_bytes else 0.0)
        for tier, room in question.keeping.tiers.items()
    }
    larger = replace(question, keeping=replace(question.keeping, tiers=tiers))
    assert larger.plan().total_s <= NEAR * question.plan().total_s


@given(question=questions())
@pytest.mark.full
def test_longer_horizon_saves_no_less(question: Question) -> None:
    found = question.plan()
    longer = replace(question, epochs=question.epochs + 1).plan()
    assert longer.total_s <= NEAR * (found.total_s + found.later_s)


@given(question=questions())
def test_tier_that_is_dropped_is_not_used(question: Question) -> None:
    for tier in KeepTier:
        found = replace(question, keeping=question.keeping.without(tier)).plan()
        assert all(place[1] != tier for place in (*found.kept, *found.written))
        assert all(route.read is None or route.read[1] != tier for route in found.first)


# ------------------------------------------------------------------------------- closed forms


def test_plan_with_room_for_all_computes_once_and_reads_from_memory() -> None:
    """The link takes 10 s an epoch at cut 1, the tail 1 s."""
    found = asked(one_stage(), {MEMORY: PLENTY, DISK: PLENTY}).plan()
    assert found.first == (KeepRoute(share=1.0, cut=1, written=(1, MEMORY)),)
    assert found.later == (KeepRoute(share=1.0, read=(1, MEMORY)),)
    assert (found.without_s, found.first_s, found.later_s) == pytest.approx((10, 10, 1), rel=0.01)
    assert found.total_s == pytest.approx(14, rel=0.01) and found.pays_from == 2
    assert "100.0% computed over cut 1 and kept at 1 in memory" in found.why
    assert "100.0% read at 1 from memory" in found.why and "Rows in memory take 10 MB." in found.why


def test_plan_with_room_for_half_reads_half() -> None:
    found = asked(one_stage(), {MEMORY: KeepRoom(budget_bytes=5e6)}).plan()
    assert found.kept == {(1, MEMORY): 0.5} and found.fresh_later == {1: 0.5}
    assert found.later_s == pytest.approx(5, rel=0.01)


def test_rest_goes_to_the_disk_where_memory_is_full() -> None:
    tiers = {MEMORY: KeepRoom(budget_bytes=4e6), DISK: KeepRoom(budget_bytes=1e9, read_s_per_byte=1e-8)}
    found = asked(one_stage(), tiers).plan()
    assert found.kept == pytest.approx({(1, MEMORY): 0.4, (1, DISK): 0.6})
    assert found.later_s == pytest.approx(1, rel=0.01)


def test_slow_disk_and_link_finish_together() -> None:
    """All rows take 20 s from the disk and 10 s over the link: a third of them is read."""
    tiers = {DISK: KeepRoom(budget_bytes=1e9, read_s_per_byte=2e-6)}
    found = asked(one_stage(), tiers, epochs=100).plan()
    assert found.kept == pytest.approx({(1, DISK): 1 / 3}, abs=1e-3)
    assert found.fresh_later == pytest.approx({1: 2 / 3}, abs=1e-3)
    assert found.later_s == pytest.approx(20 / 3, rel=0.01)


def test_slow_writes_are_left_out_of_a_short_horizon() -> None:
    """Writing all rows takes 100 s, and a later epoch is 9 s shorter."""
    tiers = {DISK: KeepRoom(budget_bytes=1e9, write_s_per_byte=1e-5)}
    short = asked(one_stage(), tiers, epochs=3).plan()
    assert short.written == pytest.approx({(1, DISK): 0.1}, abs=1e-3), "as many as fit beside the link"
    long = asked(one_stage(), tiers, epochs=100).plan()
    assert long.written == pytest.approx({(1, DISK): 0.9}, abs=1e-3), "a tenth takes the link 1 s"
    assert long.pays_from == 10


def test_store_is_written_by_servers_alone_and_read_over_the_link() -> None:
    """The storage tier takes 100 s to compute all rows; then the link takes 10 s an epoch."""
    slow = one_stage(storage_s=1e-2, compute_s=1.0)
    found = asked(slow, {STORE: KeepRoom(budget_bytes=1e9, read_s_per_byte=1e-9)}, epochs=10).plan()
    assert found.first == (KeepRoute(share=1.0, cut=1, written=(1, STORE)),)
    assert (found.first_s, found.later_s) == pytest.approx((100, 10), rel=0.01)
    alone = asked(slow, {STORE: PLENTY}, epochs=10).plan(cuts=[0])
    assert alone.written == {}, "samples that are computed here are not in the store"


def test_rows_in_the_store_are_read_once_and_kept_nearer() -> None:
    found = asked(one_stage(), {MEMORY: PLENTY, STORE: PLENTY}, there={(1, STORE): 1.0}, bandwidth=1e5).plan()
    assert found.first == (KeepRoute(share=1.0, read=(1, STORE), written=(1, MEMORY)),)
    assert found.later == (KeepRoute(share=1.0, read=(1, MEMORY)),)


def test_rows_that_are_there_are_read_in_a_single_epoch() -> None:
    found = asked(one_stage(), {DISK: PLENTY}, there={(1, DISK): 0.5}, epochs=1).plan()
    assert found.first == (KeepRoute(share=0.5, cut=1), KeepRoute(share=0.5, read=(1, DISK)))
    assert found.later == () and found.pays_from == 1 and found.first_s == pytest.approx(5, rel=0.01)


def test_rows_beyond_a_smaller_budget_are_not_counted_on() -> None:
    rows = asked(one_stage(), {DISK: KeepRoom(budget_bytes=3e6)}, there={(1, DISK): 1.0}).plan()
    assert rows.kept == pytest.approx({(1, DISK): 0.3})


def two_stages(**later: float) -> Profile:
    """Return decoded pixels of 2 kB, then features of 1 kB that cost 1 ms a sample on either tier."""
    return Profile(
        model="pixels and features",
        freeze=1,
        input=InputProfile(stored_bytes=10_000, tensor_bytes=2000),
        stages=(stage("features", 1000, storage=1e-3, compute=later.get("compute", 1e-3)),),
        input_stages=(stage("decode", 2000, storage=3e-3, compute=3e-3),),
        tail=TailProfile(seconds=(0.0, 1e-4)),
    )


@pytest.mark.parametrize(("epochs", "place", "views"), [(4, (0, MEMORY), 1), (40, (1, MEMORY), 4)])
def test_views_are_kept_where_the_horizon_pays_for_them(
    epochs: int, place: tuple[int, KeepTier], views: int
) -> None:
    """Pixels have one view and help from the second epoch on, features four, and help from the fifth on."""
    question = asked(two_stages(), {MEMORY: PLENTY}, epochs=epochs, positions={0: 1, 1: 4}, bandwidth=1e5)
    found = question.plan()
    assert ([*found.kept], found.views) == ([place], views)
    assert found.total_s == pytest.approx(views * found.first_s + (epochs - views) * found.later_s)


def test_rows_of_several_views_take_as_many_times_the_bytes() -> None:
    tiers = {MEMORY: KeepRoom(budget_bytes=2e7)}
    found = asked(one_stage(), tiers, positions={1: 4}, epochs=100).plan()
    assert found.kept == pytest.approx({(1, MEMORY): 0.5})
    assert "each of the first 4 epochs" in found.why and "Rows in memory take 20 MB." in found.why


def test_position_whose_rows_fit_is_kept_where_later_ones_do_not() -> None:
    """Rows after stage 1 take a tenth of those after stage 2, and little is left to compute."""
    profile = replace(
        one_stage(),
        freeze=2,
        stages=(
            stage("narrow", 1000, storage=5e-3, compute=5e-3),
            stage("wide", 10_000, storage=1e-4, compute=1e-4),
        ),
    )
    question = asked(profile, {MEMORY: KeepRoom(budget_bytes=1e7)}, positions={1: 1, 2: 1}, bandwidth=1e5)
    assert question.plan().kept == {(1, MEMORY): 1.0}


def by_hand() -> Question:
    """Return ViT-tiny to its last block at 20 Mbit/s, as measured with version 0.1.0.

    300 images of 222 kB; features of 151 kB. An epoch took 30.5 s the plain way, 20.3 s with upriver and 2.0
    s with features in memory.
    """
    profile = Profile(
        model="vit",
        freeze=1,
        input=InputProfile(stored_bytes=222_000, tensor_bytes=602_112),
        stages=(stage("blocks", 151_000, storage=0.045, compute=0.045),),
        input_stages=(stage("decode", 602_112, storage=0.012, compute=0.012),),
        tail=TailProfile(seconds=(0.0, 2.0 / 300)),
    )
    return Question(
        profile=profile,
        cluster=cluster(bandwidth=2.5e6),
        workload=Workload(batch_size=32, num_samples=300),
        keeping=KeepingTiers(tiers={MEMORY: KeepRoom(budget_bytes=1e9)}, positions={1: 1}),
        epochs=5,
    )


def test_measured_setting_is_predicted_as_much_faster_as_it_was() -> None:
    """By hand, features of the plain way were 2.6 to 3.4 times as fast over five epochs as upriver."""
    question = by_hand()
    found = question.plan()
    plain = plan(question.model, question.keeping, routes=single(question.profile, -1), epochs=5, cuts=[-1])
    assert plain.without_s == pytest.approx(30.5, rel=0.1) and plain.later_s == pytest.approx(2.0, rel=0.1)
    assert found.without_s == pytest.approx(20.3, rel=0.1)
    assert 2.3 <= found.total_without_s / plain.total_s <= 3.4
    assert found.total_s <= plain.total_s and found.pays_from == 2
    assert found.kept == {(1, MEMORY): 1.0}


# ------------------------------------------------------------------------------ nothing is kept


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (asked(one_stage(), {MEMORY: PLENTY}, epochs=1), "in 1 epoch no row would be read again"),
        (
            asked(one_stage(), {MEMORY: PLENTY}, epochs=4, positions={1: 4}),
            "in 4 epochs no row would be read again",
        ),
        (asked(one_stage(), {}), "there is no tier"),
        (asked(one_stage(), {MEMORY: KeepRoom(budget_bytes=5000)}), "no tier has room"),
        (
            asked(one_stage(), {DISK: KeepRoom(budget_bytes=1e9, read_s_per_byte=1e-3)}),
            "would shorten 5 epochs by less than 1%",
        ),
        (asked(one_stage(tail_s=2e-3), {MEMORY: PLENTY}), "would shorten 5 epochs by less than 1%"),
    ],
)
def test_nothing_is_kept_where_it_gains_nothing(question: Question, why: str) -> None:
    found = question.plan()
    assert found.kept == {} and found.written == {} and found.pays_from is None
    assert why in found.why and str(found) == found.why
    assert found.total_s == found.total_without_s
    assert found.fresh_first == {route.cut: route.share for route in question.routes}


def test_chain_of_a_thousand_stages_keeps_the_last_position() -> None:
    sizes = np.random.default_rng(7).uniform(1e3, 1e5, 1000)
    profile = Profile(
        model="long",
        freeze=1000,
        input=InputProfile(stored_bytes=1e5, tensor_bytes=1e5),
        stages=tuple(
            stage(f"s{at}", float(size), storage=2e-5, compute=1e-5) for at, size in enumerate(sizes)
        ),
        tail=TailProfile(seconds=(0.0, 1e-4)),
    )
    question = Question(
        profile=profile,
        cluster=cluster(bandwidth=1e7, micro_batch=16),
        workload=Workload(batch_size=64, num_samples=50_000),
        keeping=KeepingTiers(
            tiers={MEMORY: KeepRoom(budget_bytes=1e10), DISK: PLENTY, STORE: PLENTY},
            positions=dict.fromkeys(range(1, 1001), 1),
        ),
        epochs=10,
    )
    found = question.plan()
    assert found.total_s < 0.3 * found.total_without_s
    assert sum(found.kept.values()) == pytest.approx(1)


# -------------------------------------------------------------------------------- fresh shares


kept_shares = st.sampled_from([0.0, 0.2, 0.5])


@settings(max_examples=examples(60))
@given(
    profile=profiles(), machines=clusters(), disk=kept_shares, store=kept_shares, read_s=st.floats(0, 1e-6)
)
def test_fresh_shares_are_near_the_best_of_a_grid(
    profile: Profile, machines: Cluster, disk: float, store: float, read_s: float
) -> None:
    model = CostModel(profile, machines, Workload(batch_size=16, num_samples=1000))
    assume(model.feasible.any())
    room = KeepRoom(budget_bytes=math.inf, read_s_per_byte=read_s)
    keeping = KeepingTiers(tiers={DISK: room, STORE: room}, positions={profile.freeze: 1})
    kept = {(profile.freeze, DISK): disk, (profile.freeze, STORE): store}
    shares = fresh_shares(model, keeping, kept)
    assert all(model.fits(cut) and share > 0 for cut, share in shares.items())
    assert sum(shares.values()) == pytest.approx(1 - disk - store)
    for steps in range(5):
        fitting = [cut for cut in model.cuts if model.fits(cut)]
        other = {fitting[0]: (1 - disk - store) * steps / 4}
        other[fitting[-1]] = other.get(fitting[-1], 0.0) + (1 - disk - store) * (4 - steps) / 4
        theirs = epoch_s(model, keeping, kept, other)
        assert epoch_s(model, keeping, kept, shares) <= NEAR * theirs + 1e-12


def epoch_s(
    model: CostModel,
    keeping: KeepingTiers,
    kept: Mapping[tuple[int, KeepTier], float],
    fresh: Mapping[int, float],
) -> float:
    from upriver.policies._kept.costs import source_costs

    costs = source_costs(model, keeping)
    shares = np.zeros(costs.busy.shape[1])
    for place, share in kept.items():
        shares[len(costs.cuts) + costs.places.index(place)] = share
    for cut, share in fresh.items():
        shares[model.index(cut)] = share
    return float((costs.busy @ shares).max() + costs.around_s[shares > 0].max(initial=0.0))


def test_fresh_shares_of_an_epoch_without_kept_rows_are_a_mix() -> None:
    """Cut 1 leaves the compute tier idle and cut 0 the storage tier."""
    profile = one_stage(storage_s=0.01, compute_s=0.01)
    question = asked(profile, {MEMORY: PLENTY}, bandwidth=1e9)
    assert fresh_shares(question.model, question.keeping, {}) == pytest.approx({0: 0.5, 1: 0.5}, abs=0.01)
    assert fresh_shares(question.model, question.keeping, {(1, MEMORY): 1.0}) == {}
    assert fresh_shares(question.model, question.keeping, {(1, MEMORY): 0.25}, cuts=[1]) == {1: 0.75}


# -------------------------------------------------------------------------------------- border


def test_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="budget_bytes must be a finite number >= 0, got -1"):
        KeepRoom(budget_bytes=-1)
    with pytest.raises(ConfigError, match="read_s_per_byte must be a finite number"):
        KeepRoom(budget_bytes=1, read_s_per_byte=math.nan)
    with pytest.raises(ConfigError, match="tiers must be among memory, disk, store, got 'tape'"):
        KeepingTiers(tiers={"tape": PLENTY}, positions={})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"positions\[1\] must be a finite number >= 1, got 0"):
        KeepingTiers(tiers={}, positions={1: 0})
    with pytest.raises(ConfigError, match=r"row_bytes\[1\]"):
        KeepingTiers(tiers={}, positions={1: 1}, row_bytes={1: -1.0})
    with pytest.raises(ConfigError, match=r"there must name positions among .* got 2 in disk"):
        KeepingTiers(tiers={DISK: PLENTY}, positions={1: 1}, there={(2, DISK): 0.5})
    with pytest.raises(ConfigError, match="shares of there must sum to at most 1"):
        KeepingTiers(
            tiers={DISK: PLENTY, MEMORY: PLENTY}, positions={1: 1}, there={(1, DISK): 0.6, (1, MEMORY): 0.6}
        )


def test_question_outside_the_chain_is_refused() -> None:
    with pytest.raises(ConfigError, match="epochs must be a finite number >= 1, got 0"):
        asked(one_stage(), {MEMORY: PLENTY}, epochs=0).plan()
    with pytest.raises(ConfigError, match="got 7"):
        asked(one_stage(), {MEMORY: PLENTY}, positions={7: 1}).plan()


def test_question_in_which_no_cut_fits_keeps_nothing() -> None:
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1e6), storage=StorageTier(memory_bytes=0))
    profile = replace(
        one_stage(), stages=(stage("all", 1000, param_bytes=1e6),), tail=TailProfile(param_bytes=1e6)
    )
    model = CostModel(profile, machines, Workload(batch_size=1, num_samples=10))
    keeping = KeepingTiers(tiers={MEMORY: PLENTY}, positions={1: 1})
    found = plan(model, keeping, routes=single(profile, 0), epochs=5, cuts=[1])
    assert "no cut fits the memory" in found.why
    with pytest.raises(ConfigError, match=r"no cut among \[1\] fits both memories"):
        fresh_shares(model, keeping, {}, cuts=[1])
