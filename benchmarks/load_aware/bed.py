"""Run `load_aware` on a slow device's host and a server's host with background load."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness.children import module_command, paths
from benchmarks.harness.hosts import Side
from benchmarks.harness.testbed import Testbed, burst_for
from benchmarks.load_aware.schedule import LEVELS, MOST_PROCESSES, Phase, Setting
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


class Failed(Exception):
    """Error for a failed action. The text has one or more lines."""


class Worker:
    """A process that reads orders as JSON lines and answers each with one line.

    Args:
        bed: The testbed, with which the process ends at the latest.
        side: Side of the testbed.
        argv: Command of a module; see `module_command`. The process first reports that it is ready.
        env: Added to the environment of every process.
    """

    def __init__(
        self, bed: Testbed, side: Side, argv: list[object], *, env: Mapping[str, str] | None = None
    ) -> None:
        self._bed, self._name = bed, str(argv[2]).rpartition(".")[2]
        self._process = bed.popen(
            side,
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**paths(), **ONE_THREAD, **(env or {})},
        )
        self._rest = b""

    def say(self, line: str) -> None:
        """Send an order without waiting.

        Raises:
            Failed: If the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self._name} has ended") from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            Failed: If the process ends, exceeds the time, or fails.
        """
        assert self._process.stdout is not None
        descriptor, until = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                raise Failed(f"{self._name} " + ("has ended" if ready else "does not answer"))
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found

    def ask(self, limit_s: float = REQUEST_LIMIT_S, **order: object) -> dict[str, Any]:
        """Send an order, and wait for its answer."""
        self.say(json.dumps(order))
        return self.answer(limit_s)

    def end(self) -> None:
        """End the process."""
        self._bed.end(self._process)


class Bed(Testbed):
    """The device's host and the server's, with a server and its disturbers.

    Args:
        folder: An empty folder, for the server's store and for the device's files.

    Attributes:
        url: URL of the server.
        store: URI of its store.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(None, cores={"compute": DEVICE_CORE, "storage": SERVER_CORE}, check=False)
        self.store = (folder / "store").as_uri()
        self.folder = folder
        self._background: list[Worker] = []

    def __enter__(self) -> Bed:
        super().__enter__()
        try:
            (self.folder / "store").mkdir()
            options = ("--threads", 1, "--workers", 1)
            self.url = self.run_server({"default": self.store}, *options, env=ONE_THREAD).url
            program = module_command("load_aware.background", BACKGROUND_LIMIT_S)
            self._background += [Worker(self, "storage", program) for _ in range(MOST_PROCESSES)]
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
def device_on(bed: Bed, setting: Setting) -> Iterator[Worker]:
    """Run the slow device. Its network is published when the block begins."""
    spec = {"network": setting.network, "factor": setting.factor, "url": bed.url, "store": bed.store}
    device = Worker(
        bed,
        "compute",
        module_command("load_aware.job", json.dumps(spec)),
        env={"UPRIVER_CACHE": str(bed.folder / "cache")},
    )
    try:
        device.answer(START_LIMIT_S)
        yield device
    finally:
        device.end()
