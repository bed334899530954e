"""Compute on signals for the audio stages, with torch and NumPy alone.

Sums and transforms use NumPy, which works in one thread. Torch divides a long sum among its threads, so its
result depends on their number. Long signals are processed in blocks, which need little memory besides input
and output.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError

Samples = np.ndarray[Any, np.dtype[np.float32]]

MAX_CHANNELS = 8
"""Maximum channels of one sample: loudspeakers around a listener (7.1), and most arrays of microphones."""

MAX_BYTES = 2**28
"""Cap on an audio stage's output, equal to that on a stored sample: 25 minutes at 44.1 kHz."""

ZERO_CROSSINGS = 24
"""Zero crossings of the low-pass filter, to each side.

Tones up to 0.9 of the band stay within 0.6 %, and tones a tenth beyond it are below -60 dB.
"""

ROLLOFF = 0.99
"""Share of the band at whose end the low-pass filter has fallen to a half."""

LOG_FLOOR = 1e-6
"""Added before a logarithm: silence becomes -13.8."""

_BLOCK = 2**17  # count of numbers processed at once

_LEAST_OUTPUTS = 32  # per convolution step: one output a step takes twenty times as long


def check_audio(value: torch.Tensor) -> tuple[int, int]:
    """Check a value that must be audio, and return its channels and samples.

    Raises:
        SampleError: If the value is not audio.
    """
    fits = value.dtype is torch.float32 and value.dim() == 2 and value.numel() > 0
    if not fits or value.shape[0] > MAX_CHANNELS:
        raise SampleError(
            f"audio is float32 of shape (channels, samples) with at most {MAX_CHANNELS} channels, got "
            f"{value.dtype} of {tuple(value.shape)}"
        )
    return value.shape[0], value.shape[1]


def check_bytes(what: str, nbytes: int) -> None:
    """Check the size of an output before it is made.

    Raises:
        SampleError: If it is too large.
    """
    if nbytes > MAX_BYTES:
        raise SampleError(f"{what} of {nbytes} bytes; at most {MAX_BYTES} are allowed")


# ------------------------------------------------------------------------------------------- length


def fix_length(value: torch.Tensor, samples: int, uniform: float) -> torch.Tensor:
    """Return a part of longer audio, at the place given by ``uniform``; append zeros to shorter audio.

    Raises:
        SampleError: If the value is not audio, or the result is too large.
    """
    channels, has = check_audio(value)
    check_bytes("audio", 4 * channels * samples)
    if has == samples:
        return value
    out = torch.zeros((channels, samples), dtype=torch.float32, device="cpu")
    start = int(uniform * (max(has - samples, 0) + 1))
    out[:, : min(has, samples)] = value[:, start : start + samples]
    return out


