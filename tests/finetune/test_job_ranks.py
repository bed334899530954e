"""Check several processes that train one model with PyTorch's own DistributedDataParallel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests import forked
from tests.finetune.ddp_run import BATCH, MICRO, SAMPLES, SEED, options
from tests.finetune.training import grouped, optimizer_of, photos
from tests.program.nets import frozen_small
from upriver.errors import ConfigError
from upriver.finetune.prefetch.sampler import epoch_order
from upriver.rpc.local_server import EmbeddedServer

RANKS = 2
LIMIT_S = 600

Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> upriver.Dataset:
    return photos(tmp_path_factory.mktemp("ranks") / "store", SAMPLES)


def ranks_of(data: upriver.Dataset, around: str) -> Results:
    """Return the results of two real processes, the plain way and near the data."""
    folder = Path(data.store.uri.removeprefix("file://")).parent
    started = range(RANKS) if forked.Popen.at_start is None else ["all"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with EmbeddedServer.start({data.store.name: data.store.uri}, threads=1) as server:
        command = [sys.executable, "-m", "tests.finetune.ddp_run", str(folder)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(RANKS), server.url, around],
                start_new_session=True,
                env=environment,
                cwd=Path(__file__).parents[2],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in started
        ]
        try:
            said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    assert not any(rank.returncode for rank in ranks), said
    return [json.loads((folder / f"{around}-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def results(data: upriver.Dataset) -> Results:
    return ranks_of(data, "model")


@pytest.mark.slow
def test_near_data_changes_no_bit(results: Results) -> None:
    for rank in results:
        assert_alike(rank["near"], rank["plain"], near=True)


@pytest.mark.slow
@pytest.mark.full
def test_a_wrapper_around_the_tail_changes_no_bit(data: upriver.Dataset, results: Results) -> None:
    for rank, reference in zip(ranks_of(data, "tail"), results, strict=True):
        for way in ("plain", "near"):
            assert_alike(rank[way], reference["plain"], near=way == "near")


def assert_alike(found: dict[str, Any], reference: dict[str, Any], *, near: bool) -> None:
    """Check that a rank has the bits of the reference, and where its samples came from."""
    for part in ("losses", "weights", "targets"):
        assert found[part] == reference[part]
    [source] = found["sources"]
    assert source.startswith("http://127.0.0.1:") == near


@pytest.mark.slow
def test_gradients_are_averaged_over_the_ranks(results: Results, data: upriver.Dataset) -> None:
    """The expected result is computed by hand: one model, both shards' gradients, their mean."""
    assert results[0]["near"]["weights"] == results[1]["near"]["weights"]
    assert results[0]["near"]["losses"] != results[1]["near"]["losses"]
    model = frozen_small()
    optimizer = optimizer_of(model)
    near = upriver.connect()
    shards = [
        near.finetune(
            model, data, **options(policy="nosplit", sampling=upriver.Sampling(rank=rank, num_ranks=RANKS))
        )
        for rank in range(RANKS)
    ]
    model.train()
    for step, batches in enumerate(zip(*shards, strict=True)):
        for job, (features, targets) in zip(shards, batches, strict=True):
            torch.manual_seed(step)
            (nn.functional.cross_entropy(job(features), targets) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    theirs = torch.tensor([float.fromhex(value) for value in results[0]["near"]["weights"]])
    torch.testing.assert_close(weights, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_ranks_together_take_the_epoch_in_order(results: Results, data: upriver.Dataset) -> None:
    order = epoch_order(SAMPLES, seed=SEED, epoch=0, batch_size=BATCH, micro_batch=MICRO, shuffle=True)
    dealt = [t for row in zip(*(rank["near"]["targets"] for rank in results), strict=True) for t in row]
    assert dealt == data.targets[list(order.ids)].tolist()


@pytest.mark.slow
def test_one_rank_may_judge_alone(results: Results) -> None:
    assert results[0]["near"]["loss"] == results[0]["plain"]["loss"] > 0


@pytest.mark.slow
def test_the_wrapper_gets_its_model_back_whatever_happens(results: Results) -> None:
    assert all(rank["near"]["restored_after_error"] for rank in results)


@pytest.mark.slow
def test_one_ranks_state_serves_all(results: Results) -> None:
    assert results[0]["near"]["state"] == results[1]["near"]["state"]
    assert results[0]["near"]["state"]["num_ranks"] == RANKS


def test_a_shard_is_part_of_the_state_and_checked(data: upriver.Dataset) -> None:
    near = upriver.connect()
    with near.finetune(frozen_small(), data, **options(policy="nosplit")) as job:
        alone = job.state_dict()
        old = {key: value for key, value in alone.items() if key not in ("num_ranks", "autocast")}
        job.load_state_dict(old)  # of a version that knew neither
    with near.finetune(
        frozen_small(), data, **options(policy="nosplit", sampling=upriver.Sampling(rank=1, num_ranks=2))
    ) as job:
        assert len(job) == 4
        with pytest.raises(ConfigError, match="its num_ranks is 1, this job's 2"):
            job.load_state_dict(alone)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rank": 0}, "rank was given without num_ranks"),
        ({"num_ranks": 2}, "num_ranks was given without rank"),
        ({"rank": 2, "num_ranks": 2}, r"rank must be a whole number in 0\.\.1, got 2"),
        ({"rank": -1, "num_ranks": 2}, "rank must be"),
        ({"rank": "0", "num_ranks": 2}, "rank must be"),
        ({"rank": 0, "num_ranks": 0}, "num_ranks must be"),
        ({"rank": 0, "num_ranks": 8, "drop_last": True}, "batch_size 6 on each of 8 ranks, 42 samples"),
    ],
)
def test_arguments_of_a_shard_are_checked(
    data: upriver.Dataset, given: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        upriver.connect().finetune(frozen_small(), data, **options(**grouped(**given)))


def test_a_wrapper_that_is_none_of_ours_is_named(data: upriver.Dataset) -> None:
    with pytest.raises(ConfigError, match="wrapped in DataParallel"):
        upriver.connect().finetune(nn.DataParallel(frozen_small()), data, **options())
