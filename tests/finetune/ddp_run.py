"""One rank of a distributed run, started by the tests as a process of its own.

``python -m tests.finetune.ddp_run FOLDER RANK NUM_RANKS SERVER_URL WRAPPED`` trains a small network the plain
way and near the data, with the wrapper around what ``WRAPPED`` names, ``model`` or ``tail``, and writes the
results to ``FOLDER/WRAPPED-RANK.json``. Numbers are written as text that keeps every bit. With ``all`` in
place of a rank, all ranks are forked from one process, which imports for them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import upriver
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
    results = {
        "plain": run(plain, data, policy="nosplit"),
        "near": run(near, data, policy="freeze"),
    }
    near.close()
    (folder / f"{around}-{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def all_ranks(folder: Path, num_ranks: int, url: str, around: str) -> int:
    """Run each rank in a fork of this process; return how many failed."""
    importlib.import_module("torch._dynamo")  # which each wrapper needs: half of what a rank costs
    forks = []
    for rank in range(num_ranks):
        if not (fork := os.fork()):
            try:
                main(folder, rank, num_ranks, url, around)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        forks.append(fork)
    return sum(os.waitpid(fork, 0)[1] != 0 for fork in forks)


if __name__ == "__main__":
    given = (Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    if sys.argv[2] == "all":
        sys.exit(all_ranks(*given))
    main(given[0], int(sys.argv[2]), *given[1:])
