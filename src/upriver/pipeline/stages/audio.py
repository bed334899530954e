"""Define stages of audio: decoding, length, noise and rate of a signal, and its spectra."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.pipeline.draw import Draw
from upriver.pipeline.formats import audio, wavfile
from upriver.pipeline.formats.audio import MAX_BYTES, MAX_CHANNELS
from upriver.pipeline.stages.base import (
    ANY_SIZE,
    SCRATCH_BYTES,
    InputStage,
    Sizes,
    Spec,
    check_bool,
    check_int,
    number_between,
    number_or_range,
    stored_bytes,
)

MAX_RATE = 768_000
"""Maximum samples a second: four times the rate of studio recordings."""

MAX_SAMPLES = MAX_BYTES // 4
"""Maximum samples of one channel, if it is the only one."""

DEFAULT_SAMPLES = 2**24
"""Default maximum samples of one channel: six minutes at 44.1 kHz, 64 MiB."""

MAX_DB = 100.0
"""Maximum signal-to-noise ratio, positive or negative: 16 bits hold 96 dB."""

MAX_FFT = 2**16
"""Maximum samples of one frame: more than a second at every usual rate."""

MAX_GROWTH = 32
"""Maximum output of a stage for each input byte, with overlapping frames or a higher rate."""

MAX_TAPS = 2**20
"""Maximum weights of a resampling filter: 4 MiB. Usual pairs of rates need less than half of them."""


@dataclass(frozen=True, slots=True)
class DecodeWav(InputStage):
    """Decode a WAV file to audio: PCM of 8 to 32 bits, or floating point.

    Attributes:
        sample_rate: Required rate of every file; another rate is a bad sample, not a reason to resample.
        mono: Whether to take the mean of the channels.
        max_samples: Cap on samples of a channel, checked before decoding.
    """

    name = "decode_wav"
    kind = "decode"
    takes = ("bytes",)
    gives = "audio"
    draws = False

    sample_rate: int
    mono: bool = True
    max_samples: int = DEFAULT_SAMPLES

    def __post_init__(self) -> None:
        check_int("decode_wav.sample_rate", self.sample_rate, MAX_RATE)
        check_bool("decode_wav.mono", self.mono)
        check_int("decode_wav.max_samples", self.max_samples, MAX_SAMPLES)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return the audio of stored bytes, float32 (channels, samples)."""
        return wavfile.read_wav(
            stored_bytes(value),
            sample_rate=self.sample_rate,
            mono=self.mono,
            max_samples=self.max_samples,
        )

    def spec(self, before: Spec | None) -> Spec | None:
        """Return float32 with an unknown number of samples, and of channels unless ``mono``."""
        return torch.float32, (1 if self.mono else ANY_SIZE, ANY_SIZE)

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return four bytes for each, as stored samples may have 8 bits."""
        channels = 1 if self.mono else MAX_CHANNELS
        return np.minimum(4 * taken, min(4 * self.max_samples * channels, MAX_BYTES))


@dataclass(frozen=True, slots=True)
class FixLength(InputStage):
    """Make ``samples`` of each channel: a random part of longer audio, or shorter audio followed by zeros."""

    name = "fix_length"
    kind = "augment"
    takes = ("audio",)
    gives = "audio"

    samples: int

    def __post_init__(self) -> None:
        check_int("fix_length.samples", self.samples, MAX_SAMPLES)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return audio of the requested length."""
        return audio.fix_length(value, self.samples, draw.uniforms(1)[0])

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the requested length."""
        return torch.float32, (_channels(before), self.samples)

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return the bytes for the largest possible number of channels, if it is unknown."""
        channels: Sizes = np.minimum(taken / 4, MAX_CHANNELS)
        return np.minimum(4 * self.samples * channels, MAX_BYTES)


