import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.delivery_table import (
    MAX_REMOTE_ATTEMPTS,
    DealtRoute,
    Delivery,
    DeliveryTable,
    Pin,
    PrefetchWindow,
    Way,
)
from upriver.errors import BadSample, ConfigError
from upriver.types import MicroBatch


def delivery(index: int, num_floats: int = 1) -> Delivery:
    tensors = (torch.full((num_floats,), float(index)),)
    return Delivery(source="s", batch=MicroBatch(ids=(index,), position=0, tensors=tensors))


def table(
    num: int = 10, *, first: int = 0, micro_batches: int = 10, num_bytes: int = 1 << 20, expected: int = 4
):
    window = PrefetchWindow(micro_batches=micro_batches, num_bytes=num_bytes)
    return DeliveryTable(num, first=first, window=window, expected_bytes=dict.fromkeys(Way, expected))


def test_only_the_one_that_is_due_can_be_taken():
    slots = table()
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 3))
    assert claim.indices == (0, 1, 2)
    assert slots.deliver(claim, 1, delivery(1))
    assert not slots.ready
    with pytest.raises(KeyError):
        slots.take()
    assert slots.deliver(claim, 0, delivery(0))
    assert [slots.take().result().ids for _ in range(2)] == [(0,), (1,)]
    assert not slots.ready


def test_with_a_stride_each_gets_the_next_one_that_is_due():
    slots = table(20, micro_batches=20)
    claims = [slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 3, stride=4)) for _ in range(4)]
    assert [claim.indices for claim in claims] == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert slots.find(Way.REMOTE, 3, stride=4) == (12, 16)


def test_a_stride_counts_micro_batches_of_the_same_route():
    dealt = [
        DealtRoute(way=Way.LOCAL, cut=-1) if index % 3 == 1 else DealtRoute(way=Way.REMOTE, cut=2)
        for index in range(12)
    ]
    slots = DeliveryTable(12, first=0, window=PrefetchWindow(micro_batches=12), dealt=dealt)
    assert slots.find(Way.REMOTE, 3, stride=2) == (0, 3, 6)
    slots.claim(Way.REMOTE, (0, 3, 6))
    assert slots.find(Way.REMOTE, 3, stride=2) == (2, 5, 8)
    slots.claim(Way.REMOTE, (2, 5, 8))
    assert slots.find(Way.REMOTE, 9, stride=2) == (9,)


def test_a_stride_counts_micro_batches_of_other_routes_of_that_way():
    """Two threads request for each of two routes: none gets a due micro-batch before it is handed out."""
    dealt = [DealtRoute(way=Way.REMOTE, cut=1 + index % 2) for index in range(16)]
    dealt[9] = DealtRoute(way=Way.REMOTE, cut=4)
    slots = DeliveryTable(16, first=0, window=PrefetchWindow(micro_batches=16), dealt=dealt)
    assert slots.num_kinds(Way.REMOTE) == 3
    claims = [slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 3, stride=4)) for _ in range(4)]
    assert [claim.indices for claim in claims] == [(0, 4, 8), (1, 5, 11), (2, 6, 10), (3, 7)]
    assert slots.find(Way.REMOTE, 3, stride=4) == (9,)
    slots.claim(Way.REMOTE, (9,))
    assert slots.num_kinds(Way.REMOTE) == 2


def test_a_strided_run_that_the_window_cuts_short_waits_for_it_to_move_on():
    slots = table(40, micro_batches=12)
    for _ in range(2):
        slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 3, stride=2))
    assert slots.find(Way.REMOTE, 4, stride=2) == (), "6, 8 and 10 lie in it; 12 does not yet"
    assert slots.find(Way.REMOTE, 3, stride=2) == (6, 8, 10)


def test_what_was_done_to_one_that_waits_is_handed_out_in_its_turn():
    slots = table()
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 3))
    assert slots.unfinished() is None
    slots.deliver(claim, 0, delivery(0))
    assert slots.unfinished() is None, "it is due"
    slots.deliver(claim, 2, delivery(2))
    index, found = slots.unfinished()
    assert index == 2
    held = slots.held_bytes
    larger = MicroBatch(ids=(2,), position=5, tensors=(torch.zeros(11),))
    slots.finish(index, found.finished(larger))
    assert slots.unfinished() is None
    assert slots.held_bytes == held + 40
    slots.deliver(claim, 1, delivery(1))
    slots.take()
    slots.take()
    taken = slots.take()
    assert taken.result() is larger and taken.done
    assert (taken.arrival.position, taken.arrival.num_bytes) == (0, 4)


