"""Import torchvision even if its compiled operators are missing.

Without the libraries of its operators torchvision cannot be imported: it registers shape functions for
operators that are undefined. Defining the two schemas first suffices for the models and the transforms. If
the operators exist, nothing changes.
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
    """Import torchvision, and define missing operator schemas if the plain import fails without them.

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
