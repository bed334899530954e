"""Check WAV files: files of other programs are read, and false headers are refused before use."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile as scipy_wavfile

from tests.examples import some
from tests.pipeline.making import as_stored, chunk, fmt, riff, tone, wav
from upriver.pipeline import DecodeWav, Draw, SampleError, stored_tensor
from upriver.pipeline.formats.audio import MAX_BYTES, MAX_CHANNELS
from upriver.pipeline.formats.wavfile import read_form

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)
FORMS = [(8, False), (16, False), (24, False), (32, False), (32, True), (64, True)]


def decode(data: bytes, **fields: Any) -> torch.Tensor:
    return DecodeWav(**{"sample_rate": 16000, **fields}).apply(stored_tensor(data), DRAW)


def wanted(array: np.ndarray[Any, Any], bits: int, *, floating: bool) -> torch.Tensor:
    """Return the expected numbers, of shape (channels, samples), computed in double precision."""
    stored = as_stored(array, bits, floating=floating).astype(np.float64)
    if not floating:
        stored = (stored - 128) / 128 if bits == 8 else stored / 2.0 ** (31 if bits == 24 else bits - 1)
    return torch.tensor(stored.T.copy(), dtype=torch.float32)


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize("channels", some(1, [2, 1, 5]))
@pytest.mark.parametrize(("bits", "floating"), FORMS)
def test_every_form_is_read(bits: int, floating: bool, channels: int, extensible: bool) -> None:
    array = tone(301, channels)
    data = wav(array, bits=bits, floating=floating, extensible=extensible)
    got = decode(data, mono=False)
    assert torch.equal(got, wanted(array, bits, floating=floating))
    assert got.dtype is torch.float32
    assert got.is_contiguous()
    assert got.data_ptr() % 64 == 0
    mixed = decode(data)
    assert mixed.shape == (1, 301)
    assert torch.allclose(mixed, got.mean(0, keepdim=True), atol=1e-7)


@pytest.mark.parametrize(("bits", "floating"), [form for form in FORMS if form[0] != 24])
def test_what_scipy_writes_is_what_scipy_reads(bits: int, floating: bool) -> None:
    array, file = as_stored(tone(1000, 2), bits, floating=floating), io.BytesIO()
    scipy_wavfile.write(file, 16000, array)
    got = decode(file.getvalue(), mono=False)
    rate, theirs = scipy_wavfile.read(io.BytesIO(file.getvalue()))
    assert rate == 16000
    assert np.array_equal(theirs, array)
    assert torch.equal(got, wanted(tone(1000, 2), bits, floating=floating))


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_what_python_writes(bits: int) -> None:
    array, file = tone(77, 2), io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(bits // 8)
        out.setframerate(16000)
        stored = as_stored(array, bits)
        out.writeframes(stored.view("u1").reshape(-1, 4)[:, 1:].tobytes() if bits == 24 else stored.tobytes())
    assert torch.equal(decode(file.getvalue(), mono=False), wanted(array, bits, floating=False))


@pytest.mark.parametrize(("bits", "floating"), FORMS)
def test_the_loudest_samples_lie_at_the_ends_of_the_range(bits: int, floating: bool) -> None:
    ends = np.array([[-1.0], [1.0], [0.0]])
    got = decode(wav(ends, bits=bits, floating=floating))[0]
    assert got[0] == -1
    assert got[1] == (1 if floating or bits == 32 else 1 - 2.0 ** (1 - bits))
    assert got[2] == 0


def test_other_chunks_are_passed_over_and_what_follows_is_left_alone() -> None:
    array = tone(50)
    plain = wav(array)
    listed = wav(array, before=chunk(b"LIST", b"odd") + chunk(b"fact", bytes(4)))
    for data in (listed, plain + chunk(b"id3 ", b"later"), plain + b"trailing"):
        assert torch.equal(decode(data), decode(plain))


def test_the_length_in_the_first_header_does_not_matter() -> None:
    """Programs that write to a pipe do not know the length when they write the header."""
    data = wav(tone(50))
    assert torch.equal(decode(data[:4] + b"\xff" * 4 + data[8:]), decode(data))


def test_wherever_it_is_cut_off_it_is_a_sample_error() -> None:
    for data in (wav(tone(40, 2)), wav(tone(40), bits=24, extensible=True)):
        for length in range(len(data)):
            with pytest.raises(SampleError):
                decode(data[:length], mono=False)


def test_damage_gives_audio_or_a_sample_error_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    for floating in (False, True):
        data = np.frombuffer(wav(tone(20), bits=32, floating=floating, extensible=True), dtype=np.uint8)
        for _ in range(500):
            damaged = data.copy()
            damaged[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
            try:
                assert decode(damaged.tobytes()).isfinite().all()
            except SampleError as exc:
                assert "\n" not in exc.reason


PLAIN = fmt(1, 16000, 16)


def unknown(chunks: bytes, samples: bytes, *, riff: int | None, data: int) -> bytes:
    """Return a WAV file with sizes as a program left them; None for ``riff`` stands for the right size."""
    body = b"WAVE" + chunks + b"data" + struct.pack("<I", data) + samples
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


@pytest.mark.parametrize(
    ("riff", "data"),
    [
        (0xFFFFFFFF, 0xFFFFFFFF),  # FFmpeg
        (0x7FFFF024, 0x7FFFF000),  # SoX
        (0x80000024, 0x80000000),  # arecord
        (0x7FFFFFFF, 0x7FFFFFFF - 36),
        (0, 0),
        (36, 0),  # Python's wave, GStreamer
        (8, 0),
        (0, 0xFFFFFFFF),
        (None, 0xFFFFFFFF),
        (None, 10**6),
        (36, 10**6),
        (0xFFFFFFFF, None),
    ],
)
@pytest.mark.parametrize(
    ("bits", "channels", "tail"), some(1, [(16, 1, 1), (16, 1, 0), (24, 2, 5), (32, 3, 11), (8, 1, 0)])
)
@pytest.mark.parametrize("before", some(1, [chunk(b"LIST", b"odd"), b""]))
def test_sizes_that_were_not_known_end_with_the_file(
    riff: int | None, data: int | None, bits: int, channels: int, tail: int, before: bytes
) -> None:
    array = tone(60, channels)
    samples = wav(array, bits=bits)[44:]
    samples = samples[: 60 * channels * bits // 8] + bytes(tail)
    if data is None:
        data = len(samples)
    got = decode(unknown(fmt(channels, 16000, bits) + before, samples, riff=riff, data=data), mono=False)
    assert torch.equal(got, decode(wav(array, bits=bits), mono=False))


def test_audio_that_is_empty_by_its_header_stays_empty() -> None:
    later = chunk(b"LIST", b"info")
    with pytest.raises(SampleError, match="audio of 0 samples"):
        decode(unknown(PLAIN, later, riff=None, data=0))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a WAV file: it is empty"),
        (b"fLaC" + bytes(40), "not a WAV file: it starts with b'fLaC"),
        (b"RIFX" + wav(tone(4))[4:], "not a WAV file: it starts with b'RIFX"),
        (b"RIFF\0\0\0\0AVI " + bytes(40), "not a WAV file"),
        (b"RIFF\0\0\0\0WAVE", "ends before its samples"),
        (riff(b"", bytes(8)), "no format before its samples"),
        (riff(chunk(b"junk", b"") * 2000 + PLAIN, bytes(8)), "ends before its samples"),
        (riff(chunk(b"fmt ", bytes(15)), bytes(8)), "its format has 15 bytes"),
        (riff(fmt(1, 16000, 12), bytes(8)), "format 1 with 12 bits; allowed: PCM"),
        (riff(fmt(1, 16000, 4, tag=2), bytes(8)), "format 2 with 4 bits"),
        (riff(fmt(1, 16000, 16, floating=True), bytes(8)), "format 3 with 16 bits"),
        (riff(fmt(1, 16000, 16, extensible=True, tag=7), bytes(8)), "format 7 with 16 bits"),
        (riff(fmt(1, 16000, 16, extensible=True)[:-4] + b"tail", bytes(8)), "format 65534 with 16 bits"),
        (riff(fmt(0, 16000, 16), bytes(8)), f"0 channels; 1 to {MAX_CHANNELS} are allowed"),
        (riff(fmt(MAX_CHANNELS + 1, 16000, 16), bytes(18)), f"9 channels; 1 to {MAX_CHANNELS}"),
        (riff(PLAIN[:-4] + struct.pack("<HH", 3, 16), bytes(6)), "1 channels and 16 bits in 3 bytes"),
        (wav(tone(4), rate=44100), "audio of 44100 samples a second; 16000 are needed"),
        (riff(PLAIN, b""), "audio of 0 samples; 1 to 100 are allowed"),
        (wav(tone(101)), "audio of 101 samples; 1 to 100 are allowed"),
        (riff(PLAIN, bytes(1)), "audio of 0 samples"),
        (wav(tone(40))[:-1], "80 bytes of samples, 79 are stored; it is cut off at byte 123 of 124"),
        (wav(tone(4))[:40] + b"\xff" * 4, "4294967295 bytes of samples, 0 are stored"),
        (unknown(PLAIN, b"", riff=0xFFFFFFFF, data=0xFFFFFFFF), "audio of 0 samples"),
        (unknown(PLAIN, bytes(400), riff=0xFFFFFFFF, data=0xFFFFFFFF), "audio of 200 samples; 1 to 100"),
        (unknown(PLAIN, bytes(8), riff=60, data=0xFFFFFFFF), "it is cut off at byte 52 of 68"),
        (riff(fmt(1, 16000, 32, floating=True), struct.pack("<f", float("nan"))), "no finite numbers"),
        (riff(fmt(1, 16000, 64, floating=True), struct.pack("<d", 1e300)), "no finite numbers"),
    ],
)
def test_what_is_no_such_file_is_refused_with_what_was_found(data: bytes, problem: str) -> None:
    with pytest.raises(SampleError) as caught:
        decode(data, max_samples=100)
    assert problem in caught.value.reason


@pytest.mark.parametrize("values", [(np.inf, -np.inf), (3e38, 3e38), (np.nan, 0.0)])
def test_channels_whose_mean_is_no_number_are_a_bad_sample(values: tuple[float, float]) -> None:
    data = wav(np.array([values]), bits=32, floating=True)
    with pytest.raises(SampleError, match="no finite numbers"):
        decode(data)


def test_the_cap_on_all_channels_together_comes_before_decoding() -> None:
    size = MAX_BYTES // 4 + 1
    data = np.zeros(44 + size, dtype=np.uint8)
    head = riff(fmt(1, 16000, 8), b"")
    data[:40] = np.frombuffer(head[:40], dtype=np.uint8)
    data[40:44] = np.frombuffer(struct.pack("<I", size), dtype=np.uint8)
    with pytest.raises(SampleError, match=f"audio of {size} samples; 1 to {MAX_BYTES // 4} are allowed"):
        DecodeWav(16000, max_samples=MAX_BYTES // 4).apply(torch.from_numpy(data), DRAW)
    data[:36] = np.frombuffer(riff(fmt(2, 16000, 8), b"")[:36], dtype=np.uint8)
    data[40:44] = np.frombuffer(struct.pack("<I", size + 1), dtype=np.uint8)
    longer = torch.from_numpy(np.append(data, np.uint8(0)))
    with pytest.raises(SampleError, match=f"audio of {MAX_BYTES + 8} bytes; at most {MAX_BYTES}"):
        DecodeWav(16000, mono=False, max_samples=MAX_BYTES // 4).apply(longer, DRAW)


def test_the_beginning_of_a_file_tells_its_form() -> None:
    form = read_form(wav(tone(1000, 2), rate=44100, bits=24)[:64])
    assert (form.rate, form.channels, form.bits, form.frame_bytes) == (44100, 2, 24, 6)
