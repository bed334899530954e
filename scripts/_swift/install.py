"""Install Swift in a virtual environment of its own: its versions are independent of the project's."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _swift.problems import CannotRun, Problem

VARIABLE = "UPRIVER_SWIFT"
"""Variable with the folder of the installed Swift."""

REQUIREMENTS = (
    "swift==2.38.3",
    "pyeclib==1.8.0",  # its wheels bring liberasurecode, for x86-64 and aarch64
    "setuptools<81",  # the last with pkg_resources, by which an older PasteDeploy finds Swift's filters
)

IMPORTS = "import pyeclib.ec_iface, swift.common.wsgi, swift.common.middleware.s3api.s3api"
"""Imports that the servers need to start. A wheel for another platform fails here, not at the start."""


def default_folder() -> Path:
    """Return the default folder of the installed Swift."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "upriver-swift"


def python_of(folder: Path) -> Path:
    """Return the interpreter of Swift's environment."""
    return folder / "venv" / "bin" / "python"


def install(folder: Path) -> bool:
    """Install Swift into a folder, from the index that pip is configured for.

    Returns:
        Whether an installation was needed.

    Raises:
        Problem: If pip fails; its own words are on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would clear each other's environment
        if installed(folder):
            return False
        _marker(folder).unlink(missing_ok=True)
        pip = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--prefer-binary")
        _run([sys.executable, "-m", "venv", "--clear", folder / "venv"])
        _run([python_of(folder), *pip, *REQUIREMENTS])
        _run([python_of(folder), "-I", "-c", IMPORTS])
        _marker(folder).write_text(_wanted(), encoding="utf-8")
    return True


def installed(folder: Path) -> bool:
    """Return whether a folder has the version of Swift that this script starts."""
    marker = _marker(folder)
    usable = marker.is_file() and os.access(python_of(folder), os.X_OK)
    return usable and marker.read_text(encoding="utf-8") == _wanted()


def require_installed(folder: Path) -> None:
    """Check that Swift is installed.

    Raises:
        CannotRun: If it is not.
    """
    if not installed(folder):
        raise CannotRun(f"Swift is not installed in {folder}: run `scripts/swift install {folder}`")


def _marker(folder: Path) -> Path:
    return folder / "installed"


def _wanted() -> str:
    return "\n".join((*REQUIREMENTS, ""))


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        words = " ".join(str(word) for word in command[:4])
        raise Problem(f"`{words} …` ended with exit code {done.returncode}")
