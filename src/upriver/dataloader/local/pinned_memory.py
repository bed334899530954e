"""Provide batches in pinned memory, as PyTorch's loader does.

The thread that receives a whole batch pins it. The training thread, which joins batches of parts, pins those.
"""

from __future__ import annotations

import threading
import warnings
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from upriver.dataloader.tasks import Arrival


def pins(loader: Any) -> bool:
    """Return whether batches are pinned; warn as PyTorch's loader does if they should be and cannot.

    Args:
        loader: Loader with PyTorch's arguments.
    """
    if not loader.pin_memory:
        return False
    if loader.pin_memory_device:
        _warn(
            f"pin_memory_device={loader.pin_memory_device!r} is ignored: memory is the current accelerator's"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        _warn("pin_memory is set, and there is no accelerator: memory is not pinned")
    elif accelerator.type == "mps":
        _warn("pin_memory is set, and not supported on MPS: memory is not pinned")
        accelerator = None
    return accelerator is not None


def _warn(what: str) -> None:
    warnings.warn(what, UserWarning, stacklevel=4)


class PinningQueue(SimpleQueue[Arrival]):
    """Queue of arrivals whose ``put`` pins those that are batches, in the calling thread.

    They are pinned for the accelerator that is current at construction.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.accelerator.current_device_index()
        self._batches: set[int] = set()
        self._thread = threading.local()

    def expect(self, task: int) -> None:
        """Mark a task whose result is a batch."""
        self._batches.add(task)

    def put(self, arrival: Arrival, block: bool = True, timeout: float | None = None) -> None:
        """Pin and queue a result, as `queue.SimpleQueue`; an error of pinning takes the batch's place."""
        if arrival.number in self._batches:
            self._batches.discard(arrival.number)
            if arrival.error is None:
                arrival = self._pinned(arrival)
        super().put(arrival)

    def _pinned(self, arrival: Arrival) -> Arrival:
        try:
            if not hasattr(self._thread, "ready"):
                one_thread()  # a copy must not use the CPUs of training
                torch.accelerator.set_device_index(self._device)
                self._thread.ready = True
            return arrival._replace(value=pinned(arrival.value), pinned=True)
        except Exception as error:
            return Arrival(arrival.number, error=error, final=True)


def pinned(batch: Any) -> Any:
    """Return a batch whose tensors are in pinned memory."""
    return pin_memory(batch)  # type: ignore[no-untyped-call]


def one_thread() -> None:
    """Limit PyTorch to one thread in this thread, and keep the number for later threads.

    Later threads inherit the number that a thread sets, and some results depend on it in their low bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
