"""Two network namespaces joined by a veth pair, shaped at both ends, by way of ``ip`` and ``tc``.

A namespace's name holds the process that owns it and when that began, so that what a killed owner left behind
can be told from what is in use, and removed.
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
"""Each end of the pair; it lives in its namespace only, so every pair can have the same name."""

MTU = 1500
FRAME_BYTES = MTU + 14
"""What a full packet costs on the wire: Ethernet's header counts, for the shaper and for the counters."""

PAYLOAD_SHARE = (MTU - 52) / FRAME_BYTES
"""Of the bytes on the wire: IP takes 20 of a packet, TCP 32 with its time stamps."""

MOST_SEGMENTS = 43
KERNEL_SEGMENTS = 65535
"""Packets of a stream that travel as one: as many as make 64 KB, and the kernel's own limit."""

QUEUE_S = 0.05
"""What may wait before the shaper, as in a switch with a modest buffer; beyond that packets are dropped."""

QUEUE_FRAMES = 32
"""At least so many, or a slow link would lose packets all the time."""

KILL_TIMEOUT_S = 10.0

_NAME = re.compile(r"upriver-(\d+)-(\d+)-\d+-\w+")


class TestbedError(Exception):
    """The testbed cannot be made or used; one line that says why."""


class Unavailable(TestbedError):
    """This user or machine cannot have a testbed at all."""


def require_rights() -> None:
    """Check what making namespaces needs.

    Raises:
        Unavailable: If this is not root, or a program is missing.
    """
    if os.geteuid() != 0:
        raise Unavailable("the testbed makes network namespaces, which only root may: run it as root")
    for program, package in {"ip": "iproute2", "tc": "iproute2", "taskset": "util-linux"}.items():
        if shutil.which(program) is None:
            raise Unavailable(
                f"the testbed needs the program {program!r}: install the Debian package {package}"
            )


def name_of(number: int, side: str) -> str:
    """The name of this process's namespace for one side of one testbed."""
    return f"upriver-{os.getpid()}-{_began(os.getpid())}-{number}-{side}"


def create(addresses: dict[str, str]) -> None:
    """Make two namespaces, the pair between them, and bring it up with no shape.

    Args:
        addresses: The two namespaces' names to their addresses, in one network of four.

    Raises:
        Unavailable: If the kernel or its caretaker refuses.
    """
    one, other = addresses
    try:
        command("ip", "netns", "add", one)
        command("ip", "netns", "add", other)
        peer = ("peer", "name", DEVICE, "netns", other)
        command("ip", "link", "add", "name", DEVICE, "netns", one, "type", "veth", *peer)
        for name, address in addresses.items():
            # Without IPv6 nothing but what the benchmark sends crosses (and a few requests for addresses).
            command("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none", "mtu", str(MTU))
            command("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            command("ip", "-n", name, "link", "set", DEVICE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *_tbf(1e6, 4096))
            command("tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root")
    except TestbedError as error:
        raise Unavailable(f"no testbed on this machine: {error}") from None


def segments_for(burst_bytes: int) -> int:
    """How many packets of a stream travel as one.

    The kernel sends up to 64 KB as one where it can. A shaper with a small burst would take that apart with
    pauses, so it is a quarter of the burst at most: single packets on slow links. On faster ones they would
    cost too much: two fifths of a core at 200 Mbit/s, and beyond 300 a core cannot do it.
    """
    return min(max(burst_bytes // (4 * FRAME_BYTES), 1), MOST_SEGMENTS)


def shape(name: str, rate_bytes_per_s: float | None, *, burst_bytes: int, segments: int) -> None:
    """Let no more than a rate leave a namespace; None for what the machine can carry.

    What waits there goes on waiting, and a burst that is smaller than one of those who wait blocks the link.
    """
    here = ("-n", name)
    if rate_bytes_per_s is None:
        with contextlib.suppress(TestbedError):  # there was no shape
            command("tc", *here, "qdisc", "del", "dev", DEVICE, "root")
        command("ip", *here, "link", "set", DEVICE, "gso_max_segs", str(KERNEL_SEGMENTS))
    else:
        command("ip", *here, "link", "set", DEVICE, "gso_max_segs", str(segments))
        tbf = _tbf(rate_bytes_per_s, burst_bytes)
        command("tc", *here, "qdisc", "replace", "dev", DEVICE, "root", *tbf)


def sent_bytes(name: str) -> int:
    """What has left a namespace through the pair so far, with one header for what travelled as one."""
    found: Any = json.loads(command("ip", "-json", "-stats", "-n", name, "link", "show", "dev", DEVICE))
    return int(found[0]["stats64"]["tx"]["bytes"])


def remove(names: Iterable[str]) -> None:
    """End every process in some namespaces and remove them, with what is in them.

    Raises:
        TestbedError: If a process cannot be ended.
    """
    left: list[str] = []
    for name in names:
        if name in existing():
            # Somebody else may be sweeping too.
            with contextlib.suppress(TestbedError):
                left += _kill_all(name)
                command("ip", "netns", "delete", name)
    if left:
        raise TestbedError(f"processes {', '.join(left)} of the testbed do not end")


def sweep() -> list[str]:
    """Remove what owners that are gone have left behind.

    Returns:
        The names of what was removed.
    """
    left_over = [name for name in existing() if (match := _NAME.fullmatch(name)) and not _owned(match)]
    remove(left_over)
    return left_over


def existing() -> list[str]:
    """Names of all namespaces on this machine."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def command(*argv: str) -> str:
    """Run a program and give what it printed.

    Raises:
        TestbedError: If it fails, with what it said.
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
    """Whether the process that a namespace is named after still runs, and is the same one."""
    return _began(int(match[1])) == int(match[2])


def _began(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; ids come again, this does not."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return None


def _kill_all(name: str) -> list[str]:
    """Kill a namespace's processes and their descendants; what is left after a while."""
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
    """A namespace's processes, and their descendants: a server's workers have a namespace of their own."""
    found: dict[int, psutil.Process] = {}
    for pid in map(int, command("ip", "netns", "pids", name).split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                if each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = each
    return list(found.values())
