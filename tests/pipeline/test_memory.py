"""Check that the stated peak memory of stages is never below the measured peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipeline.high_water import ENVIRONMENT
from upriver.pipeline import (
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeWav,
    Draw,
    FixLength,
    InputChain,
    InputStage,
    LoadTensor,
    Normalize,
    RandAugment,
    Resample,
    Resize,
    Spectrogram,
    Stft,
    ToFloat,
)
from upriver.pipeline.formats import image
from upriver.pipeline.formats.audio import MAX_BYTES, MAX_CHANNELS
from upriver.pipeline.stages.base import SCRATCH_BYTES

INF = float("inf")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")
@pytest.mark.full
def test_no_stage_and_no_micro_batch_takes_more_than_it_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.high_water"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert [each for each in found["stages"] + found["micro_batches"] if each[1] > each[2]] == []
    assert len(found["stages"]) > 20
    # The statement is not much larger either, or it would refuse requests that fit.
    assert [each for each in found["micro_batches"] if each[2] > 6 * max(each[1], 4 << 20)] == []


@pytest.mark.parametrize(
    ("stages", "stop", "out"),
    [
        ((LoadTensor(),), -1, [100.0, 4e6]),
        ((LoadTensor(),), 0, [100.0, 4e6]),
        ((Decode(), Resize(8)), -1, [INF, INF]),
        ((Decode(), Resize(8)), 0, [INF, INF]),
        ((Decode(), Resize(8), CenterCrop(10), Normalize()), -1, [300.0, 300.0]),
        ((Decode(), Resize(8), CenterCrop(10), Normalize()), 0, [1200.0, 1200.0]),
        ((LoadTensor(), ToFloat()), 0, [400.0, 16e6]),
        ((DecodeWav(8000),), 0, [400.0, 16e6]),
        ((DecodeWav(8000, max_samples=1000),), 0, [400.0, 4000.0]),
        ((DecodeWav(8000, mono=False, max_samples=1000),), 0, [400.0, 4000.0 * MAX_CHANNELS]),
        ((DecodeWav(8000), FixLength(1000)), 0, [4000.0, 4000.0]),
        ((LoadTensor(), FixLength(1000)), 0, [4000.0 * MAX_CHANNELS, 4000.0 * MAX_CHANNELS]),
        ((DecodeWav(8000), FixLength(1000), Resample(8000, 16000)), 0, [8000.0, 8000.0]),
        ((DecodeWav(8000), FixLength(1000), Stft(64, 10), Spectrogram()), -1, [26664.0, 26664.0]),
        ((DecodeWav(8000), FixLength(1000), Stft(64, 10), Spectrogram()), 0, [13332.0, 13332.0]),
        ((DecodeWav(8000), Resample(8000, 256000), Resample(8000, 256000)), 0, [410656.0, MAX_BYTES]),
    ],
)
def test_what_samples_are_at_most_is_known_before_they_are_read(
    stages: tuple[object, ...], stop: int, out: list[float]
) -> None:
    chain = InputChain(stages)  # type: ignore[arg-type]
    found, working = chain.most_bytes(np.array([100.0, 4e6]), stop)
    assert found.tolist() == out
    assert np.isfinite(working).all()
    assert (working >= 0).all()


@pytest.mark.parametrize("stage", [ColorJitter(0.5), RandAugment(8)])
def test_a_change_is_planned_with_no_less_than_it_asks_for(stage: InputStage) -> None:
    chain = InputChain((Decode(), CenterCrop((1200, 1500)), stage))
    _, working = chain.most_bytes(np.array([100.0]), 0)
    asked: list[int] = []
    with image.asking(asked.append):
        stage.apply(torch.zeros(1200, 1500, 3, dtype=torch.uint8), Draw(seed=0, epoch=0, sample=0, stage=2))
    assert working.tolist() == [asked[0] + SCRATCH_BYTES]


def test_where_nothing_is_done_nothing_is_taken() -> None:
    chain = InputChain((DecodeWav(8000), FixLength(1000)))
    out, working = chain.most_bytes(np.array([5.0]), chain.start)
    assert (out.tolist(), working.tolist()) == ([5.0], [0.0])
