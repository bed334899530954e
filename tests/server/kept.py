"""Print the bytes kept of a cold weights file of many small tensors, and the bytes that it reports.

This runs in its own process, which ends without `tracemalloc.stop`: in CPython 3.11 that call breaks the
process while another thread, such as a store's, allocates memory.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import tracemalloc
from types import SimpleNamespace
from typing import Any

import torch

from tests.server.cold import cold_file
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.format import manifest as layout
from upriver.program.graph.artifact_paths import graph_path, weights_path
from upriver.server.programs.streaming_weights import kept_bytes
from upriver.store import DEFAULT_PREFIX, Store

NUM_TENSORS = 3000


async def kept(store: Store, program: Any) -> int:
    """Return the bytes kept, without the weights themselves."""
    tracemalloc.start()
    file = cold_file(store, program, StreamLimits(), [])
    file.ask(range(NUM_TENSORS))
    await file.over()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    """Print both numbers."""
    weights = {f"layer.{at}.weight": torch.full((16,), float(at)) for at in range(NUM_TENSORS)}
    store = Store.open("memory://cold-kept")
    manifest = layout.publish(weights, store, "many.safetensors")
    digest = hashlib.sha256(store.get("many.safetensors")).hexdigest()
    named: Any = SimpleNamespace(digest="0" * 64, weights_digest=digest)
    layout.publish(weights, store, weights_path(DEFAULT_PREFIX, digest))
    store.put(graph_path(DEFAULT_PREFIX, named.digest), b"no graph")
    print(asyncio.run(kept(store, named)), kept_bytes(manifest), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
