"""Assemble a program's two files from incoming bytes, and hash them on arrival."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

from upriver.errors import ProgramError, ProtocolError
from upriver.program.graph.artifact_paths import weights_digest_of
from upriver.protocol import MAX_GRAPH_BYTES, PROGRAM_HEAD_NBYTES, split_program_head
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.streaming_weights import ColdFile


class ProgramBuilder:
    """Assemble a program, and hash it on arrival.

    Args:
        digest: Expected digest of the graph.
    """

    def __init__(self, key: str, digest: str) -> None:
        self.key = key
        self._digest = digest
        self._graph = SealedFile()
        self._weights = SealedFile()
        self._hash = hashlib.sha256()
        self.weights_digest = ""
        self.graph_nbytes = self.weights_nbytes = 0

    def add_graph(self, graph: bytes) -> None:
        """Add the whole ``graph.json``; raise `ProgramError` if its digest is another one."""
        if len(graph) > MAX_GRAPH_BYTES:
            raise ProgramError(f"graph.json has at most {MAX_GRAPH_BYTES} bytes, got {len(graph)}")
        got = hashlib.sha256(graph).hexdigest()
        if got != self._digest:
            raise ProgramError(f"graph.json has digest {got}, not {self._digest}")
        self.weights_digest = weights_digest_of(graph)
        self._graph.append(graph)
        self.graph_nbytes = len(graph)

    def add_weights(self, piece: bytes | memoryview) -> None:
        """Append bytes to the weights file."""
        self._hash.update(piece)
        self._weights.append(piece)
        self.weights_nbytes += len(piece)

    def finish(self) -> ProgramFiles:
        """Return the program, sealed; raise `ProgramError` if the graph names other weights."""
        got = self._hash.hexdigest()
        if got != self.weights_digest:
            raise ProgramError(f"the weights have digest {got}, the graph names {self.weights_digest}")
        self._weights.seal()
        return self.finish_with(self._weights)

    def finish_with(self, weights: SealedFile | ColdFile, *, numbers: Sequence[int] = ()) -> ProgramFiles:
        """Return the program with a weights file of the digest that the graph names."""
        self._graph.seal()
        return ProgramFiles(
            key=self.key, digest=self._digest, graph=self._graph, weights=weights, numbers=numbers
        )


async def fill(
    builder: ProgramBuilder,
    chunks: AsyncIterator[bytes],
    body_nbytes: int,
    room: Callable[[int, int], None],
) -> None:
    """Feed a body to a builder: the length of the graph, the graph, the weights.

    Args:
        room: Called with the bytes received so far, and the most of them that are the graph's; raises if
            there is no memory.
    """
    head, graph, graph_nbytes, got = bytearray(), bytearray(), -1, 0
    async for chunk in chunks:
        got += len(chunk)
        if got > body_nbytes:
            break
        room(got, max(0, graph_nbytes))
        rest = memoryview(chunk)
        if len(head) < PROGRAM_HEAD_NBYTES:
            take = PROGRAM_HEAD_NBYTES - len(head)
            head += rest[:take]
            rest = rest[take:]
            if len(head) < PROGRAM_HEAD_NBYTES:
                continue
            graph_nbytes, _ = split_program_head(bytes(head), body_nbytes)
        if len(graph) < graph_nbytes:
            take = graph_nbytes - len(graph)
            graph += rest[:take]
            rest = rest[take:]
            if len(graph) == graph_nbytes:
                builder.add_graph(bytes(graph))
        if len(rest):
            builder.add_weights(rest)
    if got != body_nbytes or graph_nbytes < 0:
        raise ProtocolError(f"the body has {got} bytes, {body_nbytes} were announced")
