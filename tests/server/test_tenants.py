"""Test tenants: what each may read, and that a refusal touches no other tenant's data."""

import json
from hashlib import sha256

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.making import write
from tests.server.configured import bearer, configured, post_run, read_run, tenant
from tests.server.conftest import images
from tests.server.running import ask, in_thread
from tests.store.s3_server import S3Server
from upriver.errors import ConfigError, Forbidden
from upriver.pipeline import CenterCrop, Dataset, Decode, InputChain, LoadTensor, Normalize, Resize, index
from upriver.pipeline.manifest import SCHEMA, IndexFile, IndexManifest, encode_index, encode_manifest
from upriver.protocol import DatasetRef, End, RunRequest, program_head
from upriver.server import ServerConfig, tenants
from upriver.server.app import Front
from upriver.server.tenants import ANYONE, Tenant, Tenants, hash_token
from upriver.store import Store
from upriver.types import MicroBatch

STAGES = [Decode(), Resize(18), CenterCrop(16), Normalize()]


def dataset_of(objects):
    """Make a dataset whose samples lie in these objects, which need not exist."""
    count = len(objects)
    zeros = pa.array([0] * count, pa.int64())
    data = encode_index(
        pa.table(
            {
                "object": objects,
                "etag": ['"e"'] * count,
                "start": zeros,
                "stop": pa.array([1] * count, pa.int64()),
                "target": zeros,
                "name": [str(row) for row in range(count)],
            }
        )
    )
    manifest = IndexManifest(
        schema=SCHEMA,
        layout="folders",
        format="npy",
        count=count,
        classes=("all",),
        index=IndexFile(sha256=sha256(data).hexdigest(), bytes=len(data)),
        stages=InputChain((LoadTensor(),)).to_json(),
    )
    return Dataset(Store.open("memory://tenants"), encode_manifest(manifest), data, prefix=".upriver")


def reader(*prefixes):
    return Tenant(name="alice", stores={"images": prefixes})


def may_read(who, dataset, ids):
    try:
        who.check_objects("images", dataset, ids)
    except Forbidden:
        return False
    return True


# ------------------------------------------------------------------------------------- tenant settings


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "a/b"),
        ({"token_hashes": ("open-sesame",)}, "alice"),
        ({"token_hashes": ("A" * 64,)}, "hex"),
        ({"certificates": ("",)}, "certificate"),
        ({"certificates": ("a\nb",)}, "certificate"),
        ({"stores": {"no/store": ("",)}}, "no/store"),
        ({"stores": {"images": ()}}, "images"),
        ({"stores": {"images": ("../bob",)}}, "images"),
        ({"stores": {"images": ("/etc",)}}, "images"),
        ({"weight": 0}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": 1e300}, r"weight lies in 0.001..1000, got 1e\+300"),
        ({"weight": 1e-4}, "weight"),
        ({"memory_share": 0}, "memory_share"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_waiting_bytes": -1}, "max_waiting_bytes"),
        ({"program_bytes": True}, "program_bytes"),
    ],
)
def test_what_cannot_be_meant_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        Tenant(**{"name": "alice", **fields})


def test_a_token_in_the_place_of_its_hash_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        Tenant(name="alice", token_hashes=("open-sesame",))
    assert "sesame" not in str(caught.value)


def test_hashes_are_not_shown():
    digest = hash_token("open-sesame")
    assert digest == sha256(b"open-sesame").hexdigest()
    assert digest not in repr(Tenant(name="alice", token_hashes=(digest,)))


def test_everyone_is_found_by_what_is_theirs():
    alice = Tenant(
        name="alice", token_hashes=(hash_token("old"), hash_token("new")), certificates=("a.example",)
    )
    bob = Tenant(name="bob", token_hashes=(hash_token("bob's"),))
    known = Tenants([alice, bob])
    assert [known.by_token(token) for token in ("old", "new", "bob's")] == [alice, alice, bob]
    assert [known.by_token(token) for token in ("", "ol", "olds", hash_token("old"), "\xe9")] == [None] * 5
    assert known.by_certificate("a.example") is alice
    assert known.by_certificate("alice") is None
    assert (list(known), len(known)) == ([alice, bob], 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "alice", "token_hashes": (hash_token("other"),)},
        {"name": "bob", "token_hashes": (hash_token("one"),)},
        {"name": "bob", "certificates": ("a.example",)},
    ],
)
def test_two_tenants_share_nothing_that_tells_them_apart(fields):
    alice = Tenant(name="alice", token_hashes=(hash_token("one"),), certificates=("a.example",))
    with pytest.raises(ConfigError, match="alice"):
        Tenants([alice, Tenant(**fields)])


# ------------------------------------------------------------------------------------------- read access


def test_stores():
    assert ANYONE.may_read("images")
    ANYONE.check_store("images")
    alice = reader("alice")
    alice.check_store("images")
    assert not alice.may_read("private")
    with pytest.raises(Forbidden, match="'private'"):
        alice.check_store("private")
    nobody = Tenant(name="nobody", stores={})
    assert not nobody.may_read("images")


