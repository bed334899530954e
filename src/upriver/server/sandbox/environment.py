"""What a worker's process sees of the front's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from upriver.engine.fingerprint import ENVIRONMENT as KERNEL_VARIABLES
from upriver.server.sandbox.bubblewrap import Enclosure, import_path
from upriver.server.sandbox.rlimits import ALLOCATOR

TOKEN_VARIABLE = "UPRIVER_TOKEN"
"""Where a server may have been given its token."""

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
"""All that a worker sees of the front's environment, where a store's credentials may stand."""


def environment_of(enclosure: Enclosure, *, threads: int) -> dict[str, str]:
    """What a worker that is kept so may see; see the two below."""
    if enclosure.own_code:
        return code_environment(os.environ, threads=threads, hidden=enclosure.hidden)
    return worker_environment(os.environ, threads=threads, boxed=enclosure.boxed)


def code_environment(
    environment: Mapping[str, str], *, threads: int, hidden: Sequence[str] = ()
) -> dict[str, str]:
    """What a worker sees that runs the user's own code: all that the front does, but for its secrets.

    It finds modules where the front does, and in the working directory before that, as ``python -m`` would.

    Args:
        environment: The front's.
        threads: Of each worker.
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
    """What a worker may see, how many threads its libraries start, and how they hold memory.

    Args:
        environment: The front's.
        threads: Of each worker.
        boxed: Whether it has a file system of its own, without anybody's home folder.
    """
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    return {
        **ALLOCATOR,
        **kept,  # among them the operator's own settings of the allocator
        **({"HOME": "/tmp", "TMPDIR": "/tmp", "LOGNAME": "upriver"} if boxed else {}),
        "PYTHONPATH": import_path(),
        "PYTHONDONTWRITEBYTECODE": "1",  # it may write no files
        **_threads(threads),
    }


def _threads(threads: int) -> dict[str, str]:
    """How many threads libraries start."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
