"""What of PyTorch's loader processes has no public name: how they begin, fail and die."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling, worker

from upriver.errors import UpriverError
from upriver.pipeline.mapstyle import note

MAKES_WAY = 10
"""By so much loader processes are nicer than the training process, which has work of its own for a moment in
each step; behind their turns an accelerator would wait for it."""

ENDED = "exited unexpectedly"
"""What PyTorch says of a process that has."""

DYING_S = 1.0
"""A process whose connections have broken off may be there for a moment more."""


def told_by_waiting(processes: Any) -> None:
    """PyTorch's handler raises in the thread that trains, in whatever line that is, when a process dies.

    Whoever waits for the process is told, too, and an epoch that is interrupted anywhere may lose a batch.
    """
    if processes._worker_pids_set:
        signal_handling._remove_worker_pids(id(processes))  # type: ignore[attr-defined]
        processes._worker_pids_set = False


def why_ended(processes: Any, error: Exception) -> str:
    """Which of them have ended, and how, in words; what waiting for them has raised where none has.

    Args:
        processes: PyTorch's iterator, which has raised.
        error: What; where one of them was about to send something this may be anything.
    """
    workers = getattr(processes, "_workers", ())
    ended = wait([each.sentinel for each in workers], DYING_S)
    for each in workers:
        if each.sentinel in ended:
            each.join(DYING_S)
    told = [ended_by(each.pid, each.exitcode) for each in workers if each.exitcode is not None]
    if not told:
        return str(error) or type(error).__name__
    more = "" if isinstance(error, OSError | EOFError) or ENDED in str(error) else f" ({error})"
    return f"{'; '.join(told)}{more}"


def ended_by(pid: int, code: int) -> str:
    """That a loader process has ended, as PyTorch says it, and how.

    Args:
        pid: Its number.
        code: Its exit code; of a signal its number, negative.
    """
    how = f"with exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"killed by {name}" + ("; /dev/shm may be full" if name == "SIGBUS" else "")
    return f"DataLoader worker (pid(s) {pid}) {ENDED}, {how}"


class Failed(ExceptionWrapper):
    """An exception of a loader process, as PyTorch sends it, and itself where pickle can say it.

    PyTorch sends the type and a text, and makes another exception of the type from the text. Where the
    constructor takes something else that fails, and ``except`` would depend on ``num_workers``.
    """

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.pickled = _pickled(error)
        if _pickled(self.exc_type) is None:  # such as a class within a function: nobody else finds it
            name = self.exc_type.__name__
            self.exc_type = RuntimeError
            self.where = f"in place of {name} {where}"

    def reraise(self) -> None:
        """Raise one of its type in this process, whatever its constructor takes.

        Raises:
            Exception: One of our own as it was, any other one as PyTorch makes it; as it was where PyTorch
                makes another type.
        """
        if not issubclass(self.exc_type, UpriverError):
            try:
                super().reraise()  # type: ignore[no-untyped-call]
            except Exception as error:
                if type(error) is self.exc_type:
                    raise
        told = f"Caught {self.exc_type.__name__} {self.where}.\nOriginal {self.exc_msg}"
        itself = _unpickled(self.pickled)
        if type(itself) is not self.exc_type:
            raise RuntimeError(told)
        note(itself, told)
        raise itself


def _pickled(value: object) -> bytes | None:
    """What another process makes the same of; None where it cannot."""
    try:
        found = pickle.dumps(value)
        return found if type(pickle.loads(found)) is type(value) else None
    except Exception:  # the user's own code runs in it
        return None


def _unpickled(pickled: bytes | None) -> Any:
    """What a loader process of ours has pickled; None where this process cannot make it."""
    try:
        return None if pickled is None else pickle.loads(pickled)
    except Exception:
        return None


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
    worker._worker_info = type(info)(
        id=info.id, num_workers=info.num_workers, seed=seed, dataset=tasks.dataset
    )  # as PyTorch makes it, a dataclass or not
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(worker._generate_state(base_seed, number))  # type: ignore[no-untyped-call]
    if worker_init_fn is None:
        return
    try:
        worker_init_fn(number)
    except Exception as error:
        tasks.begun_with = wrapped(error)


def wrapped(error: Exception) -> ExceptionWrapper:
    """What is being raised in a loader process, as it is sent."""
    return Failed(error, f"in DataLoader worker process {_info().id}")


def _info() -> Any:
    """Of this loader process."""
    info = get_worker_info()
    if info is None:
        raise RuntimeError("this is no loader process")
    return info
