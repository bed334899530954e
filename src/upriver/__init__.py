"""upriver: decides where each part of a PyTorch job runs.

The answer never changes, only where it is computed. ``upriver.connect()`` is the way in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "connect": "upriver.client.connect",
    "Near": "upriver.client.connect",
    "FinetuneJob": "upriver.client.job",
    "LinkMeter": "upriver.client.link",
    "Dataset": "upriver.pipeline",
    "index": "upriver.pipeline",
    "Decode": "upriver.pipeline",
    "LoadTensor": "upriver.pipeline",
    "Resize": "upriver.pipeline",
    "CenterCrop": "upriver.pipeline",
    "RandomResizedCrop": "upriver.pipeline",
    "RandomHorizontalFlip": "upriver.pipeline",
    "Normalize": "upriver.pipeline",
    "imagenet_train": "upriver.pipeline",
    "imagenet_eval": "upriver.pipeline",
    "Store": "upriver.store",
    "freeze_to": "upriver.program.freeze",
    "Plan": "upriver.types",
    "UpriverError": "upriver.errors",
}

__all__ = ["__version__", *sorted(_PLACES)]

if TYPE_CHECKING:
    from upriver.client.connect import Near as Near
    from upriver.client.connect import connect as connect
    from upriver.client.job import FinetuneJob as FinetuneJob
    from upriver.client.link import LinkMeter as LinkMeter
    from upriver.errors import UpriverError as UpriverError
    from upriver.pipeline import CenterCrop as CenterCrop
    from upriver.pipeline import Dataset as Dataset
    from upriver.pipeline import Decode as Decode
    from upriver.pipeline import LoadTensor as LoadTensor
    from upriver.pipeline import Normalize as Normalize
    from upriver.pipeline import RandomHorizontalFlip as RandomHorizontalFlip
    from upriver.pipeline import RandomResizedCrop as RandomResizedCrop
    from upriver.pipeline import Resize as Resize
    from upriver.pipeline import imagenet_eval as imagenet_eval
    from upriver.pipeline import imagenet_train as imagenet_train
    from upriver.pipeline import index as index
    from upriver.program.freeze import freeze_to as freeze_to
    from upriver.store import Store as Store
    from upriver.types import Plan as Plan


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Looked up when first used: `upriver --help` and a compute worker need few of these, and torch takes
    # seconds.
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'upriver' has no attribute {name!r}")
