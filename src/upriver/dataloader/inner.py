"""What of PyTorch's loader processes has no public name: how they begin, fail and die."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling, worker

MAKES_WAY = 10
"""By so much loader processes are nicer than the training process, which has work of its own for a moment in
each step; behind their turns an accelerator would wait for it."""

DYING_S = 1.0
"""A process whose connections have broken off may be there for a moment more."""


def told_by_waiting(processes: Any) -> None:
    """PyTorch's handler raises in the thread that trains, in whatever line that is, when a process dies.

    Whoever waits for the process is told, too, and an epoch that is interrupted anywhere may lose a batch.
    """
    if processes._worker_pids_set:
        signal_handling._remove_worker_pids(id(processes))  # type: ignore[attr-defined]
        processes._worker_pids_set = False


def killed(processes: Any) -> str:
    """By which signals some of them were, in words."""
    workers = getattr(processes, "_workers", ())
    ended = wait([each.sentinel for each in workers], DYING_S)
    for each in workers:
        if each.sentinel in ended:
            each.join(DYING_S)
    codes = {each.exitcode for each in workers}
    names = sorted(signal.Signals(-code).name for code in codes if code is not None and code < 0)
    full = "; /dev/shm may be full" if "SIGBUS" in names else ""
    return f", killed by {' and '.join(names)}{full}" if names else ""


def raised(failed: ExceptionWrapper) -> Exception:
    """What PyTorch's loader raises for it."""
    try:
        failed.reraise()  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    raise AssertionError("it was raised")


def begin(worker_init_fn: Callable[[int], object] | None, base_seed: int, number: int) -> None:
    """What a loader process does first: to the user's code it is one of PyTorch's."""
    if hasattr(os, "nice"):
        os.nice(MAKES_WAY)
    info = _info()
    tasks, seed = info.dataset, base_seed + number
    worker._worker_info = replace(info, dataset=tasks.dataset, seed=seed)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(worker._generate_state(base_seed, number))  # type: ignore[no-untyped-call]
    if worker_init_fn is None:
        return
    try:
        worker_init_fn(number)
    except Exception:
        tasks.begun_with = wrapped()


def wrapped() -> ExceptionWrapper:
    """What is being raised in a loader process, as PyTorch sends it."""
    where = f"in DataLoader worker process {_info().id}"
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def _info() -> Any:
    """Of this loader process."""
    info = get_worker_info()
    if info is None:
        raise RuntimeError("this is no loader process")
    return info
