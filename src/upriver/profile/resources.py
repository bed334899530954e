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

import psutil
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
    cache: bytes


_V1 = _Version(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", cache=b"total_inactive_file")
_V2 = _Version(limit="memory.max", usage="memory.current", cache=b"inactive_file")
_VERSIONS = {1: _V1, 2: _V2}


def available_bytes(device: torch.device) -> int:
    """Return the bytes that computations on a device can still allocate.

    On an accelerator these are the free bytes, and those that torch caches.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host_bytes()


def total_bytes(device: torch.device) -> int:
    """Return the total bytes of a device, or the share of the machine's that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_total_bytes()


def host_total_bytes(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the least of the machine's memory and the limits of this process's groups and their parents.

    Args:
        groups: As for `host_bytes`.
        membership: As for `host_bytes`.
    """
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
    """Return the number of CPUs that this process may use, by affinity and by its groups; at least 1.

    Args:
        groups: As for `host_bytes`.
        membership: As for `host_bytes`.
    """
    least = min([len(os.sched_getaffinity(0)), *_shares(groups, membership)])
    return max(1, int(least))


def _limits(groups: Path, membership: Path) -> Iterator[tuple[Path, _Version, int]]:
    """Yield each group with a memory limit, and the limit in bytes."""
    for group, number in _groups("memory", groups, membership):
        version = _VERSIONS[number]
        limit = _number(group / version.limit)
        if limit is not None and limit < UNLIMITED:
            yield group, version, limit


def _shares(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the number of CPUs that each group with a CPU limit may use."""
    for group, number in _groups("cpu", groups, membership):
        if number == 2:
            quota, _, period = _read(group / "cpu.max").strip().partition(b" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        allowed, every = _parsed(quota), _parsed(period)
        if allowed and every:  # version 1 writes -1 for no limit, version 2 "max"
            yield allowed / every


def _groups(controller: str, groups: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield each group of this process that a controller may limit, with its version."""
    try:
        lines = os.fsdecode(membership.read_bytes()).split("\n")
    except OSError:  # not Linux
        return
    for line in lines:
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
        yield from ((group, version) for group in _upwards(mount, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group and its parents. In a container the path may be the host's: the mount is the group."""
    group = Path(os.path.normpath(mount / path.lstrip("/")))
    if not (group.is_relative_to(mount) and os.path.isdir(group)):
        group = mount
    yield group
    yield from (parent for parent in group.parents if parent.is_relative_to(mount))


def _held(group: Path, version: _Version) -> int:
    """Return the bytes that a group uses and cannot drop."""
    return max(0, (_number(group / version.usage) or 0) - _cache(group, version))


def _cache(group: Path, version: _Version) -> int:
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(b" ")
        if name == version.cache:
            return _parsed(value) or 0
    return 0


def _number(path: Path) -> int | None:
    return _parsed(_read(path))


def _parsed(text: bytes) -> int | None:
    """Return a number, or None for any other text, such as ``max``."""
    text = text.strip()
    return int(text) if text.isdigit() and len(text) <= LONGEST else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError):  # missing file, or an invalid path
        return b""
