"""Find the memory and CPUs available to this process: of the machine, its control groups, or an accelerator.

A container, a batch system or a service manager puts a process into a control group. The group may have less
than the machine, and so may each group around it (Linux, "Control Group v2"; "Memory Resource Controller" and
"CFS Bandwidth Control" of v1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

UNLIMITED = 1 << 60
"""Limit that counts as none: version 1 reports a number near 2**63 for no limit."""

LONGEST = 20
"""Digits of the largest 64-bit number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Names of a group's files, and of the droppable page cache in ``memory.stat``."""

    limit: str
    usage: str
    cache: str


_V1 = _Version(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", cache="total_inactive_file")
_V2 = _Version(limit="memory.max", usage="memory.current", cache="inactive_file")
_VERSIONS = {1: _V1, 2: _V2}


def available_bytes(device: str | torch.device) -> int:
    """Return the bytes that computations on a device can still allocate.

    On an accelerator these are the free bytes, and those that torch caches.
    """
    if str(device).startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host_bytes()


def total_bytes(device: str | torch.device) -> int:
    """Return the total bytes of a device, or the share of the machine's that this process may use."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return host_total_bytes()


def host_total_bytes(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the least of the machine's memory and the limits of this process's groups and their parents."""
    limits = [limit for _, _, limit in _limits(groups, membership)]
    return min([int(psutil.virtual_memory().total), *limits])


def host_bytes(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the least available memory of the machine, of this process's groups and of their parents.

    Args:
        groups: Mount point of control groups; version 1 has a folder for each controller.
        membership: File that lists the groups of the process.
    """
    left = [max(0, limit - _held(group, version)) for group, version, limit in _limits(groups, membership)]
    return min([int(psutil.virtual_memory().available), *left])


def available_cpus(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of CPUs that this process may use, by affinity and by its groups; at least 1."""
    least = min([len(os.sched_getaffinity(0)), *_shares(groups, membership)])
    return max(1, int(least))


def own_groups(controller: str, groups: Path, membership: Path) -> Iterator[tuple[Path, Path, int]]:
    """Yield the groups of this process that a controller may limit: mount point, folder, version.

    In a container the listed path may be the host's: the mount point is the group then.
    """
    for line in read_text(membership).split("\n"):
        hierarchy, *rest = line.split(":", 2)
        if len(rest) != 2:
            continue
        controllers, path = rest
        if controller in controllers.split(","):
            mount, version = groups / controller, 1
        elif hierarchy == "0" and not controllers:
            mount, version = groups, 2
        else:
            continue
        group = Path(os.path.normpath(mount / path.lstrip("/")))
        yield mount, group if group.is_relative_to(mount) and os.path.isdir(group) else mount, version


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel's; empty if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes())
    except (OSError, ValueError):  # missing file, or an invalid path
        return ""


def _upwards(controller: str, groups: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield each group of this process and each group around it, with its version."""
    for mount, group, version in own_groups(controller, groups, membership):
        for each in (group, *group.parents):
            if each.is_relative_to(mount):
                yield each, version


def _limits(groups: Path, membership: Path) -> Iterator[tuple[Path, _Version, int]]:
    """Yield each group with a memory limit, and the limit in bytes."""
    for group, number in _upwards("memory", groups, membership):
        version = _VERSIONS[number]
        limit = _number(group / version.limit)
        if limit is not None and limit < UNLIMITED:
            yield group, version, limit


def _shares(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the number of CPUs that each group with a CPU limit may use."""
    for group, number in _upwards("cpu", groups, membership):
        if number == 2:
            quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
        else:
            quota, period = (read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        allowed, every = _parsed(quota), _parsed(period)
        if allowed and every:  # version 1 writes -1 for no limit, version 2 "max"
            yield allowed / every


def _held(group: Path, version: _Version) -> int:
    """Return the bytes that a group uses and cannot drop."""
    return max(0, (_number(group / version.usage) or 0) - _cache(group, version))


def _cache(group: Path, version: _Version) -> int:
    for line in read_text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == version.cache:
            return _parsed(value) or 0
    return 0


def _number(path: Path) -> int | None:
    return _parsed(read_text(path))


def _parsed(text: str) -> int | None:
    """Return a number, or None for any other text, such as ``max``."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= LONGEST else None
