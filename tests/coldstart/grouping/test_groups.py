"""Check groupings against every way to group a few layers, and the timeline against its recurrence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from upriver.coldstart.grouping import optimizer
from upriver.coldstart.grouping.groups import GROUPINGS, best, check_policy, greedy
from upriver.coldstart.grouping.timeline import Timeline
from upriver.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of `best` and `makespan`."""

    sizes_bytes: list[int]
    load_s: list[float]
    execute_s: list[float]
    latency_s: float = 1.0
    bandwidth_bytes_per_s: float = 1.0
    memory_cap_bytes: float = math.inf
    one_core: bool = False


def makespan(groups: Sequence[range], **case: Any) -> float:
    return Timeline(**case).makespan(groups)


def layer_by_layer(sizes_bytes: Sequence[int]) -> list[range]:
    return [range(layer, layer + 1) for layer in range(len(sizes_bytes))]


def partitions(num_layers: int) -> Iterator[list[range]]:
    """Yield every way to cut that many layers into consecutive groups."""
    for count in range(num_layers):
        for cuts in combinations(range(1, num_layers), count):
            yield [range(start, stop) for start, stop in pairwise((0, *cuts, num_layers))]


def simulated(groups: Sequence[range], case: Case) -> float:
    """Simulate the recurrence of the module's docstring, counting every byte in flight."""
    sizes, latency = case.sizes_bytes, case.latency_s
    due = end = executed = 0.0
    asked, loaded = 0, [0.0]
    for group in groups:
        size = sum(sizes[layer] for layer in group)
        if size > case.memory_cap_bytes:
            return math.inf
        in_flight = [
            asked - sum(size for size, at in zip(sizes, loaded[1:], strict=False) if at <= moment)
            for moment in loaded
        ]
        room = min(
            moment
            for moment, there in zip(loaded, in_flight, strict=True)
            if there + size <= case.memory_cap_bytes
        )
        begin = max(end, max(due, room) + latency)
        end = begin + size / case.bandwidth_bytes_per_s
        due = max(begin, end - latency)
        asked += size
        for layer in group:
            idle = executed if case.one_core else loaded[-1]
            loaded.append(max(idle, end) + case.load_s[layer])
            executed = max(executed, loaded[-1]) + case.execute_s[layer]
    return executed


def brute_force(case: Case) -> float:
    return min(simulated(groups, case) for groups in partitions(len(case.sizes_bytes)))


