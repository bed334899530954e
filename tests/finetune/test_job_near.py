"""Check the main job with real servers: the bits of the plain path through any failure, and a true report."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests.examples import some
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, png, root_of, run, same, train
from tests.program.nets import frozen_small
from tests.server.running import free_port
from upriver._torchvision import ensure_torchvision
from upriver.cost import route_between
from upriver.errors import BadSample, DoesNotFit, NotExact
from upriver.finetune import planner
from upriver.finetune.calibration.server_gate import ServerGate
from upriver.finetune.prefetch.sampler import epoch_order
from upriver.pipeline import Dataset
from upriver.rpc.client import ServerClient
from upriver.rpc.local_server import EmbeddedServer
from upriver.types import Plan, Timings


@pytest.mark.parametrize(
    "options",
    some(
        1,
        [
            {"policy": "freeze"},
            pytest.param({"policy": "min"}, marks=pytest.mark.full),
            {"cut": 1},
            pytest.param({"cut": 4}, marks=pytest.mark.full),
        ],
    ),
)
def test_losses_and_weights_are_those_of_the_plain_way_at_any_cut(
    data: Dataset, plain: Reference, near: upriver.Near, options: dict[str, object]
) -> None:
    losses, model, job = run(near, data, **options)
    assert same((losses, model), plain)
    assert job.plan.cut >= 1
    [(source, count)] = job.report.samples.items()
    assert source.startswith("http://127.0.0.1:")
    assert count == 400


@pytest.mark.full
def test_a_cut_that_takes_more_memory_than_a_server_has_gives_way_to_another(
    data: Dataset, plain: Reference, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values at that cut may be larger than at the freeze point, which every server was asked about."""
    measure, refused = ServerGate.measure, list[int]()

    def measured(self: ServerGate, server: ServerClient, *, stop: int) -> Timings:
        if stop == 3:
            refused.append(stop)
            raise DoesNotFit("this request takes 9 bytes of memory, and the server has 8")
        return measure(self, server, stop=stop)

    def chosen(policy: str, **inputs: Any) -> Plan:
        plan = choose(policy, **inputs)
        return replace(plan, routes=(route_between(data.chain.start, 3, plan.cut),))

    choose = planner.make_plan
    monkeypatch.setattr(ServerGate, "measure", measured)
    monkeypatch.setattr(planner, "make_plan", chosen)
    losses, model, job = run(near, data, policy="freeze")
    assert same((losses, model), plain)
    assert refused == [3]
    best = min((row for row in job.plan.table if row.cut != 3), key=lambda row: row.cost.epoch_s)
    assert job.plan.cut == best.cut
    assert job.plan.predicted == best.cost
    assert "no server has the memory for cut 3 (this request takes 9 bytes" in job.plan.why
    assert "not used for now" not in job.plan.why


@pytest.mark.full
def test_a_policy_decides_and_the_plan_explains_itself(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    losses, model, job = run(near, data, policy="hapi")
    assert same((losses, model), plain)
    text = str(job.plan)
    assert [row.cut for row in job.plan.table] == list(range(-4, 7))
    assert "block2" in text
    assert "hapi" in text


def test_bytes_over_the_link_are_those_of_the_frames(data: Dataset, near: upriver.Near) -> None:
    before = near.meter.bytes_by_kind
    _, _, job = run(near, data, policy="freeze", epochs=1)
    [epoch_bytes] = job.report.epoch_bytes
    features = 200 * job.plan.table[-1].bytes_per_sample
    assert features <= epoch_bytes <= features * 1.25
    plain = near.meter.bytes_by_kind["direct"] - before["direct"]
    assert plain <= MICRO * 2 * data.stored_bytes  # only the canary was read directly


@pytest.mark.full
def test_evaluating_goes_through_the_server(data: Dataset, near: upriver.Near) -> None:
    held_out = data.with_stages((upriver.Decode(), upriver.CenterCrop(16), upriver.Normalize()))

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs.argmax(1) == targets).float().mean())

    results = []
    for options in ({"policy": "nosplit"}, {"policy": "freeze"}):
        model = frozen_small()
        with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, **options) as job:
            results.append((job.evaluate(held_out, accuracy), job.report.samples))
    assert results[0][0] == results[1][0]
    assert list(results[0][1]) == ["local"]
    assert "local" not in results[1][1]


def start(data: Dataset, port: int) -> EmbeddedServer:
    from upriver.rpc.client import ServerClient

    server = EmbeddedServer.start({data.store.name: data.store.uri}, threads=1, port=port)
    with ServerClient(server.url) as client:
        while not client.ready():
            pass
    return server


def kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.close()


@pytest.mark.slow
def test_killing_the_only_server_in_mid_epoch_changes_no_bit(data: Dataset, plain: Reference) -> None:
    server = start(data, free_port())
    with upriver.connect(server.url) as near:
        model = frozen_small()
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="freeze",
            prefetch=upriver.Prefetch(window_bytes=1 << 16),
        ) as job:
            losses = train(
                job,
                model,
                optimizer_of(model),
                epochs=2,
                after_step=lambda step: kill(server) if step == 5 else None,
            )
            report = job.report
    assert same((losses, model), plain)
    assert sum(report.samples.values()) == 400
    assert report.samples[server.url] >= 5 * BATCH
    assert report.samples["local"] > 0
    assert report.shares["local"] == report.samples["local"] / 400


@pytest.mark.full
def test_a_server_that_is_back_is_used_again(data: Dataset, plain: Reference) -> None:
    port = free_port()
    servers = [start(data, port)]
    with upriver.connect(servers[0].url) as near:
        model = frozen_small()
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="freeze",
            prefetch=upriver.Prefetch(window_bytes=1 << 15),
        ) as job:
            served: dict[int, int] = {}

            def disturb(step: int) -> None:
                served[step] = job.report.samples.get(servers[0].url, 0)
                if step == 4:
                    kill(servers[0])
                if step == 10:
                    servers.append(start(data, port))
                    while job.servers[0].health != "up":
                        pass

            losses = train(job, model, optimizer_of(model), epochs=2, after_step=disturb)
            report = job.report
        servers[-1].close()
    assert same((losses, model), plain)
    assert sum(report.samples.values()) == 400
    assert report.samples["local"] > 0
    assert report.samples[servers[0].url] > served[10]


@pytest.mark.full
def test_a_server_that_was_not_there_at_the_start_joins(data: Dataset, plain: Reference) -> None:
    port = free_port()
    servers: list[EmbeddedServer] = []
    with upriver.connect(f"http://127.0.0.1:{port}") as near:
        model = frozen_small()
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="freeze",
            prefetch=upriver.Prefetch(window_bytes=1 << 15),
        ) as job:
            assert "no server could be used" in job.plan.why

            def join(step: int) -> None:
                if step == 3:
                    servers.append(start(data, port))
                    while job.servers[0].health != "up":
                        pass

            losses = train(job, model, optimizer_of(model), epochs=2, after_step=join)
            report = job.report
    servers[0].close()
    assert same((losses, model), plain)
    assert report.samples["local"] > 0
    assert report.samples[f"http://127.0.0.1:{port}"] > 0


@pytest.mark.full
def test_two_servers_share_the_work_and_one_may_die(data: Dataset, plain: Reference) -> None:
    servers = [start(data, free_port()), start(data, free_port())]
    with upriver.connect(*(server.url for server in servers)) as near:
        model = frozen_small()
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="freeze",
            prefetch=upriver.Prefetch(per_request=1),
        ) as job:
            losses = train(
                job,
                model,
                optimizer_of(model),
                epochs=2,
                after_step=lambda step: kill(servers[0]) if step == 12 else None,
            )
            report = job.report
    servers[1].close()
    assert same((losses, model), plain)
    assert sum(report.samples.values()) == 400
    assert all(report.samples.get(server.url, 0) > 0 for server in servers)


@pytest.mark.full
def test_samples_arrive_once_and_in_order_through_a_server(data: Dataset, near: upriver.Near) -> None:
    with near.finetune(
        frozen_small(),
        data,
        batch_size=BATCH,
        micro_batch=MICRO,
        seed=3,
        policy="freeze",
        prefetch=upriver.Prefetch(per_request=2),
    ) as job:
        targets = torch.cat([targets for _, targets in job])
        placed = [(p.epoch, p.index, p.cut) for p in job.placed]
    order = epoch_order(200, seed=3, epoch=0, batch_size=BATCH, micro_batch=MICRO, shuffle=True)
    assert sorted(order.ids) == list(range(200))
    assert torch.equal(targets, data.targets[list(order.ids)])
    assert placed == [(0, index, job.plan.cut) for index in range(25)]


