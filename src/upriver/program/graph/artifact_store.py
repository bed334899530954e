"""Store programs: a graph under ``programs/<digest>/`` and its weights under ``weights/``."""

from __future__ import annotations

import msgspec
import torch

from upriver.errors import ObjectNotFound, ProgramError, ProgramNotFound, StoreError
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.executor import Program
from upriver.program.graph.fetch import get_at_most
from upriver.program.graph.schema import DIGEST
from upriver.store import DEFAULT_PREFIX, Store


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a digest of a program or of weights."""
    return DIGEST.fullmatch(text) is not None


def check_digest(digest: str) -> str:
    """Return a digest of 64 hexadecimal characters, so that a name can never become a path.

    Raises:
        ProgramError: If it is anything else.
    """
    if not is_digest(digest):
        raise ProgramError(f"a digest is 64 hexadecimal characters, got {digest[:80]!r}")
    return digest


def graph_path(prefix: str, digest: str) -> str:
    """Return the path of a program's graph."""
    return f"{prefix}/programs/{check_digest(digest)}/graph.json"


def weights_path(prefix: str, weights_digest: str) -> str:
    """Return the path of a weights file."""
    return f"{prefix}/weights/{check_digest(weights_digest)}.safetensors"


class _Names(msgspec.Struct):
    weights_digest: str


def weights_digest_of(graph_bytes: bytes | memoryview) -> str:
    """Return the digest of the weights file that a graph names.

    Raises:
        ProgramError: If the bytes are not a graph.
    """
    try:
        return check_digest(msgspec.json.decode(graph_bytes, type=_Names).weights_digest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProgramError(f"graph.json: {error}") from None


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
