"""From nn.Module to Program: capture, graph file, weights file, cuts, the tail."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "Graph": "graph",
    "Program": "program",
    "Stage": "graph",
    "Tail": "tail",
    "TensorSpec": "graph",
    "check_digest": "files",
    "digest_of": "graph",
    "graph_path": "files",
    "load": "files",
    "publish": "files",
    "weights_digest_of": "files",
    "weights_path": "files",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.program.files import check_digest as check_digest
    from upriver.program.files import graph_path as graph_path
    from upriver.program.files import load as load
    from upriver.program.files import publish as publish
    from upriver.program.files import weights_digest_of as weights_digest_of
    from upriver.program.files import weights_path as weights_path
    from upriver.program.graph import Graph as Graph
    from upriver.program.graph import Stage as Stage
    from upriver.program.graph import TensorSpec as TensorSpec
    from upriver.program.graph import digest_of as digest_of
    from upriver.program.program import Program as Program
    from upriver.program.tail import Tail as Tail


def __getattr__(name: str) -> Any:
    # Looked up when first used: a cold start reads weights and runs no program, and what runs one takes long
    # to import.
    if name in _PLACES:
        return getattr(importlib.import_module(f"upriver.program.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'upriver.program' has no attribute {name!r}")
