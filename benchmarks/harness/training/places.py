"""Start training scripts in fresh processes, beside storage hosts whose caches are cold or shared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children import Child, Failed, module_command, paths
from benchmarks.harness.hosts import Cores
from benchmarks.harness.slowed import cpu_s
from benchmarks.harness.testbed import Service, Testbed

START_LIMIT_S = 120.0

CALM_S, CALM_CPU_S = 0.5, 0.03
"""A host is calm if its processes took no more processor seconds than that in so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A storage host's processes, and the training side's caches.

    Attributes:
        url: Address of the server; empty without one.
        store: URI and options of the store, for the training side.
        cache: Folder of the caches.
        pids: The processes.
    """

    url: str
    store: tuple[str, Mapping[str, str]]
    cache: Path
    pids: Sequence[int]


class Places:
    """Make storage hosts on a testbed, each with a store that holds the samples alone, and new processes.

    Args:
        bed: The testbed.
        data: Folder of the stored samples.
        folder: Where the stores and the caches lie, on the file system of ``data``.
        threads: Threads of the server, and of a training process.
        cores: Cores that both sides share; None leaves each side its own.
    """

    def __init__(self, bed: Testbed, data: Path, folder: Path, *, threads: int, cores: Cores = None) -> None:
        self._bed, self._data, self._folder = bed, data, folder
        self._threads, self._cores = threads, cores

    def make(self, stack: ExitStack, *, with_server: bool = True) -> Place:
        """Return a new place, which ends with the stack.

        Args:
            stack: Ends the processes, and removes the folders.
            with_server: Whether a near-data server runs there, besides the object store.
        """
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
        store = folder / "store"
        shutil.copytree(self._data, store / "data", copy_function=os.link)
        server = self._server(store, folder / "server") if with_server else None
        objects = self._bed.run_objects(store, core=self._cores)
        running = [service.process for service in (server, objects) if service is not None]
        for process in running:
            stack.callback(self._bed.end, process)
        return Place(
            url=server.url if server is not None else "",
            store=(objects.uri, objects.options or {}),
            cache=folder / "cache",
            pids=[process.pid for process in running],
        )

    def _server(self, store: Path, cache: Path) -> Service:
        return self._bed.run_server(
            {"default": store.as_uri()},
            "--threads",
            self._threads,
            core=self._cores,
            env={"UPRIVER_CACHE": str(cache)},
        )

    def start(self, module: str, spec: Mapping[str, Any], place: Place, stack: ExitStack) -> Child:
        """Start a process that trains, and wait until it and the place are at rest. It ends with the stack.

        Args:
            module: Module of the benchmarks that the process runs.
            spec: What the module is told, in addition to the place and the number of threads.

        Raises:
            Failed: If they do not come to rest.
        """
        uri, options = place.store
        told = {**spec, "threads": self._threads, "url": place.url, "uri": uri, "options": options}
        process = self._bed.popen(
            "compute",
            module_command(module, json.dumps(told)),
            core=self._cores,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**paths(), "UPRIVER_CACHE": str(place.cache)},
        )
        stack.callback(self._bed.end, process)
        child = Child(process, "the training process")
        child.answer(START_LIMIT_S)
        _wait_calm((*place.pids, process.pid))
        return child


def _wait_calm(pids: Sequence[int]) -> None:
    """Wait until the processes have started up: a new server does not answer sooner than it is ready."""
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until:
        before = sum(map(cpu_s, pids))
        time.sleep(CALM_S)
        if sum(map(cpu_s, pids)) - before <= CALM_CPU_S:
            return
    raise Failed("the hosts did not come to rest")
