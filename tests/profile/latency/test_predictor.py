"""Check latency models: fits recover known rates, predictions stay above zero, models survive as files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from upriver.errors import ConfigError, ProgramError
from upriver.profile.latency import serialization
from upriver.profile.latency.benchmark_configs import sample
from upriver.profile.latency.op_benchmark import Timing
from upriver.profile.latency.op_kinds import OpWork, works, works_of
from upriver.profile.latency.predictor import (
    KindError,
    OwnModel,
    PaperModel,
    Predictor,
    measure_unknown,
    nnls_fit,
    place_of,
)
from upriver.profile.latency.regression import FEWEST, Correction, OperatorModel, TimedWork
from upriver.profile.latency.serialization import keep, kept, predictor_from_json, predictor_to_json
from upriver.program.capture.prefix import capture
from upriver.program.graph.schema import Graph

BRIEF = Timing(runs=3)

KINDS = ("conv", "matmul", "bias", "elementwise.add", "activation.relu")


def seconds_of(work: OpWork) -> float:
    """Return seconds on a device that computes and moves at fixed rates, with a step where a cache ends."""
    facts = work.facts
    moved = facts["bytes_in"] + facts["bytes_out"] + facts["weight_bytes"]
    slower = 2.0 if moved > 1e6 else 1.0
    return 2e-6 + 2e-11 * work.features["flops"] + 1e-10 * moved * slower


def timed(kind: str, count: int = 40, seed: int = 0) -> list[TimedWork]:
    found = [works_of(call)[0] for call in sample(kind, count, seed)]
    return [TimedWork(work, seconds_of(work)) for work in found]


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    measured = [each for kind in KINDS for each in timed(kind)]
    error = KindError(
        kind="conv",
        model="ours",
        count=8,
        rmse_us=1.5,
        mape_percent=3.0,
        count_long=0,
        mape_long_percent=None,
    )
    return Predictor(
        place=place_of("cpu"),
        fitted_at="2026-01-02T03:04:05+00:00",
        configurations=len(measured),
        papers={"edge": PaperModel.fit(measured, "edge"), "device": PaperModel.fit(measured, "device")},
        ours=OwnModel.fit(measured),
        errors=(error,),
    )


def graph_with(*layers: nn.Module) -> Graph:
    return capture(nn.Sequential(nn.Linear(6, 6), *layers), torch.randn(4, 6)).graph


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


# ---------------------------------------------------------------------------------------------- fits


def test_known_coefficients_are_found_whatever_their_size() -> None:
    chance = np.random.default_rng(0)
    rows = chance.uniform(0, 1, (60, 4)) * [1e12, 1e6, 1e3, 1]
    wanted = np.array([2e-12, 0.0, 3e-6, 5e-5])
    assert nnls_fit(rows, rows @ wanted) == pytest.approx(wanted, rel=1e-6, abs=1e-15)


columns = arrays.arrays(np.float64, (6, 2), elements=st.floats(0, 100, width=32))


@given(columns, arrays.arrays(np.float64, 6, elements=st.floats(0, 100, width=32)), st.data())
def test_no_other_coefficients_that_are_not_negative_come_nearer(
    rows: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    found = nnls_fit(rows, seconds)
    assert (found >= 0).all()
    best = np.square(rows @ found - seconds).sum()
    other = np.array(data.draw(st.tuples(st.floats(0, 10), st.floats(0, 10))))
    for tried in (other, found * 0.9, found * 1.1, np.maximum(0, found + other - 5)):
        assert best <= np.square(rows @ tried - seconds).sum() * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ([[1.0], [2.0]], [1.0]),
        ([1.0, 2.0], [1.0, 2.0]),
        ([[-1.0], [2.0]], [1.0, 2.0]),
        ([[1.0], [2.0]], [1.0, -2.0]),
        ([[1.0], [math.nan]], [1.0, 2.0]),
        ([[1.0], [2.0]], [1.0, math.inf]),
    ],
)
def test_what_cannot_be_fitted_is_refused(rows: list[Any], seconds: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"rows|seconds"):
        nnls_fit(np.array(rows), np.array(seconds))


def test_without_scipy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.extras.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"upriver\[calibrate\]"):
        nnls_fit(np.ones((2, 1)), np.ones(2))


# ---------------------------------------------------------------------------------- LoADPart's models


def test_the_papers_model_recovers_what_goes_by_its_features() -> None:
    found = [TimedWork(each.work, 3e-9 * each.work.features["flops"]) for each in timed("elementwise.add")]
    model = PaperModel.fit(found, "device")
    assert model.coefficients == {"elementwise.add": {"flops": pytest.approx(3e-9)}}


def test_no_features_take_no_time_in_the_papers_model(predictor: Predictor) -> None:
    for kind in KINDS:
        work = timed(kind, 1)[0].work
        nothing = replace(work, features=dict.fromkeys(work.features, 0.0))
        assert predictor.work_seconds([nothing], "edge") == [0.0]
        assert predictor.work_seconds([work], "edge") != [0.0]


@pytest.mark.parametrize("name", ["flops", "h_in_s_f", "c_out_s_f", "s_f"])
def test_more_never_takes_less_in_the_papers_model(predictor: Predictor, name: str) -> None:
    work = timed("conv", 1)[0].work
    more = replace(work, features={**work.features, name: 2 * work.features[name]})
    before, after = predictor.work_seconds([work, more], "device")
    assert before is not None and after is not None and before <= after


def test_kinds_of_which_few_were_timed_have_no_model() -> None:
    few = timed("conv", FEWEST - 1) + timed("bias", FEWEST)
    assert set(PaperModel.fit(few, "edge").coefficients) == set(OwnModel.fit(few).lines) == {"bias"}


# ---------------------------------------------------------------------------------------- our models


def test_ours_is_near_for_configurations_that_it_has_not_seen(predictor: Predictor) -> None:
    for kind in KINDS:
        unseen = timed(kind, 30, seed=1)
        found = predictor.work_seconds([each.work for each in unseen])
        off = [abs(f / each.seconds - 1) for f, each in zip(found, unseen, strict=True) if f is not None]
        assert len(off) == len(unseen) and sum(off) / len(off) < 0.25, kind


def test_ours_takes_some_time_for_every_call_but_a_bias_that_is_added_on_the_way(
    predictor: Predictor,
) -> None:
    [product, bias] = next(parts for parts in works(graph_with()) if parts)
    tiny = replace(product, facts=dict.fromkeys(product.facts, 0.0))
    found = predictor.work_seconds([product, bias, tiny])
    assert found[0] is not None and found[2] is not None
    assert found[0] > 0 and found[1] == 0 and found[2] > 0


@given(st.integers(3, 12), st.integers(1, 3), st.data())
def test_a_correction_is_never_worse_on_its_own_points(count: int, width: int, data: st.DataObject) -> None:
    facts = data.draw(arrays.arrays(np.float64, (count, width), elements=st.integers(0, 1000)))
    left = data.draw(arrays.arrays(np.float64, count, elements=st.floats(-2, 2, width=32)))
    names = [f"fact{number}" for number in range(width)]
    correction = Correction.fit(names, facts, left)
    if correction is None:
        assert (facts == facts[0]).all()
        return
    chosen = facts[:, [names.index(name) for name in correction.names]]
    after = left - correction(chosen)
    assert np.square(after).sum() <= np.square(left).sum() + 1e-9


def test_a_correction_comes_down_to_nothing_far_away_and_stays_within_what_was_seen() -> None:
    chance = np.random.default_rng(0)
    facts = chance.integers(1, 1000, (30, 2)).astype(np.float64)
    left = np.sin(np.log2(facts[:, 0])) + 1
    correction = Correction.fit(["one", "two"], facts, left)
    assert correction is not None
    chosen = [["one", "two"].index(name) for name in correction.names]
    assert np.abs(correction((facts * 1e80)[:, chosen])).max() < 1e-3
    anywhere = correction(chance.uniform(0, 1e4, (500, len(chosen))))
    assert np.abs(anywhere).max() <= np.abs(left).max()


def test_the_correction_is_there_only_where_it_helps() -> None:
    straight = [TimedWork(each.work, 1e-6 + 1e-9 * each.work.facts["bytes_out"]) for each in timed("conv")]
    assert OperatorModel.fit("conv", straight).error(straight) < 0.01
    stepped = timed("elementwise.add", 80)
    plain, chosen = (
        OperatorModel.plain("elementwise.add", stepped),
        OperatorModel.fit("elementwise.add", stepped),
    )
    assert chosen.error(stepped) <= plain.error(stepped)


# --------------------------------------------------------------------------------------------- graphs


def test_nodes_and_stages_of_a_network(predictor: Predictor) -> None:
    graph = graph_with(nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    nodes = predictor.node_seconds(graph)
    assert len(nodes) == len(graph.nodes)
    for parts, seconds in zip(works(graph), nodes, strict=True):
        assert seconds is not None and (seconds > 0) == bool(parts)
    stages = predictor.stage_seconds(graph)
    assert len(stages) == len(graph.stages)
    assert sum(stages) == pytest.approx(sum(seconds for seconds in nodes if seconds is not None))
    for model in ("edge", "device"):
        assert sum(predictor.stage_seconds(graph, model=model)) > 0  # type: ignore[arg-type]


def test_an_unknown_operator_is_measured_and_never_nothing(predictor: Predictor) -> None:
    graph = graph_with(Sum(), nn.ReLU())
    assert predictor.node_seconds(graph).count(None) == 1
    with pytest.raises(ConfigError, match=r"'cumsum.default' \(node 1\); measure it"):
        predictor.stage_seconds(graph)
    found = measure_unknown(graph, predictor, timing=BRIEF)
    [(signature, seconds)] = found.items()
    assert seconds > 0 and list(predictor.unknown(graph)) == [signature]
    with_it = predictor.stage_seconds(graph, measured={signature: 5.0})
    assert sum(with_it) == pytest.approx(5, rel=1e-3) and sum(with_it) > 5
    assert measure_unknown(graph_with(nn.ReLU()), predictor) == {}


@pytest.mark.full
def test_an_operator_of_another_type_is_unknown(predictor: Predictor) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16().relu()

    unknown = predictor.unknown(graph_with(Half()))
    assert {call.name for call in unknown.values()} >= {"relu"}
    found = measure_unknown(graph_with(Half()), predictor, timing=BRIEF)
    assert found.keys() == unknown.keys() and min(found.values()) > 0


def test_an_operator_that_refuses_random_inputs_is_named(predictor: Predictor) -> None:
    graph = graph_with(Sum())
    node = graph.nodes[1]
    broken = msgspec.structs.replace(node, args=[node.args[0], 7])
    damaged = msgspec.structs.replace(graph, nodes=[*graph.nodes[:1], broken, *graph.nodes[2:]])
    with pytest.raises(ProgramError, match=r"cumsum\.default cannot be timed alone"):
        measure_unknown(damaged, predictor)


def test_what_is_no_model_is_refused(predictor: Predictor) -> None:
    with pytest.raises(ConfigError, match="ours, edge, device, got 'theirs'"):
        predictor.node_seconds(graph_with(), model="theirs")  # type: ignore[arg-type]


@pytest.mark.full
def test_timing_leaves_chance_as_it_was(predictor: Predictor) -> None:
    graph, before = graph_with(Sum()), torch.get_rng_state()
    measure_unknown(graph, predictor, timing=BRIEF)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------- files


def test_models_come_back_from_a_file_as_they_were(predictor: Predictor) -> None:
    text = predictor_to_json(predictor)
    again = predictor_from_json(text)
    assert predictor_to_json(again) == text
    assert (again.place, again.errors, again.papers) == (
        predictor.place,
        predictor.errors,
        predictor.papers,
    )
    unseen = [each.work for kind in KINDS for each in timed(kind, 10, seed=2)]
    assert again.work_seconds(unseen) == pytest.approx(predictor.work_seconds(unseen), rel=1e-9)


def corrected(document: dict[str, Any]) -> dict[str, Any]:
    """Return a kind that has a correction."""
    found: dict[str, Any] = next(line for line in document["ours"].values() if line["correction"])
    return found


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: d.update(schema="upriver.latency/2"), "schema"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d.pop("ours"), "ours"),
        (lambda d: d["place"].pop("host"), "host"),
        (lambda d: d["papers"].pop("edge"), "papers.edge is missing"),
        (lambda d: d["papers"].update(cloud={}), "cloud"),
        (lambda d: d["papers"]["edge"]["conv"].update(flops=math.nan), "papers.edge.conv.flops"),
        (lambda d: d["papers"]["edge"]["conv"].update(flops=-1e-9), "papers.edge.conv.flops"),
        (lambda d: d["papers"]["edge"]["conv"].update(luck=1.0), "papers.edge.conv: 'luck'"),
        (lambda d: d["ours"]["conv"]["factors"].update(luck=1.0), "ours.conv.factors: 'luck'"),
        (lambda d: d["ours"]["conv"]["factors"].update(bytes_in=math.inf), "ours.conv.factors.bytes_in"),
        (lambda d: d["ours"]["conv"].update(fixed_s=0.0), "ours.conv.fixed_s"),
        (lambda d: d["ours"]["conv"].update(fixed_s=10**400), "fixed_s"),
        (lambda d: corrected(d)["correction"]["names"].append("luck"), "'luck' is none of"),
        (lambda d: corrected(d)["correction"]["points"].pop(), "points of"),
        (lambda d: corrected(d)["correction"]["points"][0].pop(), "points of"),
        (lambda d: corrected(d)["correction"]["reach"].__setitem__(0, 0.0), "reach"),
        (lambda d: d["errors"][0].update(model="theirs"), "model"),
    ],
)
def test_a_file_that_is_damaged_is_refused_by_name(predictor: Predictor, damage: Any, named: str) -> None:
    document = json.loads(predictor_to_json(predictor))
    damage(document)
    with pytest.raises(ConfigError, match=r"not a valid upriver.latency/1 file: ") as caught:
        predictor_from_json(json.dumps(document))
    assert named in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"null", b"[" * 100_000])
def test_what_is_no_document_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="not a valid"):
        predictor_from_json(text)


def test_what_was_kept_is_found_again_on_the_same_device(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    assert kept("cpu") is None
    path = keep(predictor)
    found = kept("cpu")
    assert found is not None and predictor_to_json(found) == predictor_to_json(predictor)
    keep(predictor)
    assert list((tmp_path / "latency").iterdir()) == [path]
    other = replace(predictor.place, threads=predictor.place.threads + 1)
    monkeypatch.setattr(serialization, "place_of", lambda device: other)
    assert kept("cpu") is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_what_was_kept_and_is_damaged_is_as_good_as_nothing(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    keep(predictor).write_bytes(damage)
    assert kept("cpu") is None
    keep(predictor)
    assert kept("cpu") is not None
    monkeypatch.setattr("upriver.cache.MAX_FILE_BYTES", 10)
    assert kept("cpu") is None


def test_a_folder_that_cannot_be_written_is_told(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", os.devnull)
    assert kept("cpu") is None
    with pytest.raises(OSError):
        keep(predictor)
