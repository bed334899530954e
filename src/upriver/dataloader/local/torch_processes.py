"""What of PyTorch's loader processes has no public name: how they begin, fail and die."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing import queues
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


def gone(pid: int) -> str:
    """Say that a loader process has ended, as PyTorch says it."""
    return f"DataLoader worker (pid(s) {pid}) {ENDED}"


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
    return f"{gone(pid)}, {how}"


class ProcessError(ExceptionWrapper):
    """An exception of a loader process, as PyTorch sends it, and what it is made again from.

    PyTorch sends the type and a text, and makes another exception of the type from the text. Where the
    constructor takes something else that fails, and ``except`` would depend on ``num_workers``.
    """

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.parts = _parts(error)
        if not _is_found(self.exc_type):  # such as a class within a function: no other process has it
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
        itself = _whole(self.parts)
        if type(itself) is not self.exc_type:
            raise RuntimeError(told)
        note(itself, told)
        raise itself


def _parts(error: Exception) -> tuple[Any, ...] | None:
    """What makes an exception, of what, and its attributes; None where another process has not all of it."""
    try:
        reduced: Any = error.__reduce__()
        make, args, *more = reduced
        attributes = dict(more[0] or {}) if more else {}
        parts = make, args, attributes
        whole = _is_found(make) and _is_plain(args) and _is_plain(attributes)
        return parts if whole and type(_whole(parts)) is type(error) else None
    except Exception:  # the user's own code runs in it
        return None


def _whole(parts: tuple[Any, ...] | None) -> Any:
    """Make an exception of its parts; None where that fails."""
    if parts is None:
        return None
    make, args, attributes = parts
    try:
        error = make(*args)
        error.__dict__.update(attributes)
    except Exception:
        return None
    return error


def _is_found(value: Any) -> bool:
    """Whether another process finds a class or function by its name."""
    found = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_plain(value: Any) -> bool:
    """Whether a value is sent as it is: numbers and text, in tuples, lists and dicts, and types."""
    match value:
        case tuple() | list():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
        case type():
            return _is_found(value)
    return type(value) in (type(None), bool, int, float, str, bytes)


def raised(failed: ExceptionWrapper) -> Exception:
    """What PyTorch's loader raises for it."""
    try:
        failed.reraise()  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    raise AssertionError("it was raised")


def begin(worker_init_fn: Callable[[int], object] | None, base_seed: int, number: int) -> None:
    """What a loader process does first: to the user's code it is one of PyTorch's."""
    queues.Queue._on_queue_feeder_error = _not_sent  # type: ignore[attr-defined]
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


def _not_sent(queue: Any, error: Exception, sent: Any) -> None:
    """Send the error in place of what cannot be sent.

    It is raised in the thread that sends. PyTorch's process prints it and goes on, and whoever waits for the
    batch waits for good.
    """
    if isinstance(sent, tuple) and len(sent) == 2 and hasattr(sent[1], "failed"):
        queue.put((sent[0], sent[1]._replace(value=None, failed=wrapped(error))))
    else:  # of a queue of the user's own
        _told_by_queue(error, sent)


_told_by_queue = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def wrapped(error: Exception) -> ExceptionWrapper:
    """What is being raised in a loader process, as it is sent."""
    return ProcessError(error, f"in DataLoader worker process {_info().id}")


def _info() -> Any:
    """Of this loader process."""
    info = get_worker_info()
    if info is None:
        raise RuntimeError("this is no loader process")
    return info
