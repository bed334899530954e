"""Store programs: weights first, then the graph that names them."""

from __future__ import annotations

import torch

from upriver.errors import ObjectNotFound, ProgramError, ProgramNotFound, StoreError
from upriver.program.graph.artifact_paths import graph_path, weights_digest_of, weights_path
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.executor import Program
from upriver.program.graph.fetch import get_at_most
from upriver.store import DEFAULT_PREFIX, Store


def publish(program: Program, store: Store, *, prefix: str = DEFAULT_PREFIX) -> None:
    """Write a program to a store: weights first, so that a readable graph is always complete.

    Raises:
        StoreError: If the store refuses. A graph without its weights is never left behind.
    """
    graph = graph_path(prefix, program.digest)
    if _is_there(store, graph):
        return
    weights = weights_path(prefix, program.weights_digest)
    if not _is_there(store, weights):
        store.put(weights, program.weights_bytes)
    store.put(graph, program.graph_bytes)


def _is_there(store: Store, path: str) -> bool:
    """Return whether an object exists, so that it need not be written again."""
    try:
        return store.exists(path)
    except StoreError as error:
        raise StoreError(f"cannot write a program: looking whether it is there failed: {error}") from None


def load(
    store: Store,
    digest: str,
    *,
    prefix: str = DEFAULT_PREFIX,
    device: str | torch.device = "cpu",
    caps: GraphCaps = DEFAULT_CAPS,
) -> Program:
    """Read a program from a store and check it.

    Raises:
        ProgramNotFound: If the store has no program of that digest.
        ProgramError: If it does not match its digest, or exceeds the caps.
    """
    try:
        graph = get_at_most(store, graph_path(prefix, digest), caps.graph_bytes)
        weights = get_at_most(store, weights_path(prefix, weights_digest_of(graph)), caps.weights_bytes)
    except ObjectNotFound as error:
        raise ProgramNotFound(f"no program {digest} in store {store.name!r}: {error}") from None
    try:
        return Program.from_bytes(graph, weights, device=device, digest=digest, caps=caps)
    except ProgramError as error:
        raise ProgramError(f"program {digest} in store {store.name!r}: {error}") from None
