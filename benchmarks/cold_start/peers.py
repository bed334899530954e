"""Make and describe the environment of the other systems of `cold_start`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

from benchmarks.cold_start.settings import WAYS, Way
from benchmarks.harness.children import ROOT, Failed
from benchmarks.harness.hosts import last_lines

VARIABLE = "UPRIVER_BENCHMARK_COLD_PEERS"
PACKAGES = (
    "boto3",
    "safetensors",
    "runai-model-streamer[s3]==0.17.0",
    "tensorizer==2.12.1",
    "s3torchconnector==1.5.0",
)
"""Packages in addition to PyTorch. All ways have the same build of PyTorch: its import time is no loader's.
"""

ASK_LIMIT_S = 60.0


class Peers:
    """The environment of the other systems, if one exists.

    Attributes:
        python: Its interpreter.
        versions: Versions of PyTorch and of the installed packages that ways need.

    Raises:
        Failed: If its interpreter cannot be run.
    """

    def __init__(self, *, without: bool = False) -> None:
        self.place = Path(os.environ.get(VARIABLE, ROOT / ".venv-cold-peers"))
        self.python = self.place / "bin" / "python"
        self.versions: dict[str, str] = {}
        if not without and self.python.exists():
            self.versions = _versions(self.python)

    def lacks(self, way: Way) -> tuple[str, ...]:
        """Return the needs of a way that are not installed."""
        return tuple(package for package in way.needs if package not in self.versions)

    def ways(self) -> tuple[str, ...]:
        """Return the names of all ways that can be run."""
        return tuple(name for name, way in WAYS.items() if not self.lacks(way))

    def left_out(self) -> tuple[str, ...]:
        """Return the names of the ways that cannot be run."""
        return tuple(name for name in WAYS if name not in self.ways())

    def check(self) -> None:
        """Check that all ways take part, with upriver's version of PyTorch.

        Raises:
            Failed: If a way or the version is missing.
        """
        if out := self.left_out():
            raise Failed(
                f"{', '.join(out)} cannot be run: make their environment by {self.hint()}; or leave "
                "all other systems out by --no-peers"
            )
        if (theirs := self.versions.get("torch")) != (ours := _torch()):
            raise Failed(
                f"{self.place} has torch {theirs}, and ours is {ours}, whose import takes other time and "
                f"memory: make it anew by {self.hint()}"
            )

    def hint(self) -> str:
        """Return how to make the environment."""
        wanted = " ".join(f"'{package}'" for package in (f"torch=={_torch()}", *PACKAGES))
        return (
            f"`python -m venv {self.place}` and `{self.place}/bin/pip install {wanted}`, with the package "
            f"index that ours has come from, or name another environment in {VARIABLE}"
        )


def _torch() -> str:
    """Return the version of our PyTorch, with its build: ``2.13.0+cpu``."""
    return importlib.metadata.version("torch")


def _versions(python: Path) -> dict[str, str]:
    wanted = sorted({package for way in WAYS.values() for package in way.needs} | {"torch"})
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [python, "-I", "-c", script, *wanted],
        capture_output=True,
        text=True,
        timeout=ASK_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{python} cannot be run{last_lines(done.stderr)}")
    found: dict[str, str] = json.loads(done.stdout)
    return found
