"""Test what tenants store: counted in the store, refused above their quota, removed when unused."""

from __future__ import annotations

import os

import pytest

import upriver
from tests.finetune.training import photos, same
from tests.finetune.training import run as train_job
from tests.server.configured import bearer
from tests.server.conftest import make_program, make_world
from tests.server.http.test_limits import upload
from tests.server.running import ask, body_of, in_thread, wait_for
from tests.store.s3_server import S3Server
from upriver.cli.serve.config_file import StoreAt
from upriver.coldstart.garbage_collection import collect, survey
from upriver.program.graph.artifact_paths import graph_path, weights_path
from upriver.protocol import MAX_GRAPH_BYTES
from upriver.server.tenants import Tenant, hash_token
from upriver.store import Store
from upriver.text import bytes_text

MONTH_S = 30 * 86400.0
ALICE = ".upriver/tenants/alice"
QUOTA = 80_000
"""Bytes that hold two programs of these tests, and not three."""

TENANTS = (
    Tenant(name="alice", token_hashes=(hash_token("a"),), stored_bytes=QUOTA),
    Tenant(name="bob", token_hashes=(hash_token("b"),)),
)


@pytest.fixture(scope="module")
def programs():
    return [make_program(seed) for seed in range(3)]


def put(server, program, token="a"):
    body = upload(program)
    status, _, answer = ask(server, "PUT", f"/v1/programs/{program.digest}", body, bearer(token))
    return status, answer.decode()


def ready(server):
    wait_for(lambda: ask(server, "GET", "/readyz")[0] == 200)


@pytest.mark.full
def test_a_quota_counts_what_is_stored_whoever_took_it_and_until_it_is_removed(programs):
    first, second, third = programs
    with S3Server() as s3:
        options = {"endpoint": s3.url, "access_key_id": "KEY", "secret_access_key": "SECRET"}
        place = StoreAt(uri="s3://bucket/some", options=options)
        store = Store.open(place.uri, options=options)
        with in_thread(place, threads=1, tenants=TENANTS) as server:
            ready(server)
            assert put(server, first)[0] == put(server, second)[0] == 201
            status, text = put(server, third)
            assert status == 507
            assert '"storage_full"' in text and "'alice' may store 80 kB" in text and "upriver gc" in text
            assert f"has stored {bytes_text(survey(store, ALICE).nbytes)}" in text
            assert put(server, first)[0] == 201, "what is there already takes nothing more"
            assert put(server, third, "b")[0] == 201, "others have a number of their own"
            assert not list(store.list(f"{ALICE}/uploads"))
            assert len(list(store.list(f"{ALICE}/used"))) == 4
        with in_thread(place, threads=1, tenants=TENANTS) as server:  # another front, or the same restarted
            ready(server)
            assert put(server, third)[0] == 507
            for path in s3.objects:
                if first.digest in path or first.weights_digest in path:
                    s3.modified[path] -= MONTH_S + 1
            gone = [each.digest for each in collect(store, ALICE, older_than_s=MONTH_S)]
            assert gone == [first.digest, first.weights_digest]
            assert put(server, third)[0] == 201
            assert ask(server, "HEAD", f"/v1/programs/{first.digest}", None, bearer("a"))[0] == 404
            assert put(server, first)[0] == 507
            for path in [path for path in s3.objects if third.digest in path or third.weights_digest in path]:
                del s3.objects[path]
            store.put(f"{ALICE}/features/{'0' * 64}/rows-9-{1:016x}.safetensors", bytes(QUOTA // 2))
            assert put(server, first)[0] == 507, "kept features count, too"
            s3.modified[next(path for path in s3.objects if "/features/" in path)] -= MONTH_S + 1
            assert [each.digest for each in collect(store, ALICE, older_than_s=MONTH_S)] == ["0" * 64]
            assert put(server, first)[0] == 201


@pytest.mark.full
def test_a_server_notes_what_it_uses_so_that_it_stays_and_tells_of_what_was_removed(tmp_path, programs):
    world = make_world(tmp_path)
    store = world.store
    for program in programs[:2]:
        store.put(graph_path(".upriver", program.digest), program.graph_bytes)
        store.put(weights_path(".upriver", program.weights_digest), bytes(program.weights_bytes))
    for path in (tmp_path / ".upriver").rglob("*"):
        os.utime(path, (1e9, 1e9))
    used, other = (body_of(world.request((0, 1), stop=1, program=program.digest)) for program in programs[:2])
    notes = [f".upriver/used/{digest}" for digest in (programs[0].digest, programs[0].weights_digest)]
    # Almost nothing is kept of an unused program: the next request reads it again.
    with in_thread(store.uri, threads=1, program_budget_bytes=40_000) as server:
        ready(server)
        assert ask(server, "POST", "/v1/run", used)[0] == 200
        wait_for(lambda: all(map(store.exists, notes)), seconds=30)
        gone = [each.digest for each in collect(store, ".upriver", older_than_s=MONTH_S)]
        assert gone == [programs[1].digest, programs[1].weights_digest]
        assert ask(server, "POST", "/v1/run", used)[0] == 200
        status, _, answer = ask(server, "POST", "/v1/run", other)
        assert (status, b"program_not_found" in answer) == (404, True)
        store.put(graph_path(".upriver", "0" * 64), bytes(MAX_GRAPH_BYTES + 1))
        status, _, answer = ask(
            server, "POST", "/v1/run", other.replace(programs[1].digest.encode(), b"0" * 64)
        )
        assert (status, b"at most 67108864 are allowed" in answer) == (400, True), answer
        store.delete(weights_path(".upriver", programs[0].weights_digest))
        status, _, answer = ask(server, "POST", "/v1/run", used)  # its graph is still known
        assert (status, b"program_not_found" in answer) == (404, True), answer
        assert put(server, programs[0])[0] == 201
        assert ask(server, "POST", "/v1/run", used)[0] == 200


@pytest.mark.full
def test_a_job_of_a_tenant_that_may_store_no_more_goes_on_without_the_server(tmp_path):
    data = photos(tmp_path)
    losses, model, _ = train_job(upriver.connect(), data, policy="nosplit")
    with in_thread(data.store.uri, threads=1, stored_bytes=1000) as server:
        ready(server)
        with upriver.connect(server.url) as near:
            got, trained, job = train_job(near, data)
    assert same((got, trained), (losses, model))
    assert "may store 1 kB (stored_bytes) and has stored 0 B" in " ".join(str(job.plan).split())
    assert not (tmp_path / ".upriver" / "programs").exists()
