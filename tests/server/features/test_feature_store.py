"""Test rows that servers keep in the store: who finds them, and what damage, quotas and kills do to them."""

import json
import stat

import pytest
import torch

from tests.examples import some
from tests.server.configured import bearer, configured, read_run, tenant
from tests.server.conftest import images
from tests.server.running import ask, body_of, changed, refused, run, running, wait_for
from upriver.pipeline import CenterCrop, Decode, RandomHorizontalFlip, Resize, index
from upriver.pipeline import Dataset as IndexedDataset
from upriver.protocol import DatasetRef, FeaturesFound, RunRequest, decode_versioned
from upriver.server.programs.registry import own_prefix
from upriver.server.tenants import Tenant
from upriver.store import Store
from upriver.types import MicroBatch

STAGES = [Decode(), Resize(18), CenterCrop(16)]


def dataset_in(store: Store, *folders: str, count: int = 8, stages=STAGES) -> IndexedDataset:
    for folder in folders:
        for name, data in images(count).items():
            if not store.exists(f"{folder}/{name}"):
                store.put(f"{folder}/{name}", data)
    dataset = index(store, folders[0], stages=stages)
    dataset.publish()
    return dataset


def request_for(dataset: IndexedDataset, *micro_batches: tuple[int, ...], **fields: object) -> RunRequest:
    return RunRequest(
        **{
            "micro_batches": micro_batches or ((0, 1, 2, 3), (4, 5)),
            "start": dataset.chain.start,
            "stop": 0,
            "micro_batch": 4,
            "dataset": DatasetRef(store="default", digest=dataset.digest),
            "keep": True,
            **fields,
        }
    )


def found(server, request, headers=None) -> tuple[int, ...]:
    status, _, body = ask(server, "POST", "/v1/features", body_of(request), headers)
    assert status == 200, body
    return decode_versioned(body, FeaturesFound, "features").ids


def until_kept(server, request, headers=None) -> None:
    """Wait until all rows of a request are written."""
    ids = tuple(sample for batch in request.micro_batches for sample in batch)
    wait_for(lambda: found(server, request, headers) == ids)


def why_not(server, request, headers=None):
    body = ask(server, "POST", "/v1/features", body_of(request), headers)[2]
    return decode_versioned(body, FeaturesFound, "features").why_not


def answered(server):
    return server.metric("upriver_feature_rows_total", 'what="found"')


def same_batches(a: list[MicroBatch], b: list[MicroBatch]) -> bool:
    return [each.ids for each in a] == [each.ids for each in b] and all(
        torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one.tensors, other.tensors, strict=True)
    )


