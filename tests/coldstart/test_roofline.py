"""Check the work that publishing counts for a model, and the seconds that a load computes from it."""

from __future__ import annotations

import math
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from upriver.coldstart.fetch import strategy
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format import access_order
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.format.access_order import counted, publish_model
from upriver.coldstart.format.checkpoint import TensorLocation, WeightSource, find
from upriver.coldstart.grouping.stage_costs import stage_executions
from upriver.coldstart.grouping.timeline import Timeline
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.load_program import publish
from upriver.coldstart.roofline import (
    ACCELERATOR,
    CAUTION,
    CORE,
    MOST_S,
    NOTHING,
    DevicePace,
    Execution,
    keep_pace,
    layer_seconds,
    pace_of,
)
from upriver.program.capture.prefix import capture
from upriver.program.graph.artifact_paths import weights_path
from upriver.store import DEFAULT_PREFIX, Store

CPU = torch.device("cpu")


class Words(nn.Module):
    """A table, and two layers, of which the first has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 4)
        self.first = nn.Linear(8, 16, bias=False)
        self.unused = nn.Linear(3, 3)
        self.table = nn.Embedding(100, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (words,)."""
        x = self.table(words * 1)
        return self.last(torch.relu(self.first(x)))


WORDS = torch.tensor([5, 7, 9])

COUNTED = {
    "table.weight": Execution(0, 2 * 96),  # three rows are read, and written
    "first.weight": Execution(2 * 3 * 8 * 16, (96 + 512 + 192) + 2 * 192),  # with what the relu moves
    "last.bias": NOTHING,  # the layer waits for its weight, too
    "last.weight": Execution(2 * 3 * 16 * 4, 16 + 192 + 256 + 48),
    "unused.weight": NOTHING,
    "unused.bias": NOTHING,
}


def new_store() -> Store:
    return Store.open(f"memory://execution-{uuid.uuid4().hex}")


# ---------------------------------------------------------------------------------------- counting


def test_what_operators_do_counts_with_the_weight_that_was_touched_last() -> None:
    found = counted(Words(), (WORDS,))
    assert found == COUNTED
    assert list(found)[:4] == list(COUNTED)[:4]


def test_it_is_counted_alike_with_data() -> None:
    class Looking(Words):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return super().forward(words) if words.max() > 0 else words

    touched = {name: each for name, each in counted(Looking(), (WORDS,)).items() if each != NOTHING}
    assert touched == {name: each for name, each in COUNTED.items() if each != NOTHING}


def test_what_torch_cannot_count_is_nothing_and_changes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> float:
        raise AssertionError("not of this form")

    monkeypatch.setattr(access_order, "flops_of_call", refuses)
    found = counted(Words(), (WORDS,))
    assert list(found) == list(COUNTED) and set(found.values()) == {NOTHING}


def test_counts_are_published_with_the_order() -> None:
    store = new_store()
    manifest = publish_model(Words(), store, "net.safetensors", (WORDS,))
    assert layout.read(store, "net.safetensors") == manifest
    assert {placed.name: placed.execution for placed in find(store, "net").tensors} == COUNTED


def test_a_weight_of_several_names_counts_once() -> None:
    class Tied(Words):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.first.weight = self.table.weight

    store = new_store()
    manifest = publish_model(Tied(), store, "net.safetensors", (WORDS,))
    assert len(manifest.ties) == 1
    found = {placed.name: placed.execution for placed in find(store, "net").tensors}
    tied = COUNTED["table.weight"].plus(COUNTED["first.weight"])
    assert sorted(found.values()) == sorted([tied, COUNTED["last.weight"], NOTHING, NOTHING, NOTHING])


def test_weights_that_nobody_counted_have_nothing() -> None:
    store = new_store()
    manifest = layout.publish(Words().state_dict(), store, "net.safetensors")
    assert b"execution" not in manifest.encode()
    assert {placed.execution for placed in find(store, "net").tensors} == {NOTHING}


class Two(nn.Module):
    """Two layers with a weightless operation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (rows, 8)."""
        return self.last(self.between(self.first(x * 2)))


