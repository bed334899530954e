"""Starts a worker: shuts it in before anything else is imported.

Run as a file, ``python worker_entry.py FD PARENT [OPTIONS]``: cutting a process off and taking its rights
away work on threads, and importing almost anything (NumPy for one) starts some. ``OPTIONS`` is a JSON object,
the keyword arguments of `boot`. Under bubblewrap most is done before this file is even read.
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
"""Numbers a capability can have in the kernel's interface of version 3; Linux knows 41 of them so far."""

CAPABILITY_VERSION_3 = 0x20080522


def join_group(fd: int | None) -> None:
    """Enter the control group whose list of processes is open as ``fd``: what is taken later counts there."""
    if fd is None:
        return
    with suppress(OSError):  # the group is gone, or full: the limits of this process itself remain
        os.write(fd, b"0")  # whoever writes it
    os.close(fd)


def leave_network() -> bool:
    """Move to an empty network namespace, as root or through a user namespace; whether that worked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return any(libc.unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))
    except (OSError, AttributeError):  # not Linux
        return False


def drop_capabilities() -> None:
    """Give up root's rights one by one; nothing that is started from here on can get any back.

    After `leave_network`, which needs them. A user namespace gives its first process all of them, over that
    namespace, which is enough to reach much of the kernel that nobody else can.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        zero = ctypes.c_ulong(0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
        libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), zero, zero, zero)
        for number in range(CAPABILITIES):  # those that are not known are refused, which does not matter
            libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), zero, zero, zero)
        header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
        libc.capset(header, bytes(24))  # effective, permitted and inheritable, twice 32 bits each
    except (OSError, AttributeError):  # not Linux
        return


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, however it ends."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: the end of the socket's stream has to do
        return
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def spare_others() -> None:
    """If memory runs out this process goes before the front; and it leaves no core file with users' data."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")


def limit(limits: Mapping[str, int]) -> None:
    """Set resource limits for good, each by its name in `resource`; one that is lower already stays."""
    for name, most in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (least, least))


def _let_be(number: int, frame: FrameType | None) -> None:
    """A signal that is for the front."""


def boot(
    fd: int,
    parent: int,
    *,
    sandbox: str = "none",
    group: int | None = None,
    limits: Mapping[str, int] | None = None,
    own_code: bool = False,
) -> None:
    """Shut this process in, then work until the front is gone.

    Args:
        fd: Socket to the front.
        parent: The front. In a sandbox with processes of its own nobody here has that number, and bubblewrap
            sees to it that this process ends with the front.
        sandbox: What it is shut in by already: "bubblewrap" or "none".
        group: See `join_group`.
        limits: See `limit`.
        own_code: Whether it runs the user's own code, which keeps the network, files and rights it has.
    """
    join_group(group)
    spare_others()
    alone = not own_code and (sandbox != "none" or leave_network())  # bubblewrap does it, or starts nothing
    if not own_code:
        drop_capabilities()
    if sandbox == "none":
        die_with(parent)  # after those: a change of credentials would undo it
    limit(limits or {})
    if not own_code:
        # Libraries ask for this folder's name and never use it; Python would find it by writing there.
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    # Whoever ends all processes of a service at once: the front lets what runs finish, and ends this one.
    # What the user's code starts does not inherit a handler, as it would a signal that is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _let_be if own_code else signal.SIG_IGN)
    from upriver.imports import uncollected

    with uncollected():
        from upriver.server.execution.worker_main import work

    work(fd, network=not alone, sandbox=sandbox)


if __name__ == "__main__":
    boot(int(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}"))
