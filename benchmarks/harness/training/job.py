"""Run the training side of `rig.Rig`: read orders as JSON lines, and answer each with one line.

``plan`` measures and answers with every policy's choice. ``run`` and ``loader`` prepare an epoch, which
``go`` then trains. Model, capture and weights stay from order to order, and an earlier job is reused. Every
epoch is the same one and starts from the same trainable weights.

Warm-up happens before the epoch: each job has run the canary at its cut on both hosts and the tail twice. The
first steps of an epoch count, because data fetched during them would otherwise be free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import upriver
from benchmarks.harness.children import answer_orders
from benchmarks.harness.networks import build
from benchmarks.harness.training.loader import Loop
from benchmarks.harness.training.plans import MEASURED, SWEPT, Setting, label_of
from upriver.cache import cache_folder
from upriver.control.route_dealing import deal
from upriver.cost import CostModel
from upriver.finetune.calibration import time_budget
from upriver.finetune.calibration.measurement import Measurement
from upriver.finetune.prefetch.fetch_threads import LOCAL
from upriver.finetune.prefetch.sampler import EpochOrder, epoch_order
from upriver.pipeline import CenterCrop, Dataset, Decode, LoadTensor, Normalize, Resize
from upriver.policies import POLICIES
from upriver.profile import cluster_from_json, cluster_to_json, profile_from_json, profile_to_json
from upriver.types import DEFAULT_MICRO_BATCH, Plan, Route, Tier, Workload

MOST_JOBS = 16
"""Number of jobs that stay cached."""

LEARNING_RATE = 1e-4
"""Learning rate of plain SGD, the optimizer with the least work of its own. Random weights do not learn
anyway."""

STAGES = {
    "jpeg": (Decode(), Resize(256), CenterCrop(224), Normalize()),
    "tensor": (LoadTensor("npy"),),
}

Steps = Iterator[tuple[Callable[[], Any], torch.Tensor]]
"""For each training step: a function that returns the model's answer, and the targets."""