@pytest.mark.parametrize("samples", [1, 4])
def test_a_program_counts_by_stages_for_one_sample(samples: int) -> None:
    program = capture(Two().eval(), (torch.randn(samples, 8),))
    keys = list(program.weight_tensors)
    found = stage_executions(program.graph, keys)
    assert list(found) == keys
    flops = {key: each.flops for key, each in found.items() if each.flops}
    assert list(flops.values()) == [2 * 8 * 16, 2 * 16 * 4]
    first, last = (keys.index(key) for key in flops)
    assert {key.partition(".")[0] for key in keys[: first + 1]} == {"first"} and last == len(keys) - 1
    weights = [8 * 16 + 16, 16 * 4 + 4]
    activations = [8 + 16, 16 + 4]
    least = [4 * sum(each) for each in zip(weights, activations, strict=True)]
    moved = [found[key].moved_bytes for key in flops]
    # The relu and the doubling of the input count with the first weights: nothing else starts them.
    assert least[0] <= moved[0] <= least[0] + 4 * (2 * 8 + 2 * 16) and moved[1] == least[1]


def test_a_program_is_published_with_its_counts() -> None:
    program, store = capture(Two().eval(), (torch.randn(2, 8),)), new_store()
    publish(program, store)
    path = weights_path(DEFAULT_PREFIX, program.weights_digest)
    expected = stage_executions(program.graph, list(program.weight_tensors))
    assert layout.read(store, path).execution == list(expected.values())
    assert sum(each.flops for each in expected.values()) == sum(stage.flops for stage in program.stages)


# ----------------------------------------------------------------------------------------- seconds


def test_seconds_are_those_of_what_takes_longest() -> None:
    pace = DevicePace(flops_per_s=100.0, moved_bytes_per_s=10.0)
    assert pace.seconds(Execution(800, 10)) == 8 / CAUTION
    assert pace.seconds(Execution(800, 90)) == 9 / CAUTION
    assert pace.seconds(NOTHING) == 0
    most = (1 << 63) - 1
    assert DevicePace(flops_per_s=1e6, moved_bytes_per_s=1e6).seconds(Execution(most, most)) == MOST_S


def test_small_weights_behind_a_layer_belong_to_it() -> None:
    one = DevicePace(flops_per_s=1 / CAUTION, moved_bytes_per_s=1.0)
    of_weights = [Execution(flops, 0) for flops in (0, 1, 2, 0, 4, 8, 16)]
    layers = [range(1), range(1, 4), range(4, 5), range(5, 7)]
    assert layer_seconds(of_weights, layers, one) == [3, 0, 12, 16]
    assert layer_seconds(of_weights, [range(7)], one) == [31]
    assert layer_seconds([], [], one) == []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    return tmp_path


def test_a_device_that_was_not_calibrated_is_a_usual_one(cache: Path) -> None:
    found = pace_of(CPU)
    assert found.flops_per_s == CORE.flops_per_s * torch.get_num_threads()
    assert found.moved_bytes_per_s == CORE.moved_bytes_per_s
    assert pace_of(torch.device("cuda:1")) == ACCELERATOR
    assert not list(cache.iterdir())


def test_what_is_kept_of_a_device_is_its_own(cache: Path) -> None:
    threads = torch.get_num_threads()
    usual, kept = pace_of(CPU), DevicePace(flops_per_s=3e10, moved_bytes_per_s=4e9)
    keep_pace(CPU, kept, threads=threads + 1)
    assert pace_of(CPU) == usual
    keep_pace(CPU, kept, threads=threads)
    assert pace_of(CPU) == kept and pace_of(torch.device("cuda")) == ACCELERATOR
    keep_pace(torch.device("cuda:0"), kept, threads=7)
    assert pace_of(torch.device("cuda")) == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"schema":"upriver.pace/2","flops_per_s":1e10,"moved_bytes_per_s":1e9}',
        '{"schema":"upriver.pace/1","flops_per_s":1e10}',
        '{"schema":"upriver.pace/1","flops_per_s":1e10,"moved_bytes_per_s":0}',
        '{"schema":"upriver.pace/1","flops_per_s":-1e10,"moved_bytes_per_s":1e9}',
        '{"schema":"upriver.pace/1","flops_per_s":1e30,"moved_bytes_per_s":1e9}',
        '{"schema":"upriver.pace/1","flops_per_s":NaN,"moved_bytes_per_s":1e9}',
        '{"schema":"upriver.pace/1","flops_per_s":"1e10","moved_bytes_per_s":1e9}',
    ],
)
def test_what_is_kept_and_is_no_rate_is_as_good_as_nothing(cache: Path, text: str) -> None:
    usual = pace_of(CPU)
    keep_pace(CPU, DevicePace(flops_per_s=3e10, moved_bytes_per_s=4e9), threads=torch.get_num_threads())
    (path,) = (cache / "paces").iterdir()
    path.write_text(text)
    assert pace_of(CPU) == usual


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", os.devnull)
    with pytest.raises(OSError):
        keep_pace(CPU, CORE, threads=1)


