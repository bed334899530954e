"""Starts a worker: shuts it in before anything else is imported.

Run as a file, ``python boot.py FD PARENT``: cutting a process off works on threads, and importing
almost anything (NumPy for one) starts some.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


def leave_network() -> bool:
    """Move to an empty network namespace, as root or through a user namespace; whether that worked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return any(libc.unshare(flags) == 0 for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET))
    except (OSError, AttributeError):  # not Linux
        return False


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
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
    except OSError:
        pass


def boot(fd: int, parent: int) -> None:
    """Shut this process in, then work until the front is gone."""
    alone = leave_network()
    die_with(parent)  # after that: a change of credentials would undo it
    spare_others()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the front decides
    from upriver.server.worker import work

    work(fd, network=not alone)


if __name__ == "__main__":
    boot(int(sys.argv[1]), int(sys.argv[2]))