def resample(value: torch.Tensor, orig: int, new: int) -> torch.Tensor:
    """Return audio at another rate, after a low-pass filter at half the lower rate.

    Each output is a sum of inputs around its own time, weighted by a sinc under a Hann window. The weights
    depend on the output's place among ``new`` outputs, and repeat after ``orig`` inputs (Smith, Digital Audio
    Resampling, 2002). The signal is silent before its beginning and after its end.

    Returns:
        Audio of ceil(samples * new / orig) samples.

    Raises:
        SampleError: If the value is not audio, or the result is too large.
    """
    channels, samples = check_audio(value)
    orig, new = in_lowest_terms(orig, new)
    if orig == new:
        return value
    length = -(-samples * new // orig)
    check_bytes("audio", 4 * channels * length)
    orig, new = _in_steps(orig, new)
    kernel = _kernel(orig, new)
    reach = (kernel.shape[2] - orig) // 2
    out = torch.empty((channels, length), dtype=torch.float32, device="cpu")
    steps = max(1, _BLOCK // max(kernel.shape[2], new))
    for start in range(0, length, steps * new):
        count = min(length - start, steps * new)
        first = start // new * orig - reach
        signal = _stretch(value, first, first + (-(-count // new) - 1) * orig + kernel.shape[2])
        with torch.autocast("cpu", enabled=False):  # training in this process may use autocast
            found = torch.nn.functional.conv1d(signal.unsqueeze(1), kernel, stride=orig)
        out[:, start : start + count] = found.transpose(1, 2).reshape(channels, -1)[:, :count]
    return out


def in_lowest_terms(orig: int, new: int) -> tuple[int, int]:
    """Reduce the ratio of two rates to the smallest whole numbers."""
    divisor = math.gcd(orig, new)
    return orig // divisor, new // divisor


def num_taps(orig: int, new: int) -> int:
    """Return the number of weights of the filter between two rates."""
    orig, new = in_lowest_terms(orig, new)
    return new * (2 * _reach(orig, new) + orig)


def _in_steps(orig: int, new: int) -> tuple[int, int]:
    """Return inputs and outputs of a convolution step, of several rounds if a round has few outputs."""
    rounds = -(-_LEAST_OUTPUTS // new)
    while rounds > 1 and new * rounds * (2 * _reach(orig, new) + orig * rounds) > _BLOCK:
        rounds -= 1
    return orig * rounds, new * rounds


def _reach(orig: int, new: int) -> int:
    """Return the number of inputs to each side on which an output depends."""
    return math.ceil(ZERO_CROSSINGS * max(1.0, orig / new) / ROLLOFF)


@functools.lru_cache(maxsize=4)
def _kernel(orig: int, new: int) -> torch.Tensor:
    """Return weights of shape (new, 1, taps), a row for each output; each sums to 1 to keep a constant."""
    reach = _reach(orig, new)
    times = np.arange(-reach, orig + reach)[None, :] - (np.arange(new) * orig / new)[:, None]
    times *= ROLLOFF * min(1.0, new / orig)
    window = np.cos(times * (math.pi / 2 / ZERO_CROSSINGS)) ** 2
    weights = np.where(np.abs(times) < ZERO_CROSSINGS, np.sinc(times) * window, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    return torch.tensor(weights, dtype=torch.float32, device="cpu").unsqueeze(1)


def _stretch(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return samples [start, stop) of each channel, with zeros outside."""
    inside = value[:, max(start, 0) : max(stop, 0)]
    before = max(-start, 0)
    return torch.nn.functional.pad(inside, (before, stop - start - before - inside.shape[1]))


# -------------------------------------------------------------------------------------------- level


def add_noise(value: torch.Tensor, snr_db: float, draw: Draw, *, after: int) -> torch.Tensor:
    """Add white Gaussian noise whose power is ``snr_db`` below the audio's; silence stays silent.

    Args:
        snr_db: Ratio of the two powers over the whole sample, in dB.
        after: Number of words of ``draw`` that are used already.

    Raises:
        SampleError: If the value is not audio.
    """
    check_audio(value)
    signal = _flat(value)
    power = _mean_square(signal)
    if power == 0:
        return value
    noise = draw.normals(len(signal), after=after)
    noise *= math.sqrt(power) * 10.0 ** (-snr_db / 20.0)
    out = torch.empty(value.shape, dtype=torch.float32, device="cpu")
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(signal, noise, out=_flat(out), casting="same_kind")
    return out


def standardize(value: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``(x - mean) / (std + eps)`` over all of a float32 tensor; a constant one becomes zeros."""
    numbers, out = _flat(value), torch.empty(value.shape, dtype=torch.float32, device="cpu")
    centred = _flat(out)
    with np.errstate(over="ignore", invalid="ignore"):
        # The mean is rounded first: for equal numbers it is then that number, and the difference is 0.
        np.subtract(numbers, np.float32(np.mean(numbers, dtype=np.float64)), out=centred)
        centred /= np.float32(math.sqrt(_mean_square(centred)) + eps)
    return out


def _mean_square(numbers: Samples) -> float:
    total = 0.0
    for start in range(0, len(numbers), _BLOCK):
        total += float(np.square(numbers[start : start + _BLOCK], dtype=np.float64).sum())
    return total / len(numbers)


def _flat(value: torch.Tensor) -> Samples:
    """Return a tensor's numbers in one dimension; a contiguous tensor's memory is shared."""
    return value.contiguous().numpy().reshape(-1)


# ------------------------------------------------------------------------------------------ spectra


def fft(value: torch.Tensor) -> torch.Tensor:
    """Return the first half of each channel's Fourier transform.

    Returns:
        complex64 of shape (channels, samples // 2).

    Raises:
        SampleError: If the value is not audio, or has one sample.
    """
    channels, samples = check_audio(value)
    if samples < 2:
        raise SampleError(f"audio of {samples} sample; a Fourier transform has no half below 2")
    out = torch.empty((channels, samples // 2), dtype=torch.complex64, device="cpu")
    for row, signal in zip(out.numpy(), value.numpy(), strict=True):
        row[...] = np.fft.rfft(signal)[: samples // 2]
    return out


def stft(value: torch.Tensor, n_fft: int, hop: int, win: int) -> torch.Tensor:
    """Return Fourier transforms of parts of each channel, under a Hann window, as ``torch.stft`` gives them.

    Frame ``t`` is centred on sample ``t * hop``; beyond its ends the signal is mirrored.

    Args:
        win: Samples of the window, which is centred in a frame.

    Returns:
        complex64 of shape (channels, n_fft // 2 + 1, frames).

    Raises:
        SampleError: If the value is not audio, is too short to be mirrored, or the result is too large.
    """
    channels, samples = check_audio(value)
    side = n_fft // 2
    if samples <= side:
        raise SampleError(f"audio of {samples} samples; frames of {n_fft} need at least {side + 1}")
    frames = 1 + (samples + 2 * side - n_fft) // hop
    check_bytes("a spectrum", 8 * channels * (side + 1) * frames)
    out = torch.empty((channels, side + 1, frames), dtype=torch.complex64, device="cpu")
    window, at_once = _hann(n_fft, win), max(1, _BLOCK // n_fft)
    for rows, signal in zip(out.numpy(), value.numpy(), strict=True):
        mirrored = np.pad(signal, side, mode="reflect")
        parts = np.lib.stride_tricks.sliding_window_view(mirrored, n_fft)[::hop]
        for start in range(0, frames, at_once):
            stop = min(start + at_once, frames)
            rows[:, start:stop] = np.fft.rfft(parts[start:stop] * window, axis=1).T
    return out


def spectrogram(value: torch.Tensor, power: float, *, log: bool) -> torch.Tensor:
    """Return ``|x| ** power`` of a spectrum, or the logarithm of that plus `LOG_FLOOR`.

    Raises:
        SampleError: If the value is not a spectrum.
    """
    if value.dtype is not torch.complex64 or value.dim() not in (2, 3) or value.numel() == 0:
        raise SampleError(
            "a spectrum is complex64 of shape (channels, frequencies) or (channels, frequencies, frames), "
            f"got {value.dtype} of {tuple(value.shape)}"
        )
    out = torch.empty(value.shape, dtype=torch.float32, device="cpu")
    found, parts = _flat(out), value.contiguous().numpy().reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(parts.real, parts.real, out=found)
        found += parts.imag * parts.imag
        if power == 1:
            np.sqrt(found, out=found)
        elif power != 2:
            np.power(found, np.float32(power / 2), out=found)
        if log:
            found += np.float32(LOG_FLOOR)
            np.log(found, out=found)
    return out


@functools.lru_cache(maxsize=8)
def _hann(n_fft: int, win: int) -> Samples:
    """Return a Hann window centred in a frame of zeros; periodic, as in torch."""
    window = np.zeros(n_fft, dtype=np.float32)
    start = (n_fft - win) // 2
    window[start : start + win] = 0.5 - 0.5 * np.cos(np.arange(win) * (2.0 * math.pi / win)) if win > 1 else 1
    return window
