"""Check the prefetch window: about two training batches, enough for every route, within the memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.planning import alexnet, cluster
from upriver.control.delivery_table import PrefetchWindow
from upriver.control.window_size import LEAST, spare_bytes, told, window_for
from upriver.cost import CostModel, route_at
from upriver.policies._common import plan_with
from upriver.types import ComputeTier, Plan, Workload

PROFILE = alexnet()
START = PROFILE.unsplit
PLENTY = 1 << 40


def plan_of(shares: dict[int, float], *, memory_bytes: float = math.inf) -> Plan:
    machines = replace(cluster(), compute=ComputeTier(memory_bytes=memory_bytes, micro_batch=16))
    model = CostModel(PROFILE, machines, Workload(batch_size=64, num_samples=640))
    routes = tuple(route_at(PROFILE, cut, share=share) for cut, share in shares.items())
    return plan_with("test", routes, model, rule="a test's")


def window(shares: dict[int, float], *, memory_bytes: float = math.inf, **given: Any) -> PrefetchWindow:
    options = {
        "batch_size": 64,
        "micro_batch": 16,
        "connections": 4,
        "num_workers": 2,
        "num_bytes": PLENTY,
        "crossing_bytes": lambda cut: 1000.0,
    }
    plan = plan_of(shares, memory_bytes=memory_bytes)
    return window_for(plan, start=START, **{**options, **given})


def test_two_training_batches() -> None:
    assert window({5: 1.0}, batch_size=512).micro_batches == 64
    assert window({5: 1.0}, batch_size=500).micro_batches == 63
    assert window({5: 1.0}, batch_size=1).micro_batches == LEAST


def test_every_thread_that_fetches_has_one_under_way_and_one_waiting() -> None:
    assert window({5: 1.0}, batch_size=16, connections=10, num_workers=50).micro_batches == 20
    assert window({START: 1.0}, batch_size=16, connections=50, num_workers=10).micro_batches == 20
    mixed = window({START: 0.5, 5: 0.5}, batch_size=16, connections=10, num_workers=10)
    assert mixed.micro_batches == 40


def test_requests_for_batches_of_several_have_as_many_in_the_window() -> None:
    assert window({5: 1.0}, together=8).micro_batches == 40, "four requests and what is due before them"
    assert window({5: 1.0}, together=1) == window({5: 1.0})
    assert window({START: 1.0}, together=8) == window({START: 1.0}), "nothing is asked for"


def test_a_route_with_a_small_share_has_two_in_the_window_but_a_tiny_one_counts_no_more() -> None:
    assert window({3: 0.1, 5: 0.9}, batch_size=16).micro_batches == 20
    assert window({3: 0.001, 5: 0.999}, batch_size=16).micro_batches == 32


def test_bytes_count_by_what_crosses_each_cut_and_by_share() -> None:
    sizes = {3: 1000.0, 5: 3000.0}
    found = window({3: 0.5, 5: 0.5}, batch_size=512, crossing_bytes=sizes.__getitem__, num_bytes=640_000)
    assert found == PrefetchWindow(micro_batches=20, num_bytes=640_000), "16 samples of 2000 bytes each"
    one = window({5: 1.0}, crossing_bytes=sizes.__getitem__, num_bytes=1)
    assert one == PrefetchWindow(micro_batches=1, num_bytes=1)


def test_memory_that_the_plan_needs_is_left_to_it() -> None:
    unlimited = plan_of({5: 1.0})
    assert spare_bytes(unlimited) == math.inf
    assert spare_bytes(replace(unlimited, table=())) == math.inf, "nothing is known"
    tight = plan_of({5: 1.0}, memory_bytes=1e9)
    needed = 1e9 - spare_bytes(tight)
    assert 1e8 < needed < 1e9, "the tail's parameters alone take 100 MB"
    found = window({5: 1.0}, memory_bytes=needed + 80_000.0, batch_size=512)
    assert found == PrefetchWindow(micro_batches=5, num_bytes=80_000)
    assert window({5: 1.0}, memory_bytes=needed + 80_000.0, num_bytes=32_000).num_bytes == 32_000
    assert window({5: 1.0}, memory_bytes=needed / 2).micro_batches == 1, "one always may"


def test_of_several_routes_the_neediest_leaves_the_least() -> None:
    spare = {cut: spare_bytes(plan_of({cut: 1.0}, memory_bytes=1e9)) for cut in (1, 17)}
    assert spare[1] < spare[17]
    assert spare_bytes(plan_of({1: 0.1, 17: 0.9}, memory_bytes=1e9)) == spare[1]


@given(
    share=st.floats(0.001, 0.999),
    batch_size=st.integers(1, 2000),
    micro_batch=st.integers(1, 64),
    num_bytes=st.integers(1, 10**9),
)
def test_what_is_expected_in_the_window_fits_its_bytes(
    share: float, batch_size: int, micro_batch: int, num_bytes: int
) -> None:
    sizes = {2: 5000.0, 9: 100.0}
    found = window(
        {2: share, 9: 1 - share},
        batch_size=batch_size,
        micro_batch=micro_batch,
        num_bytes=num_bytes,
        crossing_bytes=sizes.__getitem__,
    )
    expected = found.micro_batches * micro_batch * (share * 5000 + (1 - share) * 100)
    assert found.micro_batches == 1 or expected <= num_bytes * (1 + 1e-9)
    assert found.micro_batches <= max(math.ceil(2 * batch_size / micro_batch), 32)


def test_a_window_is_told_in_words() -> None:
    window = PrefetchWindow(micro_batches=3, num_bytes=2_000_000)
    assert told(window) == "up to 3 micro-batches in flight, at most 2 MB"
