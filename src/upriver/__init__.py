"""Decide where each part of a PyTorch job runs.

upriver changes where results are computed, and never a result. ``upriver.connect()`` is the entry point.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from upriver._moved import MovedModules

__version__ = "0.1.0"

_PLACES = {
    "connect": "upriver.finetune.session",
    "Near": "upriver.finetune.session",
    "offload": "upriver.inference.offload",
    "Offload": "upriver.inference.offload",
    "OffloadTuning": "upriver.inference.remote_server",
    "FinetuneJob": "upriver.finetune.job",
    "Prefetch": "upriver.finetune.options",
    "Replanning": "upriver.finetune.replanner",
    "Sampling": "upriver.finetune.options",
    "Splitting": "upriver.finetune.options",
    "LinkMeter": "upriver.rpc.link_meter",
    "DataLoader": "upriver.dataloader",
    "AutoOffload": "upriver.dataloader",
    "Offloading": "upriver.dataloader",
    "RemoteWorkers": "upriver.dataloader",
    "dataset": "upriver.dataloader",
    "ray_workers": "upriver.cluster.ray_workers",
    "Dataset": "upriver.pipeline",
    "index": "upriver.pipeline",
    "Decode": "upriver.pipeline",
    "LoadTensor": "upriver.pipeline",
    "Resize": "upriver.pipeline",
    "CenterCrop": "upriver.pipeline",
    "RandomResizedCrop": "upriver.pipeline",
    "RandomCrop": "upriver.pipeline",
    "RandomHorizontalFlip": "upriver.pipeline",
    "ColorJitter": "upriver.pipeline",
    "RandAugment": "upriver.pipeline",
    "Normalize": "upriver.pipeline",
    "ToFloat": "upriver.pipeline",
    "DecodeWav": "upriver.pipeline",
    "FixLength": "upriver.pipeline",
    "AddNoise": "upriver.pipeline",
    "Resample": "upriver.pipeline",
    "Stft": "upriver.pipeline",
    "Fft": "upriver.pipeline",
    "Spectrogram": "upriver.pipeline",
    "Standardize": "upriver.pipeline",
    "imagenet_train": "upriver.pipeline",
    "imagenet_eval": "upriver.pipeline",
    "Store": "upriver.store",
    "freeze_to": "upriver.program.freeze",
    "Plan": "upriver.types",
    "UpriverError": "upriver.errors",
}

__all__ = ["__version__", "coldstart", *sorted(_PLACES)]

if TYPE_CHECKING:
    from upriver import coldstart as coldstart
    from upriver.cluster.ray_workers import ray_workers as ray_workers
    from upriver.dataloader import AutoOffload as AutoOffload
    from upriver.dataloader import DataLoader as DataLoader
    from upriver.dataloader import Offloading as Offloading
    from upriver.dataloader import RemoteWorkers as RemoteWorkers
    from upriver.dataloader import dataset as dataset
    from upriver.errors import UpriverError as UpriverError
    from upriver.finetune.job import FinetuneJob as FinetuneJob
    from upriver.finetune.options import Prefetch as Prefetch
    from upriver.finetune.options import Sampling as Sampling
    from upriver.finetune.options import Splitting as Splitting
    from upriver.finetune.replanner import Replanning as Replanning
    from upriver.finetune.session import Near as Near
    from upriver.finetune.session import connect as connect
    from upriver.inference.offload import Offload as Offload
    from upriver.inference.offload import offload as offload
    from upriver.inference.remote_server import OffloadTuning as OffloadTuning
    from upriver.pipeline import AddNoise as AddNoise
    from upriver.pipeline import CenterCrop as CenterCrop
    from upriver.pipeline import ColorJitter as ColorJitter
    from upriver.pipeline import Dataset as Dataset
    from upriver.pipeline import Decode as Decode
    from upriver.pipeline import DecodeWav as DecodeWav
    from upriver.pipeline import Fft as Fft
    from upriver.pipeline import FixLength as FixLength
    from upriver.pipeline import LoadTensor as LoadTensor
    from upriver.pipeline import Normalize as Normalize
    from upriver.pipeline import RandAugment as RandAugment
    from upriver.pipeline import RandomCrop as RandomCrop
    from upriver.pipeline import RandomHorizontalFlip as RandomHorizontalFlip
    from upriver.pipeline import RandomResizedCrop as RandomResizedCrop
    from upriver.pipeline import Resample as Resample
    from upriver.pipeline import Resize as Resize
    from upriver.pipeline import Spectrogram as Spectrogram
    from upriver.pipeline import Standardize as Standardize
    from upriver.pipeline import Stft as Stft
    from upriver.pipeline import ToFloat as ToFloat
    from upriver.pipeline import imagenet_eval as imagenet_eval
    from upriver.pipeline import imagenet_train as imagenet_train
    from upriver.pipeline import index as index
    from upriver.program.freeze import freeze_to as freeze_to
    from upriver.rpc.link_meter import LinkMeter as LinkMeter
    from upriver.store import Store as Store
    from upriver.types import Plan as Plan


sys.meta_path.append(MovedModules())


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Import on first use: `upriver --help` and a compute worker need few of these, and torch takes seconds.
    if name == "coldstart":
        return importlib.import_module("upriver.coldstart")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'upriver' has no attribute {name!r}")
