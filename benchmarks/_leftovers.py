"""What servers that were killed may leave behind: processes, ports, shared memory, control groups.

Other servers may run on the same machine, so nothing is looked for by its kind alone. Processes are those
that were seen to descend from a front, and those whose command line names one; shared memory is what such a
process was seen to hold; control groups carry the number of their front.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
"""Where Linux mounts control groups, of version 1 and of version 2."""

MEMORY = "/memfd:upriver"
"""Prefix of the kernel's name for a server's shared memory (`upriver.server.ipc.shared_memory`)."""

ENTRY = os.path.join("execution", "worker_entry.py")
"""The file that a worker is started with; two arguments further on stands its front's number."""

POLL_S = 0.05

_GROUP = re.compile(r"upriver-([0-9]+)-[0-9]+-(?:[0-9]+|front)")


@dataclass(kw_only=True, slots=True)
class Seen:
    """What was seen of some servers while they ran.

    Attributes:
        fronts: Numbers of all their fronts.
        processes: Fronts, workers, and whatever else they started.
        memory: Inodes of shared memory that these held.
        groups: Control groups of these fronts.
    """

    fronts: set[int] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    memory: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    def look(self, front: psutil.Process) -> None:
        """Note what there is of a server now."""
        self.fronts.add(front.pid)
        found = [front]
        with suppress(psutil.Error):
            found += front.children(recursive=True)
        self.processes.update(found)
        for process in found:
            self.memory |= memory_of(process.pid)

    def look_for_groups(self) -> None:
        """Note the control groups that there are; they are looked for in the whole tree."""
        self.groups.update(groups_of(self.fronts))

    def left(self, ports: Collection[int] = ()) -> dict[str, list[str]]:
        """What is still there, by kind; kinds of which nothing is there are left out.

        Args:
            ports: Of loopback, that were listened at.
        """
        processes = {process.pid for process in self.processes if alive(process)} | set(strays(self.fronts))
        found = {
            "process": [str(pid) for pid in sorted(processes)],
            "port": [str(port) for port in sorted(ports) if is_open(port)],
            "shared memory": [
                f"inode {inode} in process {pid}"
                for pid in psutil.pids()
                for inode in sorted(memory_of(pid) & self.memory)
            ],
            "control group": groups_of(self.fronts),
        }
        return {kind: names for kind, names in found.items() if names}

    def left_after(self, seconds: float, ports: Collection[int] = ()) -> dict[str, list[str]]:
        """The same, once nothing is left, or after so long: the end of a process takes a moment."""
        until = time.monotonic() + seconds
        while (found := self.left(ports)) and time.monotonic() < until:
            time.sleep(POLL_S)
        return found


def alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that only waits for its parent to take note has."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def workers_of(front: psutil.Process) -> list[psutil.Process]:
    """The processes of a front's workers, bubblewrap's among them; not what it starts to look around."""
    with suppress(psutil.Error):
        return sorted(filter(_is_worker, front.children(recursive=True)), key=lambda worker: worker.pid)
    return []


def strays(fronts: Collection[int]) -> Iterator[int]:
    """Workers of these fronts, whoever their parent is now."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if _front_of(process.cmdline()) in fronts and alive(process):
                yield process.pid


def memory_of(pid: int) -> set[int]:
    """Inodes of the shared memory of servers that a process has open, or mapped."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)  # addresses, rights, offset, device, inode, name
            if len(fields) == 6 and fields[5].startswith(MEMORY):
                found.add(int(fields[4]))
    with suppress(OSError):
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(OSError):
                if os.readlink(entry).startswith(MEMORY):
                    found.add(entry.stat().st_ino)
    return found


def groups_of(fronts: Collection[int]) -> list[str]:
    """Control groups that these fronts made."""
    return [
        os.path.join(folder, name)
        for folder, names, _ in os.walk(GROUPS)
        for name in names
        if (found := _GROUP.fullmatch(name)) and int(found[1]) in fronts
    ]


def is_open(port: int) -> bool:
    """Whether somebody listens at a port of loopback."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return _front_of(process.cmdline()) is not None and alive(process)
    return False


def _front_of(command: list[str]) -> int | None:
    """The front that a command line names; None where it is no worker's."""
    for at, part in enumerate(command[:-2]):
        if part.endswith(ENTRY) and command[at + 2].isdecimal():
            return int(command[at + 2])
    return None
