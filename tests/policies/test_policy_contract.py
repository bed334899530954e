"""Check the contract of every policy, whatever its decision."""

from __future__ import annotations

import copy
import math
import re
from itertools import pairwise

import pytest
from hypothesis import given

from tests.planning import alexnet, cluster, clusters, profiles, workloads
from upriver.cost import candidates, evaluate
from upriver.errors import ConfigError, NoFeasibleCut
from upriver.policies import POLICIES, choose
from upriver.types import Cluster, ComputeTier, Link, Profile, StorageTier, Tier, Workload

every_policy = pytest.mark.parametrize("name", POLICIES)


@every_policy
@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_keeps_the_contract(name: str, profile: Profile, cluster: Cluster, workload: Workload) -> None:
    before = copy.deepcopy((profile, cluster, workload))
    plan = POLICIES[name](profile, cluster, workload)

    assert (profile, cluster, workload) == before, "a policy never changes what it is given"
    assert POLICIES[name](*before) == plan, "equal questions, equal answers"
    assert plan.policy == name

    rows = {row.cut: row for row in plan.table}
    assert list(rows) == list(candidates(profile)) == list(range(profile.unsplit, profile.freeze + 1))
    assert all(row.cost == evaluate(row.cut, profile, cluster, workload) for row in plan.table)
    assert all(bool(row.why_not) != row.feasible for row in plan.table)

    assert math.isclose(sum(route.share for route in plan.routes), 1.0)
    assert {route.cut for route in plan.routes} <= set(rows)
    for route in plan.routes:
        ends = [(segment.start, segment.stop) for segment in route.segments]
        assert ends[0][0] == profile.unsplit and ends[-1][1] == len(profile.stages)
        assert all(a[1] == b[0] for a, b in pairwise(ends)), "routes have no gaps"
        assert route.segments[-1].tier is Tier.COMPUTE

    if plan.feasible:
        assert all(rows[route.cut].feasible for route in plan.routes)
        assert plan.predicted == evaluate(plan.routes, profile, cluster, workload)
    else:
        assert plan.predicted is None
        assert re.search(r"(storage|compute) memory is short by [1-9]\d* bytes", plan.why)


@every_policy
def test_an_infeasible_plan_is_an_error_at_the_border(name: str) -> None:
    tiny = Cluster(
        link=Link(bandwidth_bytes_per_s=1e6),
        storage=StorageTier(memory_bytes=0),
        compute=ComputeTier(memory_bytes=1000),
    )
    with pytest.raises(NoFeasibleCut, match=r"compute memory is short by \d+ bytes .* has 1 kB"):
        choose(name, alexnet(), tiny, Workload(batch_size=8, num_samples=8))


@every_policy
def test_choose_answers_the_policys_own_plan(name: str) -> None:
    question = (alexnet(), cluster(), Workload(batch_size=128, num_samples=1024))
    assert choose(name, *question) == POLICIES[name](*question)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"one of nosplit, freeze, min, .*, upriver, .*, got 'best'"):
        choose("best", alexnet(), cluster(), Workload(batch_size=1, num_samples=1))


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        POLICIES["mine"] = POLICIES["hapi"]  # type: ignore[index]
