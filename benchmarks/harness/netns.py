"""Join two network namespaces by a veth pair, shaped at both ends with ``ip`` and ``tc``.

The name of a namespace holds the id and the start time of its owner process. These tell the leftovers of a
killed owner from namespaces in use, so that the leftovers can be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

DEVICE = "tier0"
"""Name of each end of the pair. Every pair can use this name, because an end is visible in its namespace
only."""

MTU = 1500
FRAME_BYTES = MTU + 14
"""Bytes of a full packet on the wire. The Ethernet header counts for the shaper and for the counters."""

PAYLOAD_SHARE = (MTU - 52) / FRAME_BYTES
"""Share of the bytes on the wire that is payload: IP uses 20 bytes of a packet, TCP 32 with its time stamps.
"""

MOST_SEGMENTS = 43
KERNEL_SEGMENTS = 65535
"""Packets of a stream that travel as one: as many as make 64 KB, and the kernel's own limit."""

QUEUE_S = 0.05
"""Seconds of data that may queue before the shaper, as in a switch with a modest buffer. Further packets are
dropped."""

QUEUE_FRAMES = 32
"""Least number of frames in the queue. With fewer, a slow link would lose packets constantly."""

KILL_TIMEOUT_S = 10.0

_NAME = re.compile(r"upriver-(\d+)-(\d+)-\d+-\w+")


class TestbedError(Exception):
    """Error for a testbed that cannot be made or used. One line gives the reason."""


class Unavailable(TestbedError):
    """Error for a user or machine that cannot have a testbed at all."""


def require_rights() -> None:
    """Check the rights and programs that namespaces need.

    Raises:
        Unavailable: If the user is not root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise Unavailable("the testbed makes network namespaces, which only root may: run it as root")
    for program, package in {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux"}.items():
        if shutil.which(program) is None:
            raise Unavailable(
                f"the testbed needs the program {program!r}: install the Debian package {package}"
            )


def name_of(number: int, side: str) -> str:
    """Return the name of this process's namespace for one side of one testbed."""
    return f"upriver-{os.getpid()}-{_began(os.getpid())}-{number}-{side}"


def create(addresses: dict[str, str]) -> None:
    """Make two namespaces joined by a pair, and bring the pair up without shaping.

    Args:
        addresses: The two namespaces' names to their addresses, in one network of four.

    Raises:
        Unavailable: If the kernel or its administrator refuses.
    """
    one, other = addresses
    try:
        command("ip", "netns", "add", one)
        command("ip", "netns", "add", other)
        peer = ("peer", "name", DEVICE, "netns", other)
        command("ip", "link", "add", "name", DEVICE, "netns", one, "type", "veth", *peer)
        for name, address in addresses.items():
            # Without IPv6 only the benchmark's traffic (and a few address requests) crosses the pair.
            command("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none", "mtu", str(MTU))
            command("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            command("ip", "-n", name, "link", "set", DEVICE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *_tbf(1e6, 4096))
            command("tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root")
    except TestbedError as error:
        raise Unavailable(f"no testbed on this machine: {error}") from None


def segments_for(burst_bytes: int) -> int:
    """Return how many packets of a stream travel as one.

    The kernel sends up to 64 KB as one where it can. A shaper with a small burst would split that with
    pauses, so a unit is at most a quarter of the burst. Slow links therefore send single packets. On faster
    links single packets would cost too much: two fifths of a core at 200 Mbit/s, and over 300 a core cannot
    do it.
    """
    return min(max(burst_bytes // (4 * FRAME_BYTES), 1), MOST_SEGMENTS)


def shape(name: str, rate_bytes_per_s: float | None, *, burst_bytes: int, segments: int) -> None:
    """Limit the rate at which data leaves a namespace. None removes the limit.

    Queued packets stay queued. A burst smaller than a queued packet blocks the link.
    """
    here = ("-n", name)
    if rate_bytes_per_s is None:
        with contextlib.suppress(TestbedError):  # the pair had no shape
            command("tc", *here, "qdisc", "del", "dev", DEVICE, "root")
        command("ip", *here, "link", "set", DEVICE, "gso_max_segs", str(KERNEL_SEGMENTS))
    else:
        command("ip", *here, "link", "set", DEVICE, "gso_max_segs", str(segments))
        tbf = _tbf(rate_bytes_per_s, burst_bytes)
        command("tc", *here, "qdisc", "replace", "dev", DEVICE, "root", *tbf)


def sent_bytes(name: str) -> int:
    """Return the bytes sent from a namespace so far, with one header for packets that travelled as one."""
    found: Any = json.loads(command("ip", "-json", "-stats", "-n", name, "link", "show", "dev", DEVICE))
    return int(found[0]["stats64"]["tx"]["bytes"])


def remove(names: Iterable[str]) -> None:
    """End every process in some namespaces, and remove the namespaces with their contents.

    Raises:
        TestbedError: If a process cannot be ended.
    """
    left: list[str] = []
    for name in names:
        if name in existing():
            # Another process may be sweeping too.
            with contextlib.suppress(TestbedError):
                left += _kill_all(name)
                command("ip", "netns", "delete", name)
    if left:
        raise TestbedError(f"processes {', '.join(left)} of the testbed do not end")


def sweep() -> list[str]:
    """Remove the namespaces of owners that no longer run.

    Returns:
        The names of the removed namespaces.
    """
    left_over = [name for name in existing() if (match := _NAME.fullmatch(name)) and not _owned(match)]
    remove(left_over)
    return left_over


def existing() -> list[str]:
    """Return the names of all namespaces on this machine."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def command(*argv: str) -> str:
    """Run a program and return its output.

    Raises:
        TestbedError: If the program fails, with its error output.
    """
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise TestbedError(f"`{' '.join(argv)}` failed: {said}")
    return done.stdout


def _tbf(rate_bytes_per_s: float, burst_bytes: int) -> tuple[str, ...]:
    limit = burst_bytes + max(round(QUEUE_S * rate_bytes_per_s), QUEUE_FRAMES * FRAME_BYTES)
    rate = f"{round(8 * rate_bytes_per_s)}bit"
    return ("tbf", "rate", rate, "burst", str(burst_bytes), "limit", str(limit))


def _owned(match: re.Match[str]) -> bool:
    """Return whether the process that a namespace is named after still runs, and is the same one."""
    return _began(int(match[1])) == int(match[2])


def _began(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot.

    Process ids are reused, start times are not.
    """
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return None


def _kill_all(name: str) -> list[str]:
    """Kill the processes of a namespace and their descendants. Return what still runs after a while."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while found := _living(name):
        if time.monotonic() > deadline:
            return [str(process.pid) for process in found]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=0.1)
    return []


def _living(name: str) -> list[psutil.Process]:
    """Return the processes of a namespace and their descendants.

    A server's workers have another namespace.
    """
    found: dict[int, psutil.Process] = {}
    for pid in map(int, command("ip", "netns", "pids", name).split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                if each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = each
    return list(found.values())
