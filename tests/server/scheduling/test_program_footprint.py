"""Test the footprint of stage ranges of a program, computed from the graph alone."""

import gc
import tracemalloc

import pytest
import torch

from tests.server.conftest import MICRO_BATCH, make_program
from upriver._torchvision import ensure_torchvision
from upriver.errors import ProgramError, ProtocolError
from upriver.profile.memory.estimator import stretch_peak
from upriver.program.capture.prefix import capture
from upriver.program.graph.executor import Program
from upriver.server.scheduling.footprint import END, GRAPH_FACTOR, program_bytes
from upriver.server.scheduling.program_footprint import FootprintEstimator


def scale_of(program):
    return FootprintEstimator(program.graph_bytes, torch.device("cpu"))


def test_a_stretch_weighs_the_same_without_its_weights():
    program = make_program(0)
    scale = scale_of(program)
    for start in range(program.num_stages + 1):
        for stop in range(start, program.num_stages + 1):
            assert scale.weigh(start, stop).peak_bytes == stretch_peak(program, start, stop).high_bytes
    assert scale.weigh(0, END) == scale.weigh(0, program.num_stages)


def test_what_crosses_at_its_end_is_what_a_run_gives():
    program = make_program(0)
    given = (torch.zeros(MICRO_BATCH, 3, 16, 16),)
    for stop in range(program.num_stages + 1):
        out = program.run(given, 0, stop)
        found = scale_of(program).weigh(0, stop)
        assert found.out_bytes == sum(tensor.nbytes for tensor in out)
        assert found.rows == all(len(tensor) == MICRO_BATCH for tensor in out)


def test_a_stretch_that_is_none_is_refused():
    program = make_program(0)
    for start, stop in ((0, program.num_stages + 1), (2, 1), (-3, 1)):
        with pytest.raises(ProtocolError, match="stages"):
            scale_of(program).weigh(start, stop)


def test_a_graph_that_is_not_sound_is_refused():
    graph = make_program(0).graph_bytes
    with pytest.raises(ProgramError):
        FootprintEstimator(graph[:-2], torch.device("cpu"))
    broken = graph.replace(b"conv2d", b"conv9d", 1)
    assert broken != graph
    with pytest.raises(ProgramError):
        FootprintEstimator(broken, torch.device("cpu"))


def test_a_program_counts_its_files_once_and_its_graph_in_each_worker():
    one, two = (program_bytes(10_000, graph_nbytes=1_000, workers=count) for count in (1, 2))
    assert 10_000 < one < two and two - one == one - 10_000
    apart = program_bytes(10_000, graph_nbytes=1_000, workers=2, copies=2)
    assert apart - two == 9_000  # on an accelerator each worker has its own weights


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "network", ["alexnet", *(pytest.param(name, marks=pytest.mark.full) for name in ("resnet50", "vit_b_16"))]
)
def test_a_graph_takes_no_more_as_objects_than_is_counted(network):
    """Leave the weights untraced: torch holds them, in shared memory."""
    ensure_torchvision()
    from torchvision import models

    torch.manual_seed(0)
    captured = capture(models.get_model(network, weights=None).eval(), (torch.zeros(2, 3, 224, 224),))
    graph, weights = captured.graph_bytes, bytes(captured.weights_bytes)
    del captured
    for take in (
        lambda: Program.from_bytes(graph, weights),
        lambda: FootprintEstimator(graph, torch.device("cpu")),
    ):
        take()  # imports and caches that are made once do not count
        gc.collect()
        tracemalloc.start()
        try:
            kept = take()
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(graph) < taken < GRAPH_FACTOR * len(graph)
        del kept
