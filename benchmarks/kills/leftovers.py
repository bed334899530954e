"""Find what killed servers leave behind: processes, ports, shared memory and control groups.

Other servers may run on the same machine, so nothing is searched by its kind alone. Processes count if they
were seen to descend from a front, or if their command line names a front. Shared memory counts if such a
process was seen to hold it. Control groups carry the process id of their front.
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
"""Mount point of control groups on Linux, of version 1 and of version 2."""

MEMORY = "/memfd:upriver"
"""Prefix of the kernel's name for a server's shared memory (`upriver.server.ipc.shared_memory`)."""

ENTRY = os.path.join("execution", "worker_entry.py")
"""The file that a worker starts from. The process id of its front follows two arguments later."""

POLL_S = 0.05

_GROUP = re.compile(r"upriver-([0-9]+)-[0-9]+-(?:[0-9]+|front)")


@dataclass(kw_only=True, slots=True)
class Seen:
    """Processes and resources of servers, recorded while the servers ran.

    Attributes:
        fronts: Process ids of all fronts.
        processes: Fronts, workers, and every other process they started.
        memory: Inodes of the shared memory that these processes held.
        groups: Control groups of these fronts.
    """

    fronts: set[int] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    memory: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)

    def look(self, front: psutil.Process) -> None:
        """Record the current processes and resources of a server."""
        self.fronts.add(front.pid)
        found = [front]
        with suppress(psutil.Error):
            found += front.children(recursive=True)
        self.processes.update(found)
        for process in found:
            self.memory |= memory_of(process.pid)

    def look_for_groups(self) -> None:
        """Record the current control groups, searched in the whole tree."""
        self.groups.update(groups_of(self.fronts))

    def left(self, ports: Collection[int] = ()) -> dict[str, list[str]]:
        """Return what still exists, by kind. Kinds with nothing left are omitted.

        Args:
            ports: Ports on loopback where the servers listened.
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
        """Return what still exists after at most `seconds`, or earlier once nothing is left.

        The end of a process takes a moment.
        """
        until = time.monotonic() + seconds
        while (found := self.left(ports)) and time.monotonic() < until:
            time.sleep(POLL_S)
        return found


def alive(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie counts as ended."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def workers_of(front: psutil.Process) -> list[psutil.Process]:
    """Return the worker processes of a front, including those of bubblewrap.

    Processes that the front starts to inspect its environment are left out.
    """
    with suppress(psutil.Error):
        return sorted(filter(_is_worker, front.children(recursive=True)), key=lambda worker: worker.pid)
    return []


def strays(fronts: Collection[int]) -> Iterator[int]:
    """Yield the workers of these fronts, under any parent."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if _front_of(process.cmdline()) in fronts and alive(process):
                yield process.pid


def memory_of(pid: int) -> set[int]:
    """Return the inodes of servers' shared memory that a process has open or mapped."""
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
    """Return the control groups that these fronts made."""
    return [
        os.path.join(folder, name)
        for folder, names, _ in os.walk(GROUPS)
        for name in names
        if (found := _GROUP.fullmatch(name)) and int(found[1]) in fronts
    ]


def is_open(port: int) -> bool:
    """Return whether a process listens on a port of loopback."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return _front_of(process.cmdline()) is not None and alive(process)
    return False


def _front_of(command: list[str]) -> int | None:
    """Return the front that a command line names, or None if the command is no worker."""
    for at, part in enumerate(command[:-2]):
        if part.endswith(ENTRY) and command[at + 2].isdecimal():
            return int(command[at + 2])
    return None
