"""Check audio stages against torch's and SciPy's transforms, and against formulas in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some
from tests.pipeline.making import tone
from upriver.errors import ConfigError
from upriver.pipeline import (
    AddNoise,
    DecodeWav,
    Draw,
    Fft,
    FixLength,
    InputStage,
    Resample,
    SampleError,
    Spectrogram,
    Standardize,
    Stft,
)
from upriver.pipeline.formats import audio
from upriver.pipeline.formats.audio import MAX_BYTES, MAX_CHANNELS
from upriver.pipeline.stages.audio import MAX_FFT, MAX_GROWTH, MAX_RATE, MAX_SAMPLES, MAX_TAPS


def draw_of(sample: int = 0, epoch: int = 0) -> Draw:
    return Draw(seed=3, epoch=epoch, sample=sample, stage=1)


def sound(samples: int, channels: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.tensor(tone(samples, channels, seed).T.copy(), dtype=torch.float32)


def apply(stage: InputStage, value: torch.Tensor, sample: int = 0) -> torch.Tensor:
    """Return a stage's result, after checking that it is contiguous and that the input is unchanged."""
    before = value.clone()
    got = stage.apply(value, draw_of(sample))
    assert torch.equal(value, before)
    assert got.is_contiguous()
    return got


# ------------------------------------------------------------------------------------------ FixLength


def test_longer_audio_is_cut_at_every_place() -> None:
    value = torch.arange(10, dtype=torch.float32).repeat(2, 1)
    starts = set()
    for sample in range(300):
        got = apply(FixLength(7), value, sample)
        start = int(got[0, 0])
        assert torch.equal(got, value[:, start : start + 7])
        assert got.untyped_storage().nbytes() == got.nbytes  # the rest of the signal is released
        starts.add(start)
    assert starts == {0, 1, 2, 3}


def test_shorter_audio_is_followed_by_silence() -> None:
    value = sound(5, 2)
    got = apply(FixLength(8), value)
    assert torch.equal(got[:, :5], value)
    assert torch.equal(got[:, 5:], torch.zeros(2, 3))
    assert torch.equal(apply(FixLength(5), value), value)


def test_no_length_takes_more_than_the_cap() -> None:
    with pytest.raises(SampleError, match=f"audio of {2 * MAX_BYTES} bytes; at most {MAX_BYTES} are allowed"):
        FixLength(MAX_SAMPLES).apply(sound(4, 2), draw_of())


# ------------------------------------------------------------------------------------------- AddNoise


@pytest.mark.parametrize("snr_db", [-20.0, 0.0, 10.0, 40.0])
def test_noise_has_the_power_asked_for(snr_db: float) -> None:
    value = sound(100_000, 2)
    noise = (apply(AddNoise(snr_db), value) - value).double()
    ratio = value.double().square().mean() / noise.square().mean()
    assert 10 * math.log10(ratio) == pytest.approx(snr_db, abs=0.05)
    assert abs(noise.mean()) < 0.02 * noise.std()
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.02  # each channel has its own


def test_of_two_ratios_one_between_is_drawn() -> None:
    value, found = sound(20_000), []
    for sample in range(60):
        noise = (apply(AddNoise((5, 15)), value, sample) - value).double()
        found.append(10 * math.log10(value.double().square().mean() / noise.square().mean()))
    assert 4.8 < min(found) < 6.5
    assert 13.5 < max(found) < 15.2


def test_silence_stays_silence() -> None:
    assert torch.equal(apply(AddNoise(0), torch.zeros(2, 50)), torch.zeros(2, 50))


def test_noise_is_that_of_the_draw() -> None:
    value = sound(1001, 2)
    power = value.double().square().mean().item()
    noise = draw_of(4).normals(2002, after=1).reshape(2, 1001) * math.sqrt(power / 10)
    assert torch.allclose(apply(AddNoise(10), value, 4), value + torch.tensor(noise).float(), atol=1e-7)


# ------------------------------------------------------------------------------------------- Resample

RATES = [(1, 2), (2, 1), (3, 2), (441, 160), (160, 441), (7, 5), (24, 1), (1, 24)]


