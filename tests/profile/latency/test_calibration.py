"""Check calibration: its configurations, the timing of each, and the result of a small one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.examples import some
from upriver.errors import ConfigError
from upriver.profile.latency.benchmark_configs import RANGES, sample
from upriver.profile.latency.calibration import (
    TABLE_III,
    MeasuredConfig,
    calibrate,
    errors,
    fit,
    measure,
    plan,
)
from upriver.profile.latency.config_sampling import MOST_ELEMENTS, MOST_MACS, MOST_WEIGHTS
from upriver.profile.latency.op_benchmark import OpBenchmark, Timing
from upriver.profile.latency.op_kinds import OpWork, works_of
from upriver.profile.latency.predictor import place_of
from upriver.profile.latency.regression import FEWEST

BRIEF = Timing(runs=3)


@pytest.fixture(scope="module")
def bench() -> OpBenchmark:
    return OpBenchmark("cpu")


@pytest.mark.parametrize("kind", some(6, RANGES))
def test_each_kind_has_configurations_that_can_be_timed(kind: str, bench: OpBenchmark) -> None:
    calls = sample(kind, FEWEST)
    assert len({call.signature for call in calls}) == FEWEST
    for call in calls:
        found = works_of(call)
        assert found[0].kind == kind
        assert found[0].features["flops"] <= MOST_MACS
        given = [spec.numel for name, spec in call.specs.items() if name not in call.fixed]
        weights = [call.specs[name].numel for name in call.fixed]
        assert max(given) <= MOST_ELEMENTS and max(weights, default=0) <= MOST_WEIGHTS
    assert bench.seconds(min(calls, key=lambda call: works_of(call)[0].features["flops"]), BRIEF) > 0


def test_what_the_paper_reports_is_calibrated() -> None:
    assert set(TABLE_III) <= set(RANGES)


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[str]:
        return [call.signature for call in sample("conv", 5, seed)]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(("kind", "count"), [("cumsum", 3), ("conv", 0)])
def test_what_cannot_be_drawn_is_refused(kind: str, count: int) -> None:
    with pytest.raises(ConfigError, match=r"kind must be one of conv|count"):
        sample(kind, count)


def test_in_place_calls_begin_anew(bench: OpBenchmark) -> None:
    [call] = [call for call in sample("activation.relu", 20) if call.in_place][:1]
    assert bench.seconds(call, BRIEF) > 0


def test_kinds_take_turns_and_a_fifth_of_each_is_held_out() -> None:
    planned = plan(quick=True, kinds=["activation.relu", "copy.cat"])
    kinds = [works_of(call)[0].kind for call, _ in planned]
    assert kinds[:4] == ["activation.relu", "copy.cat"] * 2
    for kind in set(kinds):
        held_out = [held for (_, held), found in zip(planned, kinds, strict=True) if found == kind]
        assert sum(held_out) == len(held_out) // 5 > 0


def test_each_configuration_is_timed_again_and_the_shortest_time_counts() -> None:
    class Scripted(OpBenchmark):
        def __init__(self) -> None:
            self.given = iter([3.0, 5.0, 7.0, 4.0, 1.0, 8.0, 3.5, 2.0, 6.0])

        def seconds(self, call: object, timing: Timing | None = None) -> float:
            return next(self.given)

    planned = plan(quick=True, kinds=["copy.flip"])[:3]
    seen: list[tuple[str, int, int]] = []
    found = measure(planned, Scripted(), 1.0, progress=lambda *told: seen.append(told))
    assert [each.seconds for each in found] == [3.0, 1.0, 6.0]
    assert seen == [("copy.flip", number, 9) for number in range(1, 10)]


@pytest.mark.full
def test_a_small_calibration() -> None:
    done: list[int] = []
    kinds = ["activation.relu", "copy.cat"]
    predictor = calibrate(
        minutes=5, quick=True, kinds=kinds, timing=BRIEF, progress=lambda kind, n, total: done.append(n)
    )
    assert predictor.place == place_of("cpu")
    assert set(predictor.ours.lines) == set(predictor.papers["edge"].coefficients) == set(kinds)
    assert [(error.kind, error.model) for error in predictor.errors] == [
        (kind, model) for kind in kinds for model in ("ours", "edge", "device")
    ]
    for error in predictor.errors:
        assert error.count > 0 and math.isfinite(error.rmse_us) and math.isfinite(error.mape_percent)
        assert (error.mape_long_percent is None) == (error.count_long == 0)
    assert done == list(range(1, len(done) + 1))
    assert predictor.configurations < len(done) / 2


def test_no_time_gives_no_models() -> None:
    with pytest.raises(ConfigError, match="give it more minutes"):
        calibrate(minutes=1e-12, quick=True, kinds=["copy.flip"], timing=BRIEF)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"minutes": 0}, "minutes"),
        ({"minutes": math.nan}, "minutes"),
        ({"device": "abacus"}, "abacus"),
        ({"kinds": ["cumsum"]}, "kind must be one of"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        calibrate(**arguments)  # type: ignore[arg-type]


def relu(elements: int, seconds: float, *, held_out: bool = False, works: int = 1) -> MeasuredConfig:
    facts = {
        "elements": float(elements),
        "bytes_in": 4.0 * elements,
        "bytes_out": 4.0 * elements,
        "weight_bytes": 0.0,
        "in_place": 0.0,
        "strided": 0.0,
        "run": float(elements),
    }
    work = OpWork(kind="activation.relu", features={"flops": float(elements)}, facts=facts)
    return MeasuredConfig(works=(work,) * works, seconds=seconds, held_out=held_out)


def test_errors_are_those_of_what_was_held_out() -> None:
    fitted = [relu(1000 * n, 1e-6 * n) for n in range(1, 30)]
    # 10 % and 20 % below the predictions, the second one long
    held_out = [relu(9000, 10e-6, held_out=True), relu(80000, 100e-6, held_out=True)]
    predictor = fit([*fitted, *held_out], place_of("cpu"))
    by_model = {error.model: error for error in predictor.errors}
    edge = by_model["edge"]
    assert (edge.count, edge.count_long) == (2, 1)
    assert edge.mape_percent == pytest.approx(15, abs=0.1)
    assert edge.mape_long_percent == pytest.approx(20, abs=0.1)
    assert edge.rmse_us == pytest.approx(math.sqrt((1**2 + 20**2) / 2), abs=0.1)
    assert predictor.configurations == len(fitted)
    assert errors(predictor, []) == []


def test_the_papers_models_see_no_call_that_adds_a_bias_on_the_way() -> None:
    alone = [relu(1000 * n, 1e-6 * n) for n in range(1, 30)]
    beside = [relu(1000 * n, 5e-6 * n, works=2) for n in range(1, 30)]
    predictor = fit([*alone, *beside], place_of("cpu"))
    assert predictor.papers["edge"].coefficients["activation.relu"]["flops"] == pytest.approx(1e-9)


def test_a_bench_takes_a_device_that_is_there() -> None:
    with pytest.raises(ConfigError, match="abacus"):
        OpBenchmark("abacus")
    assert OpBenchmark(torch.device("cpu")).device.type == "cpu"
