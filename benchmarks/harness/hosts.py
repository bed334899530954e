"""Start and end real processes on the two sides of a testbed, each pinned to a core."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from benchmarks.harness.netns import TestbedError

Side = Literal["storage", "compute"]

Cores = int | Collection[int] | None
"""One core or several. None selects the core of the side."""

TOKEN_VARIABLE = "UPRIVER_TOKEN"
STOP_TIMEOUT_S = 10.0
"""Seconds after SIGTERM until a process that still runs is killed."""

LOG_LINES = 20


class Hosts:
    """Manage the processes of both sides.

    Args:
        names: The network namespace of each side; empty where both share this process's.
        cores: The core that the processes of each side are pinned to.
        token: Put into the environment of every process.
    """

    def __init__(self, names: Mapping[Side, str], cores: Mapping[Side, int], token: str) -> None:
        self.token = token
        self._names, self._cores = names, cores
        self._processes: list[subprocess.Popen[Any]] = []

    def popen(
        self,
        side: Side,
        argv: Sequence[object],
        *,
        core: Cores = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a process on one side. The process ends with the testbed at the latest.

        Args:
            side: ``storage`` or ``compute``.
            argv: The program and its arguments.
            core: The cores of the process, its threads and its children. None selects the core of the side.
            env: Added to the variables of this process (without proxies) and the token.
            options: For ``subprocess.Popen``.
        """
        cores = {self._cores[side]} if core is None else {core} if isinstance(core, int) else set(core)
        allowed = os.sched_getaffinity(0)
        if not cores or not cores <= allowed:
            raise TestbedError(f"core must be among this process's {sorted(allowed)}, got {sorted(cores)}")
        inside = ["ip", "netns", "exec", self._names[side]] if self._names else []
        pinned = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
        process: subprocess.Popen[Any] = subprocess.Popen(
            [*inside, *pinned, *map(str, argv)],
            env={**_environment(), TOKEN_VARIABLE: self.token, **(env or {})},
            stdin=options.pop("stdin", subprocess.DEVNULL),
            start_new_session=True,  # ended as a group; Ctrl-C reaches only this process
            **options,
        )
        self._processes.append(process)
        return process

    def run(
        self, side: Side, argv: Sequence[object], *, timeout_s: float, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on one side until it ends.

        Args:
            side: ``storage`` or ``compute``.
            argv: The program and its arguments.
            timeout_s: Seconds after which the program is ended.
            options: As for `popen`.

        Returns:
            The output of the program, as text.

        Raises:
            TestbedError: If the program fails or exceeds the timeout, with its last lines of stderr.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.popen(side, argv, **{**pipes, **options})
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TestbedError(f"{words(argv)} took longer than {timeout_s:g} s") from None
        finally:
            code = process.poll()
            self.end(process)
        if code != 0:
            raise TestbedError(f"{words(argv)} ended with exit code {code}{last_lines(errors)}")
        return subprocess.CompletedProcess(process.args, 0, out, errors)

    def end(self, process: subprocess.Popen[Any]) -> None:
        """End a process and its group, with SIGTERM first and SIGKILL after 10 s, and close its pipes."""
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
            _wait_unreaped(process.pid, STOP_TIMEOUT_S)
            # The process is not reaped yet, so no other process can have its id or its group id.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        if process in self._processes:
            self._processes.remove(process)

    def end_all(self) -> None:
        """End every process that was started and still runs, the last one first."""
        for process in reversed(self._processes[:]):
            self.end(process)


def _environment() -> dict[str, str]:
    """Return the environment of this process without proxies, which a namespace cannot reach."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _wait_unreaped(pid: int, seconds: float) -> None:
    """Wait for a child to end, but leave it a zombie, so that its process id is not reused."""
    deadline = time.monotonic() + seconds
    look = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, pid, look) is None and time.monotonic() < deadline:
        time.sleep(0.01)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM end this process as SystemExit does, unless another handler is installed."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Defer SIGTERM and SIGINT until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def words(argv: Sequence[object]) -> str:
    """Return a command, shortened for a message."""
    text = " ".join(Path(word).name if word.startswith("/") else word for word in map(str, argv[:4]))
    return f"`{text}{' …' if len(argv) > 4 else ''}`"


def last_lines(text: str | None) -> str:
    """Return the last lines of a program's output, formatted to follow its name in a message."""
    lines = (text or "").strip().splitlines()[-LOG_LINES:]
    return "; it said:\n" + "\n".join(lines) if lines else ""
