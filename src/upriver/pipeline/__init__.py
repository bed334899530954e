"""Input stages, per-sample randomness, dataset index."""

from upriver.pipeline.audio_stages import AddNoise, DecodeWav, Fft, FixLength, Resample, Spectrogram, Stft
from upriver.pipeline.augment_stages import (
    ColorJitter,
    RandAugment,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from upriver.pipeline.chain import InputChain, stored_tensor
from upriver.pipeline.dataset import Dataset, SampleRef
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.image_stages import CenterCrop, Decode, Normalize, Resize, ToFloat
from upriver.pipeline.indexing import index
from upriver.pipeline.input_stage import InputStage
from upriver.pipeline.left_out import LeftOut
from upriver.pipeline.stages import imagenet_eval, imagenet_train
from upriver.pipeline.tensor_stages import LoadTensor, Standardize

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