@dataclass(frozen=True, slots=True)
class AddNoise(InputStage):
    """Add white Gaussian noise to a signal, relative to the signal's power.

    Attributes:
        snr_db: Signal-to-noise ratio in dB; from two numbers, a uniform draw between them.
    """

    name = "add_noise"
    kind = "augment"
    takes = ("audio",)
    gives = "audio"

    snr_db: float | tuple[float, float]

    def __post_init__(self) -> None:
        snr_db = number_or_range("add_noise.snr_db", self.snr_db, -MAX_DB, MAX_DB)
        object.__setattr__(self, "snr_db", snr_db)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return audio of the same length."""
        low, high = self.snr_db if isinstance(self.snr_db, tuple) else (self.snr_db, self.snr_db)
        (uniform,) = draw.uniforms(1)
        return audio.add_noise(value, low + (high - low) * uniform, draw, after=1)


@dataclass(frozen=True, slots=True)
class Resample(InputStage):
    """Convert audio from ``orig`` to ``new`` samples a second, by a windowed sinc."""

    name = "resample"
    kind = "resample"
    takes = ("audio",)
    gives = "audio"
    draws = False
    threaded = True

    orig: int
    new: int

    def __post_init__(self) -> None:
        check_int("resample.orig", self.orig, MAX_RATE)
        check_int("resample.new", self.new, MAX_RATE)
        if self.new > MAX_GROWTH * self.orig:
            raise ConfigError(
                f"resample.new must be at most {MAX_GROWTH} times resample.orig ({self.orig}), got {self.new}"
            )
        taps = audio.num_taps(self.orig, self.new)
        if taps > MAX_TAPS:
            raise ConfigError(
                f"resample.orig and resample.new take a filter of {taps} weights, got {self.orig} and "
                f"{self.new}; at most {MAX_TAPS} are allowed: choose rates with a larger common divisor"
            )

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return audio of ceil(samples * new / orig) samples."""
        return audio.resample(value, self.orig, self.new)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the length at the new rate, if the input's length is known."""
        if before is None or before[1][1] == ANY_SIZE:
            return torch.float32, (_channels(before), ANY_SIZE)
        return torch.float32, (before[1][0], -(-before[1][1] * self.new // self.orig))

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return bytes in proportion to the rates, rounded up for each channel."""
        return np.minimum(taken * self.new / self.orig + 4 * MAX_CHANNELS, MAX_BYTES)

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return the peak memory, including some copies of the filter in double precision."""
        return given + 64 * audio.num_taps(self.orig, self.new) + 16 * SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class Stft(InputStage):
    """Compute the short-time Fourier transform: a Hann window, centred frames, mirrored ends.

    Attributes:
        n_fft: Samples of a frame.
        hop: Samples from one frame to the next.
        win: Samples of the window; ``n_fft`` if None.
    """

    name = "stft"
    kind = "transform"
    takes = ("audio",)
    gives = "spectrum"
    draws = False

    n_fft: int
    hop: int
    win: int | None = None

    def __post_init__(self) -> None:
        check_int("stft.n_fft", self.n_fft, MAX_FFT, least=2)
        check_int("stft.hop", self.hop, MAX_FFT)
        if self.n_fft > MAX_GROWTH * self.hop:
            raise ConfigError(
                f"stft.n_fft must be at most {MAX_GROWTH} times stft.hop ({self.hop}), got {self.n_fft}"
            )
        if self.win is not None:
            check_int("stft.win", self.win, self.n_fft)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return complex64 (channels, n_fft // 2 + 1, frames)."""
        return audio.stft(value, self.n_fft, self.hop, self.win or self.n_fft)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return the number of frames, if the number of samples is known."""
        frames = ANY_SIZE
        if before is not None and before[1][1] != ANY_SIZE:
            frames = 1 + (before[1][1] - self.n_fft % 2) // self.hop
        return torch.complex64, (_channels(before), self.n_fft // 2 + 1, frames)

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return the bytes of a frame for each hop, and one more for each channel."""
        frames = taken / 4 / self.hop + MAX_CHANNELS
        return np.minimum(8 * (self.n_fft // 2 + 1) * frames, MAX_BYTES)

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return the peak memory: one channel with mirrored ends, and a block of frames."""
        return 2 * taken + given + 8 * SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class Fft(InputStage):
    """Compute the first half of a whole signal's Fourier transform: frequencies below half its rate."""

    name = "fft"
    kind = "transform"
    takes = ("audio",)
    gives = "spectrum"
    draws = False

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return complex64 (channels, samples // 2)."""
        return audio.fft(value)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return half the number of samples, if it is known."""
        known = before is not None and before[1][1] != ANY_SIZE
        return torch.complex64, (_channels(before), before[1][1] // 2 if before and known else ANY_SIZE)

    def working_bytes(self, taken: Sizes, given: Sizes) -> Sizes:
        """Return the peak memory; large prime factors need longer transforms in double precision."""
        return 44 * taken + SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class Spectrogram(InputStage):
    """Compute the strength of each frequency.

    Attributes:
        power: 2 for power, 1 for magnitude, or any between.
        log: Whether to take the logarithm, after adding ``1e-6``.
    """

    name = "spectrogram"
    kind = "transform"
    takes = ("spectrum",)
    gives = "tensor"
    draws = False

    power: float = 2.0
    log: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", number_between("spectrogram.power", self.power, 0.125, 8))
        check_bool("spectrogram.log", self.log)

    def apply(self, value: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return float32 of the spectrum's shape."""
        return audio.spectrogram(value, self.power, log=self.log)

    def spec(self, before: Spec | None) -> Spec | None:
        """Return float32 of the same shape."""
        return (torch.float32, before[1]) if before else None

    def given_bytes(self, taken: Sizes) -> Sizes:
        """Return half the bytes: one number for two."""
        return taken / 2


def _channels(before: Spec | None) -> int:
    return before[1][0] if before else ANY_SIZE
