"""Select the environment variables that a worker's process sees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from upriver.engine.environment import ENVIRONMENT as KERNEL_VARIABLES
from upriver.server.sandbox.bubblewrap import Enclosure, import_path
from upriver.server.sandbox.rlimits import ALLOCATOR

TOKEN_VARIABLE = "UPRIVER_TOKEN"
"""Variable that may hold the server's token."""

_KEPT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    *KERNEL_VARIABLES,
    *ALLOCATOR,
)
"""Variables of the front that a worker sees. The others may hold a store's credentials."""


def environment_of(enclosure: Enclosure, *, threads: int) -> dict[str, str]:
    """Return the environment of a worker in this enclosure; see the two functions below."""
    if enclosure.own_code:
        return code_environment(os.environ, threads=threads, hidden=enclosure.hidden)
    return worker_environment(os.environ, threads=threads, boxed=enclosure.boxed)


def code_environment(
    environment: Mapping[str, str], *, threads: int, hidden: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a worker that runs the user's own code: the front's without secrets.

    The worker finds modules where the front does, and before that in the working directory, as with ``python
    -m``.

    Args:
        hidden: Variables that hold credentials of stores.
    """
    secret = (TOKEN_VARIABLE, *hidden)
    return {
        **ALLOCATOR,
        **{name: value for name, value in environment.items() if name not in secret},
        "PYTHONPATH": os.pathsep.join((os.getcwd(), import_path())),
        **_threads(threads),
    }


def worker_environment(
    environment: Mapping[str, str], *, threads: int, boxed: bool = False
) -> dict[str, str]:
    """Return the environment of a confined worker, with its libraries' threads and its allocator's settings.

    Args:
        boxed: Whether the worker has a file system of its own, without a home folder.
    """
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    return {
        **ALLOCATOR,
        **kept,  # including the operator's own allocator settings
        **({"HOME": "/tmp", "TMPDIR": "/tmp", "LOGNAME": "upriver"} if boxed else {}),
        "PYTHONPATH": import_path(),
        "PYTHONDONTWRITEBYTECODE": "1",  # the worker may write no files
        **_threads(threads),
    }


def _threads(threads: int) -> dict[str, str]:
    """Return variables that set how many threads libraries start."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
