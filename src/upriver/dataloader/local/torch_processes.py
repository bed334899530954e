"""Adapt private parts of PyTorch's loader processes: how they begin, fail and die."""

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
"""Added niceness of loader processes.

In each step the training process briefly needs a CPU. If it queued behind loader processes, an accelerator
would wait for it.
"""

ENDED = "exited unexpectedly"
"""PyTorch's words for a process that has ended unexpectedly."""

DYING_S = 1.0
"""Seconds that a process may still exist after its connections have broken."""


def told_by_waiting(processes: Any) -> None:
    """Unregister processes from PyTorch's signal handler, which raises at any line of the training thread.

    The thread that waits for the process is told as well, and an epoch interrupted at any line may lose a
    batch.
    """
    if processes._worker_pids_set:
        signal_handling._remove_worker_pids(id(processes))  # type: ignore[attr-defined]
        processes._worker_pids_set = False


def why_ended(processes: Any, error: Exception) -> str:
    """Return which processes ended and how, in words; if none did, the error's text.

    Args:
        processes: PyTorch's iterator, which raised the error.
        error: Error of waiting for the processes; it may be of any type if a process ended while sending.
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
    """Return PyTorch's words for a loader process that has ended."""
    return f"DataLoader worker (pid(s) {pid}) {ENDED}"


def ended_by(pid: int, code: int) -> str:
    """Return PyTorch's words for a loader process that has ended, and how it ended.

    Args:
        code: Exit code; for a signal its negative number.
    """
    how = f"with exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"killed by {name}" + ("; /dev/shm may be full" if name == "SIGBUS" else "")
    return f"{gone(pid)}, {how}"


class ProcessError(ExceptionWrapper):
    """Exception of a loader process as PyTorch sends it, with the parts that rebuild it.

    PyTorch sends the type and a text, and constructs an exception of that type from the text. If the
    constructor needs other arguments that fails, and ``except`` would depend on ``num_workers``.
    """

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.parts = _parts(error)
        if not _is_found(self.exc_type):  # another process has no class of a function, for example
            name = self.exc_type.__name__
            self.exc_type = RuntimeError
            self.where = f"in place of {name} {where}"

    def reraise(self) -> None:
        """Raise an exception of the original type in this process, for any constructor.

        Raises:
            Exception: The original for one of our own types; for others PyTorch's reconstruction, or the
                original if PyTorch raises another type.
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
    """Return an exception's constructor, arguments and attributes; None if another process lacks some."""
    try:
        reduced: Any = error.__reduce__()
        make, args, *more = reduced
        attributes = dict(more[0] or {}) if more else {}
        parts = make, args, attributes
        whole = _is_found(make) and _is_plain(args) and _is_plain(attributes)
        return parts if whole and type(_whole(parts)) is type(error) else None
    except Exception:  # it runs the user's code
        return None


def _whole(parts: tuple[Any, ...] | None) -> Any:
    """Rebuild an exception from its parts; None if that fails."""
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
    """Return whether another process finds a class or function by its name."""
    found = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_plain(value: Any) -> bool:
    """Return whether a value is sent unchanged: numbers and text, in tuples, lists and dicts, and types."""
    match value:
        case tuple() | list():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
        case type():
            return _is_found(value)
    return type(value) in (type(None), bool, int, float, str, bytes)


def raised(failed: ExceptionWrapper) -> Exception:
    """Return the exception that PyTorch's loader raises."""
    try:
        failed.reraise()  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    raise AssertionError("it was raised")


def begin(worker_init_fn: Callable[[int], object] | None, base_seed: int, number: int) -> None:
    """Initialize a loader process; the user's code sees one of PyTorch's."""
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
    """Send the error in place of a result that cannot be sent.

    The sending thread raises it. PyTorch's process prints it and continues, and the loader waits for the
    batch forever.
    """
    if isinstance(sent, tuple) and len(sent) == 2 and hasattr(sent[1], "failed"):
        queue.put((sent[0], sent[1]._replace(value=None, failed=wrapped(error))))
    else:  # from a queue of the user's own
        _told_by_queue(error, sent)


_told_by_queue = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def wrapped(error: Exception) -> ExceptionWrapper:
    """Return the current exception of a loader process in the form in which it is sent."""
    return ProcessError(error, f"in DataLoader worker process {_info().id}")


def _info() -> Any:
    """Return PyTorch's information about this loader process."""
    info = get_worker_info()
    if info is None:
        raise RuntimeError("this is no loader process")
    return info