def test_what_failed_to_be_finished_is_tried_again_in_its_turn():
    done = delivery(1).finished(None)
    assert not done.done and done.came is not None and done.result().ids == (1,)


def test_what_arrives_twice_or_late_is_dropped():
    slots = table()
    first = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 2))
    assert slots.deliver(first, 0, delivery(0))
    assert not slots.deliver(first, 0, delivery(0))
    slots.release(first)
    again = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 2))
    assert again.indices == (1, 2)
    assert not slots.deliver(first, 1, delivery(1)), "the claim was given up"
    assert slots.deliver(again, 1, delivery(1))
    slots.take()
    slots.take()
    assert not slots.deliver(again, 1, delivery(1)), "taken"


def test_release_keeps_what_has_arrived():
    slots = table()
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 4))
    slots.deliver(claim, 0, delivery(0))
    slots.give_up(claim, retry=True)
    assert slots.retried == 3
    assert slots.find(Way.REMOTE, 10) == tuple(range(1, 10))


def test_window_of_micro_batches():
    slots = table(micro_batches=4)
    assert slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 9)).indices == (0, 1, 2, 3)
    assert slots.find(Way.LOCAL, 1) == ()


def test_window_of_bytes_counts_expected_then_real_bytes():
    slots = table(num_bytes=100, expected=40)
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 10))
    assert claim.indices == (0, 1)
    assert slots.held_bytes == 80
    slots.deliver(claim, 1, delivery(1, num_floats=2))
    assert slots.held_bytes == 48
    assert slots.find(Way.REMOTE, 10) == (2,)


@pytest.mark.parametrize("sizes", [(25, 2), (2, 25), (1, 25, 3), (25, 25, 1)])
def test_slots_after_deliveries_of_several_sizes_expect_the_largest(sizes):
    slots = table(num_bytes=300, expected=4)
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, len(sizes)))
    for index, num_floats in enumerate(sizes):
        assert slots.deliver(claim, index, delivery(index, num_floats))
        slots.take()
    assert slots.held_bytes == 0
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 10))
    assert (len(claim.indices), slots.held_bytes) == (3, 300), "three of 100 bytes, not ten of fewer"
    assert slots.find(Way.LOCAL, 10) == ()


def test_slots_expect_of_each_cut_and_way_what_came_by_it():
    dealt = [
        DealtRoute(way=Way.REMOTE, cut=1),
        DealtRoute(way=Way.REMOTE, cut=2),
        DealtRoute(way=Way.LOCAL, cut=-1),
    ] * 3
    window = PrefetchWindow(micro_batches=9, num_bytes=100_000)
    slots = DeliveryTable(9, first=0, window=window, dealt=dealt, expected_bytes=dict.fromkeys(Way, 4))
    ways = (Way.REMOTE, Way.REMOTE, Way.LOCAL)
    for index, num_floats in enumerate((100, 10, 1)):
        claim = slots.claim(ways[index], slots.find(ways[index], 1))
        assert claim.indices == (index,) and slots.deliver(claim, index, delivery(index, num_floats))
    held = [slots.held_bytes]
    for index, way in enumerate(ways, start=3):
        assert slots.claim(way, slots.find(way, 1)).indices == (index,)
        held.append(slots.held_bytes)
    assert held == [444, 844, 884, 888]


def test_the_one_that_is_due_fits_any_window():
    slots = table(num_bytes=1, expected=40)
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 10))
    assert claim.indices == (0,)
    slots.deliver(claim, 0, delivery(0))
    assert slots.find(Way.REMOTE, 10) == ()
    slots.take()
    assert slots.find(Way.REMOTE, 10) == (1,)


def test_views_of_one_buffer_weigh_once():
    buffer = torch.zeros(64)
    batch = MicroBatch(ids=(0,), position=0, tensors=(buffer[:8], buffer[8:16]))
    assert Delivery(source="s", batch=batch).num_bytes == 256


