"""Check that an idle link is probed: during training, briefly, and never while there is traffic."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, optimizer_of, same, train
from tests.program.nets import frozen_small
from tests.server.running import wait_for
from upriver.control.server_choice import Health
from upriver.pipeline import Dataset
from upriver.rpc.client import ServerClient
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.link_probe import BESIDE, QuietLink
from upriver.rpc.local_server import EmbeddedServer
from upriver.rpc.server_pool import ServerPool

AFTER_S = 0.05


class Rig:
    """A server, a pool that holds it, and a link whose last use a test sets."""

    def __init__(self, server: EmbeddedServer, rate: float | None = None) -> None:
        self.server, self.meter = server, LinkMeter(rate)
        self.pool = ServerPool([ServerClient(server.url, meter=self.meter)], probe_timeout_s=1.0)
        wait_for(lambda: self.pool.usable)  # a busy server may miss the timeout of a question
        self.quiet = QuietLink(self.pool, lambda: self.meter.total_bytes, after_s=AFTER_S)

    def look_later(self) -> None:
        time.sleep(2 * AFTER_S)
        self.quiet.look()

    def settle(self) -> None:
        assert self.quiet._thread.ident is not None
        self.quiet._thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start({"default": tmp_path_factory.mktemp("s").as_uri()}, threads=1) as running:
        yield running


@pytest.mark.parametrize("rate", [None, 200_000.0, 25e6])
def test_a_quiet_link_is_probed_and_the_meter_knows(server: EmbeddedServer, rate: float | None) -> None:
    rig = Rig(server, rate)
    with rig.pool:
        rig.quiet.look()
        assert rig.quiet._thread.ident is None, "the first look only begins to wait"
        rig.look_later()
        rig.settle()
        assert 0 < rig.meter.bytes_by_kind["answers"] <= 2 * BESIDE.most_bytes
        observed = rig.meter.observed_bandwidth()
        assert rate is None or (observed is not None and observed < 3 * rate)
        assert rig.pool.status()[0].in_flight == 0


def test_traffic_of_either_kind_keeps_probes_away(server: EmbeddedServer) -> None:
    rig = Rig(server)
    with rig.pool:
        for _ in range(5):
            with rig.meter.transfer():
                rig.meter.account(1, "direct")
            rig.look_later()
        with rig.meter.transfer():  # a large object, not one byte has arrived yet
            rig.look_later()
            rig.settle()
        assert rig.meter.total_bytes == 5


@pytest.mark.full
def test_a_probe_of_a_link_that_has_stopped_is_no_error_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    with EmbeddedServer.start({"default": tmp_path.as_uri()}, threads=1) as server:
        rig = Rig(server)
        rig.quiet.look()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            rig.look_later()
            probing = rig.quiet._thread
            assert probing.is_alive(), "look() did not wait for it"
            rig.look_later()
            assert rig.quiet._thread is probing, "one at a time"
        finally:
            os.kill(server.pid, signal.SIGKILL)
        probing.join()
        assert rig.pool.status()[0].health is not Health.UP
        rig.look_later()
        rig.settle()
        assert rig.meter.total_bytes == 0
        rig.pool.close()


@pytest.mark.full
def test_a_job_probes_when_everything_has_crossed(
    data: Dataset, plain: Reference, near: upriver.Near, caplog: pytest.LogCaptureFixture
) -> None:
    model = frozen_small()
    with (
        caplog.at_level(logging.INFO, "upriver"),
        near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy="upriver") as job,
    ):
        assert job._quiet is not None
        job._quiet._after_s = AFTER_S
        steps = len(job)

        def until_quiet() -> None:
            """Wait for a quiet link, and record that the job has seen all traffic in this step."""
            wait_for(lambda: near.meter.quiet_s > 2 * AFTER_S)
            quiet = job._quiet
            quiet._crossed, quiet._since = quiet._num_bytes(), time.monotonic()
            time.sleep(2 * AFTER_S)

        losses = train(
            job,
            model,
            optimizer_of(model),
            epochs=2,
            after_step=lambda step: until_quiet() if step % steps in (0, steps - 2, steps - 1) else None,
        )
        wait_for(lambda: "the link was quiet; it carries" in caplog.text)
    assert same((losses, model), plain)
