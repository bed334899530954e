"""Check two tenants near a real object store, each with its own keys and data: the bits of the plain path."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import upriver
from tests.finetune.training import BATCH, MICRO, STAGES, optimizer_of, png, run, same
from tests.program.nets import frozen_small
from tests.store.swift_server import Swift, running_swift
from upriver.errors import ObjectChanged, ObjectNotFound, UpriverError
from upriver.finetune.job import FinetuneJob
from upriver.pipeline import Dataset
from upriver.protocol import DatasetRef, RunRequest
from upriver.rpc.client import ServerClient
from upriver.store import Store

pytestmark = pytest.mark.full

URI = "s3://photos"
"""Bucket of both tenants: each account has a bucket of this name, with other pictures in it."""

COUNTS = {"alice": 60, "bob": 36}
TOKENS = {"alice": "a-token-of-alices", "bob": "a-token-of-bobs"}

SERVER = """
port = 0
threads = 1

[stores.alice]
uri = "{uri}"
options = {{ endpoint = "{endpoint}", region = "us-east-1" }}
environment = {{ access_key_id = "ALICES_KEY_ID", secret_access_key = "ALICES_SECRET" }}

[stores.bob]
uri = "{uri}"
options = {{ endpoint = "{endpoint}", region = "us-east-1" }}
credentials_file = "bob.json"

[tenants.alice]
token_hashes = ["{alice}"]
stores = {{ alice = ["images", "changing"] }}

[tenants.bob]
token_hashes = ["{bob}"]
stores = {{ bob = [""] }}
"""


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with running_swift(tmp_path_factory.mktemp("swift"), "alice:photos", "bob:photos") as running:
        yield running


@pytest.fixture(scope="module")
def data(swift: Swift) -> dict[str, Dataset]:
    """Return the dataset of each tenant, as ``upriver index`` writes it."""
    return {account: indexed(swift, account, count) for account, count in COUNTS.items()}


@pytest.fixture(scope="module")
def server(swift: Swift, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of ``upriver serve`` with the keys of both tenants."""
    with serving(swift, tmp_path_factory.mktemp("server")) as url:
        yield url


def fill(store: Store, folder: str, count: int, *, first: int) -> None:
    """Write class folders of small pictures, no two alike."""

    def put(number: int) -> None:
        store.put(f"{folder}/class{number % 5}/{number:03}.png", png(first + number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(count)))


