"""Start modules of the benchmarks as processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Root of the source tree, with its ``src`` and ``benchmarks``."""


def module_command(name: str, *arguments: object) -> list[object]:
    """Return the command that runs a module of the benchmarks, such as ``server.load``."""
    return [sys.executable, "-m", f"benchmarks.{name}", *arguments]


def paths(root: Path = ROOT) -> dict[str, str]:
    """Return the environment in which a process finds the package and the benchmarks of a source tree."""
    found = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}
