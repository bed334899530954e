"""Check the order in which kept rows give way."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from upriver.features.eviction import CLEARLY, KeptPart, gives_way, to_remove

parts = st.lists(
    st.builds(
        KeptPart,
        name=st.integers(),
        num_bytes=st.integers(1, 10),
        saved_s_per_byte=st.sampled_from([0.0, 1.0, 1.2, 2.0, 5.0, math.inf]),
        last_used=st.integers(0, 5).map(float),
        unused=st.booleans(),
    ),
    max_size=8,
)


@given(parts=parts, num_bytes=st.integers(1, 40), worth=st.sampled_from([0.0, 1.0, 1.5, 3.0, math.inf]))
def test_to_remove_takes_the_least_useful_and_no_more_than_needed(
    parts: list[KeptPart[int]], num_bytes: int, worth: float
) -> None:
    chosen = to_remove(parts, num_bytes, worth)
    allowed = [each for each in parts if each.unused or worth > CLEARLY * each.saved_s_per_byte]
    assert all(each in allowed for each in chosen)
    freed = sum(each.num_bytes for each in chosen)
    assert freed >= min(num_bytes, sum(each.num_bytes for each in allowed))
    assert not chosen or freed - chosen[-1].num_bytes < num_bytes
    order = [(not each.unused, each.saved_s_per_byte, each.last_used) for each in chosen]
    assert order == sorted(order)
    stay = [each for each in allowed if each not in chosen]
    assert all(
        (not each.unused, each.saved_s_per_byte, each.last_used) >= order[-1] for each in stay if order
    )


def test_gives_way_equals_and_slightly_less_useful_ones_stay() -> None:
    assert not gives_way(1.0, 1.0)
    assert not gives_way(1.0, 1.2)
    assert gives_way(1.0, 1.3)
    assert not gives_way(0.0, 0.0)
    assert gives_way(0.0, 1e-9)
