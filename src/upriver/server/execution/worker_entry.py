"""Start a worker: isolate the process before anything else is imported.

Run this file as ``python worker_entry.py FD PARENT [OPTIONS]``. Leaving the network and dropping rights act
on threads, and importing almost anything (NumPy for one) starts threads. ``OPTIONS`` is a JSON object: the
keyword arguments of `boot`. Under bubblewrap most of this is done before the file is read.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

CAPABILITIES = 64
"""Numbers that a capability can have in the kernel's interface, version 3. Linux defines 41 so far."""

CAPABILITY_VERSION_3 = 0x20080522


def join_group(fd: int | None) -> None:
    """Join the control group whose process list is open as ``fd``. Memory allocated later counts there."""
    if fd is None:
        return
    with suppress(OSError):  # the group is gone, or full: the limits of this process itself remain
        os.write(fd, b"0")  # 0: the process that writes it
    os.close(fd)


def leave_network() -> bool:
    """Move to an empty network namespace, as root or through a user namespace; return whether that worked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return any(libc.unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))
    except (OSError, AttributeError):  # not Linux
        return False


def drop_capabilities() -> None:
    """Drop all capabilities for good: no process started later can regain any.

    Call this after `leave_network`, which needs them. A user namespace gives its first process all
    capabilities over that namespace. They open much of the kernel that is closed to other processes.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        zero = ctypes.c_ulong(0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
        libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), zero, zero, zero)
        for number in range(CAPABILITIES):  # the kernel refuses unknown numbers, which does no harm
            libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), zero, zero, zero)
        header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
        libc.capset(header, bytes(24))  # effective, permitted and inheritable, twice 32 bits each
    except (OSError, AttributeError):  # not Linux
        return


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, for any reason."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: the end of the socket's stream must suffice
        return
    if os.getppid() != parent:  # the parent ended first
        os._exit(1)


def spare_others() -> None:
    """Let the kernel kill this process before the front if memory runs out; write no core file.

    A core file would hold users' data.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")


def limit(limits: Mapping[str, int]) -> None:
    """Set resource limits for good, each by its name in `resource`. A lower existing limit stays."""
    for name, most in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (least, least))


def _let_be(number: int, frame: FrameType | None) -> None:
    """Ignore a signal that is for the front."""


def boot(
    fd: int,
    parent: int,
    *,
    sandbox: str = "none",
    group: int | None = None,
    limits: Mapping[str, int] | None = None,
    own_code: bool = False,
) -> None:
    """Isolate this process, then work until the front is gone.

    Args:
        fd: Socket to the front.
        parent: PID of the front. In a sandbox with its own process namespace the number means nothing. There
            bubblewrap ends this process together with the front.
        sandbox: Sandbox that the process already runs in: "bubblewrap" or "none".
        own_code: Whether it runs the user's own code, which keeps its network, files and rights.
    """
    join_group(group)
    spare_others()
    alone = not own_code and (sandbox != "none" or leave_network())  # bubblewrap does it, or starts nothing
    if not own_code:
        drop_capabilities()
    if sandbox == "none":
        die_with(parent)  # last: a change of credentials would undo it
    limit(limits or {})
    if not own_code:
        # Libraries ask for this folder's name and never use it. Python would find the name by writing there.
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    # A service manager may signal all processes of a service at once. The front lets running jobs finish,
    # then ends this process. A process that the user's code starts inherits an ignored signal, but no
    # handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _let_be if own_code else signal.SIG_IGN)
    from upriver.imports import uncollected

    with uncollected():
        from upriver.server.execution.worker_main import work

    work(fd, network=not alone, sandbox=sandbox)


if __name__ == "__main__":
    boot(int(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"))
