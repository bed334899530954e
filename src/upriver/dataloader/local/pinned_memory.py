"""Batches in pinned memory, as PyTorch's loader gives them.

Those that somebody has made whole are copied by the thread that gets them, those that are joined of parts by
the thread that joins them, which is the one that trains.
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
    """Whether batches are pinned; warns as PyTorch's loader does where they were to be and are not.

    Args:
        loader: With PyTorch's arguments.
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


class Pinned(SimpleQueue[Arrival]):
    """Arrivals, of which those that are batches are pinned by the thread that puts them.

    For the accelerator that is current where this is constructed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.accelerator.current_device_index()
        self._batches: set[int] = set()
        self._thread = threading.local()

    def expect(self, task: int) -> None:
        """What comes of this task is a batch."""
        self._batches.add(task)

    def put(self, arrival: Arrival, block: bool = True, timeout: float | None = None) -> None:
        """See `queue.SimpleQueue`; an error of pinning takes the batch's place."""
        if arrival.number in self._batches:
            self._batches.discard(arrival.number)
            if arrival.error is None:
                arrival = self._pinned(arrival)
        super().put(arrival)

    def _pinned(self, arrival: Arrival) -> Arrival:
        try:
            if not hasattr(self._thread, "ready"):
                one_thread()  # a copy must not take the CPUs that training has
                torch.accelerator.set_device_index(self._device)
                self._thread.ready = True
            return arrival._replace(value=pinned(arrival.value), pinned=True)
        except Exception as error:
            return Arrival(arrival.number, error=error, final=True)


def pinned(batch: Any) -> Any:
    """A batch whose tensors are in pinned memory."""
    return pin_memory(batch)  # type: ignore[no-untyped-call]


def one_thread() -> None:
    """Let PyTorch compute by one thread in this thread, and by as many as before in those to come.

    What a thread sets is also what later threads begin with, and some results depend on it in their low bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
