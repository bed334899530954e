"""Input stages, per-sample randomness, dataset index."""

from upriver.pipeline.chain import InputChain, stored_tensor
from upriver.pipeline.dataset import Dataset, SampleRef
from upriver.pipeline.draw import Draw
from upriver.pipeline.errors import SampleError
from upriver.pipeline.indexing import index
from upriver.pipeline.stages import (
    CenterCrop,
    Decode,
    InputStage,
    LoadTensor,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    imagenet_eval,
    imagenet_train,
)

__all__ = [
    "CenterCrop",
    "Dataset",
    "Decode",
    "Draw",
    "InputChain",
    "InputStage",
    "LoadTensor",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "SampleError",
    "SampleRef",
    "imagenet_eval",
    "imagenet_train",
    "index",
    "stored_tensor",
]
