"""Make images, audio, shards and folders for tests."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return a smooth picture with some noise: neither flat nor incompressible."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)


def encoded(array: np.ndarray[Any, Any] | Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    """Return an image file; further options go to Pillow."""
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def tone(samples: int, channels: int = 1, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return some tones and a little noise, float64 of shape (samples, channels), within -1 to 1."""
    rng = np.random.default_rng(seed)
    times = np.arange(samples)[:, None]
    frequencies, phases = rng.uniform(0.001, 0.2, (3, channels)), rng.uniform(0, 7, (3, channels))
    tones = sum(np.sin(2 * np.pi * times * f + p) for f, p in zip(frequencies, phases, strict=True))
    return 0.3 * tones + rng.uniform(-0.05, 0.05, (samples, channels))


def as_stored(array: np.ndarray[Any, Any], bits: int, *, floating: bool = False) -> np.ndarray[Any, Any]:
    """Return numbers from -1 to 1 as a WAV file holds them; 24-bit samples are the upper bits of 32."""
    if floating:
        return array.astype("<f4" if bits == 32 else "<f8")
    whole = np.clip(np.round(array * 2.0 ** (bits - 1)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if bits == 8:
        return (whole + 128).astype("u1")
    if bits == 24:
        return (whole.astype("<i4") << 8).astype("<i4")
    return whole.astype(f"<i{bits // 8}")


def wav(
    array: np.ndarray[Any, Any],
    rate: int = 16000,
    *,
    bits: int = 16,
    floating: bool = False,
    extensible: bool = False,
    before: bytes = b"",
) -> bytes:
    """Return a WAV file of numbers from -1 to 1, of shape (samples, channels); ``before`` precedes them."""
    stored = as_stored(array, bits, floating=floating)
    body = stored.tobytes()
    if bits == 24:
        body = stored.view("u1").reshape(-1, 4)[:, 1:].tobytes()
    channels = array.shape[1]
    return riff(fmt(channels, rate, bits, floating=floating, extensible=extensible) + before, body)


def fmt(
    channels: int,
    rate: int,
    bits: int,
    *,
    floating: bool = False,
    extensible: bool = False,
    tag: int | None = None,
) -> bytes:
    """Return the format chunk of a WAV file."""
    tag = (3 if floating else 1) if tag is None else tag
    frame = channels * bits // 8
    head = struct.pack("<HIIHH", channels, rate, rate * frame, frame, bits)
    if not extensible:
        return chunk(b"fmt ", struct.pack("<H", tag) + head)
    guid = struct.pack("<H", tag) + bytes.fromhex("000000001000800000aa00389b71")
    return chunk(b"fmt ", struct.pack("<H", 0xFFFE) + head + struct.pack("<HHI", 22, bits, 0) + guid)


def chunk(name: bytes, body: bytes) -> bytes:
    """Return a chunk of a RIFF file, padded to an even length."""
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def riff(chunks: bytes, samples: bytes) -> bytes:
    """Return a WAV file of some chunks and its samples."""
    whole = b"WAVE" + chunks + chunk(b"data", samples)
    return b"RIFF" + struct.pack("<I", len(whole)) + whole


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    """Return a ``.npy`` file."""
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def shard(members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar file with these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def samples(count: int, *, first: int = 0, classes: int = 3, side: int = 24) -> list[tuple[str, bytes]]:
    """Return members of a shard: a JPEG and its class for each sample."""
    members = []
    for number in range(first, first + count):
        members.append((f"{number:06d}.cls", str(number % classes).encode()))
        members.append((f"{number:06d}.jpg", encoded(pixels(side, side + number % 5, seed=number))))
    return members


def write(root: Path, files: dict[str, bytes]) -> str:
    """Write files under a directory and return its URI."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root.as_uri()


def of_one_value(rows: int, groups: int = 1) -> bytes:
    """Return an index in which each column has one value: a few bytes for a million rows."""
    once = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), ["one.npy"])
    zeros = np.zeros(rows, np.int64)
    piece = pa.table(
        {"object": once, "etag": once, "start": zeros, "stop": zeros, "target": zeros, "name": once}
    )
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, piece.schema, compression="zstd") as writer:
        for _ in range(groups):
            writer.write_table(piece)
    return sink.getvalue()
