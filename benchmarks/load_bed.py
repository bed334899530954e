"""Where `load_aware.py` runs: a slow device on one host, a server on another, and what disturbs them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _hosts import Side
from load_schedule import MOST_PROCESSES, Level, Phase
from testbed import Testbed

DEVICE_CORE, SERVER_CORE = 0, 1
MBIT = 1e6 / 8
START_LIMIT_S, REQUEST_LIMIT_S = 600.0, 300.0
BACKGROUND_LIMIT_S = 1800.0
"""Longest life of a background process: some times what a part takes."""

LOAD_WINDOW_S, LOAD_WATCH_S = 10.0, 5.0
"""Of the server. Requests come every few seconds here, so two are recent; looked at as often as the server does
by itself."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

_here = Path(__file__).resolve().parent


class Failed(Exception):
    """What was asked for could not be done; in a line or some."""


class Told:
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
    """The device's host and the server's, with a server in it that has a network's program, and its disturbers.

    Args:
        store: A folder with the program, the server's store.

    Attributes:
        url: Of the server.
    """

    def __init__(self, store: Path) -> None:
        super().__init__(None, cores={"compute": DEVICE_CORE, "storage": SERVER_CORE}, check=False)
        self._store = store
        self._background: list[Told] = []

    def __enter__(self) -> Bed:
        super().__enter__()
        try:
            settings = self._store / "server.toml"
            settings.write_text(f"load_window_s = {LOAD_WINDOW_S}\nload_watch_s = {LOAD_WATCH_S}\n")
            options = ("--threads", 1, "--workers", 1, "--config", settings)
            self.url = self.run_server({"default": self._store.as_uri()}, *options).url
            program = [_here / "load_background.py", BACKGROUND_LIMIT_S]
            self._background += [Told(self, "storage", program) for _ in range(MOST_PROCESSES)]
            for process in self._background:
                process.answer(START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self, phase: Phase, level: Level) -> None:
        """Let a phase begin: its load and its link; nobody waits for what is under way.

        Args:
            level: The phase's.
        """
        self.set_rate(phase.mbit * MBIT)
        for number, process in enumerate(self._background):
            process.say(str(level.busy if number < level.processes else 0.0))


def paths() -> dict[str, str]:
    """By which both hosts find the package and these modules."""
    found = [str(_here.parent / "src"), str(_here), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}
