"""Confine workers with bubblewrap where it works, and with other means elsewhere.

An attacker could break into a worker through a client's image or program. Under bubblewrap such an attacker
finds an empty network, no other process, and no rights to gain. The only files are the interpreter, its
libraries and the system's, all read-only; stores and configuration cannot even be named. Without bubblewrap a
worker leaves the network and gives up its rights by itself (`upriver.server.execution.worker_entry`), but can
read the files of the server's user.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import upriver
from upriver.errors import ConfigError
from upriver.server.sandbox.cgroup import ControlGroup, ControlGroups
from upriver.server.sandbox.rlimits import allowed_bytes, on_cpu
from upriver.text import said

Mode = Literal["auto", "bubblewrap", "none"]

PROBE_TIMEOUT_S = 20.0
"""Seconds for the probe. Starting bubblewrap and an empty interpreter takes 0.05 s, or some seconds from a
cold disk."""

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
"""Paths of the shared libraries of the interpreter and of PyTorch."""

SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/sys/devices/system")
"""Paths with which libraries find each other, and with which PyTorch chooses its kernels: the processor's
caches and cores. Without these PyTorch would choose other kernels, and low bits would differ."""

ACCELERATOR = ("/sys", "/etc/ld.so.conf.d", "/run/opengl-driver")
"""Paths where a driver looks up its devices, and where some systems keep its libraries."""

DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
"""Device files of accelerators, with wildcards."""

_NEEDED = ("msgspec", "numpy", "PIL", "psutil", "pyarrow", "obstore", "torch", "upriver", "xxhash")
"""Modules that a worker imports, wherever each is installed."""

_LOOK = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
sys.exit(f"its Python finds no {', '.join(missing)} there" if missing else 0)
"""

_NAMESPACES = (
    ("--unshare-user", "--disable-userns"),  # nor can the worker make a namespace with all rights later
    ("--unshare-user",),  # before bubblewrap 0.8
    (),  # as root where there are no user namespaces
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """Command with which workers are confined.

    Attributes:
        command: Arguments that precede a worker's own command line.
        warning: Text for the operator; empty if there is none.
    """

    kind: Literal["bubblewrap", "none"] = "none"
    command: tuple[str, ...] = ()
    warning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enclosure:
    """Everything that confines each worker of a server.

    Attributes:
        memory_bytes: Most memory admitted on the device at once; None if unknown.
        groups: Maker of a control group for each worker; None if impossible, or if memory is unknown.
        own_code: Whether workers run the user's own code. Such workers see what the front sees, and only
            their memory is limited.
        hidden: Environment variables that such workers do not see.
    """

    sandbox: Sandbox = Sandbox()
    device: str = "cpu"
    memory_bytes: int | None = None
    groups: ControlGroups | None = None
    own_code: bool = False
    hidden: tuple[str, ...] = ()

    @property
    def boxed(self) -> bool:
        """Return whether workers run under bubblewrap."""
        return self.sandbox.kind == "bubblewrap"

    def make_group(self) -> ControlGroup | None:
        """Return a control group for one worker, or None if none is possible."""
        if self.groups is None or self.memory_bytes is None:
            return None
        return self.groups.make(allowed_bytes(self.memory_bytes))


NOT_SHUT_IN = Enclosure()
"""Enclosure of namespaces and limits that need no knowledge of this machine, and nothing else."""


def enclose(
    mode: Mode,
    *,
    device: str,
    memory_bytes: int | None,
    own_code: bool = False,
    hidden: tuple[str, ...] = (),
) -> Enclosure:
    """Determine how workers can be confined here. Call it once, before any worker starts.

    See `Enclosure` for the other arguments.

    Args:
        mode: "bubblewrap" requires it, "auto" uses it where it works. Neither applies to workers that run own
            code.

    Raises:
        ConfigError: If bubblewrap is required and does not work.
    """
    groups = ControlGroups.find() if memory_bytes is not None and on_cpu(device) else None
    return Enclosure(
        sandbox=Sandbox() if own_code else choose(mode, device=device),
        device=device,
        memory_bytes=memory_bytes,
        groups=groups,
        own_code=own_code,
        hidden=hidden,
    )


def choose(mode: Mode, *, device: str) -> Sandbox:
    """Return the sandbox that works here; raise `ConfigError` as `enclose` does."""
    if mode == "none":
        return Sandbox()
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        why = "it is not installed"
    else:
        why = ""
        for namespaces in _NAMESPACES:
            command = bubblewrap(bwrap, namespaces, device=device)
            why = probe(command)
            if not why:
                return Sandbox(kind="bubblewrap", command=command)
    if mode == "bubblewrap":
        raise ConfigError(f"workers cannot be shut in by bubblewrap: {why}")
    return Sandbox(
        warning=f"bubblewrap does not work here ({why}), so an attacker in a worker can read this "
        'machine\'s files; sandbox = "none" accepts that'
    )


def bubblewrap(bwrap: str, namespaces: Sequence[str], *, device: str) -> tuple[str, ...]:
    """Return the command line to which a worker's own is appended.

    Args:
        namespaces: Options that make a user namespace.
    """
    options = [*namespaces]
    options += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]  # first: paths shown may lie beneath
    shown = outermost(_shown(device))
    for path in shown:
        options += ["--ro-bind-try", path, path]
    options += _executable(shown)
    if not on_cpu(device):
        for path in sorted(path for pattern in DEVICES for path in glob.glob(pattern)):
            options += ["--dev-bind-try", path, path]
    options += ["--remount-ro", "/", "--chdir", "/"]
    return (bwrap, *options, "--")


