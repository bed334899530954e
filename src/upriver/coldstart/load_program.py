"""Load programs that run while their weights arrive, and publish programs for that.

A graph says which weights each of its stages reads. So a stage waits, on its first run, for the weights that
it is the first to read. Values that depend on no input are computed for the stage that reads them first. So a
cast of the last weight does not delay the first stage.

A graph is validated while its first weights are in flight, before any stage can run. In a fresh process that
takes as long as importing half of torch. Each chunk of a weight is checked before its first read. The digest
of the whole file can be checked only after its last byte. Until then results rely on the manifest, which a
client that may write to the store can forge. If only the stages before a cut are wanted, the digest is never
checked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from upriver._threads.executor import DaemonExecutor
from upriver.coldstart.fetch.strategy import Groupings, asked_ahead, plan_requests, way_to
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.format.checkpoint import WeightSource, published
from upriver.coldstart.format.manifest import Manifest
from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.format.uris import program_at
from upriver.coldstart.garbage_collection import check_staying, note_use
from upriver.coldstart.grouping.stage_costs import stage_executions
from upriver.coldstart.incoming_weights import Arriving, ArrivingFile, arriving
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.load_handle import check_options
from upriver.errors import (
    AccessDenied,
    ConfigError,
    ObjectChanged,
    ObjectNotFound,
    ProgramError,
    ProgramNotFound,
    StoreError,
)
from upriver.program.graph import artifact_store
from upriver.program.graph.artifact_paths import digest_of, graph_path, weights_path
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.constants import keys_read
from upriver.program.graph.devices import make_ready
from upriver.program.graph.executor import Program
from upriver.program.graph.fetch import get_at_most
from upriver.program.graph.parser import check_weight, decode
from upriver.program.graph.schema import DTYPES, Graph
from upriver.program.graph.validator import check
from upriver.program.graph.weights_file import WeightsFile
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import require_type

__all__ = ["Arriving", "arriving", "begin", "open", "publish"]

log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------- writing


def publish(program: Program, store: Store, *, prefix: str = DEFAULT_PREFIX, rewrite: bool = False) -> None:
    """Write a program to a store: weights, then their manifest, then the graph.

    Stored weights without a manifest are written again. A weights file with another layout, made by other
    software, is stored unchanged and without a manifest. It is read whole.

    Args:
        rewrite: If true, write all objects even if they exist, since a store does not report a damaged
            object. A concurrent load may have to start again.

    Raises:
        StoreError: If the store refuses. A graph without its weights is never left behind.
        Overloaded: If a removal of unused programs plans this one.
        UpriverError: If the program's own weights are arriving and fail.
    """
    if (coming := arriving(program)) is not None:
        coming.wait()
    digests = (program.weights_digest, program.digest)
    note_use(store, prefix, digests)
    check_staying(store, prefix, digests)
    path = weights_path(prefix, program.weights_digest)
    if rewrite or not _has_manifest(store, path):
        if WeightsFile(program.weight_tensors).digest == program.weights_digest:
            execution = stage_executions(program.graph, list(program.weight_tensors))
            layout.publish(program.weight_tensors, store, path, tied=False, execution=execution)
        elif rewrite:
            store.put(path, program.weights_bytes)
    if rewrite:
        store.put(graph_path(prefix, program.digest), program.graph_bytes)
    else:
        artifact_store.publish(program, store, prefix=prefix)


def _has_manifest(store: Store, path: str) -> bool:
    """Return True if the weights and their manifest exist."""
    try:
        layout.read(store, path)
    except (ObjectNotFound, ObjectChanged, ProgramError):
        return False
    except StoreError as error:
        raise StoreError(f"cannot write a program: looking whether it is there failed: {error}") from None
    return True


# ----------------------------------------------------------------------------------------- reading


def open(
    uri: str | None = None,
    *,
    store: Store | None = None,
    digest: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    store_options: Mapping[str, str] | None = None,
    stop: int | None = None,
    device: str | torch.device = "cpu",
    grouping: str = "upriver",
    limits: StreamLimits | None = None,
    caps: GraphCaps = DEFAULT_CAPS,
) -> Program:
    """Return a program of which any stretch can run at once; each stage waits only for its weights.

    Results are, to the bit, those of the program with all weights loaded. Afterwards no trace of the load
    remains. Weights without a manifest are read before this function returns, as in
    :func:`upriver.program.graph.artifact_store.load`.

    Args:
        uri: URI of the program: ``STORE/PREFIX/programs/DIGEST``, with STORE as for
            :meth:`upriver.store.Store.open`; or of its ``graph.json``.
        store: Store of the program, instead of a URI.
        digest: With ``store``, the program's digest.
        prefix: With ``store``, the folder of programs.
        store_options: Options of an S3 store that a URI names.
        stop: Position before which stages are to run. Only their weights are requested.
        device: Device of the program.
        grouping: Policy that groups the requests: ``upriver``, ``pisel`` or ``layer_by_layer``.
        limits: Limits of the stream.
        caps: Upper bounds on the program.

    Returns:
        The program. :func:`arriving` returns the handle of its weights, which can end the load.

    Raises:
        ConfigError: If an argument is invalid.
        ProgramNotFound: If the store has no program of that digest.
        ProgramError: If the program differs from its digest, exceeds the caps, or has no such stages. If the
            weights differ from those that the graph names, every later run raises it.
        StoreError: If the store cannot be read. A later failure is raised by runs.
    """
    return begin(
        uri,
        store=store,
        digest=digest,
        prefix=prefix,
        store_options=store_options,
        stop=stop,
        device=device,
        grouping=grouping,
        limits=limits,
        caps=caps,
    )[0]


def begin(
    uri: str | None = None,
    *,
    store: Store | None = None,
    digest: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    store_options: Mapping[str, str] | None = None,
    stop: int | None = None,
    device: str | torch.device = "cpu",
    grouping: str = "upriver",
    limits: StreamLimits | None = None,
    caps: GraphCaps = DEFAULT_CAPS,
) -> tuple[Program, Arriving | None]:
    """Return the program of :func:`open` and the handle of its weights, even after the last weight.

    The handle is None if the weights had no manifest and were read whole.
    """
    steps = {"began": time.monotonic()}
    where, bounds = check_options(store, store_options, device, grouping, limits)
    require_type("caps", caps, GraphCaps, "DEFAULT_CAPS")
    if stop is not None:
        require_type("stop", stop, int, "a cut's position")
    place, folder, name = _named(uri, store, prefix, digest, store_options)
    graph = decode(_graph_bytes(place, graph_path(folder, name), name, caps), caps)
    if stop is not None and not 0 <= stop <= len(graph.stages):
        raise ProgramError(f"stop must lie in 0..{len(graph.stages)}, got {stop}")
    weights = weights_path(folder, graph.weights_digest)
    # The first bytes may be of weights that no stage before a cut reads.
    asked = asked_ahead(place, weights, grouping, bounds) if stop is None else nullcontext()
    with asked as ahead:
        with DaemonExecutor(2, name="coldstart-find") as beside:
            if where.type == "cuda":
                beside.submit(make_ready, where)
            found = find(
                place,
                folder,
                name,
                graph.weights_digest,
                grouping=grouping,
                limits=bounds,
                beside=beside,
                caps=caps,
                ahead=ahead,
            )
        if found is None:
            return artifact_store.load(place, name, prefix=folder, device=where, caps=caps), None
        steps["found"] = found.at_s
        _check_weights(graph, found.manifest)
        wanted = None if stop is None else keys_read(graph, stop)
        source, known = found.source, found.known
        if wanted is not None:  # groupings are stored for whole files only
            some = tuple(placed for placed in source.tensors if placed.name in wanted)
            source, known = replace(source, tensors=some), {}
        plan = plan_requests(source, found.link, grouping, bounds, where, known)
        file = ArrivingFile(found.manifest, wanted, where)
        coming = Arriving(
            plan if wanted is None else replace(plan, groupings={}),
            file,
            ahead=ahead,
            stop=len(graph.stages) if stop is None else stop,
            digest=graph.weights_digest if wanted is None else None,
            steps=steps,
        )
        program = Program(graph, file, device=where, caps=caps, before_stage=coming.before_stage)
        coming.start(program)
    try:
        check(graph, device=where, caps=caps)
    except BaseException:
        del program  # the program has no reference any more
        coming.cancel()
        raise
    return program, coming


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWeights:
    """Result of looking up a program's weights."""

    manifest: Manifest
    source: WeightSource
    link: StoreLink
    known: Groupings
    at_s: float


