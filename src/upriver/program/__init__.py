"""Convert an `nn.Module` to a program: capture, graph file, weights file, cuts, the tail."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PLACES = {
    "Program": "graph.executor",
    "Tail": "split.tail",
    "graph_path": "graph.artifact_store",
    "load": "graph.artifact_store",
    "publish": "graph.artifact_store",
    "weights_digest_of": "graph.artifact_store",
    "weights_path": "graph.artifact_store",
}

__all__ = sorted(_PLACES)

if TYPE_CHECKING:
    from upriver.program.graph.artifact_store import graph_path as graph_path
    from upriver.program.graph.artifact_store import load as load
    from upriver.program.graph.artifact_store import publish as publish
    from upriver.program.graph.artifact_store import weights_digest_of as weights_digest_of
    from upriver.program.graph.artifact_store import weights_path as weights_path
    from upriver.program.graph.executor import Program as Program
    from upriver.program.split.tail import Tail as Tail


def __getattr__(name: str) -> Any:
    # Import on first use: a cold start reads weights without running a program, and the executor is slow to
    # import.
    if name in _PLACES:
        return getattr(importlib.import_module(f"upriver.program.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'upriver.program' has no attribute {name!r}")
