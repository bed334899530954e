"""Check the route of each micro-batch: the shares at every prefix, and a delivery table that keeps them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.delivery_table import (
    Claim,
    DealtRoute,
    Delivery,
    DeliveryTable,
    PrefetchWindow,
    Way,
)
from upriver.control.route_dealing import besides, deal
from upriver.errors import ConfigError
from upriver.types import MicroBatch, Route, Segment, Tier

START = -3


def route(cut: int, share: float) -> Route:
    rest = Segment(tier=Tier.COMPUTE, start=cut, stop=9)
    pushed = Segment(tier=Tier.STORAGE, start=START, stop=cut)
    return Route(segments=(rest,) if cut == START else (pushed, rest), share=share)


@st.composite
def mixes(draw: st.DrawFn) -> list[Route]:
    cuts = draw(st.lists(st.integers(START, 8), min_size=1, max_size=4, unique=True))
    weights = draw(st.lists(st.integers(1, 50), min_size=len(cuts), max_size=len(cuts)))
    return [route(cut, weight / sum(weights)) for cut, weight in zip(cuts, weights, strict=True)]


@given(routes=mixes(), count=st.integers(0, 200))
def test_shares_hold_at_every_prefix(routes: list[Route], count: int) -> None:
    dealt = deal(routes, count, start=START)
    assert len(dealt) == count
    for stop in range(count + 1):
        for each in routes:
            given_out = sum(hand.cut == each.cut for hand in dealt[:stop])
            assert abs(given_out - each.share * stop) <= max(1, len(routes) - 1) + 1e-9


@given(routes=mixes(), count=st.integers(1, 60))
def test_a_longer_epoch_begins_the_same(routes: list[Route], count: int) -> None:
    assert deal(routes, count, start=START) == deal(routes, 2 * count, start=START)[:count]


def test_what_is_stored_is_read_here() -> None:
    [hand] = deal([route(START, 1.0)], 1, start=START)
    assert hand == DealtRoute(way=Way.LOCAL, cut=START)
    [hand] = deal([route(-1, 1.0)], 1, start=START)
    assert hand == DealtRoute(way=Way.REMOTE, cut=-1)


def delivery(index: int) -> Delivery:
    return Delivery(source="s", batch=MicroBatch(ids=(index,), position=0, tensors=()))


@given(
    routes=mixes(),
    count=st.integers(1, 60),
    window=st.integers(1, 20),
    limit=st.integers(1, 5),
    data=st.data(),
)
def test_every_micro_batch_is_made_once_by_its_own_way_and_in_order(
    routes: list[Route], count: int, window: int, limit: int, data: st.DataObject
) -> None:
    dealt = deal(routes, count, start=START)
    table = DeliveryTable(count, first=0, window=PrefetchWindow(micro_batches=window), dealt=dealt)
    taken: list[int] = []
    flying: list[Claim] = []
    while not table.done:
        for way, most in ((Way.REMOTE, limit), (Way.LOCAL, 1)):
            if run := table.find(way, most, only_failed=way is Way.LOCAL):
                assert len(run) <= most and list(run) == sorted(set(run))
                assert len({dealt[index] for index in run}) == 1
                assert all(dealt[index].way is way for index in run)
                flying.append(table.claim(way, run))
        assert flying or table.ready, "somebody can always go on"
        if flying:
            claim = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            for index in claim.indices:
                assert table.deliver(claim, index, delivery(index))
        while table.ready:
            taken.append(table.taken)
            table.take()
    assert taken == list(range(count))


def test_what_servers_failed_at_is_made_here_and_what_is_dealt_here_never_asked_for() -> None:
    dealt = deal([route(START, 0.5), route(2, 0.5)], 4, start=START)
    assert [hand.way for hand in dealt] == [Way.LOCAL, Way.REMOTE] * 2
    table = DeliveryTable(4, first=0, window=PrefetchWindow(), dealt=dealt)
    run = table.find(Way.REMOTE, 4)
    assert run == (1, 3)
    table.give_up(table.claim(Way.REMOTE, run), retry=False)
    assert table.find(Way.REMOTE, 4) == ()
    assert [table.claim(Way.LOCAL, table.find(Way.LOCAL, 1, only_failed=True)).indices for _ in range(4)] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]


def test_as_many_routes_as_micro_batches() -> None:
    with pytest.raises(ConfigError, match="5 micro-batches need as many routes, got 4"):
        DeliveryTable(5, first=0, window=PrefetchWindow(), dealt=deal([route(1, 1.0)], 4, start=START))


@given(routes=mixes(), share=st.floats(0, 1), data=st.data())
def test_routes_besides_a_share_have_the_given_shares_together(
    routes: list[Route], share: float, data: st.DataObject
) -> None:
    cut = data.draw(st.sampled_from([each.cut for each in routes]))
    others = besides(routes, cut=cut, share=share)
    assert abs(sum(each.share for each in others) - 1) < 1e-9
    [asked] = [each.share for each in routes if each.cut == cut]
    if share <= asked and share < 1:
        for each in routes:
            got = (1 - share) * sum(other.share for other in others if other.cut == each.cut)
            assert abs(got + (share if each.cut == cut else 0) - each.share) < 1e-6
    elif len(routes) > 1 and asked < 1 - 1e-9:
        assert cut not in [each.cut for each in others]
