"""Check jobs with a tolerance: it is stated, every route is recorded, and a replay gives the same bits."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, same, train
from tests.program.nets import frozen_small
from tests.server.running import free_port
from upriver.errors import ConfigError, ServerUnavailable
from upriver.pipeline import Dataset
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.tolerance import FLOAT32

SAMPLES = 96

OPTIONS: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "exact": "numeric"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return photos(tmp_path_factory.mktemp("store"), SAMPLES)


def other_server(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> EmbeddedServer:
    """Start a server whose low bits differ from this process's."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # for the server only: this process has chosen already
    server = EmbeddedServer.start({data.store.name: data.store.uri}, threads=1)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    return server


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.slow
@pytest.mark.full
def test_a_run_that_lost_its_server_can_be_had_again(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = other_server(data, monkeypatch)
    with upriver.connect(server.url) as near, caplog.at_level(logging.INFO, logger="upriver"):
        model = frozen_small()
        small = {
            "policy": "freeze",
            "prefetch": upriver.Prefetch(window_bytes=1 << 14, per_request=1, connections=1),
        }
        with near.finetune(model, data, **OPTIONS, **small) as job:
            losses = train(
                job,
                model,
                optimizer_of(model),
                after_step=lambda step: os.kill(server.pid, signal.SIGKILL) if step == 3 else None,
            )
            placed, report, why = job.placed, job.report, job.plan.why
    server.close()
    assert [route.index for route in placed] == list(range(SAMPLES // MICRO))
    assert {route.source for route in placed} == {server.url, "local"}
    assert f"epoch 0, micro-batch 0: {server.url}, cut {job.plan.cut}" in caplog.text
    assert f"{server.url}: features are at most" in caplog.text
    assert (report.exact, report.tolerance) == ("numeric", FLOAT32)
    assert f"features may differ: within {FLOAT32}" in why

    [apart] = re.findall(f"differed by .of the largest. ([0-9.e-]+) at {server.url}", why)
    assert 0 < float(apart) < 1e-3

    written = json.loads(json.dumps([dataclasses.asdict(route) for route in placed]))
    with other_server(data, monkeypatch) as moved, upriver.connect(moved.url) as near:
        again = frozen_small()
        with near.finetune(again, data, **OPTIONS, splitting=upriver.Splitting(replay=written)) as job:
            assert "the run that is replayed" in job.plan.why
            assert same((train(job, again, optimizer_of(again)), again), (losses, model))
            assert [(p.index, p.cut) for p in job.placed] == [(p.index, p.cut) for p in placed]
            sources = ["local" if p.source == "local" else moved.url for p in placed]
            assert [p.source for p in job.placed] == sources


def test_a_plain_run_is_replayed_without_servers(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    near = upriver.connect(closed_port())
    with near.finetune(frozen_small(), data, **OPTIONS, policy="nosplit") as job:
        first = [features for features, _ in job]
    with near.finetune(
        frozen_small(), data, **OPTIONS, splitting=upriver.Splitting(replay=job.placed)
    ) as again:
        assert all(torch.equal(a, b) for a, (b, _) in zip(first, again, strict=True))
        assert again.placed == job.placed


def test_a_server_that_is_gone_cannot_be_replayed(tmp_path: Path) -> None:
    data = photos(tmp_path, 16)
    url = closed_port()
    route = {"epoch": 0, "index": 0, "source": url, "cut": 2}
    with (
        upriver.connect(url) as near,
        near.finetune(frozen_small(), data, **OPTIONS, splitting=upriver.Splitting(replay=[route])) as job,
        pytest.raises(ServerUnavailable, match=f"micro-batch 0 came from {url}, which cannot be asked now"),
    ):
        next(iter(job))
    both = [route, {**route, "index": 1, "source": "http://elsewhere:7000"}]
    with upriver.connect(url) as near, pytest.raises(ConfigError, match="used http://elsewhere:7000"):
        near.finetune(frozen_small(), data, **OPTIONS, splitting=upriver.Splitting(replay=both))
