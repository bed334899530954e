"""Test the concurrency limit that tenants share."""

from hypothesis import given
from hypothesis import strategies as st

from upriver.control.concurrency_limit import ConcurrencyLimit

NAMES = ("a", "b", "c", "d")


def filled(places, tenant):
    """Return how many places one tenant can have."""
    while places.take(tenant):
        pass
    return places.taken_by(tenant)


@given(
    st.integers(len(NAMES) * 2, 20), st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=60)
)
def test_whatever_others_take_a_tenant_that_has_no_place_gets_one(most, steps):
    places = ConcurrencyLimit(most, NAMES)
    for name, comes in steps:
        if comes:
            had = places.taken_by(name)
            assert places.take(name) or had
        elif places.taken_by(name):
            places.give_back(name)
        assert places.taken == sum(map(places.taken_by, NAMES)) <= most


def test_who_is_alone_may_have_all():
    assert filled(ConcurrencyLimit(8, ["a"]), "a") == filled(ConcurrencyLimit(8, []), "anyone") == 8


def test_all_but_one_for_each_other_tenant_can_be_had_and_they_count_once_they_have_come():
    places = ConcurrencyLimit(8, NAMES)
    assert places.take("b") and places.take("b")
    assert filled(places, "a") == 8 - 2 - 2
    assert filled(places, "c") == 1
    places.give_back("c")
    assert not places.take("b")


def test_many_who_do_not_come_take_no_more_than_half():
    assert filled(ConcurrencyLimit(8, [str(number) for number in range(1000)]), "7") == 4


def test_of_a_single_place_none_is_kept():
    places = ConcurrencyLimit(1, NAMES)
    assert places.take("a") and not places.take("b")
    places.give_back("a")
    assert places.take("b")
