"""Define the datasets of `input_pipeline`: stored JPEG and WAV files through upriver's input stages.

They are six of the seven workloads of FastFlow (Um et al., PVLDB 16(5), 2023, section 7.1). The workloads
differ in the cost of a sample and in its final bytes. The seventh, MelGAN, only decodes. A setting in which
nothing stalls shows the same.

Workers import this module by its name, so it imports nothing but the package.
"""

from __future__ import annotations

import os
import random
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import Dataset as TorchDataset

from upriver.pipeline import (
    AddNoise,
    Decode,
    DecodeWav,
    Fft,
    FixLength,
    InputChain,
    InputStage,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Spectrogram,
    Standardize,
    Stft,
    ToFloat,
    stored_tensor,
)

MODULE = "benchmarks.input_pipeline.workloads"
"""This module, which workers must allow."""

NAME = f"{MODULE}:Samples"
"""Name by which workers make the dataset."""

DISK_VARIABLE = "UPRIVER_BENCHMARK_DISK"
"""If the variable names an object server's bucket, files are read from there: the disk of a machine with a
slow one. The root is the same on all hosts, as a mount point would be."""

CLASSES = 10
SPEECH_RATE, WORD_RATE = 22_050, 16_000
SPEECH_S, WORD_S = 10, 1

Kind = Literal["photographs", "speech", "words"]
Raw = tuple[torch.Tensor, int]
"""Stored bytes and the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The stored files of a workload, and their stages.

    Attributes:
        title: A short description.
        kind: Kind of the stored files.
        stages: Stages from stored bytes to the model's input.
        batch_size: Chosen so that a batch costs a core some 50 to 100 ms.
        published_bytes: Bytes of the paper's dataset (Table 3).
    """

    title: str
    kind: Kind
    stages: tuple[InputStage, ...]
    batch_size: int
    published_bytes: float


WORKLOADS: Mapping[str, Workload] = {
    "R": Workload(
        title="RandAugment, 224 pixels",
        kind="photographs",
        stages=(Decode(), RandomResizedCrop(224), RandomHorizontalFlip(), RandAugment(), Normalize()),
        batch_size=16,
        published_bytes=150e9,
    ),
    "G": Workload(
        title="crop, resize, clip, 64 pixels",
        kind="photographs",
        stages=(Decode(), RandomCrop(320), Resize((64, 64)), ToFloat()),
        batch_size=24,
        published_bytes=1.1e9,
    ),
    "L": Workload(
        title="images for a learnable resizer, 300 pixels",
        kind="photographs",
        stages=(Decode(), Resize((300, 300)), RandomHorizontalFlip(), ToFloat()),
        batch_size=12,
        published_bytes=786e6,
    ),
    "T": Workload(
        title="spectrograms of speech",
        kind="speech",
        stages=(
            DecodeWav(SPEECH_RATE),
            FixLength(SPEECH_S * SPEECH_RATE),
            Stft(384, 160, 256),
            Spectrogram(0.5),
            Standardize(),
        ),
        batch_size=12,
        published_bytes=2.6e9,
    ),
    "C": Workload(
        title="spectrograms of speech, shorter windows",
        kind="speech",
        stages=(
            DecodeWav(SPEECH_RATE),
            FixLength(SPEECH_S * SPEECH_RATE),
            Stft(256, 80, 200),
            Spectrogram(0.5),
            Standardize(),
        ),
        batch_size=10,
        published_bytes=2.6e9,
    ),
    "S": Workload(
        title="noise and Fourier transform of a second of speech",
        kind="words",
        stages=(
            DecodeWav(WORD_RATE),
            FixLength(WORD_S * WORD_RATE),
            AddNoise((10.0, 30.0)),
            Fft(),
            Spectrogram(1.0),
            Standardize(),
        ),
        batch_size=64,
        published_bytes=256e6,
    ),
}
"""Workloads by the paper's letter."""


class Samples(TorchDataset[tuple[torch.Tensor, int]]):
    """A map-style dataset that can be read in one place and computed in another.

    Args:
        root: Folder of the stored files, which are read one after another, again and again.
        workload: One of `WORKLOADS`.
        samples: Number of samples.
    """

    def __init__(self, root: str, workload: str, samples: int) -> None:
        self._chain = InputChain(WORKLOADS[workload].stages)
        self._disk = os.environ.get(DISK_VARIABLE, "")
        folder = Path(root) / WORKLOADS[workload].kind
        self._root, self._num_samples = Path(root), samples
        self._files = [f"{folder.name}/{path.name}" for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.read(index))

    def read(self, index: int) -> Raw:
        """Return a stored file."""
        name = self._files[index % len(self._files)]
        return stored_tensor(self._stored(name)), index % CLASSES

    def transform(self, raw: Raw) -> tuple[torch.Tensor, int]:
        """Return the model's input. The draws depend on Python's generator alone."""
        stored, target = raw
        value = self._chain.run(
            stored, sample=0, epoch=0, seed=random.getrandbits(63), start=self._chain.start, stop=0
        )
        return value, target

    def _stored(self, name: str) -> bytes:
        if not self._disk:
            return (self._root / name).read_bytes()
        with urllib.request.urlopen(f"{self._disk}/{name}") as answer:
            found: bytes = answer.read()
        return found
