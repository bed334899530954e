"""Test admission and batch choice against brute force and against a solver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from tests.examples import examples, seeds, some
from upriver.control.batch_adaptation import (
    MOST_SAMPLES,
    POLICIES,
    STATIC_BATCH,
    WITHIN,
    Ask,
    Grant,
    Policy,
    adaptive,
    static,
)
from upriver.errors import ConfigError

PROGRAMS = {"a": 70, "b": 30}
NONE: frozenset[str] = frozenset()

both = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))


def ask(key: object, per_sample: int, least: int, most: int, *sizes: int, **more: Any) -> Ask:
    numbers = {"fixed_bytes": 0, "bytes_per_sample": per_sample, "least": least, "most": most}
    return Ask(key=key, sizes=sizes, **{**numbers, **more})


def batches_of(one: Ask) -> Sequence[int]:
    return one.sizes or range(one.least, one.most + 1)


def nbytes(asks: Sequence[Ask], batches: Sequence[int], loaded: frozenset[str]) -> int:
    brought = {one.program: one.program_bytes for one in asks if one.program not in (None, *loaded)}
    each = (one.fixed_bytes + batch * one.bytes_per_sample for one, batch in zip(asks, batches, strict=True))
    return sum(each) + sum(brought.values())


def data_bytes(asks: Sequence[Ask], batches: Sequence[int]) -> int:
    return sum(batch * one.bytes_per_sample for one, batch in zip(asks, batches, strict=True))


def num_fitting(asks: Sequence[Ask], batches: Sequence[int], free: int, loaded: frozenset[str]) -> int:
    """Count the requests that fit: the newest is dropped until the rest fits."""
    count = len(asks)
    while count and nbytes(asks[:count], batches[:count], loaded) > free:
        count -= 1
    return count


def most_bytes(asks: Sequence[Ask], free: int, loaded: frozenset[str]) -> int:
    """Return the most bytes of samples over all batches that could be chosen for these requests."""
    possible = (chosen for chosen in product(*map(batches_of, asks)) if nbytes(asks, chosen, loaded) <= free)
    return max(data_bytes(asks, chosen) for chosen in possible)


def check(asks: Sequence[Ask], grants: Sequence[Grant], free: int, loaded: frozenset[str]) -> None:
    """Assert what every policy promises."""
    taken, batches = asks[: len(grants)], [grant.batch for grant in grants]
    assert [grant.key for grant in grants] == [one.key for one in taken]
    assert all(batch in batches_of(one) for one, batch in zip(taken, batches, strict=True))
    before = 0
    for count, grant in enumerate(grants, start=1):
        total = nbytes(taken[:count], batches[:count], loaded)
        assert grant.nbytes == total - before
        before = total
    assert before <= max(0, free)


@st.composite
def asked(draw: st.DrawFn, *, at_most: int, per_sample: int, span: int) -> list[Ask]:
    asks = []
    for key in range(draw(st.integers(0, at_most))):
        least = draw(st.integers(1, 5))
        most = least + draw(st.integers(0, span))
        sizes = draw(st.sets(st.integers(least, most), max_size=4))
        program = draw(st.sampled_from([None, *PROGRAMS]))
        asks.append(
            ask(
                key,
                draw(st.integers(1, per_sample)),
                least,
                most,
                *sorted(sizes),
                fixed_bytes=draw(st.integers(0, per_sample)),
                program=program,
                program_bytes=PROGRAMS.get(program, 0),
            )
        )
    return asks


loaded_programs = st.frozensets(st.sampled_from(list(PROGRAMS)))


@settings(max_examples=examples(400))
@given(asks=asked(at_most=4, per_sample=60, span=5), free=st.integers(-1, 1500), loaded=loaded_programs)
def test_adaptive_is_within_a_hundredth_of_the_best_choice(
    asks: list[Ask], free: int, loaded: frozenset[str]
) -> None:
    grants = adaptive(asks, free, loaded=loaded)
    check(asks, grants, free, loaded)
    smallest = [batches_of(one)[0] for one in asks]
    assert len(grants) == num_fitting(asks, smallest, free, loaded)
    if grants:
        taken = asks[: len(grants)]
        best = most_bytes(taken, free, loaded)
        assert data_bytes(taken, [grant.batch for grant in grants]) >= (1 - WITHIN) * best


@settings(max_examples=examples(300))
@given(data=st.data())
def test_few_large_requests_in_little_room(data: st.DataObject) -> None:
    """Allow one sample at least: little is guaranteed, and only a handful of steps fit."""
    steps = data.draw(st.lists(st.integers(1_000, 10_000), min_size=2, max_size=6))
    asks = []
    for key, step in enumerate(steps):
        sizes = data.draw(st.sampled_from([(), (1, 101), (1, 51, 101), (1, 101, 201)]))
        asks.append(ask(key, step, 1, sizes[-1] if sizes else 2, *sizes))
    room = data.draw(st.integers(0, 300 * max(steps)))
    free = nbytes(asks, [1] * len(asks), NONE) + room
    grants = adaptive(asks, free)
    check(asks, grants, free, NONE)
    assert len(grants) == len(asks)
    got = data_bytes(asks, [grant.batch for grant in grants])
    assert got >= (1 - WITHIN) * most_bytes(asks, free, NONE)


@given(
    asks=asked(at_most=25, per_sample=1 << 33, span=3000),
    free=st.integers(0, 1 << 44),
    loaded=loaded_programs,
)
def test_no_policy_grants_more_than_is_free(asks: list[Ask], free: int, loaded: frozenset[str]) -> None:
    for policy in POLICIES.values():
        check(asks, policy(asks, free, loaded=loaded), free, loaded)


def test_two_middle_ones_before_the_largest() -> None:
    asks = [ask("large", 60, 1, 2), ask("one", 50, 1, 2), ask("other", 50, 1, 2)]
    grants = adaptive(asks, 160 + 100)
    assert [grant.batch for grant in grants] == [1, 2, 2]


def solved(asks: Sequence[Ask], room: int) -> float:
    """Return the most bytes beyond the smallest batches, as a solver finds them."""
    gains: list[float] = []
    bounds: list[float] = []
    rows: list[dict[int, float]] = [{}]
    for one in asks:
        if not one.sizes:
            gains.append(one.bytes_per_sample)
            bounds.append(one.most - one.least)
            continue
        rows.append({})
        for size in one.sizes[1:]:
            rows[-1][len(gains)] = 1
            gains.append((size - one.sizes[0]) * one.bytes_per_sample)
            bounds.append(1)
    rows[0] = dict(enumerate(gains))
    matrix = np.zeros((len(rows), len(gains)))
    for number, row in enumerate(rows):
        matrix[number, list(row)] = list(row.values())
    most = [float(room)] + [1.0] * (len(rows) - 1)
    found = milp(
        -np.array(gains),
        integrality=np.ones(len(gains)),
        bounds=Bounds(0, bounds),
        constraints=LinearConstraint(matrix, -np.inf, most),
        options={"mip_rel_gap": 1e-4, "time_limit": 5},
    )
    return -float(found.fun)


@pytest.mark.parametrize("seed", seeds(12))
def test_adaptive_is_within_a_hundredth_of_a_solver(seed: int) -> None:
    draw = random.Random(seed)
    asks = []
    for key in range(30):
        sizes = draw.choice([(), (1, 2, 4, 8), (16, 32, 64, 128), (2, 3, 20)])
        least, most = (sizes[0], sizes[-1]) if sizes else (1, draw.randint(2, 6))
        asks.append(ask(key, draw.randint(1_000, 20_000), least, most, *sizes))
    smallest = [batches_of(one)[0] for one in asks]
    sure = data_bytes(asks, smallest)
    room = draw.randint(50_000, 3_000_000)
    grants = adaptive(asks, sure + room)
    check(asks, grants, sure + room, NONE)
    got = data_bytes(asks, [grant.batch for grant in grants])
    assert got >= (1 - WITHIN) * (sure + solved(asks, room)) - 1e-3


def test_a_thousand_requests_fill_the_memory() -> None:
    draw = random.Random(7)
    asks = [ask(key, draw.randint(10**5, 10**7), 25, 1000) for key in range(1000)]
    sure = data_bytes(asks, [25] * 1000)
    grants = adaptive(asks, 3 * sure)
    check(asks, grants, 3 * sure, NONE)
    assert len(grants) == 1000
    assert sum(grant.nbytes for grant in grants) >= (1 - WITHIN) * 3 * sure


@pytest.mark.parametrize("room", some(3, [15_999, 16_000, 100_000, 0, 47_999, 1_000_000, 10**9]))
def test_a_thousand_requests_all_alike_are_filled_exactly(room: int) -> None:
    asks = [ask(key, 1000, 16, 64, 16, 32, 64) for key in range(1000)]
    sure = 1000 * 16_000
    grants = adaptive(asks, sure + room)
    check(asks, grants, sure + room, NONE)
    step = 16_000
    assert sum(grant.nbytes for grant in grants) == sure + min(room // step * step, 1000 * 48_000)


def test_hundreds_that_are_nearly_alike_and_of_which_two_fit() -> None:
    asks = [ask(key, 10**6 + 7 * key, 1, 1000, 1, 1000) for key in range(300)]
    sure = data_bytes(asks, [1] * 300)
    step = 999 * asks[-1].bytes_per_sample
    grants = adaptive(asks, sure + 2 * step + step // 2)
    got = data_bytes(asks, [grant.batch for grant in grants])
    best = sure + step + 999 * asks[-2].bytes_per_sample
    assert (1 - WITHIN) * best <= got <= best
    assert sorted(grant.batch for grant in grants)[-3:] == [1, 1000, 1000]


def test_many_nearly_alike_beside_a_large_one_that_is_in_their_way() -> None:
    """The largest first would leave two fifths of the memory unused; any two of the others fill it."""
    asks = [ask(0, 600_000, 1, 2), *(ask(key, 495_000 + key, 1, 2) for key in range(1, 21))]
    sure = data_bytes(asks, [1] * len(asks))
    grants = adaptive(asks, sure + 1_000_000)
    got = data_bytes(asks, [grant.batch for grant in grants])
    assert got >= (1 - WITHIN) * (sure + 495_020 + 495_019)
    assert grants[0].batch == 1


# ------------------------------------------------------------------------------------------- admission


@both
def test_nobody_asks_or_nobody_fits(policy: Policy) -> None:
    one = ask("one", 100, 4, 20)
    assert policy([], 1000) == []
    for free in (-5, 0, 399):
        assert policy([one], free) == []


@both
def test_one_request(policy: Policy) -> None:
    assert policy([ask("one", 100, 4, 8, fixed_bytes=50)], 10_000) == [Grant("one", 8, 850)]


@both
def test_the_first_that_does_not_fit_blocks_those_behind_it(policy: Policy) -> None:
    asks = [ask("first", 1, 16, 16), ask("large", 1, 500, 500), ask("small", 1, 16, 16)]
    assert [grant.key for grant in policy(asks, 300)] == ["first"]


@both
def test_a_program_that_several_name_counts_once(policy: Policy) -> None:
    asks = [ask(key, 1, 1, 1, fixed_bytes=10, program="p", program_bytes=100) for key in range(3)]
    assert [grant.nbytes for grant in policy(asks, 133)] == [111, 11, 11]
    assert [grant.nbytes for grant in policy(asks, 132)] == [111, 11]
    assert policy(asks, 110) == []


@both
def test_a_program_that_is_loaded_takes_nothing(policy: Policy) -> None:
    asks = [
        ask(0, 1, 1, 1, program="p", program_bytes=100),
        ask(1, 1, 1, 1, program="q", program_bytes=100),
    ]
    assert [grant.nbytes for grant in policy(asks, 102, loaded=frozenset({"p"}))] == [1, 101]
    assert [grant.nbytes for grant in policy(asks, 101, loaded=frozenset({"p"}))] == [1]
    assert [grant.nbytes for grant in policy(asks, 2, loaded=frozenset({"p", "q"}))] == [1, 1]


@both
def test_at_most_so_many(policy: Policy) -> None:
    asks = [ask(key, 1, 1, 4) for key in range(5)]
    assert [len(policy(asks, 100, most=most)) for most in (None, 9, 5, 2, 0, -1)] == [5, 5, 5, 2, 0, 0]


def test_what_is_not_granted_leaves_its_room_to_the_others() -> None:
    asks = [ask(key, 10, 2, 50) for key in range(3)]
    grants = adaptive(asks, 200, most=1)
    assert grants == [Grant(0, 20, 200)]


# ---------------------------------------------------------------------------------------- the batches


def test_the_bounds_of_the_paper() -> None:
    asks = [ask("small", 1000, 25, 100), ask("large", 4000, 25, 2000)]
    assert [grant.batch for grant in adaptive(asks, 10**9)] == [100, 2000]
    assert [grant.batch for grant in adaptive(asks, 125_000)] == [25, 25]
    assert [grant.batch for grant in adaptive(asks, 124_999)] == [100]


def test_static_gives_all_the_same_batch_within_their_bounds() -> None:
    asks = [
        ask(0, 1, 1, 99),
        ask(1, 1, 20, 99),
        ask(2, 1, 1, 8),
        ask(3, 1, 1, 99, 4, 12, 40),
        ask(4, 1, 32, 64, 32, 64),
    ]
    assert [grant.batch for grant in static(asks, 1000)] == [STATIC_BATCH, 20, 8, 12, 32]
    assert [grant.batch for grant in static(asks, 1000, batch=64)] == [64, 64, 8, 40, 64]


@given(asks=asked(at_most=8, per_sample=60, span=40), free=st.integers(0, 5000), batch=st.integers(1, 50))
def test_static_admits_the_first_that_fit(asks: list[Ask], free: int, batch: int) -> None:
    grants = static(asks, free, batch=batch)
    check(asks, grants, free, NONE)
    batches = [
        max([size for size in batches_of(one) if size <= batch], default=batches_of(one)[0]) for one in asks
    ]
    assert [grant.batch for grant in grants] == batches[: num_fitting(asks, batches, free, NONE)]


@pytest.mark.parametrize(
    ("free", "batch"),
    [(1599, None), (1600, 16), (3199, 16), (3200, 32), (6399, 32), (6400, 64), (10**9, 64)],
)
def test_only_sizes_on_offer_are_used(free: int, batch: int | None) -> None:
    grants = adaptive([ask("one", 100, 16, 64, 16, 32, 64)], free)
    assert [grant.batch for grant in grants] == ([] if batch is None else [batch])


def test_a_size_need_not_be_the_least() -> None:
    one = ask("one", 10, 4, 100, 8)
    assert adaptive([one], 79) == []
    assert adaptive([one], 1000) == [Grant("one", 8, 80)]


# ------------------------------------------------------------------------------------- several devices


@settings(max_examples=examples(200))
@given(asks=asked(at_most=8, per_sample=60, span=4), free=st.tuples(st.integers(0, 900), st.integers(0, 900)))
def test_two_memory_pools_are_filled_each_by_itself(asks: list[Ask], free: tuple[int, int]) -> None:
    hands = asks[::2], asks[1::2]
    assert sorted(one.key for hand in hands for one in hand) == list(range(len(asks)))
    for hand, left in zip(hands, free, strict=True):
        grants = adaptive(hand, left)
        check(hand, grants, left, NONE)
        if grants:
            taken = hand[: len(grants)]
            got = data_bytes(taken, [grant.batch for grant in grants])
            assert got >= (1 - WITHIN) * most_bytes(taken, left, NONE)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fixed_bytes": -1}, "fixed_bytes=-1"),
        ({"program_bytes": -7}, "program_bytes=-7"),
        ({"bytes_per_sample": 0}, "bytes_per_sample=0"),
        ({"least": 0}, "least=0"),
        ({"least": 9}, "least=9, most=8"),
        ({"most": MOST_SAMPLES + 1}, f"1 to {MOST_SAMPLES} samples"),
        ({"sizes": (4, 2)}, r"ascend within 2..8, got \(4, 2\)"),
        ({"sizes": (4, 4)}, r"got \(4, 4\)"),
        ({"sizes": (1, 4)}, r"got \(1, 4\)"),
        ({"sizes": (4, 9)}, r"got \(4, 9\)"),
    ],
)
def test_what_cannot_be_asked(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"key": 0, "fixed_bytes": 0, "bytes_per_sample": 1, "least": 2, "most": 8}
    Ask(**good)
    with pytest.raises(ConfigError, match=message):
        Ask(**{**good, **changes})
