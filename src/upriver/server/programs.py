"""Programs in the front: from a store or an upload into sealed memory, least recently used out first."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from upriver.errors import (
    ObjectNotFound,
    Overloaded,
    ProgramError,
    ProgramNotFound,
    ProtocolError,
    TooLarge,
)
from upriver.program import graph_path, weights_digest_of, weights_path
from upriver.protocol import MAX_GRAPH_BYTES, PROGRAM_HEAD_NBYTES, Caps, split_program_head
from upriver.server.handle import ProgramFiles
from upriver.server.memory import SealedFile
from upriver.server.metrics import Metrics
from upriver.store import Store

PIECE_BYTES = 16 << 20
"""One ranged GET of a weights file: long enough to reach a store's rate, short enough to repeat."""


class Programs:
    """Programs by digest, kept under a byte budget; whatever is in use stays.

    Args:
        stores: Searched in order; uploads go to the first.
        prefix: The operator's, in every store.
        budget_bytes: Kept between requests.
        on_evict: Told each digest that is not kept any more.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        prefix: str,
        budget_bytes: int,
        caps: Caps,
        metrics: Metrics,
        on_evict: Callable[[str], None],
    ) -> None:
        self._stores = stores
        self._prefix = prefix
        self._budget_bytes = budget_bytes
        self._caps = caps
        self._metrics = metrics
        self._on_evict = on_evict
        self._kept: OrderedDict[str, ProgramFiles] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._loading: dict[str, asyncio.Task[ProgramFiles]] = {}

    async def exists(self, digest: str) -> bool:
        """Whether a run request may name it. The graph is put last, so its weights are there too."""
        path = graph_path(self._prefix, digest)
        found = [await store.exists_async(path) for store in self._stores.values()]
        return any(found)

    @asynccontextmanager
    async def use(self, digest: str) -> AsyncIterator[ProgramFiles]:
        """The program, which stays while the block runs.

        Raises:
            ProgramNotFound: If no store has it.
            ProgramError: If it is damaged or too large.
            Overloaded: If everything that is kept is in use, and there is no room beside it.
        """
        self._users[digest] += 1
        try:
            yield await self._get(digest)
        finally:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]

    async def put(self, program: ProgramFiles) -> None:
        """Store a program that a worker has loaded: weights first, so that whoever finds a graph has both."""
        try:
            store = next(iter(self._stores.values()))
            weights = weights_path(self._prefix, weights_digest_of(program.graph.view()))
            await store.put_async(weights, program.weights.view())
            await store.put_async(graph_path(self._prefix, program.digest), program.graph.view())
            if program.digest not in self._kept:
                self._keep(program)
        except BaseException:
            self._on_evict(program.digest)  # workers keep what the front keeps, no more
            raise

    async def _get(self, digest: str) -> ProgramFiles:
        if digest in self._kept:
            self._metrics.programs.labels("kept").inc()
            self._kept.move_to_end(digest)
            return self._kept[digest]
        if digest not in self._loading:
            self._metrics.programs.labels("read").inc()
            task = asyncio.get_running_loop().create_task(self._read_any(digest))
            self._loading[digest] = task
            task.add_done_callback(lambda done: self._loaded(digest, done))
        # Shielded: others may wait for the same program when this request is given up.
        program = await asyncio.shield(self._loading[digest])
        if digest not in self._kept:
            self._keep(program)
        return program

    def _loaded(self, digest: str, task: asyncio.Task[ProgramFiles]) -> None:
        self._loading.pop(digest, None)
        if not task.cancelled():
            task.exception()  # whoever waits gets it too; if nobody does, asyncio must not complain

    def _keep(self, program: ProgramFiles) -> None:
        if program.nbytes > self._budget_bytes:
            raise ProgramError(
                f"program {program.digest} takes {program.nbytes} bytes; "
                f"this server keeps at most {self._budget_bytes}"
            )
        idle = [digest for digest in self._kept if not self._users[digest]]
        while self._total() + program.nbytes > self._budget_bytes:
            if not idle:
                raise Overloaded("the programs in use leave no room for another one", retry_after_s=5)
            digest = idle.pop(0)
            del self._kept[digest]
            self._on_evict(digest)
        self._kept[program.digest] = program
        self._metrics.program_bytes.set(self._total())

    def _total(self) -> int:
        return sum(program.nbytes for program in self._kept.values())

    async def _read_any(self, digest: str) -> ProgramFiles:
        for store in self._stores.values():
            try:
                graph = await store.get_async(graph_path(self._prefix, digest))
            except ObjectNotFound:
                continue
            return await self._read(store, digest, graph)
        raise ProgramNotFound(f"no program {digest} in {', '.join(self._stores)}; push or upload it first")

    async def _read(self, store: Store, digest: str, graph: bytes) -> ProgramFiles:
        builder = ProgramBuilder(digest)
        builder.add_graph(graph)
        await self._add_stored_weights(store, builder)
        return builder.finish()

    async def _add_stored_weights(self, store: Store, builder: ProgramBuilder) -> None:
        info = await store.head_async(weights_path(self._prefix, builder.weights_digest))
        self._check_size(builder.graph_nbytes + info.size)
        for start in range(0, info.size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, info.size)
            piece = await store.get_range_async(info.path, start, stop, etag=info.etag or None)
            await asyncio.to_thread(builder.add_weights, piece)

    async def _add_weights_of_another(self, builder: ProgramBuilder) -> None:
        """Those that came with another program: the same network captured at another size, as a rule."""
        for store in self._stores.values():
            try:
                return await self._add_stored_weights(store, builder)
            except ObjectNotFound:
                continue
        raise ProgramNotFound(
            f"weights {builder.weights_digest} are not in {', '.join(self._stores)}; send them, too"
        )

    def _check_size(self, nbytes: int) -> None:
        most = min(self._caps.program_bytes, self._budget_bytes)
        if nbytes > most:
            raise TooLarge(f"a program has at most {most} bytes here, this one {nbytes}")

    async def receive(self, digest: str, chunks: AsyncIterator[bytes], *, body_nbytes: int) -> ProgramFiles:
        """Take an upload into memory: nothing reaches a store before all of it is there and checked.

        A graph without weights takes those that are stored already.

        Raises:
            ProgramNotFound: If none are.
            ProtocolError: If the body is not a program's.
            ProgramError: If it is another program's, or none.
            TooLarge: If it is larger than allowed.
        """
        self._check_size(body_nbytes)
        builder = ProgramBuilder(digest)
        head, graph, graph_nbytes, got = bytearray(), bytearray(), -1, 0
        async for chunk in chunks:
            got += len(chunk)
            if got > body_nbytes:
                break
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
        if not builder.weights_nbytes:
            await self._add_weights_of_another(builder)
        return builder.finish()


class ProgramBuilder:
    """Puts a program together and hashes it on the way.

    Args:
        digest: What the graph's must be.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._graph = SealedFile()
        self._weights = SealedFile()
        self._hash = hashlib.sha256()
        self.weights_digest = ""
        self.graph_nbytes = self.weights_nbytes = 0

    def add_graph(self, graph: bytes) -> None:
        """All of ``graph.json``.

        Raises:
            ProgramError: If it is not the graph of that digest.
        """
        if len(graph) > MAX_GRAPH_BYTES:
            raise ProgramError(f"graph.json has at most {MAX_GRAPH_BYTES} bytes, got {len(graph)}")
        got = hashlib.sha256(graph).hexdigest()
        if got != self._digest:
            raise ProgramError(f"graph.json has digest {got}, not {self._digest}")
        self.weights_digest = weights_digest_of(graph)
        self._graph.append(graph)
        self.graph_nbytes = len(graph)

    def add_weights(self, piece: bytes | memoryview) -> None:
        """The next bytes of the weights file."""
        self._hash.update(piece)
        self._weights.append(piece)
        self.weights_nbytes += len(piece)

    def finish(self) -> ProgramFiles:
        """The program, sealed.

        Raises:
            ProgramError: If the weights are not those the graph names.
        """
        got = self._hash.hexdigest()
        if got != self.weights_digest:
            raise ProgramError(f"the weights have digest {got}, the graph names {self.weights_digest}")
        self._graph.seal()
        self._weights.seal()
        return ProgramFiles(digest=self._digest, graph=self._graph, weights=self._weights)