def test_runs_are_not_chopped_by_the_end_of_the_window():
    slots = table(100, micro_batches=8)
    claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 8))
    for index in claim.indices:
        slots.deliver(claim, index, delivery(index))
    slots.take()
    assert slots.find(Way.REMOTE, 4) == (), "waits for three more"
    for _ in range(3):
        slots.take()
    assert slots.find(Way.REMOTE, 4) == (8, 9, 10, 11)


def test_short_run_at_the_end_of_the_epoch():
    slots = table(3, micro_batches=8)
    slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 1))
    assert slots.find(Way.REMOTE, 4) == (1, 2)


def test_what_failed_too_often_is_left_to_the_local_way():
    slots = table(4)
    for _ in range(MAX_REMOTE_ATTEMPTS):
        claim = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 2))
        assert claim.indices == (0, 1)
        slots.give_up(claim, retry=True)
    assert slots.find(Way.REMOTE, 2) == (1, 2), "the next one was never at fault"
    assert slots.find(Way.LOCAL, 2, only_failed=True) == (0,)


def test_without_budget_all_that_is_missing_goes_local():
    slots = table(4)
    slots.give_up(slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 2)), retry=False)
    assert slots.find(Way.LOCAL, 4, only_failed=True) == (0, 1)
    assert slots.find(Way.REMOTE, 4) == (2, 3)


def test_nothing_is_begun_after_an_error():
    slots = table()
    claim = slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 2))
    slots.deliver(claim, 1, Delivery(source="s", error=BadSample(sample=1, object_name="o", reason="r")))
    assert slots.find(Way.LOCAL, 10) == ()
    slots.deliver(claim, 0, delivery(0))
    assert slots.take().result().ids == (0,)
    with pytest.raises(BadSample):
        slots.take().result()
    assert slots.done


def test_an_error_behind_another_one_changes_nothing():
    slots = table()
    claim = slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 6))
    for index in (1, 4):
        error = BadSample(sample=index, object_name="o", reason="r")
        slots.deliver(claim, index, Delivery(source="s", error=error))
    slots.deliver(claim, 0, delivery(0))
    slots.take()
    with pytest.raises(BadSample, match="sample 1"):
        slots.take().result()
    assert slots.done


@pytest.mark.parametrize(
    ("expected", "held"),
    [({}, 25), ({Way.REMOTE: 4}, 4), ({Way.REMOTE: 4, DealtRoute(way=Way.REMOTE, cut=1): 40}, 40)],
)
def test_before_anything_came_a_micro_batch_weighs_what_its_route_was_said_to(expected, held):
    dealt = [DealtRoute(way=Way.REMOTE, cut=1)] * 4
    window = PrefetchWindow(micro_batches=4, num_bytes=100)
    slots = DeliveryTable(4, first=0, window=window, dealt=dealt, expected_bytes=expected)
    slots.claim(Way.REMOTE, (0,))
    assert slots.held_bytes == held


def test_routes_that_come_with_a_window_are_held_to_it():
    dealt = [DealtRoute(way=Way.REMOTE, cut=1)] * 10
    slots = table()
    slots.deal(dealt, PrefetchWindow(micro_batches=2))
    assert slots.find(Way.REMOTE, 5) == (0, 1)
    slots.deal(dealt)
    assert slots.find(Way.REMOTE, 5) == (0, 1)


