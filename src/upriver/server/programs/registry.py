"""Read programs from a store, or receive them from a client, into sealed memory for the program cache."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet, WeakValueDictionary

import msgspec

from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.garbage_collection import (
    TOUCH_S,
    begin_upload,
    check_staying,
    check_upload,
    end_upload,
    note_use,
)
from upriver.control.admission_queue import NeededProgram
from upriver.control.memory_budget import MemoryHold
from upriver.errors import (
    Forbidden,
    ObjectChanged,
    ObjectNotFound,
    ProgramError,
    ProgramNotFound,
    StoreError,
    TooLarge,
)
from upriver.imports import imported
from upriver.program.graph.artifact_paths import graph_path, weights_digest_of, weights_path
from upriver.program.graph.fetch import get_at_most
from upriver.protocol import MAX_GRAPH_BYTES, Caps
from upriver.server.ipc.messages import Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.programs.cache import ProgramCache
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.quota import check_stored
from upriver.server.programs.streaming_weights import ColdFile, kept_bytes
from upriver.server.programs.upload_builder import ProgramBuilder, fill
from upriver.server.scheduling.answer_memory import MemoryUse
from upriver.server.scheduling.footprint import program_bytes
from upriver.server.tenants import ANYONE, Tenant
from upriver.store import Store

if TYPE_CHECKING:
    from upriver.coldstart.format.manifest import Manifest
    from upriver.coldstart.load_program import FoundWeights

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PIECE_BYTES = 16 << 20
"""Bytes of one ranged GET of a weights file: enough to reach a store's rate, few enough to repeat."""

SMALL_BYTES = 1 << 20
"""Weights below this size are read whole: one request, where a lookup of their contents needs four."""

MAX_KNOWN, MAX_KNOWN_BYTES = 64, 32 << 20
"""Most known graphs and their bytes, kept for later requests whether loaded or not. A graph usually has some
hundred kB."""

KEPT_SHARE = 1 / 8
"""Share of its weights' bytes up to which the front keeps a streaming program's metadata. No memory is held
for the metadata, and a tenant may upload as many programs as the budget takes. A network with more metadata
has some MB of weights, which are soon read whole."""

LOOKING = 4
"""Streaming programs of one store that are looked up at once, each in a thread. A store that does not answer
blocks only its own threads."""

MAX_NOTED = 4096
"""Programs whose last noted use is remembered. The use of others is noted again."""

STEP_BYTES = 1 << 20
"""Step in which memory for an upload is held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLocation:
    """Name the store and the prefix of a program's files."""

    store: Store
    prefix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownProgram:
    """Describe a program by its graph; its weights may not be loaded.

    Attributes:
        key: Its name here, separate for each tenant, even with equal digests.
        nbytes: Bytes that it needs in the front and in workers once it is loaded.
        graph: ``graph.json``, sealed.
    """

    key: str
    digest: str
    nbytes: int
    graph: SealedFile
    weights: ProgramLocation
    weights_digest: str
    weights_nbytes: int

    def need(self, weighed: Weighed, *, workers: int) -> NeededProgram:
        """Return it for the admission queue, with the constants that loading makes in each worker."""
        return NeededProgram(key=self.key, nbytes=self.nbytes + workers * weighed.constant_bytes)


