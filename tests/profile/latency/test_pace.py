"""Check the rates that cold starts get from a calibrated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from upriver.coldstart.roofline import pace_of
from upriver.profile.latency.benchmark_configs import sample
from upriver.profile.latency.op_kinds import OpWork, works_of
from upriver.profile.latency.pace import pace_from
from upriver.profile.latency.predictor import Predictor, place_of
from upriver.profile.latency.regression import OwnModel, PaperModel, TimedWork
from upriver.profile.latency.serialization import keep

MACS_PER_S, BYTES_PER_S = 4e10, 8e9


class Fixed:
    """A device that computes, or reads, at fixed rates."""

    def __init__(self, *unknown: str) -> None:
        self.unknown = unknown

    def work_seconds(self, works: Sequence[OpWork]) -> list[float | None]:
        """Return the seconds of each work."""
        return [None if work.kind in self.unknown else seconds_of(work) for work in works]


def seconds_of(work: OpWork) -> float:
    if work.kind == "conv":
        return work.features["flops"] / MACS_PER_S
    return sum(work.facts[name] for name in ("bytes_in", "bytes_out", "weight_bytes")) / BYTES_PER_S


def test_a_product_and_its_sum_are_two_operations() -> None:
    device: Any = Fixed()
    pace = pace_from(device)
    assert pace is not None
    assert pace.flops_per_s == pytest.approx(2 * MACS_PER_S)
    assert pace.moved_bytes_per_s == pytest.approx(BYTES_PER_S)


@pytest.mark.parametrize("kind", ["conv", "matmul"])
def test_models_that_do_not_tell_give_none(kind: str) -> None:
    device: Any = Fixed(kind)
    assert pace_from(device) is None


def predictor(*kinds: str) -> Predictor:
    works = [works_of(call)[0] for kind in kinds for call in sample(kind, 40, 0)]
    timed = [TimedWork(work, seconds_of(work)) for work in works]
    return Predictor(
        place=place_of("cpu"),
        fitted_at="2026-01-02T03:04:05+00:00",
        configurations=len(timed),
        papers={"edge": PaperModel.fit(timed, "edge"), "device": PaperModel.fit(timed, "device")},
        ours=OwnModel.fit(timed),
    )


def test_a_load_finds_what_was_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    usual, cpu = pace_of(torch.device("cpu")), torch.device("cpu")
    keep(predictor("conv"))
    assert pace_of(cpu) == usual
    found = predictor("conv", "matmul")
    keep(replace(found, place=replace(found.place, threads=found.place.threads + 1)))
    assert pace_of(cpu) == usual
    keep(found)
    kept = pace_of(cpu)
    assert kept == pace_from(found) != usual
    assert kept.flops_per_s == pytest.approx(2 * MACS_PER_S, rel=0.2)
    assert kept.moved_bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.2)