@pytest.mark.full
def test_a_bad_sample_on_the_server_is_the_error_of_the_plain_way(data: Dataset, near: upriver.Near) -> None:
    broken = photos(root_of(data), 40, folder="one-bad", bad={33: png(3)[:150]})
    seen = []
    for policy in ("nosplit", "freeze"):
        with (
            near.finetune(
                frozen_small(),
                broken,
                batch_size=8,
                micro_batch=4,
                sampling=upriver.Sampling(shuffle=False),
                policy=policy,
            ) as job,
            pytest.raises(BadSample) as caught,
        ):
            delivered = 0
            for _, targets in job:
                delivered += len(targets)
        seen.append((str(caught.value), caught.value.sample, caught.value.object_name, delivered))
    assert seen[0] == seen[1]
    assert "033.png" in seen[0][0]


@pytest.mark.full
def test_skipping_on_the_server_is_skipping_on_the_plain_way(data: Dataset, near: upriver.Near) -> None:
    broken = photos(root_of(data), 40, folder="two-bad", bad={33: png(3)[:150], 2: b"."})
    runs = [
        run(near, broken, policy=policy, sampling=upriver.Sampling(on_bad_sample="skip"), epochs=1)
        for policy in ("nosplit", "freeze")
    ]
    assert same(runs[0][:2], runs[1][:2])
    assert runs[0][2].report.skipped == runs[1][2].report.skipped
    assert len(runs[0][2].report.skipped) == 2


@pytest.mark.full
def test_an_embedded_server_computes_with_as_many_threads_as_this_side(data: Dataset) -> None:
    """MobileNetV3's bits depend on the number of threads; with equal numbers it runs near the data."""
    models = ensure_torchvision().models
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        images = data.with_stages((upriver.Decode(), upriver.RandomResizedCrop(64), upriver.Normalize()))
        weights = []
        with upriver.connect() as near:
            for policy in ("nosplit", "freeze"):
                torch.manual_seed(0)
                model = models.mobilenet_v3_small(weights=None, num_classes=5)
                upriver.freeze_to(model, "features.6")
                with near.finetune(model, images, batch_size=100, micro_batch=4, policy=policy) as job:
                    losses = train(job, model, optimizer_of(model))
                    weights.append((losses, model))
                    assert ("local" in job.report.samples) == (policy == "nosplit"), job.plan.why
        assert same(*weights)
    finally:
        torch.set_num_threads(before)


def test_another_number_of_threads_is_an_error_while_servers_take_part(
    data: Dataset, near: upriver.Near
) -> None:
    before = torch.get_num_threads()
    said = f"num_threads was '{before}' when the job started and is '{before + 1}' now"
    with near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="freeze") as job:
        steps = iter(job)
        next(steps)
        torch.set_num_threads(before + 1)
        try:
            with pytest.raises(NotExact, match=said):
                next(steps)
            with pytest.raises(NotExact, match=said):
                job.evaluate(data, lambda outputs, targets: 0.0)
        finally:
            torch.set_num_threads(before)
        next(iter(job))


def test_another_number_of_threads_is_none_of_a_job_that_is_computed_here(data: Dataset) -> None:
    before = torch.get_num_threads()
    with (
        upriver.connect() as near,
        near.finetune(frozen_small(), data, batch_size=8, micro_batch=MICRO, policy="nosplit") as job,
    ):
        torch.set_num_threads(before + 1)
        try:
            next(iter(job))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("policy", ["freeze", pytest.param("nosplit", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_job_under_another_default_device_and_type_yields_the_same(
    data: Dataset, near: upriver.Near, policy: str
) -> None:
    model = frozen_small()

    def first() -> tuple[torch.Tensor, torch.Tensor]:
        with near.finetune(model, data, batch_size=8, micro_batch=MICRO, policy=policy) as job:
            features, targets = next(iter(job))
            assert job(features).device.type == "cpu"
            assert bool(job.servers) == (policy == "freeze")
            return features, targets

    wanted = first()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            given = first()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


class SparseTail(nn.Module):
    """Mix frozen features by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3 * 16 * 16, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)
        self.register_buffer("mixing", torch.eye(8).flip(0).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sparse.mm(self.mixing, self.frozen(x.flatten(1)).t()).t())


def test_a_job_whose_tail_computes_with_sparse_tensors_is_split_before_them(
    data: Dataset, near: upriver.Near
) -> None:
    with near.finetune(SparseTail(), data, batch_size=8, micro_batch=MICRO, policy="freeze") as job:
        features, targets = next(iter(job))
        loss = nn.functional.cross_entropy(job(features), targets)
        loss.backward()
        assert job.plan.cut >= 1
        assert "computes with a tensor of layout sparse_coo" in job.plan.why
