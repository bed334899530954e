"""Read stored audio: RIFF WAVE files of PCM or floating-point samples.

The parser is our own, as for other stored tensors: the sizes that a file claims must agree with its length
before memory of that size is allocated. The format is that of the Multimedia Programming Interface and Data
Specifications 1.0 (IBM and Microsoft, 1991), with WAVE_FORMAT_EXTENSIBLE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from upriver.pipeline.errors import SampleError
from upriver.pipeline.formats.audio import MAX_CHANNELS, Samples, check_bytes

Stored = np.ndarray[Any, np.dtype[Any]]
"""Samples in one of the types of stored files."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")
"""Tail of a subformat whose first two bytes are a plain format's number."""

_UNKNOWN_BYTES = 0x7FFFF000
"""Smallest size that stands for an unknown one: SoX writes this size, FFmpeg 0xFFFFFFFF."""

_MAX_CHUNKS = 1024  # limit before the samples; files have a handful
_DTYPES = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 24): "u1",  # three of them are one sample
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WavForm:
    """Format of a WAV file's samples.

    Attributes:
        rate: Samples a second, of each channel.
        tag: 1 for PCM, 3 for floating point.
        bits: Bits of one stored sample.
    """

    rate: int
    channels: int
    tag: int
    bits: int

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of one sample of each channel."""
        return self.channels * self.bits // 8


def read_form(data: bytes | memoryview) -> WavForm:
    """Read the format of a file's samples; the beginning of the file is enough.

    Raises:
        SampleError: If the file is no WAV file, or of an unsupported kind.
    """
    view = memoryview(data)
    for name, start, size in _chunks(view):
        if name == b"fmt ":
            return _form(view[start : start + size])
        if name == b"data":
            break
    raise SampleError("not a whole WAV file: no format before its samples")


def read_wav(data: bytes | memoryview, *, sample_rate: int, mono: bool, max_samples: int) -> torch.Tensor:
    """Read the samples of a WAV file, -1 to 1.

    Args:
        mono: Whether to take the mean of the channels.
        max_samples: Cap on samples of a channel, checked before anything is allocated.

    Returns:
        float32 of shape (channels, samples).

    Raises:
        SampleError: If the data are no such file, are truncated, have another rate, no samples or too many,
            or hold samples that are not finite.
    """
    view = memoryview(data)
    form = read_form(view)
    if form.rate != sample_rate:
        raise SampleError(f"audio of {form.rate} samples a second; {sample_rate} are needed")
    start, size = next((start, size) for name, start, size in _chunks(view) if name == b"data")
    samples = _stored_bytes(view, start, size) // form.frame_bytes  # half a frame at the end does not count
    if not 1 <= samples <= max_samples:
        raise SampleError(f"audio of {samples} samples; 1 to {max_samples} are allowed")
    check_bytes("audio", 4 * samples * (1 if mono else form.channels))
    count = samples * form.channels * (3 if form.bits == 24 else 1)
    stored = np.frombuffer(view, dtype=_DTYPES[form.tag, form.bits], offset=start, count=count)
    return _floats(stored.reshape(samples, form.channels, -1), form, mono=mono)


def _stored_bytes(view: memoryview, start: int, claimed: int) -> int:
    """Return the stored bytes of samples.

    A program that writes to a pipe does not know the size in time: its header holds the largest number that
    fits, or 0. As in libsndfile, the samples then end with the file. A file that ends before the position in
    its first header was cut off.

    Raises:
        SampleError: If the file was cut off.
    """
    stored = len(view) - start
    end = 8 + int.from_bytes(view[4:8], "little")
    if claimed > stored:
        if len(view) < end < _UNKNOWN_BYTES:
            raise SampleError(
                f"not a whole WAV file: {claimed} bytes of samples, {stored} are stored; it is cut off at "
                f"byte {len(view)} of {end}"
            )
        return stored
    return stored if claimed == 0 and end <= start else claimed


def _chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, position and claimed size of each chunk."""
    head = bytes(view[:12])
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        what = f"starts with {head!r}" if head else "is empty"
        raise SampleError(f"not a WAV file: it {what}")
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(view):
            break
        size = int.from_bytes(view[at + 4 : at + 8], "little")
        yield bytes(view[at : at + 4]), at + 8, size
        at += 8 + size + size % 2
    raise SampleError("not a whole WAV file: it ends before its samples")


def _form(body: memoryview) -> WavForm:
    if len(body) < 16:
        raise SampleError(f"not a whole WAV file: its format has {len(body)} bytes")
    tag, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", body)
    if tag == _EXTENSIBLE and bytes(body[26:40]) == _GUID_TAIL:
        tag = int.from_bytes(body[24:26], "little")
    if (tag, bits) not in _DTYPES:
        raise SampleError(
            f"WAV samples of format {tag} with {bits} bits; allowed: PCM ({_PCM}) with 8, 16, 24 or 32, "
            f"floating point ({_FLOAT}) with 32 or 64"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise SampleError(f"audio of {channels} channels; 1 to {MAX_CHANNELS} are allowed")
    if frame_bytes != channels * bits // 8:
        raise SampleError(f"WAV samples of {channels} channels and {bits} bits in {frame_bytes} bytes")
    return WavForm(rate=rate, channels=channels, tag=tag, bits=bits)


def _floats(stored: Stored, form: WavForm, *, mono: bool) -> torch.Tensor:
    """Convert stored samples of shape (samples, channels, 1), or with 3 in place of 1 for three bytes."""
    samples, channels, _ = stored.shape
    out = torch.empty((1 if mono else channels, samples), dtype=torch.float32, device="cpu")
    rows = out.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # infinite results are found below
        for channel, row in enumerate(rows):
            _fill(row, stored[:, channel], form)
        if len(rows) < channels:
            other = np.empty(samples, dtype=np.float32)
            for channel in range(1, channels):
                _fill(other, stored[:, channel], form)
                rows += other
            rows /= channels
    if form.tag == _FLOAT and not np.isfinite(rows).all():
        raise SampleError("audio with samples that are no finite numbers")
    return out


def _fill(row: Samples, stored: Stored, form: WavForm) -> None:
    """Write one channel as numbers from -1 to 1, exactly except for 32-bit PCM and doubles."""
    if form.bits == 24:
        row[...] = stored[:, 2].view(np.int8)
        for byte in (stored[:, 1], stored[:, 0]):
            row *= 256
            row += byte
    else:
        row[...] = stored[:, 0]
    if form.bits == 8:
        row -= 128
    if form.tag == _PCM:
        row *= 2.0 ** (1 - form.bits)
