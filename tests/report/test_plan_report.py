"""Test a plan as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from tests.planning import alexnet, cluster, clusters, profiles, workloads
from upriver.policies import POLICIES
from upriver.report.plan import to_dict
from upriver.text import bytes_text, seconds_text, shortened
from upriver.types import Cluster, ComputeTier, Plan, Profile, StorageTier, Workload

EPOCH = Workload(batch_size=1000, num_samples=10_000)


def small() -> Cluster:
    """Return a cluster whose training node cannot hold an early cut."""
    return replace(cluster(concurrency=4), compute=ComputeTier(memory_bytes=1.2e9), storage=StorageTier())


def plan(name: str = "hapi", machines: Cluster | None = None) -> Plan:
    return POLICIES[name](alexnet(storage_s=6e-5), machines or cluster(), EPOCH)


def test_a_plan_prints_every_cut_and_marks_its_own() -> None:
    text = str(plan())
    lines = text.splitlines()
    table = lines[2:20]
    assert [line.split()[0 if line[0] == " " else 1] for line in table] == [str(c) for c in range(18)]
    marked = [line for line in table if line.startswith(">")]
    assert len(marked) == 1 and f" {plan().cut} " in marked[0]
    assert "stage13" in text and "36.9 kB" in text and "369 MB" in text
    assert " ".join(lines[0].split()) == "cut after B/sample B/epoch storage s network s compute s epoch s"


def test_the_columns_line_up_and_fit_a_terminal() -> None:
    lines = str(plan(machines=small())).splitlines()
    assert max(map(len, lines)) <= 110
    assert len({len(line) for line in lines[:20]}) == 1


def test_the_explanation_names_the_bottleneck_and_the_neighbours() -> None:
    chosen = plan()
    why = " ".join(str(chosen).split("\n\n")[1].split())
    rows = {row.cut: row.cost for row in chosen.table}
    best = rows[chosen.cut]
    busiest = max(best.storage_s, best.network_s, best.compute_s)
    assert f"hapi: cut {chosen.cut}," in why
    assert f"is the bottleneck, busy for {seconds_text(busiest)} s" in why
    for neighbour in (chosen.cut - 1, chosen.cut + 1):
        ratio = rows[neighbour].epoch_s / best.epoch_s
        assert f"cut {neighbour} {seconds_text(rows[neighbour].epoch_s)} s ({ratio:.2f} x)" in why
    assert f"cut 0 (not split) {seconds_text(rows[0].epoch_s)} s" in why


def test_a_faster_cut_than_the_chosen_one_is_not_hidden() -> None:
    slow = plan("freeze")
    fastest = min(slow.table, key=lambda row: row.cost.epoch_s)
    assert fastest.cut not in (0, slow.cut - 1, slow.cut)
    assert f"cut {fastest.cut} {seconds_text(fastest.cost.epoch_s)} s (0." in slow.why


@pytest.mark.parametrize("cut", [0, 3])
def test_cuts_that_do_not_fit_are_marked_and_give_their_reason(cut: int) -> None:
    text = str(plan(machines=small()))
    row = next(line for line in text.splitlines() if line.split()[:2] == ["x", str(cut)])
    assert row.startswith("x")
    assert f"x cut {cut}: compute memory is short by" in text


def test_an_infeasible_plan_marks_nothing_and_says_what_is_short() -> None:
    text = str(plan("nosplit", small()))
    assert not any(line.startswith(">") for line in text.splitlines())
    assert "nosplit: cut 0, which pushes nothing down, does not fit: compute memory is short by" in text


def test_the_json_form_is_the_documented_one() -> None:
    document = json.loads(json.dumps(to_dict(plan()), allow_nan=False))
    assert list(document) == ["policy", "feasible", "cut", "shares", "routes", "predicted", "table"]
    assert (document["policy"], document["feasible"], document["cut"]) == ("hapi", True, plan().cut)
    assert document["shares"] == {str(plan().cut): 1.0}
    assert document["routes"] == [
        {
            "share": 1.0,
            "segments": [
                {"tier": "storage", "start": 0, "stop": plan().cut},
                {"tier": "compute", "start": plan().cut, "stop": 21},
            ],
        }
    ]
    assert set(document["predicted"]) == {"epoch_s", "storage_s", "network_s", "compute_s", "bytes"}
    columns = {"cut", "feasible", "why_not", "bytes", "storage_s", "network_s", "compute_s", "epoch_s"}
    assert [set(row) for row in document["table"]] == [columns] * 18
    chosen = next(row for row in document["table"] if row["cut"] == document["cut"])
    assert chosen["epoch_s"] == document["predicted"]["epoch_s"]


@pytest.mark.parametrize("name", POLICIES)
@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_every_plan_prints_and_is_json(
    name: str, profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    answer = POLICIES[name](profile, cluster, workload)
    assert max(map(len, str(answer).splitlines())) <= 110
    document = json.loads(json.dumps(to_dict(answer), allow_nan=False))
    assert (document["predicted"] is None) == (not answer.feasible)
    assert len(document["table"]) == len(answer.table)


def test_a_plan_with_nothing_to_compare_is_its_reason_alone() -> None:
    bare = replace(plan(), table=(), predicted=None, why="the model could not be captured")
    assert str(bare) == "hapi: the model could not be captured"
    assert to_dict(bare)["table"] == []


def test_numbers_read_well() -> None:
    assert [bytes_text(n) for n in (0, 999, 999.9, 36864, 602112, 36_906_612, 1.5e18)] == [
        *("0 B", "999 B", "1 kB", "36.9 kB", "602 kB", "36.9 MB", "1.5e+03 PB")
    ]
    assert [seconds_text(s) for s in (0, 1e-9, 0.0123, 4.567, 45.67, 7890.4)] == [
        *("0", "<0.001", "0.012", "4.57", "45.7", "7890")
    ]
    assert shortened("features.denseblock3.denselayer12", 20) == "..lock3.denselayer12"
    assert shortened("layer4.0", 20) == "layer4.0"
