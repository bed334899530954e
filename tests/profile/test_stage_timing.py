"""Check stages measured at several sizes: the line through the medians, and the runs of a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.profile.stage_timing import fit, measure_stages, sizes, through_first
from upriver.program.capture.prefix import capture_buckets


@dataclass
class Named:
    name: str


@dataclass
class Scripted:
    """A program whose stages take fixed + per sample seconds, some runs slower."""

    micro_batch: int
    costs: Sequence[tuple[float, float]]
    slow: Sequence[float] = ()
    names: str = "abcdef"
    log: list[int] = field(default_factory=list)
    runs: int = 0

    @property
    def stages(self) -> list[Named]:
        return [Named(name) for name, _ in zip(self.names, self.costs, strict=False)]

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> Sequence[torch.Tensor]:
        assert (start, stop) == (0, len(self.costs)) and tensors[0].shape[0] == self.micro_batch
        factor = self.slow[self.runs] if self.runs < len(self.slow) else 1.0
        self.runs += 1
        self.log.append(self.micro_batch)
        assert on_stage is not None
        for position, (fixed, each) in enumerate(self.costs, start=1):
            on_stage(position, factor * (fixed + each * self.micro_batch))
        return tensors


def scripted(sizes: Sequence[int], **more: object) -> tuple[list[Scripted], list[list[torch.Tensor]]]:
    costs = [(2.0, 0.5), (0.0, 3.0), (1.0, 0.0)]
    programs = [Scripted(size, costs, **more) for size in sizes]  # type: ignore[arg-type]
    return programs, [[torch.zeros(size, 2)] for size in sizes]


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4), (1, 2, 8)])
def test_fixed_and_per_sample_are_told_apart(sizes: Sequence[int]) -> None:
    found = measure_stages(*scripted(sizes))
    assert found == (pytest.approx((2.0, 0.5)), pytest.approx((0.0, 3.0)), pytest.approx((1.0, 0.0)))


def test_warm_up_and_disturbed_runs_do_not_count() -> None:
    found = measure_stages(*scripted((4, 16), slow=(900, 1, 50, 1, 1, 70)), repeats=5, warm_ups=1)
    assert found[0] == pytest.approx((2.0, 0.5))


def test_programs_take_turns() -> None:
    programs, inputs = scripted((4, 16))
    programs[1].log = programs[0].log
    measure_stages(programs, inputs, repeats=3, warm_ups=2)
    assert programs[0].log == [4, 16] * 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least two micro-batch sizes are needed, got \[4, 4\]"):
        measure_stages(*scripted((4, 4)))
    with pytest.raises(ConfigError, match="repeats"):
        measure_stages(*scripted((4, 16)), repeats=0)
    with pytest.raises(ConfigError, match="warm_ups"):
        measure_stages(*scripted((4, 16)), warm_ups=-1)
    programs, inputs = scripted((4, 16))
    programs[1].names = "abx"
    with pytest.raises(ConfigError, match="must have the same stages"):
        measure_stages(programs, inputs)


points = st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10, allow_subnormal=False)), min_size=2)


@given(points=points.filter(lambda points: len({n for n, _ in points}) > 1), data=st.data())
def test_no_allowed_line_is_nearer(points: list[tuple[int, float]], data: st.DataObject) -> None:
    def error(fixed: float, each: float) -> float:
        return math.fsum((fixed + each * n - s) ** 2 for n, s in points)

    fixed, each = fit(points)
    assert fixed >= 0 and each >= 0
    best = error(fixed, each)
    other = data.draw(st.tuples(st.floats(0, 12), st.floats(0, 12)))
    near = [
        (fixed + a * step, each + b * step) for a in (-1, 0, 1) for b in (-1, 0, 1) for step in (0.01, 0.3)
    ]
    for line in [other, *near]:
        if min(line) >= 0:
            assert best <= error(*line) + 1e-9


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(16, 10.0), (4, 4.0)], (2.0, 0.5)),
        ([(16, 16.0), (4, 2.0)], (0.0, 1.0)),  # a negative fixed part
        ([(4, 4.0), (16, 32.0)], (0.0, 1.0)),
        ([(16, 3.0), (4, 5.0)], (3.0, 0.0)),  # less time for more samples
        ([(16, 0.0), (4, 5.0)], (0.0, 0.0)),
    ],
)
def test_the_line_says_what_was_measured_at_the_size_that_is_meant(
    points: list[tuple[int, float]], line: tuple[float, float]
) -> None:
    assert through_first(points) == pytest.approx(line)


@pytest.mark.parametrize(("size", "other"), [(1, 4), (4, 16), (8, 2), (16, 4), (256, 64)])
def test_the_second_size_is_four_times_off(size: int, other: int) -> None:
    assert sizes(size) == (size, other)


@pytest.mark.parametrize(
    "bad", [[], [(1, 1.0)], [(4, 1.0), (4, 2.0)], [(1, -1.0), (2, 1.0)], [(0, 1), (2, 1)]]
)
def test_what_is_no_line_is_refused(bad: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError):
        fit(bad)


def test_a_real_program_is_measured_and_not_changed() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
    inputs = [torch.randn(size, 64) for size in (2, 16)]
    programs = capture_buckets(network, inputs)
    before = programs[0].run([inputs[0]], 0, 3)[0]
    seconds = measure_stages(programs, [[given] for given in inputs], repeats=3)
    assert len(seconds) == 3
    assert all(fixed >= 0 and each >= 0 and fixed + each > 0 for fixed, each in seconds)
    assert torch.equal(programs[0].run([inputs[0]], 0, 3)[0], before)
