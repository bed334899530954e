"""Test the benchmark of latency models: its records, its report, and how it resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.measuring import Spread
from benchmarks.harness.records import Deadline, Records, TimeIsUp
from benchmarks.latency_models import __main__ as latency_models
from benchmarks.latency_models.__main__ import (
    Network,
    apart,
    fitted,
    judged,
    kinds_within,
    measure,
    predicted,
    report,
)
from upriver.profile.latency.calibration import OCCASIONS, TABLE_III
from upriver.profile.latency.op_calls import OpCall
from upriver.profile.latency.op_kinds import works_of
from upriver.profile.latency.predictor import KindError, ModelName
from upriver.program.capture.prefix import capture

KIND = "activation.relu"


def error(kind: str, model: ModelName, long: float | None) -> KindError:
    return KindError(
        kind=kind,
        model=model,
        count=20,
        rmse_us=12.34,
        mape_percent=11.0,
        count_long=0 if long is None else 7,
        mape_long_percent=long,
    )


def network(name: str, ours_ms: float) -> Network:
    return Network(
        name=name,
        nodes=10,
        measured_ms=10.0,
        runs_ms=Spread.of([9.0, 10.0, 30.0]),
        predicted_ms={"ours": ours_ms, "edge": 20.0, "device": 5.0},
        took_ms=3.0,
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Time operators by their elements, doubled on the first occasion; return the timed operators."""
    timed: list[str] = []
    occasions: dict[str, int] = {}

    class Scripted:
        def seconds(self, call: OpCall) -> float:
            timed.append(works_of(call)[0].kind)
            occasions[call.signature] = occasions.get(call.signature, 0) + 1
            return 1e-9 * call.made[0].numel * (2 if occasions[call.signature] == 1 else 1)

    monkeypatch.setattr(latency_models, "OpBenchmark", Scripted)
    monkeypatch.setattr(latency_models, "NETWORKS", {"small": 8})
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU())
    monkeypatch.setattr(latency_models, "build", lambda name: (capture(model, x := torch.randn(1, 8)), x))
    return timed


def run(records: Records, deadline: Deadline | None = None) -> None:
    measure(records, deadline or Deadline(None), kinds=[KIND], networks=["small"], quick=True)


def test_ours_is_judged_by_the_papers_device_where_operators_are_long() -> None:
    device = TABLE_III[KIND]["device"][1]
    assert kinds_within([error(KIND, "ours", device), error(KIND, "edge", 99.0)]) == {KIND: True}
    assert kinds_within([error(KIND, "ours", device + 1)]) == {KIND: False}
    assert kinds_within([error(KIND, "ours", None), error("softmax", "ours", 99.0)]) == {}


def test_what_was_not_measured_is_not_judged() -> None:
    assert judged({}, ["a", "b"]).text == "not judged"
    assert judged({"a": True}, ["a", "b"]).text == "met for a; not judged for b"
    assert (
        judged({"a": True, "b": False}, ["a", "b", "c"]).text == "missed for b; met for a; not judged for c"
    )
    assert judged({"b": True, "a": True}, ["a", "b"]).text == "met for a, b"
    text = report([error(KIND, "ours", None)], [], [])
    assert "kind by kind: not judged." in text and "lower quartiles:\nnot judged." in text


def test_a_report_says_what_is_met_and_what_is_missed() -> None:
    rows: Callable[[float], list[KindError]] = lambda ours: [  # noqa: E731
        error(KIND, model, ours if model == "ours" else 50.0) for model in ("ours", "edge", "device")
    ]
    others = ", ".join(kind for kind in TABLE_III if kind != KIND)
    good = report(rows(1.0), [network("alexnet", 11.0)], [{"load": 0.5, "commit": "abc"}])
    assert f"kind by kind: met for {KIND}; not judged for {others}." in good
    assert "lower quartiles:\nmet for alexnet; not judged for vgg16, resnet18," in good
    assert f"| {KIND} | 20 | 12.3 / 11.0 | 12.3 / 11.0 | 12.3 / 11.0 | 7 | 50.0 | 1.0 |" in good
    assert "| 4.5 / 12.6 | 1451.5 / 17.7 |" in good
    assert (
        "| alexnet | 10 | 10.0 | 10.0 (9.0 to 30.0) | 11.0 | +10.0% | 20.0 | +100.0% | 5.0 | -50.0% |" in good
    )
    bad = report(rows(99.0), [network("alexnet", 5.0), network("vgg16", 10.0)], [])
    assert f"kind by kind: missed for {KIND}; not judged for {others}." in bad
    assert "lower quartiles:\nmissed for alexnet; met for vgg16; not judged for" in bad


@pytest.mark.full
def test_what_was_measured_stands_in_records_and_is_not_measured_again(
    scripted: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    run(Records(path))
    rows = Records(path).rows
    assert set(rows) == {f"{name} {number}" for name in ("small", KIND) for number in range(OCCASIONS)}
    count = len(scripted)
    run(Records(path))
    assert len(scripted) == count > 0


@pytest.mark.full
def test_time_that_is_up_leaves_the_rest_for_the_next_start(scripted: list[str], tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    with pytest.raises(TimeIsUp):
        run(records, Deadline(1e-12))
    assert not scripted and not records.rows
    run(records)
    assert len(records.rows) == 2 * OCCASIONS


@pytest.mark.full
def test_other_configurations_are_timed_anew(scripted: list[str], tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    run(records)
    stale: dict[str, Any] = records.rows[f"{KIND} 1"]
    records.add(f"{KIND} 1", {**stale, "digest": "another"})
    count = len(scripted)
    run(records)
    assert len(scripted) == count + len(stale["seconds"])


def test_what_a_measurement_changes_by_stands_beside_what_a_model_is_off_by(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    assert apart(records, KIND) is None
    for number, seconds in enumerate(([1e-3, 2e-4, 1e-6], [1.1e-3, 4e-4, 9e-6], [3e-3, 2.1e-4, 2e-6])):
        records.add(f"{KIND} {number}", {"seconds": seconds})
    assert apart(records, KIND) == pytest.approx(0.075)  # 10 % and 5 %; short operators do not count
    text = report([error(KIND, "ours", 9.0), error("softmax", "ours", 9.0)], [], [], {KIND: 0.075})
    assert "| 1451.5 / 17.7 | 7.5 |" in text and text.count("| 7.5 |") == 1


def test_the_shortest_time_counts_and_a_network_is_predicted(scripted: list[str], tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    assert predicted(records, None, "small") is None  # type: ignore[arg-type]
    run(records)
    predictor = fitted(records, [KIND, "softmax"], quick=True)
    assert predictor.papers["edge"].coefficients == {KIND: {"flops": pytest.approx(1e-9, rel=1e-3)}}
    found = predicted(records, predictor, "small")
    assert found is not None and found.nodes == 2
    assert len(found.runs_ms.values) == OCCASIONS * latency_models.RUNS
    assert min(found.runs_ms.values) <= found.measured_ms <= found.runs_ms.median
    # the other operator, with no timed kind, was measured
    assert all(seconds > 8e-6 for seconds in found.predicted_ms.values())
