"""Limit a program file: above the networks that are published, below the size that harms a server."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCaps:
    """Caps that a reader enforces on a program before anything is allocated or run.

    Attributes:
        graph_bytes: Bytes of ``graph.json``. The largest network tried (a Swin, 2,500 nodes) needs 2 MB.
        nodes: Operator calls. A check costs about 0.2 ms for each, so a whole check takes at most half a
            minute.
        tensors: Inputs, weights and results together.
        arguments: Values in the arguments of one node, including nested ones.
        depth: Nesting of arguments. Operators have lists of numbers or tensors, no deeper.
        text: Characters of a name, or of a text among the arguments.
        dimensions: Dimensions of a tensor. Windowed attention in three dimensions needs 8.
        tensor_bytes: Bytes of one tensor, including intermediate tensors of an operator. Repeated (stride 0)
            elements count each time.
        live_bytes: Bytes alive at once during a micro-batch: weights, constants, and the values in use. A
            server's own budget is smaller and checked in addition. This cap excludes sums that no machine can
            hold.
        flops: Operations of one micro-batch. Cheap operators count their elements. A 7-billion-parameter
            language model on 16 texts of 2,048 tokens needs 5e14.
        header_entries: Tensors in the weights file, padding included.
    """

    graph_bytes: int = 64 << 20
    nodes: int = 100_000
    tensors: int = 400_000
    stages: int = 100_000
    arguments: int = 4_096
    depth: int = 4
    text: int = 1_024
    dimensions: int = 12
    micro_batch: int = 65_536
    tensor_bytes: int = 16 * GIB
    live_bytes: int = 128 * GIB
    flops: float = 1e15
    weights_bytes: int = 64 * GIB
    header_bytes: int = 16 << 20
    header_entries: int = 200_000


DEFAULT_CAPS = GraphCaps()
"""Caps of a reader without caps of its own."""
