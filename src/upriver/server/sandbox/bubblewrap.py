"""What a worker is shut in by: bubblewrap where it works, and whatever else there is.

Decoding strangers' images and running strangers' programs is where somebody could break into a worker. Under
bubblewrap they find an empty network, no other process, no file but the interpreter, its libraries and the
system's, all of them read-only, and no rights to gain; neither stores nor configuration can even be named.
Without it a worker leaves the network and gives up its rights by itself
(`upriver.server.execution.worker_entry`), and can read what the server's user can.
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
from upriver.server.sandbox.cgroup import Group, Groups
from upriver.server.sandbox.rlimits import allowed_bytes, on_cpu
from upriver.text import said

Mode = Literal["auto", "bubblewrap", "none"]

PROBE_TIMEOUT_S = 20.0
"""Starting bubblewrap and an empty interpreter takes 0.05 s; on a cold disk some seconds."""

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
"""Where an interpreter's and PyTorch's shared libraries lie."""

SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/sys/devices/system")
"""How they find each other; and what PyTorch looks up to choose its kernels: the processor's caches and
cores. Without it others would be chosen, and other low bits come out."""

ACCELERATOR = ("/sys", "/etc/ld.so.conf.d", "/run/opengl-driver")
"""Where a driver looks up its devices, and where some systems keep its libraries."""

DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
"""Of accelerators, with wildcards."""

_NEEDED = ("msgspec", "numpy", "PIL", "psutil", "pyarrow", "obstore", "torch", "upriver", "xxhash")
"""Modules that a worker imports, wherever each was installed."""

_LOOK = """
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
sys.exit(f"its Python finds no {', '.join(missing)} there" if missing else 0)
"""

_NAMESPACES = (
    ("--unshare-user", "--disable-userns"),  # nor can it make a namespace with all rights later on
    ("--unshare-user",),  # before bubblewrap 0.8
    (),  # as root where there are no user namespaces
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """How workers are started.

    Attributes:
        kind: What shuts them in.
        command: What comes before a worker's own command line.
        warning: What the operator should know; empty if nothing.
    """

    kind: Literal["bubblewrap", "none"] = "none"
    command: tuple[str, ...] = ()
    warning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enclosure:
    """Everything that each worker of a server is kept in.

    Attributes:
        sandbox: See `Sandbox`.
        device: Where workers compute.
        memory_bytes: What may be admitted there at once; None where that is not known.
        groups: Makes a control group for each; None where that is not possible, or memory is not known.
        own_code: Whether workers run the user's own code: then they see what the front does, and are limited
            only in memory.
        hidden: Variables of the environment that these do not see.
    """

    sandbox: Sandbox = Sandbox()
    device: str = "cpu"
    memory_bytes: int | None = None
    groups: Groups | None = None
    own_code: bool = False
    hidden: tuple[str, ...] = ()

    @property
    def boxed(self) -> bool:
        """Whether workers run under bubblewrap."""
        return self.sandbox.kind == "bubblewrap"

    def make_group(self) -> Group | None:
        """A control group for one worker, if there can be one."""
        if self.groups is None or self.memory_bytes is None:
            return None
        return self.groups.make(allowed_bytes(self.memory_bytes))


NOT_SHUT_IN = Enclosure()
"""Namespaces and limits that need no knowledge of this machine, and nothing else."""


def enclose(
    mode: Mode,
    *,
    device: str,
    memory_bytes: int | None,
    own_code: bool = False,
    hidden: tuple[str, ...] = (),
) -> Enclosure:
    """Find out how workers can be shut in here; once, before any is started.

    Args:
        mode: "bubblewrap" insists on it, "auto" takes it where it works; neither where workers run own code.
        device: Where workers compute.
        memory_bytes: What may be admitted there at once; None where that is not known.
        own_code: Whether workers run the user's own code.
        hidden: Variables of the environment that these do not see.

    Raises:
        ConfigError: If bubblewrap is insisted on and does not work.
    """
    groups = Groups.find() if memory_bytes is not None and on_cpu(device) else None
    return Enclosure(
        sandbox=Sandbox() if own_code else choose(mode, device=device),
        device=device,
        memory_bytes=memory_bytes,
        groups=groups,
        own_code=own_code,
        hidden=hidden,
    )


def choose(mode: Mode, *, device: str) -> Sandbox:
    """The sandbox that works here.

    Raises:
        ConfigError: If bubblewrap is insisted on and does not work.
    """
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
        warning=f"bubblewrap does not work here ({why}), so whoever breaks into a worker can read this "
        'machine\'s files; sandbox = "none" accepts that'
    )


def bubblewrap(bwrap: str, namespaces: Sequence[str], *, device: str) -> tuple[str, ...]:
    """The command line that a worker's own is appended to.

    Args:
        bwrap: The program.
        namespaces: How a user namespace is made.
        device: Where workers compute.
    """
    options = [*namespaces]
    options += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--tmpfs", "/tmp", "--proc", "/proc", "--dev", "/dev"]  # first: what is shown may lie beneath
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
    """Why this interpreter cannot be started so, or does not find what a worker needs; empty if it does."""
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
    """``PYTHONPATH`` of a worker: it finds modules where this process does."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def outermost(paths: Iterable[str]) -> list[str]:
    """The absolute paths among these that do not lie beneath another one, sorted."""
    found: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.isabs(path)}):
        if not any(Path(path).is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def _shown(device: str) -> Iterator[str]:
    """What a worker may read: each path as it is spelt, and where it really is."""
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
    """Where modules are found, but for the folder of the script that was run and the one it was run in."""
    others = {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] if sys.argv else ""))}
    return [path for path in sys.path if os.path.abspath(path) not in others]


def holds(path: str, folder: str) -> bool:
    """Whether a path shows that folder, too: it is that folder, or one that it lies in."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def _executable(shown: Sequence[str]) -> Iterator[str]:
    """Options that show the interpreter where it lies apart; link by link, for so it finds its libraries."""
    path = os.path.abspath(sys.executable)
    for _ in range(40):  # as many as Linux follows
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
