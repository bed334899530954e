"""Check that a silent, trickling or senseless server costs a job seconds before the plain path."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

import upriver
from tests.examples import some
from tests.finetune.training import BATCH, MICRO, photos
from tests.program.nets import frozen_small
from tests.rpc.scripted_http import Exchange, scripted
from upriver.engine.fingerprint import fingerprint
from upriver.protocol import DEFAULT_CAPS, Info, encode
from upriver.rpc.http import Timeouts
from upriver.rpc.local_server import EmbeddedServer
from upriver.types import MicroBatch

SHORT = Timeouts(connect_s=0.3, read_s=0.3, question_s=0.3)


@contextmanager
def silent() -> Iterator[str]:
    """Accept connections and stay silent, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def trickled(exchange: Exchange) -> None:
    """Send one byte of a well-formed frame now and then, which takes minutes."""
    frame = MicroBatch(ids=(0,), position=0, tensors=(torch.zeros(1, 10_000),))
    exchange.start_chunks()
    with contextlib.suppress(OSError):
        for byte in b"".join(map(bytes, encode(frame))):
            exchange.chunk(bytes([byte]))
            time.sleep(0.02)
    exchange.handler.close_connection = True


def friendly_until(path: str) -> contextlib.AbstractContextManager[str]:
    """Answer everything correctly, but trickle at ``path``."""
    info = Info(
        version=upriver.__version__,
        fingerprint=fingerprint("cpu"),
        stores=("default",),
        micro_batch=MICRO,
        caps=DEFAULT_CAPS,
        device="cpu",
        workers=1,
        threads=1,
    )

    def respond(exchange: Exchange) -> None:
        if exchange.path.startswith(path):
            trickled(exchange)
        elif exchange.path == "/v1/info":
            exchange.plain(200, msgspec.json.encode(info))
        else:
            exchange.plain(200)

    return scripted(respond)


@pytest.mark.parametrize(
    "server", some(1, [silent, lambda: friendly_until("/v1/info"), lambda: friendly_until("/v1/run")])
)
def test_planning_goes_on_without_a_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: object
) -> None:
    monkeypatch.setattr("upriver.rpc.client.Timeouts", lambda: SHORT)
    monkeypatch.setattr("upriver.finetune.calibration.server_gate.MEASURE_S", 0.5)
    data = photos(tmp_path, 24)
    told: list[str] = []
    planned: list[upriver.FinetuneJob] = []

    def plan(near: upriver.Near) -> None:
        planned.append(
            near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, on_progress=told.append)
        )

    with server() as url, upriver.connect(url) as near:  # type: ignore[operator]
        thread = threading.Thread(target=plan, args=(near,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "planning hangs"
        [job] = planned
        assert f"{url}: no answer in time" in job.plan.why
        assert f"asking {url}" in told
        assert sum(len(targets) for _, targets in job) == 24
        assert job.report.samples == {"local": 24}


@pytest.mark.full
def test_a_silent_server_keeps_no_job_from_the_other_one(tmp_path: Path) -> None:
    """The job still waits for both servers: the other server may be busy, too."""
    data = photos(tmp_path, 24)
    with (
        EmbeddedServer.start({"default": data.store.uri}, threads=torch.get_num_threads()) as good,
        silent() as url,
        upriver.connect(url, good.url) as near,
    ):
        job = near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="freeze")
        assert f"not used for now: {url}: no answer in time" in job.plan.why
        assert job.plan.cut >= 1
        list(job)
        assert job.report.samples == {good.url: 24}
