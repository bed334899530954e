"""Test the cache of opened indexes: kept for the next request, never beyond the memory budget."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from tests.pipeline.making import npy, write
from tests.server.test_tenants import dataset_of
from upriver.control.memory_budget import INDEXES, MemoryBudget
from upriver.errors import DatasetError, DoesNotFit, Forbidden, ObjectNotFound, Overloaded
from upriver.pipeline import Dataset, LoadTensor, index
from upriver.protocol import DatasetRef, RunRequest
from upriver.server.programs.datasets import Datasets
from upriver.server.tenants import ANYONE, Tenant
from upriver.store import DEFAULT_PREFIX, Store


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Publish three datasets in one store; their indexes have about the same size."""
    folder = tmp_path_factory.mktemp("store")
    store = write(folder, {f"{part}/one/{row}.npy": npy(np.zeros(4)) for part in "abc" for row in range(9)})
    found = [index(store, part, stages=[LoadTensor("npy")]) for part in "abc"]
    for dataset in found:
        dataset.publish()
    return found


def kept(published, *, budget, most=8, most_bytes=1 << 30):
    return Datasets(
        {"default": published[0].store},
        prefix=DEFAULT_PREFIX,
        most=most,
        most_bytes=lambda: most_bytes,
        hold=lambda nbytes: budget.hold(nbytes, owner=INDEXES),
    )


def get(datasets, dataset):
    return asyncio.run(datasets.get(DatasetRef(store="default", digest=dataset.digest), ANYONE))


