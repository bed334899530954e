"""A control group of its own for each worker, where this process may make any: a limit on every page.

Limits of a process count addresses, and not what it shares; a control group (Linux, "Control Group v2" and
"Memory Resource Controller" of v1) counts what is really taken, and ends the worker that takes more while
everyone else goes on. It also tells an end for want of memory from any other SIGKILL.

Groups are made inside the one that the operator gave us, so whatever holds for that one holds for them:

- version 1: beneath the group of this process;
- version 2, where a group with processes cannot divide its memory: beneath the group of this process if it is
  the root of all; else beneath the one that was delegated to us (systemd's ``Delegate=memory``, or a
  container's whole group), which this process leaves for one of its own if nobody else is in it.

Everywhere else there are none, and the limits of `upriver.server.sandbox.rlimits` have to do.
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

from upriver.profile.resources import GROUPS, MEMBERSHIP

log = logging.getLogger(__name__)

PREFIX = "upriver"
"""What a group's name begins with: ``upriver-PID-START-NUMBER``, of the front that made it."""

TRIES, PAUSE_S = 10, 0.01
"""How often, and how far apart, a group is removed whose process has just been killed. Bubblewrap's end comes
some milliseconds before its worker's; nobody else has to be waited for."""

_NAME = re.compile(rf"{PREFIX}-([0-9]+)-([0-9]+)-(?:[0-9]+|front)")
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes with which systemd marks a group that its owner may divide."""

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """What the files of a group are called; limits are set in this order, and only the first has to work."""

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


class Group:
    """The control group of one worker.

    Attributes:
        nbytes: Memory that it may take.
    """

    def __init__(self, path: Path, version: _Version, nbytes: int) -> None:
        self._path = path
        self._version = version
        self.nbytes = nbytes

    def open(self) -> int:
        """A descriptor, for the caller to close: a process that writes ``0`` to it enters the group.

        It does so by itself, before it takes any memory and from inside whatever else it is shut in by;
        whether it may was decided when this was opened.

        Raises:
            OSError: If the group is gone.
        """
        return os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def oom_killed(self) -> bool:
        """Whether the kernel ended a process of this group for want of memory."""
        for line in _read(self._path / self._version.events).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return value.strip() != "0"
        return False

    def remove(self) -> bool:
        """Take it away; whether it is gone. It is not as long as a process is in it, or on its way out."""
        try:
            self._path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            log.debug("cannot remove the control group %s: %s", self._path, error.strerror)
            return False
        return True


class Groups:
    """Makes the workers' groups, and removes those whose worker, or whose front, is gone.

    Args:
        parent: The group they are made in.
        version: Of its files.
    """

    def __init__(self, parent: Path, version: _Version) -> None:
        self._parent = parent
        self._version = version
        self._left: list[Group] = []

    @classmethod
    def find(cls, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> Groups | None:
        """Where groups can be made here; None where they cannot. What dead fronts left there is removed.

        Args:
            groups: Where control groups are mounted; those of version 1 in the folder ``memory``.
            membership: The file that says which groups this process is in.
        """
        place = _place(groups, membership)
        if place is None:
            return None
        found = cls(*place)
        found.sweep()
        if not found._can_limit():
            return None
        return found

    def make(self, nbytes: int) -> Group | None:
        """A group for one worker with so much memory; None if it cannot be had."""
        self._left = [group for group in self._left if not group.remove()]
        pid = os.getpid()
        path = self._parent / f"{PREFIX}-{pid}-{_start_of(pid)}-{next(_numbers)}"
        group = Group(path, self._version, nbytes)
        try:
            path.mkdir()
            self._limit(path, nbytes)
        except OSError as error:
            log.debug("cannot have a control group of %d bytes: %s", nbytes, error)
            group.remove()
            return None
        return group

    def remove(self, group: Group) -> None:
        """Take a worker's group away, now or as soon as its processes are gone."""
        for _ in range(TRIES):
            if group.remove():
                return
            time.sleep(PAUSE_S)
        self._left.append(group)

    def close(self) -> None:
        """Take away what is left, if its processes are gone in a moment; a next front does the rest."""
        for _ in range(TRIES):
            self._left = [group for group in self._left if not group.remove()]
            if not self._left:
                return
            time.sleep(PAUSE_S)

    def sweep(self) -> None:
        """Take away the groups of fronts that are dead; those with a process in them stay."""
        with suppress(OSError):
            for path in sorted(self._parent.iterdir()):
                found = _NAME.fullmatch(path.name)
                if found and _start_of(int(found[1])) != int(found[2]):
                    Group(path, self._version, 0).remove()

    def _can_limit(self) -> bool:
        group = self.make(1 << 40)
        return group is not None and group.remove()

    def _limit(self, path: Path, nbytes: int) -> None:
        (first, text), *others = self._version.limits
        (path / first).write_text(text.format(nbytes), encoding="ascii")
        for name, text in others:
            with suppress(OSError):  # a kernel without swap, or without that file
                (path / name).write_text(text.format(nbytes), encoding="ascii")


def _place(groups: Path, membership: Path) -> tuple[Path, _Version] | None:
    """Where groups with a memory limit can be made, and which kind."""
    for line in _read(membership).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return _place_v1(_under(groups / "memory", path))
        if hierarchy == "0" and not controllers and (groups / "cgroup.controllers").exists():
            return _place_v2(_under(groups, path), groups)
    return None


def _under(mount: Path, path: str) -> Path:
    """A group's folder. In a container its path may be the host's: the mount is the group then."""
    group = Path(os.path.normpath(mount / path.lstrip("/")))
    return group if group.is_relative_to(mount) and group.is_dir() else mount


def _place_v1(group: Path) -> tuple[Path, _Version] | None:
    """Limits must hold for what lies beneath, or our groups would have more than we were given."""
    if _read(group / "memory.use_hierarchy").strip() != "1" or not os.access(group, os.W_OK):
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
    """Whether memory can be limited one group further down."""
    return "memory" in _read(group / "cgroup.subtree_control").split()


def _delegated(group: Path) -> bool:
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _step_aside(group: Path) -> bool:
    """Leave a group that is ours alone for one beneath it, so that it can divide its memory."""
    if "memory" not in _read(group / "cgroup.controllers").split():
        return False
    pid = os.getpid()
    if _read(group / "cgroup.procs").split() != [str(pid)]:
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
    """When a process started, in ticks since the machine did; 0 if there is none. Numbers are used again."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    fields = stat.rpartition(")")[2].split()  # what comes before is its name, which may hold anything
    return int(fields[19]) if len(fields) > 19 else 0


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
