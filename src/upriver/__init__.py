"""Decide where each part of a PyTorch job runs.

upriver changes where results are computed, and never a result. ``upriver.connect()`` is the entry point.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from upriver._moved import MovedModules
from upriver.imports import lazy_names

__version__ = "0.1.0"

_PLACES = {
    "connect": "finetune.session",
    "Near": "finetune.session",
    "offload": "inference.offload",
    "Offload": "inference.offload",
    "OffloadTuning": "inference.remote_server",
    "FinetuneJob": "finetune.job",
    "Prefetch": "finetune.options",
    "Replanning": "finetune.replanner",
    "Sampling": "finetune.options",
    "Splitting": "finetune.options",
    "LinkMeter": "rpc.link_meter",
    "Keep": "features.keep",
    "DataLoader": "dataloader",
    "AutoOffload": "dataloader",
    "Offloading": "dataloader",
    "RemoteWorkers": "dataloader",
    "dataset": "dataloader",
    "ray_workers": "cluster.ray_workers",
    "Dataset": "pipeline",
    "index": "pipeline",
    "Decode": "pipeline",
    "LoadTensor": "pipeline",
    "Resize": "pipeline",
    "CenterCrop": "pipeline",
    "RandomResizedCrop": "pipeline",
    "RandomCrop": "pipeline",
    "RandomHorizontalFlip": "pipeline",
    "ColorJitter": "pipeline",
    "RandAugment": "pipeline",
    "Normalize": "pipeline",
    "ToFloat": "pipeline",
    "DecodeWav": "pipeline",
    "FixLength": "pipeline",
    "AddNoise": "pipeline",
    "Resample": "pipeline",
    "Stft": "pipeline",
    "Fft": "pipeline",
    "Spectrogram": "pipeline",
    "Standardize": "pipeline",
    "imagenet_train": "pipeline",
    "imagenet_eval": "pipeline",
    "Store": "store",
    "freeze_to": "program.freeze",
    "Plan": "types",
    "UpriverError": "errors",
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
    from upriver.features.keep import Keep as Keep
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

# Import on first use: `upriver --help` and a compute worker need few of these, and torch takes seconds.
__getattr__, __dir__ = lazy_names(__name__, _PLACES, ("coldstart",))
