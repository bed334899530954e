"""What stops answering in mid-job: the plan says so, and the job goes on from what answers, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest

import upriver
from tests.client.conftest import Reference
from tests.client.test_job_near import free_port, start
from tests.client.training import BATCH, MICRO, optimizer_of, same, train
from tests.program.nets import frozen_small
from upriver.pipeline import Dataset

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_stops_is_named_by_the_plan(
    data: Dataset, plain: Reference, sign: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    server, model, whys = start(data, free_port()), frozen_small(), []
    with upriver.connect(server.url) as near:
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            cut={2: 0.5, 5: 0.5},
            window_bytes=1 << 15,
        ) as job:
            asked = job.plan.why

            def stop(step: int) -> None:
                whys.append(job.plan.why)
                if step == 4:
                    os.kill(server.pid, sign)

            losses = train(job, model, optimizer_of(model), epochs=2, after_step=stop)
            report = job.report
        after = job.plan.why
    os.kill(server.pid, signal.SIGKILL)
    server.close()
    assert whys[0] == asked
    for said in (whys[-1], after):
        assert said.startswith(asked) and "no server answers now" in said and server.url in said
    assert report.samples["local"] > 0 and sum(report.samples.values()) == 400
    assert same((losses, model), plain)
    assert [record.levelname for record in caplog.records if "cannot be carried out" in record.message] == [
        "WARNING"
    ]


def test_a_plan_that_needs_no_server_says_nothing(data: Dataset) -> None:
    server = start(data, free_port())
    with (
        upriver.connect(server.url) as near,
        near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit") as job,
    ):
        server.close()
        assert len(list(job)) == len(job)
        assert "answers" not in job.plan.why
