"""Where `load_aware.py` runs: a slow device on one host, a server on another, and what disturbs them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from _hosts import Side
from load_schedule import LEVELS, MOST_PROCESSES, Phase, Setting
from testbed import Testbed, burst_for
from upriver.server.config import ServerConfig

DEVICE_CORE, SERVER_CORE = 0, 1
MBIT = 1e6 / 8
START_LIMIT_S, REQUEST_LIMIT_S = 600.0, 300.0
BACKGROUND_LIMIT_S = 1800.0
"""Longest life of a background process: some times what a part takes."""

_DEFAULTS = {each.name: each.default for each in fields(ServerConfig)}
LOAD_WINDOW_S, LOAD_WATCH_S = _DEFAULTS["load_window_s"], _DEFAULTS["load_watch_s"]
"""Of the server, its defaults: LoADPart's period (section V-A), and as often as it looks by itself."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

_here = Path(__file__).resolve().parent


class Failed(Exception):
    """What was asked for could not be done; in a line or some."""


class Worker:
    """A process that takes orders as JSON lines and answers each with one.

    Args:
        bed: Where it runs, and ends at the latest.
        side: On which host.
        argv: The program and its arguments; it says first that it is there.
        env: Beside what every process has.
    """

    def __init__(
        self, bed: Testbed, side: Side, argv: list[object], *, env: Mapping[str, str] | None = None
    ) -> None:
        self._bed, self._name = bed, Path(str(argv[0])).stem
        self._process = bed.popen(
            side,
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**paths(), **ONE_THREAD, **(env or {})},
        )
        self._rest = b""

    def say(self, line: str) -> None:
        """Give an order, and wait for nothing.

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
        """What it says next.

        Raises:
            Failed: If it ends, takes too long, or could not do what it was asked for.
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
        """Give an order and wait for its answer."""
        self.say(json.dumps(order))
        return self.answer(limit_s)

    def end(self) -> None:
        """End the process."""
        self._bed.end(self._process)


class Bed(Testbed):
    """The device's host and the server's, with a server and its disturbers.

    Args:
        folder: An empty one, for the server's store and for what the device keeps.

    Attributes:
        url: Of the server.
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
            program = [_here / "load_background.py", BACKGROUND_LIMIT_S]
            self._background += [Worker(self, "storage", program) for _ in range(MOST_PROCESSES)]
            for process in self._background:
                process.answer(START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self, phase: Phase) -> None:
        """Let a phase begin, its load and its link; whatever is under way goes on."""
        self.set_rate(phase.mbit * MBIT)
        level = LEVELS[phase.level]
        for number, process in enumerate(self._background):
            process.say(str(level.busy if number < level.processes else 0.0))

    def prove(self, mbit: Iterable[float]) -> dict[str, float]:
        """Measure the link at the least of some rates, and at the largest that lets no more through at once.

        What a link may let through at once grows with its rate and stays as large as it ever was
        (`Testbed.set_rate`), so that measuring faster ones would spoil the slow ones after them.

        Returns:
            Mbit/s to what was carried upwards, in Mbit/s of payload.

        Raises:
            TestbedError: If it is not what was asked for.
        """
        same = [each for each in mbit if burst_for(each * MBIT) == burst_for(MBIT)]
        found = {}
        for each in sorted({min(same), max(same)}):
            self.set_rate(each * MBIT)
            found[f"{each:g}"] = round(self.check().from_compute / MBIT, 4)
        return found


@contextmanager
def device_on(bed: Bed, setting: Setting) -> Iterator[Worker]:
    """The slow device, with its network; it has published it when it is there."""
    spec = {"network": setting.network, "factor": setting.factor, "url": bed.url, "store": bed.store}
    device = Worker(
        bed,
        "compute",
        [_here / "load_job.py", json.dumps(spec)],
        env={"UPRIVER_CACHE": str(bed.folder / "cache")},
    )
    try:
        device.answer(START_LIMIT_S)
        yield device
    finally:
        device.end()


def paths() -> dict[str, str]:
    """By which both hosts find the package and these modules."""
    found = [str(_here.parent / "src"), str(_here), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}
