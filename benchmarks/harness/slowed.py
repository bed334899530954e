"""Run a process and its descendants on a share of a core.

The share is a quota of the ``cpu`` control group (version 1 or 2) where one can be made. Elsewhere the
process and its descendants are stopped and continued in turns of 20 ms, which also stops their network front.
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
"""Period of the turns, well below a micro-batch, so that work slows down in proportion to the share."""

GROUPS = Path("/sys/fs/cgroup")

LOOK_S = 1.0
"""Seconds between two searches for process groups. A server's workers, and later ones, have their own."""


@contextlib.contextmanager
def slowed(name: str, pid: int, share: float) -> Iterator[str]:
    """Limit a process and its present and future children to a share of a core during the block.

    Args:
        name: Name of the control group, extended by this process's id.
        pid: The process. It and its descendants are in process groups of their own.
        share: Share of one core; 1 sets no limit.

    Yields:
        The mechanism: ``""``, ``quota`` or ``turns``.
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
    """Return the core seconds that a process and its descendants have computed so far."""
    found = 0.0
    for member in _family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(member).cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def way() -> str:
    """Return how processes are slowed on this machine."""
    group = _group(f"upriver-try-{os.getpid()}", 0.5)
    if group is None:
        return f"stopped and continued in turns of {PERIOD_S * 1e3:g} ms"
    group.rmdir()
    return f"by a CPU quota of its control group, period {PERIOD_S * 1e3:g} ms"


def _group(name: str, share: float) -> Path | None:
    """Make a control group with a quota, or return None where none is possible."""
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
                with (group / file).open(
                    "r+"
                ) as quota:  # never creates the file: without it, this is no group
                    quota.write(text)
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _move(pid: int, group: Path) -> None:
    """Move existing processes into a group. Their later children join by themselves."""
    for process in _family(pid):
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(process))


def _remove(group: Path) -> None:
    """Move the remaining processes out of a group, and remove it."""
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
    """Return the process groups of a process and its descendants."""
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
