"""Test a server whose stages run on an accelerator, while weights arrive and after they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, train
from tests.program.nets import frozen_small
from tests.server.cold import LAYER_BYTES, given_rows, published, request, sent, serving, wide
from tests.server.running import run, running, wait_for
from tests.store.gated_server import GatedServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.fixture
def s3() -> Iterator[GatedServer]:
    with GatedServer() as s3:
        yield s3


def test_a_cold_program_answers_on_an_accelerator(s3: GatedServer) -> None:
    program = wide()
    published(s3, program)
    with serving(s3, device="cuda") as server:
        answers = [run(server, request(program), sent(program))]
        wait_for(lambda: server.is_whole(program))
        answers.append(run(server, request(program), sent(program)))
        part = run(server, request(program, stop=3), sent(program))
    there = type(program).from_bytes(program.graph_bytes, program.weights_bytes, device="cuda")
    (expected,) = there.run((given_rows().cuda(),), 0, program.num_stages)
    for answer in answers:
        (found,) = answer[0].tensors
        assert torch.equal(found, expected.cpu())
    for found, each in zip(part[0].tensors, there.run((given_rows().cuda(),), 0, 3), strict=True):
        assert torch.equal(found, each.cpu())
    assert s3.weights_asked() < 1.1 * program.weight_nbytes + LAYER_BYTES


def test_a_job_near_its_data_on_an_accelerator_has_the_losses_of_one_without(tmp_path: Path) -> None:
    data = photos(tmp_path, 50)
    found = []
    with running(tmp_path.as_uri(), device="cuda") as server:
        server.wait_ready()
        for policy in ("freeze", "nosplit"):
            model = frozen_small().cuda()
            with (
                upriver.connect(server.url) as near,
                near.finetune(
                    model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy=policy, exact="numeric"
                ) as job,
            ):
                found.append(torch.stack(train(job, model, optimizer_of(model), epochs=2)))
                origins = {source.partition(":")[0] for source in job.report.samples}
                assert origins == ({"http"} if policy == "freeze" else {"local"}), origins
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
