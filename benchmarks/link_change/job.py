"""Run the training side of `link_change`: a job that goes on planning, a few steps at a time.

Accepts the orders of `training.job` and three more. ``begin`` makes a job and starts its first epoch anew.
``steps`` trains some steps, or for some seconds, and reports each. ``judge`` returns what the plans that ran
would cost over a link, and what a fresh plan would cost.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import upriver
from benchmarks.harness.training.job import LEARNING_RATE, Trainer, main
from upriver.cache import cache_folder
from upriver.cost import CostModel, CutTable, route_between
from upriver.policies import POLICIES
from upriver.types import Plan, Route

POLICY = "upriver"


class Follower(Trainer):
    """Train a job whose plan may change."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self._forgets: bool = spec["forgets"]
        self._job: Any = None
        self._running: Iterator[dict[str, Any]] = iter(())

    def answer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Execute an order."""
        match order["do"]:
            case "begin":
                return self.begin(replan=order["replan"])
            case "steps":
                return {"steps": self.some_steps(order.get("count"), order.get("seconds"))}
            case "judge":
                return self.judge(order["bandwidth"], [_shares(each) for each in order["plans"]])
            case _:
                return super().answer(order)

    def begin(self, *, replan: bool) -> dict[str, Any]:
        """Start a new job from the first weights, planned over the current link."""
        if self._job is not None:
            self._job.close()
        self._forget_profiles()
        self._job = self.near.finetune(
            self.model,
            self.data,
            batch_size=self.setting.batch_size,
            policy=POLICY,
            exact="bitwise",
            splitting=upriver.Splitting(in_background=False),
            keep=None,
            replanning=upriver.Replanning(enabled=replan),
        )
        self._running = self._epochs()
        return {"plan": told(self._job.plan), "window": self._job.window.micro_batches}

    def some_steps(self, count: int | None, seconds: float | None) -> list[dict[str, Any]]:
        """Train the next steps, epoch after epoch."""
        began, done = time.monotonic(), list[dict[str, Any]]()
        while len(done) < count if count is not None else time.monotonic() - began < (seconds or 0):
            done.append(next(self._running))
        return done

    def _epochs(self) -> Iterator[dict[str, Any]]:
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(self.start[name])
        self.model.zero_grad(set_to_none=True)
        optimizer = torch.optim.SGD(self.trained.values(), lr=LEARNING_RATE)
        job = self._job
        began, number = time.monotonic(), 0
        while True:
            for features, targets in job:
                torch.manual_seed(number)  # the tail may contain dropout
                loss = nn.functional.cross_entropy(job(features), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                number += 1
                yield {
                    "loss": loss.item(),
                    "at_s": time.monotonic() - began,
                    "plan": told(job.plan),
                    "switches": len(job.switches),
                    "bandwidth": self.near.meter.observed_bandwidth(),
                }

    def judge(self, bandwidth: float, plans: Sequence[Mapping[int, float]]) -> dict[str, Any]:
        """Return the predicted epoch time of each plan over a link of this bandwidth, by two profiles.

        ``live`` is the running job's current knowledge, with that link. ``new`` is the measurement of a new
        job over the current link.
        """
        profile, cluster = self._job._replanner._live.now()
        link = replace(cluster.link, bandwidth_bytes_per_s=bandwidth)
        live = CostModel(profile, replace(cluster, link=link), self._job._replanner.switcher.workload)
        found = {"live": self._judged(live, plans)}
        self._forget_profiles()
        with self.near.finetune(
            self.model,
            self.data,
            batch_size=self.setting.batch_size,
            policy=POLICY,
            exact="bitwise",
            splitting=upriver.Splitting(in_background=False),
            keep=None,
            replanning=upriver.Replanning(enabled=False),
        ) as job:
            table = job.plan.table
            assert isinstance(table, CutTable), "a job that found a server has a table"
            found["new"] = self._judged(table.model, plans)
        return found

    def _forget_profiles(self) -> None:
        """Make the next job measure as if no job had run before."""
        if self._forgets:
            shutil.rmtree(cache_folder() / "profiles", ignore_errors=True)

    def _judged(self, model: CostModel, plans: Sequence[Mapping[int, float]]) -> dict[str, Any]:
        fresh = POLICIES[POLICY](model.profile, model.cluster, model.workload)
        stop = len(model.profile.stages)

        def routes(shares: Mapping[int, float]) -> list[Route]:
            start = model.profile.unsplit
            return [route_between(start, cut, stop, share=share) for cut, share in shares.items()]

        return {
            "bandwidth": model.cluster.link.bandwidth_bytes_per_s,
            "fresh": told(fresh),
            "fresh_s": model.evaluate(fresh.routes).epoch_s,
            "plans_s": [model.evaluate(routes(shares)).epoch_s for shares in plans],
        }


def told(plan: Plan) -> dict[str, float]:
    """Return the plan as cut to share."""
    return {str(route.cut): route.share for route in plan.routes}


def _shares(given: Mapping[str, float]) -> dict[int, float]:
    return {int(cut): share for cut, share in given.items()}


if __name__ == "__main__":
    main(Follower)
