"""Check that a stage whose bits do not depend on the number of threads says so, and no other does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pipeline.every_stage import EXAMPLES
from tests.pipeline.making import encoded, pixels, tone, wav
from upriver.features.keep import Keep
from upriver.features.kept import KeptFeatures
from upriver.pipeline import (
    Decode,
    DecodeWav,
    Draw,
    Fft,
    InputChain,
    InputStage,
    Resample,
    Resize,
    stored_tensor,
)
from upriver.pipeline.errors import SampleError

IMAGE = torch.from_numpy(pixels(480, 640))
SOUND = torch.from_numpy(tone(60_000, 2).T.copy()).to(torch.float32)
VALUES = {
    "bytes": [stored_tensor(encoded(pixels(480, 640))), stored_tensor(wav(tone(60_000)))],
    "pixels": [IMAGE],
    "audio": [SOUND],
    "tensor": [SOUND],
    "spectrum": [Fft().apply(SOUND, Draw(seed=0, epoch=0, sample=0, stage=0))],
}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stage", [stage for stage in EXAMPLES if not stage.threaded], ids=repr)
def test_a_stage_that_is_not_threaded_has_the_same_bits_in_any_number(
    stage: InputStage, threads: None
) -> None:
    for value in VALUES[stage.takes[0]]:
        made = []
        for number in (1, 4):
            torch.set_num_threads(number)
            try:
                made.append(stage.apply(value, Draw(seed=1, epoch=2, sample=3, stage=4)))
            except SampleError:
                return
        assert torch.equal(*made)


def test_the_number_of_threads_names_rows_only_after_a_threaded_stage() -> None:
    def names(*stages: InputStage) -> set[str]:
        found = set()
        for number in (1, 7):
            kept = KeptFeatures(
                Keep(memory=0, disk=0),
                micro_batch=1,
                seed=0,
                device=torch.device("cpu"),
                saved_s=lambda: 1.0,
                num_threads=number,
            )
            found.add(str(sorted(kept.fingerprint(InputChain(stages), 0).items())))
        return found

    assert len(names(Decode(), Resize(30))) == 1
    assert len(names(DecodeWav(16000), Resample(16000, 8000))) == 2
