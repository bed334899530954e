"""Measure the peak memory of stages and micro-batches: run as a module, prints JSON.

Freed memory goes back to the system (see `ENVIRONMENT`). The process's own high-water mark, which Linux keeps
and can reset, is therefore that of the measured call.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.pipeline.making import npy, pixels, tone, wav
from upriver.engine.engine import Engine
from upriver.pipeline import (
    AddNoise,
    CenterCrop,
    ColorJitter,
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
    RandomResizedCrop,
    Resample,
    Spectrogram,
    Standardize,
    Stft,
    ToFloat,
    stored_tensor,
)

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
SLACK_BYTES = 1 << 20
"""Code that is read for the first time, and pages that are counted whole."""

DRAW = Draw(seed=0, epoch=0, sample=0, stage=0)


def status(name: str) -> int:
    """Return a line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory of a call, without the memory in use before the call."""
    work()  # one-time setup belongs to no call
    gc.collect()
    ctypes.CDLL("").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return max(0, status("VmHWM") - before)


def sound(samples: int, channels: int = 1) -> torch.Tensor:
    return torch.tensor(tone(samples, channels).T.copy(), dtype=torch.float32)


def stages() -> list[tuple[InputStage, torch.Tensor]]:
    """Return stages and the input of each."""
    long, short, wide = sound(700_001), sound(100), sound(150_000, 5)  # the first is a prime number
    picture = torch.tensor(pixels(900, 1200))
    return [
        (DecodeWav(16000), stored_tensor(wav(tone(1_000_000), bits=8))),
        (DecodeWav(16000), stored_tensor(wav(tone(200_000, 5), bits=24))),
        (DecodeWav(16000, mono=False), stored_tensor(wav(tone(200_000, 4), bits=32, floating=True))),
        (FixLength(1_000_000), short),
        (FixLength(500_000), long),
        (AddNoise(10), long),
        (Resample(441, 160), long),
        (Resample(1000, 8000), wide),
        (Resample(11025, 16000), long),
        (Resample(192000, 11025), long),
        (Stft(1024, 32), long),
        (Stft(400, 160), wide),
        (Stft(65536, 65536), long),
        (Fft(), long),
        (Fft(), sound(1 << 19)),
        (Fft(), wide),
        (Spectrogram(1.5, log=True), Fft().apply(long, DRAW)),
        (Standardize(), long),
        (Standardize(), long.half()),
        (LoadTensor(), stored_tensor(npy(np.asfortranarray(tone(100_000, 5))))),
        (ColorJitter(0.5, 0.5, 0.5, 0.5), picture),
        (RandAugment(8, 30), picture),
        (RandomCrop(1500, padding=500), picture),
        (RandomResizedCrop(1200), picture),
        (CenterCrop(1500), picture),
        (Normalize(), picture),
        (ToFloat(), picture),
    ]


def of_stages() -> list[tuple[str, int, int]]:
    """Return each stage's name, its measured peak, and its stated peak."""
    found = []
    for stage, value in stages():
        out = stage.apply(value, DRAW)
        sizes = np.array([float(value.nbytes)])
        said = int(stage.working_bytes(sizes, np.array([float(out.nbytes)]))[0])
        del out
        measured = max(
            peak_bytes(lambda: stage.apply(value, Draw(seed=0, epoch=0, sample=sample, stage=0)))  # noqa: B023
            for sample in range(3 if stage.kind == "augment" else 1)  # the others draw nothing
        )
        found.append((repr(stage), measured - SLACK_BYTES, said))
    return found


def chains() -> list[tuple[InputChain, list[bytes]]]:
    """Return chains and the samples of a micro-batch."""
    words = [wav(tone(16_000 - 100 * n), bits=16) for n in range(8)]
    dense = [wav(tone(200_000, 2), bits=8)] * 8
    arrays = [npy(pixels(300, 400, seed=n)) for n in range(8)]
    return [
        (InputChain((DecodeWav(16000), FixLength(500_000))), words),
        (InputChain((DecodeWav(16000), FixLength(100_000), Stft(512, 16), Spectrogram(log=True))), words),
        (InputChain((DecodeWav(16000, mono=False), Resample(16000, 48000))), dense),
        (InputChain((DecodeWav(16000), FixLength(200_003), AddNoise(3), Fft())), dense),
        (InputChain((LoadTensor(), RandomCrop(280), RandAugment(), Normalize())), arrays),
    ]


def of_micro_batches() -> list[tuple[str, int, int]]:
    """Return the same figures for whole micro-batches, including their stored samples and their answer."""
    found = []
    for chain, blobs in chains():
        engine = Engine(chain=chain, program=None, micro_batch=len(blobs))

        def work(engine: Engine = engine, blobs: list[bytes] = blobs) -> None:
            ids = range(len(blobs))
            batch = engine.begin(blobs, ids, object_names=["x"] * len(ids), stop=0, seed=0, epoch=0)
            torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in batch.tensors])  # laid out

        stored = np.array([float(len(blob)) for blob in blobs])
        out, working = chain.most_bytes(stored, 0)
        said = int(stored.sum() + 2 * len(blobs) * out.max() + working.max())
        found.append((repr(chain), peak_bytes(work) - SLACK_BYTES, said))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({"stages": of_stages(), "micro_batches": of_micro_batches()}, sys.stdout)
