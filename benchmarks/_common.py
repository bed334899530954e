"""What every benchmark needs: a description of the machine, fair turns, CPU time, spreads, tables."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one figure: a single one means nothing on a shared machine."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Take the repeats in the order in which they were measured."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def text(self, digits: int = 2) -> str:
        """``median (lowest to highest)``."""
        low, high = min(self.values), max(self.values)
        return f"{self.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def interleave(runs: Mapping[str, Callable[[int], T]], repeats: int) -> dict[str, list[T]]:
    """Run A B A B …, so that whatever else the machine does hits all alike.

    Args:
        runs: Name to a function that takes the number of the repeat.
        repeats: How often each is run.

    Returns:
        Each one's results, in order.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            results[name].append(run(repeat))
    return results


def cpu_seconds() -> float:
    """CPU time, user and system, of this process and all its descendants, living or ended, so far."""
    mine = os.times()
    total = mine.user + mine.system + mine.children_user + mine.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def confine(cores: Sequence[int]) -> None:
    """Let every thread of this process and its descendants, and all they start later, use these cores only.

    One call of ``os.sched_setaffinity`` moves a single thread; threads of libraries would stay behind.
    """
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def let_threads_sleep() -> None:
    """Start this program anew with OpenMP threads that sleep while they wait, unless something else is set.

    By default they spin, which takes the cores from other processes of the same run, and on a busy machine
    has them wait for each other.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it once, when it is loaded
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def commit() -> str:
    """The commit that is measured, and whether tracked files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (_git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        ", with local changes" if changed else ""
    )


POLICIES = "src/upriver/policies"


def code() -> str:
    """What of ``src`` runs, whatever else was committed since; and whether files differ from it.

    Policies are left out: a run of a benchmark is told its choice, so runs outlast a change of policy.
    """
    listed = _git("ls-tree", "-r", "HEAD", "src").splitlines()
    files = [line for line in listed if not line.split("\t", 1)[1].startswith(f"{POLICIES}/")]
    changed = _git("status", "--porcelain", "--", "src", f":(exclude){POLICIES}")
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()[:12] if files else "unknown"
    return _noted(digest, changed)


def version_of(files: Iterable[Path]) -> str:
    """Of what these hold, one after another."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def policies() -> str:
    """The tree of the policies that choose; and whether files differ from it."""
    changed = _git("status", "--porcelain", "--", POLICIES)
    return _noted(_git("rev-parse", "--short=12", f"HEAD:{POLICIES}") or "unknown", changed)


def _noted(version: str, changed: str) -> str:
    return f"{version}, changed" if changed else version


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> str:
    """Processor, cores and memory; nothing that names the host."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return (
        f"{model}, {cores} cores as the operating system counts them, {memory:.0f} GiB, "
        f"torch kernels for {torch.backends.cpu.get_cpu_capability()}"
    )


def versions(*packages: str) -> str:
    """Python's and packages' versions."""
    found = (f"{package} {importlib.metadata.version(package)}" for package in packages)
    return ", ".join((f"Python {platform.python_version()}", *found))
