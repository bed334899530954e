"""Check that servers that join or leave during a job change the storage tier's capacity, and so the plan."""

from __future__ import annotations

import pytest

from tests.planning import alexnet, cluster
from upriver.control.plan_switching import PlanSwitcher
from upriver.policies import POLICIES
from upriver.profile.live_profile import LiveProfile
from upriver.types import Plan, Profile, Workload

BANDWIDTH = 2.5e6
WORK = Workload(batch_size=128, num_samples=12_800)


def machine() -> Profile:
    """Return a machine whose storage is the busiest at the freeze point once half of the storage is gone."""
    return alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)


def fresh(load: float) -> Plan:
    return POLICIES["upriver"](machine(), cluster(bandwidth=BANDWIDTH, micro_batch=16, load=load), WORK)


class Job:
    def __init__(self) -> None:
        live = LiveProfile(machine(), cluster(bandwidth=BANDWIDTH, micro_batch=16), samples=16)
        self.switcher = PlanSwitcher("upriver", fresh(1.0), live, WORK, gain=0.05, patience=3)

    def plan_after(self, iterations: int, capacity: float) -> Plan:
        for now in range(iterations):
            self.switcher.consider(BANDWIDTH, capacity=capacity, now=now)
            self.switcher.proof_ended(None, now)
        return self.switcher.plan


@pytest.mark.parametrize("left", [0.25, 0.1])
def test_servers_that_go_and_come_back_change_the_plan_to_what_a_fresh_one_would_be(left: float) -> None:
    assert fresh(1 / left).routes != fresh(1.0).routes, "or this shows nothing"
    job = Job()
    assert job.plan_after(20, left).routes == fresh(1 / left).routes
    assert job.plan_after(20, 1.0).routes == fresh(1.0).routes


def test_with_no_server_left_the_plan_waits_for_one() -> None:
    job = Job()
    assert job.plan_after(20, 0.0).routes == fresh(1.0).routes
