"""Check that a replay repeats the source of every micro-batch, or raises an error that says so."""

from __future__ import annotations

import dataclasses
import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.finetune.prefetch.test_prefetcher import check, epoch, locally, pool_of, remote
from tests.rpc.scripted_transport import ScriptedServer, Step
from upriver.control.delivery_table import Pin, Way
from upriver.errors import (
    ConfigError,
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    NotExact,
    Overloaded,
    ServerUnavailable,
    StoreError,
    TooLarge,
    WorkerCrashed,
)
from upriver.finetune.prefetch.fetch_threads import LOCAL
from upriver.finetune.prefetch.prefetcher import Prefetcher
from upriver.finetune.prefetch.replay import Placed, PlacementLog, Routes


def placed(*sources: str, epoch: int = 0, cut: int = 3) -> list[Placed]:
    return [
        Placed(epoch=epoch, index=index, source=source, cut=0 if source == LOCAL else cut)
        for index, source in enumerate(sources)
    ]


def test_routes_survive_json() -> None:
    routes = placed("http://a", LOCAL, "http://a", epoch=1)
    written = json.loads(json.dumps([dataclasses.asdict(route) for route in routes]))
    assert Routes(written).pins(1) == Routes(routes).pins(1)
    assert Routes(written).pins(1) == {
        0: Pin(way=Way.REMOTE, source="http://a", cut=3),
        1: Pin(way=Way.LOCAL, source=LOCAL, cut=0),
        2: Pin(way=Way.REMOTE, source="http://a", cut=3),
    }
    assert Routes(written).pins(0) == {}
    assert not Routes()
    assert not Routes([])


def test_places_are_told_once_in_order_and_the_last_time_counts() -> None:
    places = PlacementLog()
    assert places.all() == ()
    for when, index, source in [(1, 2, "a"), (1, 3, LOCAL), (0, 0, "b"), (1, 2, "b"), (0, 2, LOCAL)]:
        places.note(epoch=when, index=index, source=source, cut=0 if source == LOCAL else 3)
    assert places.all() == (
        Placed(epoch=0, index=0, source="b", cut=3),
        Placed(epoch=0, index=2, source=LOCAL, cut=0),
        Placed(epoch=1, index=2, source="b", cut=3),
        Placed(epoch=1, index=3, source=LOCAL, cut=0),
    )
    assert len(Routes(places.all()).pins(1)) == 2


def test_places_take_little_memory() -> None:
    places, num = PlacementLog(), 100_000
    tracemalloc.start()
    for index in range(num):
        places.note(epoch=0, index=index, source=f"http://{index % 3}", cut=index % 5)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 6 * num
    assert len(places.all()) == num


def test_a_single_server_may_have_moved() -> None:
    routes = Routes(placed("http://a", LOCAL))
    assert routes.on(["http://a", "http://b"]).pins(0) == routes.pins(0)
    assert [pin.source for pin in routes.on(["http://b"]).pins(0).values()] == ["http://b", LOCAL]
    for urls in (["http://b", "http://c"], []):
        with pytest.raises(ConfigError, match="used http://a; this job's servers are"):
            routes.on(urls)
    with pytest.raises(ConfigError, match="used http://b; this job's servers are http://a"):
        Routes(placed("http://a", "http://b")).on(["http://a"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("http://a", "job.placed"),
        ({"epoch": 0}, "job.placed"),
        (3, "job.placed"),
        ([3], r"replay\[0\]"),
        ([*placed("http://a"), {"epoch": 0, "index": 1, "source": "local"}], r"replay\[1\]"),
        ([{"epoch": 0, "index": True, "source": "local", "cut": 0}], r"replay\[0\]"),
        ([{"epoch": -1, "index": 0, "source": "local", "cut": 0}], r"replay\[0\]"),
        (placed("http://a") * 2, r"replay\[1\] names micro-batch 0 of epoch 0 once more"),
    ],
)
def test_what_is_no_list_of_routes_is_named(given: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Routes(given)  # type: ignore[arg-type]


@settings(max_examples=examples(40), deadline=None)
@given(num=st.integers(1, 20), seed=st.integers(0, 99), refusals=st.integers(0, 3), free=st.integers(0, 3))
def test_each_micro_batch_comes_from_its_place(num: int, seed: int, refusals: int, free: int) -> None:
    """Two servers, one of which refuses for a while; the last few micro-batches may come from anywhere."""
    wanted = epoch(num)
    sources = random.Random(seed).choices(["a", "b", LOCAL], k=max(0, num - free))
    script = [Step(error=Overloaded("full", retry_after_s=0.001))] * refusals
    seen: dict[int, str] = {}
    with (
        pool_of(ScriptedServer("a", script), ScriptedServer("b")) as pool,
        Prefetcher(
            wanted,
            local=locally,
            remote=remote(pool, wanted, per_request=3),
            pins=Routes(placed(*sources)).pins(0),
            on_timings=lambda index, source, batch, timings: seen.update({index: source}),
        ) as loader,
    ):
        check(list(loader), wanted)
    assert [seen[index] for index in range(len(sources))] == sources


@pytest.mark.parametrize(
    "error",
    [
        ServerUnavailable("reset"),
        WorkerCrashed("killed"),
        Forbidden("not yours"),
        DoesNotFit("needs 9 GB"),
        DeadlineExceeded("10 s are over"),
        TooLarge("an image of 100 Mpx"),
        StoreError("503"),
    ],
)
def test_what_its_place_cannot_give_is_an_error(error: Exception) -> None:
    wanted = epoch(6)
    with (
        pool_of(ScriptedServer("a", [Step(good=1, error=error)]), ScriptedServer("b")) as pool,
        Prefetcher(
            wanted,
            local=locally,
            remote=remote(pool, wanted, connections=1, per_request=6),
            pins=Routes(placed(*"aaabbb")).pins(0),
        ) as loader,
    ):
        check([next(loader)], wanted[:1])
        with pytest.raises(type(error), match=str(error)):
            next(loader)


def test_a_server_that_is_kept_out_is_named() -> None:
    def refuse(client: object) -> None:
        if client.url == "a":  # type: ignore[attr-defined]
            raise NotExact("other bits")

    wanted = epoch(4)
    with (
        pool_of(ScriptedServer("a"), ScriptedServer("b"), admit=refuse) as pool,
        Prefetcher(
            wanted,
            local=locally,
            remote=remote(pool, wanted),
            pins=Routes(placed("b", "a", "b", "a")).pins(0),
        ) as loader,
    ):
        check([next(loader)], wanted[:1])
        with pytest.raises(ServerUnavailable, match=r"micro-batch 1 came from a, .* \(other bits\)"):
            next(loader)


def test_a_place_without_servers_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="need at least one server"):
        Prefetcher(epoch(2), local=locally, pins=Routes(placed("a")).pins(0))