def probe(command: Sequence[str]) -> str:
    """Return why the interpreter fails under this command or lacks a worker's modules; empty if it works."""
    try:
        done = subprocess.run(
            [*command, sys.executable, "-P", "-c", _LOOK, *_NEEDED],
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"it was not done within {PROBE_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return said(lines[-1], 300) if lines else f"it ended with exit code {done.returncode}"


def import_path() -> str:
    """Return the ``PYTHONPATH`` with which a worker finds modules where this process does."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the absolute paths that lie beneath no other of these paths, sorted."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.isabs(path)}):
        if not any(Path(path).is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def _shown(device: str) -> Iterator[str]:
    """Yield the paths that a worker may read, each as it is spelt and as it resolves."""
    private = [os.path.expanduser("~"), "/tmp", "/var/tmp"]
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *_import_paths()]
    paths += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = [path for path in paths if path and not any(holds(path, folder) for folder in private)]
    paths += [*SYSTEM, *SETTINGS, os.path.dirname(upriver.__file__)]
    if not on_cpu(device):
        paths += ACCELERATOR
    for path in paths:
        if os.path.exists(path):
            yield os.path.abspath(path)
            yield os.path.realpath(path)


def _import_paths() -> list[str]:
    """Return the import path without the script's folder and the working directory."""
    others = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else ""))}
    return [path for path in sys.path if os.path.abspath(path) not in others]


def holds(path: str, folder: str) -> bool:
    """Return whether a path exposes a folder: it is that folder or an ancestor."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def _executable(shown: Sequence[str]) -> Iterator[str]:
    """Yield options that show an interpreter that lies apart, with the links that lead to its libraries."""
    path = os.path.abspath(sys.executable)
    for _ in range(40):  # as many links as Linux follows
        covered = any(Path(path).is_relative_to(outer) for outer in shown)
        if os.path.islink(path):
            target = os.readlink(path)
            if not covered:
                yield from ("--symlink", target, path)
            path = os.path.normpath(os.path.join(os.path.dirname(path), target))
        else:
            if not covered and os.path.exists(path):
                yield from ("--ro-bind", path, path)
            return
