"""From nn.Module to Program: capture, graph file, weights file, cuts, the tail."""

from upriver.program.capture import capture
from upriver.program.files import (
    check_digest,
    graph_path,
    load,
    publish,
    weights_digest_of,
    weights_path,
)
from upriver.program.graph import Graph, Stage, TensorSpec, digest_of
from upriver.program.program import Program
from upriver.program.tail import Tail

__all__ = [
    "Graph",
    "Program",
    "Stage",
    "Tail",
    "TensorSpec",
    "capture",
    "check_digest",
    "digest_of",
    "graph_path",
    "load",
    "publish",
    "weights_digest_of",
    "weights_path",
]
