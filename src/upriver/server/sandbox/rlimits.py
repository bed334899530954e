"""Limit the resources of processes: the front's descriptors, a worker's limits and its allocator.

A worker's limits are a last resort. Admission keeps work within the memory budget. Work that exceeds the
budget all the same (a decoder with a hole, a low estimate) should fail alone. It must not leave the machine
short of memory.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from types import MappingProxyType

log = logging.getLogger(__name__)

FRONT_FILES = 256
"""Descriptors of the front that are not client connections: its libraries, workers, programs, logs and the
objects that it reads. Eight requests that compute read sixteen micro-batches, with eight GETs each."""

FILES_SHARE = 0.5
"""Share of a process's descriptors that `FRONT_FILES` may take at most if there are few."""

OVERHEAD_BYTES = 2 << 30
"""Bytes of a worker in addition to its work: PyTorch and its kernels' tables, a stack of 8 MiB for each
thread of each library, arenas of the C library. They are some hundred MiB with one thread, more with a
hundred; addresses that nothing touches count, too."""

MARGIN = 1.25
"""Factor over the memory budget. Peaks are over-estimated already; gaps between allocations can cost another
quarter. A limit that an admitted request could reach would break requests that fit."""

MAX_FILES = 1024
"""Descriptors of a worker. It has one for each piece of memory that it shares with the front. The front holds
as many, and usually may have no more than 1024 itself."""

ALLOCATOR: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    }
)
"""Settings of glibc that return a job's memory to the system when the job is done.

By default, glibc maps a large allocation separately, and unmaps it when it is freed. The threshold climbs to
32 MiB with the first such allocation that is freed. Smaller ones stay with the process, between allocations
still in use, in each of up to eight arenas a core. Idle workers would then hold memory that others were
admitted to.

4 MiB: tensors of a micro-batch are larger, Python's objects are smaller. Mapping costs 0.3 ms of first
touches per MiB, where computing such a tensor takes tens of ms. 64 MiB: free memory at the end of the heap
that may stay, so that small allocations are not fetched anew for each job. Two arenas: one for the thread
that works, one for the threads that PyTorch starts."""


def allowed_bytes(memory_bytes: int) -> int:
    """Return the most memory that a worker may use if at most ``memory_bytes`` are admitted."""
    return OVERHEAD_BYTES + int(MARGIN * memory_bytes)


def limits(memory_bytes: int | None, *, device: str, own_code: bool = False) -> dict[str, int]:
    """Return limits of a worker's process by their names in `resource`.

    - ``RLIMIT_DATA``, if work uses the machine's memory: private writable memory. Not ``RLIMIT_AS``: it also
      counts memory shared with the front, and the hundreds of GiB of addresses that libraries reserve and
      never use. An allocation beyond the limit raises an error, which a worker reports and survives.
    - ``RLIMIT_FSIZE``: the worker may write no file, not even an invisible one. Shared memory is mapped,
      which is not writing. With an accelerator there is no such limit, as its driver writes files.
    - ``RLIMIT_NOFILE``: see `MAX_FILES`.

    The number of processes is not limited: the kernel counts all processes of a user. The user's own code may
    write files, and open as many as the user may.

    Args:
        memory_bytes: Most memory that may be admitted; None if unknown.
        device: Device on which the worker computes; admitted memory is that device's.
    """
    found = {} if own_code else {"RLIMIT_NOFILE": MAX_FILES}
    if on_cpu(device):
        if not own_code:
            found["RLIMIT_FSIZE"] = 0
        if memory_bytes is not None:
            found["RLIMIT_DATA"] = allowed_bytes(memory_bytes)
    return found


def connections(wanted: int) -> int:
    """Reserve descriptors for ``wanted`` connections, or log how many are possible.

    The process's soft limit is raised as needed, up to its hard limit.

    Returns:
        Connections that may be held; at least 1.
    """
    needed = wanted + FRONT_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    possible = max(1, most - min(FRONT_FILES, int(FILES_SHARE * most)))
    if possible >= wanted:
        return wanted
    log.warning(
        "this process may open %d files, so it holds %d connections and not %d (max_connections): "
        "have it open %d (ulimit -n, or LimitNOFILE= of its service)",
        most,
        possible,
        wanted,
        needed,
    )
    return possible


def on_cpu(device: str) -> bool:
    """Return whether a device's memory is the machine's."""
    return device.partition(":")[0] == "cpu"