@settings(deadline=None, max_examples=examples(60))
@given(samples=st.integers(1, 3000), channels=st.integers(1, 3), rates=st.sampled_from(RATES))
def test_the_length_is_in_proportion_and_rounded_up(
    samples: int, channels: int, rates: tuple[int, int]
) -> None:
    orig, new = rates
    got = apply(Resample(100 * orig, 100 * new), sound(samples, channels))
    assert got.shape == (channels, math.ceil(samples * new / orig))
    assert got.dtype is torch.float32


def one_by_one(signal: np.ndarray[Any, Any], orig: int, new: int) -> np.ndarray[Any, Any]:
    """Return the sum that the docstring names, computed for one output after another."""
    scale = audio.ROLLOFF * min(1.0, new / orig)
    out = []
    for at in range(math.ceil(len(signal) * new / orig)):
        reach = np.arange(at * orig // new - 600, at * orig // new + 600)
        times = (reach - at * orig / new) * scale
        weights = np.sinc(times) * np.cos(np.pi * times / 2 / audio.ZERO_CROSSINGS) ** 2
        weights[np.abs(times) >= audio.ZERO_CROSSINGS] = 0
        weights /= weights.sum()
        inside = (reach >= 0) & (reach < len(signal))
        out.append((weights[inside] * signal[reach[inside]]).sum())
    return np.array(out)


@pytest.mark.parametrize(("orig", "new"), RATES)
def test_each_output_is_the_sum_it_is_said_to_be(orig: int, new: int) -> None:
    value = sound(400)
    got = apply(Resample(orig, new), value)
    wanted = one_by_one(value[0].double().numpy(), orig, new)
    assert np.allclose(got[0].numpy(), wanted, atol=2e-6)


@pytest.mark.parametrize(("orig", "new"), RATES)
def test_a_long_signal_is_worked_on_in_blocks_that_do_not_show(
    orig: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = sound(5000, 2)
    whole = apply(Resample(orig, new), value)
    monkeypatch.setattr(audio, "_BLOCK", 3000)
    assert torch.allclose(apply(Resample(orig, new), value), whole, atol=1e-6)


@pytest.mark.parametrize(("orig", "new"), [(48000, 16000), (44100, 16000), (16000, 44100), (8000, 16000)])
def test_a_tone_that_fits_stays_and_one_that_does_not_goes(orig: int, new: int) -> None:
    limit, length = min(orig, new) / 2, orig
    inside = slice(new // 10, -new // 10)
    for frequency, stays in ((0.1 * limit, True), (0.85 * limit, True), (1.15 * limit, False)):
        if frequency >= orig / 2:
            continue
        times = torch.arange(length, dtype=torch.float64) / orig
        value = torch.sin(2 * math.pi * frequency * times).float().unsqueeze(0)
        got = apply(Resample(orig, new), value)[0, inside].double()
        if stays:
            times = torch.arange(new, dtype=torch.float64)[inside] / new
            assert (got - torch.sin(2 * math.pi * frequency * times)).abs().max() < 3e-3
        else:
            assert 20 * math.log10(got.abs().max()) < -60


def test_a_constant_stays_one_away_from_the_ends() -> None:
    got = apply(Resample(441, 160), torch.full((1, 4410), 0.5))
    assert torch.allclose(got[:, 50:-50], torch.tensor(0.5), atol=1e-6)


def test_equal_rates_change_nothing() -> None:
    value = sound(100)
    assert apply(Resample(44100, 44100), value) is value


def test_no_rate_takes_more_than_the_cap() -> None:
    value = torch.zeros(1, MAX_SAMPLES // 16)
    with pytest.raises(SampleError, match=f"at most {MAX_BYTES} are allowed"):
        Resample(1, 32).apply(value, draw_of())


# ----------------------------------------------------------------------------------------------- Stft


@pytest.mark.parametrize(
    ("n_fft", "hop", "win"),
    [(64, 16, None), (64, 64, 40), (63, 10, 63), (400, 160, None), (2, 1, 1), (33, 100, 20), (512, 16, 511)],
)
@pytest.mark.parametrize("samples", [257, 1000, 20_000])
def test_stft_is_torchs(n_fft: int, hop: int, win: int | None, samples: int) -> None:
    value = sound(samples, 2)
    got = apply(Stft(n_fft, hop, win), value)
    theirs = torch.stft(
        value,
        n_fft,
        hop,
        win or n_fft,
        window=torch.hann_window(win or n_fft),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    assert got.shape == theirs.shape
    assert got.dtype is torch.complex64
    assert torch.allclose(got, theirs, atol=2e-5, rtol=1e-5)


def test_blocks_of_frames_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    value = sound(3000)
    whole = apply(Stft(64, 16), value)
    monkeypatch.setattr(audio, "_BLOCK", 1000)
    assert torch.equal(apply(Stft(64, 16), value), whole)


def test_audio_that_is_too_short_to_be_mirrored_says_so() -> None:
    with pytest.raises(SampleError, match="audio of 32 samples; frames of 64 need at least 33"):
        Stft(64, 16).apply(sound(32), draw_of())
    assert apply(Stft(64, 16), sound(33)).shape == (1, 33, 3)


# ------------------------------------------------------------------------------- Fft and Spectrogram


@pytest.mark.parametrize("samples", [2, 3, 16, 17, 1009, 16000, 44100])
def test_fft_is_the_first_half_of_torchs(samples: int) -> None:
    value = sound(samples, 2)
    got = apply(Fft(), value)
    assert got.shape == (2, samples // 2)
    theirs = torch.fft.fft(value.double())[:, : samples // 2]
    assert torch.allclose(got.to(torch.complex128), theirs, atol=1e-6 * samples)
    with pytest.raises(SampleError, match="audio of 1 sample"):
        Fft().apply(sound(1), draw_of())


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("log", [False, True])
def test_a_spectrogram_is_the_power_of_each_magnitude(power: float, log: bool) -> None:
    for value in (Stft(64, 16).apply(sound(500, 2), draw_of()), Fft().apply(sound(500), draw_of())):
        got = apply(Spectrogram(power, log), value)
        wanted = value.abs().double() ** power
        wanted = (wanted + 1e-6).log() if log else wanted
        assert got.dtype is torch.float32
        assert torch.allclose(got.double(), wanted, rtol=1e-5, atol=1e-6)
    zeros = apply(Spectrogram(power, log), torch.zeros(1, 4, dtype=torch.complex64))
    assert torch.allclose(zeros, torch.tensor(math.log(1e-6) if log else 0.0))


# ---------------------------------------------------------------------------------------- Standardize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_standardize_is_its_formula(dtype: torch.dtype) -> None:
    value = (5 + 3 * sound(300_000, 2)).to(dtype)
    got = apply(Standardize(), value)
    wide = value.double()
    assert got.dtype is torch.float32
    wanted = (wide - wide.mean()) / (wide.std(unbiased=False) + 1e-8)
    assert torch.allclose(got.double(), wanted, atol=1e-5)
    assert abs(got.double().mean()) < 1e-5
    assert got.double().std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


@settings(deadline=None, max_examples=examples(100))
@given(number=st.floats(width=32, allow_nan=False, allow_infinity=False), count=st.integers(1, 5000))
def test_a_constant_becomes_zeros(number: float, count: int) -> None:
    assert torch.equal(apply(Standardize(), torch.full((1, count), number)), torch.zeros(1, count))


def test_any_shape_is_standardized() -> None:
    for shape in ((), (3,), (2, 3, 4, 5)):
        assert apply(Standardize(), torch.rand(shape)).shape == shape
    for value in (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.complex64), torch.zeros(0)):
        with pytest.raises(SampleError, match="takes floating-point numbers"):
            Standardize().apply(value, draw_of())


# ------------------------------------------------------------------------------------------ all stages

STAGES: list[InputStage] = [
    FixLength(20_000),
    FixLength(70_000),
    AddNoise(10),
    Resample(441, 160),
    Resample(16, 24),
    Stft(1024, 256),
    Fft(),
    Standardize(),
]


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_the_number_of_threads_does_not_show(stage: InputStage) -> None:
    value, found, before = sound(65_000, 2), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(apply(stage, value))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("stage", [*STAGES, Spectrogram()], ids=repr)
def test_results_lie_as_torch_lays_them(stage: InputStage) -> None:
    """Kernels choose their path, and with it low bits, by alignment."""
    value = Fft().apply(sound(500, 3), draw_of()) if isinstance(stage, Spectrogram) else sound(1000, 3)
    assert apply(stage, value).data_ptr() % 64 == 0


@pytest.mark.parametrize("stage", [*STAGES, Spectrogram()], ids=repr)
def test_a_view_gives_what_its_copy_gives(stage: InputStage) -> None:
    source = sound(4000, 2)
    if isinstance(stage, Spectrogram):
        source = Fft().apply(source, draw_of())
    view = source[:, 100:1900:1]
    assert not view.is_contiguous()
    assert torch.equal(stage.apply(view, draw_of()), stage.apply(view.clone(), draw_of()))


@pytest.mark.parametrize("stage", [stage for stage in STAGES if not isinstance(stage, Standardize)], ids=repr)
def test_what_is_no_audio_is_a_sample_error(stage: InputStage) -> None:
    for value in (
        torch.zeros(100),
        torch.zeros(1, 0),
        torch.zeros(MAX_CHANNELS + 1, 100),
        torch.zeros(1, 100, dtype=torch.float64),
        torch.zeros(1, 2, 100),
    ):
        with pytest.raises(SampleError, match="audio is float32 of shape"):
            stage.apply(value, draw_of())


def test_what_is_no_spectrum_is_a_sample_error() -> None:
    for value in (torch.zeros(1, 100), torch.zeros(100, dtype=torch.complex64)):
        with pytest.raises(SampleError, match="a spectrum is complex64 of shape"):
            Spectrogram().apply(value, draw_of())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: DecodeWav(MAX_RATE + 1), f"decode_wav.sample_rate must be a whole number in 1..{MAX_RATE}"),
        (lambda: DecodeWav(16000, mono=1), "decode_wav.mono must be true or false, got 1"),
        (lambda: DecodeWav(16000, max_samples=0), "decode_wav.max_samples must be a whole number in 1.."),
        (lambda: FixLength(MAX_SAMPLES + 1), "fix_length.samples must be a whole number in 1.."),
        (lambda: AddNoise(101), "add_noise.snr_db must lie in -100..100, got 101"),
        (lambda: AddNoise((20, 10)), "add_noise.snr_db must be low <= high, got (20, 10)"),
        (lambda: Resample(0, 1), "resample.orig must be a whole number in 1.."),
        (lambda: Resample(1000, 33_000), f"resample.new must be at most {MAX_GROWTH} times resample.orig"),
        (lambda: Resample(44_101, 48_000), f"at most {MAX_TAPS} are allowed: choose rates with a larger"),
        (lambda: Stft(1, 1), f"stft.n_fft must be a whole number in 2..{MAX_FFT}, got 1"),
        (lambda: Stft(1024, 31), f"stft.n_fft must be at most {MAX_GROWTH} times stft.hop (31), got 1024"),
        (lambda: Stft(64, 16, 65), "stft.win must be a whole number in 1..64, got 65"),
        (lambda: Spectrogram(0), "spectrogram.power must lie in 0.125..8, got 0"),
        (lambda: Spectrogram(log=0), "spectrogram.log must be true or false, got 0"),
        (lambda: Standardize(0), "standardize.eps must lie in 1e-12..1, got 0"),
    ],
)
def test_bad_values(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("orig", "new"), [(44100, 16000), (11025, 16000), (22050, 48000), (192000, 11025), (44100, 32000)]
)
def test_usual_rates_are_allowed(orig: int, new: int) -> None:
    assert audio.num_taps(orig, new) < MAX_TAPS / 2
    assert audio.num_taps(orig, new) == audio._kernel(*audio.in_lowest_terms(orig, new)).numel()
    Resample(orig, new)


@pytest.mark.parametrize("orig", [1, 2, 3, 7, 441, 1000, 10_000])
@pytest.mark.parametrize("new", some(2, [3, 31, 1, 2, 5, 33]))
def test_a_step_has_many_outputs_and_no_large_filter(orig: int, new: int) -> None:
    rates = audio.in_lowest_terms(orig, new)
    steps = audio._in_steps(*rates)
    assert audio.in_lowest_terms(*steps) == rates
    taps = audio._kernel(*steps).numel()
    assert taps <= max(audio.num_taps(orig, new), audio._BLOCK)
    assert steps[1] >= 32 or taps > audio._BLOCK / 3 or steps[1] == rates[1]