def features_in(root):
    return sorted(path for path in root.rglob("rows-*.safetensors"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Provide a store and its server, for tests that use folders of their own."""
    root = tmp_path_factory.mktemp("kept")
    with running(root.as_uri()) as server:
        yield root, Store.open(root.as_uri()), server.wait_ready()


# ------------------------------------------------------------------------------------------ answering


@pytest.mark.parametrize("stop", [0, -1])
def test_answers_from_kept_rows_are_equal_and_nothing_is_computed(kept, stop):
    root, store, server = kept
    asked = request_for(dataset_in(store, f"photos{stop}"), stop=stop)
    plain = run(server, changed(asked, keep=False))
    assert found(server, asked) == ()
    assert same_batches(run(server, asked), plain)
    until_kept(server, asked)
    computed, before = server.metric("upriver_forward_rows_count"), answered(server)
    assert same_batches(run(server, asked), plain)
    other = changed(asked, micro_batches=((5, 0), (3, 1, 4, 2)))
    assert same_batches(run(server, other), run(server, changed(other, keep=False)))
    assert answered(server) - before == 12
    assert server.metric("upriver_forward_rows_count") - computed == 2  # the request without keep
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in features_in(root))


def test_rows_are_written_when_the_server_stops_and_found_by_the_next(tmp_path):
    store = Store.open(tmp_path.as_uri())
    asked = request_for(dataset_in(store, "photos"))
    with running(tmp_path.as_uri()) as server:
        plain = run(server, asked)
        server.stop()
    [shard] = features_in(tmp_path)
    content = shard.read_bytes()
    with running(tmp_path.as_uri()) as server:
        assert found(server, asked) == (0, 1, 2, 3, 4, 5)
        assert same_batches(run(server, asked), plain)
        assert answered(server) == 6
        shard.write_bytes(content[:-5] + b"wrong")
        assert same_batches(run(server, asked), plain)
        until_kept(server, asked)
        assert same_batches(run(server, asked), plain)


def test_views_have_rows_of_their_own(kept):
    _, store, server = kept
    stages = [Decode(), Resize(18), RandomHorizontalFlip(0.5), CenterCrop(16)]
    data = dataset_in(store, "views", stages=stages)
    first, second = (request_for(data, epoch=epoch, seed=5) for epoch in (0, 1))
    plain = [run(server, changed(each, keep=False)) for each in (first, second)]
    assert not same_batches(*plain)
    run(server, first)
    until_kept(server, first)
    assert found(server, second) == ()
    assert same_batches(run(server, second), plain[1])
    assert same_batches(run(server, first), plain[0])


def test_replaced_object_has_no_rows(kept):
    _, store, server = kept
    data = dataset_in(store, "replaced")
    run(server, request_for(data))
    until_kept(server, request_for(data))
    [ref] = data.locate([2])
    store.put(ref.object, images(9)["dog/008.png"])
    answer = ask(server, "POST", "/v1/run", body_of(request_for(data, (0, 1, 2, 3))))[2]
    assert read_run(answer)[-1].code == "object_changed"
    again = index(store, "replaced", stages=STAGES)
    again.publish()
    assert found(server, request_for(again)) == (0, 1, 3, 4, 5)


def test_quota_of_storage_counts_kept_rows(tmp_path):
    store = Store.open(tmp_path.as_uri())
    asked = request_for(dataset_in(store, "photos"))
    with running(tmp_path.as_uri(), stored_bytes=4000) as server:
        plain = run(server, changed(asked, keep=False))
        assert same_batches(run(server, asked), plain)
        assert "stored_bytes" in wait_for(lambda: why_not(server, asked))
        assert same_batches(run(server, asked), plain)
        assert 0 < len(found(server, asked)) < 6
    assert 0 < sum(path.stat().st_size for path in features_in(tmp_path)) <= 4000
    assert not list(store.list(".upriver/uploads"))


@pytest.mark.full
@pytest.mark.parametrize("blocked", some(1, ["features", "used"]))
def test_store_that_cannot_be_written_is_said_without_its_location(tmp_path, blocked):
    store = Store.open(tmp_path.as_uri())
    asked = request_for(dataset_in(store, "photos"))
    store.put(f".upriver/{blocked}", b"a file in place of a folder")
    with running(tmp_path.as_uri()) as server:
        plain = run(server, changed(asked, keep=False))
        assert same_batches(run(server, asked), plain)
        reason = wait_for(lambda: why_not(server, asked))
        assert "store default" in reason and str(tmp_path) not in reason
        assert same_batches(run(server, asked), plain)


def test_removing_takes_the_rows_of_one_stretch_alone(kept):
    _, store, server = kept
    data = dataset_in(store, "removing")
    first, second = request_for(data), request_for(data, stop=-1)
    for asked in (first, second):
        run(server, asked)
        until_kept(server, asked)
    assert ask(server, "POST", "/v1/features/remove", body_of(first))[0] == 200
    assert found(server, first) == ()
    assert len(found(server, second)) == 6


def test_removing_takes_rows_that_wait_to_be_written(kept):
    _, store, server = kept
    data = dataset_in(store, "waiting")
    run(server, request_for(data))
    assert ask(server, "POST", "/v1/features/remove", body_of(request_for(data)))[0] == 200
    later = request_for(data, (6, 7))
    run(server, later)
    until_kept(server, later)
    assert found(server, request_for(data)) == ()


def test_skipped_samples_are_never_kept(kept):
    _, store, server = kept
    store.put("bad/cat/bad.png", b"no image")
    data = dataset_in(store, "bad")
    names = [ref.object for ref in data.locate(range(len(data)))]
    bad = names.index("bad/cat/bad.png")
    asked = request_for(data, (bad, (bad + 1) % len(names)), on_bad_sample="skip")
    [batch] = run(server, asked)
    assert batch.skipped == (bad,)
    wait_for(lambda: found(server, asked) == ((bad + 1) % len(names),))


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.full
def test_keep_where_nothing_can_be_kept_is_refused(world, server):
    sent = world.here((0, 1), stop=0)
    no_dataset = world.request((0, 1), stop=3, start=0, dataset=None, keep=True)
    status, error = refused(server, body_of(no_dataset, sent))
    assert (status, error["code"]) == (400, "protocol")
    assert "keep with no dataset" in error["message"]
    given = world.request((0, 1), start=-1, given=True, keep=True)
    status, error = refused(server, body_of(given, world.here((0, 1), stop=-1)))
    assert (status, error["code"]) == (400, "protocol")
    assert "keep with given samples" in error["message"]


@pytest.mark.parametrize("path", ["/v1/features", "/v1/features/remove"])
def test_question_that_is_no_request_with_keep_is_refused(world, server, path):
    for body in (b"no frame", b"", body_of(world.request((0, 1))), body_of(world.request((99,), keep=True))):
        status, error = refused(server, body, path)
        assert (status, error["code"]) == (400, "protocol")


def test_keep_without_a_stage_is_refused(world, server):
    start = world.dataset.chain.start
    status, error = refused(server, body_of(world.request((0, 1), stop=start, keep=True)))
    assert (status, error["code"]) == (400, "protocol")
    assert "rows are kept after a stage" in error["message"]


# ------------------------------------------------------------------------------------------ tenants


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Provide a server with two tenants: both read ``common``, and each a folder of its own."""
    folder = tmp_path_factory.mktemp("shared")
    root = folder / "store"
    root.mkdir()
    store = Store.open(root.as_uri())
    datasets = {name: dataset_in(store, name) for name in ("common", "alice", "bob")}
    text = f'[stores]\ndefault = "{root.as_uri()}"\n\n'
    text += tenant("alice", "token-a", default=["common", "alice"])
    text += tenant("bob", "token-b", default=["common", "bob"])
    with configured(folder, text) as server:
        yield root, store, datasets, server


A, B = bearer("token-a"), bearer("token-b")


def test_tenant_finds_no_row_of_another(shared):
    root, _, datasets, server = shared
    asked = request_for(datasets["common"])
    wait_for(lambda: ask(server, "GET", "/readyz")[0] == 200)
    status, _, body = ask(server, "POST", "/v1/run", body_of(asked), A)
    assert status == 200
    until_kept(server, asked, A)
    assert found(server, asked, B) == ()
    folders = [own_prefix(".upriver", Tenant(name=name)) for name in ("alice", "bob")]
    assert features_in(root / folders[0])
    assert not features_in(root / folders[1])
    before = features_in(root)
    assert ask(server, "POST", "/v1/features/remove", body_of(asked), B)[0] == 200
    assert features_in(root) == before
    again = ask(server, "POST", "/v1/run", body_of(asked), B)[2]
    wait_for(lambda: features_in(root / folders[1]))
    assert [each.ids for each in read_run(again) if isinstance(each, MicroBatch)] == [
        each.ids for each in read_run(body) if isinstance(each, MicroBatch)
    ]
    assert features_in(root / folders[0]) == before


@pytest.mark.parametrize("path", ["/v1/run", "/v1/features", "/v1/features/remove"])
def test_rows_of_samples_outside_a_tenants_folders_are_refused(shared, path):
    _root, _, datasets, server = shared
    asked = request_for(datasets["alice"])
    wait_for(lambda: ask(server, "POST", "/v1/run", body_of(asked), A)[0] == 200)
    wait_for(lambda: found(server, asked, A))
    status, _, body = ask(server, "POST", path, body_of(asked), B)
    assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden")
    assert found(server, asked, A)


def test_strangers_learn_nothing(shared):
    _, _, datasets, server = shared
    for path in ("/v1/features", "/v1/features/remove"):
        status, _, _ = ask(server, "POST", path, body_of(request_for(datasets["common"])))
        assert status == 401
