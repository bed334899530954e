"""Encode the head of the body of ``PUT /v1/programs/<digest>``.

The body is the length of the graph (8 bytes big-endian), the graph, and the weights.
"""

from __future__ import annotations

import struct

from upriver.errors import ProtocolError

_LENGTH = struct.Struct(">Q")
PROGRAM_HEAD_NBYTES = _LENGTH.size

MAX_GRAPH_BYTES = 64 << 20
"""Bound on the parsed bytes: a graph of a few thousand operators has a few MB."""


def program_head(graph_nbytes: int) -> bytes:
    """Return the first bytes of the body."""
    return _LENGTH.pack(graph_nbytes)


def split_program_head(head: bytes | memoryview, body_nbytes: int) -> tuple[int, int]:
    """Return the lengths of graph and weights in a body of ``body_nbytes`` bytes that starts with ``head``.

    Raises:
        ProtocolError: If the body cannot hold them.
    """
    if len(head) != PROGRAM_HEAD_NBYTES or body_nbytes < PROGRAM_HEAD_NBYTES:
        raise ProtocolError(f"a program starts with {PROGRAM_HEAD_NBYTES} bytes, got {len(head)}")
    (graph_nbytes,) = _LENGTH.unpack(head)
    room = body_nbytes - PROGRAM_HEAD_NBYTES
    most = min(room, MAX_GRAPH_BYTES)
    if not 1 <= graph_nbytes <= most:
        raise ProtocolError(f"a graph has 1 to {most} bytes in a body of {body_nbytes}, got {graph_nbytes}")
    return graph_nbytes, room - graph_nbytes
