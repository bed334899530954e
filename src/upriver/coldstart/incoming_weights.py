"""Hold a program's weights while they arrive, and let its stages wait for them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from upriver.coldstart.fetch.strategy import RequestPlan
from upriver.coldstart.format.manifest import Manifest, StoredTensor
from upriver.coldstart.format.readahead import Readahead
from upriver.coldstart.load_handle import Handle, under_way
from upriver.coldstart.model.assignment import memories
from upriver.errors import Cancelled, ProgramError, UpriverError
from upriver.program.graph.executor import BeforeStage, Program
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import Stored
from upriver.text import error_text
from upriver.types import require_type

PIECE_BYTES = 16 << 20
"""Bytes that are hashed between two checks whether the program still exists."""


class ArrivingFile(Stored):
    """Weights file that is still arriving, whole or only its wanted tensors.

    Each tensor has the same offset in memory as in the file. So it has the alignment of a file that was read,
    which decides low bits. If the program computes on another device, its tensors lie there. The file is then
    kept in main memory only if it is wanted whole.

    Args:
        wanted: Keys of the wanted tensors; None for all of them and so for the file.
    """

    def __init__(self, manifest: Manifest, wanted: Collection[str] | None, device: torch.device) -> None:
        self._whole, self._here = wanted is None, device.type == "cpu"
        chosen = [each for each in manifest.tensors if wanted is None or each.name in wanted]
        held = chosen if self._whole or self._here else []
        end = manifest.nbytes if self._whole else max((tensor.stop for tensor in held), default=0)
        self._data = torch.empty(end, dtype=torch.uint8, device="cpu")
        if self._whole:
            self._write_between(manifest)
        self._held = {tensor.name: self._view(tensor) for tensor in held}
        self.tensors = self._held
        if not self._here:
            self.tensors = {
                each.name: torch.empty(each.shape, dtype=DTYPES[each.dtype], device=device) for each in chosen
            }
        self.nbytes = end if self._whole else sum(tensor.stop - tensor.start for tensor in chosen)
        self.complete: Callable[[], object] = lambda: None
        """Wait until all weights have arrived; raise if they will not arrive."""

    def targets(self, key: str) -> tuple[torch.Tensor, ...]:
        """Return all memory to which a tensor is to be written."""
        here = (self._held[key],) if key in self._held else ()
        return here if self._here else (self.tensors[key], *here)

    def encode(self) -> memoryview:
        """Return the file after it has arrived.

        Raises:
            UpriverError: If it does not arrive, or only a part was wanted.
        """
        if not self._whole:
            raise ProgramError(
                "the weights file is not complete: only the weights of some stages were requested"
            )
        self.complete()
        return self._data.numpy().data

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file in pieces, without waiting for bytes."""
        data = self._data.numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def _write_between(self, manifest: Manifest) -> None:
        """Write the bytes between tensors: the header, and padding zeros."""
        data, end = self._data.numpy().data, 0
        for tensor in manifest.tensors:
            data[end : tensor.start] = bytes(tensor.start - end)
            end = tensor.stop
        data[end:] = bytes(len(data) - end)
        head = manifest.head()
        data[: len(head)] = head

    def _view(self, tensor: StoredTensor) -> torch.Tensor:
        return self._data[tensor.start : tensor.stop].view(DTYPES[tensor.dtype]).view(tensor.shape)


class Arriving(Handle[Program]):
    """Handle of a program whose weights arrive or have arrived."""

    def __init__(
        self,
        plan: RequestPlan,
        file: ArrivingFile,
        *,
        ahead: Readahead | None,
        stop: int,
        digest: str | None,
        steps: Mapping[str, float],
    ) -> None:
        """Prepare the load without sending a request."""
        tensors = plan.source.tensors
        super().__init__(
            plan,
            memories(tensors, [file.targets(placed.name) for placed in tensors]),
            ahead=ahead,
            steps=steps,
            also=int(digest is not None),  # the check of the file's digest
        )
        self._stop, self._digest = stop, digest
        self._file: ArrivingFile | None = file
        self._numbers = {placed.name: number for number, placed in enumerate(tensors)}
        file.complete = self._arrivals.wait_for_all

    def before_stage(self, position: int, keys: Collection[str]) -> None:
        """Wait for a stage's weights, see :data:`~upriver.program.graph.executor.BeforeStage`.

        Raises:
            ProgramError: If the stage was not asked for, or the file is not the one that the graph names.
            UpriverError: If a weight does not arrive.
        """
        _check_wanted(position, self._stop)
        numbers = sorted(self._numbers[key] for key in keys)
        for number in numbers:
            self.touched.setdefault(number, time.monotonic())
        self._arrivals.wait(numbers, self._stream.hurry)

    def _all_here(self, last: int | None) -> None:
        if self._digest is None:
            self._finish(last)
            return
        if last is not None:
            self._arrivals.filled(last)
        self._begin_beside("digest", self._check_digest, self._file)

    def _check_digest(self, file: ArrivingFile) -> None:
        """Compare the whole file with its digest, at a lower priority than the stages."""
        try:
            step_back()
            folded = hashlib.sha256()
            for piece in file.pieces():
                if self._owner() is None:
                    raise Cancelled("the program is no longer in use")
                folded.update(piece)
            if folded.hexdigest() != self._digest:
                raise ProgramError(
                    f"{self._source.path} has digest {folded.hexdigest()}, the graph names {self._digest}"
                )
        except Exception as raised:
            told = f"{self._source.path} was not compared with its digest: {error_text(raised)}"
            error = raised if isinstance(raised, UpriverError) else UpriverError(told)
            self.failed(error.with_traceback(None))
        else:
            self._finish(len(self._source.tensors))

    def _release(self, program: Program) -> None:
        # A whole program is as any other. A partial one keeps its bound on stages.
        program.before_stage = None if self._digest is not None else _only_before(self._stop)

    def _let_go(self) -> None:
        self._file = None
        super()._let_go()


def arriving(program: Program) -> Arriving | None:
    """Return the handle of a program from :func:`upriver.coldstart.open`; None after its load.

    Raises:
        ConfigError: If the argument is no program.
    """
    require_type("program", program, Program, "from coldstart.open()")
    found = under_way.get(program)
    return found if isinstance(found, Arriving) else None


def _only_before(stop: int) -> BeforeStage:
    return lambda position, keys: _check_wanted(position, stop)


def _check_wanted(position: int, stop: int) -> None:
    if position > stop:
        raise ProgramError(f"stage {position} was not requested; stages [0, {stop}) of this program were")


def step_back() -> None:
    """Lower this thread's priority to the minimum. Only Linux has a priority for each thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