class ProgramRegistry:
    """Find programs by tenant and digest, and load them into the program cache.

    A tenant's uploads go to a prefix of its own. Programs at the server's own prefix are open to all tenants
    that may read the store and know the digest.

    Args:
        stores: Searched in order; uploads go to the first one that a tenant may read.
        prefix: The operator's prefix, in every store.
        stored_bytes: Bytes of programs, weights and kept features that a tenant may store, unless it has a
            limit of its own.
        copies: Copies of its weights; see `upriver.server.scheduling.footprint.program_bytes`.
        limits: Bounds on the link's use by weights that stream while a program runs. If None, a program runs
            only after all of its weights arrived.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        prefix: str,
        program_cache: ProgramCache,
        caps: Caps,
        most_bytes: int,
        stored_bytes: int,
        workers: int,
        metrics: ServerMetrics,
        copies: int = 1,
        device: str = "cpu",
        limits: StreamLimits | None = None,
    ) -> None:
        self._stores, self._prefix = stores, prefix
        self._program_cache, self._caps, self._most_bytes = program_cache, caps, most_bytes
        self._workers, self._copies, self._metrics = workers, copies, metrics
        self._stored_bytes = stored_bytes
        self._noted: dict[str, float] = {}
        self._noting: set[asyncio.Task[None]] = set()
        self._limits, self._device = limits, device
        self._forged: set[tuple[str, str, str]] = set()
        self._known: OrderedDict[str, KnownProgram] = OrderedDict()
        # Programs of one network at several sizes have the same weights: one copy serves them all.
        self._weights: WeakValueDictionary[tuple[str, str], SealedFile | ColdFile] = WeakValueDictionary()
        self._cold: WeakSet[ColdFile] = WeakSet()
        self._looking = {
            name: ThreadPoolExecutor(LOOKING, thread_name_prefix="upriver-programs-find") for name in stores
        }

    async def exists(self, tenant: Tenant, digest: str) -> bool:
        """Return whether a run request may name the program.

        Its graph is stored last, so the weights exist too.
        """
        found = [
            await place.store.exists_async(graph_path(place.prefix, digest)) for place in self._places(tenant)
        ]
        return any(found)

    async def know(self, tenant: Tenant, digest: str) -> KnownProgram:
        """Return the program as its graph describes it.

        Raises:
            ProgramNotFound: If no store has the program.
            ProgramError: If it is damaged.
            TooLarge: If it is larger than any program may be.
        """
        key = key_of(tenant, digest)
        if key not in self._known:
            self._remember(await self._find(tenant, digest))
        self._known.move_to_end(key)
        self._note_use(self._known[key])
        return self._known[key]

    async def load(self, tenant: Tenant, known: KnownProgram, weighed: Weighed) -> ProgramFiles:
        """Return the program, and start to read the weights of a stage range. The program cache must hold it.

        Raises:
            ProgramNotFound: If it was removed since its graph was read.
            ProgramError: If it is damaged.
            StoreError: If it cannot be read.
        """
        self._metrics.program(
            "kept" if self._program_cache.files(known.key) is not None else "read", tenant.name
        )
        try:
            files = await self._program_cache.load(known.key, lambda: self._read(tenant, known))
        except ObjectNotFound:
            self._known.pop(known.key, None)
            raise ProgramNotFound(
                f"the weights of program {known.digest} are gone; upload it again"
            ) from None
        if (cold := files.cold) is not None:
            cold.ask(files.places(weighed.weights), to_end=weighed.to_end)
            self._program_cache.come(known.key, files)
        return files

    async def close(self) -> None:
        """Stop all reads and notes."""
        for task in self._noting:
            task.cancel()
        files = list(self._cold)
        for file in files:
            file.cancel()
        for file in files:
            await asyncio.to_thread(file.join)
        for executor in self._looking.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def make_room(self, nbytes: int) -> bool:
        """Evict unused programs until this many bytes are free, if possible."""
        return self._program_cache.make_room(nbytes)

    def _note_use(self, known: KnownProgram) -> None:
        """Note in the store that a program is used, in the background, once an hour."""
        now = time.monotonic()
        if now - self._noted.get(known.key, -math.inf) < TOUCH_S:
            return
        while len(self._noted) >= MAX_NOTED:
            self._noted.pop(next(iter(self._noted)))
        self._noted[known.key] = now
        place = known.weights

        async def note() -> None:
            digests = (known.weights_digest, known.digest)
            try:
                await self._looked(place.store, partial(note_use, place.store, place.prefix, digests))
            except StoreError as error:
                log.warning(
                    "cannot note in the store that program %s is used, and upriver gc may remove it: %s",
                    known.digest,
                    error,
                )

        task = asyncio.create_task(note())
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    # ------------------------------------------------------------------------------------- uploads

    async def check_room(self, tenant: Tenant, digest: str, body_nbytes: int) -> None:
        """Refuse an upload that exceeds its tenant's storage, before its body arrives.

        Raises:
            Forbidden: If the tenant may use no store.
            StorageFull: If the upload exceeds the storage.
            StoreError: If the store cannot be listed.
        """
        place = self._own(tenant)
        if self._program_cache.files(key_of(tenant, digest)) is None:
            graph = graph_path(place.prefix, digest)
            check = partial(check_stored, tenant, default=self._stored_bytes)
            look = partial(check_upload, place.store, place.prefix, graph, body_nbytes, check=check)
            await self._looked(place.store, look)

    @contextmanager
    def upload(self, tenant: Tenant, digest: str, body_nbytes: int) -> Iterator[tuple[MemoryHold, MemoryUse]]:
        """Yield the memory of an upload, which grows as it arrives, and its users: the block, and workers.

        When the last user leaves, the memory is released, unless the program was `put`.

        Raises:
            Forbidden: If the tenant may use no store to keep it.
            TooLarge: If it is larger than any program may be.
        """
        self._own(tenant)
        self._check_size(tenant, body_nbytes)
        hold = self._program_cache.coming(owner=tenant.name)
        with MemoryUse(lambda: self._program_cache.over(key_of(tenant, digest), hold)) as use:
            yield hold, use

    async def receive(
        self, tenant: Tenant, digest: str, chunks: AsyncIterator[bytes], hold: MemoryHold, *, body_nbytes: int
    ) -> ProgramFiles | None:
        """Read an upload into memory; return None if the program is kept here already.

        A graph without weights gets weights that are stored already. Nothing reaches a store before all of
        the upload is received and checked.

        Raises:
            ProgramNotFound: If such weights are not stored.
            ProtocolError: If the body is not a program.
            ProgramError: If it is another program, or an invalid one.
            TooLarge: If it is larger than allowed.
            DoesNotFit: If there is never enough memory for it.
            Overloaded: If there is no memory for it now.
        """
        if (
            self._program_cache.files(key_of(tenant, digest)) is not None
        ):  # its digest says that it is the same
            async for _ in chunks:
                pass
            return None

        def room(nbytes: int, graph_nbytes: int) -> None:
            taken = self._takes(nbytes, min(nbytes, graph_nbytes), workers=1)
            self._program_cache.grow(hold, -(-taken // STEP_BYTES) * STEP_BYTES)

        builder = ProgramBuilder(key_of(tenant, digest), digest)
        await fill(builder, chunks, body_nbytes, room)
        if builder.weights_nbytes:
            return builder.finish()
        shared = self._weights_here(tenant, builder.weights_digest)
        if isinstance(shared, SealedFile):
            return builder.finish_with(shared)
        await self._add_weights_of_another(tenant, builder, hold)
        return builder.finish()

    def weighed(self, program: ProgramFiles, weighed: Weighed, hold: MemoryHold) -> None:
        """Hold the memory that loading an upload needs, before a worker loads it."""
        nbytes = self._takes(program.nbytes, program.graph.nbytes)
        self._program_cache.grow(hold, nbytes + self._workers * weighed.constant_bytes)

    async def put(self, tenant: Tenant, program: ProgramFiles, hold: MemoryHold, manifest: bytes) -> None:
        """Store a program that a worker has loaded: weights first, so that a stored graph always has them.

        Weights that are stored with their manifest stay unchanged: other readers may use both.

        Args:
            manifest: Manifest of the weights, without their ETag; empty if there is none.

        Raises:
            StorageFull: If the program exceeds the tenant's storage.
            Overloaded: If some of it is being removed.
            StoreError: If the store cannot be listed or written.
        """
        layout = await imported("upriver.coldstart.format.manifest")
        place, weights_digest = self._own(tenant), weights_digest_of(program.graph.view())
        store, weights = place.store, weights_path(place.prefix, weights_digest)
        graph = graph_path(place.prefix, program.digest)
        assert isinstance(program.weights, SealedFile)  # as it was received
        objects = {
            graph: program.graph.nbytes,
            weights: program.weights.nbytes,
            layout.manifest_path(weights): len(manifest),
        }
        async with self._room(tenant, place, objects, (weights_digest, program.digest)):
            described = layout.decode(manifest) if manifest else None
            if described is None or not await self._looked(
                store, partial(_is_stored, store, weights, described)
            ):
                await store.put_async(weights, program.weights.view())
                if described is not None:
                    info = await store.head_async(weights)
                    sealed = msgspec.structs.replace(described, etag=info.etag)
                    await store.put_async(layout.manifest_path(weights), sealed.encode())
            await store.put_async(graph, program.graph.view())
        self._program_cache.put(program, hold)
        self._weights[tenant.name, weights_digest] = program.weights
        self._metrics.program("stored", tenant.name)

    @asynccontextmanager
    async def _room(
        self, tenant: Tenant, place: ProgramLocation, objects: Mapping[str, int], digests: Collection[str]
    ) -> AsyncIterator[None]:
        """Note what the block writes in the store: other uploads count it, and no process removes it."""
        store, prefix = place.store, place.prefix

        def begin() -> str:
            check = partial(check_stored, tenant, default=self._stored_bytes)
            note = begin_upload(store, prefix, objects, check=check)
            try:
                note_use(store, prefix, digests)
                check_staying(store, prefix, digests)
            except BaseException:
                end_upload(store, note)
                raise
            return note

        note = await self._looked(store, begin)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the server was closed meanwhile; the note expires by itself
                await asyncio.shield(self._looked(store, partial(end_upload, store, note)))

    # ------------------------------------------------------------------------------------- finding

    def _places(self, tenant: Tenant) -> list[ProgramLocation]:
        seen = [store for name, store in self._stores.items() if tenant.may_read(name)]
        common = [ProgramLocation(store=store, prefix=self._prefix) for store in seen]
        if tenant.name == ANYONE.name:
            return common
        return [
            *(ProgramLocation(store=store, prefix=own_prefix(self._prefix, tenant)) for store in seen),
            *common,
        ]

    def _own(self, tenant: Tenant) -> ProgramLocation:
        places = self._places(tenant)
        if not places:
            raise Forbidden(f"{tenant.name} may use no store here, so programs have no place")
        return places[0]

    def _remember(self, known: KnownProgram) -> None:
        self._known[known.key] = known
        self._known.move_to_end(known.key)
        nbytes = sum(each.graph.nbytes for each in self._known.values())
        while len(self._known) > 1 and (len(self._known) > MAX_KNOWN or nbytes > MAX_KNOWN_BYTES):
            nbytes -= self._known.popitem(last=False)[1].graph.nbytes

    def _takes(self, nbytes: int, graph_nbytes: int, *, workers: int | None = None) -> int:
        """Return the bytes of a program in this many workers, or in all of them."""
        count = self._workers if workers is None else workers
        return program_bytes(
            nbytes, graph_nbytes=graph_nbytes, workers=count, copies=min(count, self._copies)
        )

    async def _find(self, tenant: Tenant, digest: str) -> KnownProgram:
        for place in self._places(tenant):
            try:
                path = graph_path(place.prefix, digest)
                graph = await self._looked(
                    place.store, partial(get_at_most, place.store, path, MAX_GRAPH_BYTES)
                )
            except ObjectNotFound:
                continue
            return await self._known_from(tenant, digest, place, graph)
        raise ProgramNotFound(f"no program {digest} here; push or upload it first")

    async def _known_from(
        self, tenant: Tenant, digest: str, place: ProgramLocation, graph: bytes
    ) -> KnownProgram:
        builder = ProgramBuilder(key_of(tenant, digest), digest)
        builder.add_graph(graph)
        try:
            info = await place.store.head_async(weights_path(place.prefix, builder.weights_digest))
        except ObjectNotFound:
            raise _gone(digest) from None
        self._check_size(tenant, len(graph) + info.size)
        nbytes = self._takes(len(graph) + info.size, len(graph))
        file = SealedFile()
        file.append(graph)
        file.seal()
        return KnownProgram(
            key=builder.key,
            digest=digest,
            nbytes=nbytes,
            graph=file,
            weights=place,
            weights_digest=builder.weights_digest,
            weights_nbytes=info.size,
        )

    async def _read(self, tenant: Tenant, known: KnownProgram) -> ProgramFiles:
        builder = ProgramBuilder(known.key, known.digest)
        builder.add_graph(bytes(known.graph.view()))
        shared = self._weights_here(tenant, builder.weights_digest)
        weights = shared or await self._coming(known, builder.weights_digest)
        if isinstance(weights, ColdFile):
            files = builder.finish_with(weights, numbers=_numbers(known.graph.view(), weights))
        elif weights is not None:
            return builder.finish_with(weights)
        else:
            await self._add_stored_weights(known.weights, builder)
            files = builder.finish()
        self._weights[tenant.name, builder.weights_digest] = files.weights
        return files

    async def _looked(self, store: Store, look: Callable[[], _T]) -> _T:
        """Run a lookup in a thread, since the store may answer slowly."""
        return await asyncio.get_running_loop().run_in_executor(self._looking[store.name], look)

    def _weights_here(self, tenant: Tenant, digest: str) -> SealedFile | ColdFile | None:
        """Return weights that another program has loaded or is loading."""
        shared = self._weights.get((tenant.name, digest))
        return None if isinstance(shared, ColdFile) and shared.error is not None else shared

    async def _coming(self, known: KnownProgram, weights_digest: str) -> ColdFile | None:
        """Return a weights file without any requested tensor, or None if it must be read whole.

        It must be if it has no manifest, a wrong one, or one that is too large to keep.
        """
        place = known.weights
        name = (place.store.name, place.prefix, weights_digest)
        limits = self._limits
        if limits is None or known.weights_nbytes < SMALL_BYTES or name in self._forged:
            return None

        def look() -> FoundWeights | None:
            with ThreadPoolExecutor(1, thread_name_prefix="upriver-cold-find") as beside:
                there: FoundWeights | None = load_program.find(
                    place.store, place.prefix, known.digest, weights_digest, limits=limits, beside=beside
                )
                return there

        try:
            load_program = await imported("upriver.coldstart.load_program")
            found = await self._looked(place.store, look)
            if found is None or found.manifest.nbytes != known.weights_nbytes:
                return None
            if kept_bytes(found.manifest) > KEPT_SHARE * known.weights_nbytes:
                log.info(
                    "program %s is read whole before it runs: its weights are many small ones", known.digest
                )
                return None
            file = ColdFile(
                found,
                weights_digest,
                limits,
                device=self._device,
                on_forged=lambda: self._forged.add(name),
            )
        # The manifest, this kind of memory, or the start of a thread may fail.
        except (ProgramError, OSError, RuntimeError) as error:
            log.warning("program %s is read whole before it runs: %s", known.digest, error)
            return None
        self._cold.add(file)
        return file

    async def _add_stored_weights(self, place: ProgramLocation, builder: ProgramBuilder) -> None:
        info = await place.store.head_async(weights_path(place.prefix, builder.weights_digest))
        for start in range(0, info.size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, info.size)
            piece = await place.store.get_range_async(info.path, start, stop, etag=info.etag or None)
            await asyncio.to_thread(builder.add_weights, piece)

    async def _add_weights_of_another(
        self, tenant: Tenant, builder: ProgramBuilder, hold: MemoryHold
    ) -> None:
        """Add the weights of another stored program, usually the same network captured at another size."""
        for place in self._places(tenant):
            try:
                info = await place.store.head_async(weights_path(place.prefix, builder.weights_digest))
            except ObjectNotFound:
                continue
            nbytes = builder.graph_nbytes + info.size
            self._check_size(tenant, nbytes)
            self._program_cache.grow(hold, self._takes(nbytes, builder.graph_nbytes, workers=1))
            return await self._add_stored_weights(place, builder)
        raise ProgramNotFound(f"weights {builder.weights_digest} are not here; send them, too")

    def _check_size(self, tenant: Tenant, nbytes: int) -> None:
        quotas = [tenant.program_bytes] if tenant.program_bytes is not None else []
        most = min([self._caps.program_bytes, self._most_bytes, *quotas])
        if nbytes > most:
            raise TooLarge(f"a program has at most {most} bytes here, this one {nbytes}")


def _gone(digest: str) -> ProgramNotFound:
    return ProgramNotFound(f"the weights of program {digest} are not here any more; upload it again")


def key_of(tenant: Tenant, digest: str) -> str:
    """Return the key of a tenant's program in the front and in workers."""
    return f"{tenant.name}/{digest}"


def own_prefix(prefix: str, tenant: Tenant) -> str:
    """Return the prefix of a tenant's uploads."""
    return f"{prefix}/tenants/{tenant.name}"


def _is_stored(store: Store, path: str, described: Manifest) -> bool:
    """Return whether a weights file is stored with a manifest that describes each weight equally."""
    from upriver.coldstart.format.manifest import read

    try:
        found = read(store, path)
    except (ObjectNotFound, ObjectChanged, ProgramError):
        return False
    return msgspec.structs.replace(found, etag="", execution=described.execution) == described


class _Weight(msgspec.Struct):
    key: str


class _Weights(msgspec.Struct):
    weights: list[_Weight]


def _numbers(graph: memoryview, file: ColdFile) -> list[int]:
    """Return the places of a graph's weights in a file; raise `ProgramError` if one is missing."""
    try:
        keys = [weight.key for weight in msgspec.json.decode(graph, type=_Weights).weights]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProgramError(f"graph.json: {error}") from None
    missing = [key for key in keys if key not in file.numbers]
    if missing:
        raise ProgramError(f"weight {missing[0][:80]!r} is not in the weights file that the graph names")
    return [file.numbers[key] for key in keys]
