"""Programs that run while their weights arrive, and programs published so that they can.

A graph says which weights each of its stages reads, so nothing has to be watched: a stage that runs for the
first time waits for those that it is the first to read. What no input has a part in is computed for the stage
that reads it first, so that a cast of the last weight does not hold up the first stage.

A graph is found sound while the first of its weights are on their way, before anything of it can run: in a
fresh process that takes as long as importing half of torch. Each chunk of a weight is before anything reads
it. That the file is the one that the graph names can be known only when all of it is there; until then
answers rest on the manifest, which whoever may write to the store can forge. Where only the stages before a
cut are wanted, it is never known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from upriver._threads import Beside
from upriver.coldstart.arguments import check_store, checked
from upriver.coldstart.fetch.strategy import asked_ahead, way_to
from upriver.coldstart.fetch.weight_stream import Stream, StreamLimits
from upriver.coldstart.format import manifest as layout
from upriver.coldstart.format.checkpoint import WeightSource, published
from upriver.coldstart.format.manifest import Manifest
from upriver.coldstart.format.readahead import Ahead
from upriver.coldstart.format.uris import program_at
from upriver.coldstart.garbage_collection import check_staying, note_use
from upriver.coldstart.grouping.groups import joins_s
from upriver.coldstart.grouping.stage_costs import stage_executions
from upriver.coldstart.incoming_weights import Arriving, ArrivingFile, arriving
from upriver.coldstart.link_estimator import StoreLink
from upriver.coldstart.load_handle import Groupings
from upriver.coldstart.load_model import grouped
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
from upriver.program.graph.artifact_store import graph_path, weights_path
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.constants import keys_read
from upriver.program.graph.devices import make_ready
from upriver.program.graph.executor import Program
from upriver.program.graph.fetch import get_at_most
from upriver.program.graph.parser import check_weight, decode
from upriver.program.graph.schema import DTYPES, Graph, digest_of
from upriver.program.graph.validator import check
from upriver.program.graph.weights_file import WeightsFile
from upriver.store import DEFAULT_PREFIX, Store
from upriver.types import require_type

__all__ = ["Arriving", "arriving", "begin", "open", "publish"]

log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------- writing


def publish(program: Program, store: Store, *, prefix: str = DEFAULT_PREFIX, rewrite: bool = False) -> None:
    """Put a program into a store: weights, then their manifest, then the graph.

    Weights that are there without a manifest of theirs are written once more. A weights file that came from
    somebody who lays files out otherwise is put there as it is, without a manifest: it is read whole.

    Args:
        program: Which.
        store: Where to.
        prefix: The folder there that programs are kept under.
        rewrite: Write all of it also where it is there, as a store does not tell that an object is damaged.
            Who is loading it then may have to begin anew.

    Raises:
        StoreError: If the store refuses; a graph without its weights is never left behind.
        Overloaded: If unused programs are being removed there, and these among them.
        UpriverError: If the program's own weights are still to come, and do not.
    """
    if (coming := arriving(program)) is not None:
        coming.wait()
    digests = (program.weights_digest, program.digest)
    note_use(store, prefix, digests)
    check_staying(store, prefix, digests)
    path = weights_path(prefix, program.weights_digest)
    if rewrite or not _has_manifest(store, path):
        if _is_ours(program):
            execution = stage_executions(program.graph, list(program.weight_tensors))
            layout.publish(program.weight_tensors, store, path, tied=False, execution=execution)
        elif rewrite:
            store.put(path, program.weights_bytes)
    if rewrite:
        store.put(graph_path(prefix, program.digest), program.graph_bytes)
    else:
        artifact_store.publish(program, store, prefix=prefix)


def _has_manifest(store: Store, path: str) -> bool:
    """Whether weights are there, beside a manifest of theirs."""
    try:
        layout.read(store, path)
    except (ObjectNotFound, ObjectChanged, ProgramError):
        return False
    except StoreError as error:
        raise StoreError(f"cannot write a program: looking whether it is there failed: {error}") from None
    return True


def _is_ours(program: Program) -> bool:
    """Whether its weights, as they are written here, are the file that its graph names."""
    return WeightsFile(program.weight_tensors).digest == program.weights_digest


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
    """A program that can be run at once, any stretch of it; each stage waits only for what it reads.

    Answers are, to the bit, those of the program with all its weights loaded. When these are there nothing is
    left of the loading. Weights that were published without a manifest are read before this returns, as
    :func:`upriver.program.graph.artifact_store.load` reads them.

    Args:
        uri: Of the program: ``STORE/PREFIX/programs/DIGEST``, where STORE is as for
            :meth:`upriver.store.Store.open`; or of its ``graph.json``.
        store: Where it is, in place of a URI.
        digest: With ``store``, its name there.
        prefix: With ``store``, the folder that programs are kept under.
        store_options: Of an S3 store that a URI names.
        stop: Only stages before this position are to run, and only their weights are asked for.
        device: Where it is to run.
        grouping: Which weights are asked for together: ``upriver``, ``pisel`` or ``layer_by_layer``.
        limits: Of the stream.
        caps: What the program may take, at most.

    Returns:
        The program. :func:`arriving` tells of its weights, and can end their way.

    Raises:
        ConfigError: If an argument is not what it may be.
        ProgramNotFound: If the store has none of that digest.
        ProgramError: If it is not what its name says, takes more than the caps allow, or has no such stages.
            Where weights turn out to be others than the graph names, every later run raises it.
        StoreError: If the store cannot be read. Where it breaks later, runs raise it.
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
    """:func:`open`, and what tells of its weights, also when all are there already.

    That is None where they were read whole, for want of a manifest.
    """
    steps = {"began": time.monotonic()}
    check_store(store, store_options)
    where, bounds = checked(device, grouping, limits)
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
        with Beside(2, name="upriver-coldstart-find") as beside:
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
        source, link, known = found.of(wanted)
        groups, news = grouped(source, link, grouping, bounds, where, known)
        file = ArrivingFile(found.manifest, wanted, where)
        coming = Arriving(
            source,
            file,
            lambda sink: Stream(
                source,
                groups,
                sink,
                limits=bounds,
                link=link,
                joins_s=joins_s(grouping),
                ahead=ahead,
            ),
            stop=len(graph.stages) if stop is None else stop,
            digest=graph.weights_digest if wanted is None else None,
            steps=steps,
            groupings=news if wanted is None else {},
        )
        program = Program(graph, file, device=where, caps=caps, before_stage=coming.before_stage)
        coming.start(program)
    try:
        check(graph, device=where, caps=caps)
    except BaseException:
        del program  # nobody has it any more
        coming.cancel()
        raise
    return program, coming


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What is known of a program's weights before they are asked for.

    Attributes:
        manifest: What lies beside them.
        source: All of them.
        link: The way to them.
        known: Groupings that are kept.
        at_s: When all that was known, by ``time.monotonic``.
    """

    manifest: Manifest
    source: WeightSource
    link: StoreLink
    known: Groupings
    at_s: float

    def of(self, wanted: Collection[str] | None) -> tuple[WeightSource, StoreLink, Groupings]:
        """The weights of these keys, or all; groupings are kept for all of them together."""
        if wanted is None:
            return self.source, self.link, self.known
        some = tuple(placed for placed in self.source.tensors if placed.name in wanted)
        return replace(self.source, tensors=some), self.link, {}


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
    ahead: Ahead | None = None,
) -> Found | None:
    """What is known of a program's weights; None where these have no manifest of theirs.

    Args:
        store: Where the program is.
        prefix: The folder that it is under.
        digest: Its graph's.
        weights_digest: Its weights'.
        grouping: How they are to be grouped.
        limits: Of the stream that is to bring them.
        beside: Does what need not be waited for.
        caps: What the weights may take, at most.
        ahead: What has been asked for already, of the weights.

    Raises:
        ProgramError: If there is a manifest, and it is not what it should be.
        StoreError: If the store cannot be read.
    """
    path = weights_path(prefix, weights_digest)
    try:
        manifest = layout.read(store, path, caps=caps, ahead=ahead, copies=True)
    except (ObjectNotFound, ObjectChanged, AccessDenied) as error:
        log.info("program %s is read whole before it runs: %s", digest, error)
        return None
    source = published(store, path, manifest)
    near = graph_path(prefix, digest)  # nothing of the weights: the graph may be none
    link, known = way_to(source, near, grouping, limits, beside, ahead)
    return Found(manifest=manifest, source=source, link=link, known=known, at_s=time.monotonic())


def _named(
    uri: str | None,
    store: Store | None,
    prefix: str,
    digest: str | None,
    options: Mapping[str, str] | None,
) -> tuple[Store, str, str]:
    """Store, prefix and digest of a program.

    Raises:
        ConfigError: If it is not named once.
        StoreError: If there is no such store.
    """
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
    """Hold what the manifest says of each weight against what the graph says.

    Raises:
        ProgramError: If one is missing, or of another form.
    """
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    for weight in graph.weights:
        found = stored.get(weight.key)
        form = None if found is None else torch.empty(found.shape, dtype=DTYPES[found.dtype], device="meta")
        check_weight(weight, form)
