"""What processes may take of the machine: the front's descriptors; a worker's limits, and its allocator.

Those of a worker are a last resort. Admission keeps what is run within the memory budget; what goes astray
all the same (a decoder with a hole, an estimate that was too low) is to fail by itself, before the machine is
short.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from types import MappingProxyType

log = logging.getLogger(__name__)

FRONT_FILES = 256
"""Descriptors of the front that are no client's connections: its libraries, workers, programs and logs, and
objects that it reads. Eight requests that compute read sixteen micro-batches, with eight GETs each."""

FILES_SHARE = 0.5
"""Of the descriptors that a process may have, what `FRONT_FILES` may take at most where there are few."""

OVERHEAD_BYTES = 2 << 30
"""What a worker takes beside its work: PyTorch and its kernels' tables, a stack of 8 MiB for each thread of
each library, arenas of the C library. Some hundred MiB with one thread, more with a hundred; addresses that
nobody touches count too."""

MARGIN = 1.25
"""Over the memory budget. Peaks are over-estimated as it is; a quarter more is what gaps between allocations
can cost. A limit that an admitted request could reach would do harm where there was none."""

MAX_FILES = 1024
"""Descriptors. A worker has one for each piece of memory it shares with the front, which holds as many, and
as a rule may have no more than 1024 itself."""

ALLOCATOR: Mapping[str, str] = MappingProxyType(
    {
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    }
)
"""Settings of glibc with which what a job took goes back to the system when it is done.

By default the size above which a piece of memory is mapped by itself, and unmapped when it is freed, climbs
to 32 MiB with the first such piece that is freed; what is below it stays with the process, between pieces
that are still in use, in each of up to eight arenas a core. Idle workers would then hold what others were
admitted to. 4 MiB: tensors of a micro-batch are larger, objects of Python are smaller, and mapping costs
0.3 ms a MiB of first touches, where computing such a tensor takes tens of ms. 64 MiB: what may stay free at
the end of the heap, so that small pieces are not fetched anew for each job. Two arenas: one for the thread
that works, one for those that PyTorch starts."""


def allowed_bytes(memory_bytes: int) -> int:
    """Memory that a worker may take, where ``memory_bytes`` are to be admitted at most."""
    return OVERHEAD_BYTES + int(MARGIN * memory_bytes)


def limits(memory_bytes: int | None, *, device: str, own_code: bool = False) -> dict[str, int]:
    """Limits of a worker's process by their names in `resource`.

    - ``RLIMIT_DATA``, where computing takes the machine's memory: private memory that can be written. Not
      ``RLIMIT_AS``: libraries reserve addresses by the hundred GiB that they never use, and what is shared
      with the front is counted there. Reaching it is an allocation's error, which a worker reports and
      survives.
    - ``RLIMIT_FSIZE``: no file may be written, not even one that nobody can see. Shared memory is mapped,
      which is no writing. An accelerator's driver has files of its own to write.
    - ``RLIMIT_NOFILE``: see `MAX_FILES`.

    The number of processes is not limited: the kernel counts all of a user's. The user's own code may write
    files, and open as many as the user may.

    Args:
        memory_bytes: What may be admitted at most; None where that is not known.
        device: Where it computes; what is admitted is that device's memory.
        own_code: Whether it runs the user's own code.
    """
    found = {} if own_code else {"RLIMIT_NOFILE": MAX_FILES}
    if on_cpu(device):
        if not own_code:
            found["RLIMIT_FSIZE"] = 0
        if memory_bytes is not None:
            found["RLIMIT_DATA"] = allowed_bytes(memory_bytes)
    return found


def connections(wanted: int) -> int:
    """Have descriptors for so many connections at once, or say in the log for how many there are some.

    The process's soft limit is raised as far as that takes and its hard limit allows.

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
    """Whether a device's memory is the machine's."""
    return device.partition(":")[0] == "cpu"