# ------------------------------------------------------------------------------- effect on a load

MIB = 1 << 20

LINK = StoreLink(bandwidth_bytes_per_s=125e6, latency_s=0.05)


def layers_of(executions: list[Execution]) -> WeightSource:
    """Return layers of 1 MiB each."""
    tensors = tuple(
        TensorLocation(
            name=f"t{number}",
            dtype="uint8",
            shape=(MIB,),
            path="net.safetensors",
            start=number * MIB,
            stop=(number + 1) * MIB,
            execution=each,
        )
        for number, each in enumerate(executions)
    )
    return WeightSource(
        store=new_store(),
        path="net",
        tensors=tensors,
        ties={},
        etags={"net.safetensors": ""},
        chunk_bytes=MIB,
        ordered=True,
    )


def test_groups_are_made_for_what_executing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, limits = DevicePace(flops_per_s=1e9, moved_bytes_per_s=1e9), StreamLimits()
    monkeypatch.setattr(strategy, "pace_of", lambda device: pace)
    busy = [Execution(20_000_000, 0)] * 40  # 10 ms each
    found = {}
    for name, executions in {"idle": [NOTHING] * 40, "busy": busy}.items():
        source = layers_of(executions)
        plan = strategy.plan_requests(source, LINK, "upriver", limits, CPU, {})
        found[name] = plan.groups
        assert list(plan.groupings.values()) == [found[name]]
        again = strategy.plan_requests(source, LINK, "upriver", limits, CPU, plan.groupings)
        assert (again.groups, again.groupings) == (found[name], {})
    timeline = Timeline(
        [float(MIB)] * 40,
        [MIB / strategy.LOAD_BYTES_PER_S] * 40,
        [pace.seconds(each) for each in busy],
        latency_s=LINK.latency_s,
        bandwidth_bytes_per_s=LINK.bandwidth_bytes_per_s,
        one_core=True,
    )
    # Without execution the link must never idle; with execution, the first layers may begin sooner.
    assert timeline.makespan(found["busy"]) < 0.95 * timeline.makespan(found["idle"])
    assert found["busy"][0].stop < found["idle"][0].stop


def test_groupings_of_other_machines_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    source, known = layers_of([Execution(20_000_000, 0)] * 40), {}
    for factor in (1.0, 1.01, 30.0):
        pace = DevicePace(flops_per_s=1e9 * factor, moved_bytes_per_s=1e9 * factor)
        monkeypatch.setattr(strategy, "pace_of", lambda device, pace=pace: pace)
        news = strategy.plan_requests(source, LINK, "upriver", StreamLimits(), CPU, known).groupings
        assert bool(news) == (factor != 1.01)
        known = news or known
    assert len(known) == 2 and len({tuple(groups) for groups in known.values()}) == 2


def test_pisels_groups_do_not_ask_what_executing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        strategy, "pace_of", lambda device: DevicePace(flops_per_s=1e6, moved_bytes_per_s=1e6)
    )
    source = layers_of([Execution(20_000_000, 0)] * 40)
    groups = strategy.plan_requests(source, LINK, "pisel", StreamLimits(), CPU, {}).groups
    sizes = [math.prod(placed.shape) for placed in source.tensors]
    assert len({len(group) for group in groups[:-1]}) == 1
    assert len(groups[0]) == pytest.approx(LINK.latency_s * LINK.bandwidth_bytes_per_s / MIB, rel=0.5)
    assert sum(len(group) for group in groups) == len(sizes)