@pytest.mark.parametrize(
    ("prefix", "inside"),
    [
        ("alice", {"alice", "alice/1", "alice/b/2"}),
        ("alice/", {"alice", "alice/1", "alice/b/2"}),
        ("alice/b", {"alice/b/2"}),
        ("alice/1", {"alice/1"}),
        ("alic", set()),
        ("", {"alice", "alice/1", "alice/b/2", "alice2/1", "x/alice/1", "ALICE/1"}),
    ],
)
def test_a_prefix_is_a_folder_or_an_object(prefix, inside):
    names = ["alice", "alice/1", "alice/b/2", "alice2/1", "x/alice/1", "ALICE/1"]
    dataset, who = dataset_of(names), reader(prefix)
    assert {name for row, name in enumerate(names) if may_read(who, dataset, [row])} == inside


SEGMENT = st.sampled_from(["a", "b", "ab", "ä"])
NAME = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join)


@given(
    objects=st.lists(NAME, min_size=1, max_size=12),
    prefixes=st.lists(NAME | st.just(""), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_request_is_refused_if_any_sample_lies_elsewhere(objects, prefixes, data):
    ids = data.draw(st.lists(st.integers(0, len(objects) - 1), max_size=6))

    def inside(name):
        return any(not prefix or name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)

    dataset = dataset_of(objects)
    expected = any(map(inside, objects)) and all(inside(objects[row]) for row in ids)
    assert may_read(reader(*prefixes), dataset, ids) == expected
    assert may_read(reader(*prefixes), dataset, ids) == expected  # from memory


def test_names_of_a_dataset_are_looked_at_once(monkeypatch):
    looked = []
    find = tenants._find_outside
    monkeypatch.setattr(
        tenants, "_find_outside", lambda dataset, prefixes: looked.append(prefixes) or find(dataset, prefixes)
    )
    dataset = dataset_of(["alice/1", "bob/1"])
    for _ in range(3):
        assert may_read(reader("alice"), dataset, [0])
        assert not may_read(reader("alice"), dataset, [0, 1])
        assert may_read(reader("alice", "bob"), dataset, [0, 1])
        assert may_read(reader(""), dataset, [0, 1])
    assert looked == [("alice",), ("alice", "bob")]


def test_of_a_dataset_of_others_not_even_its_length_is_told():
    """An error for a missing row would reveal the number of rows to another tenant."""
    dataset = dataset_of(["bob/1", "bob/2"])
    assert not may_read(reader("alice"), dataset, [99])
    assert may_read(reader("alice", "bob/1"), dataset, [99])
    assert may_read(reader("bob"), dataset, [99])


@pytest.mark.parametrize("name", ["anyone", "server", "indexes"])
def test_no_tenant_is_called_what_owns_things_that_are_no_tenants(name):
    tenant = Tenant(name=name, token_hashes=(hash_token("token-a"),))
    other = Tenant(name="other", token_hashes=(hash_token("token-b"),))
    with pytest.raises(ConfigError, match=name):
        ServerConfig(stores={"images": "memory://tenants"}, tenants=(tenant, other))


def test_one_for_all_may_be_called_so_beside_who_reads_nothing():
    """Replicas of a cluster use both: one token, and a tenant of the replica's own."""
    everyone = Tenant(name="anyone", token_hashes=(hash_token("token-a"),))
    keeper = Tenant(name="keeper", token_hashes=(hash_token("token-b"),), stores={})
    config = ServerConfig(stores={"images": "memory://tenants"}, tenants=(everyone, keeper))
    assert list(config.everyone()) == [everyone, keeper]


@pytest.mark.slow
def test_an_upload_of_a_tenant_without_a_store_is_forbidden(tmp_path):
    """A program that is not found is no reason to send more of the upload."""
    keeper = Tenant(name="keeper", token_hashes=(hash_token("token-a"),), stores={})
    path, headers = f"/v1/programs/{'0' * 64}", {"Authorization": "Bearer token-a"}
    with in_thread(tmp_path.as_uri(), tenants=(keeper,), threads=1) as server:
        server.wait_ready()
        status, _, body = ask(server, "PUT", path, program_head(1) + b"{", headers)
        assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden")
        assert ask(server, "HEAD", path, headers=headers)[0] == 404


def test_a_folder_that_is_not_there_is_told_when_the_server_starts(tmp_path, caplog):
    write(tmp_path / "a b", {"alice/1.npy": b"x"})
    stores = {"images": (tmp_path / "a b").as_uri(), "memory": "memory://tenants"}
    alice = Tenant(
        name="alice",
        token_hashes=(hash_token("token-a"),),
        stores={"images": ("", "alice/", "alice/1.npy", "alcie"), "memory": ("alice",)},
    )
    Front(ServerConfig(stores=stores, tenants=(alice,)))
    assert caplog.messages == [
        "tenant 'alice' may read 'alcie' in store 'images', where there is nothing of that name"
    ]


def test_a_refusal_names_no_object_of_others():
    with pytest.raises(Forbidden) as caught:
        reader("alice").check_objects("images", dataset_of(["bob/secret-plan"]), [0])
    assert "secret-plan" not in str(caught.value)
    assert caught.value.code == "forbidden"


# --------------------------------------------------------------------------------------- a real server


class Shared:
    """Server of two tenants over one bucket, and of a store for one of them alone."""

    def __init__(self, s3, server, datasets, private):
        self.s3, self.server, self.datasets, self.private = s3, server, datasets, private

    def request(self, dataset, store="images", ids=((0, 1),)):
        return RunRequest(
            micro_batches=ids,
            start=dataset.chain.start,
            stop=0,
            micro_batch=4,
            dataset=DatasetRef(store=store, digest=dataset.digest),
        )

    def seen(self, since):
        """Return the paths that the store was asked for."""
        return [path for _, path, _ in self.s3.requests[since:]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    private = index(write(folder / "private", images(4)), stages=STAGES)
    private.publish()
    keys = {"access_key_id": "AKIATESTKEY", "secret_access_key": "wJalrSECRETtest"}
    with S3Server() as s3:
        store = Store.open("s3://bucket/data", name="images", options={"endpoint": s3.url, **keys})
        for who in ("alice", "bob"):
            for name, data in images(4).items():
                store.put(f"{who}/{name}", data)
        datasets = {who: index(store, who, stages=STAGES) for who in ("alice", "bob")}
        datasets["both"] = index(store, stages=STAGES)
        for dataset in datasets.values():
            dataset.publish()
        text = (
            '[stores.images]\nuri = "s3://bucket/data"\n'
            f'options.endpoint = "{s3.url}"\n'
            'environment = { access_key_id = "TEST_KEY", secret_access_key = "TEST_SECRET" }\n'
            f'[stores.private]\nuri = "{private.store.uri}"\n'
            + tenant("alice", "token-a", images=["alice/"])
            + tenant("bob", "token-b", images=["bob/"], private=[""])
        )
        environment = {"TEST_KEY": keys["access_key_id"], "TEST_SECRET": keys["secret_access_key"]}
        with configured(folder, text, **environment) as server:
            yield Shared(s3, server.wait_ready(), datasets, private)


@pytest.mark.slow
def test_each_tenant_gets_its_own(shared):
    for who, token in (("alice", "token-a"), ("bob", "token-b")):
        status, body = post_run(shared.server, shared.request(shared.datasets[who]), token)
        assert status == 200, body[:500]
        batch, *_, end = read_run(body)
        assert isinstance(batch, MicroBatch)
        assert batch.ids == (0, 1)
        assert isinstance(end, End)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "ids"), [("bob", ((0, 1),)), ("both", ((0, 1), (3, 4))), ("both", ((7,),))]
)
def test_samples_of_another_are_refused_and_none_is_read(shared, dataset, ids):
    before = len(shared.s3.requests)
    status, body = post_run(shared.server, shared.request(shared.datasets[dataset], ids=ids), "token-a")
    assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden")
    assert not [path for path in shared.seen(before) if "/alice/" in path or "/bob/" in path]


@pytest.mark.slow
def test_of_a_dataset_of_both_each_reads_its_own_part(shared):
    """Rows 0 to 3 are Alice's, 4 to 7 Bob's: an index is sorted by name."""
    for ids, token in (((0, 3),), "token-a"), (((4, 7),), "token-b"):
        before = len(shared.s3.requests)
        status, _ = post_run(shared.server, shared.request(shared.datasets["both"], ids=ids), token)
        assert status == 200
        assert [path for path in shared.seen(before) if "/alice/" in path or "/bob/" in path]


@pytest.mark.slow
def test_a_store_of_others_is_not_there(shared):
    answers = []
    for name in ("private", "nowhere"):
        status, body = post_run(shared.server, shared.request(shared.private, store=name), "token-a")
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "not_found")
        answers.append({**error, "message": error["message"].replace(name, "NAME")})
    assert answers[0] == answers[1]
    assert "images" in answers[0]["message"]
    assert post_run(shared.server, shared.request(shared.private, store="private"), "token-b")[0] == 200


@pytest.mark.slow
def test_a_server_tells_a_tenant_of_its_own_stores_alone(shared):
    found = {
        token: json.loads(ask(shared.server, "GET", "/v1/info", headers=bearer(token))[2])["stores"]
        for token in ("token-a", "token-b")
    }
    assert found == {"token-a": ["images"], "token-b": ["images", "private"]}


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, bearer("token-c"), bearer(hash_token("token-a"))])
def test_others_get_nothing_and_nothing_is_read(shared, headers):
    before = len(shared.s3.requests)
    for method, path in (("POST", "/v1/run"), ("GET", "/v1/info"), ("PUT", f"/v1/programs/{'0' * 64}")):
        status, _, body = ask(shared.server, method, path, b"UPRV" if method != "GET" else None, headers)
        assert (status, json.loads(body)["error"]["code"]) == (401, "not_authorized")
    assert not shared.seen(before)
