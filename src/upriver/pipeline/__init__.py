"""Provide input stages, per-sample randomness and the dataset index."""

from upriver.pipeline.chain import InputChain, stored_tensor
from upriver.pipeline.dataset import Dataset, SampleRef
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.indexing.builder import index
from upriver.pipeline.left_out import LeftOut
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
from upriver.pipeline.stages.registry import imagenet_eval, imagenet_train
from upriver.pipeline.stages.tensor import LoadTensor, Standardize

__all__ = [
    "AddNoise",
    "CenterCrop",
    "ColorJitter",
    "Dataset",
    "Decode",
    "DecodeWav",
    "Draw",
    "Fft",
    "FixLength",
    "InputChain",
    "InputStage",
    "LeftOut",
    "LoadTensor",
    "Normalize",
    "RandAugment",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resample",
    "Resize",
    "SampleError",
    "SampleRef",
    "Spectrogram",
    "Standardize",
    "Stft",
    "ToFloat",
    "imagenet_eval",
    "imagenet_train",
    "index",
    "stored_tensor",
]