halves = st.integers(0, 12).map(lambda n: n / 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a few layers; small whole numbers, so that ties and empty layers are common."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    of_layers = st.lists(halves, min_size=len(sizes), max_size=len(sizes))
    caps = st.integers(max(1, *sizes), max(1, sum(sizes)))
    return Case(
        sizes_bytes=sizes,
        load_s=draw(of_layers),
        execute_s=draw(of_layers),
        latency_s=draw(halves),
        bandwidth_bytes_per_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
        memory_cap_bytes=draw(st.one_of(st.just(math.inf), caps)),
        one_core=draw(st.booleans()),
    )


# ------------------------------------------------------------------------------------- the timeline


@given(cases())
def test_a_makespan_is_what_the_recurrence_gives(case: Case) -> None:
    for groups in partitions(len(case.sizes_bytes)):
        assert makespan(groups, **asdict(case)) == pytest.approx(simulated(groups, case))


def test_a_makespan_by_hand() -> None:
    of_layers = {"sizes_bytes": [4, 2, 6], "load_s": [1, 1, 2], "execute_s": [3, 5, 2]}
    case = Case(**of_layers, latency_s=3, bandwidth_bytes_per_s=2)
    # The first group comes from 3 to 5; the second, requested at 3, from 6 to 7; the third from 9 to 12. The
    # groups are loaded at 6, 8 and 14, executed at 9, 14 and 16.
    assert makespan(layer_by_layer(case.sizes_bytes), **asdict(case)) == 16
    # From 3 to 9; loaded at 10, 11, 13; executed at 13, 18, 20.
    assert makespan([range(3)], **asdict(case)) == 20
    # With one core: loaded at 10, executed at 13, loaded at 14, executed at 19, loaded at 21, executed at 23.
    assert makespan([range(3)], **asdict(replace(case, one_core=True))) == 23


def test_a_request_waits_until_its_group_fits() -> None:
    case = Case(sizes_bytes=[4, 4, 4], load_s=[10, 1, 1], execute_s=[0, 0, 0], memory_cap_bytes=8)
    # The third layer fits when the first is loaded, at 15: it comes from 16 to 20.
    assert makespan(layer_by_layer(case.sizes_bytes), **asdict(case)) == 21
    uncapped = replace(case, memory_cap_bytes=math.inf)
    assert makespan(layer_by_layer(case.sizes_bytes), **asdict(uncapped)) == 17
    assert makespan([range(3)], **asdict(case)) == math.inf


# ------------------------------------------------------------------------------------ the greedy policy


@given(
    st.lists(st.integers(0, 9), max_size=9),
    halves,
    st.sampled_from([0.5, 1.0, 3.0]),
)
@example([], 1.0, 1.0)
@example([5, 1], 2.0, 1.0)
def test_greedy_gives_the_most_groups_of_which_each_but_the_last_is_large_enough(
    sizes: list[int], latency: float, bandwidth: float
) -> None:
    def large_enough(group: range) -> bool:
        return sum(sizes[layer] for layer in group) >= latency * bandwidth

    groups = greedy(sizes, latency_s=latency, bandwidth_bytes_per_s=bandwidth)
    assert [layer for group in groups for layer in group] == list(range(len(sizes)))
    assert all(group and large_enough(group) for group in groups[:-1])
    allowed = [len(p) for p in partitions(len(sizes)) if all(large_enough(group) for group in p[:-1])]
    assert len(groups) == max(allowed, default=0)


def test_greedy_by_hand() -> None:
    sizes = [1, 1, 3, 9, 2, 2, 1]
    groups = greedy(sizes, latency_s=2, bandwidth_bytes_per_s=2)
    assert groups == [range(3), range(3, 4), range(4, 6), range(6, 7)]
    assert greedy(sizes, latency_s=0, bandwidth_bytes_per_s=2) == layer_by_layer(sizes)
    assert greedy(sizes, latency_s=50, bandwidth_bytes_per_s=2) == [range(7)]


# --------------------------------------------------------------------------------------- our policy


@given(cases())
def test_ours_is_the_fastest_of_all_groupings(case: Case) -> None:
    groups = best(**asdict(case))
    assert makespan(groups, **asdict(case)) == pytest.approx(brute_force(case))


def free_s(groups: Sequence[range], case: Case) -> float:
    """Return when the link is free after all groups, where none waits for memory."""
    free = case.latency_s
    for group in groups:
        end = free + sum(case.sizes_bytes[layer] for layer in group) / case.bandwidth_bytes_per_s
        free = max(end, free + case.latency_s)
    return free


@given(cases())
def test_of_the_fastest_ours_leaves_the_link_idle_the_least(case: Case) -> None:
    case = replace(case, memory_cap_bytes=math.inf)
    groups, least = best(**asdict(case)), brute_force(case)
    link = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bandwidth_bytes_per_s}
    if groups == greedy(case.sizes_bytes, **link):
        return  # which never leaves the link idle
    same = [p for p in partitions(len(case.sizes_bytes)) if simulated(p, case) <= least * (1 + 1e-9)]
    assert free_s(groups, case) == pytest.approx(min(free_s(each, case) for each in same))


def test_layers_that_take_long_do_not_make_the_link_idle() -> None:
    case = Case(sizes_bytes=[1] + [2] * 8, load_s=[0] * 9, execute_s=[100] * 9, latency_s=5)
    # All bytes after the first layer have arrived before that layer has run, layer by layer, too.
    each, groups = layer_by_layer(case.sizes_bytes), best(**asdict(case))
    assert makespan(groups, **asdict(case)) == makespan(each, **asdict(case)) == brute_force(case)
    assert free_s(groups, case) == free_s([range(1), range(1, 9)], case) < free_s(each, case)


@given(cases(), st.sampled_from([0.01, 0.1, 0.3]))
def test_a_search_that_may_stop_early_keeps_its_bound(case: Case, tolerance: float) -> None:
    with mock.patch.multiple(optimizer, EXACT_LAYERS=0, TOLERANCE=tolerance):
        groups = best(**asdict(case))
    assert makespan(groups, **asdict(case)) <= brute_force(case) * (1 + tolerance) * (1 + 1e-9)


@given(cases())
def test_a_search_of_a_few_labels_is_never_worse_than_what_is_known(case: Case) -> None:
    with mock.patch.multiple(optimizer, EXACT_LAYERS=0, SPARE_LABELS=0, PROMISING=1):
        groups = best(**asdict(case))
    link = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bandwidth_bytes_per_s}
    for known in (greedy(case.sizes_bytes, **link), layer_by_layer(case.sizes_bytes)):
        assert makespan(groups, **asdict(case)) <= makespan(known, **asdict(case))


