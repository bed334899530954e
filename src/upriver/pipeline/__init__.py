"""Provide input stages, per-sample randomness and the dataset index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.imports import lazy_names

_PLACES = {
    "AddNoise": "stages.audio",
    "CenterCrop": "stages.image",
    "ColorJitter": "stages.augmentation",
    "Dataset": "dataset",
    "Decode": "stages.image",
    "DecodeWav": "stages.audio",
    "Draw": "draw",
    "Fft": "stages.audio",
    "FixLength": "stages.audio",
    "InputChain": "chain",
    "InputStage": "stages.base",
    "LeftOut": "left_out",
    "LoadTensor": "stages.tensor",
    "Normalize": "stages.image",
    "RandAugment": "stages.augmentation",
    "RandomCrop": "stages.augmentation",
    "RandomHorizontalFlip": "stages.augmentation",
    "RandomResizedCrop": "stages.augmentation",
    "Resample": "stages.audio",
    "Resize": "stages.image",
    "SampleError": "errors",
    "SampleRef": "dataset",
    "Spectrogram": "stages.audio",
    "Standardize": "stages.tensor",
    "Stft": "stages.audio",
    "ToFloat": "stages.image",
    "imagenet_eval": "stages.registry",
    "imagenet_train": "stages.registry",
    "index": "indexing.builder",
    "stored_tensor": "chain",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.pipeline.chain import InputChain as InputChain
    from upriver.pipeline.chain import stored_tensor as stored_tensor
    from upriver.pipeline.dataset import Dataset as Dataset
    from upriver.pipeline.dataset import SampleRef as SampleRef
    from upriver.pipeline.draw import Draw as Draw
    from upriver.pipeline.errors import SampleError as SampleError
    from upriver.pipeline.indexing.builder import index as index
    from upriver.pipeline.left_out import LeftOut as LeftOut
    from upriver.pipeline.stages.audio import AddNoise as AddNoise
    from upriver.pipeline.stages.audio import DecodeWav as DecodeWav
    from upriver.pipeline.stages.audio import Fft as Fft
    from upriver.pipeline.stages.audio import FixLength as FixLength
    from upriver.pipeline.stages.audio import Resample as Resample
    from upriver.pipeline.stages.audio import Spectrogram as Spectrogram
    from upriver.pipeline.stages.audio import Stft as Stft
    from upriver.pipeline.stages.augmentation import ColorJitter as ColorJitter
    from upriver.pipeline.stages.augmentation import RandAugment as RandAugment
    from upriver.pipeline.stages.augmentation import RandomCrop as RandomCrop
    from upriver.pipeline.stages.augmentation import RandomHorizontalFlip as RandomHorizontalFlip
    from upriver.pipeline.stages.augmentation import RandomResizedCrop as RandomResizedCrop
    from upriver.pipeline.stages.base import InputStage as InputStage
    from upriver.pipeline.stages.image import CenterCrop as CenterCrop
    from upriver.pipeline.stages.image import Decode as Decode
    from upriver.pipeline.stages.image import Normalize as Normalize
    from upriver.pipeline.stages.image import Resize as Resize
    from upriver.pipeline.stages.image import ToFloat as ToFloat
    from upriver.pipeline.stages.registry import imagenet_eval as imagenet_eval
    from upriver.pipeline.stages.registry import imagenet_train as imagenet_train
    from upriver.pipeline.stages.tensor import LoadTensor as LoadTensor
    from upriver.pipeline.stages.tensor import Standardize as Standardize

# Resolve names at first use: a compute worker runs stages, and reads no index.
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
