"""What a program file may declare, at most: above the networks people publish, below what harms a server."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCaps:
    """Caps that a reader holds a program to before anything is allocated or run.

    Attributes:
        graph_bytes: Of ``graph.json``. The largest network tried (a Swin, 2,500 nodes) takes 2 MB.
        nodes: Operator calls. Checking one costs about 0.2 ms, so this bounds a check to half a minute.
        tensors: Inputs, weights and results together.
        stages: Cuts that a program offers.
        arguments: Values in the arguments of one node, nested ones counted.
        depth: How deep arguments may nest. Operators take lists of numbers or tensors, no deeper.
        text: Characters of a name, or of a text among the arguments.
        dimensions: Of a tensor. Windowed attention in three dimensions needs 8.
        micro_batch: Samples a run takes.
        tensor_bytes: Of one tensor, also of one that an operator makes on its way, and with repeated
            (stride 0) elements counted each time.
        live_bytes: Of all that is alive at once while a micro-batch runs: weights, constants, and the values
            in use. A server's own budget is smaller and asked on top; this one keeps sums away from what
            no machine has.
        flops: Operations of one micro-batch; cheap operators count their elements. A 7-billion-parameter
            language model on 16 texts of 2,048 tokens takes 5e14.
        weights_bytes: Of the weights file.
        header_bytes: Of the weights file's header.
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
"""For a reader that was not told otherwise."""
