"""Check that a chain gives the same bits, however it is divided, wherever and whenever it runs."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipeline.making import encoded, npy, pixels, tone, wav
from upriver.errors import ConfigError, DatasetError
from upriver.pipeline import (
    AddNoise,
    CenterCrop,
    ColorJitter,
    Decode,
    DecodeWav,
    Fft,
    FixLength,
    InputChain,
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
    imagenet_eval,
    imagenet_train,
    stored_tensor,
)

TRAIN = InputChain(
    (Decode(), RandomResizedCrop(20), RandomHorizontalFlip(), RandomResizedCrop(16), Normalize())
)
DATA = [encoded(pixels(40 + n, 60 - n, seed=n)) for n in range(4)]


def run(sample: int, *, epoch: int = 0, seed: int = 0, chain: InputChain = TRAIN) -> torch.Tensor:
    value = stored_tensor(DATA[sample % len(DATA)])
    return chain.run(value, sample=sample, epoch=epoch, seed=seed, start=chain.start, stop=0)


@settings(deadline=None, max_examples=examples(60))
@given(
    cuts=st.lists(st.integers(TRAIN.start, 0), max_size=3).map(sorted),
    sample=st.integers(0, 2**40),
    epoch=st.integers(0, 2**40),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_split_gives_the_same_bits(cuts: list[int], sample: int, epoch: int, seed: int) -> None:
    whole = run(sample, epoch=epoch, seed=seed)
    value = stored_tensor(DATA[sample % len(DATA)])
    for start, stop in zip([TRAIN.start, *cuts], [*cuts, 0], strict=True):
        before = value.clone()
        after = TRAIN.run(value, sample=sample, epoch=epoch, seed=seed, start=start, stop=stop)
        assert torch.equal(value, before)  # the input is unchanged
        value = after.clone()  # as if it had been sent
    assert torch.equal(value, whole)


def test_order_and_replay_do_not_matter() -> None:
    first = [run(sample, epoch=epoch) for epoch in range(2) for sample in range(8)]
    torch.manual_seed(123)
    again = {(epoch, sample): run(sample, epoch=epoch) for sample in reversed(range(8)) for epoch in (1, 0)}
    assert all(torch.equal(first[8 * epoch + sample], value) for (epoch, sample), value in again.items())


def test_global_generators_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    run(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sample_epoch_and_seed_each_change_what_is_drawn() -> None:
    base = run(0)
    assert not torch.equal(base, run(len(DATA)))  # the same bytes as another sample
    assert not torch.equal(base, run(0, epoch=1))
    assert not torch.equal(base, run(0, seed=1))


def test_two_random_stages_draw_apart() -> None:
    value = torch.tensor(pixels(30, 30))
    flips = InputChain((Decode(), RandomHorizontalFlip(), RandomHorizontalFlip()))
    got = {flips.run(value, sample=n, epoch=0, seed=0, start=-2, stop=0).numpy().tobytes() for n in range(20)}
    assert len(got) == 2  # two equal draws would always flip there and back


ELSEWHERE = """
import sys, zlib
from upriver.pipeline import InputChain, stored_tensor
import json
chain, data = InputChain.from_json(json.loads(sys.argv[1])), bytes.fromhex(sys.argv[2])
out = chain.run(stored_tensor(data), sample=5, epoch=3, seed=9, start=chain.start, stop=0)
print(zlib.crc32(out.numpy().tobytes()))
"""


@pytest.mark.full
def test_another_process_gives_the_same_bits() -> None:
    import zlib

    here = TRAIN.run(stored_tensor(DATA[0]), sample=5, epoch=3, seed=9, start=TRAIN.start, stop=0)
    command = [sys.executable, "-c", ELSEWHERE, json.dumps(TRAIN.to_json()), DATA[0].hex()]
    there = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(there.stdout) == zlib.crc32(here.numpy().tobytes())


def test_positions_count_backwards_from_the_model() -> None:
    chain = InputChain(imagenet_eval(16, 20))
    assert chain.start == -4
    assert [chain.stage_at(position).name for position in (-3, -2, -1, 0)] == [
        "decode",
        "resize",
        "center_crop",
        "normalize",
    ]
    value = stored_tensor(DATA[0])
    shapes = [
        tuple(chain.run(value, sample=0, epoch=0, seed=0, start=-4, stop=stop).shape) for stop in range(-4, 1)
    ]
    assert shapes == [(len(DATA[0]),), (40, 60, 3), (20, 30, 3), (16, 16, 3), (3, 16, 16)]
    for position in (-4, 1):
        with pytest.raises(ConfigError, match=r"-3\.\.0, got"):
            chain.stage_at(position)


def test_seconds_are_added_where_each_stage_ends() -> None:
    chain, seconds = InputChain(imagenet_eval(16, 20)), {-3: 100.0}
    value = stored_tensor(DATA[0])
    half = chain.run(value, sample=0, epoch=0, seed=0, start=-4, stop=-2, seconds=seconds)
    assert set(seconds) == {-3, -2}
    assert seconds[-3] > 100
    chain.run(half, sample=0, epoch=0, seed=0, start=-2, stop=0, seconds=seconds)
    assert set(seconds) == {-3, -2, -1, 0}
    assert all(value > 0 for value in seconds.values())


@pytest.mark.parametrize(("start", "stop"), [(-6, 0), (0, 1), (-1, -2)])
def test_positions_outside_the_chain(start: int, stop: int) -> None:
    with pytest.raises(ConfigError, match=f"-5 <= start <= stop <= 0, got {start} to {stop}"):
        TRAIN.run(stored_tensor(b""), sample=0, epoch=0, seed=0, start=start, stop=stop)


def test_a_bad_sample_comes_out_as_one() -> None:
    with pytest.raises(SampleError, match="not a whole image"):
        TRAIN.run(stored_tensor(DATA[0][:200]), sample=0, epoch=0, seed=0, start=TRAIN.start, stop=0)


def test_json_there_and_back() -> None:
    for chain in (TRAIN, InputChain(imagenet_train()), InputChain((LoadTensor("safetensors"),))):
        assert InputChain.from_json(json.loads(json.dumps(chain.to_json()))) == chain


@pytest.mark.parametrize("data", [None, "decode", {"stage": "decode"}, [{"stage": "decode"}] * 65])
def test_json_of_no_chain(data: object) -> None:
    with pytest.raises(DatasetError, match="must be a list of at most 64"):
        InputChain.from_json(data)


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((), "1..64 stages, got 0"),
        ((Resize(3),), r"stage 0 \(resize\) takes pixels, but gets bytes"),
        ((Decode(), Decode()), r"stage 1 \(decode\) takes bytes, but gets pixels"),
        ((LoadTensor(), Decode()), r"stage 1 \(decode\) takes bytes, but gets any"),
        ((Decode(), Normalize(), Resize(3)), r"stage 2 \(resize\) takes pixels, but gets tensor"),
        ((Decode(), "resize"), "stage 1 must be an input stage, got str"),
        ((DecodeWav(8000), Normalize()), r"stage 1 \(normalize\) takes pixels, but gets audio"),
        ((DecodeWav(8000), Spectrogram()), r"stage 1 \(spectrogram\) takes spectrum, but gets audio"),
        ((DecodeWav(8000), Fft(), Fft()), r"stage 2 \(fft\) takes audio, but gets spectrum"),
        (
            (DecodeWav(8000), Fft(), Standardize()),
            r"stage 2 \(standardize\) takes audio or tensor, but gets sp",
        ),
        ((Decode(), FixLength(8)), r"stage 1 \(fix_length\) takes audio, but gets pixels"),
        ((Decode(), Standardize()), r"stage 1 \(standardize\) takes audio or tensor, but gets pixels"),
        ((Standardize(),), r"stage 0 \(standardize\) takes audio or tensor, but gets bytes"),
        ((DecodeWav(8000), DecodeWav(8000)), r"stage 1 \(decode_wav\) takes bytes, but gets audio"),
        ((Decode(), Normalize(), ToFloat()), r"stage 2 \(to_float\) takes pixels, but gets tensor"),
    ],
)
def test_stages_that_do_not_fit_together(stages: tuple[object, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        InputChain(stages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "spec"),
    [
        (imagenet_train(32), (torch.float32, (3, 32, 32))),
        (imagenet_eval(32, 40), (torch.float32, (3, 32, 32))),
        ((Decode(), Resize((5, 7)), Normalize()), (torch.float32, (3, 5, 7))),
        ((Decode(), CenterCrop((10, 20)), Resize(5), RandomHorizontalFlip()), (torch.uint8, (5, 10, 3))),
        ((Decode(), Resize(5), Normalize()), None),
        ((LoadTensor(),), None),
        ((Decode(),), None),
        ((Decode(), RandomCrop(8), ColorJitter(0.1), RandAugment(), ToFloat()), (torch.float32, (3, 8, 8))),
    ],
)
def test_the_output_is_known_where_stages_tell(stages: tuple[object, ...], spec: object) -> None:
    chain = InputChain(stages)  # type: ignore[arg-type]
    assert chain.output_spec() == spec
    if spec is not None:
        got = run(0, chain=chain)
        assert (got.dtype, tuple(got.shape)) == spec


WORDS = InputChain((DecodeWav(8000), FixLength(600), AddNoise(20), Resample(8000, 12000)))


@pytest.mark.parametrize(
    ("stages", "spec"),
    [
        (WORDS.stages, (torch.float32, (1, 900))),
        ((*WORDS.stages, Stft(64, 16), Spectrogram(log=True)), (torch.float32, (1, 33, 57))),
        ((*WORDS.stages, Stft(63, 20)), (torch.complex64, (1, 32, 45))),
        ((*WORDS.stages, Fft(), Spectrogram(), Standardize()), (torch.float32, (1, 450))),
        ((*WORDS.stages, Standardize()), (torch.float32, (1, 900))),
        ((DecodeWav(8000, mono=False), FixLength(600), Fft()), None),
        ((DecodeWav(8000), Resample(8000, 16000), Stft(64, 16)), None),
        ((DecodeWav(8000), Fft(), Spectrogram()), None),
        ((DecodeWav(8000), Standardize()), None),
        ((LoadTensor(), Standardize()), None),
    ],
)
def test_the_output_of_audio_is_known_where_stages_tell(stages: tuple[object, ...], spec: object) -> None:
    chain = InputChain(stages)  # type: ignore[arg-type]
    assert chain.output_spec() == spec
    if spec is not None:
        value = stored_tensor(wav(tone(500, 2), rate=8000))
        got = chain.run(value, sample=0, epoch=0, seed=0, start=chain.start, stop=0)
        assert (got.dtype, tuple(got.shape)) == spec


def test_stored_audio_passes_the_other_stages_too() -> None:
    array = tone(500, 2)
    chain = InputChain((LoadTensor("npy"), FixLength(600), Fft(), Spectrogram(), Standardize()))
    stored = stored_tensor(npy(array.T.astype(np.float32)))
    got = chain.run(stored, sample=0, epoch=0, seed=0, start=chain.start, stop=0)
    same = InputChain((DecodeWav(8000, mono=False), *chain.stages[1:]))
    file = stored_tensor(wav(array, rate=8000, bits=32, floating=True))
    assert torch.equal(got, same.run(file, sample=0, epoch=0, seed=0, start=chain.start, stop=0))


def test_stored_pixels_pass_the_other_stages_too() -> None:
    array = pixels(30, 40)
    chain = InputChain((LoadTensor("npy"), Resize(16), CenterCrop(16), Normalize()))
    got = chain.run(stored_tensor(npy(array)), sample=0, epoch=0, seed=0, start=chain.start, stop=0)
    same = InputChain((Decode(), *chain.stages[1:]))
    png = stored_tensor(encoded(array, "PNG"))
    assert torch.equal(got, same.run(png, sample=0, epoch=0, seed=0, start=-4, stop=0))


def test_stored_bytes_become_a_tensor_of_their_own() -> None:
    data = bytearray(b"123")
    got = stored_tensor(memoryview(data))
    data[0] = 0
    assert got.tolist() == [49, 50, 51]
    assert stored_tensor(b"").shape == (0,)
