"""Check estimates of peak memory against torch's allocator in real runs, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile

from tests.examples import examples, often, some
from upriver.errors import ConfigError, ModelError
from upriver.profile.memory import libraries
from upriver.profile.memory.estimator import (
    MemoryEstimate,
    StretchPeaks,
    stage_peaks,
    stretch_peak,
    tail_peak,
)
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program


def allocated_at_most(run: Callable[[], Any]) -> int:
    """Return the most bytes that torch's allocator has in use at once during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    sizes: list[tuple[int, int]] = []
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if hasattr(event.extra_fields, "alloc_size"):
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        live += size
        peak = max(peak, live)
    return peak


def forward_peak(program: Program, start: int, stop: int) -> int:
    """Return the peak of running a stretch, including its inputs."""
    first = [value.spec.empty("cpu") for value in program.live(0)]
    for tensor in first:
        tensor.fill_(1)
    values = program.run(first, 0, start)
    kept: list[Any] = []
    peak = allocated_at_most(lambda: kept.append(program.run(values, start, stop)))
    return peak + sum(tensor.nbytes for tensor in values)


def training_peak(model: nn.Module, x: torch.Tensor, **options: bool) -> int:
    """Return the peak of an Adam iteration after the first, including the optimizer's state and the input."""
    optimizer = torch.optim.Adam(model.parameters(), **options)

    def iteration() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    states = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    return allocated_at_most(iteration) + states + x.nbytes


class Residual(nn.Module):
    """Add the layers' output to their input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


CHAINS = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), (16, 64)),
    "tanh": (lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 128), nn.Sigmoid()), (8, 64)),
    "norm": (lambda: nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU()), (8, 64)),
    "pool": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 8)), (4, 3, 8, 8)),
}


@pytest.mark.parametrize("name", some(2, CHAINS))
def test_of_a_plain_chain_it_is_exact_for_every_stretch(name: str) -> None:
    make, shape = CHAINS[name]
    program = capture(make().eval(), torch.randn(shape), granularity="op")
    peaks = StretchPeaks(program.graph, program.device)
    for start in range(program.num_stages):
        for stop in range(start, program.num_stages + 1):
            estimate, exact = peaks.of(start, stop), forward_peak(program, start, stop)
            assert estimate.low_bytes == exact
            # The only possible addition is memory for a Python number among operands.
            assert 0 <= estimate.high_bytes - estimate.reserve_bytes - exact <= 64


@pytest.mark.parametrize("name", some(1, CHAINS))
def test_the_largest_stage_of_a_stretch_has_room_for_all_of_it(name: str) -> None:
    make, shape = CHAINS[name]
    program = capture(make().eval(), torch.randn(shape), granularity="op")
    peaks, stages = StretchPeaks(program.graph, program.device), stage_peaks(program)
    assert len(stages) == program.num_stages
    for start in range(program.num_stages):
        for stop in range(start + 1, program.num_stages + 1):
            largest = max(stages[start:stop]) * program.micro_batch
            assert largest >= peaks.of(start, stop).high_bytes
            assert largest >= forward_peak(program, start, stop)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(8, 8, 1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "groups": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2),
    "dilated": lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "batchnorm": lambda: nn.BatchNorm2d(8),
    "groupnorm": lambda: nn.GroupNorm(2, 8),
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(dim=1),
    "maxpool": lambda: nn.MaxPool2d(3, 1, 1),
    "avgpool": lambda: nn.AvgPool2d(3, 1, 1),
    "upsample": lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2)),
    "strided": lambda: nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1)),
}


def network(names: list[str], skips: list[bool]) -> nn.Module:
    torch.manual_seed(0)
    blocks = [LAYERS[name]() for name in names]
    skipped = [Residual(b) if skip else b for b, skip in zip(blocks, skips, strict=True)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *skipped, nn.Flatten(), nn.Linear(8 * 144, 4))


networks = st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()), min_size=1, max_size=5)


@pytest.mark.full
@settings(max_examples=examples(8), derandomize=True)
@given(networks)
def test_no_run_of_a_random_network_takes_more_than_the_high_end_or_less_than_the_low(
    steps: list[tuple[str, bool]],
) -> None:
    # Writing in place into a value that a skip reads would be the network's own error.
    skips = [skip and name != "relu" for name, skip in steps]
    model = network([name for name, _ in steps], skips)
    x = torch.randn(4, 3, 12, 12)
    program = capture(model.eval(), x, granularity="op")
    middle, stages = program.num_stages // 2, stage_peaks(program)
    for start, stop in ((0, program.num_stages), (0, middle), (middle, program.num_stages)):
        estimate, exact = stretch_peak(program, start, stop), forward_peak(program, start, stop)
        assert estimate.low_bytes <= exact <= estimate.high_bytes - estimate.reserve_bytes
        assert max(stages[start:stop]) * program.micro_batch >= estimate.high_bytes


def trained(steps: list[tuple[str, bool]]) -> nn.Module:
    steps = [(name, skip) for name, skip in steps if name != "relu"]
    return network([name for name, _ in steps], [skip for _, skip in steps])


@settings(max_examples=examples(6), derandomize=True)
@given(networks)
def test_no_training_of_a_random_network_takes_more_than_the_high_end_or_less_than_the_low(
    steps: list[tuple[str, bool]],
) -> None:
    model, x = trained(steps), torch.randn(4, 3, 12, 12)
    estimate = tail_peak(model, [x.to("meta")], samples=4)
    exact = training_peak(model, x)
    assert estimate.low_bytes <= exact <= estimate.high_bytes - estimate.reserve_bytes


@pytest.mark.full
def test_training_of_a_transformer_layer_is_met_closely() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    x = torch.randn(8, 50, 64)
    exact, estimate = training_peak(model, x), tail_peak(model, [x], samples=8)
    assert exact <= estimate.high_bytes - estimate.reserve_bytes <= 1.1 * exact


@pytest.mark.full
def test_steps_by_lists_of_parameters_take_more_and_are_met_closely() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(8, 64)
    listed = tail_peak(model, [x], samples=8, optimizer=lambda given: torch.optim.Adam(given, foreach=True))
    one_by_one, exact = tail_peak(model, [x], samples=8), training_peak(model, x, foreach=True)
    assert listed.low_bytes <= exact <= listed.high_bytes - listed.reserve_bytes <= 1.05 * exact
    assert one_by_one.high_bytes < listed.high_bytes


def test_nothing_of_the_model_is_changed() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    for training in (True, False):
        model.train(training)
        modes = [module.training for module in model.modules()]
        tail_peak(model, [torch.randn(4, 6, device="meta")], samples=4)
        assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_frozen_units_take_what_they_take_in_eval() -> None:
    def tail(drops: nn.Module) -> nn.Module:
        frozen = nn.Sequential(nn.Linear(64, 64), drops).requires_grad_(False)
        return nn.Sequential(nn.Linear(64, 64), frozen, nn.Linear(64, 8)).train()

    features = [torch.empty(32, 64, device="meta")]
    dropping, without = (
        tail_peak(tail(drops), features, samples=32) for drops in (nn.Dropout(), nn.Identity())
    )
    assert dropping == without


@pytest.fixture(scope="module")
def _libraries_keep_nothing() -> Iterator[None]:
    """Hide the memory that libraries keep: next to small networks it would mask a bound that is too small."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("START_BYTES", "KERNEL_BYTES", "ALL_PACKED_BYTES"):
            patch.setattr(libraries, name, 0)
        yield


