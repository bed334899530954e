"""List every input stage by its name, read chains of them from plain data, and provide the usual ones.

A stage turns one sample into another: stored bytes into pixels, audio or a tensor, and so on up to the
model's input. Between two stages a value is one of these:

- bytes: uint8 (n,), as stored;
- pixels: uint8 (height, width, 3);
- audio: float32 (channels, samples), -1 to 1 as decoded;
- spectrum: complex64 (channels, frequencies), or (channels, frequencies, frames);
- tensor: any input of a model.
"""

from __future__ import annotations

from dataclasses import fields

from upriver.errors import DatasetError
from upriver.pipeline.stages.audio import AddNoise, DecodeWav, Fft, FixLength, Resample, Spectrogram, Stft
from upriver.pipeline.stages.augmentation import (
    ColorJitter,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from upriver.pipeline.stages.base import InputStage
from upriver.pipeline.stages.image import CenterCrop, Decode, Normalize, Resize, ToFloat
from upriver.pipeline.stages.tensor import LoadTensor, Standardize

STAGES: dict[str, type[InputStage]] = {
    stage.name: stage
    for stage in (
        Decode,
        LoadTensor,
        Resize,
        CenterCrop,
        RandomResizedCrop,
        RandomCrop,
        RandomHorizontalFlip,
        ColorJitter,
        RandAugment,
        Normalize,
        ToFloat,
        DecodeWav,
        FixLength,
        AddNoise,
        Resample,
        Stft,
        Fft,
        Spectrogram,
        Standardize,
    )
}
"""Every stage by its name. A chain refers to stages by name, so it can use only stages in this table."""


_CALLED_OTHERWISE = {"ToTensor": "ToFloat", "Compose": "imagenet_train"}
"""Stages that do the work of torchvision transforms of other names."""


def in_place_of(transform: object) -> str:
    """Return what to use in place of a transform that is no input stage."""
    kind = transform if isinstance(transform, type) else type(transform)
    names = {stage.__name__ for stage in STAGES.values()}
    ours = kind.__name__ if kind.__name__ in names else _CALLED_OTHERWISE.get(kind.__name__)
    if ours is not None:
        return f"use upriver.{ours}(…)"
    return (
        f"the stages are {', '.join(sorted(names))} of upriver, which servers have; run code of your own on "
        "batches in the loop, or in a dataset of your own that upriver.DataLoader reads"
    )


def stage_from_json(data: object) -> InputStage:
    """Read a stage back, strictly.

    Raises:
        DatasetError: If the stage is unknown, or a field is unknown or missing.
        ConfigError: If a field's value is not allowed.
    """
    if not isinstance(data, dict) or not isinstance(data.get("stage"), str):
        known = ", ".join(STAGES)
        raise DatasetError(
            f"an input stage is an object with a name under 'stage' ({known}), got {str(data)[:200]}"
        )
    cls = STAGES.get(data["stage"])
    if cls is None:
        raise DatasetError(f"unknown input stage {data['stage'][:100]!r}; known: {', '.join(STAGES)}")
    allowed = [field.name for field in fields(cls)]
    values = {name: value for name, value in data.items() if name != "stage"}
    for name in sorted(set(values) ^ set(allowed)):
        problem = "has no field" if name in values else "lacks the field"
        raise DatasetError(f"input stage {cls.name!r} {problem} {name!r}; fields: {', '.join(allowed)}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def imagenet_train(size: int = 224) -> tuple[InputStage, ...]:
    """Return the usual augmentation for training on ImageNet: random crop, flip, normalize."""
    return Decode(), RandomResizedCrop(size), RandomHorizontalFlip(), Normalize()


def imagenet_eval(size: int = 224, resize: int = 256) -> tuple[InputStage, ...]:
    """Return the usual stages for evaluation on ImageNet: resize the shorter side, crop, normalize."""
    return Decode(), Resize(resize), CenterCrop(size), Normalize()