def indexed(swift: Swift, account: str, count: int) -> Dataset:
    store = swift.store(account, URI)
    fill(store, "images", count, first=1000 * len(account))
    keys = swift.options(account)
    option = [f"--option={name}={keys[name]}" for name in ("endpoint", "region")]
    done = subprocess.run(
        [
            sys.executable, "-m", "upriver", "index", URI, "--path=images", "--stages=train", "--size=16",
            *option, "--json",
        ],
        env={
            **os.environ,
            "AWS_ACCESS_KEY_ID": keys["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": keys["secret_access_key"],
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == count
    return Dataset.open(store, found["digest"])


@contextlib.contextmanager
def serving(swift: Swift, folder: Path) -> Iterator[str]:
    alice, bob = swift.options("alice"), swift.options("bob")
    secrets = folder / "bob.json"
    secrets.touch(mode=0o600)
    secrets.write_text(json.dumps({name: bob[name] for name in ("access_key_id", "secret_access_key")}))
    hashes = {account: hashlib.sha256(token.encode()).hexdigest() for account, token in TOKENS.items()}
    config = folder / "server.toml"
    config.write_text(SERVER.format(uri=URI, endpoint=swift.endpoint, **hashes))
    environment = {name: value for name, value in os.environ.items() if name != "UPRIVER_TOKEN"}
    keys = {"ALICES_KEY_ID": alice["access_key_id"], "ALICES_SECRET": alice["secret_access_key"]}
    with (
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "upriver", "serve", "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment | keys,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (folder / "errors").read_text()
            yield json.loads(line)["listening"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    said = (folder / "errors").read_text()
    for secret in (*keys.values(), bob["secret_access_key"], *TOKENS.values()):
        assert secret not in said


@pytest.mark.parametrize("account", COUNTS)
def test_an_epoch_near_the_store_has_the_losses_and_weights_of_the_plain_way(
    data: dict[str, Dataset], server: str, account: str
) -> None:
    plain = run(upriver.connect(), data[account], policy="nosplit", epochs=1)
    with upriver.connect(server, token=TOKENS[account]) as near:
        losses, model, job = run(near, data[account], policy="freeze", epochs=1)
    assert same((losses, model), plain[:2])
    assert job.report.samples == {server: COUNTS[account]}, job.plan.why
    assert plain[2].report.samples == {"local": COUNTS[account]}


def test_the_two_see_different_pictures(data: dict[str, Dataset]) -> None:
    firsts = [dataset.store.get(dataset.locate([0])[0].object) for dataset in data.values()]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize(("who", "whose"), [("alice", "bob"), ("bob", "alice")])
def test_a_tenant_gets_nothing_of_the_other(
    data: dict[str, Dataset], server: str, who: str, whose: str
) -> None:
    dataset = data[whose]
    request = RunRequest(
        micro_batches=((0, 1, 2, 3),),
        start=dataset.chain.start,
        stop=0,
        micro_batch=4,
        dataset=DatasetRef(store=whose, digest=dataset.digest),
        seed=3,
        epoch=1,
    )
    with ServerClient(server, token=TOKENS[whose]) as client:
        assert [batch.ids for batch, _ in client.run(request)] == [(0, 1, 2, 3)]
    with (
        ServerClient(server, token=TOKENS[who]) as client,
        pytest.raises(ObjectNotFound, match=f"no store '{whose}' here; there are {who}"),
    ):
        list(client.run(request))


def steps(
    job: FinetuneJob, model: nn.Module, losses: list[torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Train one epoch; append each loss as soon as it is computed."""
    model.train()
    for features, targets in job:
        torch.manual_seed(len(losses))
        loss = nn.functional.cross_entropy(job(features), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())


def test_an_object_that_changes_under_a_job_ends_it_and_nothing_wrong_is_delivered(
    swift: Swift, server: str
) -> None:
    store = swift.store("alice", URI)
    fill(store, "changing", 60, first=20_000)
    dataset = upriver.index(store, "changing", stages=STAGES)
    dataset.publish()
    plain, _, _ = run(upriver.connect(), dataset, policy="nosplit", epochs=2)
    model, losses = frozen_small(), list[torch.Tensor]()
    optimizer = optimizer_of(model)
    with (
        upriver.connect(server, token=TOKENS["alice"]) as near,
        near.finetune(
            model,
            dataset,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="freeze",
            prefetch=upriver.Prefetch(per_request=1),
        ) as job,
    ):
        steps(job, model, losses, optimizer)
        assert job.report.samples == {server: 60}, job.plan.why
        store.put("changing/class1/031.png", png(99_999))
        with pytest.raises(ObjectChanged, match=r"031\.png.*index again"):
            steps(job, model, losses, optimizer)
    assert 60 // BATCH <= len(losses) < len(plain)
    assert all(map(torch.equal, losses, plain))


def test_an_object_that_is_gone_is_not_found(swift: Swift, data: dict[str, Dataset], server: str) -> None:
    """This test runs last, because it deletes one of bob's pictures."""
    store = swift.store("bob", URI)
    name = data["bob"].locate([5])[0].object
    store.delete(name)
    request = RunRequest(
        micro_batches=((4, 5),),
        start=data["bob"].chain.start,
        stop=0,
        micro_batch=4,
        dataset=DatasetRef(store="bob", digest=data["bob"].digest),
        seed=3,
        epoch=1,
    )
    with (
        ServerClient(server, token=TOKENS["bob"]) as client,
        pytest.raises(UpriverError, match=name) as caught,
    ):
        list(client.run(request))
    assert caught.value.code == "not_found"