COUNTS = (1, 2, 3, 15, 16, 40, 200)


def line_at(estimate: MemoryEstimate, samples: int) -> float:
    return estimate.fixed_bytes + estimate.growing_bytes * samples


def check_line(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Check that the line of each estimate is never below the estimate made at another number of samples."""
    estimates = {n: tail_peak(model, [torch.empty(n, *shape, device="meta")], samples=n) for n in COUNTS}
    for given_samples, estimate in estimates.items():
        for samples, wanted in estimates.items():
            assert line_at(estimate, samples) >= wanted.high_bytes, (given_samples, samples)


TAILS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 4)),
        (3, 8, 8),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(512, 4)),
        (3, 8, 8),
    ),
    "pointwise": (
        lambda: nn.Sequential(nn.Conv2d(16, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 1)),
        (16, 6, 6),
    ),
    "many weights": (
        lambda: nn.Sequential(nn.Conv2d(8, 256, 5), nn.ReLU(), nn.Conv2d(256, 64, 3), nn.Flatten()),
        (8, 7, 7),
    ),
    "weights made in each run": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 256)), nn.Linear(256, 4)),
        (64,),
    ),
}


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", some(2, TAILS))
@pytest.mark.usefixtures("_libraries_keep_nothing")
@pytest.mark.full
def test_the_line_of_an_estimate_is_never_under(name: str, threads: int) -> None:
    make, shape = TAILS[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_line(make(), shape)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=examples(6), derandomize=True)
@given(networks)
@pytest.mark.usefixtures("_libraries_keep_nothing")
@pytest.mark.full
def test_the_line_of_a_random_tail_is_never_under(steps: list[tuple[str, bool]]) -> None:
    check_line(trained(steps), (3, 12, 12))


@pytest.mark.parametrize("name", often(TAILS, "conv", "many weights"))
@pytest.mark.usefixtures("_libraries_keep_nothing")
def test_no_training_takes_more_than_the_line_of_an_estimate(name: str) -> None:
    make, shape = TAILS[name]
    model = make()
    estimate = tail_peak(model, [torch.empty(16, *shape)], samples=16)
    for samples in (2, 5, 24):
        exact = training_peak(model, torch.randn(samples, *shape))
        assert exact <= line_at(estimate, samples), samples


def test_a_tail_that_looks_at_data_is_refused_in_words() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(ModelError, match="without data"):
        tail_peak(Looks(), [torch.ones(2, 4)], samples=2)


def test_bad_arguments_are_named() -> None:
    model = nn.Linear(4, 4)
    program = capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ConfigError, match="start and stop"):
        stretch_peak(program, 1, 0)
    with pytest.raises(ConfigError, match="samples must be"):
        tail_peak(model, [torch.ones(2, 4)], samples=0)
    with pytest.raises(ConfigError, match="features must be"):
        tail_peak(model, [], samples=2)
    with pytest.raises(ConfigError, match="requires a gradient"):
        tail_peak(model.requires_grad_(False), [torch.ones(2, 4)], samples=2)
    with pytest.raises(ConfigError, match="low_bytes"):
        MemoryEstimate(samples=1, low_bytes=2, high_bytes=1, fixed_bytes=1, growing_bytes=0)
    with pytest.raises(ConfigError, match="growing_bytes x samples"):
        MemoryEstimate(samples=2, low_bytes=1, high_bytes=4, fixed_bytes=1, growing_bytes=1)