def test_one_request_is_never_for_two_pins():
    pins = {index: Pin(way=Way.REMOTE, source="ab"[index // 2], cut=1) for index in range(4)}
    slots = DeliveryTable(4, first=0, window=PrefetchWindow(), pins=pins)
    assert slots.find(Way.REMOTE, 4) == (0, 1)
    slots.claim(Way.REMOTE, (0, 1))
    assert slots.find(Way.REMOTE, 4) == (2, 3) and slots.find(Way.LOCAL, 4) == ()
    assert slots.claim(Way.REMOTE, (2, 3)).cut == 1


def test_a_short_run_that_is_due_soon_does_not_wait_for_the_window():
    """A route with a small share has few micro-batches in the window."""
    dealt = [DealtRoute(way=Way.REMOTE, cut=9 if index % 8 == 2 else 1) for index in range(24)]
    slots = DeliveryTable(24, first=0, window=PrefetchWindow(micro_batches=8), dealt=dealt)
    slots.claim(Way.REMOTE, (0, 1))
    assert slots.find(Way.REMOTE, 2) == (2,)


def test_what_cannot_be_made_here_goes_to_servers_at_a_cut_of_the_plan():
    here, there = DealtRoute(way=Way.LOCAL, cut=-4), DealtRoute(way=Way.REMOTE, cut=2)
    slots = DeliveryTable(6, first=0, window=PrefetchWindow(), dealt=[here, there, there, here, here, here])
    claim = slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 1))
    assert slots.common_cut == 2
    assert slots.ask_servers(claim, 2)
    assert slots.find(Way.LOCAL, 1, only_failed=True) == ()
    assert slots.find(Way.LOCAL, 1) == (0,), "without servers it is tried here all the same"
    asked = slots.claim(Way.REMOTE, slots.find(Way.REMOTE, 4))
    assert asked.indices == (0, 1, 2, 3) and asked.cut == 2
    slots.give_up(asked, retry=False)
    again = slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 1, only_failed=True))
    assert again.indices == (0,)
    assert not slots.ask_servers(again, 2), "nor do servers make it"
    assert slots.find(Way.REMOTE, 4) == (4, 5)
    slots.ask_servers_no_more()
    assert slots.find(Way.REMOTE, 4) == () and slots.find(Way.LOCAL, 6) != ()


def test_servers_are_not_asked_for_what_no_route_or_pin_allows():
    here = DealtRoute(way=Way.LOCAL, cut=-4)
    assert DeliveryTable(2, first=0, window=PrefetchWindow(), dealt=[here, here]).common_cut is None
    pin = Pin(way=Way.LOCAL, source="local", cut=0)
    dealt = [here, DealtRoute(way=Way.REMOTE, cut=2)]
    slots = DeliveryTable(2, first=0, window=PrefetchWindow(), dealt=dealt, pins={0: pin})
    assert not slots.ask_servers(slots.claim(Way.LOCAL, slots.find(Way.LOCAL, 1)), 2)


@pytest.mark.parametrize("first", [-1, 11])
def test_first_must_lie_in_the_epoch(first):
    with pytest.raises(ConfigError, match=r"0\.\.10"):
        table(first=first)


@pytest.mark.parametrize("bad", [{"micro_batches": 0}, {"num_bytes": 0}])
def test_empty_windows_are_refused(bad):
    with pytest.raises(ConfigError, match="at least 1"):
        PrefetchWindow(**bad)


@given(st.data())
def test_any_sequence_of_events_delivers_each_once_in_order(data):
    num = data.draw(st.integers(0, 12), label="num")
    first = data.draw(st.integers(0, num), label="first")
    window = data.draw(st.integers(1, 6), label="window")
    most_bytes = data.draw(st.integers(1, 40), label="bytes")
    slots = table(num, first=first, micro_batches=window, num_bytes=most_bytes)
    open_claims, taken = [], []
    for _ in range(400):
        if slots.done:
            break
        way = data.draw(st.sampled_from(Way))
        event = data.draw(st.sampled_from(["claim", "deliver", "deliver", "give_up", "take", "take"]))
        if event == "claim" and (run := slots.find(way, data.draw(st.integers(1, 4)))):
            open_claims.append(slots.claim(way, run))
        elif event == "deliver" and open_claims:
            claim = data.draw(st.sampled_from(open_claims))
            index = data.draw(st.sampled_from(claim.indices))
            slots.deliver(claim, index, delivery(index))
        elif event == "give_up" and open_claims:
            claim = open_claims.pop(data.draw(st.integers(0, len(open_claims) - 1)))
            slots.give_up(claim, retry=data.draw(st.booleans()))
        elif event == "take" and slots.ready:
            taken.append(slots.take().result().ids[0])
        assert len(slots) <= window
        assert slots.held_bytes <= most_bytes + 4, "what is due comes on top"
        unclaimed_due = slots.taken < num and slots.taken not in slots._slots
        if unclaimed_due:
            assert slots.find(Way.LOCAL, 1) == (slots.taken,), "what is due can always be begun"
    assert taken == list(range(first, first + len(taken)))