def many_layers(seed: int, num_layers: int) -> Case:
    """Return a transformer-like model: large matrices, tiny vectors between them, an embedding in front."""
    rng = np.random.default_rng(seed)
    sizes = np.where(rng.random(num_layers) < 0.6, 4096, 4_000_000 * rng.integers(1, 5, num_layers))
    sizes[0] = 150_000_000
    return Case(
        sizes_bytes=sizes.tolist(),
        load_s=(sizes / rng.choice([2e8, 2e9, 8e9])).tolist(),
        execute_s=(sizes / rng.choice([1e8, 1e9, 1e10])).tolist(),
        latency_s=rng.choice([0.0005, 0.005, 0.05]),
        bandwidth_bytes_per_s=rng.choice([12.5e6, 125e6, 1.25e9]),
        memory_cap_bytes=rng.choice([160e6, 400e6, math.inf]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_ours_is_never_slower_than_the_others_on_large_models(seed: int) -> None:
    case = many_layers(seed, num_layers=300)
    timeline = Timeline(**asdict(case))
    groups = GROUPINGS["upriver"](timeline)
    link = {"latency_s": case.latency_s, "bandwidth_bytes_per_s": case.bandwidth_bytes_per_s}
    others = [greedy(case.sizes_bytes, **link), layer_by_layer(case.sizes_bytes), [range(300)]]
    assert timeline.makespan(groups) <= min(map(timeline.makespan, others))


def test_a_layer_that_never_fits_is_named() -> None:
    case = Case(sizes_bytes=[2, 2_000_000], load_s=[1, 1], execute_s=[1, 1], memory_cap_bytes=1_500_000)
    with pytest.raises(ConfigError, match=r"layer 1 has 2 MB, more than memory_cap_bytes .*1\.5 MB"):
        best(**asdict(case))


# ------------------------------------------------------------------------------------- every policy


@pytest.mark.parametrize("policy", GROUPINGS)
@given(case=cases())
def test_every_policy_covers_each_layer_once_in_order_and_keeps_the_cap(policy: str, case: Case) -> None:
    groups = GROUPINGS[policy](Timeline(**asdict(case)))
    assert [layer for group in groups for layer in group] == list(range(len(case.sizes_bytes)))
    if policy != "pisel":  # which knows no cap
        sizes = [sum(case.sizes_bytes[layer] for layer in group) for group in groups]
        assert all(size <= case.memory_cap_bytes for size in sizes)


@pytest.mark.parametrize("policy", GROUPINGS)
def test_a_model_without_layers_has_no_groups(policy: str) -> None:
    case = Case(sizes_bytes=[], load_s=[], execute_s=[])
    assert GROUPINGS[policy](Timeline(**asdict(case))) == []
    assert makespan([], **asdict(case)) == 0


def test_a_policy_that_is_none_is_told_the_others() -> None:
    with pytest.raises(ConfigError, match="one of layer_by_layer, pisel, upriver, got 'fastest'"):
        check_policy("fastest")


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["sizes_bytes", "load_s", "execute_s"])
def test_a_number_that_is_none_is_named(name: str, bad: float) -> None:
    case = asdict(Case(sizes_bytes=[1, 1], load_s=[1, 1], execute_s=[1, 1])) | {name: [1, bad]}
    with pytest.raises(ConfigError, match=rf"{name}\[1\] must be a finite number >= 0"):
        best(**case)


@pytest.mark.parametrize("bad", [[True], ["1"], [[1]], [[1], [1, 2]], [None], 3])
def test_what_is_no_list_of_numbers_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="sizes_bytes must be a list of numbers"):
        greedy(bad, latency_s=1, bandwidth_bytes_per_s=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("latency_s", bad) for bad in (-1, math.nan, math.inf)),
        *(("bandwidth_bytes_per_s", bad) for bad in (0, -1, math.nan, math.inf)),
        *(("memory_cap_bytes", bad) for bad in (0, -1, math.nan)),
    ],
)
def test_a_link_or_a_memory_that_is_none_is_named(name: str, bad: float) -> None:
    case = asdict(Case(sizes_bytes=[1], load_s=[1], execute_s=[1])) | {name: bad}
    with pytest.raises(ConfigError, match=f"{name} must be a finite number"):
        best(**case)


def test_layers_of_different_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 2, 1 and 2"):
        best([1, 1], [1], [1, 1], latency_s=1, bandwidth_bytes_per_s=1)
