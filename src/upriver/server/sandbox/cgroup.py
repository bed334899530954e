"""Limit each worker's memory with a control group of its own, where this process may make groups.

Limits of a process count addresses rather than pages, and omit shared memory. A control group (Linux,
"Control Group v2" and "Memory Resource Controller" of v1) counts pages in use. It ends the worker that
exceeds its limit while all others continue. It also tells an out-of-memory kill from any other SIGKILL.

Groups are made inside the one that the operator gave this process, so its limits hold for them, too:

- version 1: beneath the group of this process;
- version 2, where a group with processes cannot divide its memory: beneath the group of this process if it is
  the root of all; else beneath the one that was delegated to this process (systemd's ``Delegate=memory``, or
  a container's whole group). The process leaves that group for one of its own if no other process is in it.

Everywhere else there are no groups, and the limits of `upriver.server.sandbox.rlimits` apply alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from upriver.resources import GROUPS, MEMBERSHIP, own_groups, read_text

log = logging.getLogger(__name__)

PREFIX = "upriver"
"""Start of a group's name: ``upriver-PID-START-NUMBER``, with the front's process id and start."""

TRIES, PAUSE_S = 10, 0.01
"""Number of attempts, and seconds between them, to remove a group whose process was just killed. Bubblewrap
ends some milliseconds before its worker does; no other process has to be waited for."""

_NAME = re.compile(rf"{PREFIX}-([0-9]+)-([0-9]+)-(?:[0-9]+|front)")
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a group that its owner may divide."""

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Names of a group's files. Limits are set in this order, and only the first must succeed."""

    limits: tuple[tuple[str, str], ...]
    events: str


_V1 = _Version(
    limits=(("memory.limit_in_bytes", "{}"), ("memory.memsw.limit_in_bytes", "{}")),
    events="memory.oom_control",
)
_V2 = _Version(
    limits=(("memory.max", "{}"), ("memory.swap.max", "0"), ("memory.oom.group", "1")),
    events="memory.events",
)


class ControlGroup:
    """Control group of one worker."""

    def __init__(self, path: Path, version: _Version, nbytes: int) -> None:
        self._path = path
        self._version = version
        self.nbytes = nbytes

    def open(self) -> int:
        """Return a descriptor through which a process enters the group when it writes ``0``.

        The caller closes it.

        The process enters by itself, before it allocates memory and from inside its sandbox. The right to
        enter is checked when the descriptor is opened.

        Raises:
            OSError: If the group no longer exists.
        """
        return os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def oom_killed(self) -> bool:
        """Return whether the kernel killed a process of this group for lack of memory."""
        for line in read_text(self._path / self._version.events).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return value.strip() != "0"
        return False

    def remove(self) -> bool:
        """Remove the group, and return whether it is gone.

        It stays while a process is in it, or still ending.
        """
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            log.debug("cannot remove the control group %s: %s", self._path, error.strerror)
            return False
        return True


class ControlGroups:
    """Make the workers' groups, and remove those whose worker or front has ended."""

    def __init__(self, parent: Path, version: _Version) -> None:
        self._parent = parent
        self._version = version
        self._left: list[ControlGroup] = []

    @classmethod
    def find(cls, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> ControlGroups | None:
        """Find where groups can be made, or return None. Groups of dead fronts there are removed.

        Args:
            groups: Mount point of control groups; those of version 1 lie in its folder ``memory``.
            membership: File that lists the groups of this process.
        """
        place = _place(groups, membership)
        if place is None:
            return None
        found = cls(*place)
        found.sweep()
        if not found._can_limit():
            return None
        return found

    def make(self, nbytes: int) -> ControlGroup | None:
        """Return a group for one worker with this memory limit, or None if it cannot be made."""
        self._left = [group for group in self._left if not group.remove()]
        pid = os.getpid()
        path = self._parent / f"{PREFIX}-{pid}-{_start_of(pid)}-{next(_numbers)}"
        group = ControlGroup(path, self._version, nbytes)
        try:
            path.mkdir()
            self._limit(path, nbytes)
        except OSError as error:
            log.debug("cannot have a control group of %d bytes: %s", nbytes, error)
            group.remove()
            return None
        return group

    def remove(self, group: ControlGroup) -> None:
        """Remove a worker's group, now or as soon as its processes have ended."""
        for _ in range(TRIES):
            if group.remove():
                return
            time.sleep(PAUSE_S)
        self._left.append(group)

    def close(self) -> None:
        """Remove the remaining groups whose processes end in a moment. The next front removes the rest."""
        for _ in range(TRIES):
            self._left = [group for group in self._left if not group.remove()]
            if not self._left:
                return
            time.sleep(PAUSE_S)

    def sweep(self) -> None:
        """Remove the groups of dead fronts; groups that hold a process stay."""
        with suppress(OSError):
            for path in sorted(self._parent.iterdir()):
                found = _NAME.fullmatch(path.name)
                if found and _start_of(int(found[1])) != int(found[2]):
                    ControlGroup(path, self._version, 0).remove()

    def _can_limit(self) -> bool:
        group = self.make(1 << 40)
        return group is not None and group.remove()

    def _limit(self, path: Path, nbytes: int) -> None:
        (first, text), *others = self._version.limits
        (path / first).write_text(text.format(nbytes), encoding="ascii")
        for name, text in others:
            with suppress(OSError):  # the kernel may lack swap, or that file
                (path / name).write_text(text.format(nbytes), encoding="ascii")


def _place(groups: Path, membership: Path) -> tuple[Path, _Version] | None:
    """Return a folder in which groups with a memory limit can be made, and their version."""
    for mount, group, version in own_groups("memory", groups, membership):
        if version == 1:
            return _place_v1(group)
        if (mount / "cgroup.controllers").exists():
            return _place_v2(group, mount)
    return None


def _place_v1(group: Path) -> tuple[Path, _Version] | None:
    """Require that limits hold for groups beneath, or the new groups would exceed this process's limit."""
    if read_text(group / "memory.use_hierarchy").strip() != "1" or not os.access(group, os.W_OK):
        return None
    return group, _V1


def _place_v2(group: Path, mount: Path) -> tuple[Path, _Version] | None:
    if group == mount and _divides(group):
        return group, _V2
    whole = group == mount and (group / "cgroup.type").exists()  # the root of all has no such file
    if (whole or _delegated(group)) and (_divides(group) or _step_aside(group)):
        return group, _V2
    if group != mount and _delegated(group.parent) and _divides(group.parent):  # DelegateSubgroup=
        return group.parent, _V2
    return None


def _divides(group: Path) -> bool:
    """Return whether the groups beneath can limit memory."""
    return "memory" in read_text(group / "cgroup.subtree_control").split()


def _delegated(group: Path) -> bool:
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _step_aside(group: Path) -> bool:
    """Move this process from a group that it has alone into one beneath.

    The group can then divide its memory.
    """
    if "memory" not in read_text(group / "cgroup.controllers").split():
        return False
    pid = os.getpid()
    if read_text(group / "cgroup.procs").split() != [str(pid)]:
        return False
    own = group / f"{PREFIX}-{pid}-{_start_of(pid)}-front"
    try:
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(pid), encoding="ascii")
        (group / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    except OSError as error:
        log.debug("cannot divide the control group %s: %s", group, error)
        with suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
            own.rmdir()
        return False
    return True


def _start_of(pid: int) -> int:
    """Return when a process started, in ticks since boot, or 0 if it does not exist.

    Process ids are reused.
    """
    stat = read_text(Path(f"/proc/{pid}/stat"))
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return int(fields[19]) if len(fields) > 19 else 0
