"""Run the five processes of a small Swift: start them in order, watch them, and end them together."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from _swift import s3
from _swift.config import INSIDE, SERVERS, Setup, User, write
from _swift.install import python_of, require_installed
from _swift.problems import CannotRun, Problem, last_lines

START_TIMEOUT_S = 120.0
"""Seconds of the start. Five Python processes import Swift: 5 s, or a minute on a busy machine."""

STOP_TIMEOUT_S = 10.0
"""Seconds after SIGTERM until a process that still runs is killed."""

POLL_S = 0.05

CACHE_MIB = 64
"""Memory of memcached: names of accounts and containers need a few kilobytes; this is its own default."""

LOOK = os.WEXITED | os.WNOWAIT | os.WNOHANG
"""Check whether a child has ended, but leave it a zombie, so that its process id is not reused."""

PR_SET_PDEATHSIG = 1

_here = Path(__file__).resolve().parent
_libc = ctypes.CDLL(None, use_errno=True)


class Cluster:
    """Run a Swift during the ``with`` block. Only its folder remains afterwards.

    Args:
        folder: Folder of the installed Swift.
        data: Folder of configuration, logs and objects, made if needed. It keeps the objects of earlier runs.
        users: Users who may log in.
        bind: Address of the proxy.
        port: Port of the proxy; 0 selects a free one.
        workers: Processes of the proxy and of the object server.

    Attributes:
        endpoint: URL for S3 clients.

    Raises:
        CannotRun: From ``with``: If this machine or user lacks a requirement.
        Problem: From ``with``: If it does not start.
    """

    endpoint: str

    def __init__(
        self,
        folder: Path,
        data: Path,
        *,
        users: Sequence[User],
        bind: str = INSIDE,
        port: int = 0,
        workers: int = 1,
    ) -> None:
        self._folder, self._data = folder.absolute(), data.absolute()
        self._users = {user.access_key: user for user in users}
        self._bind, self._port, self._workers = bind, port, workers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        require_installed(self._folder)
        memcached = _memcached()
        with ExitStack() as stack:
            self._lock(stack)
            check_attributes(self._data)
            stack.callback(self._end)
            setup = Setup(
                data=self._data,
                bind=self._bind,
                ports=_ports(self._bind, self._port),
                users=list(self._users.values()),
                workers=self._workers,
            )
            self._start(setup, memcached)
            self._wait(setup)
            self._stack = stack.pop_all()
        host, port = setup.address("proxy")
        self.endpoint = f"http://{host}:{port}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def users(self) -> Mapping[str, User]:
        """Return the users by access key."""
        return self._users

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def make_bucket(self, account: str, bucket: str) -> None:
        """Make a bucket in an account, as the first of its users.

        Raises:
            Problem: If no user is in that account, or the bucket cannot be made.
        """
        user = next((user for user in self._users.values() if user.account == account), None)
        if user is None:
            raise Problem(f"no --user is in the account {account!r} of bucket {bucket!r}")
        s3.make_bucket(self.endpoint, user, bucket)

    def check_alive(self) -> None:
        """Check that all processes run.

        Raises:
            Problem: If a process has ended, with the last lines of its log.
        """
        for name, process in self._processes.items():
            ended = os.waitid(os.P_PID, process.pid, LOOK)
            if ended is not None:
                how = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
                log = last_lines(self._log(name))
                raise Problem(f"the process {name!r} ended with {how} {ended.si_status}{log}")

    # ---------------------------------------------------------------------------------------- starting

    def _lock(self, stack: ExitStack) -> None:
        """Lock the folder, which only one Swift may use at a time."""
        try:
            self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((self._data / "running").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"a Swift runs in {self._data} already") from None
        except OSError as error:
            raise CannotRun(f"cannot write to {self._data}: {error.strerror}") from None

    def _start(self, setup: Setup, memcached: str) -> None:
        write(setup)
        (self._data / "log").mkdir(exist_ok=True)
        python = str(python_of(self._folder))
        rings = [f"{name}={setup.ports[name]}" for name in SERVERS if name != "proxy"]
        self._run("rings", [python, "-I", str(_here / "rings.py"), str(setup.etc), *rings])
        self._spawn("memcached", _memcached_command(memcached, setup.ports["memcached"]))
        for name in SERVERS:
            self._spawn(name, [python, "-I", str(_here / "server.py"), str(setup.etc), name])

    def _run(self, name: str, command: Sequence[str]) -> None:
        """Run a program that ends by itself."""
        self._spawn(name, command)
        process = self._processes[name]
        try:
            process.wait(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Problem(f"making the {name} took longer than {START_TIMEOUT_S:g} s") from None
        if process.returncode != 0:
            raise Problem(f"cannot make the {name}{last_lines(self._log(name))}")
        del self._processes[name]

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        parent = os.getpid()

        def end_with_parent() -> None:
            # However this process ends, its children get SIGTERM, which Swift's pass on to their forks.
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the group is ended as one, and Ctrl-C reaches only this process
                preexec_fn=end_with_parent,
            )

    def _wait(self, setup: Setup) -> None:
        """Wait until every server answers, except memcached."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for name in SERVERS:
            while not _healthy(setup.address(name)):
                self.check_alive()
                if time.monotonic() > deadline:
                    log = last_lines(self._log(name))
                    raise Problem(f"the {name} server did not answer within {START_TIMEOUT_S:g} s{log}")
                time.sleep(POLL_S)
        self.check_alive()

    def _log(self, name: str) -> Path:
        return self._data / "log" / f"{name}.log"

    # ------------------------------------------------------------------------------------------ ending

    def _end(self) -> None:
        """Send SIGTERM to each process, the proxy first, and SIGKILL to the groups that stay."""
        processes = [self._processes[name] for name in reversed(self._processes)]
        processes = [process for process in processes if process.returncode is None]
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            while os.waitid(os.P_PID, process.pid, LOOK) is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            # The process is not reaped yet, so no other process can have its id or its group id.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_attributes(folder: Path) -> None:
    """Check that files in a folder can have extended attributes, in which Swift stores its metadata.

    Raises:
        CannotRun: If they cannot.
    """
    probe = folder / "attributes"
    probe.write_bytes(b"")
    try:
        os.setxattr(probe, "user.upriver", b"1")
    except OSError as error:
        raise CannotRun(
            f"the file system of {folder} takes no user attributes ({error.strerror}), which Swift needs; "
            "ext4, XFS and Btrfs do: choose another folder with --data"
        ) from None
    finally:
        probe.unlink()


def _memcached() -> str:
    # Debian installs it in a folder that only root's PATH needs to contain.
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/bin:/usr/bin"
    found = shutil.which("memcached", path=path)
    if found is None:
        raise CannotRun("Swift needs memcached: install the Debian package memcached")
    return found


def _memcached_command(program: str, port: int) -> list[str]:
    as_user = ["-u", "root"] if os.geteuid() == 0 else []  # it refuses root without this option
    return [program, "-l", INSIDE, "-p", str(port), "-U", "0", "-m", str(CACHE_MIB), *as_user]


def _ports(bind: str, port: int) -> dict[str, int]:
    """Return free ports, all found before any is released. A server fails if its port is taken meanwhile."""
    names = ("memcached", *SERVERS)
    with ExitStack() as stack:
        ports = {}
        for name in names:
            listener = stack.enter_context(socket.socket())
            here = (bind, port) if name == "proxy" else (INSIDE, 0)
            if here[1]:  # as Swift will do; without it a port stays taken for a minute after its last use
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(here)
            except OSError as error:
                raise Problem(f"cannot bind {here[0]}:{here[1]}: {error.strerror}") from None
            ports[name] = int(listener.getsockname()[1])
        return ports


def _healthy(address: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
