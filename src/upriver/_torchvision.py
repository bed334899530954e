"""Importing torchvision where its compiled operators are missing.

A torchvision without the libraries that its operators were built for cannot be imported at all: registering
their shape functions asks for operators that nobody defined. Defining the two schemas first is enough for the
models and the transforms. Where the operators are there, nothing happens.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # a schema lives as long as its library object


def ensure_torchvision() -> ModuleType:
    """Import torchvision, defining the missing operator schemas if the plain import fails for want of them.

    Raises:
        ImportError: If torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as exc:
        if "torchvision::" not in str(exc):
            raise
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    _libraries.append(library)
    return importlib.import_module("torchvision")
