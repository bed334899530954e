"""Check that any stretch in any pieces gives the same micro-batch, and bad samples are named or padded."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import upriver
from tests.examples import examples
from tests.finetune.training import STAGES, png
from tests.program.nets import frozen_small
from upriver.engine.clock import Clock
from upriver.engine.engine import Engine
from upriver.errors import BadSample, ConfigError
from upriver.pipeline import InputChain
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import TensorSource
from upriver.program.graph.executor import Program

MICRO = 4
CHAIN = InputChain(STAGES)
END = 6
BLOBS = [png(seed) for seed in range(MICRO)]
IDS = (5, 0, 9, 2)
NAMES = ["a", "b", "c", "d"]
HOW = {"object_names": NAMES, "seed": 3, "epoch": 1}


@cache
def program() -> Program:
    """Return one cached program, which is captured only when a test runs."""
    found = capture(frozen_small(), (torch.randn(MICRO, 3, 16, 16),), outputs=[TensorSource(path="block2")])
    assert found.num_stages == END
    return found


@cache
def engine() -> Engine:
    return Engine(chain=CHAIN, program=program(), micro_batch=MICRO)


def whole() -> torch.Tensor:
    batch = engine().begin(BLOBS, IDS, stop=END, **HOW)
    return engine().advance(batch, END).tensors[0]


@settings(max_examples=examples(60), deadline=None)
@given(cuts=st.lists(st.integers(CHAIN.start, END), max_size=4).map(sorted))
def test_any_pieces_give_the_bits_of_the_whole(cuts: list[int]) -> None:
    batch = engine().begin(BLOBS, IDS, stop=cuts[0] if cuts else END, **HOW)
    for cut in [*cuts, END]:
        batch = engine().resume(batch, stop=cut, **HOW)
        assert batch.position == cut
        assert batch.ids == IDS
    assert torch.equal(batch.tensors[0], whole())


def test_a_short_micro_batch_is_padded_and_its_rows_do_not_change() -> None:
    batch = engine().begin(BLOBS[:2], IDS[:2], stop=0, object_names=NAMES[:2], seed=3, epoch=1)
    assert batch.tensors[0].shape[0] == MICRO
    assert not batch.tensors[0][2:].any()
    assert torch.equal(engine().advance(batch, END).tensors[0][:2], whole()[:2])


def test_a_bad_sample_is_named_or_leaves_a_padded_slot() -> None:
    blobs = [BLOBS[0], b"no image", BLOBS[2], BLOBS[3][:90]]
    with pytest.raises(BadSample, match="sample 0 in object 'b'"):
        engine().begin(blobs, IDS, stop=0, **HOW)
    batch = engine().begin(blobs, IDS, stop=0, on_bad_sample="skip", **HOW)
    assert batch.skipped == (0, 2)
    assert not batch.tensors[0][[1, 3]].any()
    assert torch.equal(engine().advance(batch, END).tensors[0][[0, 2]], whole()[[0, 2]])


@pytest.mark.parametrize("cut", [-4, -3, -2, -1])
def test_a_skipped_sample_stays_skipped_whatever_piece_finds_it(cut: int) -> None:
    blobs = [BLOBS[0], b"no image", BLOBS[2], BLOBS[3]]
    batch = engine().begin(blobs, IDS, stop=cut, on_bad_sample="skip", **HOW)
    done = engine().resume(batch, stop=END, on_bad_sample="skip", **HOW)
    assert done.skipped == (0,)
    assert torch.equal(done.tensors[0][[0, 2, 3]], whole()[[0, 2, 3]])


def test_a_micro_batch_of_bad_samples_only_is_all_padding() -> None:
    batch = engine().begin(
        [b"x", b"y"], (1, 2), stop=0, object_names=["a", "b"], seed=0, epoch=0, on_bad_sample="skip"
    )
    assert batch.skipped == (1, 2)
    assert not batch.tensors[0].any()


def test_a_sample_of_another_shape_is_a_bad_sample() -> None:
    chain = InputChain((upriver.Decode(), upriver.Normalize()))
    engine = Engine(chain=chain, program=None, micro_batch=2)
    with pytest.raises(BadSample, match=r"sample 8 .*\(3, 30, 30\).*\(3, 24, 24\)"):
        engine.begin([png(0, 24), png(1, 30)], (7, 8), stop=0, object_names=["a", "b"], seed=0, epoch=0)


def test_the_clock_knows_every_stage() -> None:
    clock = Clock()
    engine().advance(engine().begin(BLOBS, IDS, stop=0, clock=clock, **HOW), END, clock)
    timings = clock.timings()
    assert sorted(timings.stages) == list(range(CHAIN.start + 1, END + 1))
    assert set(timings.phases) == {"input", "forward"}
    assert all(seconds >= 0 for seconds in (*timings.stages.values(), *timings.phases.values()))


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="micro_batch must be at least 1"):
        Engine(chain=CHAIN, program=None, micro_batch=0)
    with pytest.raises(ConfigError, match="micro-batches of 4, not 8"):
        Engine(chain=CHAIN, program=program(), micro_batch=8)
    batch = engine().begin(BLOBS, IDS, stop=0, **HOW)
    with pytest.raises(ConfigError, match="need a program"):
        Engine(chain=CHAIN, program=None, micro_batch=MICRO).advance(batch, 1)
    with pytest.raises(ConfigError, match="chain of input stages"):
        Engine(chain=None, program=program(), micro_batch=MICRO).begin(BLOBS, IDS, stop=0, **HOW)
