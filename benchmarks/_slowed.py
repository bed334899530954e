"""A process and all it starts, on a share of its core.

By a quota of the ``cpu`` control group (version 1 or 2) where one can be made. Elsewhere by stopping and
continuing it and all it started in turns of 20 ms, which also stops its network front.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PERIOD_S = 0.02
"""Well below a micro-batch, so that a stretch of work takes as much longer as the share is smaller."""

GROUPS = Path("/sys/fs/cgroup")

LOOK_S = 1.0
"""How often process groups are looked for: workers of a server, and those started later, have their own."""


@contextlib.contextmanager
def slowed(name: str, pid: int, share: float) -> Iterator[str]:
    """Give a process, its children and those to come this share of a core, until the block is left.

    Args:
        name: Of the control group, with this process's id.
        pid: The process; it and what it starts are in process groups of their own.
        share: Of one core; 1 leaves it alone.

    Yields:
        How it is done: ``""``, ``quota`` or ``turns``.
    """
    if share == 1:
        yield ""
        return
    group = _group(f"upriver-{name}-{os.getpid()}", share)
    if group is None:
        with _turns(pid, share):
            yield "turns"
        return
    try:
        _move(pid, group)
        yield "quota"
    finally:
        _remove(group)


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process and all it started have computed so far."""
    found = 0.0
    for member in _family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(member).cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def way() -> str:
    """How processes are slowed on this machine."""
    group = _group(f"upriver-try-{os.getpid()}", 0.5)
    if group is None:
        return f"stopped and continued in turns of {PERIOD_S * 1e3:g} ms"
    group.rmdir()
    return f"by a CPU quota of its control group, period {PERIOD_S * 1e3:g} ms"


def _group(name: str, share: float) -> Path | None:
    """A control group with a quota; None where there can be none."""
    period_us = round(PERIOD_S * 1e6)
    for parent, files in (
        (
            GROUPS / "cpu",
            {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{share * period_us:.0f}"},
        ),
        (GROUPS, {"cpu.max": f"{share * period_us:.0f} {period_us}"}),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for file, text in files.items():
                with (group / file).open("r+") as quota:  # never made here: it is there, or this is no group
                    quota.write(text)
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _move(pid: int, group: Path) -> None:
    """Processes that are there; whatever they start comes along by itself."""
    for process in _family(pid):
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(process))


def _remove(group: Path) -> None:
    """Move out what is left in it, and take it away."""
    outside = group.parent / "cgroup.procs"
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                outside.write_text(pid)
        group.rmdir()


def _family(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    return []


def _process_groups(pid: int) -> set[int]:
    """Of a process and all it started."""
    found = set()
    for member in _family(pid):
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpgid(member))
    return found - {os.getpgrp()}  # never this one


def _signal(groups: set[int], sign: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, sign)


@contextlib.contextmanager
def _turns(pid: int, share: float) -> Iterator[None]:
    over = threading.Event()
    groups: set[int] = set()

    def take_turns() -> None:
        looked = float("-inf")
        while not over.is_set():
            if time.monotonic() - looked >= LOOK_S:
                groups.clear()  # all of them run now
                groups.update(_process_groups(pid))
                looked = time.monotonic()
            for sign, seconds in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                _signal(groups, sign)
                time.sleep(seconds * PERIOD_S)

    thread = threading.Thread(target=take_turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _signal(groups, signal.SIGCONT)
