"""Run `load_aware` on a slow device's host and a server's host with background load."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness.children import Child, module_command, paths
from benchmarks.harness.hosts import Side
from benchmarks.harness.testbed import Testbed, burst_for
from benchmarks.load_aware.schedule import LEVELS, Phase, Setting
from upriver.server.config import ServerConfig

DEVICE_CORE, SERVER_CORE = 0, 1
MBIT = 1e6 / 8
START_LIMIT_S, REQUEST_LIMIT_S = 600.0, 300.0
BACKGROUND_LIMIT_S = 1800.0
"""Longest life of a background process: several times the length of a part."""

_DEFAULTS = {each.name: each.default for each in fields(ServerConfig)}
LOAD_WINDOW_S, LOAD_WATCH_S = _DEFAULTS["load_window_s"], _DEFAULTS["load_watch_s"]
"""Defaults of the server: LoADPart's period (section V-A), and the interval of its own looks."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def begun(bed: Testbed, side: Side, name: str, *arguments: object, **env: str) -> Child:
    """Start a module of this benchmark on one side. It ends with the testbed at the latest.

    Args:
        bed: The testbed.
        side: Side of the testbed.
        name: The module.
        arguments: Of the module.
        env: Added to the environment of every process.
    """
    process = bed.popen(
        side,
        module_command(f"load_aware.{name}", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**paths(), **ONE_THREAD, **env},
    )
    return Child(process, name)


class DeviceProcess:
    """Run the device of the benchmark; see ``job.Device``."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def ask(self, **order: object) -> dict[str, Any]:
        """Send an order, and return its answer."""
        return self._child.ask(REQUEST_LIMIT_S, order)


class Bed(Testbed):
    """The device's host and the server's, with a server and its disturbers.

    Args:
        folder: An empty folder, for the server's store and for the device's files.
        disturbers: Most processes of background load.

    Attributes:
        url: URL of the server.
        store: URI of its store.
    """

    def __init__(self, folder: Path, disturbers: int) -> None:
        super().__init__(None, cores={"compute": DEVICE_CORE, "storage": SERVER_CORE}, check=False)
        self.store = (folder / "store").as_uri()
        self.folder, self._disturbers = folder, disturbers
        self._background: list[Child] = []

    def __enter__(self) -> Bed:
        super().__enter__()
        try:
            (self.folder / "store").mkdir()
            options = ("--threads", 1, "--workers", 1)
            self.url = self.run_server({"default": self.store}, *options, env=ONE_THREAD).url
            self._background += [
                begun(self, "storage", "background", BACKGROUND_LIMIT_S) for _ in range(self._disturbers)
            ]
            for process in self._background:
                process.answer(START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self, phase: Phase) -> None:
        """Begin a phase with its load and its link. Requests in flight go on."""
        self.set_rate(phase.mbit * MBIT)
        level = LEVELS[phase.level]
        for number, process in enumerate(self._background):
            process.say(str(level.busy if number < level.processes else 0.0))

    def prove(self, mbit: Iterable[float]) -> dict[str, float]:
        """Measure the link at the lowest of some rates, and at the highest with an equally small burst.

        The burst of a link grows with its rate and never shrinks again (`Testbed.set_rate`). Measuring faster
        rates would spoil the slow ones after them.

        Returns:
            Mbit/s to the measured upload, in Mbit/s of payload.

        Raises:
            TestbedError: If the link does not have the requested rate.
        """
        same = [each for each in mbit if burst_for(each * MBIT) == burst_for(MBIT)]
        found = {}
        for each in sorted({min(same), max(same)}):
            self.set_rate(each * MBIT)
            found[f"{each:g}"] = round(self.check().from_compute / MBIT, 4)
        return found


@contextmanager
def device_on(bed: Bed, setting: Setting) -> Iterator[DeviceProcess]:
    """Run the slow device. Its network is published when the block begins."""
    spec = {"network": setting.network, "factor": setting.factor, "url": bed.url, "store": bed.store}
    cache = {"UPRIVER_CACHE": str(bed.folder / "cache")}
    child = begun(bed, "compute", "job", json.dumps(spec), **cache)
    try:
        child.answer(START_LIMIT_S)
        yield DeviceProcess(child)
    finally:
        bed.end(child.process)
