"""Check when a job leaves its plan."""

from __future__ import annotations

import pytest
import torch

from tests.examples import often
from tests.planning import alexnet, cluster
from upriver.control.plan_switching import PROOF_REST_S, PlanSwitcher
from upriver.errors import NotExact, ServerUnavailable, UpriverError
from upriver.policies import POLICIES
from upriver.profile.live_profile import LiveProfile
from upriver.types import Cluster, Plan, Profile, Workload

MBIT = 1e6 / 8
WORK = Workload(batch_size=128, num_samples=12_800)

ADAPTIVE = ["neurosurgeon", "hapi_bandwidth", "hapi", "exhaustive", "upriver"]


def machine() -> Profile:
    """Return a machine: compute takes 2 ms a sample and storage 4: no stage is free, none decides alone."""
    return alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)


class Job:
    """Decisions of a job over a link whose bandwidth a test sets; canaries end at once."""

    def __init__(
        self,
        policy: str,
        bandwidth: float,
        *,
        patience: int = 3,
        error: UpriverError | None = None,
    ) -> None:
        self.policy, self.bandwidth, self.error = policy, bandwidth, error
        self.first = self.fresh(bandwidth)
        live = LiveProfile(machine(), self.machines(bandwidth), samples=16)
        self.switcher = PlanSwitcher(policy, self.first, live, WORK, gain=0.1, patience=patience)
        self.proved: list[frozenset[int]] = []
        self.now = 0

    @staticmethod
    def machines(bandwidth: float) -> Cluster:
        return cluster(bandwidth=bandwidth, micro_batch=16)

    def fresh(self, bandwidth: float) -> Plan:
        return POLICIES[self.policy](machine(), self.machines(bandwidth), WORK)

    def iterate(self, times: int, *, prove: bool = True) -> list[int]:
        """Run iterations of a second; return those in which the job left the plan."""
        left = []
        for number in range(times):
            self.now += 1
            found = self.switcher.consider(self.bandwidth, now=self.now)
            if found.switch is not None:
                left.append(number)
            if found.prove:
                self.proved.append(found.prove)
                if prove:
                    self.switcher.proof_ended(self.error, self.now)
        return left


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_ten_iterations_after_the_link_changed_the_plan_is_a_fresh_one(policy: str) -> None:
    job = Job(policy, 200 * MBIT)
    assert job.iterate(10) == []
    job.bandwidth = 20 * MBIT
    assert len(job.iterate(10)) <= 1
    wanted = job.fresh(20 * MBIT)
    assert job.switcher.plan.routes == wanted.routes
    assert (job.switcher.plan.routes != job.first.routes) == (policy != "neurosurgeon")


@pytest.mark.parametrize("policy", often(ADAPTIVE, "neurosurgeon", "upriver"))
@pytest.mark.parametrize("mbit", [60, *(pytest.param(each, marks=pytest.mark.full) for each in (20, 200))])
def test_jitter_around_a_bandwidth_switches_nothing(policy: str, mbit: float) -> None:
    job = Job(policy, mbit * MBIT)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        job.bandwidth = mbit * MBIT * (0.8 + 0.4 * float(torch.rand((), generator=generator)))
        assert job.iterate(1) == []


def test_a_gain_must_last() -> None:
    job = Job("upriver", 200 * MBIT, patience=4)
    assert job.iterate(10) == []
    for _ in range(5):
        job.bandwidth = 130 * MBIT
        assert job.iterate(7) == []
        job.bandwidth = 200 * MBIT
        assert job.iterate(1) == []
    job.bandwidth = 130 * MBIT
    assert job.iterate(12)[0] >= 8


def test_a_link_that_is_clearly_another_one_is_heeded_as_soon_as_patience_allows() -> None:
    job = Job("upriver", 200 * MBIT, patience=4)
    assert job.iterate(10) == []
    for _ in range(5):
        job.bandwidth = 20 * MBIT
        assert job.iterate(3) == []
        job.bandwidth = 200 * MBIT
        assert job.iterate(1) == []
    job.bandwidth = 20 * MBIT
    assert job.iterate(10) == [3]
    assert job.switcher.plan.routes == job.fresh(20 * MBIT).routes


def test_a_plan_that_was_about_to_be_left_is_not_left_for_the_link_of_before() -> None:
    job = Job("upriver", 200 * MBIT)
    job.bandwidth = 130 * MBIT  # worth a change if it lasted
    assert job.iterate(7) == []
    job.bandwidth = 20 * MBIT
    assert job.iterate(10) == [2]
    assert job.switcher.plan.routes == job.fresh(20 * MBIT).routes


@pytest.mark.parametrize("policy", ["upriver", "exhaustive"])
@pytest.mark.parametrize(("before", "after"), [(200, 20), (20, 200)])
def test_what_a_meter_shows_while_a_link_changes_makes_no_plan(
    policy: str, before: float, after: float
) -> None:
    job, left = Job(policy, before * MBIT), 0
    assert job.iterate(10) == []
    for mbit in (0.6 * before + 0.4 * after, 0.4 * before + 0.6 * after, *[after] * 8):
        job.bandwidth = mbit * MBIT
        left += len(job.iterate(1))
    assert left <= 1
    assert job.switcher.plan.routes == job.fresh(after * MBIT).routes


@pytest.mark.parametrize("policy", often(ADAPTIVE, "neurosurgeon"))
@pytest.mark.parametrize("planned", [pytest.param(0.8, marks=pytest.mark.full), 1.2])
def test_jitter_is_no_other_link_even_where_the_plan_was_made_at_its_edge(
    policy: str, planned: float
) -> None:
    """Jitter may look like a slow link or a fast one for fewer than STEADY iterations."""
    job = Job(policy, planned * 200 * MBIT)
    for _ in range(20):
        job.bandwidth = (2 - planned) * 200 * MBIT
        assert job.iterate(5) == []
        job.bandwidth = planned * 200 * MBIT
        assert job.iterate(1) == []


def test_a_cut_that_servers_do_not_pass_is_never_used() -> None:
    job = Job("exhaustive", 200 * MBIT, error=NotExact("other bits"))
    job.bandwidth = 20 * MBIT
    assert job.iterate(40) == []
    assert job.switcher.plan is job.first
    assert len(job.proved) == 1, "and asked for once"
    assert job.switcher.refused == job.proved[0]


def test_the_switch_waits_for_the_canary() -> None:
    job = Job("exhaustive", 200 * MBIT)
    job.bandwidth = 20 * MBIT
    assert job.iterate(20, prove=False) == []
    assert len(job.proved) == 1, "which is asked for once"
    job.switcher.proof_ended(None, job.now)
    assert job.iterate(3) == [0]


def test_a_canary_that_could_not_run_is_asked_for_again_after_a_while() -> None:
    job = Job("exhaustive", 200 * MBIT, error=ServerUnavailable("no server"))
    job.bandwidth = 20 * MBIT
    assert job.iterate(int(PROOF_REST_S)) == [] and len(job.proved) == 1
    job.error = None
    assert job.iterate(3) != [] and job.proved == job.proved[:1] * 2
