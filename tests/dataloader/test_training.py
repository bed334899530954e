"""Check training with and without offloading: every loss and every weight the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dataloader.toy_datasets import same
from upriver.control import share_controller
from upriver.dataloader import AutoOffload, DataLoader, Offloading, dataset
from upriver.rpc.local_server import EmbeddedServer

EPOCHS = 2
COUNT = 400


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as started:
        yield started


def trained(**arguments: Any) -> tuple[DataLoader, list[torch.Tensor], list[torch.Tensor]]:
    """Return the loader, the losses, and the final weights."""
    torch.manual_seed(17)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = dataset("tests.dataloader.toy_datasets:Images", count=COUNT)
    loader = DataLoader(data, batch_size=4, shuffle=True, **arguments)
    losses = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return loader, losses, [parameter.detach() for parameter in net.parameters()]


@pytest.fixture(scope="module")
def reference() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return trained()[1:]


@pytest.mark.parametrize(
    "offload",
    [
        "always",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("auto", Offloading(candidate="p2", ratio=0.3))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.full), 2])
def test_the_same_losses(worker: EmbeddedServer, reference: Any, offload: Any, num_workers: int) -> None:
    loader, losses, weights = trained(workers=[worker.url], offload=offload, num_workers=num_workers)
    assert len(losses) == EPOCHS * COUNT / 4 and len(set(map(float, losses))) > EPOCHS
    for one, other in zip([*losses, *weights], [*reference[0], *reference[1]], strict=True):
        assert torch.equal(one, other)
    assert not loader.report.why_not


def promise_too_much(loader: DataLoader) -> None:
    """Set measurements in which the worker makes ten times what this machine makes, in MB/s."""
    found = loader._measured
    found.gthp, found.lthp, found.pcycle, found.pseconds = 1.0, 0.002, 1.0, 1.0
    found.rthp = {"p1": 0.0002, "p2": 0.02, "p3": 0.0002}
    found.ocycles = dict.fromkeys(found.rthp, 0.01)


@pytest.mark.full
def test_a_ratio_that_is_steered_changes_no_batch(
    worker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_controller, "WINDOW_S", 0.05)

    def job(**arguments: Any) -> tuple[list[Any], set[float], list[str]]:
        torch.manual_seed(3)
        data = dataset("tests.dataloader.toy_datasets:Slow", count=1200)
        loader = DataLoader(data, batch_size=2, seed=5, shuffle=True, **arguments)
        if "workers" in arguments:  # by a busy machine's measurements it may be best to offload nothing
            promise_too_much(loader)
        batches, ratios, steered = [], set(), []
        for batch in loader:
            batches.append(batch)
            if loader.offloading is not None:
                ratios.add(loader.offloading.ratio)
            if "steered to" in loader.why:  # in the end another candidate may have its turn
                steered.append(loader.why)
        return batches, ratios, steered

    batches, ratios, steered = job(workers=[worker.url], num_workers=2)
    assert len(ratios) > 1 and steered
    assert same(batches, job(num_workers=2)[0])


@pytest.mark.parametrize(
    ("num_workers", "policy"),
    [
        (0, "upriver"),
        pytest.param(1, "upriver", marks=pytest.mark.full),
        pytest.param(1, "fastflow", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_job_that_waits_for_its_samples_has_some_made_elsewhere(
    worker: EmbeddedServer, num_workers: int, policy: str
) -> None:
    """Each sample takes a hundredth of a second, and the loop ignores it; a request for four is faster."""
    data = dataset("tests.dataloader.toy_datasets:Slow", count=1500)
    loader = DataLoader(
        data, batch_size=4, workers=[worker.url], num_workers=num_workers, offload=AutoOffload(policy)
    )
    ids, offloaded = [], []
    for raw, _ in loader:
        ids.append(raw[:, 0].tolist())
        offloaded.append(loader.offloading)  # to offload nothing has its turn, too, maybe the last one
    assert len(ids) == 375
    assert loader.report.made[worker.url] > 0
    assert any(offloaded), loader.why
    assert sum(loader.report.made.values()) == 1500
    assert "MB/s" in loader.why