def test_an_index_holds_what_it_takes_and_is_opened_once(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    first = get(datasets, published[0])
    assert first.digest == published[0].digest
    assert budget.held_by(INDEXES) == first.nbytes > 9 * 3 * 8
    assert get(datasets, published[0]) is first
    assert budget.held_by(INDEXES) == first.nbytes


def test_the_one_used_longest_ago_goes_when_there_is_no_room(published):
    sizes = [dataset.nbytes for dataset in published]
    budget = MemoryBudget(sum(sizes) - 1)
    datasets = kept(published, budget=budget)
    first, second = get(datasets, published[0]), get(datasets, published[1])
    assert get(datasets, published[0]) is first
    third = get(datasets, published[2])
    assert budget.held_by(INDEXES) == first.nbytes + third.nbytes
    assert get(datasets, published[2]) is third and get(datasets, published[0]) is first
    assert get(datasets, published[1]) is not second


def test_opening_holds_what_it_takes_at_most_and_then_what_stays(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    asked = []
    Dataset.open(published[0].store, published[0].digest, admit=asked.append)
    first = get(datasets, published[0])
    assert budget.most_reserved_bytes == asked[-1] > first.nbytes
    assert budget.reserved_bytes == first.nbytes


def test_an_index_that_takes_more_than_one_may_is_refused_for_good(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget, most_bytes=100)
    with pytest.raises(DoesNotFit, match=r"takes [\d.]+ \w+ of memory to open its index; at most 100 B are"):
        get(datasets, published[0])
    assert budget.reserved_bytes == 0


def test_who_goes_while_an_index_is_opened_leaves_its_memory_held_until_it_is_read(published, monkeypatch):
    budget, going_on, seen = MemoryBudget(1 << 20), threading.Event(), []

    def slow(data, manifest, admit):
        admit(1000)
        going_on.wait()
        raise DatasetError("read at last")

    monkeypatch.setattr("upriver.pipeline.manifest.decode_index", slow)

    async def leave():
        ref = DatasetRef(store="default", digest=published[0].digest)
        asking = asyncio.create_task(kept(published, budget=budget).get(ref, ANYONE))
        while budget.reserved_bytes < 1000:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        seen.append(budget.reserved_bytes)
        going_on.set()
        while budget.reserved_bytes:
            await asyncio.sleep(0.001)

    asyncio.run(leave())
    assert seen[0] >= 1000


def test_no_more_are_kept_than_may_be(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget, most=2)
    for dataset in published:
        get(datasets, dataset)
    assert budget.held_by(INDEXES) == published[1].nbytes + published[2].nbytes


def test_one_that_never_fits_is_refused_and_holds_nothing(published):
    budget = MemoryBudget(published[0].nbytes - 1)
    datasets = kept(published, budget=budget)
    with pytest.raises(Overloaded, match="no memory"):
        get(datasets, published[0])
    assert budget.reserved_bytes == 0


def test_two_who_ask_at_once_hold_it_once(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    ref = DatasetRef(store="default", digest=published[0].digest)

    async def both():
        return await asyncio.gather(datasets.get(ref, ANYONE), datasets.get(ref, ANYONE))

    one, other = asyncio.run(both())
    assert one is other
    assert budget.held_by(INDEXES) == one.nbytes


def test_the_oldest_goes_when_others_need_the_memory(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    _, second = get(datasets, published[0]), get(datasets, published[1])
    assert datasets.drop_oldest()
    assert budget.held_by(INDEXES) == second.nbytes
    assert get(datasets, published[1]) is second
    assert datasets.drop_oldest() and not datasets.drop_oldest()
    assert budget.reserved_bytes == 0


def asks(datasets, dataset, folder):
    """Ask for the first sample as a tenant that may read one folder."""
    request = RunRequest(
        micro_batches=((0,),),
        start=-1,
        stop=0,
        micro_batch=1,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    return asyncio.run(datasets.ask(request, Tenant(name=f"reads-{folder}", stores={"default": (folder,)})))


def refused(datasets, dataset, folder):
    with pytest.raises(Forbidden):
        asks(datasets, dataset, folder)


def test_what_a_tenant_may_not_read_counts_with_the_index_once_for_each_choice_of_folders(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    first = published[0]
    assert asks(datasets, first, "a").digest == first.digest
    assert budget.held_by(INDEXES) == first.nbytes  # the tenant may read all of it: no mask is kept
    for folder, masks in (("b", 1), ("b", 1), ("c", 2)):
        refused(datasets, first, folder)
        assert budget.held_by(INDEXES) == first.nbytes + masks * len(first)
    assert datasets.drop_oldest() and budget.reserved_bytes == 0


def test_for_what_a_tenant_may_not_read_other_indexes_go_and_then_its_own(published):
    sizes = [dataset.nbytes for dataset in published]
    budget = MemoryBudget(sizes[0] + sizes[1] + len(published[1]) - 1)
    datasets = kept(published, budget=budget)
    get(datasets, published[0])
    refused(datasets, published[1], "a")
    assert budget.held_by(INDEXES) == sizes[1] + len(published[1])
    budget = MemoryBudget(sizes[1] + len(published[1]) - 1)
    with pytest.raises(Overloaded):
        asks(kept(published, budget=budget), published[1], "a")
    assert budget.reserved_bytes == 0


def test_one_that_is_not_there_holds_nothing(published):
    budget = MemoryBudget(1 << 20)
    datasets = kept(published, budget=budget)
    with pytest.raises(ObjectNotFound):
        asyncio.run(datasets.get(DatasetRef(store="default", digest="0" * 64), ANYONE))
    with pytest.raises(ObjectNotFound, match="no store 'other'"):
        asyncio.run(datasets.get(DatasetRef(store="other", digest="0" * 64), ANYONE))
    assert budget.reserved_bytes == 0


@pytest.mark.parametrize("who", [ANYONE, Tenant(name="alice", stores={"default": ("",)})])
def test_nobody_reads_what_the_server_keeps_for_others_however_the_index_is_made(who):
    program = f"{DEFAULT_PREFIX}/tenants/bob/programs/{'0' * 64}/graph.json"
    for name, allowed in ((program, False), (f"{DEFAULT_PREFIX}s/1.npy", True)):
        dataset = dataset_of(["alice/1.npy", name])
        dataset.publish()
        datasets = kept([dataset], budget=MemoryBudget(1 << 20))
        with nullcontext() if allowed else pytest.raises(Forbidden, match=dataset.digest):
            asyncio.run(datasets.get(DatasetRef(store="default", digest=dataset.digest), who))


def test_who_asks_for_a_store_by_another_name_is_told_how_to_say_the_right_one():
    store = Store.open("memory://named", name="photos")
    datasets = Datasets(
        {"photos": store},
        prefix=".upriver",
        most=1,
        most_bytes=lambda: 1 << 20,
        hold=lambda nbytes: MemoryBudget(1 << 20).hold(nbytes, owner=INDEXES),
    )
    elsewhere = DatasetRef(store="default", digest="0" * 64)
    with pytest.raises(ObjectNotFound) as caught:
        asyncio.run(datasets.get(elsewhere, ANYONE))
    assert "there are photos" in str(caught.value)
    assert "Store.open(URI, name='photos')" in str(caught.value)
    assert "store_name" in str(caught.value)
    with pytest.raises(ObjectNotFound, match=r"no store 'default' here; there are none$"):
        asyncio.run(datasets.get(elsewhere, Tenant(name="alice", stores={})))
