"""Check that any chain gives the same bits at every cut, and describes itself correctly."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipeline.every_stage import EXAMPLES
from tests.pipeline.making import encoded, npy, pixels, tone, wav
from upriver.pipeline import (
    AddNoise,
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeWav,
    Draw,
    Fft,
    FixLength,
    InputChain,
    InputStage,
    LoadTensor,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resample,
    Resize,
    SampleError,
    Spectrogram,
    Standardize,
    Stft,
    ToFloat,
    stored_tensor,
)
from upriver.pipeline.formats import audio
from upriver.pipeline.stages.base import ANY_SIZE
from upriver.pipeline.stages.registry import STAGES

STORED = {
    "decode": [encoded(pixels(40, 30, seed=n)) for n in range(3)],
    "decode_wav": [wav(tone(500 + 300 * n, 2, seed=n), bits=8 + 8 * n) for n in range(3)],
    "load_tensor": [npy(tone(400, 2, seed=n).T.astype(np.float32)) for n in range(3)],
}
sizes = st.integers(1, 50)
rates = st.integers(1, 8).map(lambda thousands: 1000 * thousands)
STRATEGIES: dict[type[InputStage], st.SearchStrategy[InputStage]] = {
    Decode: st.just(Decode()),
    DecodeWav: st.builds(DecodeWav, st.just(16000), st.booleans()),
    LoadTensor: st.just(LoadTensor()),
    Resize: st.builds(Resize, st.one_of(sizes, st.tuples(sizes, sizes))),
    CenterCrop: st.builds(CenterCrop, sizes),
    RandomResizedCrop: st.builds(RandomResizedCrop, sizes),
    RandomCrop: st.builds(RandomCrop, st.integers(1, 20), st.integers(0, 10)),
    RandomHorizontalFlip: st.just(RandomHorizontalFlip()),
    ColorJitter: st.builds(ColorJitter, *(st.floats(0, 0.5) for _ in range(4))),
    RandAugment: st.builds(RandAugment, st.integers(1, 3), st.integers(0, 30)),
    Normalize: st.just(Normalize()),
    ToFloat: st.builds(ToFloat, st.floats(0, 0.4), st.floats(0.5, 1)),
    FixLength: st.builds(FixLength, st.integers(1, 2000)),
    AddNoise: st.builds(
        AddNoise, st.one_of(st.floats(-20, 60), st.tuples(st.floats(-20, 10), st.floats(10, 60)))
    ),
    Resample: st.builds(Resample, rates, rates),
    Stft: st.builds(Stft, st.integers(8, 64), st.integers(4, 40)),
    Fft: st.just(Fft()),
    Spectrogram: st.builds(Spectrogram, st.sampled_from([1.0, 1.5, 2.0]), st.booleans()),
    Standardize: st.just(Standardize()),
}


def test_every_stage_is_among_them() -> None:
    assert set(STRATEGIES) == set(STAGES.values())


@st.composite
def chains(draw: st.DrawFn) -> InputChain:
    """Draw stages that fit together: each accepts the output of the stage before it."""
    stages: list[InputStage] = []
    given = "bytes"
    for _ in range(draw(st.integers(1, 7))):
        fitting = [stage for stage in STRATEGIES if given in stage.takes]
        stages.append(draw(STRATEGIES[draw(st.sampled_from(fitting))]))
        given = stages[-1].gives if stages[-1].gives != "any" else "audio"  # the value stored in this test
    return InputChain(tuple(stages))


def run(
    chain: InputChain, value: torch.Tensor, start: int, stop: int, sample: int, epoch: int
) -> torch.Tensor:
    return chain.run(value, sample=sample, epoch=epoch, seed=3, start=start, stop=stop)


@settings(deadline=None, max_examples=examples(300))
@given(
    chain=chains(),
    at=st.floats(0, 1),
    sample=st.integers(0, 2**40),
    epoch=st.integers(0, 2**40),
    which=st.integers(0, 2),
)
def test_a_chain_cut_anywhere_gives_the_same_bits(
    chain: InputChain, at: float, sample: int, epoch: int, which: int
) -> None:
    value = stored_tensor(STORED[chain.stages[0].name][which])
    cut = chain.start + round(at * len(chain.stages))
    try:
        whole = run(chain, value, chain.start, 0, sample, epoch)
    except SampleError:
        with pytest.raises(SampleError):
            run(chain, run(chain, value, chain.start, cut, sample, epoch), cut, 0, sample, epoch)
        return
    before = run(chain, value, chain.start, cut, sample, epoch)
    kept = before.clone()
    after = run(chain, before.clone(), cut, 0, sample, epoch)  # as if it had been sent
    assert torch.equal(after, whole)
    assert torch.equal(before, kept)
    assert torch.equal(value, stored_tensor(STORED[chain.stages[0].name][which]))


@settings(deadline=None, max_examples=examples(300))
@given(chain=chains(), sample=st.integers(0, 2**40), which=st.integers(0, 2))
def test_what_a_chain_says_of_itself_is_so(chain: InputChain, sample: int, which: int) -> None:
    value = stored_tensor(STORED[chain.stages[0].name][which])
    stored, spec = np.array([float(value.nbytes)]), None
    for position, stage in enumerate(chain.stages, start=chain.start + 1):
        try:
            value = run(chain, value, position - 1, position, sample, 0)
        except SampleError:
            assume(False)
        assert value.is_contiguous()
        spec = stage.spec(spec)
        if spec is not None:
            assert value.dtype is spec[0]
            assert len(value.shape) == len(spec[1])
            assert all(said in (has, ANY_SIZE) for said, has in zip(spec[1], value.shape, strict=True))
        out, working = chain.most_bytes(stored, position)
        assert value.nbytes <= out[0]
        assert value.nbytes <= working[0] or np.isinf(out[0])
    assert chain.output_spec() in (None, (value.dtype, tuple(value.shape)))


RANDOM: list[tuple[InputStage, torch.Tensor]] = [
    (RandomResizedCrop(8), torch.tensor(pixels(40, 30))),
    (RandomCrop(8), torch.tensor(pixels(40, 30))),
    (RandomHorizontalFlip(), torch.tensor(pixels(40, 30))),
    (ColorJitter(0.4, 0.4, 0.4, 0.2), torch.tensor(pixels(40, 30))),
    (RandAugment(4, 30), torch.tensor(pixels(40, 30))),
    (FixLength(100), torch.tensor(tone(5000).T.copy(), dtype=torch.float32)),
    (AddNoise(10), torch.tensor(tone(5000).T.copy(), dtype=torch.float32)),
    (AddNoise((0, 20)), torch.tensor(tone(5000).T.copy(), dtype=torch.float32)),
]


@pytest.mark.parametrize(("stage", "value"), RANDOM, ids=lambda each: getattr(each, "name", ""))
def test_a_random_stage_hangs_on_its_draw_and_on_nothing_else(stage: InputStage, value: torch.Tensor) -> None:
    def outcomes(**changing: range) -> list[torch.Tensor]:
        fixed = {"seed": 1, "epoch": 2, "sample": 3, "stage": 4}
        ((name, numbers),) = changing.items()
        return [stage.apply(value, Draw(**{**fixed, name: number})) for number in numbers]

    for name in ("seed", "epoch", "sample", "stage"):
        first = outcomes(**{name: range(12)})
        torch.manual_seed(5)
        assert all(map(torch.equal, first, outcomes(**{name: range(12)})))
        assert len({each.numpy().tobytes() for each in first}) >= (2 if stage.name.endswith("flip") else 10)


SOUND = torch.tensor(tone(3000).T.copy(), dtype=torch.float32)
PICTURE = torch.tensor(pixels(40, 30))


@pytest.mark.parametrize("stage", EXAMPLES, ids=repr)
def test_what_a_process_has_set_does_not_show(stage: InputStage) -> None:
    value = {"pixels": PICTURE, "audio": SOUND, "spectrum": SOUND + 1j}.get(stage.takes[0])
    if isinstance(stage, LoadTensor) or value is None:
        return
    draw = Draw(seed=1, epoch=2, sample=3, stage=4)
    plain, before = stage.apply(value, draw), torch.get_default_dtype()
    audio._kernel.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            found = stage.apply(value, draw)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, plain)


def test_stages_that_are_not_random_hang_on_no_draw() -> None:
    sound = torch.tensor(tone(500).T.copy(), dtype=torch.float32)
    for stage in (FixLength(700), Resample(3, 2), Stft(64, 16), Fft(), Standardize()):
        one, other = (stage.apply(sound, Draw(seed=1, epoch=1, sample=n, stage=1)) for n in (1, 2))
        assert torch.equal(one, other)


# ------------------------------------------------------------------------- which stages are random


class NoNumbers(Draw):
    """Random numbers that nobody may ask for."""

    def _generator(self) -> np.random.Philox:
        raise AssertionError("a stage that does not draw has asked for random numbers")


def value_for(stage: InputStage) -> torch.Tensor:
    """Return a sample that a stage takes."""
    if stage.takes == ("bytes",):
        name = stage.name if stage.name != "load_tensor" or stage == LoadTensor() else "safetensors"
        if name == "safetensors":
            return stored_tensor(safetensors.numpy.save({"a": np.ones(3)}))
        return stored_tensor(STORED[name][1])
    return {"pixels": PICTURE, "audio": SOUND, "spectrum": SOUND + 1j}[stage.takes[0]]


@pytest.mark.parametrize("stage", EXAMPLES, ids=repr)
def test_stage_says_whether_it_draws(stage: InputStage) -> None:
    if isinstance(stage, DecodeWav):
        stage = DecodeWav(16000, mono=stage.mono)
    if isinstance(stage, Decode):
        stage = Decode(orient=stage.orient)
    value, numbers = value_for(stage), {"seed": 1, "epoch": 2, "sample": 3, "stage": 4}
    if stage.draws:
        with pytest.raises(AssertionError, match="has asked for random numbers"):
            stage.apply(value, NoNumbers(**numbers))
    else:
        first = stage.apply(value, NoNumbers(**numbers))
        other = stage.apply(value, Draw(seed=5, epoch=6, sample=7, stage=8))
        assert torch.equal(first, other) and first.stride() == other.stride()


def test_stages_that_draw_are_those_known_to() -> None:
    drawing = {stage for stage in STAGES.values() if stage.draws}
    assert drawing == {type(stage) for stage, _ in RANDOM}
    assert {type(stage) for stage in EXAMPLES} == set(STAGES.values())
    assert InputStage.draws  # a stage that does not say counts as random


@given(chain=chains(), which=st.integers(0, 2), numbers=st.tuples(*[st.integers(0, 2**40)] * 2))
def test_first_draw_up_to_there_each_epoch_gives_the_same(
    chain: InputChain, which: int, numbers: tuple[int, int]
) -> None:
    value = stored_tensor(STORED[chain.stages[0].name][which])
    first = chain.first_draw
    stop = 0 if first is None else first
    assert chain.start < stop <= 0  # the stage that reads stored bytes draws nothing
    assert not any(chain.stage_at(position).draws for position in range(chain.start + 1, stop + 1))
    assert first is None or chain.stage_at(first + 1).draws
    try:
        one, other = (run(chain, value, chain.start, stop, sample, sample + 1) for sample in numbers)
    except SampleError:
        assume(False)
    assert torch.equal(one, other)