def find(
    store: Store,
    prefix: str,
    digest: str,
    weights_digest: str,
    *,
    grouping: str = "upriver",
    limits: StreamLimits,
    beside: Executor,
    caps: GraphCaps = DEFAULT_CAPS,
    ahead: Readahead | None = None,
) -> FoundWeights | None:
    """Look up a program's weights. Return None if they have no manifest.

    Raises:
        ProgramError: If the manifest is invalid.
        StoreError: If the store cannot be read.
    """
    path = weights_path(prefix, weights_digest)
    try:
        manifest = layout.read(store, path, caps=caps, ahead=ahead, copies=True)
    except (ObjectNotFound, ObjectChanged, AccessDenied) as error:
        log.info("program %s is read whole before it runs: %s", digest, error)
        return None
    source = published(store, path, manifest)
    near = graph_path(prefix, digest)  # not of the weights: the graph may have none
    link, known = way_to(source, near, grouping, limits, beside, ahead)
    return FoundWeights(manifest=manifest, source=source, link=link, known=known, at_s=time.monotonic())


def _named(
    uri: str | None,
    store: Store | None,
    prefix: str,
    digest: str | None,
    options: Mapping[str, str] | None,
) -> tuple[Store, str, str]:
    """Return store, prefix and digest of a program, which is named exactly once."""
    if uri is None:
        if store is None or digest is None:
            raise ConfigError("a program is named by its URI, or by a store and a digest")
        require_type("prefix", prefix, str, "the folder that programs are kept under")
        return store, prefix, require_type("digest", digest, str, "as upriver push prints it")
    require_type("uri", uri, str, "STORE/PREFIX/programs/DIGEST")
    if store is not None or digest is not None:
        raise ConfigError(f"a program is named by its URI or by a store and a digest, got both: {uri!r}")
    if prefix != DEFAULT_PREFIX:
        raise ConfigError(f"prefix goes with a store and a digest; {uri!r} says itself where its program is")
    root, prefix, digest = program_at(uri)
    return Store.open(root, options=options), prefix, digest


def _graph_bytes(store: Store, path: str, digest: str, caps: GraphCaps) -> bytes:
    try:
        data = get_at_most(store, path, caps.graph_bytes)
    except ObjectNotFound as error:
        raise ProgramNotFound(f"no program {digest} in store {store.name!r}: {error}") from None
    if digest_of(data) != digest:
        raise ProgramError(
            f"{path} in store {store.name!r} has digest {digest_of(data)}, not {digest}; push the program "
            "with --rewrite"
        )
    return data


def _check_weights(graph: Graph, manifest: Manifest) -> None:
    """Compare the manifest's form of each weight with the graph's."""
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    for weight in graph.weights:
        found = stored.get(weight.key)
        form = None if found is None else torch.empty(found.shape, dtype=DTYPES[found.dtype], device="meta")
        check_weight(weight, form)
