"""Make the stored files of `workloads`, the same ones every time."""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness.photographs import jpeg
from benchmarks.input_pipeline.workloads import SPEECH_RATE, SPEECH_S, WORD_RATE, WORD_S, Kind

FILES: Mapping[Kind, int] = {"photographs": 64, "speech": 16, "words": 64}
"""Number of different files. An epoch reads each several times, with other draws, from the page cache."""

HARMONICS = 12
LOUDEST = 0.8 * 2**15


def make_data(folder: Path, kind: Kind, count: int | None = None) -> None:
    """Write files of a kind in a folder of its name, unless they exist.

    Args:
        folder: Parent of that folder.
        kind: ``photographs`` of 500 x 375 pixels and 110 KB, ``speech`` of 10 s, ``words`` of 1 s.
        count: Number of files, `FILES` if None.
    """
    place = folder / kind
    place.mkdir(parents=True, exist_ok=True)
    make, suffix = MAKERS[kind], ".jpg" if kind == "photographs" else ".wav"
    for number in range(FILES[kind] if count is None else count):
        path = place / f"{number:05}{suffix}"
        if not path.exists():
            make(path, np.random.default_rng([number, 7]))


def mean_bytes(folder: Path, kind: Kind) -> float:
    """Return the mean size of the files of a kind."""
    sizes = [path.stat().st_size for path in (folder / kind).iterdir()]
    return sum(sizes) / len(sizes)


def _photograph(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(jpeg(rng))


def _voice(path: Path, rng: np.random.Generator, rate: int, seconds: int) -> None:
    """Write harmonics of a gliding pitch with the loudness of syllables and some breath, in 16 bits.

    A file is at most a quarter shorter or longer, so that its length is its own choice.
    """
    num_samples = round(rate * seconds * rng.uniform(0.75, 1.25))
    at = np.arange(num_samples) / rate
    pitch = rng.uniform(90, 220) * (1 + 0.15 * np.sin(2 * np.pi * rng.uniform(0.3, 0.8) * at))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    weights = rng.uniform(0.1, 1.0, HARMONICS) / np.arange(1, HARMONICS + 1)
    tones = sum(weight * np.sin(number * phase) for number, weight in enumerate(weights, start=1))
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * rng.uniform(2.5, 4.5) * at)
    signal = syllables * tones + rng.normal(0, 0.02, num_samples)
    values = (signal * (LOUDEST / np.abs(signal).max())).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, num_samples, "NONE", "not compressed"))
        file.writeframes(values.tobytes())


def _speech(path: Path, rng: np.random.Generator) -> None:
    _voice(path, rng, SPEECH_RATE, SPEECH_S)


def _words(path: Path, rng: np.random.Generator) -> None:
    _voice(path, rng, WORD_RATE, WORD_S)


MAKERS: Mapping[Kind, Callable[[Path, np.random.Generator], None]] = {
    "photographs": _photograph,
    "speech": _speech,
    "words": _words,
}
