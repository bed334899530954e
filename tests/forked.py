"""Start servers by forking a process that has imported the package: an import costs 1.4 processor seconds.

``pytest --fork`` does so, and ``make test`` asks for it. ``make test-full`` gives each server an interpreter
of its own, as users do.

A forked process is a child of the process that asked for it. In every other way it equals an executed one:
environment, folder, files, cores, session, end.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

PR_SET_CHILD_SUBREAPER = 36

READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH_")
"""Variables that an interpreter or a library reads at its start: a test that changes one gets a new process.
"""

PYTHON = sys.executable
"""Interpreter of the tests; tests have servers start their workers with another one."""

AT_FIRST_USE = (
    "upriver.cli.app",
    "upriver.server.service",
    "upriver.pipeline.dataset",
    "upriver.coldstart.load_handle",
    "upriver.coldstart.load_program",
)
"""Modules of a server's front that it imports when a request first needs them, PyTorch among them."""

MESSAGE_BYTES = 1 << 17
MOST_FDS = 64


class Popen(subprocess.Popen[Any]):
    """Fork commands that start a server, and execute everything else."""

    at_start: ClassVar[dict[str, str] | None] = None
    """Environment at the start; None where nothing is forked."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell, *pipes = more[:13]
        restore_signals, *identity, new_session, group = more[13:]
        unusual = [executable, preexec_fn, not close_fds, shell, not restore_signals, *identity, group]
        env = os.environ if env is None else env
        if unusual != [None, None, False, False, False, None, None, None, -1, -1] or not _forkable(args, env):
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        given = dict(enumerate((pipes[0], pipes[3], pipes[5])))  # below 0: the one of this process
        fds = {number: number if fd < 0 else fd for number, fd in given.items()} | {fd: fd for fd in pass_fds}
        request = {
            "args": [os.fspath(arg) for arg in args[1:]],
            "env": dict(env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "cpus": list(os.sched_getaffinity(0)),
            "new_session": bool(new_session),
            "fds": list(fds),
        }
        self.pid = _zygote().fork(request, list(fds.values()))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _forkable(args: Any, env: Mapping[str, str]) -> bool:
    """Return whether a command starts a server with this interpreter and in its surroundings."""
    if Popen.at_start is None or isinstance(args, (str, bytes, os.PathLike)) or args[0] != PYTHON:
        return False
    from tests.server.running import SERVE

    starts = list(args[1:3]) == ["-c", SERVE] or list(args[1:4]) in (
        ["-m", "upriver", "serve"],
        ["-m", "upriver", "worker"],
    )
    return starts and _read_once(env) == _read_once(Popen.at_start)


def _read_once(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_ONCE)}


class Zygote:
    """Process that has imported the package, and does nothing but fork."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [PYTHON, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                env=Popen.at_start,
                stdin=subprocess.DEVNULL,
            )

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Return the number of a new child of this process.

        A child whose parent ends goes to the nearest process above that adopts orphans: this one, for a
        moment.
        """
        with self._lock:
            _set_subreaper(True)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                pid = int(self._control.recv(MESSAGE_BYTES))
                self._control.recv(MESSAGE_BYTES)  # the parent has ended
            finally:
                _set_subreaper(False)
        return pid


def _set_subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), *[ctypes.c_ulong(0)] * 3)


_started: list[Zygote] = []
_starting = threading.Lock()


def _zygote() -> Zygote:
    with _starting:
        if not _started:
            _started.append(Zygote())
        return _started[0]


def install() -> None:
    """Make this process fork servers from now on."""
    Popen.at_start = dict(os.environ)
    subprocess.Popen = Popen  # type: ignore[misc]


def _requests(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request until the control socket closes; return the request in the new process."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MOST_FDS)
        if not message:
            sys.exit()
        parent = os.fork()
        if not parent:
            if pid := os.fork():
                control.send(str(pid).encode())
                os._exit(0)
            return json.loads(message), fds
        os.waitpid(parent, 0)
        control.send(b"done")
        for fd in fds:
            os.close(fd)


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Take over what a new interpreter would receive."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = 1 + max([*request["fds"], *fds])
    above = [os.dup2(fd, high + number) for number, fd in enumerate(fds)]
    os.closerange(3, high)
    for fd, number in zip(above, request["fds"], strict=True):
        os.dup2(fd, number)
    os.closerange(high, high + len(fds))
    if request["new_session"]:
        os.setsid()
    os.sched_setaffinity(0, request["cpus"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])


def _run(option: str, name: str, *arguments: str) -> None:
    """Do what an interpreter does with its command line."""
    sys.argv = [name if option == "-m" else option, *arguments]
    if option == "-m":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), main.__dict__)


def _main() -> None:
    from upriver.imports import uncollected

    with uncollected():
        for name in AT_FIRST_USE:
            importlib.import_module(name)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    request, fds = _requests(control)
    control.detach()
    _become(request, fds)
    _run(*request["args"])


if __name__ == "__main__":
    _main()
