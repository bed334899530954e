"""One rank of a distributed run, started by the tests as a process of its own.

``python -m tests.finetune.ddp_run FOLDER RANK NUM_RANKS SERVER_URL WRAPPED`` trains a small network the plain
way and near the data, with the wrapper around what ``WRAPPED`` names, ``model`` or ``tail``, and writes the
results to ``FOLDER/WRAPPED-RANK.json``. Numbers are written as text that keeps every bit. Where
``RECORDED_ONCE`` is 1 in the environment, both ways share what torch records.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import upriver
from tests import recording
from tests.finetune.training import STAGES, optimizer_of
from tests.program.nets import Small, frozen_small
from upriver.finetune.job import FinetuneJob

SAMPLES, BATCH, MICRO, SEED = 42, 6, 4, 7
"""42 samples on two ranks are 21 each: three full steps and a short one. No size divides another."""

PATIENCE = timedelta(seconds=120)

Call = Callable[[Any], torch.Tensor]


def options(**more: object) -> dict[str, Any]:
    return {"batch_size": BATCH, "micro_batch": MICRO, "seed": SEED, **more}


def digits(tensor: torch.Tensor) -> list[str]:
    return [float(value).hex() for value in tensor.detach().flatten()]


def train(job: FinetuneJob, call: Call, model: nn.Module) -> dict[str, Any]:
    optimizer = optimizer_of(model)
    model.train()
    losses, targets = [], []
    for features, labels in job:
        torch.manual_seed(len(losses))
        loss = nn.functional.cross_entropy(call(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        targets += labels.tolist()
    weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return {
        "losses": digits(torch.stack(losses)),
        "weights": digits(weights),
        "targets": targets,
        "sources": sorted(job.report.samples),
        "state": job.state_dict(),
    }


def wrapped(near: upriver.Near, data: upriver.Dataset, **more: object) -> dict[str, Any]:
    """Give the job the user's own wrapper around the whole model."""
    model: Small = frozen_small()
    parallel = DistributedDataParallel(model)
    with near.finetune(parallel, data, **options(**more)) as job:
        result = train(job, job, model)
        if distributed.get_rank() == 0:  # alone: judging waits for no other rank
            result["loss"] = job.evaluate(data, nn.functional.cross_entropy)
        features, _ = next(iter(job))
        try:
            job(features[:, :1])
        except upriver.errors.ConfigError:
            result["restored_after_error"] = parallel.module is model
    return result


def around_the_tail(near: upriver.Near, data: upriver.Dataset, **more: object) -> dict[str, Any]:
    """Wrap the tail; the ranks are then passed by hand."""
    model = frozen_small()
    ranks = {"rank": distributed.get_rank(), "num_ranks": distributed.get_world_size()}
    with near.finetune(model, data, **options(**ranks, **more)) as job:
        return train(job, DistributedDataParallel(job.tail), model)


def main(folder: Path, rank: int, num_ranks: int, url: str, around: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{around}",
        rank=rank,
        world_size=num_ranks,
        timeout=PATIENCE,
    )
    data = upriver.index(upriver.Store.open((folder / "store").as_uri()), "photos", stages=STAGES)
    plain, near = upriver.connect(), upriver.connect(url)
    run = wrapped if around == "model" else around_the_tail
    if os.environ.get("RECORDED_ONCE") == "1":
        recording.install()
        recording.record_once(pytest.MonkeyPatch())
    results = {
        "plain": run(plain, data, policy="nosplit"),
        "near": run(near, data, policy="freeze"),
    }
    near.close()
    (folder / f"{around}-{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