class Trainer:
    """Keep the state that lasts from order to order."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.setting = Setting(**spec["setting"])
        self.store = upriver.Store.open(spec["uri"], options=dict(spec["options"]))
        self.data: Dataset = upriver.index(self.store, "data", stages=STAGES[self.setting.stored])
        self.model = build(self.setting.network)[0].to(self.setting.client_device)
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.start = {name: value.detach().clone() for name, value in self.trained.items()}
        self.near = upriver.connect(spec["url"], token=os.environ["UPRIVER_TOKEN"])
        self.orders = {
            seed: epoch_order(
                len(self.data),
                seed=seed,
                epoch=0,
                batch_size=self.setting.batch_size,
                micro_batch=DEFAULT_MICRO_BATCH,
                shuffle=True,
            )
            for seed in (MEASURED, SWEPT)
        }
        self._jobs: dict[str, Any] = {}
        self._prepared: tuple[ExitStack, Callable[[], Steps], EpochOrder, Any] | None = None

    # ---------------------------------------------------------------------------------------- orders

    def answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Execute an order."""
        match order["do"]:
            case "publish":
                with patch.object(
                    time_budget, "SHARE", 0.0
                ):  # a micro-batch for a measurement is sent in its turn
                    self.finetune(policy="freeze").close()
                return {}
            case "plan":
                return self.plan(order["measured"])
            case "run":
                return self.prepare_run({int(cut): share for cut, share in order["shares"].items()})
            case "loader":
                return self.prepare_loop(order["workers"], order["prefetch"], order["seed"])
            case "go":
                return self.go()
            case unknown:
                raise ValueError(f"no such order: {unknown!r}")

    def finetune(self, **given: Any) -> Any:
        """Return a job of upriver on the setting, prepared before its first batch.

        It is bit for bit where both sides compute on the CPU.
        """
        return self.near.finetune(
            self.model,
            self.data,
            batch_size=self.setting.batch_size,
            exact="bitwise" if self.setting.one_device else "auto",
            splitting=upriver.Splitting(in_background=False),
            replanning=upriver.Replanning(enabled=False),
            keep=None,
            **given,
        )

    def plan(self, kept: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return every policy's choice, and the cost model's times of every cut, from one measurement.

        Args:
            kept: An earlier measurement, as ``measured`` in the answer. None measures now.
        """
        found = self._measured() if kept is None else kept
        profile = profile_from_json(json.dumps(found["profile"]))
        cluster = cluster_from_json(json.dumps(found["cluster"]))
        workload = Workload(batch_size=self.setting.batch_size, num_samples=len(self.data))
        model = CostModel(profile, cluster, workload)
        if self.setting.cap_share is not None:
            needs = model.needs[Tier.COMPUTE]
            cap = float(needs.min() + self.setting.cap_share * (needs.max() - needs.min()))
            cluster = replace(cluster, compute=replace(cluster.compute, memory_bytes=cap))
            model = CostModel(profile, cluster, workload)
        plans = {name: _told(policy(profile, cluster, workload)) for name, policy in POLICIES.items()}
        return {
            "measured": found,
            "measuring_s": found["seconds"],
            "cuts": list(model.cuts),
            "names": {str(row.cut): row.name for row in model.table()},
            "why_not": {str(cut): why for cut in model.cuts if (why := model.why_not(cut))},
            "compute_memory_bytes": cluster.compute.memory_bytes,
            "bandwidth_bytes_per_s": cluster.link.bandwidth_bytes_per_s,
            "predicted": {str(cut): asdict(model.evaluate(cut)) for cut in model.cuts},
            "plans": plans,
        }

    def _measured(self) -> dict[str, Any]:
        """Return what a job measures before its first iteration, as if no job had measured before.

        The frozen weights are in the store already, because sending them is no part of measuring.
        """
        shutil.rmtree(cache_folder() / "profiles", ignore_errors=True)
        self.finetune(policy="freeze").close()
        if self.near.measured is None:
            raise RuntimeError("the job did not measure: no server was found")
        measured: Measurement = self.near.measured
        return {
            "profile": json.loads(profile_to_json(measured.profile)),
            "cluster": json.loads(cluster_to_json(measured.cluster)),
            "seconds": dict(measured.seconds),
        }

    def prepare_run(self, shares: Mapping[int, float]) -> dict[str, Any]:
        """Prepare a job with that choice, up to its first iteration."""
        self._forget()
        label = label_of(shares)
        job = self._jobs.pop(label, None) or self.finetune(cut=dict(shares))
        self._jobs[label] = job
        for oldest in list(self._jobs)[:-MOST_JOBS]:
            self._jobs.pop(oldest).close()
        job.load_state_dict({**job.state_dict(), "epoch": 0, "step": 0})

        def steps() -> Steps:
            for features, targets in job:
                yield partial(job, features), targets

        self._prepared = ExitStack(), steps, self.orders[MEASURED], job
        return {"plan": [(route.cut, route.share) for route in job.plan.routes]}

    def prepare_loop(self, workers: int, prefetch: int, seed: int) -> dict[str, Any]:
        """Prepare an ordinary loop over a ``DataLoader``, and start its processes."""
        self._forget()
        loop = Loop(self.model, self.data, workers=workers, prefetch=prefetch)
        loop.start_workers()
        stack = ExitStack()
        stack.callback(loop.close)
        self._prepared = stack, partial(loop.steps, self.orders[seed]), self.orders[seed], None
        return {"workers": workers, "prefetch": prefetch}

    def _forget(self) -> None:
        if self._prepared is not None:
            self._prepared[0].close()
            self._prepared = None

    # ---------------------------------------------------------------------------------------- an epoch

    def go(self) -> dict[str, Any]:
        """Train the prepared epoch."""
        if self._prepared is None:
            raise RuntimeError("nothing was prepared")
        stack, steps, order, job = self._prepared
        self._prepared = None
        before = 0 if job is None else len(job.placed)
        with stack:
            found = self._train(steps(), order)
        if job is not None:
            start = self.data.chain.start
            placed = [start if where.source == LOCAL else where.cut for where in job.placed[before:]]
            found["placed"] = {str(cut): placed.count(cut) for cut in sorted(set(placed))}
            found["misplaced"] = misplaced(job.plan.routes, placed, start)
            found["exactness"] = job.exactness
        return found

    def _train(self, steps: Steps, order: EpochOrder) -> dict[str, Any]:
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(self.start[name])
        self.model.zero_grad(set_to_none=True)
        optimizer = torch.optim.SGD(self.trained.values(), lr=LEARNING_RATE)
        losses, targets = [], []
        torch.manual_seed(0)  # the tail may contain dropout
        began = time.perf_counter()
        for outputs, wanted in steps:
            loss = nn.functional.cross_entropy(outputs(), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            targets += wanted.tolist()
        seconds = time.perf_counter() - began
        ids = order.ids
        if targets != self.data.targets[list(ids)].tolist():
            raise RuntimeError("the targets are not those of the epoch's samples")
        return {
            "seconds": seconds,
            "samples": len(ids),
            "digest": digest_of(losses, ids),
            "losses": losses,
        }


def digest_of(losses: list[float], ids: tuple[int, ...]) -> str:
    """Return a digest of every bit of the losses, and of the samples in their order."""
    data = struct.pack(f"<{len(losses)}d{len(ids)}q", *losses, *ids)
    return hashlib.sha256(data).hexdigest()[:16]


def _told(plan: Plan) -> dict[str, Any]:
    return {
        "feasible": plan.feasible,
        "shares": {str(route.cut): route.share for route in plan.routes},
        "predicted": asdict(plan.predicted) if plan.predicted is not None else None,
        "why": plan.why,
    }


def misplaced(routes: Sequence[Route], placed: Sequence[int], start: int) -> str:
    """Return how the micro-batches ran elsewhere than the choice says, or an empty text if none did.

    Args:
        routes: The choice.
        placed: The cut at which each micro-batch left the storage host, in any order. ``start`` is the input.
        start: The cut that offloads nothing.
    """
    counts = Counter(placed)
    if counts == Counter(hand.cut for hand in deal(routes, len(placed), start=start)):
        return ""
    return "micro-batches by cut: " + ", ".join(f"{count} at {cut}" for cut, count in sorted(counts.items()))


def main(trainer: type[Trainer] = Trainer) -> None:
    """Execute orders until the input ends."""
    # A sweep includes more workers than this host has cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")

    def begun(spec: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        torch.set_num_threads(spec["setting"]["cores"])
        return trainer(spec).answer

    answer_orders(begun)


if __name__ == "__main__":
    main()
