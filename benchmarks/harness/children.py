"""Start modules of the benchmarks as processes of their own, and give them orders."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Root of the source tree, with its ``src`` and ``benchmarks``."""

BORROW = """
import json, runpy, sys
sys.path += json.loads(sys.argv[-1])["packages"]
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Script that runs a peer's module in that peer's environment. Missing packages come from this environment;
the peer's own win."""


class Failed(Exception):
    """Error for a failed action. The text has one or more lines."""


class ProcessLost(Failed):
    """Error for a process that has ended, or says nothing in time."""


def module_command(name: str, *arguments: object) -> list[object]:
    """Return the command that runs a module of the benchmarks, such as ``server.load``."""
    return [sys.executable, "-m", f"benchmarks.{name}", *arguments]


def paths(root: Path = ROOT) -> dict[str, str]:
    """Return the environment in which a process finds the package and the benchmarks of a source tree."""
    found = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def site_packages() -> list[str]:
    """Return where this environment's packages lie, for `BORROW`."""
    return [path for path in sys.path if path.endswith("site-packages")]


# ------------------------------------------------------------------------------------- the parent's side


class Lines:
    """Read the lines that a process prints.

    Args:
        process: A process whose stdout is a pipe.

    Attributes:
        fd: Descriptor of the pipe.
    """

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        assert process.stdout is not None
        self.fd = process.stdout.fileno()
        self._rest = b""

    def next(self, limit_s: float) -> bytes:
        """Return the next line, without its end.

        Raises:
            ProcessLost: If no line arrives within this many seconds.
        """
        until = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self.fd, 1 << 20) if ready else b""
            if not data:
                raise ProcessLost("has ended" if ready else f"said nothing for {limit_s:g} s")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line


class Child:
    """Give orders to a process that runs `answer_orders`.

    Args:
        process: Its stdin and stdout are pipes.
        name: What messages call it.
    """

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self._name = process, name
        self._lines = Lines(process)

    def say(self, line: str) -> None:
        """Send a line without waiting.

        Raises:
            ProcessLost: If the process has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ProcessLost(f"{self._name} has ended") from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            ProcessLost: If the process ends, or exceeds the time.
            Failed: If the order failed. The process is then ready for the next one.
        """
        try:
            found: dict[str, Any] = json.loads(self._lines.next(limit_s))
        except ProcessLost as error:
            raise ProcessLost(f"{self._name} {error}") from None
        if "error" in found:
            raise Failed(found["error"])
        return found

    def ask(self, limit_s: float, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send an order, and return its answer; see `answer`."""
        self.say(json.dumps(order))
        return self.answer(limit_s)


# -------------------------------------------------------------------------------------- the child's side


def answers() -> Callable[[Mapping[str, Any]], None]:
    """Return a function that prints an answer as one line. All other output goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def say(answer: Mapping[str, Any]) -> None:
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    return say


def answer_orders(make: Callable[[Any], Callable[[dict[str, Any]], Mapping[str, Any]]]) -> None:
    """Answer each line of stdin, an order, by one line, until the input ends. Report readiness first.

    Args:
        make: Takes the process's specification, its first argument. Returns the function that executes an
            order.
    """
    say = answers()
    try:
        execute = make(json.loads(sys.argv[1]))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(execute(json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def by_name(target: object) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    """Return a function that executes an order by the method that its ``do`` names, with its other fields."""

    def execute(order: dict[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(target, order.pop("do"))(**order)
        return found

    return execute
